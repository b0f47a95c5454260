"""Masks with lists of blocks: FlexAttention's ``BlockMask`` and FlashAttention-4's block-sparse tensors."""

from __future__ import annotations

from typing import Any, NamedTuple

from ._errors import ArgumentError, DTypeError, invalid, invalid_words

__all__ = ["BlockSparseMask", "BlockSparseTensors", "block_sparse_mask", "kinds"]


class BlockSparseTensors(NamedTuple):
    """FlashAttention-4's lists of blocks, under its names.

    ``mask_block_cnt`` is ``(batch, heads, row blocks)``, int32: how many blocks of keys each block of rows sees in
    part. ``mask_block_idx`` is ``(batch, heads, row blocks, most)``: their indices. ``full_block_cnt`` and
    ``full_block_idx`` are those of the blocks in which every row sees every key. Batch and heads may be 1. The other
    fields are those of FlashAttention-4's backward pass and are not read.
    """

    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any = None
    full_block_idx: Any = None
    cu_total_m_blocks: Any = None
    cu_block_idx_offsets: Any = None
    block_size: tuple[int, int] | None = None
    dq_write_order: Any = None
    dq_write_order_full: Any = None
    spt: bool | None = None


class BlockSparseMask(NamedTuple):
    """A mask function for the blocks that rows see in part, with lists of those and of the full ones."""

    mask_mod: Any
    tensors: Any
    block_size: tuple[int, int]


def block_sparse_mask(mask_mod: Any, tensors: Any, block_size: tuple[int, int] | None = None) -> BlockSparseMask:
    """FlashAttention-4's ``mask_mod`` and ``block_sparse_tensors`` as a ``block_mask`` of :func:`flex_attention`.

    Args:
        mask_mod: ``mask_mod(b, h, q, k)``, run in blocks that are listed as seen in part; None shows all of their keys.
        tensors: :class:`BlockSparseTensors`, or FlashAttention-4's own, which have the same fields.
        block_size: rows and keys of a block; None for ``tensors.block_size``.

    Blocks in neither list are hidden. Blocks that are listed as full are shown, whatever ``mask_mod`` says.

    Raises:
        ArgumentError: without a block size, or with lists of other shapes.
    """
    size = block_size if block_size is not None else getattr(tensors, "block_size", None)
    try:
        rows, keys = (int(n) for n in size)  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise invalid("block_size", size, "(rows, keys) of a block") from None
    if rows < 1 or keys < 1:
        raise invalid("block_size", (rows, keys), "positive numbers")
    if not hasattr(tensors, "mask_block_cnt"):
        raise invalid("the type of tensors", type(tensors).__name__, "BlockSparseTensors")
    if all(getattr(tensors, f"{name}_block_{part}") is None for name in ("mask", "full") for part in ("cnt", "idx")):
        raise invalid("mask_block_cnt", None, "a tensor where full_block_cnt is None")
    for name, of_counts in (("mask_block", tensors.mask_block_cnt), ("full_block", tensors.full_block_cnt)):
        indices = getattr(tensors, f"{name}_idx")
        if of_counts is None and indices is None:
            continue
        if of_counts is None or indices is None:
            raise ArgumentError(f"{name}_cnt and {name}_idx belong together; one of them is None")
        for part, x in (("cnt", of_counts), ("idx", indices)):
            if not hasattr(x, "ndim") or getattr(x, "is_nested", False):
                raise invalid(f"the type of {name}_{part}", type(x).__name__, "a tensor")
        if of_counts.ndim != 3 or indices.ndim != 4 or tuple(of_counts.shape) != tuple(indices.shape)[:3]:
            shapes = (tuple(of_counts.shape), tuple(indices.shape))
            expected = "(batch, heads, row blocks) and (batch, heads, row blocks, most)"
            raise invalid(f"the shapes of {name}_cnt and {name}_idx", shapes, expected)
    return BlockSparseMask(mask_mod, tensors, (rows, keys))


def check_lists(lists: dict[str, Any]) -> None:
    """Rejects lists that PyTorch cannot read, and lists on several devices."""
    import torch

    from . import _cuda

    for name, x in lists.items():
        if not isinstance(x, torch.Tensor):
            raise invalid(f"the type of {name}", type(x).__name__, "a PyTorch tensor")
        if x.dtype not in (torch.int32, torch.int64):
            raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, "torch.int32 or torch.int64"))
        _cuda.check_given(name, x)
    first = next(iter(lists))
    for name, x in lists.items():
        if x.device != lists[first].device:
            words = f"{name} is on {x.device}, {first} on {lists[first].device}"
            raise ArgumentError(f"{words}; they must be on one device")


def kinds(partial: tuple[Any, Any], full: tuple[Any, Any], blocks: int) -> Any:
    """The kind of each block ``(batch, heads, row blocks, blocks)``.

    0: in neither list, 1: seen in part, 2: full. A list is counts and indices; both may be None. An index outside
    ``blocks`` is ignored.
    """
    import torch

    counts, indices = partial if partial[0] is not None else full
    found = torch.zeros((*counts.shape, blocks + 1), dtype=torch.int32, device=counts.device)
    for kind, (counts, indices) in ((1, partial), (2, full)):
        if counts is None:
            continue
        listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
        listed &= (indices >= 0) & (indices < blocks)
        places = torch.where(listed, indices, blocks).long()
        found.scatter_(-1, places, kind)
    return found[..., :blocks]
