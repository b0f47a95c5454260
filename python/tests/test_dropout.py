"""Dropout: the mask, results and gradients by it, the state of its generator, and the functions that pass it on."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import TOLERANCE, every_kind

import flashcore_attn
from flashcore_attn import ArgumentError, compat, flash_attn_func, flash_attn_varlen_func


def weights_of(q, k, causal):
    """The softmax of ``(batch, heads, rows, keys)`` in float64, of arrays ``(batch, sequence, heads, dim)``."""
    q, k = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (q, k))
    k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    rows, keys = scores.shape[-2:]
    scores = np.where(np.tri(rows, keys, keys - rows, dtype=bool) | (not causal), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@every_kind
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_mask_is_that_of_the_result(tensors, dtype, causal):
    q, k, v = tensors.three(37, 83, 4, 2, 32, dtype)
    out, lse, mask = flash_attn_func(q, k, v, 0.25, causal=causal, return_attn_probs=True)
    without = flash_attn_func(q, k, v, causal=causal, return_attn_probs=True)[1]
    assert abs(tensors.array(lse) - tensors.array(without)).max() < 1e-5  # on a GPU, another kernel computes it
    mask = tensors.array(mask)
    assert mask.shape == (q.shape[0], 4, 37, 83) and set(np.unique(mask)) == {-1.0, 1.0}
    assert abs((mask > 0).mean() - 0.75) < 5 * (0.25 * 0.75 / mask.size) ** 0.5
    kept = weights_of(tensors.array(q), tensors.array(k), causal) * (mask > 0) / 0.75
    values = np.repeat(tensors.array(v).swapaxes(1, 2), 2, axis=1)
    expected = (kept @ values).swapaxes(1, 2)
    assert abs(tensors.array(out) - expected).max() < 2 * TOLERANCE[dtype]


@every_kind
def test_probabilities_of_0_and_1(tensors):
    q, k, v = tensors.three(5, 7, 4, 2, 16, "float32")
    assert tensors.bits(flash_attn_func(q, k, v, 0.0)) == tensors.bits(flash_attn_func(q, k, v))
    out, lse, mask = flash_attn_func(q, k, v, 1.0, return_attn_probs=True)
    assert not tensors.array(out).any() and (tensors.array(mask) == -1).all() and np.isfinite(tensors.array(lse)).all()
    for wrong in (-0.1, 1.5, float("nan"), "0.5", None):
        with pytest.raises(ArgumentError, match=f"'{wrong}' for dropout_p: expected a number from 0 to 1"):
            flash_attn_func(q, k, v, wrong)


torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from flashcore_attn import _dropout, _features, _torch  # noqa: E402

cuda = pytest.param("cuda", marks=pytest.mark.needs_cuda)
devices = pytest.mark.parametrize("device", ["cpu", cuda])


def drawn(rows=29, keys=45, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, rows, 4, 16), (2, keys, 2, 16), (2, keys, 2, 16))
    return [torch.randn(x, generator=generator).to(device, dtype).requires_grad_() for x in shapes]


def eager(q, k, v, mask, p, causal=False):
    """Attention of ``(batch, sequence, heads, dim)`` with a mask of 1 and -1."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[3] ** -0.5
    if causal:
        rows, keys = s.shape[2:]
        s = s.masked_fill(~torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1) * (mask > 0) / (1 - p), v)


@devices
@pytest.mark.parametrize("causal", [False, True])
def test_gradients(device, causal):
    dtype, tolerance = (torch.float16, 2e-2) if device == "cuda" else (torch.float32, 2e-5)
    inputs = drawn(device=device, dtype=dtype)
    out, _, mask = flash_attn_func(*inputs, 0.3, causal=causal, return_attn_probs=True)
    d_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    expected = eager(*(x.float() for x in inputs), mask, 0.3, causal)
    found = torch.autograd.grad(out, inputs, d_out)
    theirs = torch.autograd.grad(expected, inputs, d_out.float())
    for ours, other in zip((out, *found), (expected, *theirs)):
        torch.testing.assert_close(ours.float(), other.float(), atol=tolerance, rtol=tolerance)


@devices
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_repeat_the_mask(device, reentrant):
    inputs = drawn(device=device, dtype=torch.float16 if device == "cuda" else torch.float32)

    def layer(q, k, v):
        return flash_attn_func(q, k, v, 0.5) * 2

    found = []
    for call in (layer, lambda *x: checkpoint(layer, *x, use_reentrant=reentrant)):
        torch.manual_seed(7)
        out = call(*inputs)
        for x in inputs:
            x.grad = None
        out.square().sum().backward()
        found.append([out.detach(), *(x.grad.clone() for x in inputs)])
    for plain, again in zip(*found):
        assert torch.equal(plain, again)


