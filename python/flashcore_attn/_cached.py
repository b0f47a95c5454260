"""The operators ``flashcore_attn::attention_with_cache``, which appends to a cache, ``reshape_and_cache`` and
``merge_states``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library

from . import _cuda, _features, _flashcore, _memory, _slots
from . import _torch as _calls
from ._errors import ArgumentError, DTypeError, UnsupportedError, dimensions, invalid, invalid_words

if TYPE_CHECKING:
    from ._features import Append, Features
    from ._flashcore import Terms


#: Results that one kernel merges, at most.
_MERGED_AT_ONCE = 16


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
    stated = [*_calls._flat(features)[:19], features.invariant]  # without what belongs to training
    call: Any = torch.ops.flashcore_attn.attention_with_cache
    if not torch.compiler.is_compiling() and all(_calls._is_plain(x, x, x) for _, x in named):
        call = _compute_with_cache  # without the dispatcher
        for x in (k, v):
            if not x.is_inference():
                torch.autograd.graph.increment_version(x)
    out, lse = call(q, k, v, *new, *terms, want_lse, *stated)
    return out, lse if want_lse else None


def _compute_with_cache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cu_seqlens_k_new: Tensor | None,
    rotary_cos: Tensor | None, rotary_sin: Tensor | None, rotary_seqlens: Tensor | None, interleaved: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    terms, want_lse, features = rest[:5], rest[5], rest[6:]
    stated = _calls._given_features(q, k_cache, v_cache, 2, features[:19])
    stated = stated._replace(invariant=features[19] if len(features) > 19 else "")
    append = _appended(k, v, cu_seqlens_k_new, (rotary_cos, rotary_sin, rotary_seqlens, interleaved), stated.batch)
    for name, x in (("k", k), ("v", v)):
        dtype = q.dtype if k_cache.dtype in _cuda.FP8 else k_cache.dtype
        if x.dtype != dtype:
            raise DTypeError(f"{name} has dtype {x.dtype}, but k_cache has {k_cache.dtype}; expected {dtype}")
    return _calls._both(q, k_cache, v_cache, 2, terms, want_lse, stated, append)


@library.custom_op(
    "flashcore_attn::attention_with_cache",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? cu_seqlens_k_new, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, bool interleaved, bool top_left, SymInt before, "
    "SymInt after, float? scale, float softcap, bool want_lse, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_q, Tensor? seqused_k, Tensor? leftpad_k, SymInt batch, SymInt max_q, SymInt max_k, Tensor? sink, "
    "str score, str mask, float[] floats, SymInt[] ints, Tensor[] tables, Tensor? descale_q, Tensor? descale_k, "
    "Tensor? descale_v, int[] blocks, Tensor? page_table=None, str invariant='') -> (Tensor, Tensor)",
)
def _operator_with_cache(*call: Any) -> tuple[Tensor, Tensor]:
    return _compute_with_cache(*call)


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
def _fake_with_cache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    append = 7  # the arguments of the append, which decide no shape
    out: tuple[Tensor, Tensor] = _calls._fake_with(q, k_cache, v_cache, 2, *call[append:])
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
    first, device = outs[0], outs[0].device
    on_gpu = device.type == "cuda" and len(outs) <= _MERGED_AT_ONCE and first.shape[-1] * first.element_size() % 4 == 0
    if device.type != "cpu" and not on_gpu:
        return _merged(outs, lses)
    if on_gpu and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _merge_operator(outs, lses)
    outs = [_cuda.resolved("outs", _calls._plain(x)).contiguous() for x in outs]
    lses = [_cuda.resolved("lses", _calls._plain(x)).contiguous() for x in lses]
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    held: list[Any] = []
    _flashcore.merge_states(
        [(_memory.address("outs", x, held), _memory.address("lses", y, held)) for x, y in zip(outs, lses)],
        (_memory.address("out", out, held), _memory.address("lse", lse, held)),
        (math.prod(out.shape[:-3]), *out.shape[-3:]),
        _cuda.DTYPES[out.dtype],
        (device.index, torch.cuda.current_stream(device).cuda_stream) if on_gpu else (None, torch.get_num_threads()),
    )
    return out, lse


def _merged(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The merge in float32 by PyTorch's operators: of more parts than a kernel takes, and on other devices."""
    top = torch.stack(lses).amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)  # a row that saw no key
    total, whole = torch.zeros_like(top), torch.zeros_like(outs[0], dtype=torch.float32)
    for out, lse in zip(outs, lses):
        weight = torch.exp(lse - top)
        total += weight
        of_rows = weight.transpose(-1, -2)[..., None]
        whole += torch.where(of_rows > 0, of_rows * out.float(), 0.0)
    whole /= torch.where(total > 0, total, 1.0).transpose(-1, -2)[..., None]
    return whole.to(outs[0].dtype), top + torch.log(total)


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


