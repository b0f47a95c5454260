"""Gradients of PyTorch tensors, against PyTorch's autograd of attention in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import flashcore_attn  # noqa: E402
from flashcore_attn import (  # noqa: E402
    UnsupportedError,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    flex_attention,
    scaled_dot_product_attention,
)
from flashcore_attn._torch import _autograd  # noqa: E402
from flashcore_attn.engines import flash_attn_2  # noqa: E402

cuda = pytest.param("cuda", marks=pytest.mark.needs_cuda)
devices = pytest.mark.parametrize("device", ["cpu", cuda])

# A gradient may be off by twice what attention in its own type is off, and by so much of its norm.
RELATIVE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def draw(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def exact(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0, scale=None, slopes=None, sink=None, bias=None):
    """O and the LSE of ``(batch, sequence, heads, dim)``, in the type of q; dead rows are 0."""
    rows, keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    distance = torch.arange(keys, device=q.device)[None] - torch.arange(rows, device=q.device)[:, None] - (keys - rows)
    if slopes is not None:
        s = s - slopes.to(s.dtype)[:, None, None] * distance.abs()
    if bias is not None:
        s = s + bias
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden = hidden | ((distance < -left) if left >= 0 else hidden) | ((distance > right) if right >= 0 else hidden)
    s = s.masked_fill(hidden, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink.to(s.dtype)[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(s.masked_fill(dead, 0.0), -1).masked_fill(dead[..., 0], -torch.inf)
    weights = torch.softmax(s.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)[..., :keys]
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def gradients(function, tensors, d_out, d_lse=None):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = function(*leaves)
    if d_lse is None:
        return torch.autograd.grad(out, leaves, d_out)
    return torch.autograd.grad([out, lse], leaves, [d_out, d_lse.to(lse.dtype)])


def agree(ours, tensors, function, d_out, d_lse=None):
    """Compares with float64, and allows twice the error of the function in the type of the tensors."""
    wide = [None if x is None else x.double() for x in (d_out, d_lse)]
    truth = gradients(function, [x.double() for x in tensors], *wide)
    same = gradients(function, tensors, d_out, d_lse)
    for i, (mine, right, other, x) in enumerate(zip(ours, truth, same, tensors)):
        assert mine.shape == x.shape and mine.dtype == x.dtype and mine.device == x.device
        error = (mine.double() - right).norm()
        allowed = 2 * (other.double() - right).norm() + RELATIVE[d_out.dtype] * right.norm()
        assert error <= allowed, f"tensor {i}: {error} of {right.norm()}, allowed {allowed}"
        assert right.norm() > 0


CASES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "causal window": {"causal": True, "window": (4, -1)},
    "softcap": {"softcap": 1.5},
    "scale": {"scale": -0.3},
}


@devices
@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(2, 9, 9, 4, 2, 16, 16), (1, 21, 13, 3, 1, 24, 8), (2, 5, 18, 6, 6, 8, 40)])
def test_gradients_are_those_of_attention(device, dtype, case, shape):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("kernels compute gradients in 16 bits")
    batch, rows, keys, heads, heads_k, dim, dim_v = shape
    tensors = [
        draw(batch, n, h, d, seed=seed, dtype=dtype, device=device)
        for seed, (n, h, d) in enumerate([(rows, heads, dim), (keys, heads_k, dim), (keys, heads_k, dim_v)])
    ]
    d_out = draw(batch, rows, heads, dim_v, seed=7, dtype=dtype, device=device)
    options = CASES[case]
    named = {"window" if name == "window_size" else name: value for name, value in options.items()}

    def ours(q, k, v):
        called = {("softmax_scale" if n == "scale" else "window_size" if n == "window" else n): x
                  for n, x in options.items()}  # fmt: skip
        out, lse, _ = flash_attn_func(q, k, v, return_attn_probs=True, deterministic=deterministic, **called)
        return out, lse

    # Rows without keys have an infinite LSE, whose gradient has no effect.
    for d_lse, deterministic in ((None, True), (draw(batch, heads, rows, seed=8, device=device), False), (None, False)):
        found = gradients(ours, tensors, d_out, d_lse)
        agree(found, tensors, lambda *x: exact(*x, **named), d_out, d_lse)
        if deterministic:
            assert all(torch.equal(x, y) for x, y in zip(found, gradients(ours, tensors, d_out, d_lse)))


class _Watched:
    """Eager calls, whose recorded calls state whether they are deterministic."""

    def __init__(self, eager, asked):
        self.eager, self.asked = eager, asked

    def __getattr__(self, name):
        return getattr(self.eager, name)

    def recorded(self, *given):
        found = self.eager.recorded(*given)
        if found is not None:
            self.asked.append(given[-1])
        return found


def test_gradients_are_deterministic_where_that_is_asked_for(monkeypatch):
    asked, compute = [], _autograd.compute
    # `compute` is called with all its arguments by the operator.
    monkeypatch.setattr(_autograd, "compute", lambda *given: (asked.append(given[7]), compute(*given))[1])
    if _autograd._calls.eager is not None:
        monkeypatch.setattr(_autograd._calls, "eager", _Watched(_autograd._calls.eager, asked))
    q = torch.randn(1, 6, 2, 8, requires_grad=True)
    packed, starts = torch.randn(6, 2, 8, requires_grad=True), torch.tensor([0, 2, 6], dtype=torch.int32)
    for options in ({}, {"deterministic": True}):
        flash_attn_func(q, q, q, **options).sum().backward()
        flash_attn_varlen_func(packed, packed, packed, starts, starts, **options).sum().backward()
        torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)(q, q, q, **options).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        flash_attn_func(q, q, q).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [False] * 3 + [True] * 4
    with pytest.raises(flashcore_attn.ArgumentError, match="deterministic"):
        flash_attn_func(q, q, q, deterministic="yes")


@devices
@pytest.mark.parametrize("dtype", RELATIVE, ids=str)
def test_slopes_sinks_and_biases_have_gradients(device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("kernels compute gradients in 16 bits")
    q, k = draw(2, 7, 4, 16, dtype=dtype, device=device), draw(2, 9, 2, 16, seed=1, dtype=dtype, device=device)
    v = draw(2, 9, 2, 8, seed=2, dtype=dtype, device=device)
    slopes, sink = draw(4, seed=3, device=device).abs(), draw(4, seed=4, device=device)
    d_out, d_lse = draw(2, 7, 4, 8, seed=5, dtype=dtype, device=device), draw(2, 4, 7, seed=6, device=device)

    def flash(q, k, v, slopes, sink):
        return flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, learnable_sink=sink, return_lse=True)

    tensors = [q, k, v, slopes, sink]
    right = lambda q, k, v, slopes, sink: exact(q, k, v, causal=True, slopes=slopes, sink=sink)  # noqa: E731
    agree(gradients(flash, tensors, d_out, d_lse), tensors, right, d_out, d_lse)

    for shape in [(2, 4, 7, 9), (1, 4, 1, 9), (7, 9), (2, 1, 1, 9)]:
        bias = draw(*shape, seed=9, dtype=dtype, device=device)

        def biased(q, k, v, bias):
            heads = (x.transpose(1, 2) for x in (q, k, v))
            return scaled_dot_product_attention(*heads, attn_mask=bias, enable_gqa=True).transpose(1, 2), None

        tensors = [q, k, v, bias]
        agree(gradients(biased, tensors, d_out), tensors, lambda q, k, v, b: exact(q, k, v, bias=b), d_out)
    # A bias that repeats along heads, as a view.
    bias = draw(1, 1, 7, 9, seed=9, dtype=dtype, device=device)
    expanded = lambda q, k, v, b: biased(q, k, v, b.expand(2, 4, 7, 9))  # noqa: E731
    if dtype == torch.float32:
        agree(gradients(expanded, [q, k, v, bias], d_out), [q, k, v, bias],
              lambda q, k, v, b: exact(q, k, v, bias=b), d_out)  # fmt: skip


@devices
def test_programs_have_gradients(device):
    """Programs whose tables are read at positions, which every device differentiates."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = (draw(2, 2, 6, 8, seed=seed, dtype=dtype, device=device) for seed in range(3))
    table, d_out = draw(2, 6, seed=3, device=device), draw(2, 2, 6, 8, seed=4, dtype=dtype, device=device)
    d_lse = draw(2, 2, 6, seed=5, device=device)

    def flex(q, k, v, table):
        score = lambda s, b, h, i, j: torch.tanh(s) * 2 + table[h, j]  # noqa: E731
        return flex_attention(q, k, v, score, lambda b, h, i, j: i >= j, return_lse=True)

    def right(q, k, v, table):
        s = torch.tanh(q @ k.mT / 8**0.5) * 2 + table[:, None]
        s = s.masked_fill(torch.ones(6, 6, device=device).triu(1).bool(), -torch.inf)
        return (s.softmax(-1) @ v.to(s.dtype)).to(v.dtype), s.logsumexp(-1)

    agree(gradients(flex, [q, k, v, table], d_out, d_lse), [q, k, v, table], right, d_out, d_lse)


