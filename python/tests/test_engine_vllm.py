"""The backend of vLLM, on the CPU: stubs of five generations, and the signatures that its wheels have."""

from __future__ import annotations

import inspect
import itertools
import json
import math
import sys
import threading
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import vllm_stub as stub  # noqa: E402

import flashcore_attn as fa  # noqa: E402
from flashcore_attn.engines import _serving, vllm  # noqa: E402

# Orders in memory of layer, page, head, row and content: the layouts of vLLM.
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "LHBNC": (0, 2, 1, 3, 4), "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4),
}  # fmt: skip
DIM, PAGE = 16, 16
INT = torch.int32
DEVICE = "cpu"


def drawn(*shape, seed=0, dtype=torch.float16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def cache_of(generation, layout, pages, heads, padded, page=PAGE):
    """A layer's cache in an order in memory, between those of other layers, in pages with or without padding. Each
    dimension of one element has a stride of its own."""
    order = LAYOUTS[layout]
    sizes = [3, pages, heads, page, 2 * DIM]
    memory = [sizes[i] + (3 if padded and i == order[1] else 0) for i in order]
    whole = torch.full(memory, math.nan, dtype=torch.float16, device=DEVICE)
    logical = whole.permute([order.index(i) for i in range(5)])
    logical = logical[:, :pages, :heads, :page]
    layer = logical[1]
    if generation == "0.22":  # (2, pages, rows, heads, dim)
        view = layer.unflatten(3, (2, DIM)).permute(3, 0, 2, 1, 4)
    elif generation == "0.23":
        view = layer.unflatten(3, (2, DIM)).permute(0, 3, 2, 1, 4)
    else:
        view = layer
    strides = [7 + 3 * i if n == 1 else s for i, (n, s) in enumerate(zip(view.shape, view.stride()))]
    return view.as_strided(view.shape, strides, view.storage_offset())


def common(lengths, queries, pages, causal=True, padding=0, page=PAGE):
    """The runner's metadata: requests with context, then requests of padding, without queries and with stale rows."""
    requests = len(lengths)
    width = -(-max(lengths) // page) + 1
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1))[: requests * width]
    table = table.reshape(requests, width).to(INT)
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=INT)
    slots = [
        int(table[b, at // page]) * page + at % page
        for b, (length, new) in enumerate(zip(lengths, queries))
        for at in range(length - new, length)
    ]
    stale = torch.zeros(padding, width, dtype=INT)
    tensors = {
        "query_start_loc": torch.cat([starts, starts[-1:].repeat(padding)]),
        "seq_lens": torch.tensor([*lengths, *[0] * padding], dtype=INT),
        "block_table_tensor": torch.cat([table, stale]),
        "slot_mapping": torch.tensor([*slots, *[-1] * padding], dtype=torch.int64),
    }
    return types.SimpleNamespace(
        **{name: x.to(DEVICE) for name, x in tensors.items()}, num_reqs=requests + padding,
        num_actual_tokens=sum(queries), max_query_len=max(queries), max_seq_len=max(lengths) + 100,
        causal=causal.to(DEVICE) if isinstance(causal, torch.Tensor) else causal,
    )  # fmt: skip


def plain(q, k, v, causal, window=-1, softcap=0.0, sinks=None, slopes=None):
    """Attention of one request in float64: ``(rows, heads, dim)`` to ``(keys, heads_k, dim)``."""
    q, k, v = q.cpu(), k.cpu(), v.cpu()
    sinks = None if sinks is None else sinks.cpu()
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    apart = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    if slopes is not None:
        scores = scores - torch.tensor(slopes).double()[:, None, None] * apart.abs()
    seen = torch.ones_like(apart, dtype=torch.bool)
    if causal:
        seen = apart >= 0
    if window >= 0:
        seen &= (apart <= window) & (causal | (-apart <= window))
    scores = scores.masked_fill(~seen, -math.inf)
    mass = torch.logsumexp(scores, -1)
    if sinks is not None:
        mass = torch.logaddexp(mass, sinks.double()[:, None])
    return torch.einsum("hqk,khd->qhd", torch.exp(scores - mass[..., None]), v)


def keys_of(made, cache, b, length, heads, table, page=PAGE):
    """Keys and values of a request, read by the cache's logical shape."""
    k, v = made.backend.pools_of(cache, DIM, heads)
    rows = [(int(table[b, at // page]), at % page) for at in range(length)]
    return tuple(torch.stack([pool[at] for at in rows]) for pool in (k, v))


def run(made, generation, layout, *, heads=2, group=2, padded=True, lengths=(5, 33, 20), queries=(1, 6, 20),
        causal=True, padding=2, **options):  # fmt: skip
    """Writes a step's keys to a cache with context, computes attention, and compares with the reference."""
    page = options.pop("page", PAGE)
    pages = 40
    cache = cache_of(generation, layout, pages, heads, padded, page)
    pools = made.backend.pools_of(cache, DIM, heads)
    for i, pool in enumerate(pools):
        pool.copy_(drawn(pages, page, heads, DIM, seed=7 + i))
    metadata = common(lengths, queries, pages, causal, padding, page)
    builder = made.backend.Builder(None, ["layer"], made.config, torch.device(DEVICE))
    step = builder.build(0, metadata)
    tokens = sum(queries) + padding
    q, key, value = drawn(tokens, heads * group, DIM, seed=1), *(drawn(tokens, heads, DIM, seed=s) for s in (2, 3))
    named = {"sliding_window": options.pop("window", None), "logits_soft_cap": options.pop("softcap", None)}
    layer = made.backend.Layer(heads * group, DIM, 0.3, heads, kv_cache_dtype="auto", **named, **options)
    before = [pool.clone(memory_format=torch.contiguous_format) for pool in pools]
    layer.do_kv_cache_update(None, key, value, cache, metadata.slot_mapping)
    for pool, old, new in zip(pools, before, (key, value)):
        old.flatten(0, 1)[metadata.slot_mapping[: sum(queries)]] = new[: sum(queries)]
        assert torch.equal(pool, old)  # nothing else was written
    output = torch.full((tokens, heads * group, DIM), 9.0, dtype=torch.float16, device=DEVICE)
    assert layer.forward(None, q, key, value, cache, step, output) is output
    assert (output[sum(queries) :] == 9).all()
    if isinstance(causal, torch.Tensor):
        causal = [bool(x) for x in causal]
    for b, (length, start, new) in enumerate(zip(lengths, step.batch.starts.tolist(), queries)):
        k, v = keys_of(made, cache, b, length, heads, metadata.block_table_tensor, page)
        expected = plain(
            q[start : start + new], k, v, causal if isinstance(causal, bool) else causal[b],
            -1 if named["sliding_window"] is None else named["sliding_window"] - 1,
            named["logits_soft_cap"] or 0.0, options.get("sinks"), options.get("alibi_slopes"),
        )  # fmt: skip
        torch.testing.assert_close(output[start : start + new].double().cpu(), expected, rtol=4e-3, atol=4e-3)
    return layer, step


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("generation", stub.GENERATIONS)
def test_every_generation_and_layout(monkeypatch, generation, layout, padded):
    made = stub.install(monkeypatch, generation)
    run(made, generation, layout, padded=padded)
    run(made, generation, layout, padded=padded, heads=1, group=5)  # a dimension of one, with any stride


@pytest.mark.parametrize(
    "options",
    [
        {"window": 7}, {"softcap": 2.0}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}, {"causal": False},
        {"causal": False, "window": 6}, {"alibi_slopes": [0.1, 0.2, 0.3, 0.4]}, {"page": 48},
        {"causal": torch.tensor([1, 0, 1, 1, 0], dtype=INT)},
        {"causal": torch.tensor([0, 0, 1, 0, 0], dtype=INT), "window": 5},
    ],
)  # fmt: skip
def test_what_layers_do_to_their_scores(monkeypatch, options):
    made = stub.install(monkeypatch, "0.33")
    run(made, "0.33", "BLNHC", **options)


def test_encoders_have_no_cache(monkeypatch):
    made = stub.install(monkeypatch, "0.26")
    metadata = common((6, 9), (6, 9), 8)
    step = made.backend.Builder(None, ["layer"], made.config, torch.device("cpu")).build(0, metadata)
    q, k, v = drawn(15, 4, DIM, seed=1), drawn(15, 2, DIM, seed=2), drawn(15, 2, DIM, seed=3)
    layer = made.backend.Layer(4, DIM, 0.3, 2, sliding_window=4, attn_type=made.types.ENCODER_ONLY)
    empty = torch.empty(0)
    layer.do_kv_cache_update(None, k, v, empty, metadata.slot_mapping)
    output = torch.empty_like(q)
    layer.forward(None, q, k, v, empty, step, output)
    for rows in (slice(0, 6), slice(6, 15)):
        torch.testing.assert_close(
            output[rows].double(), plain(q[rows], k[rows], v[rows], False, 3), rtol=4e-3, atol=4e-3
        )


def test_8_bit_caches_have_factors_in_tensors(monkeypatch):
    """Queries keep their 16 bits, and the layer's factors are read on the device."""
    made = stub.install(monkeypatch, "0.33")
    if not _serving.takes_fp8_caches():
        with pytest.raises(fa.UnsupportedError, match="kv_cache_dtype='fp8'"):
            made.backend.Layer(4, DIM, 0.3, 2, kv_cache_dtype="fp8")
        return
    order = LAYOUTS["BLNHC"]
    whole = torch.full([[3, 40, 2, PAGE, 2 * DIM][i] for i in order], 0x7F, dtype=torch.uint8)  # NaN in e4m3
    cache = whole.permute([order.index(i) for i in range(5)])[1]
    lengths, queries = (5, 20), (5, 20)
    metadata = common(lengths, queries, 40)
    step = made.backend.Builder(None, [], made.config, torch.device("cpu")).build(0, metadata)
    q, key, value = drawn(25, 4, DIM, seed=1), drawn(25, 2, DIM, seed=2), drawn(25, 2, DIM, seed=3)
    factors = types.SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
    layer = made.backend.Layer(4, DIM, 0.3, 2, kv_cache_dtype="fp8")
    layer.do_kv_cache_update(factors, key, value, cache, metadata.slot_mapping)
    output = torch.empty_like(q)
    layer.forward(factors, q, key, value, cache, step, output)
    rounded = [
        (x.float() / factor).to(torch.float8_e4m3fn).float() * factor
        for x, factor in ((key, factors._k_scale), (value, factors._v_scale))
    ]
    for rows in (slice(0, 5), slice(5, 25)):
        expected = plain(q[rows], rounded[0][rows], rounded[1][rows], True)
        torch.testing.assert_close(output[rows].double(), expected, rtol=4e-3, atol=4e-3)


def test_what_the_runner_asks_for(monkeypatch):
    made = stub.install(monkeypatch, "0.33")
    backend, builder = made.backend.Backend, made.backend.Builder
    assert backend.get_name() == "CUSTOM" in made.enum.__members__
    assert builder._cudagraph_support is made.graphs.ALWAYS and builder.supports_draft_decode_metadata_update
    layer, step = run(made, "0.33", "LBHNC")
    # Profiling, the refresh of a draft, and the same requests with other pages.
    output = torch.ones(3, 4, DIM)
    assert (layer.forward(None, output, output, output, output, None, output) == 0).all()
    own = builder(None, [], made.config, torch.device("cpu"))
    assert own.update_draft_decode_metadata(step) is None
    table, slots = torch.zeros(9, 2, dtype=INT), torch.zeros(4)
    other = own.update_block_table(step, table, slots)
    assert other.batch.table.shape == (5, 2) and other.slot_mapping is slots and step.batch.table is not table
    assert backend.supports_head_size(256) and not backend.supports_head_size(20)
    assert backend.supports_compute_capability((8, 0)) and not backend.supports_compute_capability((7, 5))
    assert backend.supports_kv_cache_dtype("auto") and not backend.supports_kv_cache_dtype("nvfp4")
    assert backend.supports_kv_cache_dtype("fp8") == _serving.takes_fp8_caches()


def test_a_replay_reads_the_runners_tensors(monkeypatch):
    """What a CUDA graph holds: metadata of the capture, whose tensors have other lengths and pages at the replay."""
    made = stub.install(monkeypatch, "0.29")
    cache = cache_of("0.29", "BLHNC", 40, 2, False)
    for i, pool in enumerate(made.backend.pools_of(cache, DIM, 2)):
        pool.copy_(drawn(40, PAGE, 2, DIM, seed=7 + i))
    captured, later = common((9, 40), (1, 1), 40), common((31, 3), (1, 1), 40)
    step = made.backend.Builder(None, [], made.config, torch.device("cpu")).build(0, captured)
    layer = made.backend.Layer(4, DIM, 0.3, 2)
    q, output = drawn(2, 4, DIM, seed=1), torch.empty(2, 4, DIM, dtype=torch.float16)
    captured.seq_lens.copy_(later.seq_lens)
    captured.block_table_tensor.zero_()
    captured.block_table_tensor[:, : later.block_table_tensor.shape[1]] = later.block_table_tensor
    layer.forward(None, q, None, None, cache, step, output)
    for b, length in enumerate((31, 3)):
        k, v = keys_of(made, cache, b, length, 2, later.block_table_tensor)
        torch.testing.assert_close(output[b].double(), plain(q[b : b + 1], k, v, True)[0], rtol=4e-3, atol=4e-3)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("generation", stub.GENERATIONS)
@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC"])
def test_on_a_gpu(monkeypatch, generation, layout):
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", "cuda")
    made = stub.install(monkeypatch, generation)
    run(made, generation, layout)
    run(made, generation, layout, window=7)
    run(made, generation, layout, sinks=torch.tensor([0.3, -1.0, 2.0, 0.0], device="cuda"))


@pytest.mark.needs_cuda
def test_a_graph_on_a_gpu_replays_longer_and_shorter_requests(monkeypatch):
    """One graph of a step with prefill and decode: the append, and attention."""
    monkeypatch.setattr(sys.modules[__name__], "DEVICE", "cuda")
    made = stub.install(monkeypatch, "0.33")
    cache = cache_of("0.33", "LBHNC", 40, 2, False)
    for i, pool in enumerate(made.backend.pools_of(cache, DIM, 2)):
        pool.copy_(drawn(40, PAGE, 2, DIM, seed=7 + i))
    captured = common((9, 90, 40), (1, 6, 2), 40)
    step = made.backend.Builder(None, [], made.config, torch.device("cuda")).build(0, captured)
    layer = made.backend.Layer(4, DIM, 0.3, 2)
    q, key, value = drawn(9, 4, DIM, seed=1), drawn(9, 2, DIM, seed=2), drawn(9, 2, DIM, seed=3)
    output = torch.empty_like(q)

    def work():
        layer.do_kv_cache_update(None, key, value, cache, captured.slot_mapping)
        layer.forward(None, q, key, value, cache, step, output)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for lengths, queries in (((95, 7, 33), (2, 6, 1)), ((3, 8, 12), (1, 2, 6))):
        later = common(lengths, queries, 40)
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            getattr(captured, name).copy_(getattr(later, name))
        captured.block_table_tensor[:, : later.block_table_tensor.shape[1]].copy_(later.block_table_tensor)
        graph.replay()
        for b, start in enumerate(later.query_start_loc.tolist()[:-1]):
            k, v = keys_of(made, cache, b, lengths[b], 2, later.block_table_tensor)
            rows = slice(start, start + queries[b])
            expected = plain(q[rows], k, v, True)
            torch.testing.assert_close(output[rows].double().cpu(), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("generation", ["0.22", "0.33"])
def test_decode_context_parallelism(monkeypatch, generation):
    """Two ranks, as threads, with one KV head: each has every second key of the context, and all new tokens."""
    made = stub.install(monkeypatch, generation, ranks=2)
    barrier, lengths, queries, heads = threading.Barrier(2), (12, 30), (1, 4), 2
    shared: dict[str, list[torch.Tensor]] = {}
    results = [torch.empty(5, heads, DIM, dtype=torch.float16) for _ in range(2)]
    q, key, value = drawn(5, 4, DIM, seed=1), drawn(5, 1, DIM, seed=2), drawn(5, 1, DIM, seed=3)
    contexts = [
        [drawn(n - new, 1, DIM, seed=20 + 2 * b + i) for i in range(2)]
        for b, (n, new) in enumerate(zip(lengths, queries))
    ]
    errors = []
    here = threading.local()

    def exchange(name, x):
        shared.setdefault(name, [None, None])[here.rank] = x
        barrier.wait()
        both = list(shared[name])
        barrier.wait()
        return both

    class Group(stub.Group):
        rank_in_group = property(lambda self: here.rank)

        def all_gather(self, x, dim):
            return torch.cat(exchange("q", x), dim)

    def combine(out, lse, group, return_lse):
        outs, lses = exchange("out", out), exchange("lse", lse)
        merged, total = fa.merge_states(outs, [x.transpose(0, 1).contiguous() for x in lses])
        own = slice(here.rank * heads, (here.rank + 1) * heads)
        return merged[:, own], total.transpose(0, 1)[:, own]

    def merge(output, old, old_lse, new, new_lse):
        made, _ = fa.merge_states([old.contiguous(), new], [old_lse.contiguous(), new_lse])
        output.copy_(made)

    group = Group()
    sys.modules["vllm.distributed.parallel_state"].get_dcp_group = lambda: group
    place = "common" if generation == "0.22" else "dcp"
    for name, function in ((place, {"cp_lse_ag_out_rs": combine}), ("merge_attn_states", {"merge_attn_states": merge})):
        module = types.ModuleType(name)
        vars(module).update(function)
        monkeypatch.setitem(sys.modules, f"vllm.v1.attention.ops.{name}", module)

    def work(rank):
        here.rank = rank
        try:
            cache = cache_of(generation, "LBNHC", 16, 1, False)
            k, v = made.backend.pools_of(cache, DIM, 1)
            metadata = common(lengths, queries, 16)
            for b, context in enumerate(contexts):
                for i, at in enumerate(range(rank, len(context[0]), 2)):
                    place = (int(metadata.block_table_tensor[b, i // PAGE]), i % PAGE)
                    k[place], v[place] = context[0][at], context[1][at]
            builder = made.backend.Builder(None, [], made.config, torch.device("cpu"))
            first, step = builder.build(0, metadata), builder.build(0, metadata)
            # A graph of the first step reads the lengths of later ones.
            assert first.context.data_ptr() == step.context.data_ptr()
            assert not builder.supports_draft_decode_metadata_update
            layer = made.backend.Layer(heads, DIM, 0.3, 1)
            own = slice(rank * heads, (rank + 1) * heads)
            layer.forward(None, q[:, own], key, value, cache, step, results[rank])
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    out = torch.cat(results, 1)
    for b, start in enumerate((0, 1)):
        rows = slice(start, start + queries[b])
        k, v = (torch.cat([context, new[rows]]) for context, new in zip(contexts[b], (key, value)))
        torch.testing.assert_close(out[rows].double(), plain(q[rows], k, v, True), rtol=6e-3, atol=6e-3)


def test_refusals_name_what_is_not_known(monkeypatch):
    made = stub.install(monkeypatch, "0.33")
    with pytest.raises(fa.UnsupportedError, match=r"KV cache of shape \(4, 2, 16, 24\)"):
        made.backend.pools_of(torch.empty(4, 2, 16, 24), DIM, 2)
    with pytest.raises(fa.UnsupportedError, match=r"shape \(2, 4, 16, 2, 16\)"):
        made.backend.pools_of(torch.empty(2, 4, 16, 2, 16), DIM, 2)
    with pytest.raises(fa.UnsupportedError, match="kv_cache_dtype='nvfp4'"):
        made.backend.Layer(4, DIM, 0.3, 2, kv_cache_dtype="nvfp4")
    layer = made.backend.Layer(4, DIM, 0.3, 2)
    with pytest.raises(fa.UnsupportedError, match="output_scale"):
        layer.forward(None, *[torch.empty(1, 4, DIM)] * 4, None, torch.empty(1, 4, DIM), torch.ones(1))
    made = stub.install(monkeypatch, "0.33", ranks=2)
    with pytest.raises(fa.UnsupportedError, match="decode context parallelism with windows"):
        made.backend.Layer(4, DIM, 0.3, 2, sliding_window=4)
    made = stub.install(monkeypatch, "0.26", shape=lambda *sizes: (sizes[0], *sizes[2:], 2))
    with pytest.raises(fa.UnsupportedError, match=r"a KV cache of shape \(3, 1, 16, 2\)"):
        made.backend.cache_form()


def test_the_plug_in_registers_once_and_leaves_another_ones_backend(monkeypatch, caplog):
    made = stub.install(monkeypatch, "0.33")
    vllm.register()
    vllm.register()
    assert made.registered == {made.enum.CUSTOM: vllm.BACKEND}
    made.registered[made.enum.CUSTOM] = "other.Backend"
    vllm.register()
    assert made.registered == {made.enum.CUSTOM: "other.Backend"} and "is other.Backend already" in caplog.text


# ---- The signatures of the wheels: `python python/tests/data/record.py` writes the file.

RECORDED = json.loads((Path(__file__).parent / "data/engines.json").read_text())


def accepts(function, arguments):
    """Whether a function takes arguments that have these names, in this order."""
    found = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    kinds = {each.kind for each in inspect.signature(function).parameters.values()}
    return {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD} <= kinds or (
        found[: len(arguments)] == arguments
    )


@pytest.mark.parametrize("release", RECORDED["vllm"])
def test_the_signatures_of_releases(monkeypatch, release):
    recorded = RECORDED["vllm"][release]
    made = stub.install(monkeypatch, "0.33")
    ours = {
        "AttentionBackend": made.backend.Backend, "AttentionMetadataBuilder": made.backend.Builder,
        "AttentionImplBase": made.backend.Layer, "AttentionImpl": made.backend.Layer,
    }  # fmt: skip
    for name, kind in ours.items():
        for method, told in recorded["classes"][name].items():
            if method in vars(kind):
                assert accepts(getattr(kind, method), told["arguments"]), (name, method, told["arguments"])
            else:
                assert not told["abstract"], f"{release}: {name}.{method} is abstract"
    layer = inspect.signature(made.backend.Layer.do_kv_cache_update).parameters
    assert list(layer)[1:] == recorded["update"]
    used = {"query_start_loc", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len",
            "block_table_tensor", "slot_mapping", "causal"}  # fmt: skip
    assert used <= set(recorded["metadata"])
    assert recorded["shape"] == "unasked" or made.backend.Backend.get_kv_cache_shape
    if recorded["layouts"]:
        assert {tuple(order) for order in recorded["layouts"].values()} == set(LAYOUTS.values())
