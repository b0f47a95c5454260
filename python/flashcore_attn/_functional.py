"""The public functions, for every kind of tensor: they check the arguments and pass 4-D tensors on."""

from __future__ import annotations

import contextlib
import importlib
import math
import operator
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from . import _dropout, _features
from ._broadcast import broadcast, leads_agree
from ._errors import ArgumentError, FlashCoreError, UnsupportedError, dimensions, invalid, invalid_words

__all__ = ["explain", "flash_attn_func", "scaled_dot_product_attention"]

# The modules `_torch` and `_numpy` after their first use. Importing FlashCore imports neither PyTorch nor
# NumPy.
_torch: Any = None
_numpy: Any = None

# Held during an import and during a fork. If a thread forks while another one imports, the module's import
# lock stays locked in the child.
_loading = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_loading.acquire, after_in_parent=_loading.release, after_in_child=_loading.release)

_NO_WINDOW = (-1, -1)
# The maximum number of keys on each side of the query's own in a window: Rust counts them in 32 bits.
_WIDEST = 2**32 - 1
_INFINITY = math.inf

#: A tensor or array: results are of q's kind.
T = TypeVar("T")


@overload
def flash_attn_func(
    q: T, k: T, v: T, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int | None] = ..., softcap: float = ..., alibi_slopes: Any = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., *, learnable_sink: Any = ...,
    temperature: Any = ..., attention_chunk: int = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    sm_margin: int = ..., qv: None = ..., q_descale: Any = ..., k_descale: Any = ..., v_descale: Any = ...,
    descale_q: Any = ..., descale_k: Any = ..., descale_v: Any = ..., return_lse: Literal[False] = ...,
    invariant: str | None = ...,
) -> T: ...  # fmt: skip
@overload
def flash_attn_func(
    q: T, k: T, v: T, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int | None] = ..., softcap: float = ..., alibi_slopes: Any = ...,
    deterministic: bool = ..., *, return_attn_probs: Literal[True], learnable_sink: Any = ...,
    temperature: Any = ..., attention_chunk: int = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    sm_margin: int = ..., qv: None = ..., q_descale: Any = ..., k_descale: Any = ..., v_descale: Any = ...,
    descale_q: Any = ..., descale_k: Any = ..., descale_v: Any = ..., return_lse: bool = ...,
    invariant: str | None = ...,
) -> tuple[T, T, None]: ...  # fmt: skip
@overload
def flash_attn_func(
    q: T, k: T, v: T, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: Sequence[int | None], softcap: float, alibi_slopes: Any, deterministic: bool,
    return_attn_probs: Literal[True], *, learnable_sink: Any = ..., temperature: Any = ..., attention_chunk: int = ...,
    num_splits: int = ..., pack_gqa: bool | None = ..., sm_margin: int = ..., qv: None = ..., q_descale: Any = ...,
    k_descale: Any = ..., v_descale: Any = ..., descale_q: Any = ..., descale_k: Any = ..., descale_v: Any = ...,
    return_lse: bool = ..., invariant: str | None = ...,
) -> tuple[T, T, None]: ...  # fmt: skip
@overload
def flash_attn_func(
    q: T, k: T, v: T, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int | None] = ..., softcap: float = ..., alibi_slopes: Any = ...,
    deterministic: bool = ..., return_attn_probs: Literal[False] = ..., *, learnable_sink: Any = ...,
    temperature: Any = ..., attention_chunk: int = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    sm_margin: int = ..., qv: None = ..., q_descale: Any = ..., k_descale: Any = ..., v_descale: Any = ...,
    descale_q: Any = ..., descale_k: Any = ..., descale_v: Any = ..., return_lse: Literal[True],
    invariant: str | None = ...,
) -> tuple[T, T]: ...  # fmt: skip
@overload
def flash_attn_func(
    q: T, k: T, v: T, dropout_p: float = ..., softmax_scale: float | None = ..., causal: bool = ...,
    window_size: Sequence[int | None] = ..., softcap: float = ..., alibi_slopes: Any = ...,
    deterministic: bool = ..., return_attn_probs: bool = ..., *, learnable_sink: Any = ...,
    temperature: Any = ..., attention_chunk: int = ..., num_splits: int = ..., pack_gqa: bool | None = ...,
    sm_margin: int = ..., qv: None = ..., q_descale: Any = ..., k_descale: Any = ..., v_descale: Any = ...,
    descale_q: Any = ..., descale_k: Any = ..., descale_v: Any = ..., return_lse: bool = ...,
    invariant: str | None = ...,
) -> T | tuple[T, T] | tuple[T, T, None]: ...  # fmt: skip
def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Sequence[int | None] = _NO_WINDOW, softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, learnable_sink: Any = None,
    temperature: Any = None, attention_chunk: int = 0, num_splits: int = 1, pack_gqa: bool | None = None,
    sm_margin: int = 0, qv: Any = None, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    descale_q: Any = None, descale_k: Any = None, descale_v: Any = None, return_lse: bool = False,
    invariant: str | None = None,
) -> Any:  # fmt: skip
    """FlashAttention's function: ``softmax(s) v`` without ever storing the scores ``s = softmax_scale * q k^T``.

    With a ``softcap`` the scores are ``s = softcap * tanh(softmax_scale * q k^T / softcap)``, and ``alibi_slopes`` add
    to that. Keys that ``causal``, ``window_size`` or ``attention_chunk`` hide have ``s = -inf``, after all of them.

    Args:
        q: ``(batch, seqlen_q, heads, head_dim)``, float16, bfloat16, float32, float8_e4m3fn or float8_e5m2. With 8-bit
            q and k, v is of an 8-bit type, float16 or bfloat16. On a GPU, 8-bit tensors need one of sm_89 or later,
            and float32 is multiplied in tf32 if PyTorch allows that for matrix products
            (``torch.set_float32_matmul_precision("high")``).
        k: ``(batch, seqlen_k, heads_k, head_dim)``; ``heads_k`` divides ``heads``, and query head ``h`` reads key head
            ``h // (heads // heads_k)``.
        v: ``(batch, seqlen_k, heads_k, head_dim_v)``.
        dropout_p: the probability with which a weight of the softmax is replaced by 0; the others are divided by
            ``1 - dropout_p``. As FlashAttention's functions, this one does not know whether a model trains.
        softmax_scale: factor on the scores; None means ``1 / sqrt(head_dim)``.
        causal: query ``i`` sees key ``j`` iff ``j <= i + seqlen_k - seqlen_q`` (aligned to the bottom right). It is
            ``window_size=(-1, 0)``.
        window_size: ``(left, right)``, two integers of -1 (all keys; so is None) to 2^32 - 1. Query ``i`` sees key
            ``j`` iff ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right``. A model's "window of
            W" counts the query's own key: ``left = W - 1``. Blocks of keys outside cost no time. ``causal`` makes
            ``right`` 0.
        softcap: bound of the scores' magnitude, 0 for none. Kernels are compiled for scores with a cap or without one,
            not for its value.
        alibi_slopes: ``(heads,)`` or ``(batch, heads)``, floating point; None for none. The scores become
            ``s - slope * |i + seqlen_k - seqlen_q - j|``, and ``lse`` is of these.
        deterministic: gradients have equal bits in every run. A Hopper GPU then adds the parts of dQ in the order of
            the keys. Without it, and without ``torch.use_deterministic_algorithms(True)``, it adds them in the order
            in which they are ready, which is faster. Results have equal bits in any case: on the CPU for one number of
            threads (``torch.set_num_threads``), which decides with few rows and many keys into how many parts the keys
            are split. float16 and bfloat16 results are rounded otherwise with the log-sum-exp than without it.
        return_attn_probs: return ``(out, lse, None)``, where ``lse`` is the natural logarithm of each row's sum of
            ``exp(s)``, ``(batch, heads, seqlen_q)``, float32. Probabilities themselves are never formed.
        learnable_sink: ``(heads,)``, floating point: a logit per query head that takes part in the softmax's
            denominator and has no value (GPT-OSS). It is neither scaled nor capped, and enters ``lse``.
        temperature: ``(heads,)``, floating point, finite and not negative: a factor on each head's scores, beside
            ``softmax_scale`` and before ``softcap``. On a GPU, another value makes NaN of the head's rows.
        attention_chunk: query ``i`` sees the keys of its chunk of so many positions, ``(i + seqlen_k - seqlen_q) //
            attention_chunk == j // attention_chunk``; 0 for no chunks.
        num_splits: accepted as FlashAttention-3's, as are ``pack_gqa`` and ``sm_margin``; they change no result.
        qv: only None.
        descale_q, descale_k, descale_v: ``(batch, heads_k)``, float32 with any strides, for 8-bit q, k and v: each
            element stands for the factor times the element, as in FlashAttention-3. None means 1. A factor of q or k
            that is negative, infinite or NaN makes NaN of the rows that it affects. Also ``(batch, heads_k, blocks)``,
            a factor for each block of 64 or 128 rows. :func:`flashcore_attn.quantize` makes 8-bit tensors and factors.
        q_descale, k_descale, v_descale: FlashAttention-3's names of ``descale_q``, ``descale_k`` and ``descale_v``.
        return_lse: return ``(out, lse)`` as FlashAttention-4 does.
        invariant: ``"batch"``: the bits of a row do not depend on the other sequences of the call or on the number of
            SMs. ``"phase"``: they do not depend on the number of query rows either, so that decode repeats a
            prefill. Inputs are finite, and all calls run on one device model. On a GPU, tensors have 16 bits (k and v
            perhaps 8), one head dim, a multiple of 32 up to 256 (of 64 with 8 bits), and neither ``alibi_slopes``,
            ``temperature``, ``attention_chunk`` nor dropout.
            Gradients have no such promise.

    Returns:
        ``(batch, seqlen_q, heads, head_dim_v)`` of q's kind, dtype, device and order in memory. With 8-bit q and k,
        the dtype is v's if that has 16 bits, else bfloat16. A row that sees no key
        is 0, its ``lse`` minus infinity or the sink. On a GPU a value that is infinite or NaN makes NaN of rows from
        which a mask hides it, too (0 times infinity), as in FlashAttention.

    Tensors of PyTorch have gradients, also of ``lse``, ``alibi_slopes``, ``learnable_sink`` and ``temperature``, by one
    call that reads the inputs, the result and ``lse``; a second derivative is refused. On a GPU they need float16 or
    bfloat16 and head dims up to 256.

    Tensors are read in place, with any strides; only one whose last dimension is not contiguous is copied first. On a
    GPU (sm_80 or later; head dims up to 576, of the values up to 512) the kernel is enqueued on PyTorch's current
    stream, nothing is synchronised, and a CUDA graph may capture it. A captured call has scratch memory of its
    own until the graph is destroyed. Launches of one executable graph, as of ``torch.cuda.CUDAGraph``, never
    overlap. Two executable graphs of one captured graph, and its clones, share the scratch memory: they must not
    run at the same time.

    Raises:
        ArgumentError: (a ValueError) shapes or devices that do not fit each other, a scale that is not finite, a window
            that is no pair of integers or has one below -1, a cap that is negative, infinite or NaN, a value of another
            kind than the argument's.
        DTypeError: (a TypeError) other element types, or types that differ.
        UnsupportedError: (a NotImplementedError) a feature that is not there; gradients that the device does not
            compute.
        DeviceError: (a RuntimeError) the GPU or its driver refused.
    """
    if _torch is not None and not _torch.is_dynamo_compiling() and _torch.eager is not None:
        made = None
        plain = descale_q is descale_k is descale_v is q_descale is k_descale is v_descale is temperature is None
        if plain and qv is invariant is None:
            made = _torch.eager.flash(
                q, k, v, (dropout_p, softmax_scale, causal, window_size, softcap), alibi_slopes, learnable_sink,
                attention_chunk, deterministic, (return_attn_probs, return_lse),
            )  # fmt: skip
        if made is not None:
            return made
    if type(dropout_p) is not float or dropout_p or qv is not None:
        dropout_p = _probability(dropout_p, qv=qv)
    if type(return_attn_probs) is not bool or type(return_lse) is not bool:
        return_attn_probs = _flag("return_attn_probs", return_attn_probs)
        return_lse = _flag("return_lse", return_lse)
    descale_q = _either("descale_q", descale_q, "q_descale", q_descale)
    descale_k = _either("descale_k", descale_k, "k_descale", k_descale)
    descale_v = _either("descale_v", descale_v, "v_descale", v_descale)
    backend = backend_of(q)
    if backend is None:
        others = given(
            alibi_slopes=alibi_slopes, learnable_sink=learnable_sink, temperature=temperature,
            descale_q=descale_q, descale_k=descale_k, descale_v=descale_v,
        )  # fmt: skip
        options = {
            "softmax_scale": softmax_scale, "causal": causal, "window_size": window_size, "softcap": softcap,
            "attention_chunk": attention_chunk, "return_attn_probs": return_attn_probs, "return_lse": return_lse,
            "dropout_p": dropout_p, "invariant": invariant,
        }  # fmt: skip
        return _foreign(flash_attn_func, {"q": q, "k": k, "v": v, **others}, options)
    backend.check_kinds(q, k, v)
    _check_dims(q, k, v)
    _check_number("softmax_scale", softmax_scale)
    before, after, cap = _band_and_cap(causal, window_size, softcap)
    if type(attention_chunk) is not int or attention_chunk:
        attention_chunk = _count("attention_chunk", attention_chunk)
    features = None
    if alibi_slopes is not None or learnable_sink is not None or temperature is not None or attention_chunk:
        of_heads = (alibi_slopes, learnable_sink, temperature)
        inputs = (q, k, v, descale_q, descale_k, descale_v)
        features, cap = _of_heads(backend, inputs, of_heads, attention_chunk, cap)
    if descale_q is not None or descale_k is not None or descale_v is not None:
        rows = (q.shape[1], k.shape[1], v.shape[1])
        factors = (descale_q, descale_k, descale_v)
        features = _with_scales(features, backend, (k.shape[0], k.shape[2]), rows, factors)
    if deterministic is not False:
        features = with_determinism(features, deterministic)
    if dropout_p:
        features = _dropout.with_dropout(features, backend, q, dropout_p)
    if invariant is not None:
        features = with_invariant(features, invariant)
    try:
        want_lse = return_attn_probs or return_lse
        out, lse = backend.attend(q, k, v, 2, (False, before, after, softmax_scale, cap), want_lse, features)
    except (ValueError, TypeError, OverflowError) as error:
        if (told := _of_scale(error, "softmax_scale", softmax_scale)) is not None:
            raise told from None
        raise
    if return_attn_probs:
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        return out, lse, backend.dropout_mask(features, q, shape) if dropout_p else None
    return (out, lse) if return_lse else out