def test_programs_and_captured_tensors_have_gradients():
    q, k, v = (draw(2, 2, 6, 8, seed=seed) for seed in range(3))
    table, d_out = draw(2, 11, seed=3), draw(2, 2, 6, 8, seed=4)
    d_lse = draw(2, 2, 6, seed=5)

    def flex(q, k, v, table):
        score = lambda s, b, h, i, j: torch.tanh(s) * 2 + table[h, i - j + 5]  # noqa: E731
        return flex_attention(q, k, v, score, lambda b, h, i, j: i >= j, return_lse=True)

    def right(q, k, v, table):
        at = torch.arange(6)[:, None] - torch.arange(6) + 5
        s = torch.tanh(q @ k.mT / 8**0.5) * 2 + table[:, at]
        s = s.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        return s.softmax(-1) @ v, s.logsumexp(-1)

    agree(gradients(flex, [q, k, v, table], d_out, d_lse), [q, k, v, table], right, d_out, d_lse)

    def rounded(q, k, v):  # to which a conversion to integers passes nothing on, as in PyTorch
        score = lambda s, b, h, i, j: s + (s * 4).to(torch.int32).to(torch.float32) / 4  # noqa: E731
        return flex_attention(q, k, v, score, return_lse=True)

    def of_rounded(q, k, v):
        s = q @ k.mT / 8**0.5
        s = s + (s.detach() * 4).to(torch.int32) / 4
        return s.softmax(-1) @ v, s.logsumexp(-1)

    agree(gradients(rounded, [q, k, v], d_out), [q, k, v], of_rounded, d_out)


