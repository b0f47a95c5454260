"""Runs the examples of the documents as they stand."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import flashcore_attn

ROOT = Path(__file__).resolve().parents[2]


def examples():
    features = (
        "shapes",
        "windows",
        "softcap",
        "alibi",
        "sinks",
        "bias",
        "lengths",
        "scores-and-masks",
        "blocks",
        "fp8",
    )
    guide = [f"docs/src/guide/{name}.md" for name in ("python", *features, "caches", "cookbook")]
    guide.append("docs/src/tutorial/pytorch.md")
    for path in ("README.md", "python/README.md", *guide):
        file = ROOT / path
        # The tests that are shipped beside the wheel run without the documents.
        blocks = re.findall(r"^```python\n(.*?)^```$", file.read_text(), re.M | re.S) if file.exists() else []
        yield from (pytest.param(block, id=f"{path}-{i}") for i, block in enumerate(blocks))


@pytest.mark.parametrize("code", list(examples()))
def test_examples_run(code, capsys):
    if "import torch" in code and importlib.util.find_spec("torch") is None:
        pytest.skip("no torch")
    flashcore_attn.compat.reset_stats()
    exec(compile(code, "example", "exec"), {})
    if "compat.stats()" in code:
        told = capsys.readouterr().out
        assert "'flashcore': 1" in told and "'fallback': 0" in told, told
