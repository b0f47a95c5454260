"""The plugin on suites with Triton kernels, without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton")
KERNELS = Path(__file__).with_name("kernels.py")

SUITE = """
import contextlib
import flashcore_check
import pytest
import torch
import triton
from kernels import *
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = flashcore_check.device


def test_add():
    assert DEVICE == "cuda" and torch.cuda.is_available()
    x, y = torch.randn(1000, device=DEVICE), torch.randn(1000, device=DEVICE)
    assert x.is_cuda and x.device == torch.device("cuda", 0)
    torch.testing.assert_close(add(x, y), x + y)


def test_strides_and_offsets():
    x = torch.randn(8, 40, device=DEVICE)[2:, 3:]
    out = torch.zeros(6, 50, device=DEVICE)
    copy_kernel[(6,)](x, out, 6, 37, x.stride(0), out.stride(0), BLOCK=64)
    torch.testing.assert_close(out[:, :37], x)
    assert not out[:, 37:].any()


@pytest.mark.parametrize("n", [1024, 1000])
def test_autotuner_heuristics_and_scalars(n):
    x = torch.randn(n, device=DEVICE)
    out = torch.empty_like(x)
    tuned_scale_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, out, n, 2.5, 1, 1 << 20)
    torch.testing.assert_close(out, x * 2.5 + 2**20)


def test_table_of_addresses():
    parts = [torch.randn(40, device=DEVICE) for _ in range(3)]
    table = torch.tensor([part.data_ptr() for part in parts], device=DEVICE)
    out = torch.empty(3, 40, device=DEVICE)
    gather_kernel[(3,)](table, out, 40, BLOCK=64)
    torch.testing.assert_close(out, torch.stack(parts))
    assert table.tolist() == [part.data_ptr() for part in parts]


@pytest.mark.parametrize("context", [contextlib.nullcontext(), torch.device("cuda")])
def test_moves(context):
    with context:
        x = torch.zeros(8)
        assert x.to(x.device) is x and x.to("cuda") is x and x.to(device="cuda") is x and x.cuda() is x
        assert x.to("cpu") is not x and x.to(device="cpu") is not x and x.cpu() is not x


def test_tensor_descriptors():
    a = torch.randn(64, 64, device=DEVICE, dtype=torch.float16)
    b = torch.randn(64, 64, device=DEVICE, dtype=torch.float16)
    c = torch.empty(64, 64, device=DEVICE, dtype=torch.float16)
    blocks = [TensorDescriptor.from_tensor(t, [64, 64] if t is b else [64, 64]) for t in (a, b, c)]
    product_kernel[(1, 1)](*blocks, 64, M=64, N=64, BLOCK_K=64)
    torch.testing.assert_close(c, (a.float() @ b.float()).half(), atol=2e-2, rtol=2e-2)


def test_autograd_runs_kernels():
    class Add(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            return add(x, y)

        @staticmethod
        def backward(ctx, grad):
            assert grad.is_cuda
            # The gradient of a sum has one element in memory.
            return add(grad.contiguous(), torch.zeros(grad.shape, device="cuda")), None

    x = torch.randn(100, device=DEVICE, requires_grad=True)
    Add.apply(x, torch.ones(100, device=DEVICE)).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


def test_compiled():
    def scores(x, y):
        return torch.softmax(torch.sin(x) * y, -1).sum()

    x, y = torch.randn(20, 70, device=DEVICE, requires_grad=True), torch.randn(20, 70, device=DEVICE)
    expected, loss = scores(x, y), torch.compile(scores)(x, y)
    torch.testing.assert_close(loss, expected)
    grads = [torch.autograd.grad(of, x)[0] for of in (loss, expected)]
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-4)


def test_state_of_the_generator():
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    torch.cuda.manual_seed(7)
    state = generator.get_state().view(torch.int64)
    assert state.tolist() == [7, 0]
    state[1] += 4
    generator.set_state(state.view(torch.uint8))
    assert generator.get_state().view(torch.int64).tolist() == [7, 4]


def test_race():
    x, out = torch.randn(1000, device=DEVICE), torch.zeros(1, device=DEVICE)
    racy_sum_kernel[(8,)](x, out, 1000, BLOCK=128)


