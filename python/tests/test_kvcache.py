"""Tests of ``flash_attn_with_kvcache``: on the CPU against a plain reference of FlashAttention-3's semantics, and on
a GPU against the CPU."""

from __future__ import annotations

import itertools
import math
import types
from typing import Any

import numpy as np
import pytest

import flashcore_attn as fa
from flashcore_attn import _kvcache

torch = pytest.importorskip("torch")

HEADS_K, DIM, ROTARY = 2, 32, 16
INT = torch.int32


def rotated(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool) -> Any:
    """Rows ``(row, head, dim)`` at the positions, in float64."""
    x, half = x.double().clone(), cos.shape[1]
    cos, sin = (table.double()[positions][:, None] for table in (cos, sin))
    pairs = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    first, second = (x[..., pair].clone() for pair in pairs)
    x[..., pairs[0]], x[..., pairs[1]] = first * cos - second * sin, first * sin + second * cos
    return x


def reference(case: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Output, LSE and both caches after the call."""
    causal, window = options.get("causal", False), options.get("window_size", (-1, -1))
    caches = [case.k_cache.clone(), case.v_cache.clone()]
    after = 0 if causal else window[1]
    local = causal or window != (-1, -1)

    def place(b: int, row: int) -> tuple[int, int]:
        if case.page_table is not None:
            size = case.k_cache.shape[1]
            return int(case.page_table[b, row // size]), row % size
        return (b if case.index is None else int(case.index[b])), row

    batch, rows, heads, dim = case.q.shape
    new = 0 if case.k is None else case.k.shape[1]
    for b, i in itertools.product(range(batch), range(new)):
        at, position = place(b, int(case.lengths[b]) + i), torch.tensor([int(case.lengths[b]) + i])
        key = case.k[b, i : i + 1]
        if case.cos is not None:
            key = rotated(key, case.cos, case.sin, position, options.get("rotary_interleaved", True))
        caches[0][at], caches[1][at] = key[0].to(caches[0].dtype), case.v[b, i]
    out, lse = torch.zeros(case.q.shape, dtype=torch.float64), torch.full((batch, heads, rows), -math.inf).double()
    for b in range(batch):
        length, pad = int(case.lengths[b]) + new, 0 if case.leftpad is None else int(case.leftpad[b])
        places = [place(b, row) for row in range(pad, length)]
        q = case.q[b].double()
        if case.cos is not None:
            positions = int(case.lengths[b]) + (torch.arange(rows) if local else torch.zeros(rows, dtype=torch.long))
            q = rotated(q, case.cos, case.sin, positions, options.get("rotary_interleaved", True)).to(case.q.dtype)
        for h, i in itertools.product(range(heads), range(rows)):
            level = i + len(places) - rows  # the key level with the row
            seen = [
                j for j in range(len(places))
                if (window[0] < 0 or j >= level - window[0]) and (after < 0 or j <= level + after)
            ]  # fmt: skip
            logits = [case.sink[h].double()] if case.sink is not None else []
            kv = h // (heads // HEADS_K)
            if seen:
                k, v = (torch.stack([cache[places[j]][kv] for j in seen]).double() for cache in caches)
                scores = k @ q[i, h].double() / math.sqrt(dim)
                cap = options.get("softcap", 0.0)
                scores = cap * torch.tanh(scores / cap) if cap else scores
                lse[b, h, i] = torch.logsumexp(torch.cat([scores, *(x[None] for x in logits)]), 0)
                out[b, i, h] = torch.exp(scores - lse[b, h, i]) @ v
            elif logits:
                lse[b, h, i] = logits[0]
    return out, lse, caches[0], caches[1]


def made(
    lengths: list[int], *, page: int | None = None, group: int = 1, rows: int = 1, new: int = 0, rotary: bool = False,
    leftpad: bool = False, indexed: bool = False, sink: bool = False, dtype: Any = torch.float32, room: int = 12,
) -> Any:  # fmt: skip
    """A call with random numbers, on a cache with ``room`` rows more than the longest length."""
    generator = torch.Generator().manual_seed(len(lengths) + 7 * group + new)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch, heads, most = len(lengths), group * HEADS_K, max(lengths) + new + room
    case = types.SimpleNamespace(q=random(batch, rows, heads, DIM), lengths=torch.tensor(lengths, dtype=INT))
    case.page_table = case.index = case.leftpad = case.k = case.v = case.cos = case.sin = case.sink = None
    entries, size = (batch + 2 * indexed, most) if page is None else (batch * -(-most // page) + 2, page)
    case.k_cache, case.v_cache = random(entries, size, HEADS_K, DIM), random(entries, size, HEADS_K, DIM)
    if page is not None:
        order = torch.randperm(entries, generator=generator)[: batch * -(-most // page)]
        case.page_table = order.to(INT).reshape(batch, -1)
    if indexed:
        case.index = torch.randperm(entries, generator=generator)[:batch].to(INT)
    if new:
        case.k, case.v = random(batch, new, HEADS_K, DIM), random(batch, new, HEADS_K, DIM)
    if rotary:
        angles = torch.rand(most + rows, ROTARY // 2, generator=generator) * 6.3
        case.cos, case.sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if leftpad:
        case.leftpad = (case.lengths // 3).to(INT)
    if sink:
        case.sink = torch.randn(heads, generator=generator)
    return case


def call(case: Any, **options: Any) -> Any:
    return fa.flash_attn_with_kvcache(
        case.q, case.k_cache, case.v_cache, case.k, case.v, case.cos, case.sin, case.lengths, case.index, case.leftpad,
        case.page_table, learnable_sink=case.sink, return_softmax_lse=True, **options,
    )  # fmt: skip


def check(case: Any, **options: Any) -> None:
    expected = reference(case, **options)
    out, lse = call(case, **options)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[case.q.dtype]
    torch.testing.assert_close(out.double(), expected[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected[1], atol=tolerance, rtol=tolerance)
    for cache, wanted in ((case.k_cache, expected[2]), (case.v_cache, expected[3])):
        torch.testing.assert_close(cache, wanted, atol=tolerance if case.cos is not None else 0, rtol=0)


@pytest.mark.parametrize("page", [None, 1, 3, 16, 64, 256])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_lengths_around_a_page(page: int | None, group: int) -> None:
    size = page or 16
    lengths = [0, 1, max(size - 1, 0), size, size + 1]
    check(made(lengths, page=page, group=group))
    check(made(lengths, page=page, group=group, rows=3, new=3), causal=True)
    check(made(lengths, page=page, group=group, new=1, rotary=True, leftpad=True), causal=True)
    check(made(lengths, page=page, group=group, rows=2, new=4, sink=True), window_size=(5, 0), softcap=3.0)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 1)}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rotary_of_some_dims(interleaved: bool, options: dict[str, Any], dtype: Any) -> None:
    case = made([5, 0, 17], page=4, group=2, rows=3, new=3, rotary=True, dtype=dtype)
    before = case.q.clone()
    check(case, rotary_interleaved=interleaved, **options)
    assert torch.equal(case.q, before)


def test_cache_entries_by_index() -> None:
    check(made([3, 9, 1], indexed=True, new=2, rotary=True, leftpad=True), causal=True)
    check(made([3, 9, 1], indexed=True, group=4))


def test_positions_are_not_read_without_a_rotary_table() -> None:
    for options in ({}, {"new": 2}):
        case, twin = (made([3, 9], page=4, **options) for _ in range(2))
        expected = call(case, causal=True)
        assert all(torch.equal(x, y) for x, y in zip(call(twin, causal=True, rotary_seqlens=twin.lengths), expected))


def test_rows_of_a_page_table_by_index() -> None:
    index = torch.tensor([2, 0, 3], dtype=INT)
    for options in ({}, {"new": 2, "rotary": True, "leftpad": True}):
        case, twin = (made([3, 9, 1], page=4, **options) for _ in range(2))
        expected = call(case, causal=True)
        table = torch.full((4, case.page_table.shape[1]), -7, dtype=INT)
        table[index.long()] = case.page_table
        twin.page_table, twin.index = table, index
        assert all(torch.equal(x, y) for x, y in zip(call(twin, causal=True), expected))
        assert torch.equal(twin.k_cache, case.k_cache) and torch.equal(twin.v_cache, case.v_cache)


def test_equal_lengths_are_one_number() -> None:
    case = made([6, 6], new=2, page=4)
    expected = reference(case, causal=True)
    case.lengths = 6
    out, _ = call(case, causal=True)
    torch.testing.assert_close(out.double(), expected[0], atol=2e-5, rtol=2e-5)


def test_packed_rows_are_those_of_a_batch() -> None:
    case = made([4, 11], page=3, group=2, rows=2, new=2, rotary=True)
    expected = reference(case, causal=True)
    starts = torch.tensor([0, 2, 4], dtype=INT)
    out, lse = fa.flash_attn_with_kvcache(
        case.q.flatten(0, 1), case.k_cache, case.v_cache, case.k.flatten(0, 1), case.v.flatten(0, 1), case.cos,
        case.sin, case.lengths, block_table=case.page_table, cu_seqlens_q=starts, cu_seqlens_k_new=starts,
        max_seqlen_q=2, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), expected[0].flatten(0, 1), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), expected[1].transpose(0, 1).flatten(1), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.k_cache, expected[2], atol=2e-6, rtol=0)


def test_keys_and_values_in_one_pool_and_heads_before_rows() -> None:
    case = made([4, 11], page=8, new=3)
    expected = reference(case, causal=True)
    pool = torch.stack([case.k_cache, case.v_cache], 1).transpose(2, 3).contiguous()  # page, 2, head, row, dim
    case.k_cache, case.v_cache = pool[:, 0].transpose(1, 2), pool[:, 1].transpose(1, 2)
    out, _ = call(case, causal=True)
    torch.testing.assert_close(out.double(), expected[0], atol=2e-5, rtol=2e-5)
    assert torch.equal(case.k_cache, expected[2]) and torch.equal(case.v_cache, expected[3])


def test_varlen_reads_pages() -> None:
    case = made([4, 11], page=3, group=2, rows=2)
    expected = reference(case, causal=True)
    starts, starts_k = torch.tensor([0, 2, 4], dtype=INT), torch.tensor([0, 4, 15], dtype=INT)
    lengths = ({"seqused_k": case.lengths}, {"cu_seqlens_k": starts_k})
    bounds = (None, 11, 1000)  # the last of them is more than the pages hold
    for named, name, longest in itertools.product(lengths, ("block_table", "page_table"), bounds):
        out = fa.flash_attn_varlen_func(
            case.q.flatten(0, 1), case.k_cache, case.v_cache, starts, max_seqlen_q=2, max_seqlen_k=longest, causal=True,
            **named, **{name: case.page_table},
        )  # fmt: skip
        torch.testing.assert_close(out.double(), expected[0].flatten(0, 1), atol=2e-5, rtol=2e-5)


def test_numpy_arrays_are_written_in_place() -> None:
    case = made([4, 11], page=3, new=2, rotary=True)
    expected = reference(case, causal=True)
    for name in ("q", "k_cache", "v_cache", "k", "v", "cos", "sin", "lengths", "page_table"):
        setattr(case, name, getattr(case, name).numpy())
    out, _ = call(case, causal=True)
    np.testing.assert_allclose(out, expected[0].numpy(), atol=2e-5)
    np.testing.assert_allclose(case.k_cache, expected[2].numpy(), atol=2e-6)
    case.k_cache = np.broadcast_to(case.k_cache, case.k_cache.shape)
    with pytest.raises(fa.ArgumentError, match="k_cache is read-only"):
        call(case)


def table_of(entry: int) -> Any:
    def change(case: Any) -> None:
        case.page_table[1, 0] = entry

    return change


def lengths_of(*lengths: int) -> Any:
    def change(case: Any) -> None:
        case.lengths = torch.tensor(lengths, dtype=INT)

    return change


REFUSED = [
    (table_of(-1), r"invalid value '-1' for page_table\[1\]\[0\]: expected 0 to "),
    (table_of(2**31 - 1), r"invalid value '2147483647' for page_table\[1\]\[0\]"),
    (lengths_of(4, -1), r"invalid value '-1' for cache_seqlens\[1\]"),
    (lengths_of(4, 2**31 - 1), r"invalid value '2147483647' for cache_seqlens\[1\]: expected 0 to "),
    (lengths_of(4, 23), r"invalid value '23' for cache_seqlens\[1\]: .* room for 24 keys, of which 2 are new"),
    (lambda case: setattr(case, "leftpad", torch.tensor([1, 20], dtype=INT)), r"for cache_leftpad\[1\]"),
    (lambda case: setattr(case, "cos", case.cos[:12]), "rotary_sin"),
    (lambda case: vars(case).update(cos=case.cos[:12], sin=case.sin[:12]), "rotary_cos has 12 rows"),
    (lambda case: setattr(case, "v", None), "k and v must both be given"),
    (lambda case: setattr(case, "lengths", None), "cache_seqlens is missing"),
    (lambda case: setattr(case, "k", case.k[:1]), "the shape of v"),
    (lambda case: setattr(case, "index", case.lengths), "'4' for cache_batch_idx: expected 0 to 1, the rows of page_t"),
    (lambda case: setattr(case, "page_table", case.page_table[:1]), "the shape of page_table"),
    (lambda case: setattr(case, "k_cache", case.k_cache[..., ::2]), "the head_dim of k_cache"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_a_refused_call_leaves_the_cache_as_it_was(change: Any, message: str) -> None:
    case = made([4, 11], page=4, new=2, rotary=True, room=10)
    change(case)
    before = case.k_cache.clone(), case.v_cache.clone()
    with pytest.raises(fa.ArgumentError, match=message):
        call(case, causal=True)
    assert torch.equal(case.k_cache, before[0]) and torch.equal(case.v_cache, before[1])


def test_entries_past_the_length_are_never_followed() -> None:
    case = made([4, 11], page=4, new=1)
    expected = reference(case, causal=True)
    case.page_table[0, 2:], case.page_table[1, 3:] = -7, 2**31 - 1
    out, _ = call(case, causal=True)
    torch.testing.assert_close(out.double(), expected[0], atol=2e-5, rtol=2e-5)


def test_repeated_pages_are_shared_keys() -> None:
    case = made([8, 8], page=4)
    case.page_table[1] = case.page_table[0]
    check(case)
    case.page_table[:] = case.page_table[0, 0]
    check(case)


def test_wrong_types_are_refused() -> None:
    case = made([4, 11], page=4, new=2)
    case.page_table = case.page_table.long()
    with pytest.raises(fa.DTypeError, match="page_table"):
        call(case)
    case = made([4, 11], page=4, new=2)
    case.k = case.k.half()
    with pytest.raises(fa.DTypeError, match="k has dtype"):
        call(case)


def test_the_operator_declares_what_it_writes() -> None:
    operator = torch.ops.flashcore_attn.attention_with_cache
    written = [x.name for x in operator.default._schema.arguments if x.alias_info and x.alias_info.is_write]
    assert written == ["k_cache", "v_cache"]
    case = made([4, 11], page=4, group=2, new=2, rotary=True)
    arguments = (
        case.q, case.k_cache, case.v_cache, case.k, case.v, None, case.cos, case.sin, None, True, False, -1, 0, None,
        0.0, True, None, None, None, case.lengths, None, 2, 1, 4 * case.page_table.shape[1], None, "", "", [], [], [],
        None, None, None, [0, 0, 0], case.page_table,
    )  # fmt: skip
    torch.library.opcheck(operator.default, arguments)


def test_a_compiled_call_writes_the_cache() -> None:
    case = made([4, 11], page=4, group=2, new=2, rotary=True)
    expected = reference(case, causal=True)
    compiled = torch.compile(lambda case: call(case, causal=True), fullgraph=True, backend="aot_eager")
    out, lse = compiled(case)
    torch.testing.assert_close(out.double(), expected[0], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(case.k_cache, expected[2], atol=2e-6, rtol=0)
    read = made([4, 11], page=4)
    out, lse = torch.compile(call, fullgraph=True, backend="aot_eager")(read)
    torch.testing.assert_close(lse.double(), reference(read)[1], atol=2e-5, rtol=2e-5)


def test_compiled_calls_take_a_length_that_varies() -> None:
    cache, q = torch.randn(2, 12, 2, DIM), torch.randn(2, 1, 4, DIM)
    torch._dynamo.reset()
    attend = lambda length: fa.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length)  # noqa: E731
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (3, 5, 12):
        assert torch.equal(compiled(length), attend(length))


@pytest.mark.parametrize("inference", [False, True])
def test_autograd_is_told_that_the_cache_was_written(inference: bool) -> None:
    case = made([4, 11], page=4, new=2)
    before = case.k_cache._version, case.v_cache._version
    with torch.inference_mode(inference):
        call(case, causal=True)
        assert case.k_cache._version > before[0] and case.v_cache._version > before[1]
        copies = made([4, 11], page=4, new=2)  # tensors of the mode itself, which have no versions
        assert torch.equal(call(copies, causal=True)[0], call(made([4, 11], page=4, new=2), causal=True)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cuts", [[0, 23], [0, 9, 23], [0, 1, 1, 5, 20, 23]])
def test_merged_parts_are_the_whole(dtype: Any, cuts: list[int]) -> None:
    q, k, v = (torch.randn(2, rows, heads, DIM).to(dtype) for rows, heads in ((3, 4), (23, 2), (23, 2)))
    whole, lse, _ = fa.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [
        fa.flash_attn_func(q, k[:, a:b], v[:, a:b], return_attn_probs=True)[:2] for a, b in itertools.pairwise(cuts)
    ]
    for convert in (lambda x: x, lambda x: x.numpy()) if dtype != torch.bfloat16 else (lambda x: x,):
        out, sums = fa.merge_states([convert(out) for out, _ in parts], [convert(lse) for _, lse in parts])
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
        torch.testing.assert_close(torch.as_tensor(out), whole, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(torch.as_tensor(sums), lse, atol=1e-4, rtol=1e-5)
    # Where FlashCore has no kernel, PyTorch's operators merge.
    from flashcore_attn._cached import _merged

    out, sums = _merged(*map(list, zip(*parts)))
    torch.testing.assert_close(out, whole, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(sums, lse, atol=1e-4, rtol=1e-5)
    torch.library.opcheck(torch.ops.flashcore_attn.merge_states.default, tuple(map(list, zip(*parts))))


def test_parts_that_do_not_fit_are_refused() -> None:
    out, lse = torch.ones(2, 3, 4, 8), torch.zeros(2, 4, 3)
    for outs, lses, message in (
        ([], [], "at least one"),
        ([out], [lse, lse], "1 outs and 2 lses"),
        ([out, out[:1]], [lse, lse], r"the shape of outs\[1\]"),
        ([out], [lse[:, :2]], r"the shape of lses\[0\]"),
    ):
        with pytest.raises(fa.ArgumentError, match=message):
            fa.merge_states(outs, lses)
    with pytest.raises(fa.DTypeError, match=r"outs\[1\]"):
        fa.merge_states([out, out.half()], [lse, lse])


def on_gpu(case: Any) -> Any:
    """The case with copies of its tensors on the GPU."""
    fields = vars(case).items()
    return types.SimpleNamespace(**{name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in fields})


def compare(gpu: Any, cpu: Any, got: Any, **options: Any) -> None:
    """Compares a call on the GPU, whose results are ``got``, with the call on the CPU."""
    expected = call(cpu, **options)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[cpu.q.dtype]
    for x, wanted in zip(got, expected):
        torch.testing.assert_close(x.cpu(), wanted, atol=tolerance, rtol=tolerance)
    for name in ("k_cache", "v_cache"):  # to the bit
        assert torch.equal(getattr(gpu, name).cpu(), getattr(cpu, name)), name


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("page", "kind"), [
    (None, "float16"), (1, "bfloat16"), (3, "float32"), (16, "float16"), (64, "bfloat16"), (None, "float32")
])  # fmt: skip
@pytest.mark.parametrize("group", [1, 4, 8])
def test_a_gpu_appends_as_the_cpu_does(page: int | None, group: int, kind: str) -> None:
    size = page or 16
    lengths = [0, 1, max(size - 1, 0), size, size + 1, 23]
    for rows, options in ((1, {}), (3, {"causal": True}), (2, {"window_size": (5, 0), "softcap": 3.0})):
        arguments = {"page": page, "group": group, "rows": rows, "new": rows, "dtype": getattr(torch, kind)}
        turned = {**options, "rotary_interleaved": rows == 3}
        for case, given in (
            (made(lengths, **arguments), options),
            (made(lengths, **arguments, rotary=True, leftpad=True), turned),
            (made(lengths, **arguments, rotary=True, sink=True, indexed=page is None), turned),
        ):
            gpu = on_gpu(case)
            compare(gpu, case, call(gpu, **given), **given)


@pytest.mark.needs_cuda
def test_packed_rows_on_a_gpu() -> None:
    case = made([4, 11, 0], page=3, group=2, rows=2, new=2, rotary=True, dtype=torch.bfloat16)
    gpu = on_gpu(case)
    starts = torch.tensor([0, 2, 4, 6], dtype=INT, device="cuda")
    out, lse = fa.flash_attn_with_kvcache(
        gpu.q.flatten(0, 1), gpu.k_cache, gpu.v_cache, gpu.k.flatten(0, 1), gpu.v.flatten(0, 1), gpu.cos, gpu.sin,
        gpu.lengths, block_table=gpu.page_table, cu_seqlens_q=starts, cu_seqlens_k_new=starts, max_seqlen_q=2,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    expected, sums = call(case, causal=True)
    torch.testing.assert_close(out.cpu(), expected.flatten(0, 1), atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(lse.cpu(), sums.transpose(0, 1).flatten(1), atol=3e-2, rtol=3e-2)
    assert torch.equal(gpu.k_cache.cpu(), case.k_cache) and torch.equal(gpu.v_cache.cpu(), case.v_cache)


@pytest.mark.needs_cuda
def test_a_graph_appends_to_longer_and_shorter_sequences() -> None:
    case = made([4, 11, 0], page=4, group=4, new=1, rotary=True, dtype=torch.float16, room=30)
    gpu, graph = on_gpu(case), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(gpu, causal=True)
    for lengths in ([4, 11, 0], [5, 12, 1], [39, 0, 7], [1, 2, 3]):
        case.lengths = torch.tensor(lengths, dtype=INT)
        case.page_table = case.page_table.roll(1, 1)
        gpu.lengths.copy_(case.lengths)
        gpu.page_table.copy_(case.page_table)
        graph.replay()
        compare(gpu, case, got, causal=True)


@pytest.mark.needs_cuda
def test_hostile_arrays_on_a_gpu_lead_nowhere() -> None:
    for entry, length in itertools.product((-1, 2**31 - 1, 7_000), (2**31 - 1, -5, 9)):
        case = made([4, 11], page=4, group=4, new=2, rotary=True, dtype=torch.float16)
        gpu = on_gpu(case)
        gpu.page_table[1, 2:], gpu.lengths[0] = entry, length
        out, lse = call(gpu, causal=True)
        torch.cuda.synchronize()
        assert not out.isnan().any() and lse.shape == (2, 8, 1)
        # The rows of sequence 1 have no page, and those of sequence 0 no place or one of its own pages.
        own = set(case.page_table[0].tolist())
        others = [page for page in range(case.k_cache.shape[0]) if page not in own]
        assert torch.equal(gpu.k_cache.cpu()[others], case.k_cache[others])


@pytest.mark.parametrize("kind", ["cpu", "pretended", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def test_a_result_and_its_log_sum_exp_are_written_into_given_memory(kind: str, request: Any) -> None:
    if kind == "pretended":
        request.getfixturevalue("pretended_gpu")
    draw = torch.Generator().manual_seed(7)
    shapes = ((2, 3, 4, 32), (2, 40, 2, 32), (2, 40, 2, 16))
    q, k, v = (torch.randn(x, generator=draw).to("cuda" if kind == "cuda" else "cpu") for x in shapes)
    right = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=33, return_softmax_lse=True)
    memory = q.new_full((2, 3, 4, 16), math.nan), q.new_full((2, 4, 3), math.nan)
    made = _kvcache.attend_to_cache(memory, q, k, v, cache_seqlens=33, return_softmax_lse=True)
    assert all(x is y for x, y in zip(made, memory)) and all(torch.equal(x, y) for x, y in zip(made, right))
