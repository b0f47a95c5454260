"""The attention of one rank: one call of a plan, forward and backward."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _autograd, _cuda, _features, _torch
from ._plan import BandCall, GlobalBand
from ._split import SequenceSplit

__all__ = ["ParallelCall", "TermSums", "Terms", "attend", "differentiate", "features_of", "kv_heads", "merge"]


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
    features = features_of(job, call, q, terms)
    out, lse = _torch.attend(q, k, v, 2, _band(job, call), True, features)
    assert lse is not None
    return out, lse


def differentiate(
    job: ParallelCall,
    call: BandCall,
    tensors: tuple[Tensor, Tensor, Tensor],
    made: tuple[Tensor, Tensor],
    gradients: tuple[Tensor, Tensor | None],
    terms: Terms,
    wants: tuple[bool, bool],
) -> tuple[Tensor, list[Tensor], tuple[Tensor | None, Tensor | None]]:
    """The gradients of q, of k and v, and those of sinks and slopes that are wanted. ``made`` has the final result and
    log-sum-exp of the rows, over all keys."""
    features = features_of(job, call, tensors[0], terms)
    saved = _autograd.Saved(*tensors, *made)
    of = _autograd.Wants(wants[0] and call.own, int(wants[1]))
    found = _autograd.compute(*gradients, saved, 2, _band(job, call), features, of)
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
    """Merges the result over other keys into the one of some rows, in place: ``out`` is ``(batch, rows, heads, dim)``
    in float32, ``lse`` ``(batch, heads, rows)``."""
    merged = torch.logaddexp(lse, part_lse)
    # A row without a key yet has minus infinity on both sides.
    least = torch.where(merged == -torch.inf, 0.0, merged)
    own, other = (torch.exp(x - least).transpose(1, 2)[..., None] for x in (lse, part_lse))
    # The result of a part without a key is 0.
    out.mul_(own).addcmul_(part.float(), other)
    lse.copy_(merged)
