"""FlexAttention: attention whose scores and masks are functions of the caller."""

from __future__ import annotations

import math
import re
from typing import Any

from . import _blocks, _features, _trace, _trace_cache
from ._broadcast import broadcast, leads_agree
from ._errors import ArgumentError, UnsupportedError, dimensions, invalid, invalid_words
from ._functional import _check_number, _flag, _of_scale, backend_of, foreign, given
from ._graphs import inside_graphs
from ._trace import table

__all__ = ["flex_attention", "table"]

#: The name of a table in messages.
CAPTURED = "a captured tensor"
MOST_TABLES = 8
#: The size of PyTorch's block for any number of rows and keys.
_UNBOUNDED = 1 << 30
#: The lists of blocks of PyTorch's ``BlockMask`` that this module reads.
_LISTS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")


@inside_graphs
def flex_attention(
    query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    """PyTorch's FlexAttention: ``softmax(score_mod(query key^T * scale)) value``, where a mask shows the key.

    Both functions are called once, with objects that record what the functions compute. The record is a program, which
    the kernel evaluates for each score. A function may use Python's operators; ``torch.where``, ``abs``, ``tanh``,
    ``exp``, ``log``, ``minimum``, ``maximum``, ``clamp`` and their like; captured numbers, which become constants; and
    captured tensors, indexed by positions (``bias[h, q - k]``) or of one element, which are read at each call. A row of
    up to 16 elements (``places[q]`` of a tensor ``(L, 3)``) takes part element by element and in ``sum``, ``mean``,
    ``amin`` and ``amax``. A branch (``if``) on a score or a position is refused, with its line.

    Args:
        query: ``(batch, heads, L, E)``, float16, bfloat16 or float32. On a GPU, float32 is multiplied in tf32 if
            PyTorch allows that for matrix products, as in PyTorch's function. 8-bit tensors are taken as by
            :func:`flash_attn_func`, without descale factors.
        key: ``(batch, heads_k, S, E)``.
        value: ``(batch, heads_k, S, Ev)``.
        score_mod: ``score_mod(score, b, h, q, k)`` returns the score that the softmax takes.
        block_mask: ``mask_mod(b, h, q, k)``, which returns whether query ``q`` sees key ``k``; or PyTorch's
            ``BlockMask``, of which the ``mask_mod`` is taken; or FlashAttention-4's tensors, by
            :func:`block_sparse_mask`. A ``BlockMask`` without a ``mask_mod`` of its own is taken by its blocks. On a
            GPU, its lists also say which blocks to skip where ``mask_mod`` reads a tensor with an element for each
            score; for other masks a kernel finds these blocks itself. Beside a ``mask_mod``, lists must say the same
            as it, as those of ``create_block_mask`` do: lists that hide or show more are not followed in general,
            although ``torch.compile(flex_attention)`` follows them. :func:`block_sparse_mask` does.
        scale: factor on the scores; None means ``1 / sqrt(E)``.
        enable_gqa: key and value may have fewer heads than query, a divisor of their number.
        return_lse: return ``(out, lse)``; ``lse`` is the natural logarithm of each row's sum of exponentials,
            ``(batch, heads, L)``, float32.
        kernel_options: accepted; options of PyTorch's kernels change no result.
        return_aux: PyTorch's ``AuxRequest``, of which only ``lse`` is supported: return ``(out, AuxOutput)``.

    Returns:
        ``(batch, heads, L, Ev)`` of query's kind. A row that sees no key is 0, its ``lse`` minus infinity.

    Raises:
        UnsupportedError: what a program cannot state, with file and line; a gradient that the device does not compute.
        ArgumentError: as :func:`scaled_dot_product_attention`, and a ``BlockMask`` for fewer queries or keys.
    """
    if return_aux is not None:
        wanted = _wants_lse(return_aux, return_lse)
        found = flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, wanted)
        from torch.nn.attention.flex_attention import AuxOutput

        return (found[0], AuxOutput(lse=found[1])) if wanted else (found, AuxOutput())
    backend = backend_of(query)
    if backend is None:
        return foreign(
            flex_attention, {"query": query, "key": key, "value": value}, score_mod=score_mod, block_mask=block_mask,
            scale=scale, enable_gqa=enable_gqa, return_lse=return_lse,
        )  # fmt: skip
    q, k, v = backend.admit(query, key, value)
    _check_number("scale", scale)
    enable_gqa, return_lse = _flag("enable_gqa", enable_gqa), _flag("return_lse", return_lse)
    if not leads_agree(q, k, v, enable_gqa):
        for name, tensor in (("query", q), ("key", k), ("value", v)):
            if tensor.ndim != 4:
                dims = f"{name} has {dimensions(tensor.ndim)}"
                raise ArgumentError(f"{dims}; it takes 4: batch, heads, sequence, head_dim")
        _, q, k, v = broadcast(backend, q, k, v, enable_gqa)
    tracing = backend.Tracing(q)
    parts = _features.Parts()
    if score_mod is not None:
        parts.score = _program(parts, backend, tracing, score_mod, "sbhqk", _trace.FLOAT)
    if block_mask is not None:
        _mask(parts, backend, tracing, block_mask, (q.shape[0], q.shape[1], q.shape[2], k.shape[2]))
    try:
        out, lse = backend.attend(q, k, v, 1, (True, -1, -1, scale, 0.0), return_lse, parts.features())
    except (ValueError, TypeError, OverflowError) as error:
        if (told := _of_scale(error, "scale", scale)) is not None:
            raise told from None
        raise
    return (out, lse) if return_lse else out


