"""The names that FlashAttention's tests import, served by FlashCore."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flashcore_attn
from flashcore_attn import _flex

NOT_APPLICABLE = "not applicable: "


class ForwardDone(Exception):
    """A test goes on to the backward pass; its assertions about outputs held."""


def not_applicable(reason: str) -> None:
    """Ends a test of a feature that is not part of the forward pass."""
    pytest.skip(NOT_APPLICABLE + reason)


def _plain(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _window(given: Any) -> Any:
    return tuple(None if side is None else int(side) for side in given)


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without gradients; arguments of other features end the test."""
    signature = inspect.signature(function)
    absent = {
        "qv": "a second product of queries (qv)", "page_table": "paged keys", "block_table": "paged keys",
    }  # fmt: skip

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*map(_plain, args), **{name: _plain(x) for name, x in kwargs.items()})
        given = bound.arguments
        if given.get("dropout_p"):
            not_applicable("dropout")
        for name, reason in absent.items():
            if given.get(name) is not None:
                not_applicable(reason)
        if "window_size" in given:
            given["window_size"] = _window(given["window_size"])
        return function(*bound.args, **bound.kwargs)

    return call


# ---- FlashAttention-4: score and mask functions of CuTe have counterparts in torch; the tests compare them
# with.


class _Anything(types.ModuleType):
    """A module of which every name exists, is a decorator that changes nothing, and can be subscripted."""

    def __init__(self, name: str = "anything") -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _Anything(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        # A decorator's function, or the number of a scalar.
        return args[0] if args and (callable(args[0]) or isinstance(args[0], (int, float))) else self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __or__


def _twins() -> dict[Any, Any]:
    """The functions of torch by those of CuTe, from the pairs in the tests; factories take the auxiliary tensors."""
    found: dict[Any, Any] = {}
    if (tests := sys.modules.get("test_score_mod")) is not None:
        for cute, torch_twin in tests.TEST_PAIRS:
            found[cute] = (torch_twin, False)
        for cute, factory in tests.TEST_PAIRS_WITH_AUX_TENSORS:
            found[cute] = (factory, True)
        for pairs in (tests.TEST_PAIRS_VECTORIZED, tests.TEST_PAIRS_WITH_AUX_TENSORS_VECTORIZED):
            found.update({vectorized: found[cute] for cute, vectorized in pairs if cute in found})
    return found


_MASKS: dict[Any, Any] = {}


def _record_masks(definitions: Any) -> None:
    """Remembers which functions belong together when a test asks for a pair."""
    original, vectorized = definitions.get_mask_pair, definitions.get_vec_mask

    def get_mask_pair(*args: Any, **kwargs: Any) -> Any:
        cute, twin = original(*args, **kwargs)
        _MASKS[cute] = twin
        return cute, twin

    def get_vec_mask(name: str, *args: Any, **kwargs: Any) -> Any:
        cute = vectorized(name, *args, **kwargs)
        try:
            names = {key: kwargs[key] for key in ("seqlen_q", "seqlen_k", "window_size") if key in kwargs}
            _MASKS[cute] = original(name, **names)[1]
        except (ValueError, KeyError, TypeError):
            pass
        return cute

    definitions.get_mask_pair, definitions.get_vec_mask = get_mask_pair, get_vec_mask


def _score(cute: Any, tensors: Any, scalars: Any) -> Any:
    if cute is None:
        return None
    tests = sys.modules.get("test_score_mod")
    if tests is not None and cute is tests.scalar_scale_score:
        return tests.scalar_scale_score_eager(scalars[0])
    if tests is not None and cute is tests.tensor_bias_and_scalar_scale_score:
        return tests.tensor_bias_and_scalar_scale_score_eager(tensors[0], scalars[0])
    twin = _twins().get(cute)
    if twin is None:
        not_applicable("a score function of CuTe without a twin of torch")
    function, is_factory = twin
    return function(*tensors) if is_factory else function


def _mask(cute: Any, tensors: Any, scalars: Any) -> Any:
    if cute is None:
        return None
    tests, definitions = sys.modules.get("test_mask_mod"), sys.modules.get("mask_mod_definitions")
    if tests is not None and cute is tests.scalar_limit_mask:
        return tests.flex_scalar_limit_mask(scalars[0])
    if definitions is not None and cute is definitions.cute_document_mask:
        documents = tensors[0]
        return lambda b, h, q, k: documents[b, h, q] == documents[b, h, k]
    if definitions is not None and cute is definitions.cute_ima_mask:
        bias = tensors[0]
        return lambda b, h, q, k: definitions.flex_ima_mask(b, h, q, k, bias)
    if cute not in _MASKS or _MASKS[cute] is None:
        not_applicable("a mask function of CuTe without a twin of torch")
    return _MASKS[cute]


def _cute_forward(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_q: Any = None,
    seqused_k: Any = None, max_seqlen_q: Any = None, max_seqlen_k: Any = None, page_table: Any = None,
    softmax_scale: Any = None, causal: bool = False, softcap: Any = None, window_size_left: Any = None,
    window_size_right: Any = None, learnable_sink: Any = None, score_mod: Any = None, mask_mod: Any = None,
    block_sparse_tensors: Any = None, return_lse: bool = False, out: Any = None, lse: Any = None,
    aux_tensors: Any = None, aux_scalars: Any = None, **_: Any,
) -> Any:  # fmt: skip
    """FlashAttention-4's ``_flash_attn_fwd``: ``(out, lse)``."""
    if page_table is not None:
        not_applicable("paged keys")
    q, k, v = map(_plain, (q, k, v))
    window = (window_size_left, window_size_right)
    if score_mod is None and mask_mod is None:
        of, of_lse = _varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
            softmax_scale=softmax_scale, causal=causal, softcap=softcap or 0.0, window_size=window,
            learnable_sink=learnable_sink, return_lse=True,
        )  # fmt: skip
    else:
        if any(x is not None for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, learnable_sink)):
            not_applicable("a function of scores beside lengths or sinks")
        if causal or softcap or window != (None, None):
            not_applicable("a function of scores beside a window or a cap")
        score, mask = _score(score_mod, aux_tensors, aux_scalars), _mask(mask_mod, aux_tensors, aux_scalars)
        if block_sparse_tensors is not None and mask is not None:
            mask = flashcore_attn.block_sparse_mask(mask, block_sparse_tensors)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        of, of_lse = _flex.flex_attention(
            q, k, v, score, mask, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1], return_lse=True
        )
        of = of.transpose(1, 2)
    if out is not None:
        of = out.copy_(of)
    if lse is not None:
        of_lse = lse.copy_(of_lse)
    return of, of_lse


