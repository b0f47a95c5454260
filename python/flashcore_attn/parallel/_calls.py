"""The attention of one rank: one call of a plan, forward and backward."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _autograd, _cuda, _features, _torch
from .._functional import flash_attn_func
from ._plan import BandCall, GlobalBand
from ._split import SequenceSplit

__all__ = [
    "ParallelCall", "TermSums", "Terms", "attend", "continued", "differentiate", "features_of", "kv_heads", "merge",
]  # fmt: skip


class ParallelCall(NamedTuple):
    """All that a call is told besides its tensors. It is equal on all ranks, except for the rank."""

    group: Any
    rank: int
    split: SequenceSplit
    band: GlobalBand
    scale: float | None
    softcap: float
    schedule: str
    #: The parts into which the KV heads are cut, one of which is sent while another one is computed.
    slices: int
    #: The neighbouring ranks that exchange rows against heads.
    together: int = 1

    @property
    def is_padded(self) -> bool:
        """Whether this rank's shard has rows of no sequence."""
        return sum(last - first for first, last in self.split.fragments[self.rank]) < self.split.rows


class Terms(NamedTuple):
    """Terms of the score that belong to heads, for some of the heads."""

    #: ``(heads,)`` in float32.
    sink: Tensor | None
    #: ``(heads,)`` or ``(batch, heads)``.
    slopes: Tensor | None

    def of(self, heads: slice) -> Terms:
        """The terms of these query heads."""
        return Terms(
            None if self.sink is None else self.sink[heads],
            None if self.slopes is None else self.slopes[..., heads],
        )


def kv_heads(heads: slice, group: int) -> slice:
    """The query heads of KV heads."""
    return slice(heads.start * group, heads.stop * group)


def attend(job: ParallelCall, call: BandCall, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """The result and the log-sum-exp of a call: q has its rows, k and v its keys."""
    if len(call.used_k) == 1 and not job.band.is_positional:  # the short way through Rust
        made: tuple[Tensor, Tensor] = flash_attn_func(
            q, k, v, softmax_scale=job.scale, window_size=(call.before, call.after), softcap=job.softcap,
            learnable_sink=terms.sink if call.own else None, return_lse=True,
        )  # fmt: skip
        return made
    out, lse = _torch.attend(q, k, v, 2, _band(job, call), True, features_of(job, call, q, terms))
    assert lse is not None
    return out, lse


def continued(
    job: ParallelCall, call: BandCall, q: Tensor, k: Tensor, v: Tensor, terms: Terms, made: tuple[Tensor, Tensor]
) -> Tensor:
    """The log-sum-exp of a call that continues from ``made``, O and the log-sum-exp of its rows over other keys. O is
    replaced in its memory."""
    out, lse = made[0], made[1].contiguous()
    features = features_of(job, call, q, terms) or _features.Features()
    with_lse = _band(job, call), True
    # In host memory a call's result must not overlap what it reads.
    on_host = not out.is_cuda
    to, before = (torch.empty(out.shape, dtype=out.dtype), out.contiguous()) if on_host else (out, out)
    total = _torch.attend_into(to, q, k, v, *with_lse, features._replace(before=(before, lse)))
    if on_host:
        out.copy_(to)
    assert total is not None
    return total


def differentiate(
    job: ParallelCall,
    call: BandCall,
    tensors: tuple[Tensor, Tensor, Tensor],
    made: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor | None],
    terms: Terms,
    wants: tuple[bool, bool],
    into: tuple[Tensor | None, ...] = (None, None, None),
) -> tuple[Tensor, list[Tensor], tuple[Tensor | None, Tensor | None]]:
    """The gradients of q, of k and v, and those of sinks and slopes that are wanted. ``made`` has the final result and
    log-sum-exp of the rows, over all keys. ``into`` is memory for the gradients of q, k and v."""
    features = features_of(job, call, tensors[0], terms)
    saved = _autograd.Saved(*tensors, *made)
    of = _autograd.Wants(wants[0] and call.own, int(wants[1]))
    found = _autograd.compute(*gradients, saved, 2, _band(job, call), features, of, into=into)
    of_sink = found.pop(3) if of.sink else None
    return found[0], found[1:3], (of_sink, found[3] if of.tables else None)


