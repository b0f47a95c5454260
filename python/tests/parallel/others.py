"""What the ranks of the other tests compute."""

from __future__ import annotations

import contextlib

import cases
import host_peers
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import flashcore_attn
from flashcore_attn import parallel
from flashcore_attn.parallel._exchange import Exchange


def message_of(group, *change):
    """The class and the message of the error of a call in which ranks differ."""
    inputs, options = arguments(group, *change)
    try:
        parallel.context_parallel_attn_func(*inputs, group, **options)
    except flashcore_attn.FlashCoreError as error:
        return type(error).__name__, str(error)
    return None


def arguments(group, of_rank, what, value):
    shape = {"batch": 1, "rows": 8, "heads": 2, "dim": 8, "dtype": "float32"}
    options = {"causal": True, "schedule": "all_gather"}
    if dist.get_rank(group) in of_rank:
        (shape if what in shape else options)[what] = value
    size = (shape["batch"], shape["rows"], shape["heads"], shape["dim"])
    return [torch.zeros(size, dtype=cases.DTYPES.get(shape["dtype"], torch.float64))] * 3, options


def agreements(group, each_time):
    """The number of headers that are compared during two calls of a shape and one of another shape."""
    from flashcore_attn.parallel import _exchange

    compared = []
    headers, where = _exchange._headers, _exchange._EACH_TIME
    _exchange._EACH_TIME = where if each_time else {}
    _exchange._headers = lambda *told: compared.append(told) or headers(*told)
    try:
        for rows in (4, 4, 6):
            q = torch.zeros(1, rows, 3, 8)
            parallel.context_parallel_attn_func(q, q, q, group, causal=True)
    finally:
        _exchange._headers, _exchange._EACH_TIME = headers, where
        _exchange._agreements.clear()
    return len(compared)


def of_decoding(group, lengths, sink):
    """The difference to a cache in one place, and the bits of the result."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    draw = torch.Generator().manual_seed(5)
    q = torch.randn(3, 2, 4, 16, generator=draw)
    k, v = torch.randn(3, 24, 2, 16, generator=draw), torch.randn(3, 24, 2, 8, generator=draw)
    sink = torch.randn(4, generator=draw) if sink else None
    each = 24 // ranks
    mine = slice(rank * each, (rank + 1) * each)
    used = torch.tensor(lengths, dtype=torch.int32)
    here = (used - mine.start).clamp(0, each).int()
    made = parallel.decode_attn_func(
        q, k[:, mine], v[:, mine], group, cache_seqlens=here, learnable_sink=sink, return_lse=True
    )
    right = flashcore_attn.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=used, learnable_sink=sink, return_softmax_lse=True
    )
    assert torch.equal(made[1].isinf(), right[1].isinf())
    worst = max((a - b).nan_to_num(0, 0, 0).abs().max().item() for a, b in zip(made, right))
    return worst, made[0].numpy().tobytes()


def of_decoding_in_place(group, lengths):
    """The bits of a result, the calls through the memory of peers, and those whose result was made in it."""
    with host_peers.through_results(group) as memory:
        for _ in range(3):
            worst, bits = of_decoding(group, lengths, True)
            assert worst < 2e-6
        out, lse = torch.full((1, 2, 4, 8), float(dist.get_rank(group))), torch.zeros(1, 4, 2)
        mean = (dist.get_world_size(group) - 1) / 2
        assert torch.allclose(parallel.merge_over_group(out, lse, group)[0], torch.full_like(out, mean))
        out, lse = out.expand(1 << 10, 2, 4, 8), lse.expand(1 << 10, 4, 2)
        assert torch.allclose(parallel.merge_over_group(out, lse, group)[0], torch.full_like(out, mean))
        return bits, memory.turn, memory.in_place


def of_decoding_that_differs(group):
    rows = 1 + dist.get_rank(group)
    try:
        parallel.decode_attn_func(torch.zeros(1, rows, 2, 8), torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 8), group)
    except flashcore_attn.FlashCoreError as error:
        return type(error).__name__, str(error)
    return None


def of_unsharding(group, split):
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    split = cases.split_of(split, ranks)
    x = torch.arange(2 * cases.ROWS * 3).view(2, cases.ROWS, 3)
    return torch.equal(parallel.unshard(parallel.shard(x, split, rank), split, group), x)


def of_dtensor(group):
    """The worst difference of O and dK to those of one process, of a DTensor."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(group, "cpu")
    rank, split = dist.get_rank(group), parallel.split_sequence(32, dist.get_world_size(group))
    tensors = [x[:, :32].requires_grad_() for x in cases.drawn(2, 4, 2, 16, 16, torch.float32)[:3]]
    right = flashcore_attn.flash_attn_func(*tensors, causal=True)
    gradient = torch.autograd.grad(right.square().sum(), tensors)[1]
    shards = [parallel.shard(x.detach(), split, rank) for x in tensors]
    mine = [DTensor.from_local(x, mesh, [Shard(1)]).requires_grad_() for x in shards]
    out = parallel.context_parallel_attn_func(*mine, causal=True)
    assert isinstance(out, DTensor) and out.placements == (Shard(1),)
    out.to_local().square().sum().backward()
    pairs = ((out.to_local(), right), (mine[1].grad.to_local(), gradient))
    return max((a - parallel.shard(b, split, rank)).abs().max().item() for a, b in pairs)


