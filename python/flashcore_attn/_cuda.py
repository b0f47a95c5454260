"""Attention of PyTorch tensors on a GPU, and the checks and allocations that CPU tensors share.

Time spent here is part of every call. Rust checks each problem once, and this module does not repeat those checks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import _features, _flashcore, _memory
from ._errors import ArgumentError, DeviceMemoryError, DTypeError, UnsupportedError, invalid_words
from ._overrides import PLAIN, meaning_of_its_own

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._features import Append, Features
    from ._flashcore import DescribedAppend, DescribedFeatures, Terms
    from ._quantize import Options

DTYPES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}
FP8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
# The types of q and k, and of v, where q has an 8-bit type.
_BESIDE_FP8 = ((*FP8,), (*FP8, torch.float16, torch.bfloat16))
SIZES = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 4, torch.float8_e4m3fn: 1, torch.float8_e5m2: 1}
# Four bits for each of q, k, v and out; all four have this type.
_CODES = {torch.float16: 0x0000, torch.bfloat16: 0x1111, torch.float32: 0x2222}
_TF32 = 0x1_0000  # added to the code of float32 for products in tf32
_DIGITS = {
    torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float8_e4m3fn: 3, torch.float8_e5m2: 4,
}  # fmt: skip
_TABLE_CODES = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3, torch.uint8: 4, torch.bool: 4,
}  # fmt: skip

_attend = _flashcore.attend
_enqueue_quantization = _flashcore.quantize_gpu
# Private functions of PyTorch. `torch.cuda.current_device()` and `current_stream()` call them and also make
# objects.
_current_device = getattr(torch._C, "_cuda_getDevice", None) or torch.cuda.current_device
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)
_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
_functorch = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)


def allows_tf32() -> bool:
    """Whether the user lets PyTorch round the operands of float32 matrix products to tf32."""
    matmul = torch.backends.cuda.matmul
    # PyTorch 2.9 and later reject reads of `allow_tf32` after `fp32_precision` was set.
    precision = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if precision is None else precision == "tf32"


def _code(dtype: torch.dtype) -> int | None:
    """The code of four tensors of one type, `None` for types without one."""
    return 0x2222 | _TF32 if dtype is torch.float32 and allows_tf32() else _CODES.get(dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, heads: int, terms: Terms, want_lse: bool, features: Features | None = None,
    append: Append | None = None, into: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Enqueues attention on the current stream of q's device, after an append to the cache. ``into`` is
    memory for the result and the log-sum-exp."""
    device, dtype = q.get_device(), q.dtype
    code = _code(dtype)
    agree = dtype is k.dtype and dtype is v.dtype and device == k.get_device() == v.get_device()
    if code is None or not agree or q.is_neg() or k.is_neg() or v.is_neg():
        code, _ = codes(q, k, v)
        q, k, v = resolved("q", q), resolved("k", k), resolved("v", v)
    if device != _current_device():  # PyTorch allocates, and captures, on the current device
        with torch.cuda.device(device):
            return attend(q, k, v, heads, terms, want_lse, features, append, into)
    try:
        return _launch(q, k, v, heads, terms, want_lse, features, append, device, code, into)
    except DeviceMemoryError:
        if torch.cuda.is_current_stream_capturing():  # a capture may not free memory
            raise
        torch.cuda.empty_cache()  # PyTorch's allocator may hold unused memory that the first call of a kernel needs
        return _launch(q, k, v, heads, terms, want_lse, features, append, device, code, into)
    except RuntimeError:
        output_type(q, k, v)  # the error names a layout without strides or addresses
        raise