def _wants_lse(return_aux: Any, return_lse: Any) -> bool:
    """Whether PyTorch's ``AuxRequest`` asks for the log-sum-exp."""
    if _flag("return_lse", return_lse):
        raise invalid("return_lse", return_lse, "False where return_aux is given, as in PyTorch")
    if not hasattr(return_aux, "lse"):
        raise invalid("the type of return_aux", type(return_aux).__name__, "PyTorch's AuxRequest")
    if getattr(return_aux, "max_scores", False):
        raise UnsupportedError(invalid_words("return_aux", return_aux, "no max_scores"), "return_aux")
    return bool(return_aux.lse)


def _program(parts: _features.Parts, backend: Any, tracing: Any, function: Any, arguments: str, kind: str) -> str:
    """The text of a function's program, with its tables behind those of ``parts``."""
    if not callable(function):
        what = "score_mod" if kind == _trace.FLOAT else "block_mask"
        raise invalid(f"the type of {what}", type(function).__name__, "a function")
    text, arrays = _trace_cache.trace(function, arguments, kind, tracing)
    first = len(parts.tables)
    for array in arrays:
        parts.table(backend.as_table(CAPTURED, _trace.unviewed(array)), CAPTURED)
    if (captured := parts.names.count(CAPTURED)) > MOST_TABLES:
        raise invalid("the number of captured tensors", captured, f"at most {MOST_TABLES}")
    return text if first == 0 else _renumbered(text, first)


def _renumbered(text: str, first: int) -> str:
    return re.sub(r"\b([tn])(\d+)\[", lambda found: f"{found[1]}{int(found[2]) + first}[", text)


# Marks it as `torch.compiler.assume_constant_result` does: a graph's trace calls it.
_renumbered._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _mask(parts: _features.Parts, backend: Any, tracing: Any, mask: Any, shape: tuple[int, int, int, int]) -> None:
    """The mask of a function, or of a ``BlockMask``, over ``(batch, heads, L, S)``."""
    function = mask
    if hasattr(mask, "mask_mod") and hasattr(mask, "kv_num_blocks"):
        rows, keys = mask.seq_lengths
        function = mask.mask_mod
        is_noop = getattr(function, "__name__", "") == "noop_mask"
        if is_noop and min(mask.BLOCK_SIZE) >= _UNBOUNDED:
            return  # PyTorch's mask of a call without one
        if rows < shape[2] or keys < shape[3]:
            expected = f"one for at least {shape[2]} queries and {shape[3]} keys"
            raise invalid("the lengths of block_mask", f"({rows}, {keys})", expected)
        _blocks.check_lists(given(**{name: getattr(mask, name) for name in _LISTS}))
        if is_noop:
            _dense_blocks(parts, backend, mask, shape)
            return
        parts.mask = _program(parts, backend, tracing, function, "bhqk", _trace.BOOL)
        if getattr(mask.kv_num_blocks, "is_cuda", False) and _reads_each_score(parts, shape):
            partial, full = (mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)
            _listed(parts, backend, (partial, full), mask.BLOCK_SIZE, shape)
        return
    if isinstance(mask, _blocks.BlockSparseMask):
        function, tensors, size = mask
        names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
        _blocks.check_lists(given(**{name: getattr(tensors, name) for name in names}))
        if function is not None:
            parts.mask = _program(parts, backend, tracing, function, "bhqk", _trace.BOOL)
        partial = (tensors.mask_block_cnt, tensors.mask_block_idx)
        _listed(parts, backend, (partial, (tensors.full_block_cnt, tensors.full_block_idx)), size, shape)
        return
    parts.mask = _program(parts, backend, tracing, function, "bhqk", _trace.BOOL)


def _reads_each_score(parts: _features.Parts, shape: tuple[int, int, int, int]) -> bool:
    return any(math.prod(table.shape) >= shape[2] * shape[3] for table in parts.tables)


def _listed(
    parts: _features.Parts, backend: Any, lists: tuple[Any, Any], size: Any, shape: tuple[int, int, int, int]
) -> None:
    """The mask of ``parts`` in blocks that are listed as partial; all keys of those listed as full, and no others."""
    rows, keys = size
    of_blocks = _blocks.kinds(*lists, -(-shape[3] // keys))
    if of_blocks.shape[2] * rows < shape[2]:
        expected = f"blocks of {rows} for at least {shape[2]} queries"
        raise invalid("the number of row blocks of block_mask", of_blocks.shape[2], expected)
    for axis, name in enumerate(("batch", "heads")):
        if of_blocks.shape[axis] not in (1, shape[axis]):
            raise invalid(f"{name} of block_mask", of_blocks.shape[axis], f"1 or {shape[axis]}")
    dense = backend.as_table("block_mask", of_blocks)
    number = parts.table(backend.expand(dense, (*shape[:2], *dense.shape[-2:])), "block_mask")
    kind = f"n{number}[b, h, q / {rows}, k / {keys}]"
    named, _, result = parts.mask.rpartition(";")
    listed = f"({kind} > 1) | (({kind} == 1) & ({result or 'true'}))"
    parts.mask = f"{named}; {listed}" if named else listed


def _dense_blocks(parts: _features.Parts, backend: Any, mask: Any, shape: tuple[int, int, int, int]) -> None:
    """The mask of a ``BlockMask`` by its lists of blocks alone."""
    dense = backend.as_table("block_mask", mask.to_dense())
    rows, keys = mask.BLOCK_SIZE
    whole = backend.expand(dense, (*shape[:2], *dense.shape[-2:]))
    number = parts.table(whole, "block_mask")
    parts.mask = f"n{number}[b, h, q / {rows}, k / {keys}] != 0"
