"""Attention of a sequence that is sharded over the ranks of a process group."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .. import _autograd, _cuda, _features, _functional, _torch
from .._errors import ArgumentError, DTypeError, FlashCoreError, UnsupportedError, dimensions, invalid
from . import _peers, _stages, _ulysses
from ._calls import ParallelCall, Terms, features_of
from ._cost import Costs, chosen, forecasts, table
from ._exchange import agree, number
from ._plan import GlobalBand, gather_plan
from ._split import SequenceSplit, split_sequence

__all__ = ["SCHEDULES", "context_parallel_attn_func", "explain"]

#: The values of ``schedule``.
SCHEDULES = ("auto", "all_gather", "ring", "ulysses", "ulysses_ring")


class _Options(NamedTuple):
    """The checked options of a call. Equal on all ranks."""

    split: SequenceSplit
    band: GlobalBand
    scale: float | None
    softcap: float
    schedule: str
    slices: int | None
    #: The ranks that exchange heads in "ulysses_ring".
    degree: int | None
    #: Whether there are sinks, slopes, and a log-sum-exp for the caller.
    given: tuple[bool, bool, bool]


def context_parallel_attn_func(
    q: Any, k: Any, v: Any, group: dist.ProcessGroup | None = None, split: SequenceSplit | str = "zigzag", *,
    softmax_scale: float | None = None, causal: bool = False, window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, learnable_sink: Tensor | None = None,
    attention_chunk: int = 0, return_lse: bool = False, schedule: str = "auto", head_slices: int | None = None,
    ulysses_degree: int | None = None,
) -> Any:  # fmt: skip
    """Attention of one sequence whose rows are sharded over the ranks of a group, with gradients.

    All ranks call it together, with equal options and with tensors that differ in their values alone. Positions are
    those in the whole sequence: masks, windows and ALiBi see them whatever the split.

    Args:
        q: this rank's rows, ``(batch, rows, heads, head_dim)``; or ``(rows, heads, head_dim)``, packed documents. Or a
            ``DTensor`` of one mesh dimension that is sharded over the rows; the result is one then.
        k: ``(batch, rows, heads_k, head_dim)``.
        v: ``(batch, rows, heads_k, head_dim_v)``.
        group: the process group; None for the default group, or for the mesh of a ``DTensor``.
        split: which rows each rank holds, of :func:`split_sequence`. A name stands for a sequence of ``ranks * rows``
            rows. Documents see themselves alone.
        softmax_scale: as in :func:`flashcore_attn.flash_attn_func`, as are ``causal``, ``window_size``, ``softcap``,
            ``alibi_slopes``, ``learnable_sink`` and ``attention_chunk``. Each rank gets a part of the gradients of
            slopes and sinks: their sum over the group is the gradient, as for other parameters.
        return_lse: return ``(out, lse)``; ``lse`` is ``(batch, heads, rows)``, or ``(heads, rows)`` without a batch.
        schedule: ``"all_gather"``: each rank receives the keys that its rows see, by slices of heads, one slice while
            another one is computed; with a window these are the keys near its rows alone. ``"ring"``: the keys of one
            other rank at a time, which takes less memory. ``"ulysses"``: each rank computes all rows of some heads.
            ``"ulysses_ring"``: neighbouring ranks exchange rows against heads, and the keys of the heads go around
            the ring of the ranks that have them. ``"auto"``: the one with the least predicted time
            (:func:`explain`).
        head_slices: the slices of ``"all_gather"``, a divisor of ``heads_k``; None for the predicted best.
        ulysses_degree: the neighbours of ``"ulysses_ring"``, a divisor of the ranks; None for the predicted best.

    Returns:
        This rank's rows of O, in the shape of q with v's head dim. Rows of padding are 0.

    The first call with new shapes or options compares them over all ranks and waits for the answer; later calls
    wait for nothing on the host if the group's library does not. A graph of ``torch.compile`` breaks here.

    Raises:
        ArgumentError: ranks that differ; what :func:`flashcore_attn.flash_attn_func` raises.
        GroupError: (a RuntimeError) a rank ended, or did not answer within the time-out of the group.
        UnsupportedError: chunks in a ring, heads that Ulysses cannot divide.
    """
    masks = (causal, window_size, softcap, attention_chunk)
    return _eagerly(
        q, k, v, group, split, softmax_scale, masks, (alibi_slopes, learnable_sink), bool(return_lse),
        (schedule, head_slices, ulysses_degree),
    )  # fmt: skip


def _eagerly(*arguments: Any) -> Any:
    """The call, outside of a graph that a compiler traces. Only a program that compiles has imported the compiler."""
    if "torch._dynamo" not in sys.modules:
        return _attend(*arguments)
    if not _untraced:
        _untraced.append(torch.compiler.disable(_attend))
    return _untraced[0](*arguments)


# `_attend` as the compiler leaves it alone, after the first use.
_untraced: list[Any] = []


def _attend(
    q: Any, k: Any, v: Any, group: Any, split: SequenceSplit | str, scale: float | None,
    masks: tuple[Any, Any, Any, Any], given: tuple[Tensor | None, Tensor | None], return_lse: bool,
    how: tuple[str, int | None, int | None],
) -> Any:  # fmt: skip
    q, k, v, group, wrap = _local(q, k, v, group)
    ranks = dist.get_world_size(group)
    packed = isinstance(q, Tensor) and q.ndim == 3
    if packed:
        q, k, v = (x[None] if isinstance(x, Tensor) and x.ndim == 3 else x for x in (q, k, v))
    refusal: FlashCoreError | None = None
    options: _Options | None = None
    terms = Terms(None, None)
    try:
        _check_tensors(q, k, v)
        stated = (given[0] is not None, given[1] is not None, return_lse)
        options = _checked(q, k, ranks, split, scale, masks, stated, *how)
        terms = _terms(q, *given, options.split)
        _check_gradients(q, k, v, terms, options)
    except FlashCoreError as error:
        refusal = error
    hosts = _agreed(group, q, k, v, options, refusal)
    assert options is not None
    job = _job(group, options, q, k, v, hosts)
    _peers.prepare(group, q.device, hosts, _part(job, q, k, v))
    out, lse = _Attention.apply(q, k, v, *terms, job, return_lse)
    if packed:
        out, lse = out[0], lse[0]
    out = wrap(out)
    return (out, lse) if return_lse else out


def _local(q: Any, k: Any, v: Any, group: Any) -> tuple[Any, Any, Any, Any, Any]:
    """The shards of a DTensor's rows, the group, and the function that makes a DTensor of a result."""
    if not any(isinstance(x, DTensor) for x in (q, k, v)):
        return q, k, v, group, lambda out: out
    found, mesh = [], None
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise ArgumentError(f"{name} is a {type(x).__name__}, others are a DTensor; they must be of one kind")
        expected = (Shard(x.ndim - 3),)
        if tuple(x.placements) != expected or (mesh is not None and x.device_mesh != mesh):
            raise invalid(f"the placements of {name}", x.placements, f"{expected} on one mesh of one dimension")
        mesh = x.device_mesh
        found.append(x.to_local())
    assert mesh is not None
    placements = [Shard(q.ndim - 3)]
    group = mesh.get_group() if group is None else group
    return (*found, group, lambda out: DTensor.from_local(out, mesh, placements, run_check=False))