def _launch(
    q: Tensor, k: Tensor, v: Tensor, heads: int, terms: Terms, want_lse: bool, features: Features | None,
    append: Append | None, device: int, code: int, into: tuple[Tensor, Tensor | None] | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    q, k, v = plain_rows("q", q), plain_rows("k", k), plain_rows("v", v)
    shape, v_shape = q.shape, v.shape
    held: list[Any] = []
    inputs = (
        (_memory.address("q", q, held), shape, q.stride()),
        (_memory.address("k", k, held), k.shape, k.stride()),
        (_memory.address("v", v, held), v_shape, v.stride()),
    )
    out, lse = into or (output_like(q, v_shape[3], codes(q, k, v)[1] if q.dtype in FP8 else None), None)
    if want_lse and lse is None:
        lse = lse_like(q, heads)
    clear(out, lse, heads, features)
    _attend(
        *inputs,
        (_memory.address("out", out, held), out.stride()),
        None if lse is None else _memory.address("lse", lse, held),
        heads,
        code,
        terms,
        (device, _current_stream(device)),
        None if features is None else describe(features, q, held),
        None if append is None else describe_append(append, q, held),
    )
    return out, lse


def quantize(
    tensors: tuple[Tensor, Tensor, Tensor], heads: int, options: Options, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Enqueues the quantisation of q, k and v on the current stream of their device."""
    device = tensors[0].get_device()
    if device != _current_device():  # PyTorch allocates, and captures, on the current device
        with torch.cuda.device(device):
            return quantize(tensors, heads, options, dtype)
    return [_quantized(name, resolved(name, x), heads, options, dtype, device) for name, x in zip("qkv", tensors)]


def _quantized(
    name: str, x: Tensor, heads: int, options: Options, dtype: torch.dtype, device: int
) -> tuple[Tensor, Tensor]:
    x = aligned_rows(name, x)
    codes, factors = quantized_like(x, heads, options, dtype)
    held: list[Any] = []
    if x.numel():
        shape, strides = x.shape, x.stride()
        _enqueue_quantization(
            name,
            (
                _memory.address(name, x, held),
                (shape[0], shape[2], shape[1], shape[3]),
                (strides[0], strides[2], strides[1], strides[3]),
            ),
            heads,
            DTYPES[x.dtype],
            (FP8[dtype], options.rows, options.seed, options.smooth_keys),
            (_memory.address("codes", codes, held), _memory.address("factors", factors, held)),
            device,
            _current_stream(device),
        )
    return codes.transpose(1, 2), factors


def aligned_rows(name: str, x: Tensor) -> Tensor:
    """The tensor itself, or a copy if its rows are not contiguous or do not begin at multiples of 16 bytes."""
    _memory.check(name, x)
    size = SIZES[x.dtype]
    steps = (stride * size for extent, stride in zip(x.shape[:3], x.stride()) if extent > 1)
    contiguous = x.shape[3] <= 1 or x.stride(3) == 1
    if contiguous and x.data_ptr() % 16 == 0 and all(step % 16 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def quantized_like(x: Tensor, heads: int, options: Options, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for the codes ``(batch, heads, sequence, dim)`` of a tensor and for its factors, 1 for no elements."""
    batch, rows, own, dim = x.shape
    codes = x.new_empty((batch, own, rows, dim), dtype=dtype)
    make = x.new_empty if x.numel() else x.new_ones
    return codes, make(options.factors(batch, heads, rows), dtype=torch.float32)


def check_inputs(tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    """Rejects layouts, element types and devices with which q, k and v cannot be quantised."""
    for name, x in zip("qkv", tensors):
        _check_placed(name, x, tensors[0])
        if x.dtype not in DTYPES:
            raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, ", ".join(map(str, DTYPES))))


def explain(q: Tensor, k: Tensor, v: Tensor, heads: int, terms: Terms) -> dict[str, Any]:
    """Which kernel :func:`attend` runs."""
    code, dtype = codes(q, k, v)
    q, k, v = plain_rows("q", q), plain_rows("k", k), plain_rows("v", v)
    held: list[Any] = []
    told = _flashcore.explain(
        (_memory.address("q", q, held), q.shape, q.stride()),
        (_memory.address("k", k, held), k.shape, k.stride()),
        (_memory.address("v", v, held), v.shape, v.stride()),
        output_like(q, v.shape[3], dtype).stride(),
        heads,
        code,
        terms,
        q.get_device(),
    )
    return {**told, "plan": json.loads(told["plan"])}


def plain_rows(name: str, x: Tensor) -> Tensor:
    """The tensor itself, or a copy if its last dimension is not contiguous."""
    if x.shape[-1] <= 1 or x.stride(-1) == 1:
        return x
    _memory.check(name, x)
    return x.contiguous()


def resolved(name: str, x: Tensor) -> Tensor:
    """The tensor itself, or a copy if it stands for the negative of its memory."""
    if x.is_neg():
        _memory.check(name, x)
        if x.dtype in FP8:  # which PyTorch cannot negate
            raise UnsupportedError(f"{name} is the negative view of an 8-bit tensor; pass the tensor itself", "neg")
    return x.resolve_neg()


def output_like(q: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for the output: dense, in q's order of dimensions, of q's type or another one."""
    if q.shape[3] == dim:
        out = torch.empty_like(q, dtype=dtype)
        if dim <= 1 or out.stride(3) == 1:
            return out
        # The order of an expanded q may put another dimension innermost, although q's rows are contiguous.
    if q.stride(1) >= q.stride(2):
        return q.new_empty((*q.shape[:3], dim), dtype=dtype)
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], dim), dtype=dtype).transpose(1, 2)


def codes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, torch.dtype]:
    """The code of checked element types, and the output's type."""
    out = output_type(q, k, v)
    if (code := _code(out)) is not None and q.dtype is k.dtype and q.dtype not in FP8:
        return code, out
    return sum(_DIGITS[dtype] << 4 * i for i, dtype in enumerate((q.dtype, k.dtype, v.dtype, out))), out


def output_type(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """The output's type: q's, with 8-bit q and k that of v, or bfloat16. Rejects types that do not fit."""
    narrow = q.dtype in (torch.float16, torch.bfloat16) and k.dtype in FP8  # an 8-bit cache
    if q.dtype not in FP8 and not narrow:
        check(q, k, v)
        return q.dtype
    values = _BESIDE_FP8[0] if narrow else _BESIDE_FP8[1]
    for name, x, accepted in (("q", q, (q.dtype,)), ("k", k, _BESIDE_FP8[0]), ("v", v, values)):
        _check_placed(name, x, q)
        if x.dtype not in accepted:
            expected = ", ".join(map(str, accepted))
            raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, f"{expected} beside q of {q.dtype}"))
    if narrow:
        return q.dtype
    return torch.bfloat16 if v.dtype in FP8 else v.dtype


def lse_like(q: Tensor, heads: int) -> Tensor:
    """Memory for the log-sum-exp, ``[batch, heads, sequence]``, float32."""
    return q.new_empty((q.shape[0], q.shape[heads], q.shape[3 - heads]), dtype=torch.float32)


def clear(out: Tensor, lse: Tensor | None, heads: int, features: Features | None) -> None:
    """Sets the rows that belong to no sequence, which a kernel does not write."""
    if features is None:
        return
    starts, _, used, _, _ = features.lengths
    if used is not None or (starts is not None and not _covers(starts, out.shape[3 - heads])):
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)


