"""Attention of PyTorch tensors: in place, on PyTorch's current stream, and as ``flashcore_attn::attention``.

Eager calls on plain tensors go straight to Rust, which costs a few microseconds less than PyTorch's dispatcher. Under
``torch.compile`` and ``torch.jit.trace``, with fake tensors, tensor subclasses, dispatch modes, functorch transforms
and while a profiler is on they go through the operator, which all of those understand.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library
from torch.utils import _pytree as pytree

from ._errors import ArgumentError, DTypeError, FlashCoreError, UnsupportedError, dimensions, invalid, invalid_words

if torch.__version__ < (2, 5):  # a TorchVersion, which compares with tuples
    message = f"PyTorch {torch.__version__} is too old; needed is 2.5 or later"
    raise UnsupportedError(message, "torch is too old")

from . import _cuda, _dropout, _features, _flashcore, _memory, _recording
from ._overrides import PLAIN, is_computed, is_watched

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._features import Append, Features
    from ._flashcore import Terms
    from ._quantize import Options

_is_compiling = torch.compiler.is_compiling
is_dynamo_compiling = _recording.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)
_modes = _cuda._modes
_tracing = getattr(torch._C, "_get_tracing_state", lambda: None)
_forward_ad = torch.autograd.forward_ad
_profiler = torch.autograd.profiler
_functorch = _cuda._functorch
flash_is_enabled = getattr(torch._C, "_get_flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled)


def attend(
    q: Tensor, k: Tensor, v: Tensor, heads: int, terms: Terms, want_lse: bool, features: Features | None = None
) -> tuple[Tensor, Tensor | None]:
    """Attention of 4-D tensors whose axis ``heads`` is 1 or 2, and the log-sum-exp ``[batch, heads, sequence]``."""
    others = () if features is None else [x for _, x in features.named()]
    if is_direct(q, k, v, *others):
        return _now(q, k, v, heads, terms, want_lse, features)
    if recorded := _autograd.needed((q, k, v, *others)):
        _autograd.check(q, k, v, features)
    if _forward_ad._current_level >= 0:
        raise UnsupportedError("forward-mode derivatives are not supported yet", "forward_ad")
    if _is_compiling():
        return _dispatched(q, k, v, heads, terms, (want_lse, recorded), features)
    if recorded and _is_plain(q, k, v) and all(type(x) in PLAIN for x in others):
        out, lse = _autograd.recorded(q, k, v, heads, terms, features)
        return out, lse if want_lse else None
    try:
        return _dispatched(q, k, v, heads, terms, (want_lse, recorded), features)
    except (TypeError, NotImplementedError, AssertionError, ValueError, RuntimeError) as error:
        of_classes = isinstance(error, (TypeError, NotImplementedError, AssertionError))
        if isinstance(error, FlashCoreError) or not (of_classes or _has_wrappers(q, k, v, *others)):
            raise
        raise _undispatched(q, k, v, features) from error


def _in_rust() -> Any:
    """Eager calls, which Rust makes from the arguments; None where PyTorch (before 2.10) does not describe tensors."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    functions = SimpleNamespace(
        plain=(Tensor, torch.nn.Parameter),
        disturbed=[_modes, _tracing, _functorch],
        flags=[
            (_profiler, "_is_profiler_enabled", False),
            (_forward_ad, "_current_level", -1),
            (torch.compiler, "_is_compiling_flag", False),
        ],
        function_modes=(getattr(torch._C, "_len_torch_function_stack", lambda: 1), is_watched),
        grad_enabled=_grad_enabled,
        autocast_enabled=_any_autocast,
        flash_enabled=flash_is_enabled,
        allows_tf32=_cuda.allows_tf32,
        threads=torch.get_num_threads,
        current_device=_cuda._current_device,
        empty_like=torch.empty_like,
        output_like=_cuda.output_like,
        # Separate extents are parsed in two thirds of the time that a sequence takes.
        floats=lambda q, shape: q.new_empty(*shape, dtype=torch.float32),
        record=_autograd.record,
        features=_autograd.without_tensors,
        deterministic=torch.are_deterministic_algorithms_enabled,
        draw_rng_state=draw_rng_state,
    )
    try:
        return _flashcore.Eager(capsule, functions)
    except (UnsupportedError, AttributeError, TypeError, ValueError):
        return None