def _varlen(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
    return flashcore_attn.flash_attn_varlen_func(q, k, v, *args, **kwargs)


def _cute_func(q: Any, k: Any, v: Any, softmax_scale: Any = None, causal: bool = False, window_size: Any = (None, None),
               return_lse: bool = False, **named: Any) -> Any:  # fmt: skip
    left, right = window_size
    return _cute_forward(
        q, k, v, softmax_scale=softmax_scale, causal=causal, window_size_left=left, window_size_right=right, **named
    )


def _cute_varlen(q: Any, k: Any, v: Any, **named: Any) -> Any:
    for name in ("pack_gqa", "deterministic", "num_splits"):
        named.pop(name, None)
    named["window_size"] = _window(named.get("window_size", (None, None)))
    return _varlen(*map(_plain, (q, k, v)), return_lse=True, **named)


def _refused(reason: str) -> Callable[..., Any]:
    return lambda *_, **__: not_applicable(reason)


def _hopper(function: Callable[..., Any]) -> Callable[..., Any]:
    """FlashAttention-3's order of arguments: no dropout, and the scale first."""

    def call(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        names = inspect.signature(function).parameters
        if "cu_seqlens_q" in names:
            given = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), args))
            kwargs = {**given, **kwargs}
        elif args:
            raise TypeError("the tests give FlashAttention-3's options by name")
        if kwargs.get("qv") is None:
            kwargs.pop("qv", None)
        return _forward(function)(q, k, v, **{name: x for name, x in kwargs.items() if name in names or x})

    return call


