"""The suite ``parallel``: attention of sharded sequences on several GPUs of one host, under ``torchrun``.

A row's ``efficiency`` is the time of one GPU for the whole problem, divided by the ranks, over the time of
the slowest rank. All ranks compute the whole problem together, and samples of it and of the sharded one are
taken in turn: power management moves the clocks of GPUs by a tenth within a second, and so both see the same
clocks.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from flashcore_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, parallel
from flashcore_attn.parallel import Costs, GlobalBand, ScheduleForecast, chosen, decode_forecast, forecasts

from . import _bench
from ._problem import OURS
from ._rows import Rows
from ._timeline import recorded, timeline

Call = Callable[[], Any]

#: Microseconds of calls that follow each other without a wait.
_TOGETHER = 2e5
#: Microseconds of a call that is repeated three times; of one GPU, beside the first contestant alone.
_LONG = 2e6
#: The largest relative error, in the Frobenius norm, of a result to that of one GPU.
_ACCEPTED = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


class Work(NamedTuple):
    """A problem of the suite."""

    name: str
    rows: int
    heads: int
    heads_k: int
    dim: int
    #: Keys before a query's own, -1 for all; whether keys after it are hidden.
    left: int = -1
    causal: bool = True
    #: The lengths of packed documents, or none.
    documents: tuple[int, ...] = ()
    #: One query for each of so many sequences, to a cache of ``rows`` keys; 0 for a training problem.
    decodes: int = 0
    passes: tuple[str, ...] = ("forward", "forward+backward")


def works(ranks: int, scale: int = 1) -> list[Work]:
    """The problems for so many ranks, with sequences that are ``scale`` times as short."""
    found, both = [], ("forward", "forward+backward")
    lengths_of = (16384, 32768, 131072, 524288) if ranks == 2 else (65536, 262144, 1048576)
    for full in lengths_of:
        rows, passes = full // scale, ("forward",) if full == 524288 else both
        for heads_k in (32, 8) if ranks == 2 else (8,):
            found.append(Work(f"causal {rows} 32/{heads_k}", rows, 32, heads_k, 128, passes=passes))
    draw = torch.Generator().manual_seed(47)
    lengths: list[int] = []
    whole = 131072 // scale
    while sum(lengths) < whole:
        length = int(torch.randint(512 // scale + 1, 24576 // scale, (1,), generator=draw))
        lengths.append(min(length, whole - sum(lengths)))
    found.append(Work(f"documents {whole} 32/8", whole, 32, 8, 128, documents=tuple(lengths)))
    window, rows, keys = 4096 // scale, (262144 if ranks == 2 else 1048576) // scale, 1048576 // scale
    found.append(Work(f"window {window} {rows} 32/8", rows, 32, 8, 128, left=window - 1))
    found.append(Work(f"decode B1 {keys} 32/8", keys, 32, 8, 128, decodes=1, passes=("decode",)))
    return found


class Shards(NamedTuple):
    """The tensors of a problem: whole, and this rank's."""

    split: parallel.SequenceSplit
    whole: list[Tensor]
    mine: list[Tensor]


