"""The examples run, in one command each, and notice a wrong result."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).resolve().parents[2] / "examples"
if not FOLDER.exists():  # the tests that are shipped beside the wheel
    pytest.skip("the examples are not here", allow_module_level=True)


def loaded(name, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # which dataclasses look up
    spec.loader.exec_module(module)
    return module


SERVE = ("--device", "cpu", "--requests", 4, "--tokens", 5, "--pages", 12)


def test_the_serving_example_has_the_tokens_of_a_model_without_a_cache(monkeypatch, capsys):
    loaded("serve", monkeypatch, *SERVE).main()
    told = capsys.readouterr().out
    requests, _, tokens, steps, widest = map(int, re.findall(r"\d+", told.splitlines()[0]))
    # More requests than fit at once, and fewer steps than one request after the other would take.
    assert requests == 4 and 1 < widest < 4 and steps < tokens
    assert f"{tokens} of {tokens} tokens equal" in told and "new tokens/s on cpu" in told


def test_the_serving_example_notices_a_wrong_cache(monkeypatch):
    example = loaded("serve", monkeypatch, *SERVE)
    compute = example.flashcore_attn.flash_attn_with_kvcache

    def forgets(q, k_cache, v_cache, *arguments, **named):
        out = compute(q, k_cache, v_cache, *arguments, **named)
        v_cache[:, -1] = 0
        return out

    monkeypatch.setattr(example.flashcore_attn, "flash_attn_with_kvcache", forgets)
    with pytest.raises(SystemExit, match="tokens differ"):
        example.main()


def test_the_training_example_has_pytorchs_losses(monkeypatch, capsys, tmp_path):
    path, text = tmp_path / "curve.svg", tmp_path / "text"
    text.write_text("to be or not to be, that is the question; " * 20)
    named = ("--device", "cpu", "--steps", 4, "--batch", 2, "--length", 32, "--text", text, "--picture", path)
    loaded("train", monkeypatch, *named).main()
    told = capsys.readouterr().out
    first, last = map(float, re.search(r"FlashCore loss ([\d.]+) to ([\d.]+)", told).groups())
    assert last < first - 0.1
    assert "FlashCore computed 16 of 16 calls" in told
    assert float(re.search(r"differ by at most (\S+)", told)[1]) < 1e-4
    assert path.read_text().count("<polyline") == 2
