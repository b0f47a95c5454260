"""Flash-attn's private functions against autograd, and the modules that stand in flash-attn's place."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import flashcore_attn as fa  # noqa: E402
from flashcore_attn.engines import flash_attn, flash_attn_2, flash_attn_3  # noqa: E402

SCALE = 0.21
STARTS_Q, STARTS_K = [0, 5, 5, 12], [0, 9, 11, 20]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense():
    return [drawn(2, n, heads, 16, seed=n + heads).requires_grad_() for n, heads in ((7, 4), (11, 2), (11, 2))], None


def packed():
    starts = [torch.tensor(x, dtype=torch.int32) for x in (STARTS_Q, STARTS_K)]
    tensors = [drawn(x[-1], heads, 16, seed=heads) for x, heads in ((STARTS_Q, 4), (STARTS_K, 2), (STARTS_K, 2))]
    return [x.requires_grad_() for x in tensors], starts


def expected(tensors, starts, **options):
    """Result, log-sum-exp, a gradient of the result, and autograd's gradients of the tensors, in float64."""
    q, k, v = (x.detach().double().requires_grad_() for x in tensors)
    whole = starts is None
    pieces = [(q[i], k[i], v[i]) for i in range(len(q))] if whole else [
        (q[a:b], k[c:d], v[c:d]) for a, b, c, d in zip(STARTS_Q, STARTS_Q[1:], STARTS_K, STARTS_K[1:])
    ]  # fmt: skip
    outs, lses = zip(*(plain(*piece, **options) for piece in pieces))
    out, lse = (torch.stack(outs), torch.stack(lses)) if whole else (torch.cat(outs), torch.cat(lses, 1))
    d_out = drawn(*out.shape, seed=9)
    return out, lse, d_out, torch.autograd.grad(out, (q, k, v), d_out.double())