@devices
def test_packed_sequences(device):
    dtype = torch.float16 if device == "cuda" else torch.float32
    lengths_q, lengths_k = [3, 0, 6], [5, 2, 4]
    starts = [
        torch.tensor([0, *torch.tensor(n).cumsum(0)], dtype=torch.int32, device=device) for n in (lengths_q, lengths_k)
    ]
    tensors = [draw(n, h, 16, seed=h + n, dtype=dtype, device=device) for n, h in ((9, 4), (11, 2), (11, 2))]
    d_out, d_lse = draw(9, 4, 16, seed=3, dtype=dtype, device=device), draw(4, 9, seed=4, device=device)

    def ours(q, k, v):
        return flash_attn_varlen_func(q, k, v, *starts, 6, 5, causal=True, return_lse=True)

    def right(q, k, v):
        parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
        made = [exact(*(x[None] for x in three), causal=True) for three in parts]
        return torch.cat([out[0] for out, _ in made]), torch.cat([lse[0] for _, lse in made], 1)

    agree(gradients(ours, tensors, d_out, d_lse), tensors, right, d_out, d_lse)


def test_rows_of_no_sequence_have_no_gradient():
    q, k, v = (draw(2, 6, 2, 8, seed=seed).requires_grad_() for seed in range(3))
    used = torch.tensor([2, 6], dtype=torch.int32)
    out = flash_attn_varlen_func(q, k, v, seqused_q=used, seqused_k=used)
    out.backward(torch.full_like(out, 1.0).masked_fill(out == 0, torch.nan))
    for x in (q, k, v):
        assert torch.equal(x.grad[0, 2:], torch.zeros(4, 2, 8)) and x.grad[0, :2].abs().max() > 0
        assert x.grad[1].isfinite().all()