def scaled_dot_product_attention(
    query: T,
    key: T,
    value: T,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> T:
    """PyTorch's function: ``softmax(query key^T * scale) value``.

    Args:
        query: ``(..., heads, L, E)``, float16, bfloat16 or float32. On a GPU, float32 is multiplied in tf32 if
            PyTorch allows that for matrix products. 8-bit tensors are taken as by :func:`flash_attn_func`,
            without descale factors.
        key: ``(..., heads, S, E)``.
        value: ``(..., heads, S, Ev)``. Leading dimensions broadcast.
        attn_mask: a tensor that broadcasts to ``(..., heads, L, S)``: of bool, where True means that the key takes
            part, or floating point (query's type or float32), which is added to the scores. It is read with its
            strides.
        dropout_p: as in :func:`flash_attn_func`.
        is_causal: query ``i`` sees key ``j`` iff ``j <= i`` (aligned to the top left, as PyTorch does). Not together
            with ``attn_mask``, as in PyTorch.
        scale: factor on the scores; None means ``1 / sqrt(E)``.
        enable_gqa: key and value may have fewer heads than query, a divisor of their number.

    Returns:
        ``(..., heads, L, Ev)`` of query's kind, dtype, device and order in memory. With 8-bit query and key, the dtype
        is that of :func:`flash_attn_func`. A row that sees no key is 0.

    Memory, streams and errors are as in :func:`flash_attn_func`.
    """
    if _torch is not None and not _torch.is_dynamo_compiling() and _torch.eager is not None:
        made: T | None = _torch.eager.sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, False)
        if made is not None:
            return made
    if type(dropout_p) is not float or dropout_p:
        dropout_p = _probability(dropout_p)
    if enable_gqa is not False and enable_gqa is not True:
        enable_gqa = _flag("enable_gqa", enable_gqa)
    if is_causal is not False and is_causal is not True:
        is_causal = _flag("is_causal", is_causal)
    if attn_mask is not None and is_causal:
        raise invalid("is_causal", is_causal, "False where attn_mask is given, as in PyTorch")
    backend = backend_of(query)
    if backend is None:
        tensors = {"query": query, "key": key, "value": value, **given(attn_mask=attn_mask)}
        return foreign(
            scaled_dot_product_attention, tensors, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa,
        )  # fmt: skip
    q, k, v = backend.admit(query, key, value)
    _check_number("scale", scale)
    lead = None
    if not leads_agree(q, k, v, enable_gqa):
        lead, q, k, v = broadcast(backend, q, k, v, enable_gqa)
    features = None
    if attn_mask is not None:
        features = _of_mask(backend, attn_mask, q, k, (q.shape[0], q.shape[1]) if lead is None else lead)
    if dropout_p:
        features = _dropout.with_dropout(features, backend, q, dropout_p)
    try:
        out = backend.attend(q, k, v, 1, (True, -1, 0 if is_causal else -1, scale, 0.0), False, features)[0]
    except (ValueError, TypeError, OverflowError) as error:
        if (told := _of_scale(error, "scale", scale)) is not None:
            raise told from None
        raise
    result: T = out if lead is None else backend.reshape(out, (*lead, *out.shape[2:]))
    return result