def plain(q, k, v, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """Attention of one sequence ``(rows, heads, dim)``."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    apart = torch.arange(q.shape[0])[:, None] + k.shape[0] - q.shape[0] - torch.arange(k.shape[0])
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * apart.abs()
    left, right = window[0], 0 if causal else window[1]
    seen = ((left < 0) | (apart <= left)) & ((right < 0) | (-apart <= right))
    lse = torch.logsumexp(scores.masked_fill(~seen, -torch.inf), -1)
    weights = torch.exp(scores.masked_fill(~seen, -torch.inf) - lse[..., None])
    return torch.einsum("hqk,khd->qhd", weights, v), lse


def close(ours, theirs):
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.detach().double(), theirs.detach(), rtol=1e-4, atol=1e-5)


CASES = [
    {}, {"causal": True}, {"window": (4, 2)}, {"softcap": 3.0, "causal": True},
    {"slopes": torch.tensor([0.1, 0.3, 0.5, 0.2]), "causal": True},
]  # fmt: skip


@pytest.mark.parametrize("of", [dense, packed])
@pytest.mark.parametrize("options", CASES)
def test_the_functions_of_flash_attn_2_equal_autograd(of, options):
    tensors, starts = of()
    out, lse, d_out, grads = expected(tensors, starts, **options)
    left, right = options.get("window", (-1, -1))
    lengths = () if starts is None else (*starts, 9, 9)
    score = (0.0, SCALE, options.get("causal", False), left, right, options.get("softcap", 0.0), options.get("slopes"))
    suffix = "" if starts is None else "varlen_"
    made = getattr(flash_attn_2, f"_flash_attn_{suffix}forward")(*tensors, *lengths, *score, False)
    assert len(made) == 4 and made[2].numel() == 0 and made[3].shape == (2,) and made[3].dtype == torch.int64
    assert not made[0].requires_grad  # as of an operator that is called in an autograd.Function
    close(made[0], out)
    close(made[1], lse)
    q, k, v = tensors
    memory = drawn(*q.shape[:-2], 8, 16)  # packed gradients, as of one projection: strided views
    dq, dk = memory.clone()[..., :4, :], memory.new_empty(*k.shape[:-1], 32)[..., ::2]
    names = {"dq": dq, "dk": dk, "dv": torch.empty_like(v)}
    rest = {"deterministic": True, "rng_state": made[3]}
    backward = getattr(flash_attn_2, f"_flash_attn_{suffix}backward")
    softmax_d = backward(d_out, q, k, v, made[0], made[1], *names.values(), *lengths, *score, **rest)
    assert softmax_d.numel() == 0
    for ours, theirs in zip(names.values(), grads):
        close(ours, theirs)


@pytest.mark.parametrize("of", [dense, packed])
def test_the_functions_of_flash_attn_3_take_their_arguments_by_position(of):
    """As TransformerEngine passes them."""
    tensors, starts = of()
    out, lse, d_out, grads = expected(tensors, starts, causal=True)
    lengths, longest = ((None, None), (None, None)) if starts is None else (starts, (9, 9))
    place = torch.empty_like(tensors[0])
    positional = (None, None, None, place, *lengths, None, None, None, *longest, *(None,) * 9)
    made = flash_attn_3._flash_attn_forward(*tensors, *positional, softmax_scale=SCALE, causal=True)
    assert made[0] is place and made[2].numel() == made[3].numel() == 0
    close(place, out)
    close(made[1], lse)
    into = [torch.empty_like(x) for x in tensors]
    backward = (*lengths, None, None, *longest, *into, SCALE, True, -1, 0)
    flash_attn_3._flash_attn_backward(d_out, *tensors, place, made[1], *backward)
    for ours, theirs in zip(into, grads):
        close(ours, theirs)


def test_flash_attn_3_appends_to_a_cache():
    q, k, v = drawn(2, 1, 4, 16), drawn(2, 1, 2, 16, seed=1), drawn(2, 1, 2, 16, seed=2)
    caches = [drawn(5, 4, 2, 16, seed=seed) for seed in (3, 4)]
    table, used = torch.tensor([[4, 1], [0, 2]], dtype=torch.int32), torch.tensor([5, 2], dtype=torch.int32)
    twins = [x.clone() for x in caches]
    named = {"page_table": table, "seqused_k": used, "causal": True}
    out, lse, *_ = flash_attn_3._flash_attn_forward(q, *caches, k, v, **named)
    wanted = fa.flash_attn_with_kvcache(
        q, *twins, k, v, cache_seqlens=used, page_table=table, causal=True, return_softmax_lse=True
    )
    assert torch.equal(out, wanted[0]) and torch.equal(lse, wanted[1])
    assert torch.equal(caches[0], twins[0]) and torch.equal(caches[0][1, 1], k[0, 0])
    with pytest.raises(fa.UnsupportedError, match="invalid value 'a Tensor' for seqused_q"):
        flash_attn_3._flash_attn_forward(q, *caches, page_table=table, seqused_k=used, seqused_q=used)


def test_gradients_of_parts_of_the_keys_add_up():
    """A ring: each part gets the final result and log-sum-exp."""
    (q, k, v), _ = dense()
    out, _, d_out, grads = expected((q, k, v), None)
    parts = [
        flash_attn_2._flash_attn_forward(q, k[:, at], v[:, at], 0.0, SCALE, False)[:2]
        for at in (slice(0, 4), slice(4, 11))
    ]
    merged = fa.merge_states([x for x, _ in parts], [x for _, x in parts])
    close(merged[0], out)
    total = torch.zeros_like(q)
    dk = torch.empty_like(k)
    for at in (slice(0, 4), slice(4, 11)):
        dq = torch.empty_like(q)
        flash_attn_2._flash_attn_backward(d_out, q, k[:, at], v[:, at], *merged, dq, dk[:, at], None, 0.0, SCALE, False)
        total += dq
    close(total, grads[0])
    close(dk, grads[1])


def test_results_of_earlier_generations_have_more_elements():
    (q, k, v), _ = dense()
    made = flash_attn_2._flash_attn_forward(q, k, v, 0.0, SCALE, True, window_size=(-1, -1))
    assert len(made) == 8 and made[1] is q and made[4] is made[0] and made[5].shape == (2, 4, 7)
    found = flash_attn_2._flash_attn_backward(
        made[0], q, k, v, made[0], made[5], None, None, None, 0.0, SCALE, True, window_size=(-1, -1)
    )
    assert len(found) == 4 and [x.shape for x in found[:3]] == [q.shape, k.shape, v.shape]
    (made, *_), twin = flash_attn_3._flash_attn_forward(q, k, v, window_size=(3, 0)), made
    assert not torch.equal(made, twin[0])


def test_the_state_of_dropout_goes_to_the_backward_pass():
    (q, k, v), _ = dense()
    torch.manual_seed(4)
    out, lse, mask, state = flash_attn_2._flash_attn_forward(q, k, v, 0.5, None, True, return_softmax=True)
    assert mask.shape == (2, 4, 7, k.shape[1]) and state.shape == (2,) and state.dtype == torch.int64
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    torch.manual_seed(4)
    expected = fa.flash_attn_func(*leaves, 0.5, causal=True)
    assert torch.equal(out, expected)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    flash_attn_2._flash_attn_backward(out, q, k, v, out, lse, *grads, 0.5, None, True, rng_state=state)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, leaves, out)):
        torch.testing.assert_close(ours, theirs)


def test_refusals_name_the_argument():
    (q, k, v), _ = dense()
    out, lse, *_ = flash_attn_2._flash_attn_forward(q, k, v, 0.0, None, False)
    with pytest.raises(fa.ArgumentError, match="invalid value '1.1' for dropout_p: expected a number from 0 to 1"):
        flash_attn_2._flash_attn_forward(q, k, v, 1.1, None, False)
    for state in (None, torch.zeros(4, dtype=torch.int32)):
        with pytest.raises(fa.ArgumentError, match="rng_state"):
            flash_attn_2._flash_attn_backward(
                out, q, k, v, out, lse, None, None, None, 0.1, None, False, rng_state=state
            )
    with pytest.raises(fa.UnsupportedError, match="for return_softmax"):
        flash_attn_2._flash_attn_forward(q, k, v, 0.0, None, False, return_softmax=True)

    def backward(dout=out, lse=lse, dq=None, **options):
        return flash_attn_2._flash_attn_backward(dout, q, k, v, out, lse, dq, None, None, 0.0, None, False, **options)

    with pytest.raises(fa.ArgumentError, match=r"shape of softmax_lse: expected \(2, 4, 7\)"):
        backward(lse=lse[..., :3])
    with pytest.raises(fa.ArgumentError, match="the shape of dq"):
        backward(dq=torch.empty(2, 7, 4, 8))
    with pytest.raises(fa.DTypeError, match="'torch.float64' for the dtype of dq"):
        backward(dq=torch.empty(q.shape, dtype=torch.float64))
    with pytest.raises(fa.ArgumentError, match="the shape of dout"):
        backward(dout=out[:1])
    with pytest.raises(fa.ArgumentError, match="None beside window_size_left"):
        backward(window_size_left=3, window_size=(3, 3))


#: The arguments of flash-attn 2.8.4 and of flash_attn_interface 3, which callers pass by position.
ARGUMENTS = {
    (flash_attn_2, "_flash_attn_forward"): "q k v dropout_p softmax_scale causal window_size_left window_size_right "
    "softcap alibi_slopes return_softmax",
    (flash_attn_2, "_flash_attn_varlen_forward"): "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
    "softmax_scale causal window_size_left window_size_right softcap alibi_slopes return_softmax block_table leftpad_k "
    "seqused_k zero_tensors num_splits",
    (flash_attn_2, "_flash_attn_backward"): "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal "
    "window_size_left window_size_right softcap alibi_slopes deterministic rng_state",
    (flash_attn_2, "_flash_attn_varlen_backward"): "dout q k v out softmax_lse dq dk dv cu_seqlens_q cu_seqlens_k "
    "max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "deterministic rng_state zero_tensors",
    (flash_attn_3, "_flash_attn_forward"): "q k v k_new v_new qv out_ cu_seqlens_q cu_seqlens_k cu_seqlens_k_new "
    "seqused_q seqused_k max_seqlen_q max_seqlen_k page_table kv_batch_idx leftpad_k rotary_cos rotary_sin "
    "seqlens_rotary q_descale k_descale v_descale softmax_scale causal window_size_left window_size_right "
    "attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin",
    (flash_attn_3, "_flash_attn_backward"): "dout q k v out softmax_lse cu_seqlens_q cu_seqlens_k sequed_q sequed_k "
    "max_seqlen_q max_seqlen_k dq dk dv softmax_scale is_causal window_size_left window_size_right softcap "
    "deterministic sm_margin",
}  # fmt: skip


@pytest.mark.parametrize("module, name", ARGUMENTS)
def test_arguments_have_flash_attns_order(module, name):
    # ring-flash-attn asks in this way, and passes what it finds by name.
    assert inspect.isfunction(getattr(module, name))
    assert inspect.getfullargspec(getattr(module, name)).args == ARGUMENTS[module, name].split()


def test_the_modules_stand_in_flash_attns_place():
    code = """
import flashcore_attn, flashcore_attn.engines.flash_attn as engine
engine.install()
engine.install()
import flash_attn, flash_attn_interface
from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_varlen_backward
from flash_attn.bert_padding import unpad_input
from flash_attn import flash_attn_func
import importlib.util
assert flash_attn_func is flashcore_attn.flash_attn_func and flash_attn.__version__ >= "2.8"
assert importlib.util.find_spec("flash_attn") is not None
assert flash_attn_interface._flash_attn_forward.__module__.endswith("flash_attn_3")
del flash_attn.__flashcore__
try:
    engine.install()
except flashcore_attn.UnsupportedError as error:
    assert "flash_attn is imported already" in str(error)
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused\n"
    assert "flash_attn" not in sys.modules and flash_attn.VERSION