def test_uninitialised():
    x, out = torch.randn(100, device=DEVICE), torch.empty(1, device=DEVICE)
    racy_sum_kernel[(1,)](x, out, 100, BLOCK=128)


def test_out_of_bounds():
    x = torch.randn(100, device=DEVICE)
    add_kernel[(1,)](x, x, torch.empty(128, device=DEVICE), 128, BLOCK=128)


def test_swallowed():
    x, out = torch.randn(1000, device=DEVICE), torch.zeros(1, device=DEVICE)
    with pytest.raises(AssertionError):
        racy_sum_kernel[(8,)](x, out, 1000, BLOCK=128)


def test_own_assertion():
    x = torch.ones(10, device=DEVICE)
    assert add(x, x).sum() == 21


@flashcore_check.kernel(allow=["race"])
def test_allowed():
    x, out = torch.randn(1000, device=DEVICE), torch.zeros(1, device=DEVICE)
    racy_sum_kernel[(8,)](x, out, 1000, BLOCK=128)


def test_expected(check_launches):
    x, out = torch.randn(1000, device=DEVICE), torch.zeros(1, device=DEVICE)
    with pytest.raises(flashcore_check.HazardError):
        racy_sum_kernel[(8,)](x, out, 1000, BLOCK=128)
    assert check_launches[-1].hazards[0]["kind"] == "race"
    assert check_launches[-1].kernel == "racy_sum_kernel" and check_launches[-1].grid == (8, 1, 1)