def check(k: Tensor, v: Tensor, names: tuple[str, str] = ("k_cache", "v_cache")) -> None:
    """Rejects caches that can only be read through a copy."""
    for name, x in zip(names, (k, v)):
        if x.is_neg() or (x.shape[-1] > 1 and x.stride(-1) != 1):
            raise ArgumentError(f"{name}'s last dimension is not contiguous in memory; a call writes it in place")


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, kind: str, *scales: Any
) -> None:
    """Writes keys and values to slots of a cache."""
    _calls._refuse_grad((key, value, key_cache, value_cache))
    torch.ops.flashcore_attn.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, kind, *scales)


def check_array(name: str, x: Any) -> None:
    """Rejects what is no tensor in memory."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} is a {type(x).__name__}; expected a PyTorch tensor")
    _cuda.check_given(name, x)


@library.custom_op(
    "flashcore_attn::reshape_and_cache",
    mutates_args=("key_cache", "value_cache"),
    schema="(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, "
    "str kv_cache_dtype, Tensor? k_scale, Tensor? v_scale) -> ()",
)
def _slots_operator(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    named = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache}
    to, scales = _check_slots(named, slot_mapping, kv_cache_dtype, (k_scale, v_scale))
    device, held = key.device, [slot_mapping.contiguous()]
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _slots_operator(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
    new = [_cuda.plain_rows(name, _cuda.resolved(name, named[name])) for name in ("key", "value")]
    held += [*new, *scales]

    def rows(name: str, x: Tensor) -> Any:
        page = (1,) * (4 - x.ndim)
        return _memory.address(name, x, held), (*page, *x.shape), (*page, *x.stride())

    _flashcore.write_slots(
        [rows(name, x) for name, x in zip(named, new)],
        [rows(name, named[name]) for name in ("key_cache", "value_cache")],
        (_cuda.DTYPES[key.dtype], to),
        (_memory.address("slot_mapping", held[0], held), held[0].numel(), held[0].dtype == torch.int64),
        [(_memory.address("a scale", x, held), x.numel(), x.stride(0)) for x in scales] or None,
        (device.index, torch.cuda.current_stream(device).cuda_stream)
        if device.type == "cuda"
        else (None, torch.get_num_threads()),
    )


@_slots_operator.register_fake
def _fake_slots(*_: Any) -> None:
    return None


def _check_slots(
    named: dict[str, Tensor], slots: Tensor, kind: str, scales: tuple[Tensor | None, Tensor | None]
) -> tuple[str, list[Tensor]]:
    """The name of the caches' type, and the factors of an 8-bit cache. Shapes are checked in Rust."""
    key, key_cache = named["key"], named["key_cache"]
    if key.device.type not in ("cpu", "cuda"):
        words = invalid_words("the device of key", key.device, "cpu or cuda")
        raise UnsupportedError(words, f"device {key.device.type}")
    for name, x in (*named.items(), ("slot_mapping", slots)):
        if x.device != key.device:
            raise ArgumentError(f"{name} is on {x.device}, key on {key.device}; they must be on one device")
    if key.dtype not in _cuda.DTYPES:
        raise DTypeError(invalid_words("the dtype of key", key.dtype, ", ".join(map(str, _cuda.DTYPES))))
    for name, other in (("value", "key"), ("value_cache", "key_cache")):
        if named[name].dtype != named[other].dtype:
            raise DTypeError(invalid_words(f"the dtype of {name}", named[name].dtype, f"that of {other}"))
    if slots.dtype not in (torch.int64, torch.int32):
        raise DTypeError(invalid_words("the dtype of slot_mapping", slots.dtype, "torch.int64 or torch.int32"))
    dtype = getattr(torch, _slots.check_types(str(key.dtype)[6:], str(key_cache.dtype)[6:], kind))
    check(key_cache, named["value_cache"], ("key_cache", "value_cache"))
    if dtype not in _cuda.FP8:
        return _cuda.DTYPES[dtype], []
    one = torch.ones(1, dtype=torch.float32, device=key.device) if None in scales else None
    factors = [one if x is None else _cuda.as_scale(f"{name}_scale", x).reshape(-1) for name, x in zip("kv", scales)]
    for name, x in zip("kv", factors):
        if x is None or x.device != key.device:
            raise ArgumentError(f"{name}_scale is not on {key.device}, as key is")
    return _cuda.FP8[dtype], [x for x in factors if x is not None]
