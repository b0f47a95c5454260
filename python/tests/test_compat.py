"""Routing of PyTorch's attention by `compat`, on the CPU and on a GPU."""

from __future__ import annotations

import math
import sys
import types

import pytest

import flashcore_attn
from flashcore_attn import _uncounted

torch = pytest.importorskip("torch")
from test_torch import DEVICES, TORCH_SDPA, F, draw, three  # noqa: E402


class TwoLayers(torch.nn.Module):
    def __init__(self, heads=4, dim=64):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(heads * dim, heads, 512, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.heads, self.qkv = heads, torch.nn.Linear(heads * dim, 3 * heads * dim)

    def forward(self, x):
        q, k, v = self.qkv(self.encoder(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("device", DEVICES)
def test_compat_reaches_a_model(device, slow_path):
    dtype = torch.float16 if device == "cuda" else torch.float32
    model, x = TwoLayers().to(device, dtype).eval(), draw(2, 50, 256, dtype=dtype, device=device)
    with torch.no_grad():
        expected = model(x)
        with flashcore_attn.compat.enabled():
            out = model(x)
    torch.testing.assert_close(out, expected, atol=1e-2 if device == "cuda" else 1e-4, rtol=1e-2)
    assert flashcore_attn.compat.stats() == {"calls": 3, "flashcore": 3, "fallback": 0, "reasons": {}}
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_compat_turns_the_fast_path_off_and_on_again():
    model, x = TwoLayers().eval(), draw(2, 50, 256)
    attention = torch.nn.MultiheadAttention(256, 4, batch_first=True).eval()
    switch = torch.backends.mha.get_fastpath_enabled
    flashcore_attn.compat.reset_stats()
    with torch.no_grad():
        expected = model(x), attention(x, x, x, need_weights=False)[0]
        with flashcore_attn.compat.enabled():
            with flashcore_attn.compat.enabled():
                assert not switch()
            assert not switch()
            out = model(x), attention(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-2)
    assert flashcore_attn.compat.stats() == {"calls": 4, "flashcore": 4, "fallback": 0, "reasons": {}}
    assert switch()


def test_compat_leaves_a_fast_path_off_that_the_user_has_turned_off(slow_path):
    with flashcore_attn.compat.enabled():
        pass
    assert not torch.backends.mha.get_fastpath_enabled()


def test_stats_without_calls_say_why(monkeypatch):
    def why():
        return "\n".join(flashcore_attn.compat.stats()["why"])

    flashcore_attn.compat.reset_stats()
    assert "compat is not enabled" in why()
    attention = torch.nn.MultiheadAttention(8, 2).eval()
    early = types.ModuleType("early")
    early.attend = F.scaled_dot_product_attention
    monkeypatch.setitem(sys.modules, "early", early)
    with flashcore_attn.compat.enabled():
        assert "early.attend was imported before compat.enable()" in why()
        attention(*(torch.ones(3, 1, 8),) * 3)
        assert "need_weights=True" in why()
        monkeypatch.delitem(sys.modules, "early")
        assert "fast path" not in why() and "early" not in why()
        torch.backends.mha.set_fastpath_enabled(True)
        assert "is on again" in why()
        monkeypatch.setattr(F, "scaled_dot_product_attention", early.attend)
        assert "replaced by another library" in why()
        monkeypatch.undo()
    # Asked after the block, it still says why the block counted nothing.
    assert "need_weights=True" in why() and "compat is disabled again" in why()
    flashcore_attn.compat.reset_stats()
    assert "compat is not enabled" in why()
    monkeypatch.setattr(_uncounted.gc, "get_objects", list)
    monkeypatch.setattr(_uncounted, "_compiled", list)
    monkeypatch.setattr(_uncounted, "_imported_before", lambda _: [])  # the tests' own names
    with flashcore_attn.compat.enabled():
        assert "no call of scaled_dot_product_attention or flex_attention" in why()


@pytest.mark.parametrize("device", DEVICES)
def test_compat_falls_back_and_says_why(device, slow_path):
    q, k, v = three(device, torch.float16 if device == "cuda" else torch.float32)
    mask = torch.zeros(96, 96, device=device, dtype=q.dtype, requires_grad=True)
    with flashcore_attn.compat.enabled():
        out, expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask), TORCH_SDPA(q, k, v, mask)
        tolerance = 1e-2 if device == "cuda" else 1e-4
        torch.testing.assert_close(out, expected, atol=tolerance, rtol=tolerance)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k, v, dropout_p=1.5)
        F.scaled_dot_product_attention(q.double(), k.double(), v.double())
        out = F.scaled_dot_product_attention(q.clone().requires_grad_(), k, v)
        out.sum().backward()
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k[..., :3], v)
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(95, 96, device=device, dtype=q.dtype))
        with pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, k, v[:, :3])
    reasons = {"dropout_p": 1, "dtype torch.float64": 1, "k": 1, "attn_mask": 1, "ArgumentError": 1}
    fallback = sum(reasons.values())
    expected = {"calls": 7, "flashcore": 7 - fallback, "fallback": fallback, "reasons": reasons}
    assert flashcore_attn.compat.stats() == expected


