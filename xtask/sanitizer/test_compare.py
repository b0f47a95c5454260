"""Tests what the comparison reads: reports of compute-sanitizer, and the comments of a kernel."""

import compare

RACE = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Read access at wrong+0x210 in missing_barrier.cu:17
=========     and Write access at wrong+0x130 in missing_barrier.cu:15 [124 hazards]
=========     and Write access at wrong+0x150 in missing_barrier.cu:15 [4 hazards]
=========
{"ms": [0.5]}
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
BOUNDS = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at wrong(const float *)+0x70 in /kernels/global_out_of_bounds.cu:13
=========     by thread (4,0,0) in block (1,0,0)
=========     Access at 0x7f2a3bc00190 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f2a3bc00000 of size 400 bytes
=========     Host Frame: main in launch.cpp:99 [0x1234]
=========
========= Invalid __global__ read of size 4 bytes
=========     at wrong(const float *)+0x70 in /kernels/global_out_of_bounds.cu:13
=========     by thread (5,0,0) in block (1,0,0)
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" on CUDA API call to cuCtxSynchronize.
=========
========= Target application returned an error
========= ERROR SUMMARY: 3 errors
"""  # noqa: E501
CLEAN = """\
========= COMPUTE-SANITIZER
{"ms": [0.25]}
========= ERROR SUMMARY: 0 errors
"""


def test_both_lines_of_a_race_are_read() -> None:
    kind = "Error: Race reported between Read access"
    assert compare.findings(RACE) == [{"kind": kind, "lines": [15, 17], "count": 1}]


def test_equal_findings_are_counted_and_frames_of_the_host_left_out() -> None:
    assert compare.findings(BOUNDS) == [
        {"kind": "Invalid __global__ read", "lines": [13], "count": 2},
        {"kind": "Program hit CUDA_ERROR_LAUNCH_FAILED (error 719)", "lines": [], "count": 1},
    ]


def test_a_run_that_did_not_launch_is_no_clean_run() -> None:
    assert compare.findings(CLEAN) == []
    assert compare.outcome(CLEAN, 0, "memcheck") == "ended"
    assert compare.outcome(CLEAN.replace("COMPUTE-SANITIZER", ""), 0, "memcheck") == "not_run"
    assert compare.outcome("========= COMPUTE-SANITIZER\nLaunchError", 1, "memcheck") == "not_run"
    assert compare.outcome(RACE, None, "racecheck") == "no_end"


def test_comments_of_a_kernel_are_read() -> None:
    source = "// sm: 90a\n//! [launch]\n//! grid = [1]\nx = 1;  // hazard: race deadlock\ny = 2;\n"
    assert compare.target(source) == "90a"
    assert compare.launch_text(source, "wrong") == '[launch]\nentry = "wrong"\ngrid = [1]\n'
    kinds = [{"kind": "race", "line": 4}, {"kind": "deadlock", "line": 4}]
    assert compare.announced(source, "hazard") == kinds
