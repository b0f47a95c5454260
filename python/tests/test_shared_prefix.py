"""Tests of ``flash_attn_with_shared_prefix`` against ``flash_attn_with_kvcache`` over the whole sequences."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

import flashcore_attn as fa

torch = pytest.importorskip("torch")

PAGE, HEADS_K, DIM = 16, 2, 64


def made(prefix: int, own: list[int], rows: int = 1, group: int = 4, dtype: Any = None, device: str = "cpu") -> Any:
    """Queries, and a cache whose sequences have ``prefix`` shared keys and ``own`` further keys each."""
    torch.manual_seed(prefix + len(own))
    dtype, shared = dtype or torch.float32, prefix // PAGE
    pages_of = [-(-length // PAGE) for length in own]
    pages = torch.randperm(shared + sum(pages_of) + 1).to(torch.int32)
    table = torch.zeros(len(own), shared + max(pages_of), dtype=torch.int32)
    table[:, :shared] = pages[:shared]
    used = shared
    for entry, count in enumerate(pages_of):
        table[entry, shared : shared + count] = pages[used : used + count]
        used += count
    cache = [torch.randn(len(pages), PAGE, HEADS_K, DIM).to(dtype).to(device) for _ in range(2)]
    q = torch.randn(len(own), rows, HEADS_K * group, DIM).to(dtype).to(device)
    lengths = torch.tensor([prefix + length for length in own], dtype=torch.int32)
    return types.SimpleNamespace(
        q=q, k=cache[0], v=cache[1], prefix=prefix, lengths=lengths.to(device), table=table.to(device)
    )


def check(case: Any, **options: Any) -> None:
    whole, lse = fa.flash_attn_with_kvcache(
        case.q, case.k, case.v, cache_seqlens=case.lengths, page_table=case.table, return_softmax_lse=True, **options
    )
    got, got_lse = fa.flash_attn_with_shared_prefix(
        case.q, case.k, case.v, case.prefix, case.lengths, case.table, return_softmax_lse=True, **options
    )
    assert got.shape == whole.shape and got.dtype == whole.dtype
    # Both parts and the merged result are rounded: three roundings, and that of the whole.
    roundoff = torch.finfo(whole.dtype).eps / 2
    tolerance = 4 * roundoff * case.v.float().abs().max().item() + 1e-5
    assert (got.float() - whole.float()).abs().max().item() <= tolerance
    torch.testing.assert_close(got_lse, lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", [0, 16, 160, 1024])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_the_result_is_that_of_the_whole_sequences(prefix: int, group: int) -> None:
    check(made(prefix, [1, 15, 16, 17, 40], group=group))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinks_softcap_and_scale(dtype: Any) -> None:
    case = made(64, [5, 33, 1], dtype=dtype)
    check(case, softcap=8.0, softmax_scale=0.3, learnable_sink=torch.linspace(-2, 3, case.q.shape[2]).to(dtype))


def test_causal_rows_see_the_whole_prefix() -> None:
    check(made(48, [5, 33, 7], rows=5), causal=True)


def test_packed_rows() -> None:
    case = made(32, [4, 20, 9], rows=4)
    options = {"cu_seqlens_q": torch.tensor([0, 4, 8, 12], dtype=torch.int32), "max_seqlen_q": 4, "causal": True}
    case.q = case.q.flatten(0, 1)
    check(case, **options)


def test_a_sequence_without_keys_of_its_own() -> None:
    check(made(32, [0, 3]))


def test_numpy_arrays() -> None:
    case = made(32, [4, 20])
    args = [x.numpy() for x in (case.q, case.k, case.v)]
    got = fa.flash_attn_with_shared_prefix(*args, 32, case.lengths.numpy(), case.table.numpy())
    expected = fa.flash_attn_with_shared_prefix(case.q, case.k, case.v, 32, case.lengths, case.table)
    np.testing.assert_array_equal(got, expected.numpy())


def test_only_the_first_row_of_the_table_has_the_prefix() -> None:
    case = made(32, [4, 20])
    expected = fa.flash_attn_with_shared_prefix(case.q, case.k, case.v, 32, case.lengths, case.table)
    case.table[1, :2] = 10_000
    got = fa.flash_attn_with_shared_prefix(case.q, case.k, case.v, 32, case.lengths, case.table)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefix": 24}, "'24' for prefix_len: expected a multiple of the page size 16"),
        ({"prefix": 160}, "'160' for prefix_len.*at most 64"),
        ({"prefix": -16}, "prefix_len"),
        ({"lengths": torch.tensor([36, 31], dtype=torch.int32)}, "31 keys; expected at least 32"),
        ({"lengths": torch.tensor([36], dtype=torch.int32)}, "cache_seqlens"),
        ({"lengths": None}, "cache_seqlens is missing"),
        ({"table": None}, "page_table is missing"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], message: str) -> None:
    case = made(32, [4, 20])
    vars(case).update(change)
    with pytest.raises(fa.ArgumentError, match=message):
        fa.flash_attn_with_shared_prefix(case.q, case.k, case.v, case.prefix, case.lengths, case.table)


def test_causal_rows_need_as_many_keys() -> None:
    case = made(32, [4, 20], rows=5)
    with pytest.raises(fa.ArgumentError, match="36 keys; expected at least 37: prefix_len and the 5 rows of q"):
        fa.flash_attn_with_shared_prefix(case.q, case.k, case.v, 32, case.lengths, case.table, causal=True)


def test_a_compiled_call() -> None:
    case = made(32, [4, 20])
    args = (case.q, case.k, case.v, 32, case.lengths, case.table)
    compiled = torch.compile(fa.flash_attn_with_shared_prefix, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*args), fa.flash_attn_with_shared_prefix(*args))


@pytest.mark.needs_cuda
@pytest.mark.parametrize("prefix", [64, 4096])
def test_a_graph_replays_with_other_lengths(prefix: int) -> None:
    case = made(prefix, [40, 33, 90, 1], dtype=torch.bfloat16, device="cuda")
    check(case)
    graph = torch.cuda.CUDAGraph()
    args = (case.q, case.k, case.v, prefix, case.lengths, case.table)
    with torch.cuda.graph(graph):
        out = fa.flash_attn_with_shared_prefix(*args)
    case.lengths.copy_(prefix + torch.tensor([3, 17, 60, 2]))
    graph.replay()
    expected = fa.flash_attn_with_shared_prefix(*args)
    assert torch.equal(out, expected)
