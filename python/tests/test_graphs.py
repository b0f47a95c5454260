"""Traces of PyTorch: ``torch.export``, ``make_fx``, fake tensors, and functions that ``torch.compile`` leaves out."""

from __future__ import annotations

import operator

import pytest

import flashcore_attn

torch = pytest.importorskip("torch")
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

F = torch.nn.functional
TORCH_SDPA = F.scaled_dot_product_attention
compat = flashcore_attn.compat


pytestmark = pytest.mark.usefixtures("fresh_counts")


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
        stats = compat.stats()
        assert bool(stats.pop("why", None)) == strict
        assert stats == ({**counted, "calls": 0, "flashcore": 0} if strict else counted)
        compat.reset_stats()
        other = torch.export.export(Attention(), (q.double(),), strict=strict)
        assert compat.stats()["reasons"] == ({} if strict else {"dtype torch.float64": 1})
    assert called(program) == OURS and called(masked) == OURS_WITH and called(other) == PYTORCHS
    longer = torch.randn(3, 4, 11, 16)
    torch.testing.assert_close(program.module()(longer), TORCH_SDPA(longer, longer, longer))
    torch.testing.assert_close(masked.module()(q, mask), TORCH_SDPA(q, q, q, mask))
    assert called(program.run_decompositions()) == OURS


def test_an_export_of_a_call_with_gradients_is_served():
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    with compat.enabled():
        program = torch.export.export(Attention(), (q,), strict=False)
    assert called(program) == OURS and compat.stats()["flashcore"] == 1


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


ATTEND = flashcore_attn.flex_attention


def whole_graphs(function, *calls, **options):
    """Compares a function with itself as one graph, and returns how many graphs its calls needed."""
    torch._dynamo.reset()
    expected = [function(*inputs) for inputs in calls]  # the first call of a process imports modules
    graphs = []

    def keep(graph, inputs):
        assert called(graph) in (["flashcore_attn.attention"], ["flashcore_attn.attention_with"])
        graphs.append(graph)
        return graph

    compiled = torch.compile(function, backend=keep, fullgraph=True, **options)
    for inputs, out in zip(calls, expected):
        torch.testing.assert_close(compiled(*inputs), out)
    return len(graphs)


def reads(table):
    return lambda s, b, h, i, j: s + table[h, i - j]