def test_packed_tensors_get_their_gradients_in_one_tensor():
    qkv = draw(2, 5, 3, 4, 8)
    d_out = draw(2, 5, 4, 8, seed=1)
    packed = qkv.clone().requires_grad_()
    flash_attn_qkvpacked_func(packed, causal=True).backward(d_out)
    parts = gradients(lambda *x: exact(*x, causal=True), [qkv[:, :, i] for i in range(3)], d_out)
    torch.testing.assert_close(packed.grad, torch.stack(parts, 2), atol=1e-5, rtol=1e-5)
    q, kv = qkv[:, :, 0].clone().requires_grad_(), qkv[:, :, 1:].clone().requires_grad_()
    flash_attn_kvpacked_func(q, kv, causal=True).backward(d_out)
    torch.testing.assert_close(kv.grad, packed.grad[:, :, 1:])


@devices
def test_gradients_of_the_output_with_any_strides(device):
    dtype = torch.float16 if device == "cuda" else torch.float32
    tensors = [draw(2, 6, 2, 8, seed=seed, dtype=dtype, device=device) for seed in range(3)]

    def ours(*x):
        return flash_attn_func(*x, causal=True), None

    base = draw(8, 2, 6, 2, seed=5, dtype=dtype, device=device)
    one = torch.ones((), dtype=dtype, device=device)
    for d_out in (
        one.expand(2, 6, 2, 8),  # as `sum().backward()` makes it
        base.permute(1, 2, 3, 0),  # whose last dimension is not contiguous
        base[..., :1].permute(1, 2, 3, 0).expand(2, 6, 2, 8),
        draw(2, 2, 6, 8, dtype=dtype, device=device).transpose(1, 2),
        draw(2, 6, 2, 16, dtype=dtype, device=device)[..., 3:11],
        torch._neg_view(draw(2, 6, 2, 8, dtype=dtype, device=device)),
    ):
        found, dense = gradients(ours, tensors, d_out), gradients(ours, tensors, d_out.clone().contiguous())
        # On a GPU, an address that is no multiple of 16 bytes leads to another family, which rounds
        # differently.
        near = torch.equal if device == "cpu" else partial(torch.allclose, rtol=1e-2, atol=5e-3)
        assert all(near(x, y) for x, y in zip(found, dense))


def test_nan_stays_in_its_rows():
    tensors = [draw(1, 6, 2, 8, seed=seed) for seed in range(3)]
    d_out = draw(1, 6, 2, 8, seed=4)
    d_out[0, 3, 1] = torch.nan
    dq, dk, dv = gradients(lambda *x: (flash_attn_func(*x, causal=True), None), tensors, d_out)
    assert dq[0, 3, 1].isnan().all() and dk[0, :4, 1].isnan().all() and dv[0, :4, 1].isnan().all()
    for x, rows in ((dq, [0, 1, 2, 4, 5]), (dk, [4, 5]), (dv, [4, 5])):
        assert x[0, rows].isfinite().all() and x[0, :, 0].isfinite().all()


def test_a_log_sum_exp_that_is_not_the_forwards_is_taken_as_it_is():
    """The weights are exp(s - LSE): another value scales them, and what is not finite stays with its row."""
    q, k, v, d_out = (draw(1, 6, 2, 8, seed=seed) for seed in range(4))
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)

    def backward(lse):
        grads = [torch.empty_like(x) for x in (q, k, v)]
        flash_attn_2._flash_attn_backward(d_out, q, k, v, out, lse, *grads, 0.0, None, True, deterministic=True)
        return grads

    right = backward(lse)
    for mine, other in zip(backward(lse + math.log(2)), right):
        torch.testing.assert_close(mine, other / 2, atol=1e-6, rtol=1e-5)
    for value in (torch.nan, torch.inf, -torch.inf):
        changed = lse.clone()
        changed[0, 1, 3] = value
        dq, dk, dv = backward(changed)
        for mine, other, rows in ((dq, right[0], [0, 1, 2, 4, 5]), (dk, right[1], [4, 5]), (dv, right[2], [4, 5])):
            assert torch.equal(mine[:, rows], other[:, rows]) and torch.equal(mine[:, :, 0], other[:, :, 0])
        if value == torch.inf:
            assert torch.equal(dq[0, 3, 1], torch.zeros(8)) and all(x.isfinite().all() for x in (dk, dv))