# ---- Modules


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__path__ = []  # type: ignore[attr-defined]
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def install(folder: Path) -> None:
    """Makes the modules that the tests import, and the CPU a GPU if there is none."""
    if not torch.cuda.is_available():
        _cpu_for_cuda()
    _no_gradients()
    functions = {
        name: _forward(getattr(flashcore_attn, name))
        for name in (
            "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
            "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
        )
    }  # fmt: skip
    cache = _refused("keys appended to a cache")
    _module("flash_attn", **functions, flash_attn_with_kvcache=cache)
    _module("flash_attn.flash_attn_interface", _get_block_size_n=lambda *_: 128, USE_TRITON_ROCM=False)
    _module("flash_attn.layers")
    _module("flash_attn.layers.rotary", apply_rotary_emb=_refused("keys appended to a cache"))
    _load("flash_attn.bert_padding", folder / "flash_attn" / "bert_padding.py")
    _module(
        "flash_attn_interface",
        flash_attn_func=_hopper(flashcore_attn.flash_attn_func),
        flash_attn_varlen_func=_hopper(flashcore_attn.flash_attn_varlen_func),
        flash_attn_combine=_refused("FlashAttention's kernel that merges parts"),
        flash_attn_with_kvcache=cache,
        get_scheduler_metadata=cache,
    )
    for name in ("cutlass", "cutlass.cute", "cutlass._mlir", "cutlass._mlir.dialects"):
        sys.modules[name] = _Anything(name)
    backward = _refused("backward pass")
    _module("flash_attn.cute", flash_attn_func=_cute_func, flash_attn_varlen_func=_cute_varlen)
    interface = _Anything("flash_attn.cute.interface")
    interface.flash_attn_func, interface._flash_attn_fwd = _cute_func, _cute_forward
    interface._flash_attn_bwd = interface._tile_size_bwd_sm90 = backward
    sys.modules["flash_attn.cute.interface"] = interface
    for name in ("cache_utils", "compute_block_sparsity", "utils"):
        sys.modules[f"flash_attn.cute.{name}"] = _Anything(name)
        setattr(sys.modules["flash_attn.cute"], name, sys.modules[f"flash_attn.cute.{name}"])
    sparsity = _Anything("flash_attn.cute.block_sparsity")
    sparsity.BlockSparseTensorsTorch = flashcore_attn.BlockSparseTensors
    sparsity.fast_sampling = lambda function: function
    sys.modules["flash_attn.cute.block_sparsity"] = sparsity
    _record_masks(_load("mask_mod_definitions", folder / "tests" / "cute" / "mask_mod_definitions.py"))


def _no_gradients() -> None:
    """Gradients are zero on both sides of every comparison; a call of ``backward`` ends a test."""

    def grad(outputs: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        return tuple(torch.zeros_like(x) for x in (inputs if isinstance(inputs, (tuple, list)) else (inputs,)))

    def backward(*_: Any, **__: Any) -> None:
        raise ForwardDone

    torch.autograd.grad = grad
    torch.Tensor.backward = backward  # type: ignore[method-assign]


def _cpu_for_cuda() -> None:
    """The device ``cuda`` means ``cpu``, of compute capability 9.0."""

    def device(x: Any) -> Any:
        is_cuda = (isinstance(x, str) and x.startswith("cuda")) or (isinstance(x, torch.device) and x.type == "cuda")
        return "cpu" if is_cuda else x

    def redirected(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(device, args), **{name: device(x) for name, x in kwargs.items()})

        return call

    names = "randn rand empty zeros ones full arange randint tensor randperm linspace empty_strided as_tensor"
    for name in names.split():
        setattr(torch, name, redirected(getattr(torch, name)))
    torch.Tensor.to = redirected(torch.Tensor.to)  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    import torch.nn.attention.flex_attention as flex

    flex.create_block_mask = redirected(flex.create_block_mask)
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        total_memory=16 << 30, multi_processor_count=132, major=9, minor=0, name="none"
    )
    cuda.synchronize = cuda.empty_cache = lambda *_: None