def _foreign(function: Any, tensors: dict[str, Any], options: dict[str, Any]) -> Any:
    """A call on tensors that are converted first. A function inside of ``function`` would make each of its calls, whose
    variables it shares, slower."""
    return foreign(lambda *views: function(**dict(zip(tensors, views)), **options), tensors)


def with_determinism(features: Any, deterministic: Any) -> Any:
    """The features of a call whose gradients have equal bits in every run, if that is asked for."""
    if not _flag("deterministic", deterministic):
        return features
    return (features or _features.Features())._replace(deterministic=True)


def with_invariant(features: Any, invariant: Any) -> Any:
    """The features of a call whose rows have equal bits in every batch or phase, if that is asked for."""
    if invariant is None:
        return features
    if not isinstance(invariant, str) or invariant not in ("batch", "phase"):
        raise invalid("invariant", invariant, "'batch', 'phase' or None")
    return (features or _features.Features())._replace(invariant=invariant)


def _of_heads(
    backend: Any, tensors: tuple[Any, ...], arrays: tuple[Any, Any, Any], chunk: Any, cap: float
) -> tuple[Any, float]:
    """The features of ALiBi slopes, sinks, temperatures and chunks, and the cap that is left to them."""
    batch, _, heads, _ = tensors[0].shape
    slopes, sink, temperature = arrays
    parts, others = _features.Parts(), {}
    if temperature is not None:
        temperature = _features.sink("temperature", backend, temperature, heads, "a factor")
        if not backend.is_direct(*(x for x in (*tensors, slopes, sink, temperature) if x is not None)):
            cap, others["floats"] = _features.temperature(parts, temperature, cap)
            temperature = None
    parts, sink = _parts_of_heads(backend, batch, heads, slopes, sink, chunk, parts)
    return parts.features(sink=sink, temperature=temperature, **others), cap