def test_nothing_of_the_forward_pass_is_overwritten():
    q, k, v = (draw(2, 6, 2, 8, seed=seed).requires_grad_() for seed in range(3))
    sink, slopes = (draw(2, seed=seed).requires_grad_() for seed in (4, 5))
    used = torch.tensor([2, 6], dtype=torch.int32)
    d_out, d_lse = draw(2, 6, 2, 8, seed=6), draw(2, 2, 6, seed=7)
    out, lse = flash_attn_varlen_func(
        q, k, v, seqused_q=used, seqused_k=used, learnable_sink=sink, alibi_slopes=slopes, causal=True, return_lse=True
    )
    kept = (q, k, v, sink, slopes, used, d_out, d_lse, out, lse)
    copies = [x.detach().clone() for x in kept]
    for _ in range(2):
        torch.autograd.grad([out, lse], [q, k, v, sink, slopes], [d_out, d_lse], retain_graph=True)
    assert all(torch.equal(x, copy) for x, copy in zip(kept, copies))


def test_what_has_no_gradient_is_refused_where_it_requires_one():
    q = draw(4, 2, 8).requires_grad_()
    starts, lengths = torch.tensor([0.0, 4.0], requires_grad=True), torch.tensor([0, 4])
    with pytest.raises(flashcore_attn.DTypeError, match=r"'torch.float32' for the dtype of cu_seqlens_q"):
        flash_attn_varlen_func(q, q, q, starts, lengths)
    for rows in (starts, starts[1:]):  # neither a list of blocks nor a length
        with pytest.raises(flashcore_attn.DTypeError, match=r"'torch.float32' for the dtype of cache_seqlens"):
            flash_attn_with_kvcache(q.detach()[None], q.detach()[None], q.detach()[None], cache_seqlens=rows)
    factor = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(UnsupportedError, match="descale_q requires grad, and descale factors have no gradients"):
        flash_attn_func(q[None], q[None], q[None], q_descale=factor)
    with pytest.raises(UnsupportedError, match="there is no backward pass of this function"):
        flash_attn_with_kvcache(
            q.detach()[None], q.detach()[None], q.detach()[None], q[None, :1], q[None, :1], cache_seqlens=3
        )
    with pytest.raises(UnsupportedError, match="keys in pages have no gradients"):
        pages = q.detach()[None]
        table = torch.zeros(1, 1, dtype=torch.int32)
        flash_attn_with_kvcache(q[None], pages, pages, cache_seqlens=4, page_table=table)


def test_calls_without_elements_have_zero_gradients():
    for rows, keys in ((0, 4), (3, 0)):
        q, k, v = (draw(1, n, 2, 8).requires_grad_() for n in (rows, keys, keys))
        flash_attn_func(q, k, v).sum().backward()
        assert all(torch.equal(x.grad, torch.zeros_like(x)) for x in (q, k, v))


@pytest.mark.parametrize("empty", [0, 1, 2], ids=["batch", "heads", "rows"])
def test_masks_of_calls_without_rows_have_zero_gradients(empty):
    shape = [2, 3, 4, 5]
    shape[empty] = 0
    q, k = (torch.randn(*shape[:2], n, 8, requires_grad=True) for n in shape[2:])
    for extents in (shape, [1, 1, 1, 5]):
        mask = torch.randn(extents, requires_grad=True)
        out = scaled_dot_product_attention(q, k, k, mask)
        (found,) = torch.autograd.grad(out.sum(), mask)
        assert torch.equal(found, torch.zeros(extents))


def test_gradients_of_several_results_at_once():
    q, k, v = (draw(1, 3, 2, 8, seed=seed).requires_grad_() for seed in range(3))
    several = torch.stack([torch.ones(1, 3, 2, 8), draw(1, 3, 2, 8, seed=4)])
    with pytest.raises(UnsupportedError, match="d_out is a tensor without memory.*torch.func.jacrev"):
        torch.autograd.grad(flash_attn_func(q, k, v), q, several, is_grads_batched=True)
    _, pull = torch.func.vjp(lambda q: flash_attn_func(q, k.detach(), v.detach()), q.detach())
    for found, one in zip(torch.vmap(pull)(several)[0], several):
        torch.testing.assert_close(found, torch.autograd.grad(flash_attn_func(q, k, v), q, one)[0])


def test_gradients_of_an_expanded_tensor_without_rows():
    q, k = torch.randn(1, 4, 2, 8).expand(3, 4, 2, 8), torch.randn(1, 0, 2, 8).expand(3, 0, 2, 8)
    for given in ((q, k, k), (k, q, q)):
        given = [x.detach().requires_grad_() for x in given]
        for x, found in zip(given, torch.autograd.grad(flash_attn_func(*given).sum(), given)):
            assert torch.equal(found, torch.zeros_like(x))


