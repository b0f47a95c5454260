"""What ranks on several GPUs of one host compute."""

from __future__ import annotations

import hashlib
import traceback

import rank_pool
import torch
import torch.distributed as dist

import flashcore_attn
from flashcore_attn import parallel
from flashcore_attn.parallel import _results

STEPS = 60


def serve(rank, ranks, port, pipe):
    """Sends what a rank found, or its error."""
    try:
        torch.cuda.set_device(rank)
        rank_pool.join(rank, ranks, port, 60, "nccl")
        pipe.send((True, decoding(rank, ranks)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def decoding(rank, ranks):
    """The worst error of calls on two streams and of repeated graphs, one rank of which is late, a digest of
    their bits, and kernels of NCCL in a call."""
    draw = torch.Generator("cuda").manual_seed(5)

    def normal(*shape):
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    q, k, v = normal(2, 1, 8, 128), normal(2, 4096, 2, 128), normal(2, 4096, 2, 128)
    each = 4096 // ranks
    mine = [x[:, rank * each : (rank + 1) * each].contiguous() for x in (k, v)]

    def call(q):
        return parallel.decode_attn_func(q, *mine, return_lse=True)

    call(q)
    memory = _results._memories[dist.group.WORLD]
    assert memory is not None, "symmetric memory cannot be had here"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call(q)
        torch.cuda.synchronize()
    of_nccl = [event.key for event in profile.key_averages() if "nccl" in event.key.lower()]

    static, graph, side = q.clone(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        recorded = call(static)
    calls = []
    for step in range(STEPS):
        if step % ranks == rank:
            torch.cuda._sleep(1_000_000)
        if step == STEPS // 2:  # other memory for later calls; the graph goes on in its own
            large = torch.full((512, 1, 8, 128), float(rank), device="cuda")
            total, _ = parallel.merge_over_group(large, torch.zeros(512, 8, 1, device="cuda"))
            assert (total == (ranks - 1) / 2).all() and _results._memories[dist.group.WORLD] is not memory
        fresh, current = normal(*q.shape), torch.cuda.current_stream()
        if step % 5 in (1, 2, 4):
            static.copy_(fresh)
            graph.replay()
            made = [x.clone() for x in recorded]
        elif step % 3 == 0:
            side.wait_stream(current)
            with torch.cuda.stream(side):
                made = call(fresh)
            current.wait_stream(side)
        else:
            made = call(fresh)
        calls.append((fresh, made))
    torch.cuda.synchronize()
    worst, bits = 0.0, hashlib.sha256()
    for fresh, made in calls:
        right = flashcore_attn.flash_attn_with_kvcache(fresh, k, v, return_softmax_lse=True)
        for x, y in zip(made, right):
            worst = max(worst, ((x.float() - y.float()).norm() / y.float().norm()).item())
            bits.update(x.float().cpu().numpy().tobytes())
    return worst, bits.hexdigest(), of_nccl