"""
PASSED = 13
FAILED = {
    "test_race": "race at kernels.py:",
    "test_uninitialised": "uninitialised_read at kernels.py:",
    "test_out_of_bounds": "out_of_bounds at kernels.py:",
    "test_swallowed": "race at kernels.py:",
    "test_own_assertion": "assert",
}


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory):
    """A folder with the kernels. All suites share what Triton has compiled."""
    shutil.copy(KERNELS, pytester.path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))
    return pytester


def test_a_suite(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_suite=SUITE)
    result = suite.runpytest_subprocess("--flashcore")
    result.assert_outcomes(passed=PASSED, failed=len(FAILED))
    report = str(result.stdout)
    for test, words in FAILED.items():
        section = report.split(f"_ {test} _")[1].split("\n____")[0]
        assert words in section, f"{test}: {section}"
        # Frames of Triton say nothing about the fault.
        assert "jit.py" not in section
    assert "tl.load(out_ptr)  # the racing read" in report and "cure: " in report
    result.stdout.fnmatch_lines(["flashcore: 0.1.0*device of compute capability 9.0"])
    result.stdout.fnmatch_lines(
        ["* kernels, * launches: * passed *, 5 failed, 0 without a verdict; * hazards in 5 tests;*"]
    )


def test_launches_that_passed_are_not_checked_again(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_kept="""
        import torch
        from kernels import add

        def test_add():
            x = torch.arange(1000.0, device="cuda")
            assert (add(x, x) == 2 * x).all()
        """
    )
    for options, kept in (([], 0), ([], 1), (["--flashcore-recheck"], 0)):
        result = suite.runpytest_subprocess("--flashcore", *options)
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines([f"*1 launch: 1 passed ({kept} of them in an earlier check)*"])


def test_comments_allow_hazards(suite: pytest.Pytester) -> None:
    """A launch that a comment lets pass is checked again in the next run, when the comment may be gone."""
    test = """
        import torch
        from kernels import racy_sum_kernel

        def test_race():
            x, out = torch.ones(1000, device="cuda"), torch.zeros(1, device="cuda")
            racy_sum_kernel[(8,)](x, out, 1000, BLOCK=128)
        """
    suite.makepyfile(test_race=test)
    kernels = KERNELS.read_text()
    for comment, outcome, words in (
        ("flashcore: allow race because the sum is not used", {"passed": 1}, "1 passed (0 of them"),
        ("unused", {"failed": 1}, "race at kernels.py"),
        ("flashcore: allow races because", {"failed": 1}, "with one of the kinds race, "),
    ):
        (suite.path / "kernels.py").write_text(kernels.replace("+ tl.sum(x))", f"+ tl.sum(x))  # {comment}"))
        result = suite.runpytest_subprocess("--flashcore")
        result.assert_outcomes(**outcome)
        assert words in str(result.stdout)


def test_workers_of_xdist(suite: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    suite.makepyfile(test_suite=SUITE)
    result = suite.runpytest_subprocess("--flashcore", "-n2", "-k", "add or race or expected")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*3 kernels, 4 launches: 2 passed*"])


def test_only_marked_tests(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_marked="""
        import flashcore_check
        import pytest
        import torch
        from kernels import add

        GPU = torch.cuda.is_available()

        def test_plain():
            assert torch.cuda.is_available() == GPU
            assert torch.zeros(3).device.type == "cpu"

        @flashcore_check.kernel
        def test_marked():
            x = torch.ones(100, device="cuda")
            assert (add(x, x) == 2).all() and x.is_cuda

        def test_fixture(check_launches):
            x = torch.ones(100, device=flashcore_check.device)
            add(x, x)
            assert [launch.verdict for launch in check_launches] == ["passed"]

        @pytest.mark.flashcore(check="once")
        def test_misspelt():
            pass
        """
    )
    result = suite.runpytest_subprocess("--deselect", "test_marked.py::test_misspelt")
    result.assert_outcomes(passed=3)
    result = suite.runpytest_subprocess("-k", "misspelt")
    assert result.ret != 0
    assert "invalid argument 'check' of the marker flashcore: expected checks, seconds, allow" in (
        str(result.stdout) + str(result.stderr)
    )


def test_without_a_verdict(suite: pytest.Pytester) -> None:
    """A launch that takes longer than its time, and a table of addresses to memory that nothing knows."""
    suite.makepyfile(
        test_none="""
        import flashcore_check
        import torch
        from kernels import add_kernel, gather_kernel

        @flashcore_check.kernel(seconds=1e-6)
        def test_slow():
            x = torch.ones(100, device="cuda")
            add_kernel[(1,)](x, x, torch.empty_like(x), 100, BLOCK=128)

        @flashcore_check.kernel
        def test_stray():
            table = torch.tensor([0x7f00_0000_0000], device="cuda")
            gather_kernel[(1,)](table, torch.empty(40, device="cuda"), 40, BLOCK=64)
        """
    )
    result = suite.runpytest_subprocess()
    result.assert_outcomes(failed=2)
    report = str(result.stdout)
    assert "IncompleteError: incomplete after" in report and "HazardError: failed after" in report


def test_the_command_is_missing(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    suite.makepyfile("def test_nothing(): pass")
    monkeypatch.setenv("FLASHCORE_COMMAND", "/nonexistent/flashcore")
    result = suite.runpytest_subprocess("--flashcore")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "flashcore: `/nonexistent/flashcore version` failed" in str(result.stderr)


def test_versions_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from flashcore_check import _triton

    assert _triton.support(SimpleNamespace(__version__="3.9.0")) is None
    with pytest.raises(_triton.UnsupportedVersion, match="Triton 3.0.1 is not supported: expected 3.4 to 3.9"):
        _triton.support(SimpleNamespace(__version__="3.0.1"))
    assert "3.12.0 was not tried" in str(_triton.support(SimpleNamespace(__version__="3.12.0")))


def test_a_script(suite: pytest.Pytester) -> None:
    script = "import torch\nfrom kernels import *\nx = torch.ones(1000, device='cuda')\nprint(add(x, x).sum().item())\n"
    racy = script + "racy_sum_kernel[(8,)](x, torch.zeros(1, device='cuda'), 1000, BLOCK=128)\n"
    for text, code, words in ((script, 0, "2 launches passed"), (racy, 1, "1. race at ")):
        path = suite.makepyfile(script=text.replace("print(", "add(x, x); print("))
        result = suite.runpython_c(
            f"import sys; from flashcore_check.__main__ import main; sys.exit(main([{str(path)!r}]))"
        )
        assert result.ret == code, str(result.stderr)
        assert "2000.0" in str(result.stdout) and words in str(result.stderr)
