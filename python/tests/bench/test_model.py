"""The race on the CPU between a model's operations, and the former place of the package."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from flashcore_bench import _bench  # noqa: E402
from flashcore_bench._model import Layer, Load, rows  # noqa: E402


def test_a_race_between_a_models_operations():
    stated = ((1, 2, 2, 40, 40, 16), "f32", "none", None)
    found = [row for row, others in rows(_bench.CpuSession(2), [stated], 0.0) if others >= 0]
    assert [row["impl"] for row in found] == ["flashcore", f"torch {torch.__version__} SDPA"]
    for row in found:
        assert row["suite"] == "model" and row["device"].endswith("2 threads") and row["problem"]["seq_q"] == 40
        assert row["us_median"] > 0 and row["looked_at"] > 3 and row["err_max"] < 1e-5
    layer = Layer(stated)
    layer.time(0)
    layer.forget(0)
    assert layer.output(0) == b"" and Load().of_others() >= 0
    assert {problem[1] for problem in _bench.model_problems()} == {"f32", "bf16", "f16"}


def test_the_former_module_names_the_package():
    """In a process of its own, since a module that raises is not kept."""
    run = subprocess.run([sys.executable, "-m", "flashcore_attn.bench"], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "`pip install flashcore-bench`, then `python -m flashcore_bench`" in run.stderr
    with pytest.raises(ImportError, match="package flashcore-bench"):
        import flashcore_attn.bench  # noqa: F401
