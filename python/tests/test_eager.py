"""Eager calls of PyTorch's tensors, which Rust reads and makes: they give what the calls through Python code give, and
whatever is no such call is left to Python code.
"""

from __future__ import annotations

import itertools

import pytest

import flashcore_attn

torch = pytest.importorskip("torch")
from flashcore_attn import _torch  # noqa: E402

flash, varlen = flashcore_attn.flash_attn_func, flashcore_attn.flash_attn_varlen_func
sdpa = flashcore_attn.scaled_dot_product_attention
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)]

# Calls are read in Rust from PyTorch 2.10 on. Older versions take the Python path, which other tests cover.
pytestmark = pytest.mark.skipif(_torch.eager is None, reason="PyTorch before 2.10 does not describe tensors to Rust")


def make(device, *shape, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=draw).to(device, dtype)


def flash_calls(device):
    """Arguments of ``flash_attn_func`` that Rust makes."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v = (make(device, 2, rows, heads, 32, dtype=dtype, seed=rows) for rows, heads in ((5, 4), (9, 2), (9, 2)))
        slopes, sink = make(device, 4).abs(), make(device, 4, seed=3)
        for options in (
            {},
            {"causal": True, "return_lse": True},
            {"causal": True, "window_size": (3, 2), "return_attn_probs": True},
            {"window_size": (1, 0), "softcap": 5.0, "softmax_scale": 0.5},
            {"alibi_slopes": slopes, "learnable_sink": sink, "attention_chunk": 3, "return_lse": True},
            {"alibi_slopes": make(device, 2, 4, dtype=torch.float16)},
            {"attention_chunk": 2},
        ):
            yield (q, k, v), options
        yield (q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {"return_lse": True}
        yield (q, k, v[..., :16]), {"causal": True}
        yield (q[:, :, :2].expand(2, 5, 2, 32), k[:1].expand(2, 9, 2, 32), v), {}
    x = torch.nn.Parameter(make(device, 1, 4, 2, 16), requires_grad=False)
    yield (x, x, x), {}


def varlen_calls(device):
    lengths = lambda *values: torch.tensor(values, dtype=torch.int32, device=device)  # noqa: E731
    q, k = make(device, 11, 4, 32), make(device, 13, 2, 32)
    kv, starts_q, starts_k = make(device, 3, 9, 2, 32), lengths(0, 2, 7, 11), lengths(0, 6, 6, 13)
    yield (q, k, k, starts_q, starts_k, 5, 7), {"causal": True, "return_lse": True}
    yield (q, k, k, starts_q, starts_k), {"return_attn_probs": True, "softcap": 3.0}
    yield (q, kv, kv, starts_q, None, 5), {"seqused_k": lengths(3, 9, 0), "leftpad_k": lengths(1, 0, 0)}
    yield (
        (q, kv, kv, starts_q),
        {"learnable_sink": make(device, 4), "alibi_slopes": make(device, 4), "attention_chunk": 2},
    )
    yield (make(device, 3, 4, 4, 32), k, k, None, starts_k), {"window_size": (2, 0)}


def sdpa_calls(device):
    q, k = make(device, 2, 4, 5, 32, dtype=torch.float16), make(device, 2, 2, 7, 32, dtype=torch.float16)
    whole = k.repeat_interleave(2, 1)
    yield (q, whole, whole), {"is_causal": True}
    yield (q, k, k), {"enable_gqa": True, "scale": 0.25}
    for shape in itertools.product((1, 2), (1, 4), (1, 5), (1, 7)):
        yield (q, whole, whole, make(device, *shape) > 0), {}
        yield (q, whole, whole, make(device, *shape, dtype=torch.float16)), {}
    for mask in (
        make(device, 5, 7),
        make(device, 4, 5, 7).half(),
        make(device, 7, 5).mT,
        make(device, 1, 7).expand(5, 7),
    ):
        yield (q, whole, whole, mask), {"enable_gqa": True}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function, calls", [(flash, flash_calls), (varlen, varlen_calls), (sdpa, sdpa_calls)])
def test_calls_give_the_bits_that_python_code_gives(function, calls, device, monkeypatch):
    for arguments, options in calls(device):
        with monkeypatch.context() as patch:
            patch.setattr(_torch, "eager", None)
            expected = function(*arguments, **options)
        with monkeypatch.context() as patch:
            patch.setattr(_torch, "attend", None)  # Python code would fail
            made = function(*arguments, **options)
        for ours, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (made, expected))):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                assert torch.equal(ours, theirs)
                assert (ours.stride(), ours.dtype) == (theirs.stride(), theirs.dtype)


def left(device):
    """Calls that Rust leaves to Python code, which makes them or raises an error that names what is wrong."""
    q, wide = make(device, 1, 4, 2, 16), make(device, 1, 4, 2, 32)
    heads = make(device, 1, 2, 4, 16)
    starts = torch.tensor([0, 4], dtype=torch.int32, device=device)
    yield flash, (q, q, wide[..., ::2]), {}
    yield flash, (q, torch._neg_view(q), q), {}
    yield flash, (q.clone().requires_grad_(), q, q), {}
    yield flash, (q[:0], q[:0], q[:0]), {}
    yield flash, (q, q.half(), q), {}
    yield flash, (q, wide, wide), {}
    yield flash, (q[0], q, q), {}
    yield flash, (q.to("meta"), q, q), {}
    yield flash, (q.to_sparse(), q, q), {}
    yield flash, (q.int(), q.int(), q.int()), {}
    yield flash, (q.as_subclass(type("Own", (torch.Tensor,), {})), q, q), {}
    for options in (
        {"dropout_p": 0.5, "return_attn_probs": True}, {"dropout_p": 0}, {"dropout_p": 1.5},
        {"dropout_p": float("nan")}, {"softmax_scale": 1}, {"softmax_scale": float("nan")}, {"softcap": -1.0},
        {"softcap": 1e-60}, {"window_size": [1, 1]}, {"window_size": (1, None)}, {"window_size": (-2, 0)},
        {"window_size": (1, 2, 3)}, {"causal": 1}, {"return_lse": 1}, {"attention_chunk": -1}, {"attention_chunk": 1.0},
        {"alibi_slopes": make(device, 3)}, {"alibi_slopes": make(device, 2).double()}, {"alibi_slopes": starts},
        {"learnable_sink": make(device, 2).half()}, {"learnable_sink": make(device, 3)}, {"qv": q},
        {"learnable_sink": make(device, 4)[::2]}, {"q_descale": make(device, 1, 2)},
    ):  # fmt: skip
        yield flash, (q, q, q), options
    rows = q[0]
    yield varlen, (rows, rows, rows, starts, starts.long()), {}
    yield varlen, (rows, rows, rows, starts, starts[:1]), {}
    yield varlen, (rows, rows, rows, starts, starts, 2, 4.0), {}
    yield varlen, (rows, rows, rows, starts * 2, starts), {}
    yield varlen, (rows, rows, rows, starts // 2, starts), {}
    yield varlen, (q, q, q), {"seqused_q": starts[1:] // 2}
    yield varlen, (q, q, q), {"seqused_k": starts}
    yield varlen, (rows, rows, wide[0], starts, starts), {}
    yield sdpa, (heads, heads[:, :1], heads[:, :1]), {}
    yield sdpa, (heads, heads, heads, make(device, 4)), {}
    yield sdpa, (heads, heads, heads, make(device, 3, 4)), {}
    yield sdpa, (heads, heads, heads, make(device, 4, 4).double()), {}
    yield sdpa, (heads, heads, heads, make(device, 4, 4) > 0), {"is_causal": True}
    yield sdpa, (heads, heads, heads, make(device, 4, 4).requires_grad_()), {}
    yield sdpa, (heads[0], heads[0], heads[0]), {}
    yield sdpa, (heads, heads, heads.cpu().numpy()), {}


def outcome(function, arguments, options):
    torch.manual_seed(0)  # for dropout
    try:
        made = function(*arguments, **options)
    except Exception as error:
        return type(error), str(error)
    return [
        None if x is None else (x.shape, x.stride(), x.tolist()) for x in (made if isinstance(made, tuple) else (made,))
    ]


@pytest.mark.parametrize("device", DEVICES)
def test_other_calls_are_left_to_python_code(device, monkeypatch):
    for function, arguments, options in left(device):
        ours = outcome(function, arguments, options)
        with monkeypatch.context() as patch:
            patch.setattr(_torch, "eager", None)
            assert ours == outcome(function, arguments, options), options


class Watching(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def test_calls_that_pytorch_watches_are_left_to_python_code(monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    x = make("cpu", 1, 4, 2, 16)
    flash(x, x, x)  # loads the package's half for PyTorch
    called, attend = [], _torch.attend
    monkeypatch.setattr(_torch, "attend", lambda *arguments: called.append(1) or attend(*arguments))
    flash(x, x, x)
    assert not called
    for watched in (
        FlopCounterMode(display=False), torch.profiler.profile(), Watching(),
        torch.autograd.forward_ad.dual_level(),
    ):  # fmt: skip
        before = len(called)
        with watched:
            if isinstance(watched, torch.autograd.forward_ad.dual_level):
                with pytest.raises(flashcore_attn.UnsupportedError, match="forward-mode"):
                    flash(x, x, x)
            else:
                flash(x, x, x)
        assert len(called) == before + 1
    torch.vmap(flash)(x[None], x[None], x[None])
    assert len(called) == 5
    with torch.device("cpu"):  # the default device changes no call
        flash(x, x, x)
    assert len(called) == 5
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa(x, x, x).dtype == torch.bfloat16


def test_compat_counts_calls_that_rust_makes():
    x = make("cpu", 1, 2, 4, 16)
    flashcore_attn.compat.reset_stats()
    with flashcore_attn.compat.enabled():
        torch.nn.functional.scaled_dot_product_attention(x, x, x, make("cpu", 4, 4))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            torch.nn.functional.scaled_dot_product_attention(x, x, x)
    stats = flashcore_attn.compat.stats()
    assert (stats["flashcore"], stats["reasons"]) == (1, {"sdpa_kernel": 1})


def recorded_calls(device):
    """Calls that autograd records and Rust makes, and the tensors that require grad."""
    for arguments, options in flash_calls(device):
        extras = [options[name] for name in ("alibi_slopes", "learnable_sink") if name in options]
        yield flash, arguments, options, [*arguments, *extras]
        yield flash, arguments, {**options, "deterministic": True}, [arguments[1]]
        yield flash, arguments, options, extras or [arguments[0]]
    for arguments, options in varlen_calls(device):
        extras = [options[name] for name in ("alibi_slopes", "learnable_sink") if name in options]
        yield varlen, arguments, options, [*arguments[:3], *extras]
        yield varlen, arguments, options, extras or [arguments[0]]
    q, k = make(device, 2, 4, 5, 32, dtype=torch.float16), make(device, 2, 2, 7, 32, dtype=torch.float16)
    yield sdpa, (q, k, k[..., :16]), {"enable_gqa": True, "is_causal": True}, [q, k]
    yield sdpa, (q.transpose(1, 2).contiguous().transpose(1, 2), k, k), {"enable_gqa": True, "scale": 0.25}, [k]
    q, k = make(device, 2, 4, 5, 32), make(device, 2, 4, 7, 32)
    if device == "cuda":
        q, k = q.half(), k.half()
    for shape in ((5, 7), (1, 7), (1, 1), (4, 5, 7), (2, 1, 1, 7), (1, 4, 5, 1), (2, 4, 5, 7)):
        bias = make(device, *shape, dtype=q.dtype)
        yield sdpa, (q, k, k, bias), {}, [q, bias]
        yield sdpa, (q, k, k), {"attn_mask": bias.float(), "dropout_p": 0.25}, [k]
        yield sdpa, (q, k, k, bias > -1), {}, [q, k]
    bias = make(device, 1, 1, 5, 7, dtype=q.dtype).expand(2, 4, 5, 7)
    yield sdpa, (q, k, k), {"attn_mask": bias}, [q]
    yield sdpa, (q, k, k, None, 0.5, True), {}, [q, k]
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, k)]
    yield flash, rows, {"dropout_p": 0.3, "causal": True, "return_lse": True}, rows
    yield flash, rows, {"dropout_p": 0.3, "alibi_slopes": make(device, 4), "attention_chunk": 3}, rows[:1]
    starts = [torch.tensor([0, n // 2, n], dtype=torch.int32, device=device) for n in (10, 14)]
    packed = [x.flatten(0, 1) for x in rows]
    yield varlen, (*packed, *starts, 5, 7), {"dropout_p": 0.3}, packed


def with_gradients(function, arguments, options, wanted):
    """The results of a call, and gradients of what it is given."""
    leaves = {id(x): x.detach().requires_grad_() for x in wanted}
    given = [leaves.get(id(x), x) for x in arguments]
    named = {name: leaves.get(id(x), x) for name, x in options.items()}
    torch.manual_seed(0)  # for dropout
    made = function(*given, **named)
    made = [x for x in (made if isinstance(made, tuple) else (made,)) if x is not None]
    d_made = [torch.ones_like(x) * (i + 1) for i, x in enumerate(made)]
    return made, list(torch.autograd.grad(made, list(leaves.values()), d_made))


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_calls_give_the_bits_that_python_code_gives(device, monkeypatch):
    for function, arguments, options, wanted in recorded_calls(device):
        with monkeypatch.context() as patch:
            patch.setattr(_torch, "eager", None)
            try:
                expected = with_gradients(function, arguments, options, wanted)
            except flashcore_attn.UnsupportedError:  # gradients that a GPU does not compute
                assert device == "cuda"
                continue
        with monkeypatch.context() as patch:
            patch.setattr(_torch, "attend", None)  # Python code would fail
            patch.setattr(_torch._autograd, "_computed", None)
            made = with_gradients(function, arguments, options, wanted)
        for ours, theirs in zip(made, expected):
            assert len(ours) == len(theirs)
            for x, y in zip(ours, theirs):
                assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
                # Sums of a Hopper GPU have no fixed order.
                assert torch.equal(x, y) if device == "cpu" else torch.allclose(x, y, 2e-2, 2e-2, True)


def test_dropout_draws_once_for_a_call():
    q = make("cpu", 1, 4, 2, 16)
    torch.manual_seed(1)
    flash(q.clone().requires_grad_(), q, q, 0.5)
    after = torch.rand(3)
    torch.manual_seed(1)
    _torch.draw_rng_state(q)
    assert torch.equal(after, torch.rand(3))


def packed_call():
    q, k = make("cpu", 6, 2, 16), make("cpu", 6, 2, 16, seed=1)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    return varlen, (q, k, k, starts, starts), {}


def batched_call():
    q, k = make("cpu", 1, 6, 2, 16), make("cpu", 1, 6, 2, 16, seed=1)
    return flash, (q, k, k), {"learnable_sink": make("cpu", 2)}


@pytest.mark.parametrize("call", [packed_call, batched_call])
def test_what_rust_does_not_read_in_a_backward_pass_python_code_computes(call, monkeypatch):
    function, arguments, options = call()
    x, sink = arguments[0], options.get("learnable_sink")
    _, (expected,) = with_gradients(function, arguments, options, [x])
    q = x.clone().requires_grad_()
    given = (q, *arguments[1:])
    computed, calls = _torch._autograd._computed, []
    monkeypatch.setattr(_torch._autograd, "_computed", lambda *given: calls.append(1) or computed(*given))

    def gradient(d_out):
        out = function(*given, **options)
        return torch.autograd.grad(out, q, d_out(out))[0]

    assert torch.equal(gradient(torch.ones_like), expected)
    # Of a sum, whose elements repeat.
    assert torch.equal(gradient(lambda out: torch.ones(()).expand(out.shape)), expected)
    assert not calls
    assert torch.equal(gradient(lambda out: torch._neg_view(-torch.ones_like(out))), expected)
    assert len(calls) == 1
    with torch.profiler.profile():
        out = function(*given, **options)
        assert torch.equal(torch.autograd.grad(out, q, torch.ones_like(out))[0], expected)
    assert len(calls) == 2
    # Hooks may return tensors of other strides.
    spread = lambda x: torch.stack([x, x], -1)[..., 0]  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, spread):
        assert torch.equal(gradient(torch.ones_like), expected)
    out = function(*given, **options)
    (first,) = torch.autograd.grad(out, q, torch.ones_like(out), create_graph=True)
    with pytest.raises(flashcore_attn.UnsupportedError, match="no double backward"):
        first.sum().backward()
    checkpoint = torch.utils.checkpoint.checkpoint
    made = checkpoint(lambda q: function(q, *arguments[1:], **options), q, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(made, q, torch.ones_like(made))[0], expected)
    out = function(*given, **options)
    with torch.no_grad():
        (q if sink is None else sink).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, q, torch.ones_like(out))
