"""The operators ``flashcore_attn::attention_with_cache``, which appends to a cache, and ``merge_states``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library

from . import _cuda, _features, _flashcore, _memory
from . import _torch as _calls
from ._errors import ArgumentError, DTypeError, UnsupportedError, dimensions, invalid, invalid_words

if TYPE_CHECKING:
    from ._features import Append, Features
    from ._flashcore import Terms


def append_and_attend(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, want_lse: bool, features: Features, append: Append
) -> tuple[Tensor, Tensor | None]:
    """Attention to a cache ``(batch, rows, heads, dim)`` or pages, to which keys and values are appended first."""
    named = [("q", q), ("k_cache", k), ("v_cache", v), *features.named(), *append.named()]
    _calls._refuse_grad(x for _, x in named)
    for name, x in named[:3]:
        _memory.check(name, x)
    cos, sin, interleaved, positions = append.rotary or (None, None, False, None)
    new = (append.k, append.v, append.starts, cos, sin, positions, interleaved)
    out, lse = torch.ops.flashcore_attn.attention_with_cache(q, k, v, *new, *terms, want_lse, *_calls._flat(features))
    return out, lse if want_lse else None


@library.custom_op(
    "flashcore_attn::attention_with_cache",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? cu_seqlens_k_new, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, bool interleaved, bool top_left, SymInt before, "
    "SymInt after, float? scale, float softcap, bool want_lse, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_q, Tensor? seqused_k, Tensor? leftpad_k, SymInt batch, SymInt max_q, SymInt max_k, Tensor? sink, "
    "str score, str mask, float[] floats, SymInt[] ints, Tensor[] tables, Tensor? descale_q, Tensor? descale_k, "
    "Tensor? descale_v, int[] blocks, Tensor? page_table=None) -> (Tensor, Tensor)",
)
def _operator_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k_new: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_seqlens: Tensor | None,
    interleaved: bool,
    top_left: bool,
    before: int,
    after: int,
    scale: float | None,
    softcap: float,
    want_lse: bool,
    *features: Any,
) -> tuple[Tensor, Tensor]:
    stated = _calls._given_features(q, k_cache, v_cache, 2, features)
    append = _appended(k, v, cu_seqlens_k_new, (rotary_cos, rotary_sin, rotary_seqlens, interleaved), stated.batch)
    for name, x in (("k", k), ("v", v)):
        if x.dtype != k_cache.dtype:
            raise DTypeError(f"{name} has dtype {x.dtype}, but k_cache has {k_cache.dtype}; they must be equal")
    return _calls._both(q, k_cache, v_cache, 2, (top_left, before, after, scale, softcap), want_lse, stated, append)


def _appended(
    k: Tensor, v: Tensor, starts: Tensor | None, rotary: tuple[Any, Any, Any, bool], batch: int
) -> _features.Append:
    """The append of an operator's call."""
    cos, sin, positions, interleaved = rotary
    starts = None if starts is None else _cuda.as_lengths("cu_seqlens_k_new", starts, batch + 1)
    for name, x in (("k", k), ("v", v)):
        if x.ndim != 4:
            raise ArgumentError(f"{name} has {dimensions(x.ndim)}; it takes 4")
    if (cos is None) != (sin is None):
        raise ArgumentError("rotary_cos and rotary_sin must both be given")
    if cos is None or sin is None:
        return _features.Append(_calls._plain(k), _calls._plain(v), starts, None)
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.ndim != 2 or x.shape != cos.shape:
            raise invalid(f"the shape of {name}", tuple(x.shape), "(positions, rotary_dim / 2), of both tables")
        if x.dtype not in _cuda.DTYPES or x.dtype != cos.dtype:
            raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, ", ".join(map(str, _cuda.DTYPES))))
    if positions is not None:
        positions = _cuda.as_lengths("rotary_seqlens", positions, batch)
    rotary_of = _features.Rotary(_calls._plain(cos), _calls._plain(sin), interleaved, positions)
    return _features.Append(_calls._plain(k), _calls._plain(v), starts, rotary_of)


@_operator_with_cache.register_fake
def _fake_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_k_new: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    rotary_seqlens: Tensor | None,
    interleaved: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = _calls._fake_with(q, k_cache, v_cache, 2, *rest)
    return out


def merge_states(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The result over the keys of all parts."""
    _calls._refuse_grad((*outs, *lses))
    out, lse = torch.ops.flashcore_attn.merge_states(outs, lses)
    return out, lse


@library.custom_op(
    "flashcore_attn::merge_states", mutates_args=(), schema="(Tensor[] outs, Tensor[] lses) -> (Tensor, Tensor)"
)
def _merge_operator(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    _check_parts(outs, lses)
    if outs[0].device.type != "cpu":
        words = invalid_words("the device of outs", outs[0].device, "cpu")
        raise UnsupportedError(words, f"device {outs[0].device.type}")
    outs = [_cuda.resolved("outs", _calls._plain(x)).contiguous() for x in outs]
    rows = [_cuda.resolved("lses", _calls._plain(x)).transpose(-1, -2).contiguous() for x in lses]
    out, lse = torch.empty_like(outs[0]), torch.empty_like(rows[0])
    held: list[Any] = []
    _flashcore.merge_states(
        [(_memory.address("outs", x, held), _memory.address("lses", y, held)) for x, y in zip(outs, rows)],
        (_memory.address("out", out, held), _memory.address("lse", lse, held)),
        (lse.numel(), out.shape[-1]),
        _cuda.DTYPES[out.dtype],
    )
    return out, lse.transpose(-1, -2).contiguous()


@_merge_operator.register_fake
def _fake_merge(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    _check_parts(outs, lses)
    return outs[0].new_empty(outs[0].shape), lses[0].new_empty(lses[0].shape)


def _check_parts(outs: list[Tensor], lses: list[Tensor]) -> None:
    """Rejects element types, shapes and devices of parts that differ."""
    if not outs or len(outs) != len(lses):
        raise ArgumentError(f"there are {len(outs)} outs and {len(lses)} lses; expected as many, and at least one")
    for i, (out, lse) in enumerate(zip(outs, lses)):
        if out.dtype not in _cuda.DTYPES or out.dtype != outs[0].dtype:
            expected = f"{', '.join(map(str, _cuda.DTYPES))}, equal to that of outs[0]"
            raise DTypeError(invalid_words(f"the dtype of outs[{i}]", out.dtype, expected))
        if lse.dtype != torch.float32:
            raise DTypeError(invalid_words(f"the dtype of lses[{i}]", lse.dtype, "torch.float32"))
        if out.shape != outs[0].shape or out.ndim < 3 or lse.shape != lses[0].shape:
            raise invalid(f"the shape of outs[{i}]", tuple(out.shape), f"{tuple(outs[0].shape)}, that of outs[0]")
        if lse.shape != (*out.shape[:-3], out.shape[-2], out.shape[-3]):
            raise invalid(f"the shape of lses[{i}]", tuple(lse.shape), "(..., heads, rows)")
        for name, x in ((f"outs[{i}]", out), (f"lses[{i}]", lse)):
            if x.device != outs[0].device:
                raise ArgumentError(f"{name} is on {x.device}, outs[0] on {outs[0].device}; expected one device")


def check(k: Tensor, v: Tensor) -> None:
    """Rejects caches that can only be read through a copy."""
    for name, x in (("k_cache", k), ("v_cache", v)):
        if x.is_neg() or (x.shape[-1] > 1 and x.stride(-1) != 1):
            raise ArgumentError(f"{name}'s last dimension is not contiguous in memory; a call writes it in place")