def test_the_state_is_that_of_the_default_generator():
    inputs = drawn()
    with torch.no_grad():
        torch.manual_seed(1)
        first, second = flash_attn_func(*inputs, 0.5), flash_attn_func(*inputs, 0.5)
        torch.manual_seed(1)
        again = flash_attn_func(*inputs, 0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)


def test_packed_sequences_have_the_mask_of_batch_entries():
    q, k, v = (x.detach() for x in drawn())
    p = _dropout.Stated(0.5, torch.tensor([1, -2, 3, 4], dtype=torch.int32))
    starts = [torch.tensor([0, rows, 2 * rows], dtype=torch.int32) for rows in (29, 45)]
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    ours, _, mask = flash_attn_varlen_func(*packed, *starts, 29, 45, p, causal=True, return_attn_probs=True)
    theirs, _, dense = flash_attn_func(q, k, v, p, causal=True, return_attn_probs=True)
    assert torch.equal(ours.view_as(theirs), theirs) and torch.equal(mask, dense)
    kv = torch.stack((k, v), 2)
    assert torch.equal(flashcore_attn.flash_attn_kvpacked_func(q, kv, p, causal=True), theirs)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_draw_each_time(dynamic):
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)
    def step(q, k, v):
        out, _, mask = flash_attn_func(q, k, v, 0.4, return_attn_probs=True)
        return out, mask

    inputs = drawn()
    masks = []
    for _ in range(2):
        out, mask = step(*inputs)
        expected = eager(*inputs, mask, 0.4)
        for ours, other in zip(
            (out, *torch.autograd.grad(out.square().sum(), inputs)),
            (expected, *torch.autograd.grad(expected.square().sum(), inputs)),
        ):
            torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
        masks.append(mask)
    assert not torch.equal(*masks)


def test_the_operators_are_those_that_pytorch_expects():
    q, k, v = drawn(5, 7)
    state = torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    features = _features.Features(dropout_p=0.25, rng_state=state)
    arguments = (q, k, v, 2, False, -1, -1, None, 0.0, True, *_torch._flat(features))
    torch.library.opcheck(torch.ops.flashcore_attn.attention_with.default, arguments)
    for wrong, words in ((state.long(), "dtype of rng_state"), (state[:2], r"shape of rng_state: expected \(4,\)")):
        with pytest.raises(flashcore_attn.FlashCoreError, match=words):
            torch.ops.flashcore_attn.attention_with(*arguments[:-2], wrong)


def test_functional_derivatives():
    q, k, v = (x.detach() for x in drawn(5, 7))
    p = _dropout.Stated(0.5, torch.tensor([1, 2, 3, 4], dtype=torch.int32))
    out, pull = torch.func.vjp(lambda q: flash_attn_func(q, k, v, p), q)
    leaf = q.clone().requires_grad_()
    expected = torch.autograd.grad(flash_attn_func(leaf, k, v, p), leaf, torch.ones_like(out))
    torch.testing.assert_close(pull(torch.ones_like(out))[0], expected[0])


@devices
def test_compat_serves_it(device, fresh_counts):
    q, k, v = (x.detach().transpose(1, 2).repeat_interleave(n, 1) for x, n in zip(drawn(device=device), (1, 2, 2)))
    with compat.enabled():
        torch.manual_seed(2)
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(2)
    assert torch.equal(out, flashcore_attn.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert compat.stats()["fallback"] == 0
    assert not torch.equal(out, flashcore_attn.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("name", ["Bert", "GPT2"])
def test_models_with_dropout_train_through_compat(name, fresh_counts):
    transformers = pytest.importorskip("transformers")
    if name == "Bert":
        config = transformers.BertConfig(
            hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=96, vocab_size=101,
            attention_probs_dropout_prob=0.1,
        )  # fmt: skip
        kind = transformers.BertForMaskedLM
    else:
        config = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, vocab_size=101, attn_pdrop=0.1)
        kind = transformers.GPT2LMHeadModel
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(3, 100, (3, 23), generator=torch.Generator().manual_seed(1))
    losses = []
    with compat.enabled():
        for _ in range(12):
            loss = model(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    stats = compat.stats()
    assert stats["flashcore"] == 24 and stats["fallback"] == 0, stats
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.needs_cuda
def test_graphs_advance_the_mask():
    q, k, v = (x.detach().half() for x in drawn(device="cuda"))
    flash_attn_func(q, k, v, 0.5)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_attn_func(q, k, v, 0.5)
    found = []
    for _ in range(2):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(*found)
