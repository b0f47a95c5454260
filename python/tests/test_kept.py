"""The package reads the user's saved plans, and a damaged file causes a warning and changes no result."""

from __future__ import annotations

import os
import subprocess
import sys

PROGRAM = """
import flashcore_attn, numpy
q = numpy.random.default_rng(0).standard_normal((1, 32, 2, 16), dtype="float32")
out = flashcore_attn.flash_attn_func(q, q, q, causal=True)
assert numpy.allclose(out[:, 0], q[:, 0], rtol=1e-5, atol=1e-6)
"""


def test_a_damaged_file_of_plans_is_a_warning(tmp_path):
    def said(contents: str) -> str:
        (tmp_path / "plans.jsonl").write_text(contents)
        env = {**os.environ, "FLASHCORE_CONFIG_DIR": str(tmp_path)}
        child = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
        assert child.returncode == 0, child.stderr
        return child.stderr

    assert "plans.jsonl" not in said("")
    told = said('{"processor": "x"\n')
    assert "line 1 of" in told and "plans.jsonl is ignored" in told