def _parts_of_heads(
    backend: Any, batch: Any, heads: int, slopes: Any, sink: Any, chunk: Any, parts: Any = None
) -> tuple[Any, Any]:
    """The parts with ALiBi slopes and chunks, and the checked sinks."""
    parts = _features.Parts() if parts is None else parts
    if slopes is not None:
        _features.alibi(parts, backend, slopes, batch, heads)
    if chunk:
        _features.chunk(parts, chunk)
    if sink is not None:
        sink = _features.sink("learnable_sink", backend, sink, heads)
    return parts, sink


def _check_rank(name: str, tensor: Any, packed: bool) -> None:
    """Rejects a tensor of rows that has another number of dimensions."""
    wanted = "3: rows, heads, head_dim" if packed else "4: batch, sequence, heads, head_dim"
    if tensor.ndim != int(wanted[0]):
        raise ArgumentError(f"{name} has {dimensions(tensor.ndim)}; it takes {wanted}")


def _with_scales(
    features: Any, backend: Any, groups: tuple[int, int], rows: tuple[int, int, int], factors: tuple[Any, Any, Any]
) -> Any:
    """The features with descale factors. ``groups``: batch entries and KV heads; ``rows``: those of q, k and v."""
    scales: list[Any] = [None, None, None]
    blocks = [0, 0, 0]
    for i, (name, given) in enumerate(zip(_features.SCALES, factors)):
        if given is not None:
            scales[i] = backend.as_scale(name, given)
            blocks[i] = _features.rows_of_block(name, scales[i], *groups, rows[i])
    features = _features.Features() if features is None else features
    return features._replace(scales=tuple(scales), blocks=tuple(blocks))