def _covers(starts: Tensor, rows: int) -> bool:
    """Whether each row belongs to a packed sequence. Assumed on a GPU, where reading lengths would synchronise."""
    return starts.device.type != "cpu" or (int(starts[0]) == 0 and int(starts[-1]) == rows)


def as_table(name: str, x: Tensor, floating: bool = False, like: Tensor | None = None) -> Tensor:
    """A tensor that a program reads, in a supported type. A mask ``like`` q has bool, q's type or float32."""
    _check_operand(name, x)
    _memory.check(name, x)  # views of it are taken next
    dtype = x.dtype
    if like is not None:
        if dtype not in (torch.bool, torch.float32, like.dtype):
            kind = x.device.type
            autocast = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
            if autocast and dtype in DTYPES and like.dtype in DTYPES:  # converted as q was
                return x.to(like.dtype).resolve_neg()
            if dtype in (torch.int64, torch.int32):  # a tokenizer's
                if x.numel() and _has_values(x):
                    _check_range(name, x, _features.check_truth)
                return x.to(torch.bool)
            expected = " or ".join(dict.fromkeys(map(str, (torch.bool, torch.float32, like.dtype))))
            raise DTypeError(invalid_words(f"the dtype of {name}", dtype, expected))
    elif floating and not x.is_floating_point():
        raise DTypeError(invalid_words(f"the dtype of {name}", dtype, "a floating-point type"))
    if dtype not in _TABLE_CODES:
        if dtype == torch.float64:
            return x.to(torch.float32)
        if dtype in (torch.int64, torch.int16, torch.int8):
            if dtype is torch.int64 and x.numel() and _has_values(x):
                _check_range(name, x)
            return x.to(torch.int32)
        expected = "float32, float16, bfloat16, float64, bool, uint8, or a signed integer"
        raise DTypeError(invalid_words(f"the dtype of {name}", dtype, expected))
    return _resolved(name, x)