class Model(torch.nn.Module):
    """A layer that knows nothing of ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 1)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (4, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def of_model(group, with_pytorch):
    """The worst difference of the loss and of the gradients to those of one process."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = DeviceMesh.from_group(group, "cpu")
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(2, 32, 16, generator=draw)
    model = Model()
    right = model(x).square().sum()
    gradients = torch.autograd.grad(right, list(model.parameters()))
    with contextlib.ExitStack() as stack:
        if with_pytorch:
            stack.enter_context(context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]))
        else:
            x = parallel.shard_zigzag(x, group)[0]
        stack.enter_context(parallel.sharded_sdpa(mesh))
        assert x.shape[1] == 32 // dist.get_world_size(group)
        loss = model(x).square().sum()
        found = list(torch.autograd.grad(loss, list(model.parameters())))
    found = [x.detach() for x in (loss, *found)]
    for each in found:
        dist.all_reduce(each, group=group)
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, (right, *gradients)))


def refused_sdpa(group):
    q = torch.zeros(1, 2, 8, 8)
    told = []
    for options in ({"attn_mask": torch.zeros(8, 8)}, {"dropout_p": 0.5}):
        with parallel.sharded_sdpa(group):
            try:
                F.scaled_dot_product_attention(q, q, q, **options)
            except flashcore_attn.UnsupportedError as error:
                told.append(error.reason)
    return told


def of_explanation(group):
    q = torch.zeros(1, 64, 4, 16)
    return parallel.explain(q, q, q, group, causal=True)


def of_failure(rank, ranks, port, pipe):
    """A rank that says that it is ready, and then makes a call, or ends, when it is told."""
    from datetime import timedelta

    from rank_pool import join

    join(rank, ranks, port, 120)
    dist.barrier()  # processes start at different times
    group = dist.new_group(timeout=timedelta(seconds=6))
    q = torch.zeros(1, 8, 2, 8, requires_grad=True)
    out = parallel.context_parallel_attn_func(q, q, q, group, causal=True, schedule="ring")
    pipe.send("ready")
    what = pipe.recv()
    try:
        if what == "forward":
            parallel.context_parallel_attn_func(q, q, q, group, causal=True, schedule="ring")
        elif what == "backward":
            out.sum().backward()
        pipe.send(None)
    except flashcore_attn.GroupError as error:
        pipe.send(str(error))
    pipe.recv()  # until all have answered


def of_example(group, steps, rows):
    """The losses of the example, sharded and of one rank."""
    import importlib.util
    from pathlib import Path

    path = Path(__file__).resolve().parents[3] / "examples/train_sharded.py"
    example = importlib.util.module_from_spec(importlib.util.spec_from_file_location("train_sharded", path))
    example.__spec__.loader.exec_module(example)
    return [example.train(steps, rows, torch.device("cpu"), x) for x in (group, None)]


def of_suite(group):
    """The rows of the benchmark's suite, with short sequences."""
    from flashcore_bench import _parallel

    cpu = torch.device("cpu")
    works = _parallel.works(2, 4096)
    rows = [row for work in works for row in _parallel.rows_of(work, group, cpu, torch.float32, 0.0)]
    return [len(works), rows, _parallel.table(rows)]


def of_clock(group):
    """The medians of two equal calls on a clock that each call finds slower, the kept samples, and the calls
    made."""
    import statistics
    from types import SimpleNamespace

    from flashcore_bench import _parallel

    now, made = [0.0], [0, 0]

    def call(number):
        made[number] += 1
        now[0] += 1e-3 * (1 + sum(made) / 4000)

    clock, _parallel.time = _parallel.time, SimpleNamespace(perf_counter=lambda: now[0])
    try:
        both = [lambda: call(0), lambda: call(1)]
        samples = _parallel.timed(both, group, torch.device("cpu"), 1.0)
    finally:
        _parallel.time = clock
    return [statistics.median(x) for x in samples], [len(x) for x in samples], made


def of_compiled_step(group):
    """The worst difference of a compiled step to the eager one, and the graphs of two steps."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()

    def step(q, k, v):
        return parallel.context_parallel_attn_func(q * 2, k, v, group, causal=True).sin()

    inputs = [x[:, :8].requires_grad_() for x in cases.drawn(1, 4, 2, 16, 16, torch.float32)[:3]]
    right = step(*inputs)
    gradients = torch.autograd.grad(right.sum(), inputs)
    compiled = torch.compile(step, backend=counter)
    for _ in range(2):
        out = compiled(*inputs)
        found = torch.autograd.grad(out.sum(), inputs)
    worst = max((a - b).abs().max().item() for a, b in zip((out, *found), (right, *gradients)))
    torch._dynamo.reset()
    return worst, counter.frame_count


def through_peers(group, mask, split, schedule, heads_k, slices):
    """Compares a sharded call with one process', with rows written into the memory of peers: twice, so that slots of
    messages are used again."""
    with host_peers.through_memory(group) as memory:
        for dtype in ("float32", "bfloat16"):
            cases.compare(group, mask, "sink", split, schedule, dtype, heads_k, slices)
        ranks = dist.get_world_size(group)
        needs = ranks > 2 or (schedule == "all_gather" and slices > 1)
        assert memory.turn > 0 and (memory._handle.barriers > 0) == needs, (memory.turn, memory._handle.barriers)


def a_large_message(group):
    """A message larger than the room for it is refused on every rank."""
    x = torch.zeros(1 << 10)
    with host_peers.through_memory(group, 1 << 10):
        peer = 1 - dist.get_rank(group)
        with pytest.raises(AssertionError, match="messages of 4096 bytes for 1024"):
            Exchange(group, [(x, peer)], [(torch.empty_like(x), peer)], "rows")