def _of_mask(backend: Any, mask: Any, q: Any, k: Any, lead: tuple[int, ...]) -> Any:
    """The features of ``attn_mask``. ``lead`` are the leading dimensions of the scores, q and k have two of them."""
    if backend_of(mask) is not backend:
        raise ArgumentError(f"attn_mask is {_kind(mask)}, query {_kind(q)}; they must be of one kind")
    whole = (*lead, q.shape[2], k.shape[2])
    table = backend.as_table("attn_mask", mask, like=q)
    if not _features.broadcasts(table.shape, whole):
        cure = ""
        if tuple(mask.shape) == (whole[0], whole[-1]):
            cure = "; a padding mask (batch, S) is passed as attn_mask[:, None, None, :]"
        raise invalid("the shape of attn_mask", tuple(mask.shape), f"one that broadcasts to {whole}{cure}")
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    parts = _features.Parts()
    if len(whole) != 4:
        table = backend.reshape(backend.expand(table, whole), shape)
    _features.scores(parts, backend, "attn_mask", table, shape)
    return parts.features()


def _band_and_cap(causal: Any, window_size: Any, softcap: Any) -> tuple[int, int, float]:
    """The keys that a query sees before and after its own (-1: all), and the cap on the scores (0: none)."""
    if causal is not False and causal is not True:
        causal = _flag("causal", causal)
    before, after = _window(window_size)
    if type(softcap) is not float or not 0.0 <= softcap < _INFINITY:
        softcap = _cap(softcap)
    return before, 0 if causal else after, softcap


