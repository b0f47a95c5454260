"""Decoding with a cache whose keys are sharded over ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _cuda
from .._errors import FlashCoreError, invalid
from .._kvcache import attend_to_cache
from .._merge import merge_states
from ._exchange import agree, answering, number
from ._results import layout, place_of, prepared

__all__ = ["decode_attn_func", "merge_over_group"]


def merge_over_group(out: Tensor, lse: Tensor, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """Merges the results of the same queries over the keys of each rank into the result over all keys.

    Args:
        out: ``(batch, rows, heads, head_dim)``, over this rank's keys.
        lse: its log-sum-exp, ``(batch, heads, rows)``, float32. Minus infinity says that a row saw no key.
        group: the process group; None for the default group.

    Returns:
        ``(out, lse)``, of equal bits on all ranks: results are merged in the order of ranks.
    """
    batch, rows, heads, dim = out.shape
    refusal = None
    if tuple(lse.shape) != (batch, heads, rows):
        refusal = invalid("the shape of lse", tuple(lse.shape), f"{(batch, heads, rows)}")
    header = [number(str(out.dtype)), batch, rows, heads, 0, 0, dim, 0, 0, number("merge")]
    return _merged(out, lse, group, agree(group, out.device, header, refusal))


def _merged(out: Tensor, lse: Tensor, group: Any, hosts: int) -> tuple[Tensor, Tensor]:
    with answering(group, "exchange results"):
        memory = prepared(group, out, hosts)
    if memory is not None:
        return memory.merge(out, lse, group)
    ranks, of_out = dist.get_world_size(group), out.numel() * out.element_size()
    # One message: the log-sum-exps lie behind the result.
    behind, size = layout(out.shape, out.dtype)
    parts = torch.empty((ranks + 1, size), dtype=torch.uint8, device=out.device)
    outs = parts[:, :of_out].view(out.dtype).view(ranks + 1, *out.shape).unbind()
    lses = parts[:, behind : behind + 4 * lse.numel()].view(torch.float32).view(ranks + 1, *lse.shape).unbind()
    outs[ranks].copy_(out)
    lses[ranks].copy_(lse)
    with answering(group, "exchange results"):
        dist.all_gather_into_tensor(parts[:ranks].view(-1), parts[ranks], group=group)
    merged: tuple[Tensor, Tensor] = merge_states(outs[:ranks], lses[:ranks])
    return merged


@torch.no_grad()
def decode_attn_func(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, group: dist.ProcessGroup | None = None, *, cache_seqlens: Any = None,
    block_table: Tensor | None = None, softmax_scale: float | None = None, softcap: float = 0.0,
    learnable_sink: Tensor | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    """Attention of new tokens to caches of which each rank holds some keys of each sequence.

    All ranks call it together, with equal queries. Each attends to its own keys, and the results are merged. Queries
    see all keys: which rank holds a key does not matter, and a rank may hold none.

    Args:
        q: ``(batch, rows, heads, head_dim)``, equal on all ranks.
        k_cache: this rank's keys, ``(batch, keys, heads_k, head_dim)``, or pages with ``block_table``.
        v_cache: ``(batch, keys, heads_k, head_dim_v)``.
        group: the process group; None for the default group.
        cache_seqlens: the keys of each sequence on this rank, an integer or ``(batch,)``; None for all.
        block_table: as in :func:`flashcore_attn.flash_attn_with_kvcache`, as are the others.
        learnable_sink: it takes part once.
        return_lse: return ``(out, lse)``.

    Raises:
        ArgumentError: ranks whose queries differ in shape or type, and what the calls named above raise.
        GroupError: a rank ended, or did not answer within the time-out of the group. Where ranks merge from
            the memory of each other, it is an error of CUDA.
    """
    options = (softmax_scale, softcap, learnable_sink is not None)
    refusal: FlashCoreError | None = None
    place: Any = None
    if (
        isinstance(q, Tensor)
        and isinstance(v_cache, Tensor)
        and q.ndim == v_cache.ndim == 4
        and q.dtype in _cuda.DTYPES
    ):
        place = place_of(group, q.device, (*q.shape[:3], v_cache.shape[3]), q.dtype)
    header: list[int] = []
    try:
        out, lse = attend_to_cache(
            place, q, k_cache, v_cache, cache_seqlens=cache_seqlens, page_table=block_table,
            softmax_scale=softmax_scale, softcap=softcap, return_softmax_lse=True,
            learnable_sink=learnable_sink if dist.get_rank(group) == 0 else None,
        )  # fmt: skip
        batch, rows, heads, dim = q.shape
        header = [number(str(q.dtype)), batch, rows, heads, 0, dim, out.shape[3], 0, number(options), number("decode")]
    except FlashCoreError as error:
        refusal = error
    hosts = agree(group, q.device if isinstance(q, Tensor) else torch.device("cpu"), header, refusal)
    out, lse = _merged(out, lse, group, hosts)
    return (out, lse) if return_lse else out