def _resolved(name: str, x: Tensor) -> Tensor:
    """A tensor without a pending negation, which PyTorch computes from the tensor's memory."""
    if not torch.compiler.is_compiling():
        if not x.is_neg():
            return x
        _memory.check(name, x)
    return x.resolve_neg()


def check_table(name: str, x: Tensor) -> None:
    """Rejects a tensor that a program cannot read as it is."""
    check_given(name, x)
    if x.dtype not in _TABLE_CODES:
        raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, ", ".join(map(str, _TABLE_CODES))))


def _has_values(x: Tensor) -> bool:
    """Whether Python can read the elements now: not under a transform, of a fake tensor, or in a capture."""
    if torch.compiler.is_compiling() or _functorch() is not None or _modes() or x.device.type not in ("cpu", "cuda"):
        return False
    return type(x) in PLAIN and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _check_range(name: str, x: Tensor, check: Callable[[str, int], None] = _features.check_integer) -> None:
    """Rejects elements that do not fit. On a GPU this synchronises, once for each version of a tensor."""
    version = None if x.is_inference() or not x.is_cuda else (x._version, check)
    if version is not None and getattr(x, "_flashcore_in_range", None) == version:
        return
    for value in torch.stack(torch.aminmax(x)).tolist():
        check(name, value)
    if version is not None:
        x._flashcore_in_range = version


def as_sink(name: str, x: Tensor) -> Tensor:
    """Sinks in float32, contiguous."""
    return as_table(name, x, floating=True).to(torch.float32).contiguous()


def as_scale(name: str, x: Tensor) -> Tensor:
    """Descale factors in float32, with any strides."""
    _check_operand(name, x)
    if x.dtype != torch.float32:
        raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, "torch.float32"))
    return _resolved(name, x)


def as_lengths(name: str, x: Tensor, elements: int) -> Tensor:
    """An array of lengths: int32 and contiguous. One of int64 is converted; nothing is synchronised for that."""
    _check_operand(name, x)
    _memory.check(name, x)  # views of it are taken, and on a CPU it is read, next
    if x.dtype == torch.int64:
        if x.device.type == "cpu" and x.numel() and _has_values(x):
            _check_range(name, x)
        x = x.clamp(-(2**31), 2**31 - 1).to(torch.int32)  # a kernel cuts lengths to their tensor
    elif x.dtype != torch.int32:
        raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, "torch.int32 or torch.int64"))
    _features.check_length_array(name, x, elements)
    return x.contiguous()


def least_on_host(lengths: Tensor) -> int | None:
    """The smallest length, if it is known without a wait for a GPU."""
    known = lengths.device.type == "cpu" and lengths.numel() > 0 and _has_values(lengths)
    return int(lengths.min()) if known else None


def as_pages(x: Tensor, batch: int) -> Tensor:
    """A page table: int32 and contiguous."""
    _check_operand("page_table", x)
    _memory.check("page_table", x)
    if x.dtype != torch.int32:
        raise DTypeError(invalid_words("the dtype of page_table", x.dtype, "torch.int32"))
    _features.check_page_table(x, batch)
    return x.contiguous()