def _window(size: Any) -> tuple[int, int]:
    try:
        before, after = size
        if type(before) is not int or type(after) is not int:
            before, after = (-1 if keys is None else keys for keys in (before, after))
            for keys in (before, after):
                _check_number("window_size", keys)
            before, after = _index(before), _index(after)
    except (TypeError, ValueError, RuntimeError):
        pass
    else:
        if -1 <= before <= _WIDEST and -1 <= after <= _WIDEST:
            return before, after
    expected = f"two integers, the keys before and after the query's own that it sees, each -1 (all) to {_WIDEST}"
    raise invalid("window_size", size, expected)


def _cap(value: Any) -> float:
    _check_number("softcap", value)
    cap = -1.0
    if hasattr(value, "__float__") or hasattr(value, "__index__"):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            cap = float(value)
    if not 0.0 <= cap < _INFINITY:
        raise invalid("softcap", value, "0 (no cap) or a positive number that is finite in float32")
    return cap


def _count(name: str, value: Any) -> int:
    """An integer of 0 to 2^31 - 1."""
    _check_number(name, value)
    try:
        number = _index(value)
    except (TypeError, ValueError, RuntimeError):  # of tensors
        number = -1
    if not 0 <= number < 2**31:
        raise invalid(name, value, "an integer of 0 to 2^31 - 1")
    return number