@pytest.mark.parametrize("device", DEVICES)
def test_compat_under_compile(device, slow_path):
    torch._dynamo.reset()
    q, k, v = three(device, torch.float16)

    def layer(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    with flashcore_attn.compat.enabled(), torch.no_grad():
        out = torch.compile(layer, fullgraph=True, backend="aot_eager")(q, k, v)
    assert torch.equal(out, flashcore_attn.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_compat_under_compile_leaves_alone_what_would_fail():
    torch._dynamo.reset()
    q, k, v = three("cpu", torch.float64)
    layer = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), fullgraph=True, backend="aot_eager")
    with flashcore_attn.compat.enabled(), torch.no_grad():
        torch.testing.assert_close(layer(q, k, v), TORCH_SDPA(q, k, v))
        # The graph that exists for one type is not used for another type.
        q, k, v = (x.float() for x in (q, k, v))
        assert torch.equal(layer(q, k, v), flashcore_attn.scaled_dot_product_attention(q, k, v))


def test_compat_under_compile_leaves_alone_arguments_that_would_fail():
    q, k = draw(2, 4, 6, 8), draw(2, 4, 9, 8)
    mask = torch.ones(2, 1, 6, 9, dtype=torch.bool)
    calls = [
        lambda: F.scaled_dot_product_attention(q, k[:, :2], k[:, :1], enable_gqa=True),
        lambda: F.scaled_dot_product_attention(q[..., :0], k[..., :0], k),
        lambda: F.scaled_dot_product_attention(q, k, k, scale=math.inf),
        lambda: F.scaled_dot_product_attention(q, k[0], k[:1], mask),
        lambda: F.scaled_dot_product_attention(q[0], k[0, :2], k[0, :2], mask[0], enable_gqa=True),
    ]
    for call in calls:
        torch._dynamo.reset()
        with torch.no_grad():
            expected = call()
            with flashcore_attn.compat.enabled():
                out = torch.compile(call, fullgraph=True, backend="aot_eager")()
        torch.testing.assert_close(out, expected, equal_nan=True)


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Tagged(torch.Tensor):
    """A subclass that handles every operator, as a distributed tensor does."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.filterwarnings("ignore")
def test_compat_leaves_scripts_and_symbolic_traces_alone(slow_path):
    inputs = three("cpu", torch.float32)
    with flashcore_attn.compat.enabled():
        graph = torch.fx.symbolic_trace(Attention())
        scripted = torch.jit.script(Attention())
    assert flashcore_attn.compat.stats()["reasons"] == {"type Proxy": 1}
    for module in (graph, scripted):
        torch.testing.assert_close(module(*inputs), TORCH_SDPA(*inputs))


def test_compat_leaves_subclasses_alone(slow_path):
    q, k, v = three("cpu", torch.float32)
    with flashcore_attn.compat.enabled():
        F.scaled_dot_product_attention(q, k.as_subclass(Tagged), v)
    assert TORCH_SDPA in Tagged.seen
    assert flashcore_attn.compat.stats()["reasons"] == {"type Tagged": 1}


def test_compat_leaves_a_chosen_kernel_alone(slow_path):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = three("cpu", torch.float32)
    with flashcore_attn.compat.enabled():
        with sdpa_kernel(SDPBackend.MATH):
            assert torch.equal(F.scaled_dot_product_attention(q, k, v), TORCH_SDPA(q, k, v))
        F.scaled_dot_product_attention(q, k, v)
    assert flashcore_attn.compat.stats() == {"calls": 2, "flashcore": 1, "fallback": 1, "reasons": {"sdpa_kernel": 1}}


def test_compat_may_be_disabled_in_the_middle_of_a_call(monkeypatch):
    """Another thread disables it during a call. The call then uses PyTorch's function."""
    q = draw(1, 1, 4, 8)

    def disable(*_):
        flashcore_attn.compat.disable()
        return "disabled"

    monkeypatch.setattr(flashcore_attn.compat, "_unsupported_reason", disable)
    flashcore_attn.compat.enable()
    monkeypatch.setattr(flashcore_attn.compat._torch, "eager", None)  # Rust asks for no reason
    torch.testing.assert_close(F.scaled_dot_product_attention(q, q, q), TORCH_SDPA(q, q, q))
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_compat_nests():
    flashcore_attn.compat.disable()
    assert F.scaled_dot_product_attention is TORCH_SDPA
    flashcore_attn.compat.enable()
    with flashcore_attn.compat.enabled():
        pass
    ours = F.scaled_dot_product_attention
    assert ours is not TORCH_SDPA
    flashcore_attn.compat.disable()
    assert F.scaled_dot_product_attention is TORCH_SDPA
    flashcore_attn.compat.reset_stats()
    q = draw(1, 1, 4, 8)
    torch.testing.assert_close(ours(q, q, q), TORCH_SDPA(q, q, q))
    assert flashcore_attn.compat.stats()["calls"] == 0


def test_compat_replaces_a_function_that_was_put_back():
    from torch.nn.attention import flex_attention as flex

    flashcore_attn.compat.disable()
    of_flex = flex.flex_attention
    with flashcore_attn.compat.enabled():
        F.scaled_dot_product_attention, flex.flex_attention = TORCH_SDPA, of_flex
    with flashcore_attn.compat.enabled():
        assert F.scaled_dot_product_attention is not TORCH_SDPA and flex.flex_attention is not of_flex
    assert F.scaled_dot_product_attention is TORCH_SDPA and flex.flex_attention is of_flex