def _check_tensors(q: Any, k: Any, v: Any) -> None:
    if _functional.backend_of(q) is not _torch:
        raise invalid("the type of q", type(q).__name__, "a PyTorch tensor")
    _torch.check_kinds(q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ArgumentError(f"{name} has {dimensions(x.ndim)}; it takes 4, or 3 for packed documents")
        if x.dtype not in _cuda.DTYPES:
            raise DTypeError(f"{name} is of {x.dtype}; expected {', '.join(map(str, _cuda.DTYPES))}")
    _cuda.check(q, k, v)
    _features.check_shapes(q, k, v, 2)
    if q.shape[1] != k.shape[1]:
        raise ArgumentError(f"k has sequence length = {k.shape[1]}, but q has {q.shape[1]}; they must be equal")


def _checked(
    q: Tensor, k: Tensor, ranks: int, split: SequenceSplit | str, scale: float | None,
    masks: tuple[Any, Any, Any, Any], given: tuple[bool, bool, bool], schedule: str, slices: int | None,
    degree: int | None,
) -> _Options:  # fmt: skip
    causal, window, softcap, chunk = masks
    if isinstance(split, str):
        split = split_sequence(ranks * q.shape[1], ranks, split)
    if not isinstance(split, SequenceSplit):
        raise invalid("split", type(split).__name__, "a SequenceSplit, 'zigzag' or 'contiguous'")
    if split.ranks != ranks:
        raise invalid("the ranks of split", split.ranks, f"{ranks}, the ranks of the group")
    if split.rows != q.shape[1]:
        raise invalid("the rows of q", q.shape[1], f"{split.rows}, the rows of a shard of this split")
    if len(split.documents) > 2 and q.shape[0] != 1:
        raise invalid("the batch of q", q.shape[0], "1: packed documents have no batch")
    before, after, cap = _functional._band_and_cap(causal, window, softcap)
    chunk = _functional._count("attention_chunk", chunk) if chunk else 0
    if schedule not in SCHEDULES:
        raise invalid("schedule", schedule, " or ".join(SCHEDULES))
    if schedule in ("ring", "ulysses_ring") and chunk:
        expected = f"expected 0 with schedule '{schedule}'"
        raise UnsupportedError(f"invalid value '{chunk}' for attention_chunk: {expected}", "chunk")
    if degree is not None and not (isinstance(degree, int) and 0 < degree <= ranks and ranks % degree == 0):
        raise invalid("ulysses_degree", degree, f"a divisor of {ranks}, the ranks, or None")
    degrees = [ranks] if schedule == "ulysses" else [degree] if degree else _ulysses.degrees(ranks)
    if "ulysses" in schedule:
        told = [_ulysses.lacks(q.shape[2], k.shape[2], each) for each in degrees]
        if None not in told:
            why = told[0] if told else f"{ranks} ranks have no divisor but 1 and themselves"
            raise UnsupportedError(f"invalid value '{schedule}' for schedule: {why}", "heads")
    if slices is not None and not (isinstance(slices, int) and 0 < slices <= k.shape[2] and k.shape[2] % slices == 0):
        raise invalid("head_slices", slices, f"a divisor of heads_k = {k.shape[2]}, or None")
    if scale is not None and not isinstance(scale, (int, float)):
        raise invalid("softmax_scale", scale, "a number that is finite in float32, or None")
    band = GlobalBand(before, after, chunk, given[0])
    return _Options(split, band, None if scale is None else float(scale), cap, schedule, slices, degree, given)


def _terms(q: Tensor, slopes: Tensor | None, sink: Tensor | None, split: SequenceSplit) -> Terms:
    batch, heads = q.shape[0], q.shape[2]
    if slopes is not None:
        _features.alibi(_features.Parts(), _torch, slopes, batch, heads)
        if len(split.documents) > 2 and slopes.ndim > 1:
            raise invalid("the shape of alibi_slopes", tuple(slopes.shape), f"({heads},) for packed documents")
    if sink is not None:
        sink = _features.sink("learnable_sink", _torch, sink, heads)
    return Terms(sink, slopes)


def _check_gradients(q: Tensor, k: Tensor, v: Tensor, terms: Terms, options: _Options) -> None:
    """Rejects calls whose gradients the device does not compute."""
    if not _autograd.needed((q, k, v, *(x for x in terms if x is not None))):
        return
    job = ParallelCall(None, 0, options.split, options.band, options.scale, options.softcap, "all_gather", 1)
    calls = gather_plan(options.split, 0, options.band).calls
    if calls:
        _autograd.check(q, k, v, features_of(job, calls[0], q, terms))


def _agreed(group: Any, q: Any, k: Any, v: Any, options: _Options | None, refusal: FlashCoreError | None) -> int:
    """Compares what ranks must have in common, once for each combination, and returns the number of hosts."""
    if options is None or refusal is not None:
        return agree(group, q.device if isinstance(q, Tensor) else torch.device("cpu"), [], refusal)
    return agree(group, q.device, _header(q.dtype, q.shape, k.shape, v.shape[3], options, _autograd.needed((q, k, v))))


@functools.lru_cache(maxsize=256)
def _header(dtype: torch.dtype, q: Any, k: Any, dim_v: int, options: _Options, records: bool) -> list[int]:
    split = options.split
    return [
        number(str(dtype)), q[0], q[1], q[2], k[2], q[3], dim_v, number((split.fragments, split.documents)),
        number((options.band, options.scale, options.softcap, options.given)),
        number((options.schedule, options.slices, options.degree)), int(records),
    ]  # fmt: skip


def _job(group: Any, options: _Options, q: Tensor, k: Tensor, v: Tensor, hosts: int) -> ParallelCall:
    schedule, slices, together = options.schedule, options.slices, options.degree
    is_open = {"all_gather": slices is None, "ulysses_ring": together is None}
    if schedule == "auto" or is_open.get(schedule, False):
        told = chosen(_forecasts(group, q, k, v, options, hosts), schedule)
        schedule, slices = told.schedule, told.slices if slices is None else slices
        together = told.together if together is None else together
    if schedule != "ulysses_ring":
        together = options.split.ranks if schedule == "ulysses" else 1
    rank, split, band = dist.get_rank(group), options.split, options.band
    scale, cap = options.scale, options.softcap
    return ParallelCall(group, rank, split, band, scale, cap, schedule, slices or 1, together or 1)


def _part(job: ParallelCall, q: Tensor, k: Tensor, v: Tensor) -> int:
    """The most bytes that a rank receives from another one in an exchange, or more."""
    batch, rows, heads, dim = q.shape
    of_keys = k.shape[2] * (dim + v.shape[3])
    of_queries = heads * (dim + v.shape[3] + 4) if job.together > 1 else 0
    messages = 8 * len(job.split.documents) + 64  # each of them is rounded up
    return rows * batch * (of_keys + of_queries) * q.element_size() + messages * 256


def _forecasts(group: Any, q: Tensor, k: Tensor, v: Tensor, options: _Options, hosts: int) -> Any:
    dims = (q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    trains = _autograd.needed((q, k, v))
    costs = _costs(q.device.type, hosts, _peers.may_reach(group, q.device, hosts))
    return forecasts(options.split, options.band, dims, q.element_size(), trains, costs)


@functools.lru_cache(maxsize=16)
def _costs(kind: str, hosts: int, peers: bool) -> Costs:
    return Costs.of(torch.device(kind), hosts, peers)


def explain(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup | None = None, split: SequenceSplit | str = "zigzag",
    *, causal: bool = False, window_size: Sequence[int | None] = (-1, -1), attention_chunk: int = 0,
) -> str:  # fmt: skip
    """The schedules of :func:`context_parallel_attn_func` with their predicted times, as a table, and the choice.

    All ranks call it together. The figures are predicted from bytes, FLOP and the constants that the table names.
    """
    q, k, v, group, _ = _local(q, k, v, group)
    if q.ndim == 3:
        q, k, v = q[None], k[None], v[None]
    ranks = dist.get_world_size(group)
    _check_tensors(q, k, v)
    options = _checked(
        q, k, ranks, split, None, (causal, window_size, 0.0, attention_chunk), (False, False, False), "auto", None, None
    )
    hosts = _agreed(group, q, k, v, options, None)
    costs = _costs(q.device.type, hosts, _peers.may_reach(group, q.device, hosts))
    return table(_forecasts(group, q, k, v, options, hosts), costs)


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Any, slopes: Any, job: ParallelCall, with_lse: bool
    ) -> Any:
        terms = Terms(sink, slopes)
        ctx.job, ctx.with_lse = job, with_lse
        if "ulysses" in job.schedule:
            ctx.shapes = [list(x.shape) for x in (q, k, v)]
            out, lse, kept = _ulysses.forward(job, q, k, v, terms)
        else:
            out, lse = _stages.forward(job, q, k, v, terms)
            kept = (q, k, v, out, lse)
        ctx.save_for_backward(sink, slopes, *kept)
        if not with_lse:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> Any:
        sink, slopes, *kept = ctx.saved_tensors
        terms, job = Terms(sink, slopes), ctx.job
        wants = (bool(ctx.needs_input_grad[3]), bool(ctx.needs_input_grad[4]))
        gradients = (d_out, d_lse if ctx.with_lse else None)
        if "ulysses" in job.schedule:
            found, of_terms = _ulysses.backward(job, ctx.shapes, tuple(kept), gradients, terms, wants)
        else:
            q, k, v, out, lse = kept
            found, of_terms = _stages.backward(job, (q, k, v), (out, lse), gradients, terms, wants)
        kinds = [None if x is None or y is None else y.to(x.dtype) for x, y in zip(terms, of_terms)]
        return (*found, *kinds, None, None)