def _longest(name: str, value: Any, rows: Any) -> Any:
    """The longest sequence, or all rows. A tensor says it to a graph only by a break and one graph for each number."""
    in_graph = _torch is not None and isinstance(value, _torch.torch.Tensor) and _torch.is_dynamo_compiling()
    return rows if value is None or in_graph else _count(name, value)


def _index(value: Any) -> Any:
    """An integer. `operator.index` would turn a number that varies in a compiled graph into a constant."""
    kind = type(value)
    return value if kind is int or (_torch is not None and kind is _torch.torch.SymInt) else operator.index(value)


def _flag(name: str, value: Any) -> bool:
    """A bool, NumPy's bool, 0 or 1. The truth value of other objects may not be the intended one."""
    _check_number(name, value)
    try:
        known = not isinstance(value, str) and value in (0, 1)
    except (TypeError, ValueError, RuntimeError):  # of arrays
        known = False
    if not known:
        raise invalid(name, value, "True or False")
    return bool(value)


def _check_number(name: str, value: Any) -> None:
    """Rejects a tensor of PyTorch as a number if its gradient would be lost, or if its memory was released."""
    if value is not None and type(value) is not float and _torch is not None and isinstance(value, _torch.Tensor):
        _torch.check_number(name, value)


def _of_scale(error: Exception, name: str, value: Any) -> ArgumentError | None:
    """An error about the scale, with the caller's name for the scale; None for other errors."""
    if " for scale: " in str(error):
        return ArgumentError(str(error).replace(" for scale: ", f" for {name}: ", 1))
    if isinstance(error, FlashCoreError) or value is None:
        return None
    try:
        math.fabs(value)  # which, unlike `float`, refuses text
    except (ValueError, TypeError, OverflowError):
        return invalid(name, value, "a number that is finite in float32, or None")
    return None


def explain(
    q: Any, k: Any, v: Any, *, causal: bool = False, window_size: Sequence[int | None] = (-1, -1), softcap: float = 0.0
) -> dict[str, Any]:
    """Which GPU kernel :func:`flash_attn_func` runs for such tensors, and why. The first time it is compiled.

    Args:
        q: a CUDA tensor of PyTorch's, ``(batch, seqlen_q, heads, head_dim)``.
        k: ``(batch, seqlen_k, heads_k, head_dim)``.
        v: ``(batch, seqlen_k, heads_k, head_dim_v)``.
        causal: as in :func:`flash_attn_func`.
        window_size: as in :func:`flash_attn_func`.
        softcap: as in :func:`flash_attn_func`.

    Returns:
        ``device``; ``plan``, the kernel's family and genes; ``choice``, where the plan came from, and ``why``, line by
        line; ``registers`` and ``local_bytes`` of a thread; ``fallbacks``, why other plans were not taken.

    Raises:
        UnsupportedError: for tensors on the CPU, and what no kernel computes; the rest as in :func:`flash_attn_func`.
    """
    if not getattr(q, "is_cuda", False) or not hasattr(q, "__torch_function__"):
        kind = f"a tensor on {q.device}" if hasattr(q, "__torch_function__") else f"a {type(q).__name__}"
        raise UnsupportedError(f"explain works on CUDA tensors of PyTorch only; q is {kind}")
    backend = backend_of(q)
    backend.check_kinds(q, k, v)
    _check_dims(q, k, v)
    before, after, cap = _band_and_cap(causal, window_size, softcap)
    told: dict[str, Any] = backend.explain(q, k, v, 2, (False, before, after, None, cap))
    return told


