"""Rows of padded batches packed one after the other, and back, with the names and results of FlashAttention's."""

from __future__ import annotations

from typing import Any

from . import _features
from ._errors import ArgumentError, DTypeError, invalid, invalid_words
from ._functional import _count, _kind, backend_of

__all__ = ["pad_input", "unpad_input"]


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """Packs the tokens of a padded batch, for :func:`flash_attn_varlen_func`.

    Args:
        hidden_states: ``(batch, seqlen, ...)``, a PyTorch tensor or a NumPy array.
        attention_mask: ``(batch, seqlen)``, of bool or of the integers 0 and 1: the tokens, as of a tokenizer.
        unused_mask: likewise: rows that are packed, too, but are not used.

    Returns:
        ``(total, ...)``: the packed rows; their indices in ``batch * seqlen``; ``cu_seqlens``, ``(batch + 1,)``,
        int32; the longest sequence; ``seqused``, ``(batch,)``, int32: the tokens of each sequence. Gradients reach
        ``hidden_states``. On a GPU the call waits for the mask.
    """
    backend = backend_of(hidden_states)
    if backend is None:
        raise ArgumentError(f"hidden_states is {_kind(hidden_states)}; expected a PyTorch tensor or a NumPy array")
    if hidden_states.ndim < 2:
        raise invalid("the shape of hidden_states", tuple(hidden_states.shape), "(batch, seqlen, ...)")
    tokens = _truths(backend, "attention_mask", attention_mask, hidden_states)
    packed = tokens
    if unused_mask is not None:
        packed = tokens | _truths(backend, "unused_mask", unused_mask, hidden_states)
    library = _library(backend)
    rows = hidden_states.reshape((-1, *hidden_states.shape[2:]))
    indices = library.argwhere(packed.reshape((-1,)))[:, 0]
    lengths, used = packed.sum(-1), tokens.sum(-1)
    starts = library.concatenate((packed[:0].sum()[None], lengths.cumsum(0)))
    starts, used = (backend.as_lengths(name, x, len(x)) for name, x in (("cu_seqlens", starts), ("seqused", used)))
    return rows[indices], indices, starts, int(lengths.max()) if len(lengths) else 0, used


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """Undoes :func:`unpad_input`: ``(batch, seqlen, ...)``, with zeros in the other rows.

    Args:
        hidden_states: ``(total, ...)``.
        indices: ``(total,)``, as :func:`unpad_input` returns them.
        batch: the number of sequences.
        seqlen: the rows of each.

    Raises:
        ArgumentError: shapes that do not fit; on the CPU, an index outside of ``batch * seqlen``.
        DTypeError: indices of another type than int32 and int64.
    """
    backend = backend_of(hidden_states)
    if backend is None or backend_of(indices) is not backend:
        words = "expected two PyTorch tensors or two NumPy arrays"
        raise ArgumentError(f"hidden_states is {_kind(hidden_states)}, indices {_kind(indices)}; {words}")
    batch, seqlen = _count("batch", batch), _count("seqlen", seqlen)
    if str(indices.dtype).removeprefix("torch.") not in ("int32", "int64"):
        raise DTypeError(invalid_words("the dtype of indices", indices.dtype, "int32 or int64"))
    if hidden_states.ndim < 1 or tuple(indices.shape) != (hidden_states.shape[0],):
        raise invalid("the shape of indices", tuple(indices.shape), "(total,), one per row of hidden_states")
    shape = (batch * seqlen, *hidden_states.shape[1:])
    least, most = backend.least_on_host(indices), backend.least_on_host(-indices)
    for found in () if least is None else (least, -most):
        if not 0 <= found < batch * seqlen:
            raise invalid("an element of indices", found, f"0 to batch * seqlen - 1 = {batch * seqlen - 1}")
    zeros = getattr(hidden_states, "new_zeros", None)
    out = zeros(shape) if zeros else backend.np.zeros(shape, hidden_states.dtype)
    out[indices] = hidden_states
    return out.reshape((batch, seqlen, *shape[1:]))


def _library(backend: Any) -> Any:
    """PyTorch or NumPy, which have functions of the same names."""
    return getattr(backend, "torch", None) or backend.np


def _truths(backend: Any, name: str, mask: Any, hidden_states: Any) -> Any:
    """A mask of the rows as truth values."""
    if backend_of(mask) is not backend:
        raise ArgumentError(f"{name} is {_kind(mask)}, hidden_states {_kind(hidden_states)}; they must be of one kind")
    shape = tuple(hidden_states.shape[:2])
    if tuple(mask.shape) != shape:
        raise invalid(f"the shape of {name}", tuple(mask.shape), f"(batch, seqlen) = {shape}")
    if backend.is_floating(mask):
        raise invalid(f"the dtype of {name}", mask.dtype, "bool or an integer type")
    for value in (int(mask.min()), int(mask.max())) if 0 not in shape else ():
        _features.check_truth(name, value)
    return mask != 0