def _band(job: ParallelCall, call: BandCall) -> Any:
    return (False, call.before, call.after, job.scale, job.softcap)


def features_of(job: ParallelCall, call: BandCall, q: Tensor, terms: Terms) -> Any:
    """The features of a call. Positions are counted from its first key."""
    sink = terms.sink if call.own else None  # it takes part in each row once
    parts = _features.Parts()
    # Also where it is 0, so that all calls have one program.
    shift = f"i{parts.integer(call.shift)}" if job.band.is_positional else ""
    if terms.slopes is not None:
        slopes = _cuda.as_table("alibi_slopes", terms.slopes, floating=True)
        index = "[h]" if slopes.ndim == 1 else "[b, h]"
        table = parts.table(slopes, "alibi_slopes")
        parts.score = f"s - t{table}{index} * float(abs(q + k_len - q_len - {shift} - k))"
    if job.band.chunk:
        length = f"i{parts.integer(job.band.chunk)}"
        parts.mask = f"(q + k_len - q_len - {shift}) / {length} == k / {length}"
    if len(call.used_k) == 1:
        return parts.features(sink=sink)
    lengths = _lengths(call, q.device)
    ends = (*call.starts_q[1:], call.rows[1] - call.rows[0])
    max_q = max(end - start for start, end in zip(call.starts_q, ends))
    ends = (*call.starts_k[1:], call.keys[1] - call.keys[0])
    max_k = max(end - start for start, end in zip(call.starts_k, ends))
    return parts.features(lengths=lengths, batch=len(call.used_k), max_q=max_q, max_k=max_k, sink=sink)


@functools.lru_cache(maxsize=1024)
def _lengths(call: BandCall, device: torch.device) -> tuple[Any, ...]:
    """The lengths of a call's sequences. They are copied to a device once."""

    def made(values: tuple[int, ...]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    starts_q = made((*call.starts_q, call.rows[1] - call.rows[0]))
    starts_k = made((*call.starts_k, call.keys[1] - call.keys[0]))
    ends = (*call.starts_k[1:], call.keys[1] - call.keys[0])
    gaps = any(start + used != end for start, used, end in zip(call.starts_k, call.used_k, ends))
    return starts_q, starts_k, None, made(call.used_k) if gaps else None, None


class TermSums:
    """Sums of the gradients of sinks and slopes that are wanted."""

    def __init__(self, terms: Terms, wants: tuple[bool, bool]) -> None:
        self._sums = [
            torch.zeros_like(x, dtype=torch.float32) if wanted and x is not None else None
            for wanted, x in zip(wants, terms)
        ]

    def add(self, heads: slice, parts: tuple[Tensor | None, Tensor | None]) -> None:
        """Adds the gradients of some heads."""
        for x, part in zip(self._sums, parts):
            if x is not None and part is not None:
                x[..., heads] += part

    def taken(self) -> list[Tensor | None]:
        """The gradients of sinks and of slopes."""
        return self._sums


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merges the result over other keys into the one of some rows, in place: ``out`` is ``(batch, rows, heads, dim)``,
    ``lse`` ``(batch, heads, rows)``. Sums are of float32."""
    # A row without a key on both sides has minus infinity twice, and its result is 0.
    share = (part_lse - lse).sigmoid_().nan_to_num_(0.0)
    torch.logaddexp(lse, part_lse, out=lse)
    share = share.transpose(1, 2).unsqueeze(-1)
    if out.dtype == torch.float32:
        out.mul_(1.0 - share).addcmul_(part, share)
    else:
        out.copy_((out * (1.0 - share)).addcmul_(part, share))
