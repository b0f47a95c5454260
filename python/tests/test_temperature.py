"""A factor on the scores of each head, before the cap, with gradients."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import every_kind
from test_features import close, close_lse, distance, per_batch

import flashcore_attn

FACTORS = [0.5, 2.0, 0.0, 1.25]


def factors():
    return np.asarray(FACTORS)[:, None, None]


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_temperature(tensors, dtype, softcap):
    q, k, v = tensors.three(37, 53, 4, 2, 32, dtype)
    far = distance(37, 53)
    slopes, sink = np.asarray([0.125, 0.25, 0.0, 0.5]), np.asarray([0.5, -1.0, 0.0, 2.0])

    def score(s):
        s = s * factors()
        s = softcap * np.tanh(s / softcap) if softcap else s
        return s - slopes[:, None, None] * abs(far)

    out, lse, _ = flashcore_attn.flash_attn_func(
        q, k, v, causal=True, softcap=softcap, return_attn_probs=True,
        alibi_slopes=tensors.of(slopes, "float32"), learnable_sink=tensors.of(sink, "float32"),
        temperature=tensors.of(np.asarray(FACTORS), "float32"),
    )  # fmt: skip
    theirs, their_lse = per_batch(tensors, q, k, v, seen=far >= 0, score=score, sink=sink)
    close(tensors, out, theirs, dtype)
    close_lse(tensors, lse, their_lse)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_gradients(softcap):
    """Calls that autograd records have the factors in a score program: those of plain calls must be equal."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, rows, heads, 16, generator=generator) for rows, heads in ((9, 4), (13, 2), (13, 2)))
    inputs = [x.requires_grad_() for x in (q, k, v, torch.tensor([0.5, 2.0, 0.25, 1.25]))]
    d_out = torch.randn(2, 9, 4, 16, generator=generator)

    def expected(q, k, v, temperature):
        q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
        s = q @ k.transpose(2, 3) / 4 * temperature.double()[:, None, None]
        s = softcap * torch.tanh(s / softcap) if softcap else s
        return (s.softmax(-1) @ v).transpose(1, 2).float()

    def found(q, k, v, temperature):
        return flashcore_attn.flash_attn_func(q, k, v, softcap=softcap, temperature=temperature)

    ours, theirs = found(*inputs), expected(*inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for mine, other in zip(torch.autograd.grad(ours, inputs, d_out), torch.autograd.grad(theirs, inputs, d_out)):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(found(*inputs), ours, atol=1e-6, rtol=1e-6)


@every_kind
def test_wrong_temperatures(tensors):
    q, k, v = tensors.three(5, 7, 4, 2, 16, "float32")
    call = flashcore_attn.flash_attn_func
    with pytest.raises(
        flashcore_attn.ArgumentError, match=r"the shape of temperature.*\(4,\), a factor per query head"
    ):
        call(q, k, v, temperature=tensors.of(np.ones(2), "float32"))
    if tensors.kind != "cuda":
        for value, told in ((-1.0, "-1"), (np.inf, "inf"), (np.nan, "NaN")):
            wrong = tensors.of(np.asarray([1.0, value, 1.0, 1.0]), "float32")
            with pytest.raises(
                flashcore_attn.ArgumentError, match=rf"'{told}' for temperature\[1\]: expected a finite"
            ):
                call(q, k, v, temperature=wrong)