def describe(features: Features, q: Tensor, held: list[Any]) -> DescribedFeatures:
    """Addresses, types, shapes and strides of features, for Rust. ``held`` keeps their memory."""
    lengths, batch, max_q, max_k, _, score, mask, floats, ints, tables, scales, blocks, pages, *_ = features
    check_devices(features, q)

    def at(name: str, x: Tensor | None) -> int | None:
        return None if x is None else _memory.address(name, x, held)

    return (
        (batch, max_q, max_k, [at(name, x) for name, x in zip(_features.LENGTHS, lengths)])
        if features.uneven
        else None,
        [(operand, _memory.address(name, x, held)) for operand, name, x in features.of_heads()],
        score,
        mask,
        floats,
        ints,
        [
            (_memory.address(name, x, held), _TABLE_CODES[x.dtype], x.shape, x.stride())
            for name, x in zip(features.table_names, tables)
        ],
        [
            None if x is None else (_memory.address(name, x, held), (*x.stride(), 0)[:3], rows)
            for name, x, rows in zip(_features.SCALES, scales, blocks)
        ],
        None if pages is None else (_memory.address("page_table", pages, held), *pages.shape),
        None
        if features.before is None
        else tuple(_memory.address(name, x, held) for name, x in zip(("out_before", "lse_before"), features.before)),
        None
        if features.rng_state is None
        else (features.dropout_p, _memory.address("rng_state", features.rng_state, held)),
        features.invariant,
    )


def describe_append(append: Append, q: Tensor, held: list[Any]) -> DescribedAppend:
    """Addresses, types, shapes and strides of what is appended, for Rust. ``held`` keeps the memory."""
    for name, x in append.named():
        if x.device != q.device:
            raise ArgumentError(f"{name} is on {x.device}, q on {q.device}; they must be on one device")

    def at(name: str, x: Tensor | None) -> int | None:
        return None if x is None else _memory.address(name, x, held)

    def rows(name: str, x: Tensor) -> Any:
        x = plain_rows(name, resolved(name, x))
        held.append(x)  # it may be a copy
        return _memory.address(name, x, held), x.shape, x.stride()

    k, v = rows("k", append.k), rows("v", append.v)
    rotary: Any = None
    if append.rotary is not None:
        cos, sin, interleaved, positions = append.rotary
        tables = []
        for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
            x = plain_rows(name, resolved(name, x))
            held.append(x)
            tables.append((_memory.address(name, x, held), x.stride(0)))
        rotary = (tables, _TABLE_CODES[cos.dtype], cos.shape, interleaved, at("rotary_seqlens", positions))
    return k, v, at("cu_seqlens_k_new", append.starts), rotary


def check_devices(features: Features, q: Tensor) -> None:
    """Rejects tensors of features that are not on q's device."""
    for name, x in features.named():
        if x.device != q.device:
            raise ArgumentError(f"{name} is on {x.device}, q on {q.device}; they must be on one device")


def check_given(name: str, x: Tensor) -> None:
    """Rejects a tensor of another layout than that of plain tensors, or whose memory was released."""
    _check_layout(name, x)
    _memory.check(name, x)


def _check_operand(name: str, x: Any) -> None:
    """Rejects what is no tensor in memory, and classes whose memory may mean something else."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} is a {type(x).__name__}; expected a PyTorch tensor")
    _check_layout(name, x)
    if type(x) not in PLAIN and meaning_of_its_own(x):
        kind = type(x).__name__
        raise UnsupportedError(invalid_words(f"the type of {name}", kind, "torch.Tensor"), f"type {kind}")


def _check_layout(name: str, x: Tensor) -> None:
    if x.layout is not torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else str(x.layout)
        words = invalid_words(f"the layout of {name}", layout, "torch.strided")
        raise UnsupportedError(words, f"layout {layout}")


def _check_placed(name: str, x: Tensor, q: Tensor) -> None:
    _check_layout(name, x)
    if x.device != q.device:
        raise ArgumentError(f"{name} is on {x.device}, q on {q.device}; they must be on one device")


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Rejects layouts, element types and devices that do not fit."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_layout(name, x)
        if x.dtype not in DTYPES and (x is q or x.dtype not in FP8):
            raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, ", ".join(map(str, (*DTYPES, *FP8)))))
        _check_placed(name, x, q)
        if x.dtype != q.dtype:
            raise DTypeError(f"{name} has dtype {x.dtype}, but q has {q.dtype}; they must be equal")