class Biased(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.factor = torch.nn.Buffer(torch.randn(2, 8)), 3

    def score(self, s, b, h, i, j):
        return s + self.bias[h, j] * self.factor

    def forward(self, q):
        return ATTEND(q, q, q, self.score)


def test_a_graph_reads_the_tensors_that_a_function_has_captured():
    q, tables = torch.randn(1, 2, 8, 16), [torch.randn(2, 8) for _ in range(3)]

    def inside(q, table):
        own = table * 2
        score = lambda s, b, h, i, j: torch.tanh(s / 2) * 2 + table[h, i - j] * own[h][j]  # noqa: E731
        return ATTEND(q * 2, q, q, score, lambda b, h, i, j: (own[h, j] > -1) & (i >= j), return_lse=True)[0] + 1

    assert whole_graphs(inside, *[(q, table) for table in tables]) == 1
    assert whole_graphs(lambda q, f: ATTEND(q, q, q, f), *[(q, reads(table)) for table in tables]) == 1
    numbers = [(q, torch.tensor(x)) for x in (0.5, 2.0)]
    assert whole_graphs(lambda q, x: ATTEND(q, q, q, lambda s, b, h, i, j: s * x), *numbers) == 1
    layer = Biased()
    assert whole_graphs(layer, (q,)) == 1
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for change in (lambda: None, lambda: layer.bias.mul_(2), lambda: setattr(layer, "bias", tables[0])):
        change()
        torch.testing.assert_close(compiled(q), layer(q))
    program = torch.export.export(layer, (q,), strict=True)
    assert called(program) == OURS_WITH and torch.equal(program.module()(q), layer(q))


def test_a_graph_has_the_numbers_that_a_function_has_captured():
    q, table = torch.randn(1, 2, 8, 16), torch.randn(8, 8)

    def scaled(q, x):
        return ATTEND(q, q, q, lambda s, b, h, i, j: s * x + i - x / 2)

    assert whole_graphs(scaled, *[(q, x) for x in (1.5, -2.5, 0.1, 1e30, 1.5)]) >= 4
    assert whole_graphs(scaled, *[(q, x) for x in (2, -3, 5, 7, 2)]) >= 4

    # The compiler makes a number symbolic after its first change. It compares such a number with no object.
    def compared(q, n):
        mask = lambda b, h, i, j: (i == n) | (n != j) | (i < n * 2) | (n >= j) | (table[n, j] > 0)  # noqa: E731
        return ATTEND(q, q, q, lambda s, b, h, i, j: torch.where(i > 3, s, s - n) + (n - j) + (1 << h), mask)

    assert whole_graphs(compared, *[(q, n) for n in (1, 2, 3, 4)]) >= 4
    assert whole_graphs(lambda q, x: ATTEND(q, q, q, lambda s, b, h, i, j: s * 2 if x else s), (q, True), (q, False))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_graph_takes_other_shapes(dynamic):
    inputs = [torch.randn(1, 2, rows, 16) for rows in (8, 9, 17, 33)]

    def near(q):
        return ATTEND(q, q, q, lambda s, b, h, i, j: s + (i - j), lambda b, h, i, j: i >= j)

    assert whole_graphs(near, *[(q,) for q in inputs], dynamic=dynamic) <= 2

    def first(q):
        return ATTEND(q, q, q, None, lambda b, h, i, j: j < q.shape[2] // 2)

    whole_graphs(first, *[(q,) for q in inputs], dynamic=dynamic)
    biased = [(q, torch.randn(2, q.shape[2])) for q in inputs]
    whole_graphs(lambda q, table: ATTEND(q, q, q, reads(table)), *biased, dynamic=dynamic)


def test_a_graph_takes_block_masks():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q = torch.randn(1, 2, 8, 16)

    def of(documents):
        mask = lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j)  # noqa: E731
        return flex.create_block_mask(mask, None, None, 8, 8, device="cpu", BLOCK_SIZE=4)

    masks = [of(torch.randint(0, 2, (8,))) for _ in range(3)]
    assert whole_graphs(lambda q, mask: ATTEND(q, q, q, None, mask), *[(q, mask) for mask in masks]) == 1
    assert whole_graphs(lambda q: ATTEND(q, q, q, lambda s, b, h, i, j: s * 2, masks[0]), (q,)) == 1
    assert whole_graphs(lambda q, d: ATTEND(q, q, q, None, of(d)), (q, torch.arange(8) // 3), (q, torch.ones(8))) >= 1
    blocks = torch.full((1, 1, 2), 1, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    listed = flex.BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=4)
    assert whole_graphs(lambda q, mask: ATTEND(q, q, q, None, mask), (q, listed)) == 1

    def sparse(q, table):
        counts, indices = (x.expand(1, 2, *x.shape[2:]) for x in blocks)
        tensors = flashcore_attn.BlockSparseTensors(counts, indices)
        seen = lambda b, h, i, j: (i >= j) | (table[j] > 0)  # noqa: E731
        return ATTEND(q, q, q, None, flashcore_attn.block_sparse_mask(seen, tensors, (4, 4)))

    assert whole_graphs(sparse, *[(q, torch.randn(8)) for _ in range(2)]) == 1


OPERATORS = ("lt le gt ge eq ne", "add sub mul truediv floordiv mod", "and_ or_ xor lshift rshift")


@pytest.mark.parametrize("name", " ".join(OPERATORS).split())
def test_a_graph_has_every_operator_in_its_order(name):
    q, apply = torch.randn(1, 2, 8, 16), getattr(operator, name)

    def score(s, b, h, i, j):
        found = s + apply(i, 3) + 2 * apply(5, j + 1) + 3 * apply(i, j + 1)
        return found if name in OPERATORS[2] else found + 4 * apply(s, 0.5) + 5 * apply(0.5, s.abs() + 1)

    assert whole_graphs(lambda q: ATTEND(q, q, q, score), (q,)) == 1


def test_a_graph_ends_before_a_function_that_no_program_states_there():
    q, table = torch.randn(1, 2, 8, 16), torch.randn(2)
    counted = torch._dynamo.testing.CompileCounter

    def read(s, b, h, i, j):
        return s * table[0].item()

    def counted_calls(s, b, h, i, j):
        flashcore_attn.scaled_dot_product_attention(q, q, q)
        return s * 2 + len([torch._dynamo.graph_break()])

    for score, words in ((read, "a number that is read from a tensor"), (counted_calls, "graph_break")):
        call = lambda q, score=score: ATTEND(q * 2, q, q, score) + 1  # noqa: E731
        counter = counted()
        compiled = torch.compile(call, backend=counter)
        for _ in range(2):
            torch.testing.assert_close(compiled(q), call(q))
        assert counter.frame_count == 2  # one before and one after, and none of the parts of the function
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
            torch.compile(call, backend="eager", fullgraph=True)(q)
    wrong = lambda s, b, h, i, j: torch.asin(s)  # noqa: E731
    with pytest.raises(flashcore_attn.UnsupportedError, match="test_graphs.py:[0-9]+: the function asin cannot"):
        torch.compile(lambda q: ATTEND(q * 2, q, q, wrong) + 1, backend="eager")(q)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the function asin cannot be part of a program"):
        torch.compile(lambda q: ATTEND(q, q, q, wrong), backend="eager", fullgraph=True)(q)


def test_a_graph_has_no_value_that_the_compiler_computes_from_a_position():
    q = torch.randn(1, 2, 8, 16)
    call = lambda q: ATTEND(q * 2, q, q, lambda s, b, h, i, j: s + abs(i - j))  # noqa: E731
    torch.testing.assert_close(torch.compile(call, backend="eager")(q), call(q))
    torch._dynamo.reset()
    try:  # some versions of PyTorch compute `abs` so
        out = torch.compile(call, backend="eager", fullgraph=True)(q)
    except torch._dynamo.exc.Unsupported as error:
        assert "use torch's function" in str(error)
    else:
        torch.testing.assert_close(out, call(q))


def test_functions_of_arrays_run_between_graphs():
    numpy = pytest.importorskip("numpy")
    q = torch.randn(1, 2, 8, 16)
    array, slopes = q.numpy(), flashcore_attn.table(numpy.ones((2, 8), numpy.float32))

    def call(q):
        return q * 2 + torch.from_numpy(ATTEND(array, array, array, lambda s, b, h, i, j: s + slopes[h, j])).sum()

    for _ in range(2):
        torch.testing.assert_close(torch.compile(call, backend="aot_eager")(q), call(q))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_quantize_runs_between_graphs(backend):
    q = torch.randn(1, 2, 8, 16)

    def quantized(q):
        made = flashcore_attn.quantize(q * 2, q, q)
        return flashcore_attn.flash_attn_func(**made._asdict()).float() + 1

    for _ in range(2):
        torch.testing.assert_close(torch.compile(quantized, backend=backend)(q), quantized(q))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="(?s)disable.*quantize"):
        torch.compile(quantized, backend=backend, fullgraph=True)(q)
    whole = torch.compile(ATTEND, backend=backend)
    torch.testing.assert_close(whole(q, q, q), ATTEND(q, q, q))