def _refuse_grad(tensors: Iterable[Tensor]) -> None:
    if _grad_enabled() and any(x.requires_grad for x in tensors):
        raise UnsupportedError(
            "an input requires grad, and there is no backward pass of this function; use torch.no_grad(), or detach "
            "the inputs",
            "requires_grad",
        )


def hides_derivatives() -> bool:
    """Whether ``torch.vmap`` runs inside of a derivative: its tensors do not show whether they require grad."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in stack[:-1])


def is_differentiated() -> bool:
    """Whether the call is inside of a derivative that ``torch.func`` takes."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    return any(level.key() == torch._C._functorch.TransformType.Grad for level in stack)


def _has_wrappers(*tensors: Tensor) -> bool:
    """Whether a class among those of tensors runs operators in its own way, and may refuse a mixture of classes."""
    return any(not is_computed(type(x)) for x in tensors)


def _dispatched(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    terms: Terms,
    lse_for: tuple[bool, bool],
    features: Features | None,
) -> tuple[Tensor, Tensor | None]:
    """The operator. The log-sum-exp is computed for the caller, or for the backward pass."""
    want_lse = any(lse_for)
    if not _is_compiling():
        for name, x in (("q", q), ("k", k), ("v", v)):  # the dispatcher copies negative views
            _memory.check(name, x)
        if _modes():
            _register_flops()
    if features is None:
        out, lse = _autograd.called(torch.ops.flashcore_attn.attention, q, k, v, heads, *terms, want_lse)
    else:
        out, lse = _autograd.called(
            torch.ops.flashcore_attn.attention_with, q, k, v, heads, *terms, want_lse, *_flat(features)
        )
    return out, lse if lse_for[0] else None


def _flat(features: Features) -> list[Any]:
    """The arguments of an operator that state features."""
    lengths, batch, max_q, max_k, sink, score, mask, floats, ints, tables, scales, blocks, pages, deterministic, *_ = (
        features
    )
    stated = [score, mask, list(floats), list(ints), list(tables)]
    others = [list(blocks), pages, deterministic, features.dropout_p, features.rng_state, features.invariant]
    return [*lengths, batch, max_q, max_k, sink, *stated, *scales, *others]


def draw_rng_state(q: Tensor) -> Tensor:
    """A state of dropout's generator, drawn from the default generator of q's device."""
    return torch.randint(-(2**31), 2**31, (4,), dtype=torch.int32, device=q.device)


