"""Tests of ``reshape_and_cache`` against plain loops, and on a GPU against the CPU."""

from __future__ import annotations

from typing import Any

import pytest

import flashcore_attn as fa

torch = pytest.importorskip("torch")

HEADS, DIMS, PAGES = 2, (64, 32), 5
SLOTS = [7, -1, 0, 19, 3, 12]
EVERY_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])


def made(dtype: Any, cache: Any, *, page: int = 4, order: str = "nshd", device: str = "cpu") -> list[Any]:
    """Keys and values with a padding row, and caches whose dimensions lie in this order in memory."""
    generator = torch.Generator().manual_seed(3)
    new = [torch.randn(len(SLOTS) + 1, HEADS, dim, generator=generator).to(dtype) for dim in DIMS]
    places, caches = ["nshd".index(x) for x in order], []
    for dim in DIMS:
        shape = (PAGES * 4 // page, page, HEADS, dim)
        plain = torch.zeros([shape[i] for i in places]).to(cache)
        caches.append(plain.permute([places.index(i) for i in range(4)]))
    return [x.to(device) for x in (*new, *caches)]


def expected(arrays: list[Any], slots: list[int], factors: tuple[Any, Any] = (None, None)) -> list[Any]:
    key, value, *caches = arrays
    after = [x.clone() for x in caches]
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        at = divmod(slot, after[0].shape[1])
        for new, cache, factor in zip((key, value), after, factors):
            x = new[row].float() if factor is None else new[row].float() / factor.reshape(-1, 1)
            largest = torch.finfo(cache.dtype).max
            cache[at] = x.clamp(-largest, largest).to(cache.dtype)
    return after


def same(found: list[Any], wanted: list[Any]) -> None:
    for x, y in zip(found, wanted):
        size = torch.uint8 if x.element_size() == 1 else torch.int16 if x.element_size() == 2 else torch.int32
        assert torch.equal(x.cpu().contiguous().view(size), y.cpu().contiguous().view(size))


@EVERY_DEVICE
@pytest.mark.parametrize("integers", [torch.int64, torch.int32])
@pytest.mark.parametrize("order", ["nshd", "nhsd", "snhd"])
def test_rows_go_to_their_slots(device: str, integers: Any, order: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for page in (1, 2, 4):
            arrays = made(dtype, dtype, page=page, order=order, device=device)
            wanted = expected(arrays, SLOTS)
            assert fa.reshape_and_cache(*arrays, torch.tensor(SLOTS, dtype=integers, device=device)) is None
            same(arrays[2:], wanted)


@EVERY_DEVICE
@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e5m2"])
def test_8_bit_caches_are_divided_by_their_factors(device: str, kind: str) -> None:
    eight = torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn
    slots = torch.tensor(SLOTS, device=device)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for scales in ((torch.tensor([0.003]), torch.tensor(2.5)), (torch.tensor([0.5, 0.01]), torch.ones(HEADS))):
            factors = tuple(x.to(device) for x in scales)
            arrays = made(dtype, eight, device=device)
            wanted = expected(arrays, SLOTS, factors)
            given = arrays[2:] if kind == "auto" else [x.view(torch.uint8) for x in arrays[2:]]
            fa.reshape_and_cache(*arrays[:2], *given, slots, kind, *factors)
            same(arrays[2:], wanted)
        arrays = made(dtype, eight, device=device)
        wanted = expected(arrays, SLOTS)
        fa.reshape_and_cache(*arrays, slots)
        same(arrays[2:], wanted)


def test_many_rows_on_several_threads() -> None:
    count, slots = 3000, torch.randperm(4000)[:3000]
    slots[5] = slots[2900]  # the later row is kept
    key, value = torch.randn(2, count, HEADS, 64)
    caches = [torch.zeros(250, 16, HEADS, 64) for _ in range(2)]
    fa.reshape_and_cache(key, value, *caches, slots)
    for new, cache in zip((key, value), caches):
        wanted = torch.zeros(4000, HEADS, 64)
        for row, slot in enumerate(slots.tolist()):
            wanted[slot] = new[row]
        assert torch.equal(cache.flatten(0, 1), wanted)


@pytest.mark.needs_cuda
def test_slots_outside_of_the_cache_on_a_gpu() -> None:
    for far in (20, 2**31, 2**62, -(2**62)):
        arrays = made(torch.float16, torch.float16, device="cuda")
        slots = [far, *SLOTS[1:]]
        wanted = expected(arrays, [-1, *SLOTS[1:]])
        fa.reshape_and_cache(*arrays, torch.tensor(slots, device="cuda"))
        same(arrays[2:], wanted)


@pytest.mark.needs_cuda
def test_a_graph_writes_to_other_slots() -> None:
    arrays, slots = made(torch.float16, torch.float16, device="cuda"), torch.tensor(SLOTS, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fa.reshape_and_cache(*arrays, slots)
    for shift in (1, 2):
        now = [slot + shift if slot >= 0 else slot for slot in SLOTS[:-1]] + [-1]
        now = [slot if slot < 20 else -1 for slot in now]
        slots.copy_(torch.tensor(now))
        wanted = expected(arrays, now)
        graph.replay()
        same(arrays[2:], wanted)


REFUSED = [
    (lambda x: x.update(slot_mapping=torch.tensor([20])), "invalid value '20' for the slot of slot_mapping"),
    (lambda x: x.update(slot_mapping=torch.tensor([2**40])), "for the slot of slot_mapping"),
    (lambda x: x.update(slot_mapping=torch.zeros(9, dtype=torch.int64)), "number of elements of slot_mapping"),
    (lambda x: x.update(value=x["value"][:2]), "shape of value"),
    (lambda x: x.update(value_cache=x["value_cache"][:, :2]), "shape of value_cache"),
    (lambda x: x.update(key_cache=x["key_cache"][..., ::2]), "key_cache"),
    (lambda x: x.update(key=x["key"][0]), "key has 2 dimensions; it takes 3"),
    (lambda x: x.update(kv_cache_dtype="int8"), "kv_cache_dtype"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refused_calls_write_nothing(change: Any, message: str) -> None:
    names = ("key", "value", "key_cache", "value_cache")
    arguments = dict(zip(names, made(torch.float16, torch.float16)))
    arguments["slot_mapping"] = torch.tensor(SLOTS)
    change(arguments)
    with pytest.raises(fa.ArgumentError, match=message):
        fa.reshape_and_cache(**arguments)
    assert not arguments["key_cache"].any() and not arguments["value_cache"].any()


def test_wrong_types_are_refused() -> None:
    slots = torch.tensor(SLOTS)
    for key, cache, kind in (
        (torch.float16, torch.bfloat16, "auto"),
        (torch.float16, torch.float16, "fp8"),
        (torch.float64, torch.float64, "auto"),
    ):
        with pytest.raises(fa.DTypeError):
            fa.reshape_and_cache(*made(key, cache), slots, kind)
    with pytest.raises(fa.DTypeError, match="slot_mapping"):
        fa.reshape_and_cache(*made(torch.float16, torch.float16), slots.float())
    with pytest.raises(fa.UnsupportedError, match="type of key"):
        fa.reshape_and_cache(*(x.numpy() for x in made(torch.float16, torch.float16)), slots)


def test_the_operator_declares_what_it_writes() -> None:
    operator = torch.ops.flashcore_attn.reshape_and_cache
    written = [x.name for x in operator.default._schema.arguments if x.alias_info and x.alias_info.is_write]
    assert written == ["key_cache", "value_cache"]
    arrays = made(torch.float16, torch.float16)
    torch.library.opcheck(operator.default, (*arrays, torch.tensor(SLOTS), "auto", None, None))
    wanted = expected(arrays, SLOTS)
    compiled = torch.compile(lambda *x: fa.reshape_and_cache(*x), fullgraph=True, backend="aot_eager")
    compiled(*arrays, torch.tensor(SLOTS))
    same(arrays[2:], wanted)