def drawn(work: Work, group: Any, device: torch.device, dtype: torch.dtype) -> Shards:
    """q, k, v and the gradient of O, equal on all ranks."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    split = _split(work, ranks)
    draw = torch.Generator(device).manual_seed(1)

    def normal(batch: int, rows: int, heads: int) -> Tensor:
        return torch.randn((batch, rows, heads, work.dim), generator=draw, device=device, dtype=dtype)

    if work.decodes:
        q, kv = normal(work.decodes, 1, work.heads), [normal(work.decodes, work.rows, work.heads_k) for _ in range(2)]
        return Shards(split, [q, *kv], [q, *(parallel.shard(x, split, rank) for x in kv)])
    whole = [normal(1, work.rows, heads) for heads in (work.heads, work.heads_k, work.heads_k, work.heads)]
    return Shards(split, whole, [parallel.shard(x, split, rank) for x in whole])


def _trained(attend: Callable[..., Tensor], tensors: list[Tensor], trains: bool) -> Call:
    *inputs, gradient = tensors
    if not trains:
        return lambda: attend(*inputs)
    leaves = [x.detach().requires_grad_() for x in inputs]
    return lambda: torch.autograd.grad(attend(*leaves), leaves, gradient)


def one_gpu(work: Work, shards: Shards, trains: bool) -> Call:
    """The whole problem, on one GPU."""
    if work.decodes:
        return lambda: flash_attn_with_kvcache(*shards.whole)
    window = (work.left, 0 if work.causal else -1)
    if not work.documents:
        return _trained(lambda q, k, v: flash_attn_func(q, k, v, window_size=window), shards.whole, trains)
    starts = torch.tensor(shards.split.documents, dtype=torch.int32, device=shards.whole[0].device)
    longest = max(work.documents)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = flash_attn_varlen_func(q[0], k[0], v[0], starts, starts, longest, longest, window_size=window)
        return packed[None]

    return _trained(attend, shards.whole, trains)


def contestants(work: Work, shards: Shards, group: Any, trains: bool) -> Iterator[tuple[str, Any, Call]]:
    """The name of each contestant, the context that its calls need, and its call."""
    if work.decodes:
        yield OURS, contextlib.nullcontext(), lambda: parallel.decode_attn_func(*shards.mine, group)
        return
    for schedule in parallel.SCHEDULES:
        if schedule == "ulysses_ring" and dist.get_world_size(group) % 4:
            continue  # there are no neighbours with a ring of further ranks
        yield (
            OURS if schedule == "auto" else f"{OURS} {schedule}",
            contextlib.nullcontext(),
            _trained(_ours(work, shards, group, schedule), shards.mine, trains),
        )
    if work.causal and work.left < 0 and not work.documents and shards.mine[0].is_cuda:
        yield f"torch {torch.__version__} context_parallel", _of_pytorch(group), _pytorch(shards, trains)
    with contextlib.suppress(ImportError):
        from ring_flash_attn import zigzag_ring_flash_attn_func as ring

        if work.causal and work.left < 0 and not work.documents and shards.mine[0].is_cuda:

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                return ring(q, k, v, causal=True, group=group)

            yield "ring-flash-attn zigzag", contextlib.nullcontext(), _trained(attend, shards.mine, trains)


def _ours(work: Work, shards: Shards, group: Any, schedule: str) -> Callable[..., Tensor]:
    window = (work.left, 0 if work.causal else -1)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made: Tensor = parallel.context_parallel_attn_func(
            q, k, v, group, shards.split, window_size=window, schedule=schedule
        )
        return made

    return attend


def _pytorch(shards: Shards, trains: bool) -> Call:
    """PyTorch's own function on shards, as a model calls it."""
    tensors = [x.transpose(1, 2).contiguous() for x in shards.mine]
    few = tensors[1].shape[1] != tensors[0].shape[1]
    return _trained(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=few), tensors, trains
    )


@contextlib.contextmanager
def _of_pytorch(group: Any) -> Iterator[None]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = DeviceMesh.from_group(dist.group.WORLD if group is None else group, "cuda")
    buffer = torch.zeros(1, 2 * dist.get_world_size(group), device="cuda")
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1]), sdpa_kernel(backends, set_priority=True):
        yield


def error_of(found: Any, right: Any, work: Work, shards: Shards, rank: int) -> float:
    """The largest relative error of this rank's results; those of PyTorch have heads before rows."""
    worst = 0.0
    pairs = zip(found, right) if isinstance(found, tuple) else [(found, right)]
    for x, y in pairs:
        y = y if work.decodes else parallel.shard(y, shards.split, rank)
        if x.shape != y.shape:
            x = x.transpose(1, 2)
        error = (x.float() - y.float()).norm() / y.float().norm().clamp_min(1e-9)
        worst = max(worst, float(error))
    return worst