@pytest.mark.parametrize("options", [{}, {"causal": True, "softcap": 2.0}, {"window_size": (2, 1)}], ids=str)
def test_gradcheck(options):
    # Central differences in float32: an error of 1e-3 is a hundred roundings of the loss over the step.
    tensors = [(draw(1, 4, 2, 4, seed=seed) / 2).requires_grad_() for seed in range(3)]
    call = lambda *x: flash_attn_func(*x, return_lse=True, **options)  # noqa: E731
    assert torch.autograd.gradcheck(call, tensors, eps=1e-2, atol=1e-3, rtol=1e-2)


def test_a_second_derivative_is_refused():
    q = draw(1, 4, 2, 8).requires_grad_()
    (first,) = torch.autograd.grad(flash_attn_func(q, q, q).square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="no double backward"):
        first.sum().backward()


def test_checkpoints_autocast_and_transforms():
    from torch.utils.checkpoint import checkpoint

    tensors = [draw(1, 2, 6, 8, seed=seed) for seed in range(3)]
    d_out = draw(1, 2, 6, 8, seed=3)
    call = lambda *x: scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
    plain = gradients(lambda *x: (call(*x), None), tensors, d_out)
    for use_reentrant in (False, True):
        leaves = [x.clone().requires_grad_() for x in tensors]
        checkpoint(call, *leaves, use_reentrant=use_reentrant).backward(d_out)
        assert all(torch.equal(x, leaf.grad) for x, leaf in zip(plain, leaves))
    out, pull = torch.func.vjp(call, *tensors)
    assert torch.equal(out, call(*tensors)) or torch.allclose(out, call(*tensors), atol=1e-6)
    assert all(torch.equal(x, y) for x, y in zip(plain, pull(d_out)))
    batched = [torch.stack([x, x + 0.5]) for x in tensors]
    of_each = torch.func.vmap(torch.func.grad(lambda q, k, v: call(q, k, v).square().sum()))(*batched)
    for i in range(2):
        mine = torch.func.grad(lambda q, k, v: call(q, k, v).square().sum())(*(x[i] for x in batched))
        torch.testing.assert_close(of_each[i], mine)
    leaves = [x.clone().requires_grad_() for x in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        out = call(*leaves)
    assert out.dtype == torch.bfloat16
    out.float().backward(d_out)
    for leaf, right in zip(leaves, plain):
        assert leaf.grad.dtype == torch.float32
        torch.testing.assert_close(leaf.grad, right, atol=5e-2, rtol=5e-2)


def test_operators_pass_pytorchs_check():
    q, k, v = (draw(1, 4, 2, 8, seed=seed).requires_grad_() for seed in range(3))
    slopes, sink = draw(2).requires_grad_(), draw(2, seed=4).requires_grad_()
    plain = (q, k, v, 2, False, -1, 0, None, 0.0, True)
    torch.library.opcheck(torch.ops.flashcore_attn.attention.default, plain)
    features = (None, None, None, None, None, 0, 0, 0, sink, "s - t0[h] * float(abs(q - k))", "", [], [], [slopes])
    tail = (None, None, None, [0, 0, 0])
    torch.library.opcheck(torch.ops.flashcore_attn.attention_with.default, (*plain, *features, *tail))
    three = [x.detach() for x in (q, k, v)]
    out, lse = flash_attn_func(*three, causal=True, return_lse=True)
    none = (None, None, None, None, None, 0, 0, 0, None, "", "", [], [], [], False, 0, True)
    call = (torch.ones_like(out), None, *three, out, lse, *plain[3:9], *none)
    torch.library.opcheck(torch.ops.flashcore_attn.attention_backward.default, call)


def test_a_direct_call_names_what_does_not_fit():
    q = draw(1, 4, 2, 8)
    out, lse = flash_attn_func(q, q, q, return_lse=True)
    none = (None, None, None, None, None, 0, 0, 0, None, "", "", [], [], [], False, 0, True)
    call = lambda d_out, lse: torch.ops.flashcore_attn.attention_backward(  # noqa: E731
        d_out, None, q, q, q, out, lse, 2, False, -1, -1, None, 0.0, *none
    )
    assert len(call(out, lse)) == 3
    for d_out, of, words in (
        (out[:, :3], lse, "shape of d_out"),
        (out.half(), lse, "dtype of d_out"),
        (out, lse[:, :1], "shape of lse"),
        (out, lse.double(), "dtype of lse"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            call(d_out, of)


def test_gradients_on_another_device_are_named():
    q = draw(1, 4, 2, 8)
    out, lse = flash_attn_func(q, q, q, return_lse=True)
    saved, terms = _autograd.Saved(q, q, q, out, lse), (False, -1, -1, None, 0.0)
    call = lambda d_out, d_lse, saved: _autograd.compute(d_out, d_lse, saved, 2, terms, None)  # noqa: E731
    assert len(call(out, lse, saved)) == 3
    for name, given in (
        ("d_out", (out.to("meta"), None, saved)),
        ("d_lse", (out, lse.to("meta"), saved)),
        ("lse", (out, None, saved._replace(lse=lse.to("meta")))),
    ):
        with pytest.raises(flashcore_attn.ArgumentError, match=f"^{name} is on meta, q on cpu"):
            call(*given)


def test_compiled_gradients_are_those_of_eager_calls():
    tensors = [draw(1, 6, 2, 8, seed=seed) for seed in range(3)]
    sink, d_out = draw(2, seed=4), draw(1, 6, 2, 8, seed=3)

    def call(q, k, v, sink):
        return flash_attn_func(q, k, v, causal=True, softcap=3.0, learnable_sink=sink), None

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    tensors.append(sink)
    for mine, right in zip(gradients(compiled, tensors, d_out), gradients(call, tensors, d_out)):
        assert torch.equal(mine, right)


@pytest.mark.parametrize("told", ["an integer", "a tensor", "no maximum"])
def test_lengths_compile_nothing(told):
    """A hundred steps with other lengths, of other numbers of sequences, have a graph for given sizes and two for
    any: the second one for any number of sequences."""
    from torch._dynamo.backends.common import aot_autograd

    graphs = 0

    def count(graph, inputs):
        nonlocal graphs
        graphs += 1
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count)

    @torch.compile(fullgraph=True, backend=backend)
    def step(qkv, starts, longest):
        return flash_attn_varlen_func(*qkv.unbind(1), starts, starts, longest, longest, causal=True).square().sum()

    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        rows, parts = torch.randint(20, 40, (), generator=generator), torch.randint(2, 6, (), generator=generator)
        cuts = torch.randperm(int(rows) - 1, generator=generator)[:parts].sort().values + 1
        starts = torch.tensor([0, *cuts, rows], dtype=torch.int32)
        qkv = draw(int(rows), 3, 2, 8, seed=int(rows)).requires_grad_()
        longest = {"an integer": int(starts.diff().max()), "a tensor": starts.diff().max()}.get(told)
        step(qkv, starts, longest).backward()
        assert qkv.grad.isfinite().all()
    assert graphs <= 6  # each with a forward and a backward graph
    torch.testing.assert_close(step(qkv, starts, longest), step(qkv, starts, None))


def test_nothing_of_the_size_of_the_scores_is_kept():
    from torch.utils._python_dispatch import TorchDispatchMode

    rows = 512
    largest = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(result):
                largest = max(largest, x.numel() if isinstance(x, torch.Tensor) else 0)
            return result

    q, k, v = (draw(1, rows, 1, 8, seed=seed).requires_grad_() for seed in range(3))
    bias = draw(rows, seed=4).requires_grad_()
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    with Largest():
        scaled_dot_product_attention(*heads, attn_mask=bias[None]).sum().backward()
    assert bias.grad is not None and rows * 8 <= largest < rows * rows / 8


def test_compat_serves_calls_with_gradients():
    flashcore_attn.compat.reset_stats()
    tensors = [draw(1, 2, 6, 8, seed=seed) for seed in range(3)]
    d_out = draw(1, 2, 6, 8, seed=3)
    call = lambda *x: (F.scaled_dot_product_attention(*x, is_causal=True), None)  # noqa: E731
    right = gradients(call, tensors, d_out)
    with flashcore_attn.compat.enabled():
        ours = gradients(call, tensors, d_out)
    assert flashcore_attn.compat.stats() == {"calls": 1, "flashcore": 1, "fallback": 0, "reasons": {}}
    for mine, other in zip(ours, right):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
