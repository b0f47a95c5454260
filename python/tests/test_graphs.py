"""Traces of PyTorch: ``torch.export``, ``make_fx``, fake tensors, and functions that ``torch.compile`` leaves out."""

from __future__ import annotations

import pytest

import flashcore_attn

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

F = torch.nn.functional
TORCH_SDPA = F.scaled_dot_product_attention
compat = flashcore_attn.compat


@pytest.fixture(autouse=True)
def counts():
    compat.reset_stats()
    torch._dynamo.reset()
    yield
    compat.reset_stats()


class Attention(torch.nn.Module):
    def forward(self, q, mask=None):
        return F.scaled_dot_product_attention(q, q, q, mask)


def called(graph):
    """The operators of a graph that compute attention."""
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name for name in names if "attention" in name]


OURS, OURS_WITH = ["flashcore_attn.attention.default"], ["flashcore_attn.attention_with.default"]
PYTORCHS = ["aten.scaled_dot_product_attention.default"]


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_has_the_operator(strict):
    q, mask = torch.randn(2, 4, 6, 16), torch.rand(6, 6) < 0.7
    sizes = {0: torch.export.Dim("batch", min=2, max=99), 2: torch.export.Dim("rows", min=2, max=99)}
    counted = {"calls": 2, "flashcore": 2, "fallback": 0, "reasons": {}}
    with compat.enabled(), torch.no_grad():
        program = torch.export.export(Attention(), (q,), dynamic_shapes=(sizes,), strict=strict)
        masked = torch.export.export(Attention(), (q, mask), strict=strict)
        assert compat.stats() == ({**counted, "calls": 0, "flashcore": 0} if strict else counted)
        compat.reset_stats()
        other = torch.export.export(Attention(), (q.double(),), strict=strict)
        assert compat.stats()["reasons"] == ({} if strict else {"dtype torch.float64": 1})
    assert called(program) == OURS and called(masked) == OURS_WITH and called(other) == PYTORCHS
    longer = torch.randn(3, 4, 11, 16)
    torch.testing.assert_close(program.module()(longer), TORCH_SDPA(longer, longer, longer))
    torch.testing.assert_close(masked.module()(q, mask), TORCH_SDPA(q, q, q, mask))
    assert called(program.run_decompositions()) == OURS


def test_an_export_of_a_call_with_gradients_is_counted():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with compat.enabled():
        program = torch.export.export(Attention(), (q,), strict=False)
    assert called(program) == PYTORCHS and compat.stats()["reasons"] == {"requires_grad": 1}


@pytest.mark.parametrize("pre_dispatch", [False, True])
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_has_the_operator(tracing_mode, pre_dispatch):
    q, mask = torch.randn(2, 4, 6, 16), torch.rand(6, 6) < 0.7

    def traced(function, *inputs):
        return make_fx(function, tracing_mode=tracing_mode, pre_dispatch=pre_dispatch)(*inputs)

    with compat.enabled(), torch.no_grad():
        plain, masked = traced(Attention(), q), traced(Attention(), q, mask)
        functional = traced(torch.func.functionalize(Attention()), q)
        assert compat.stats() == {"calls": 3, "flashcore": 3, "fallback": 0, "reasons": {}}
        other = traced(Attention(), q.double())
        assert compat.stats()["reasons"] == {"dtype torch.float64": 1}
        with pytest.raises(RuntimeError, match="attn_mask dtype"):  # PyTorch's own error
            traced(Attention(), q, mask.double())
    assert called(plain) == OURS and called(masked) == OURS_WITH and called(functional) == OURS
    assert not any("flashcore" in name for name in called(other))
    torch.testing.assert_close(plain(q), TORCH_SDPA(q, q, q))
    torch.testing.assert_close(masked(q, mask), TORCH_SDPA(q, q, q, mask))


def test_fake_tensors_alone():
    q = torch.randn(2, 6, 4, 16).transpose(1, 2)
    with compat.enabled(), FakeTensorMode() as mode:
        fake = mode.from_tensor(q)
        out = F.scaled_dot_product_attention(fake, fake, fake)
        assert out.shape == q.shape and out.stride() == q.stride()
        assert compat.stats()["flashcore"] == 1
        with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):  # PyTorch's own error
            F.scaled_dot_product_attention(q, q, q)


class Packed(torch.nn.Module):
    def __init__(self, bounded):
        super().__init__()
        self.bounded = bounded

    def forward(self, q, starts):
        longest = q.shape[0] if self.bounded else None
        return flashcore_attn.flash_attn_varlen_func(q, q, q, starts, starts, longest, longest, causal=True)