def timed(calls: Sequence[Call], group: Any, device: torch.device, seconds: float) -> list[list[float]]:
    """Microseconds of the slowest rank for each of some calls, whose samples are taken in turn: ``seconds``
    for each.

    A sample is the mean of calls that follow each other, as those of a model's layers do: a launch is
    prepared while the kernels before it run. A fifth of the samples warms up and is not kept. All ranks make
    as many calls.
    """

    def synchronised() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def once(call: Call, number: int) -> float:
        dist.barrier(group)
        start = synchronised()
        for _ in range(number):
            call()
        return (synchronised() - start) * 1e6 / number

    def slowest(us: list[Any]) -> list[Any]:
        found = torch.tensor(us, dtype=torch.float64, device=device)
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return list(found.tolist())

    for call in calls:
        once(call, 1)
    firsts = slowest([once(call, 1) for call in calls])
    together = [max(1, min(20, int(_TOGETHER / us))) for us in firsts]
    of_round = sum(us * number for us, number in zip(firsts, together))
    least = 5 if max(firsts) < _LONG else 3
    kept = max(least, min(200, int(0.8 * seconds * 1e6 * len(calls) / of_round)))
    unkept = max(1, kept // 4)
    samples: list[list[float]] = [[] for _ in calls]
    for i in range(unkept + kept):
        turns = list(zip(calls, together, samples))
        for call, number, of_call in turns if i % 2 == 0 else reversed(turns):
            of_call.append(once(call, number))
    return slowest([of_call[unkept:] for of_call in samples])


def rows_of(work: Work, group: Any, device: torch.device, dtype: torch.dtype, seconds: float) -> list[dict[str, Any]]:
    """The rows of a problem."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    shards, rows = drawn(work, group, device, dtype), []
    for what in work.passes:
        trains = what == "forward+backward"
        whole = one_gpu(work, shards, trains)
        right, ideal = whole(), None  # type: Any, float | None
        for name, context, call in contestants(work, shards, group, trains):
            row = {"suite": "parallel", "problem": work.name, "pass": what, "impl": name, "ranks": ranks}
            row |= {"ideal_us": ideal, "fault": None, "predicted_efficiency": _predicted(work, shards, trains, name)}
            try:
                with context:
                    row["err"] = error_of(call(), right, work, shards, rank)
                    row["err_allowed"] = _ACCEPTED[dtype]
                    beside = [whole] if ideal is None or ideal * ranks < _LONG else []
                    *of_whole, samples = timed([*beside, call], group, device, seconds)
            except (RuntimeError, ValueError, NotImplementedError, AssertionError) as error:
                row["fault"] = f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]
                rows.append(row)
                continue
            if of_whole:
                ideal = statistics.median(of_whole[0]) / ranks
            assert ideal is not None
            ordered, row["ideal_us"] = sorted(samples), ideal
            row["us_median"] = statistics.median(ordered)
            row["us_low"], row["us_high"] = ordered[len(ordered) // 20], ordered[-1 - len(ordered) // 20]
            row["samples"], row["all_us"] = len(ordered), [round(us, 2) for us in samples]
            row["efficiency"] = ideal / row["us_median"]
            if not row["err"] <= row["err_allowed"]:
                row["fault"] = f"wrong: an error of {row['err']:.2e}, at most {row['err_allowed']:.2e} is allowed"
            rows.append(row)
    return rows


def _step(work: Work, device: torch.device, dtype: torch.dtype) -> Call:
    """FlashCore's call for the last pass of a problem."""
    shards = drawn(work, None, device, dtype)
    _, _, call = next(contestants(work, shards, None, work.passes[-1] == "forward+backward"))
    return call


def _split(work: Work, ranks: int) -> parallel.SequenceSplit:
    kind = "documents" if work.documents else "contiguous" if work.left >= 0 or work.decodes else "zigzag"
    starts = [sum(work.documents[:i]) for i in range(len(work.documents) + 1)] if work.documents else None
    return parallel.split_sequence(work.rows, ranks, kind, starts)


def _forecasts(work: Work, ranks: int, element: int, trains: bool, costs: Costs) -> tuple[ScheduleForecast, ...]:
    dims = (max(1, work.decodes), work.heads, work.heads_k, work.dim, work.dim)
    if work.decodes:
        return (decode_forecast(work.rows, ranks, dims, element, costs),)
    band = GlobalBand(work.left, 0 if work.causal else -1, 0, False)
    return forecasts(_split(work, ranks), band, dims, element, trains, costs)


def _predicted(work: Work, shards: Shards, trains: bool, name: str) -> float | None:
    if not name.startswith(OURS):
        return None
    device, element = shards.mine[0].device, shards.mine[0].element_size()
    told = _forecasts(work, shards.split.ranks, element, trains, Costs.of(device, 1))
    return chosen(told, name[len(OURS) :].strip() or "auto").efficiency


def predictions(ranks: int) -> Iterator[dict[str, Any]]:
    """Rows of the predicted efficiency of bf16 on H200s of one host, one for each problem, pass and schedule."""
    costs = Costs.of(torch.device("cuda"), 1)
    for work in works(ranks):
        for what in work.passes:
            told = _forecasts(work, ranks, 2, what == "forward+backward", costs)
            best = chosen(told)
            possible = sorted((x for x in told if not x.lacks), key=lambda x: -x.seconds)
            for x in {(x.schedule, x.together): x for x in possible}.values():  # of each schedule the fastest
                yield {
                    "suite": "parallel", "problem": work.name, "pass": what, "ranks": ranks, "mode": "predicted",
                    "impl": f"{OURS} {x.schedule}", "degree": x.together, "chosen": x is best,
                    "us_predicted": x.seconds * 1e6, "predicted_efficiency": x.efficiency, "constants": costs.source,
                }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    """Times of the slowest rank, and shares of the ideal."""
    lines = ["| problem | pass | impl | µs | ideal µs | efficiency | predicted |", "|---|---|---|---:|---:|---:|---:|"]
    for row in rows:
        start = f"| {row['problem']} | {row['pass']} | {row['impl']} |"
        if row["fault"] is not None:
            lines.append(f"{start} {row['fault']} | | | |")
            continue
        told = "" if row["predicted_efficiency"] is None else f"{row['predicted_efficiency']:.2f}"
        figures = f" {row['us_median']:.0f} | {row['ideal_us']:.0f} | {row['efficiency']:.2f} | {told} |"
        lines.append(start + figures)
    return "\n".join(lines)


def run(args: Any) -> int:
    """0 if all outputs of FlashCore were correct, 1 if not, 2 if nothing could start."""
    if args.predict is not None:
        return _predict(args)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=120))
    except (ValueError, RuntimeError) as error:
        words = "start it with `torchrun --nproc-per-node 2 -m flashcore_bench --suite parallel`"
        print(f"flashcore_bench: {words} ({error})", file=sys.stderr)
        return 2
    rank, limit = dist.get_rank(), args.limit
    if args.plot is not None and device.type != "cuda":
        print("flashcore_bench: --plot shows the work of a GPU, and PyTorch sees none", file=sys.stderr)
        dist.destroy_process_group()
        return 2
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    kept = None
    if rank == 0:
        session = _bench.Session(0) if device.type == "cuda" else _bench.CpuSession(torch.get_num_threads())
        provenance = json.loads(session.provenance())
        kept = Rows(args, provenance["commit"])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    began, failed = time.monotonic(), False
    for work in works(dist.get_world_size(), 1 if device.type == "cuda" else 2048)[args.start - 1 :]:
        late = torch.tensor([limit is not None and time.monotonic() - began > limit], device=device).int()
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if late.item():
            break
        if rank == 0:
            print(f"parallel: {work.name}", file=sys.stderr, flush=True)
        for row in rows_of(work, None, device, dtype, args.seconds):
            failed |= row["impl"].startswith(OURS) and row["fault"] is not None
            if kept is not None:
                kept.add(row | provenance)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if kept is not None and not args.json:
        print(table(kept.every))
    if args.plot is not None:
        work = works(dist.get_world_size())[args.start - 1]
        bars = recorded(_step(work, device, dtype))
        if rank == 0:
            title = f"Rank 0 of {dist.get_world_size()}: {work.name}, {work.passes[-1]}"
            args.plot.write_text(timeline(bars, title), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    return int(failed)


def _predict(args: Any) -> int:
    rows = list(predictions(args.predict))
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    print(f"predicted for {args.predict} H200s of one host, bf16; constants: {rows[0]['constants']}\n")
    print("| problem | pass | schedule | predicted µs | of ideal |", "|---|---|---|---:|---:|", sep="\n")
    for row in rows:
        name = row["impl"][len(OURS) + 1 :] + (f" of {row['degree']}" if row["impl"].endswith("_ring") else "")
        name += ", chosen" if row["chosen"] else ""
        figures = f" {row['us_predicted']:.0f} | {row['predicted_efficiency']:.3f} |"
        print(f"| {row['problem']} | {row['pass']} | {name} |{figures}")
    return 0
