"""Attention of packed queries to paged caches, as serving engines call it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _features, _torch
from .._errors import DTypeError, UnsupportedError, invalid
from .._functional import _band_and_cap, _with_scales

# A request whose element is 0 sees all keys; the others see those up to the query's own.
_CAUSAL_BY_REQUEST = "(n{0}[b] == 0) | (k <= q + k_len - q_len)"


class Batch(NamedTuple):
    """The requests of a step: device tensors, and bounds that the host knows."""

    #: ``(requests + 1,)``, int32: the first query of each request, and the end of the last.
    starts: Tensor
    #: ``(requests,)``, int32: the keys of each request, with the new ones.
    used: Tensor
    #: ``(requests, pages)``, int32.
    table: Tensor
    max_q: int
    max_k: int
    #: For all requests, or ``(requests,)``, int32.
    causal: Any = True


class Score(NamedTuple):
    """What a layer does to its scores."""

    scale: float
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    slopes: Tensor | None = None
    sinks: Tensor | None = None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    score: Score,
    want_lse: bool = False,
    descale: tuple[Tensor | None, Tensor | None] = (None, None),
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The result ``(rows, heads, head_dim_v)``, and the log-sum-exp ``(heads, rows)``.

    Args:
        q: ``(rows, heads, head_dim)``.
        k: a pool of pages ``(pages, page_size, heads_k, head_dim)``, with any strides.
        v: likewise.
        batch: the requests. Rows outside of all requests, and pages beyond a request's length, are not read.
        score: the layer's scores.
        want_lse: whether the log-sum-exp is computed.
        descale: factors of 8-bit keys and values, ``(requests, heads_k)``, float32 with any strides.
        out: memory for the result.
    """
    per_request = isinstance(batch.causal, Tensor)
    left, right = score.window
    if left >= 0 and right == 0 and (per_request or not batch.causal):
        right = left  # requests that see both sides have the window on both
    before, after, cap = _band_and_cap(not per_request and batch.causal, (left, right), score.softcap)
    requests = batch.starts.shape[0] - 1
    parts = _features.Parts()
    if score.slopes is not None:
        _features.alibi(parts, _torch, score.slopes, requests, q.shape[1])
    if per_request:
        if batch.causal.dtype != torch.int32 or tuple(batch.causal.shape) != (requests,):
            raise invalid("causal", tuple(batch.causal.shape), f"a bool, or ({requests},) of torch.int32")
        parts.mask = _CAUSAL_BY_REQUEST.format(parts.table(batch.causal, "causal"))
    sink = None if score.sinks is None else _features.sink("sinks", _torch, score.sinks, q.shape[1])
    most = min(batch.max_k, batch.table.shape[1] * k.shape[1])
    starts = _torch.as_lengths("query_start_loc", batch.starts, requests + 1)
    used = _torch.as_lengths("seq_lens", batch.used, requests)
    features = parts.features(
        lengths=(starts, None, None, used, None), batch=requests, max_q=batch.max_q, max_k=most, sink=sink,
        page_table=_torch.as_pages(batch.table, requests),
    )  # fmt: skip
    if descale != (None, None):
        groups = (requests, k.shape[2])
        features = _with_scales(features, _torch, groups, (batch.max_q, most, most), (None, *descale))
    terms = (False, before, after, score.scale, cap)
    call = (q[None], repaired(k), repaired(v))
    with torch.no_grad():
        if out is None:
            made, lse = _torch.attend(*call, 2, terms, want_lse, features)
            out = made[0]
        else:
            lse = _torch.attend_into(out[None], *call, terms, want_lse, features)
    return out, None if lse is None else lse[0]


@functools.cache
def takes_fp8_caches() -> bool:
    """Whether keys and values may have 8 bits beside queries of 16."""
    one = torch.ones(1, dtype=torch.int32)
    starts, page = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 1, 1, 8).to(torch.float8_e4m3fn)
    batch = Batch(starts, one, torch.zeros(1, 1, dtype=torch.int32), 1, 1)
    factor = torch.ones(1, 1)
    try:
        attend(torch.zeros(1, 1, 8, dtype=torch.bfloat16), page, page, batch, Score(1.0), descale=(factor, factor))
    except (DTypeError, UnsupportedError):
        return False
    return True


def repaired(x: Tensor) -> Tensor:
    """The tensor, with strides of dimensions of one element as if it were contiguous: engines leave any number there,
    and a tensor map takes none that is no multiple of 16 bytes."""
    if 1 not in x.shape:
        return x
    strides = list(x.stride())
    for i in range(x.ndim - 2, -1, -1):
        if x.shape[i] == 1:
            strides[i] = strides[i + 1] * x.shape[i + 1]
    return x.as_strided(x.shape, strides)


def unsupported(what: str, expected: str) -> UnsupportedError:
    """The refusal of something that an engine passes."""
    return UnsupportedError(f"FlashCore does not know {what}; expected {expected}", what)