def _check_dims(q: Any, k: Any, v: Any) -> None:
    if q.ndim == k.ndim == v.ndim == 4:
        return
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4:
            dims = f"{name} has {dimensions(tensor.ndim)}"
            raise ArgumentError(f"{dims}; it takes 4: batch, sequence, heads, head_dim")


def _probability(dropout_p: Any, **others: Any) -> float:
    """The probability of dropout. Rejects each other argument that is not None."""
    wrong = [(name, _kind(value), None) for name, value in others.items() if value is not None]
    if wrong:
        raise _unsupported(*wrong)
    _check_number("dropout_p", dropout_p)
    return _dropout.probability(dropout_p)


def _unsupported(*arguments: tuple[str, Any, Any]) -> UnsupportedError:
    """Rejects each argument that differs from its only supported value; the error names them."""
    wrong = [(name, value, only) for name, value, only in arguments if value != only]
    told = "; ".join(invalid_words(name, value, f"{only}, no other is supported yet") for name, value, only in wrong)
    return UnsupportedError(told, ", ".join(name for name, _, _ in wrong))


def _either(name: str, value: Any, other_name: str, other: Any) -> Any:
    """The value of an argument that has two names, of which at most one is given."""
    if value is not None and other is not None:
        raise invalid(other_name, _kind(other), f"None beside {name}")
    return value if other is None else other


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"


def backend_of(tensor: Any) -> Any:
    """The module that computes on such tensors; None for those that must be converted first."""
    if _torch is not None and isinstance(tensor, _torch.Tensor):
        return _torch
    if _numpy is not None and isinstance(tensor, _numpy.Array):
        return _numpy
    return _import_backend(tensor)


def _import_backend(tensor: Any) -> Any:
    global _torch, _numpy
    if _torch is None and hasattr(tensor, "__torch_function__"):
        load("_torch")
        from . import _torch as loaded

        _torch = loaded
        if isinstance(tensor, _torch.Tensor):
            return _torch
    if _numpy is None and "numpy" in sys.modules:
        load("_numpy")
        from . import _numpy as numpy_backend

        _numpy = numpy_backend
        return _numpy if isinstance(tensor, _numpy.Array) else None
    return None


def load(name: str) -> bool:
    """Imports a module of this package at its first use."""
    with _loading:
        importlib.import_module(f"{__package__}.{name}")
    return True


# Marks the function as `torch.compiler.assume_constant_result` does, so that a traced call does not trace the
# import.
load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def given(**tensors: Any) -> dict[str, Any]:
    """The tensors that are not None."""
    return {name: x for name, x in tensors.items() if x is not None}


def unpacked(tensor: Any, axis: int) -> list[Any]:
    """Views of the parts of a packed tensor. The gradients of PyTorch's ``unbind`` are written into one tensor."""
    if hasattr(tensor, "unbind"):
        return list(tensor.unbind(axis))
    others = [i for i in range(tensor.ndim) if i != axis]
    return list(tensor.transpose((axis, *others)))


def foreign(function: Any, tensors: dict[str, Any], **options: Any) -> Any:
    load("_interchange")
    from . import _interchange

    return _interchange.call(function, tensors, options)
