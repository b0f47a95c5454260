"""Launches of PTX on arrays, without PyTorch and Triton."""

from __future__ import annotations

import ctypes
import os

import flashcore_check
import numpy as np
import pytest
from flashcore_check import _session
from flashcore_check._launch import number

SCALE = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 x, .param .u64 out, .param .f32 factor)
{
    .reg .f32 %f<4>; .reg .b32 %r<4>; .reg .b64 %d<6>;
    ld.param.u64 %d1, [x];
    ld.param.u64 %d2, [out];
    ld.param.f32 %f1, [factor];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %d3, %r1, 4;
    add.s64 %d4, %d1, %d3;
    add.s64 %d5, %d2, %d3;
    ld.global.f32 %f2, [%d4];
    mul.f32 %f3, %f1, %f2;
    st.global.f32 [%d5], %f3;
    ret;
}
"""


pytestmark = pytest.mark.usefixtures("session")


def test_results_are_stored_in_arrays() -> None:
    x, out = np.arange(96, dtype=np.float32), np.zeros(96, np.float32)
    # A view: its offset and the rest of its memory are kept.
    launch = flashcore_check.launch(SCALE, "scale", (1,), 32, [x[32:64], out[64:], np.float32(1.5)])
    assert launch.verdict == "passed" and launch.grid == (1, 1, 1)
    assert (out[64:] == 1.5 * x[32:64]).all() and not out[:64].any()


def test_hazards_and_unknown_instructions() -> None:
    x = np.arange(32, dtype=np.float32)
    with pytest.raises(flashcore_check.HazardError, match="out_of_bounds"):
        flashcore_check.launch(SCALE, "scale", (1,), (64,), [x, x.copy(), ctypes.c_float(2)])
    strange = SCALE.replace("mul.f32 ", "frobnicate.f32 ")
    with pytest.raises(flashcore_check.IncompleteError, match="frobnicate"):
        flashcore_check.launch(strange, "scale", (1,), (32,), [x, x, ctypes.c_float(2)])
    with pytest.raises(flashcore_check.IncompleteError, match="gives 1 arguments"):
        flashcore_check.launch(SCALE, "scale", (1,), (32,), [x])


def test_wrong_arguments_are_named() -> None:
    x = np.zeros(32, np.float32)
    for args, grid, words in (
        ([x, x, 2.0], (1,), "arg2 is the Python number 2.0"),
        ([x, "x", np.float32(2)], (1,), "argument arg1 is str; expected a tensor or an address"),
        ([x, 4096, np.float32(2)], (1,), "arg1 is the Python number 4096"),
        ([x, x, np.float32(2)], (0,), r"invalid value \(0,\) for grid: expected 1 to 3 positive numbers"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            flashcore_check.launch(SCALE, "scale", grid, (32,), args)


def test_bits_of_numbers() -> None:
    assert number("int32", -1) == {"u32": 2**32 - 1}
    assert number("uint64", 2**64 - 1) == {"u64": 2**64 - 1}
    assert number("float16", 1e9) == {"u16": 0x7C00}
    assert number("bfloat16", 1.00390625) == {"u16": 0x3F80}
    assert number("bfloat16", 1.01171875) == {"u16": 0x3F82}
    assert number("bfloat16", float("nan"))["u16"] & 0x7FC0 == 0x7FC0
    assert number("bool", True) == {"u8": 1}


def test_a_command_that_ended_starts_again(session: _session.Session) -> None:
    x = np.arange(32, dtype=np.float32)
    args = [x, np.zeros(32, np.float32), np.float32(2)]
    flashcore_check.launch(SCALE, "scale", (1,), (32,), args)
    child = session.emulator._child
    assert child is not None
    child.kill()
    child.wait()
    with pytest.raises(flashcore_check.CommandError, match="emulate` ended with exit code -9"):
        flashcore_check.launch(SCALE, "scale", (1,), (32,), args)
    assert flashcore_check.launch(SCALE, "scale", (1,), (32,), args).verdict == "passed"


def test_a_forked_process_has_its_own_command(session: _session.Session) -> None:
    x = np.arange(32, dtype=np.float32)

    def scaled() -> bool:
        out = np.zeros(32, np.float32)
        flashcore_check.launch(SCALE, "scale", (1,), (32,), [x, out, np.float32(2)])
        return bool((out == 2 * x).all())

    assert scaled()
    child = os.fork()
    if child == 0:
        try:
            right = scaled()
            session.emulator.close()
        except BaseException:
            right = False
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert scaled()