def dropout_mask(features: Features, q: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """1 where a weight is kept, and -1 where it is dropped, of q's type."""
    made: Tensor = _dropout.mask(features, shape, lambda end: torch.arange(end, device=q.device), torch.where)
    return made.to(q.dtype)


def equal_lengths(q: Tensor, batch: int, length: int) -> Tensor:
    """The lengths of sequences that have one length."""
    return torch.full((batch,), length, dtype=torch.int32, device=q.device)


def _undispatched(q: Tensor, k: Tensor, v: Tensor, features: Features | None) -> UnsupportedError:
    """The error for tensor classes with which PyTorch cannot call the operator."""
    named = (("q", q), ("k", k), ("v", v), *(() if features is None else features.named()))
    name, kind = next(((name, type(x).__name__) for name, x in named if type(x) not in PLAIN), ("q", "Tensor"))
    expected = "torch.Tensor, or a class that dispatches flashcore_attn::attention for all tensors"
    return UnsupportedError(invalid_words(f"the type of {name}", kind, expected), f"type {kind}")


def is_direct(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> bool:
    """Whether a call on these tensors goes straight to Rust, without the operator and without gradients."""
    if _is_compiling() or _forward_ad._current_level >= 0 or _autograd.needed((q, k, v, *others)):
        return False
    return _is_plain(q, k, v) and all(type(x) in PLAIN for x in others)


def _is_plain(q: Tensor, k: Tensor, v: Tensor, profiled: bool = False) -> bool:
    kinds = type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN
    quiet = _functorch() is None and _tracing() is None and (profiled or not _profiler._is_profiler_enabled)
    return kinds and quiet and not _modes() and not is_watched() and not q.is_meta


def _now(
    q: Tensor, k: Tensor, v: Tensor, heads: int, terms: Terms, want_lse: bool, features: Features | None = None,
    append: Append | None = None, into: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    if append is not None:
        _cached.check(k, v)
    if q.is_cuda:
        return _cuda.attend(q, k, v, heads, terms, want_lse, features, append, into)
    code, dtype = _cuda.codes(q, k, v)
    if q.device.type != "cpu":
        raise UnsupportedError(invalid_words("the device of q", q.device, "cuda or cpu"), f"device {q.device.type}")
    if q.is_neg() or k.is_neg() or v.is_neg():
        q, k, v = _cuda.resolved("q", q), _cuda.resolved("k", k), _cuda.resolved("v", v)
    q, k, v = _cuda.plain_rows("q", q), _cuda.plain_rows("k", k), _cuda.plain_rows("v", v)
    out, lse = into or (_cuda.output_like(q, v.shape[3], dtype), None)
    if want_lse and lse is None:
        lse = _cuda.lse_like(q, heads)
    _cuda.clear(out, lse, heads, features)
    held: list[Any] = []  # the interpreter is released during the call
    _flashcore.attend(
        (_memory.address("q", q, held), q.shape, q.stride()),
        (_memory.address("k", k, held), k.shape, k.stride()),
        (_memory.address("v", v, held), v.shape, v.stride()),
        (_memory.address("out", out, held), out.stride()),
        None if lse is None else _memory.address("lse", lse, held),
        heads,
        code,
        terms,
        (None, torch.get_num_threads()),
        None if features is None else _cuda.describe(features, q, held),
        None if append is None else _cuda.describe_append(append, q, held),
    )
    return out, lse


def attend_into(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, terms: Terms, want_lse: bool, features: Features | None,
    lse: Tensor | None = None,
) -> Tensor | None:  # fmt: skip
    """Attention of ``(batch, sequence, heads, dim)`` into memory for it, without gradients; the log-sum-exp,
    in memory for it if that is given."""
    if out.dtype == q.dtype and out.stride(-1) == 1 and out.shape == (*q.shape[:3], v.shape[3]):
        others = () if features is None else [x for _, x in features.named()]
        if out.device == q.device and _is_plain(q, k, v) and all(type(x) in PLAIN for x in (out, *others)):
            return _now(q, k, v, 2, terms, want_lse, features, None, (out, lse))[1]
    made, made_lse = attend(q, k, v, 2, terms, want_lse, features)
    out.copy_(made)
    return made_lse if lse is None or made_lse is None else lse.copy_(made_lse)


def quantize(tensors: tuple[Tensor, Tensor, Tensor], heads: int, options: Options) -> list[tuple[Tensor, Tensor]]:
    """Codes and factors of q, k and v."""
    if _grad_enabled() and any(x.requires_grad for x in tensors):
        message = "an input requires grad, and quantize has no backward; use torch.no_grad(), or detach the inputs"
        raise UnsupportedError(message, "requires_grad")
    if _forward_ad._current_level >= 0:
        raise UnsupportedError("forward-mode derivatives are not supported yet", "forward_ad")
    if _is_compiling() or not _is_plain(*tensors, profiled=True):
        raise UnsupportedError("quantize is supported only for plain tensors in eager mode", "quantize")
    _cuda.check_inputs(tensors)
    if _profiler._is_profiler_enabled:
        with _profiler.record_function("flashcore_attn::quantize"):
            return _quantize_now(tensors, heads, options, getattr(torch, options.dtype))
    return _quantize_now(tensors, heads, options, getattr(torch, options.dtype))


def _quantize_now(
    tensors: tuple[Tensor, Tensor, Tensor], heads: int, options: Options, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    device = tensors[0].device
    if device.type == "cuda":
        return _cuda.quantize(tensors, heads, options, dtype)
    if device.type != "cpu":
        raise UnsupportedError(invalid_words("the device of q", device, "cuda or cpu"), f"device {device.type}")
    return [_quantized(name, _cuda.resolved(name, x), heads, options, dtype) for name, x in zip("qkv", tensors)]


def _quantized(name: str, x: Tensor, heads: int, options: Options, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x = _cuda.plain_rows(name, x)
    codes, factors = _cuda.quantized_like(x, heads, options, dtype)
    if x.numel():
        held: list[Any] = []  # the interpreter is released during the call
        _flashcore.quantize_cpu(
            name,
            _describe(name, x, 2, held),
            heads,
            _cuda.DTYPES[x.dtype],
            (_cuda.FP8[dtype], options.rows, options.seed, options.smooth_keys),
            (_memory.address("codes", codes, held), _memory.address("factors", factors, held)),
            torch.get_num_threads(),
        )
    return codes.transpose(1, 2), factors


Tracing = _recording.Tracing
explain = _cuda.explain
as_table, as_sink, as_lengths = _cuda.as_table, _cuda.as_sink, _cuda.as_lengths
as_scale, as_pages, least_on_host = _cuda.as_scale, _cuda.as_pages, _cuda.least_on_host
check_given = _cuda.check_given


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides in elements."""
    return tensor.stride()


def is_floating(tensor: Tensor) -> bool:
    """Whether the elements are floating point."""
    return tensor.is_floating_point()


def is_traced() -> bool:
    """Whether ``torch.jit.trace`` records the call, which it repeats with tensors of other shapes."""
    return not _is_compiling() and _tracing() is not None


def expand(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view of ``shape``. Repeated dimensions have stride 0."""
    return tensor.expand(shape)


def reshape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A view if possible, else a copy."""
    return tensor.reshape(shape)


def check_kinds(q: Any, k: Any, v: Any, names: tuple[str, ...] = ("q", "k", "v")) -> None:
    """Rejects a mixture of PyTorch tensors and others, and nested tensors."""
    if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
        name, other = ("v", v) if isinstance(k, Tensor) else ("k", k)
        raise ArgumentError(f"{name} is a {type(other).__name__}, q a PyTorch tensor; they must be of one kind")
    if q.is_nested or k.is_nested or v.is_nested:  # whose shape cannot be asked for
        for name, x in zip(names, (q, k, v)):
            _cuda.check_given(name, x)


def admit(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors, converted to the type of ``torch.autocast`` as PyTorch's own function does."""
    check_kinds(q, k, v, ("query", "key", "value"))
    if not (_is_compiling() or _any_autocast()):  # only the public functions can be traced
        return q, k, v
    return _converted("q", q), _converted("k", k), _converted("v", v)


def _converted(name: str, x: Tensor) -> Tensor:
    # A conversion that changes nothing would bind an exported program to the type.
    if (dtype := _computed(x)) == x.dtype:
        return x
    _cuda.check_given(name, x)
    return x.to(dtype)


def _computed(x: Tensor) -> torch.dtype:
    """The type in which attention of a tensor is computed: its own, or that of ``torch.autocast``."""
    kind = x.device.type
    if x.dtype in _cuda.DTYPES and kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def lacks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> str | None:
    """One word for the reason why plain tensors cannot be computed on their device, or None. Compiles nothing."""
    if q.is_nested or q.layout is not torch.strided:
        return "layout"
    kind, dtype = q.device.type, _computed(q)
    if kind not in ("cuda", "cpu"):
        return f"device {kind}"
    if dtype not in _cuda.DTYPES:
        return f"dtype {dtype}"
    if dtype != _computed(k) or dtype != _computed(v):
        return "dtypes that differ"
    if q.device != k.device or q.device != v.device:
        return "devices that differ"
    # PyTorch gives the result of such tensors the shape of q, without broadcasting.
    if not q.shape[:-2] == k.shape[:-2] == v.shape[:-2] and 0 in (*q.shape, *k.shape, *v.shape):
        return "no elements"
    if kind == "cpu":
        return None
    # The conditions of the kernels that run on every GPU: `check_problem` in
    # crates/kernels/src/forward/mma/plan.rs.
    for dim, most in ((q.shape[-1:], 576), (v.shape[-1:], 512)):
        if not dim or not 1 <= dim[0] <= most:
            return "head_dim"
    if (reason := _gpu_lacks(q.get_device())) is not None:
        return reason
    if _autograd.needed((q, k, v) if mask is None else (q, k, v, mask)):
        return _autograd.lacks(q, v, dtype, mask)
    return None


def takes_mask(mask: Tensor, q: Tensor) -> bool:
    """Whether a mask has a device and a type that a call with such a q takes."""
    own = _computed(q)
    return mask.device == q.device and (
        mask.dtype in (torch.bool, torch.float32, own)
        or (torch.is_autocast_enabled(q.device.type) and mask.dtype in _cuda.DTYPES)
    )


def broadcast_leads(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """The leading dimensions of the scores of tensors that broadcast."""
    if enable_gqa:
        return (*torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]), q.shape[-3])
    return tuple(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2]))


def _gpu_lacks(ordinal: int) -> str | None:
    try:
        _flashcore.check_gpu(ordinal)
    except FlashCoreError as error:
        return type(error).__name__
    return None


def check_number(name: str, x: Tensor) -> None:
    """Rejects a tensor that stands for a number if its gradient would be lost, or if its memory was released."""
    if x.requires_grad and _grad_enabled():
        message = f"{name} requires grad, and numbers have no gradients; use torch.no_grad(), or detach it"
        raise UnsupportedError(message, "requires_grad")
    _memory.check(name, x)


def flash_is_left_out() -> bool:
    """Whether ``sdpa_kernel`` or ``torch.backends.cuda`` excludes flash attention."""
    return not flash_is_enabled()


# Marks them as `torch.compiler.assume_constant_result` does, without importing the compiler: they are called
# while a graph is traced.
hides_derivatives._dynamo_marked_constant = True  # type: ignore[attr-defined]
is_differentiated._dynamo_marked_constant = True  # type: ignore[attr-defined]
_gpu_lacks._dynamo_marked_constant = True  # type: ignore[attr-defined]
flash_is_left_out._dynamo_marked_constant = True  # type: ignore[attr-defined]


def script_as(function: Any, operator: str) -> None:
    """Lets ``torch.jit.script`` compile calls of a Python function as calls of an operator."""
    register = getattr(getattr(torch.jit, "_builtins", None), "_register_builtin", None)
    if register is not None:
        register(function, operator)


def _describe(
    name: str, x: Tensor, heads: int, held: list[Any]
) -> tuple[int, tuple[int, int, int, int], tuple[int, int, int, int]]:
    """Address, shape and strides of a tensor."""
    shape, strides, row = x.shape, x.stride(), 3 - heads
    return (
        _memory.address(name, x, held),
        (shape[0], shape[heads], shape[row], shape[3]),
        (strides[0], strides[heads], strides[row], strides[3]),
    )


def _plain(x: Any) -> Any:
    """A tensor without its class, or a list of them: an operator reads memory, and a subclass could report another
    shape."""
    if isinstance(x, list):
        return [_plain(each) for each in x]
    if not isinstance(x, Tensor) or type(x) is Tensor:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(x, Tensor)


def _both(q: Tensor, k: Tensor, v: Tensor, heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    """O and the LSE. The LSE is empty if it was not requested, because an operator returns tensors only."""
    _check_axes(q, k, v, heads)
    out, lse = _now(_plain(q), _plain(k), _plain(v), heads, *rest)
    return out, q.new_empty((0,), dtype=torch.float32) if lse is None else lse


def _check_axes(q: Tensor, k: Tensor, v: Tensor, heads: int) -> None:
    """Rejects what a direct call of an operator may bring: another number of dimensions, another axis."""
    if heads not in (1, 2):
        raise invalid("heads", heads, "1 or 2, the axis of the heads")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ArgumentError(f"{name} has {dimensions(x.ndim)}; attention takes 4")


@library.custom_op(
    "flashcore_attn::attention",
    mutates_args=(),
    # A window is symbolic if it changes from call to call, so that one compiled graph serves all calls.
    schema="(Tensor q, Tensor k, Tensor v, int heads, bool top_left, SymInt before, SymInt after, float? scale, "
    "float softcap, bool want_lse) -> (Tensor, Tensor)",
)
def _operator(q: Tensor, k: Tensor, v: Tensor, heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    *terms, want_lse = rest
    return _both(q, k, v, heads, tuple(terms), want_lse)


@_operator.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, heads: int, *rest: Any, same_batch: bool = True
) -> tuple[Tensor, Tensor]:  # fmt: skip
    *_, want_lse = rest
    _check_axes(q, k, v, heads)
    dtype = _cuda.output_type(q, k, v)
    _features.check_shapes(q, k, v, heads, same_batch)
    q, v = _cuda.plain_rows("q", q), _cuda.plain_rows("v", v)
    out = _cuda.output_like(q, v.shape[3], dtype)
    return out, _cuda.lse_like(q, heads) if want_lse else q.new_empty((0,), dtype=torch.float32)


@library.custom_op(
    "flashcore_attn::attention_with",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, int heads, bool top_left, SymInt before, SymInt after, float? scale, "
    "float softcap, bool want_lse, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? leftpad_k, SymInt batch, SymInt max_q, SymInt max_k, Tensor? sink, str score, str mask, float[] floats, "
    "SymInt[] ints, Tensor[] tables, Tensor? descale_q, Tensor? descale_k, Tensor? descale_v, int[] blocks, "
    "Tensor? page_table=None, bool deterministic=False, float dropout_p=0.0, Tensor? rng_state=None, "
    "str invariant='') -> (Tensor, Tensor)",
)
def _operator_with(q: Tensor, k: Tensor, v: Tensor, heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    stated = _given_features(q, k, v, heads, rest[6:])
    return _both(q, k, v, heads, rest[:5], rest[5], stated)


def _given_features(q: Tensor, k: Tensor, v: Tensor, heads: int, features: tuple[Any, ...]) -> Features:
    """The features of an operator's call, checked and readable by kernels."""
    stated = _stated(tuple(map(_plain, features)))
    for name, number in (("batch", stated.batch), ("max_q", stated.max_q), ("max_k", stated.max_k)):
        if not 0 <= number < 2**31:
            raise invalid(name, number, "an integer of 0 to 2^31 - 1")
    for number in stated.ints:
        _features.check_integer("ints", number)
    _check_features(q, k, v, heads, stated)
    # A slice that `torch.vmap` hands over may have strides, which the kernels do not read.
    lengths: Any = tuple(None if x is None else x.contiguous() for x in stated.lengths)
    return stated._replace(lengths=lengths, sink=None if stated.sink is None else stated.sink.contiguous())


def _check_features(q: Tensor, k: Tensor, v: Tensor, heads: int, features: Features) -> None:
    """Rejects features whose tensors do not fit: a trace or a direct call brings some that nothing else has checked.
    Rust checks the shapes of tables."""
    _check_axes(q, k, v, heads)
    _cuda.check_devices(features, q)
    for name, x in zip(features.table_names, features.tables):
        _cuda.check_table(name, x)
    for name, x in zip(_features.LENGTHS, features.lengths):
        if x is not None:
            if x.dtype != torch.int32:  # the public functions convert other types
                raise DTypeError(invalid_words(f"the dtype of {name}", x.dtype, "torch.int32"))
            _cuda.as_lengths(name, x, _features.length_elements(name, features.batch))
    if features.sink is not None:
        _features.sink("sink", _cuda, features.sink, q.shape[heads])
        if features.sink.dtype != torch.float32:
            raise DTypeError(invalid_words("the dtype of sink", features.sink.dtype, "torch.float32"))
    if features.rng_state is not None:
        _dropout.check_state(features.rng_state, torch.int32)
        _dropout.probability(features.dropout_p)
    if features.page_table is not None:
        _cuda.as_pages(features.page_table, features.batch if features.uneven else q.shape[0])
    batch, rows = q.shape[0], (q.shape[3 - heads], k.shape[3 - heads], k.shape[3 - heads])
    if features.uneven:
        batch, rows = features.batch, (features.max_q, features.max_k, features.max_k)
    for name, x, whole, of_block in zip(_features.SCALES, features.scales, rows, features.blocks):
        if x is None:
            continue
        expected = (batch, k.shape[heads], -(-whole // of_block)) if of_block else (batch, k.shape[heads])
        if tuple(_cuda.as_scale(name, x).shape) != expected:
            raise invalid(f"the shape of {name}", tuple(x.shape), f"{expected}")


def _stated(features: tuple[Any, ...]) -> Features:
    *lengths, batch, max_q, max_k, sink, score, mask, floats, ints, tables = features[:14]
    *scales, blocks = features[14:18]
    pages = features[18] if len(features) > 18 else None
    # Last arguments that equal their defaults may be absent.
    defaults: Any = (0.0, None, "")
    dropout_p, state, invariant = features[20:] + defaults[max(len(features) - 20, 0) :]
    if len(blocks) != 3 or any(rows not in (0, *_features.ROWS) for rows in blocks):
        raise invalid("blocks", blocks, "the rows that share a factor of q, of k and of v, each 0, 64 or 128")
    return _features.Features(
        tuple(lengths), batch, max_q, max_k, sink, score, mask, tuple(floats), tuple(ints), tuple(tables),
        tuple(scales), tuple(blocks), None if pages is None else pages.contiguous(),
        dropout_p=dropout_p, rng_state=None if state is None else state.contiguous(), invariant=invariant,
    )  # fmt: skip


@_operator_with.register_fake
def _fake_with(q: Tensor, k: Tensor, v: Tensor, heads: int, *rest: Any) -> tuple[Tensor, Tensor]:
    terms, features = rest[:6], rest[6:]
    # Lengths of only one side: the other side has a dimension for the batch entries.
    stated = _stated(features)
    same_batch = (features[0] is None) == (features[1] is None) and stated.page_table is None
    _check_features(q, k, v, heads, stated)
    return _fake(q, k, v, heads, *terms, same_batch=same_batch)


def _mapped(function: Any, each: Any = None) -> Any:
    """The rule of ``torch.vmap`` for an operator: a call (by ``each``) for each element, as PyTorch's own fallback
    makes them, which takes neither lists nor optional tensors."""

    def rule(info: Any, in_dims: Any, *arguments: Any) -> Any:
        flat, structure = pytree.tree_flatten(arguments)
        dims = structure.flatten_up_to(in_dims)
        for argument, x in zip(function.default._schema.arguments, arguments):
            if isinstance(x, Tensor):
                _memory.check(argument.name, x)
        if info.batch_size == 0:  # the shapes are those of an element of zeros
            flat = [x if dim is None else _zeros_along(x, dim) for x, dim in zip(flat, dims)]

        def call(number: int) -> Any:
            parts = [x if dim is None else x.select(dim, number) for x, dim in zip(flat, dims)]
            return (each or function)(*pytree.tree_unflatten(parts, structure))

        results = [call(number) for number in range(info.batch_size or 1)]
        kind = type(results[0])  # a tuple, or the list of gradients
        stacked = [torch.stack(parts)[: info.batch_size] for parts in zip(*results)]
        return kind(stacked), kind([0] * len(stacked))

    return rule


def _zeros_along(x: Tensor, dim: int) -> Tensor:
    """A tensor of zeros with one element instead of none along a dimension."""
    shape = list(x.shape)
    shape[dim] = 1
    return x.new_zeros(shape)


if hasattr(_operator, "register_vmap"):
    _operator.register_vmap(_mapped(torch.ops.flashcore_attn.attention))
    _operator_with.register_vmap(_mapped(torch.ops.flashcore_attn.attention_with))

from . import _autograd, _cached  # noqa: E402  (which read this module)

_autograd.register((_operator, _operator_with))
eager = _in_rust()
append_and_attend, merge_states = _cached.append_and_attend, _cached.merge_states
reshape_and_cache, check_array = _cached.reshape_and_cache, _cached.check_array


def _flops(q: Tensor, k: Tensor, v: Tensor, heads: int, *terms: Any, **named: Any) -> int:
    """The FLOP of a call as PyTorch counts those of its own attention: of both products, without regard to masks."""
    starts_q, starts_k = terms[6:8] if len(terms) > 6 else (None, None)
    rows, keys = q.shape[3 - heads], k.shape[3 - heads]
    pairs = rows * keys if starts_k is not None else q.shape[0] * rows * keys
    if starts_q is not None and starts_k is not None and type(starts_q) is Tensor and not starts_q.is_meta:
        pairs = int((starts_q.diff() * starts_k.diff()).sum())
    return 2 * pairs * q.shape[heads] * (q.shape[3] + v.shape[3])


def _register_flops() -> None:
    """Registers the count of FLOP with ``torch.utils.flop_counter``, if that was imported, and its active counters."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    modes: Any = getattr(torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", list)()
    counters = (getattr(mode, "counter", mode) for mode in modes)
    for registry in (counter.flop_registry, *(getattr(each, "flop_registry", {}) for each in counters)):
        for operator in (torch.ops.flashcore_attn.attention, torch.ops.flashcore_attn.attention_with):
            registry.setdefault(operator, _flops)


_register_flops()