class Used(torch.nn.Module):
    def forward(self, q, used):
        return flashcore_attn.flash_attn_varlen_func(q, q, q, seqused_k=used, leftpad_k=used // 2)


class Window(torch.nn.Module):
    def forward(self, q, width):
        width = width.shape[0]
        return flashcore_attn.flash_attn_func(q, q, q, window_size=(width, 0), attention_chunk=width)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_an_exported_program_takes_any_number_of_sequences(bounded, strict):
    layer = Packed(bounded)
    rows, batch = torch.export.Dim("rows", min=2, max=1000), torch.export.Dim("batch", min=2, max=99)
    inputs = (torch.randn(6, 4, 16), int32(0, 2, 6))
    program = torch.export.export(layer, inputs, dynamic_shapes=({0: rows}, {0: batch}), strict=strict).module()
    for starts in ((0, 3, 3, 5, 9, 11), (0, 11)):
        q = torch.randn(11, 4, 16)
        if len(starts) > 2:  # at least as many as the least that was promised
            assert torch.equal(program(q, int32(*starts)), layer(q, int32(*starts)))


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_takes_other_numbers(strict):
    batch = torch.export.Dim("batch", min=2, max=99)
    inputs = (torch.randn(2, 6, 4, 16), int32(2, 6))
    shapes = ({0: batch}, {0: batch})
    program = torch.export.export(Used(), inputs, dynamic_shapes=shapes, strict=strict).module()
    q, used = torch.randn(5, 6, 4, 16), int32(1, 2, 3, 4, 6)
    assert torch.equal(program(q, used), Used()(q, used))
    q = inputs[0]
    shapes = (None, {0: torch.export.Dim("width", min=2, max=99)})
    program = torch.export.export(Window(), (q, torch.ones(4)), dynamic_shapes=shapes, strict=strict).module()
    assert torch.equal(program(q, torch.ones(2)), Window()(q, torch.ones(2)))


def test_devices_are_compared_in_a_graph():
    """A trace has no memory to compare, and a program of another device read none that was written."""
    q = torch.randn(2, 6, 4, 16)
    call, starts = flashcore_attn.flash_attn_func, int32(0, 2, 6)
    mask = torch.ones(6, 6, dtype=torch.bool)
    factors = torch.ones(2, 4)
    q8 = q.to(torch.float8_e4m3fn)
    refused = [
        (lambda q, x: flashcore_attn.scaled_dot_product_attention(*[q.transpose(1, 2)] * 3, x), q, mask, "table 0"),
        (lambda q, x: call(q, q, q, alibi_slopes=x), q, torch.ones(4), "table 0"),
        (lambda q, x: call(q, q, q, learnable_sink=x), q, torch.ones(4), "learnable_sink"),
        (lambda q, x: call(q, q, q, descale_q=x), q8, factors, "descale_q"),
        (lambda q, x: flashcore_attn.flash_attn_varlen_func(*[q[0]] * 3, x, x), q, starts, "cu_seqlens_q"),
        (lambda q, x: flashcore_attn.flash_attn_varlen_func(q, q, q, seqused_k=x), q, starts[:2], "seqused_k"),
        (lambda q, x: call(q, x, x), q, q, "k"),
    ]
    for function, own, other, name in refused:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=f"{name} is on meta, q on cpu"):
            torch.compile(function, backend="aot_eager")(own, other.to("meta"))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(flashcore_attn.ArgumentError):
            function(mode.from_tensor(own), mode.from_tensor(other.to("meta")))
    # PyTorch decides about a mask elsewhere, and about keys elsewhere.
    q, k = q.transpose(1, 2), q.transpose(1, 2).to("meta")
    with compat.enabled(), torch.no_grad():
        for inputs in ((q, q, q, mask.to("meta")), (q, k, k)):
            torch._dynamo.reset()
            graphs = []

            def keep(graph, inputs, graphs=graphs):
                graphs.append(graph)
                return graph

            with pytest.raises(Exception, match="device|meta"):
                torch.compile(F.scaled_dot_product_attention, backend=keep, fullgraph=True)(*inputs)
            assert not any(called(graph)[:1] in (OURS, OURS_WITH) for graph in graphs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_functions_of_the_caller_run_between_graphs(backend):
    q, table = torch.randn(1, 2, 8, 16), torch.randn(2, 2)

    def captured(q):
        own = table * 2
        score = lambda s, b, h, i, j: s + table[h, j % 2] * own[h, i % 2]  # noqa: E731
        return flashcore_attn.flex_attention(q * 2, q, q, score, return_lse=True)[0] + 1

    def masked(q):
        return flashcore_attn.flex_attention(q * 2, q, q, block_mask=lambda b, h, i, j: table[h, j % 2] > 0) + 1

    def quantized(q):
        made = flashcore_attn.quantize(q * 2, q, q)
        return flashcore_attn.flash_attn_func(**made._asdict()).float() + 1

    for function in (captured, masked, quantized):
        torch._dynamo.reset()
        for _ in range(2):
            torch.testing.assert_close(torch.compile(function, backend=backend)(q), function(q))
        torch._dynamo.reset()
        with pytest.raises(Exception, match="(?s)disable.*(flex_attention|quantize)"):
            torch.compile(function, backend=backend, fullgraph=True)(q)
    whole = torch.compile(flashcore_attn.flex_attention, backend=backend)
    torch.testing.assert_close(whole(q, q, q), flashcore_attn.flex_attention(q, q, q))
