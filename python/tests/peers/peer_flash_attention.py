"""The names that FlashAttention's tests import, served by FlashCore."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runner import Anything, load, module, not_applicable

import flashcore_attn
from flashcore_attn import _flex
from flashcore_attn.engines import flash_attn_2

FILES = (
    "tests/test_flash_attn.py",
    "hopper/test_flash_attn.py",
    "tests/cute/test_flash_attn.py",
    "tests/cute/test_score_mod.py",
    "tests/cute/test_mask_mod.py",
    "tests/cute/test_flash_attn_varlen.py",
)

# Modules of which each file has its own.
OF_A_FILE = ("test_flash_attn", "test_util", "padding")

# Words in the names of tests of features that FlashCore does not have.
NOT_APPLICABLE = {
    "mla": "a second product of queries (qv)",
    "dq_write_order": "FlashAttention-4's order of additions",
    "bw_compatibility": "PyTorch's stable ABI",
    "cache_separates": "FlashAttention-4's compiler",
    "recompilation": "FlashAttention-4's compiler",
    "compute_block_sparsity": "FlashAttention-4's kernel that builds block lists",
    "compact_block_sparse": "FlashAttention-4's kernel that builds block lists",
    "sm90_block_sparse": "FlashAttention-4's choice of tiles",
    "sm100": "FlashAttention-4's choice of tiles",
    "cluster": "FlashAttention-3's choice of tiles",
    "generator_arg": "dropout",
    "invalid_head_dim": "head dims that FlashAttention-4 refuses",
    "num_splits": "FlashAttention-2's words of an error",
    "block_table_bounds": "FlashAttention-2's words of an error",
    "metadata_paths": "FlashAttention-4's plans on the host",
}
if not torch.cuda.is_available():
    NOT_APPLICABLE["race_condition"] = "races of a GPU, in 250 repeats"


def _window(given: Any) -> Any:
    return tuple(None if side is None else int(side) for side in given)


def _served(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function; arguments of other features end the test."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if given.get("dropout_p"):
            not_applicable("dropout")
        if given.get("qv") is not None:
            not_applicable("a second product of queries (qv)")
        if given.get("k") is not None and "k_cache" in given and given["q"].dtype == torch.float8_e4m3fn:
            not_applicable("8-bit queries beside an append")
        if "window_size" in given:
            given["window_size"] = _window(given["window_size"])
        if (
            given.get("block_table") is not None or next(iter(given.values())).dtype == torch.float8_e4m3fn
        ):  # without a backward pass
            given.update((name, x.detach()) for name, x in given.items() if isinstance(x, torch.Tensor))
        return function(*bound.args, **bound.kwargs)

    return call


# ---- FlashAttention-4: score and mask functions of CuTe have counterparts in torch; the tests compare them
# with.


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
    window = (window_size_left, window_size_right)
    if any(side is not None and side < 0 for side in window):
        not_applicable("windows that end before the diagonal or begin after it")
    if score_mod is None and mask_mod is None:
        of, of_lse = _varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
            softmax_scale=softmax_scale, causal=causal, softcap=softcap or 0.0, window_size=window,
            learnable_sink=learnable_sink, page_table=page_table, return_lse=True,
        )  # fmt: skip
    else:
        if any(x is not None for x in (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, learnable_sink, page_table)):
            not_applicable("a function of scores beside lengths, pages or sinks")
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
    for name in ("pack_gqa", "deterministic", "num_splits", "scheduler_metadata", "return_lse"):
        named.pop(name, None)
    named["window_size"] = _window(named.get("window_size", (None, None)))
    return _varlen(q, k, v, return_lse=True, **named)


def _cute_backward(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, dq: Any = None, dk: Any = None,
                   dv: Any = None, causal: bool = False, softmax_scale: Any = None, deterministic: bool = False,
                   **others: Any) -> Any:  # fmt: skip
    """FlashAttention-4's ``_flash_attn_bwd`` without lengths and functions."""
    if any(x is not None for x in others.values()):
        not_applicable("functions of CuTe in FlashAttention-4's backward pass")
    into = [torch.empty_like(x) if given is None else given for x, given in ((q, dq), (k, dk), (v, dv))]
    flash_attn_2._flash_attn_backward(
        dout, q, k, v, out, lse, *into, 0.0, softmax_scale, causal, deterministic=deterministic
    )
    return tuple(into)


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
        return _served(function)(q, k, v, **{name: x for name, x in kwargs.items() if name in names or x})

    return call


def _rotated(x: Any, cos: Any, sin: Any, interleaved: bool = False, inplace: bool = False, seqlen_offsets: Any = 0,
             cu_seqlens: Any = None, max_seqlen: Any = None) -> Any:  # fmt: skip
    """FlashAttention's rotary embedding of ``(batch, sequence, heads, dim)``, for the references of its tests."""
    if cu_seqlens is not None:
        not_applicable("a reference with rotary embedding of packed sequences")
    offsets = torch.as_tensor(seqlen_offsets, device=x.device)
    at = offsets.reshape(-1, 1) + torch.arange(x.shape[1], device=x.device)
    cos, sin = cos[at][:, :, None].float(), sin[at][:, :, None].float()
    half = cos.shape[-1]
    parts = x[..., : 2 * half].float()
    first, second = (parts[..., ::2], parts[..., 1::2]) if interleaved else (parts[..., :half], parts[..., half:])
    turned = (first * cos - second * sin, first * sin + second * cos)
    whole = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat([whole.to(x.dtype), x[..., 2 * half :]], -1)


def _combined(outs: Any, lses: Any, out: Any = None, out_dtype: Any = None) -> Any:
    """FlashAttention-3's merge of parts, which lie in the first dimension; its LSE is ``(batch, rows, heads)``."""
    merged, lse = flashcore_attn.merge_states(list(outs), list(lses.mT))
    return merged.to(out_dtype or merged.dtype), lse.mT


def install(folder: Path) -> None:
    """Makes the modules that the tests import."""
    functions = {
        name: _served(getattr(flashcore_attn, name))
        for name in (
            "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
            "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
        )
    }  # fmt: skip
    cache = _served(flashcore_attn.flash_attn_with_kvcache)
    module("flash_attn", **functions, flash_attn_with_kvcache=cache)
    private = {name: getattr(flash_attn_2, name) for name in dir(flash_attn_2) if name.startswith("_flash_attn")}
    module("flash_attn.flash_attn_interface", **private, _get_block_size_n=lambda *_: 128, USE_TRITON_ROCM=False)
    module("flash_attn.layers")
    module("flash_attn.layers.rotary", apply_rotary_emb=_rotated)
    load("flash_attn.bert_padding", folder / "flash_attn" / "bert_padding.py")
    module(
        "flash_attn_interface",
        flash_attn_func=_hopper(flashcore_attn.flash_attn_func),
        flash_attn_varlen_func=_hopper(flashcore_attn.flash_attn_varlen_func),
        flash_attn_combine=_combined,
        flash_attn_with_kvcache=cache,
        get_scheduler_metadata=lambda *_, **__: None,
    )
    for name in ("cutlass", "cutlass.cute", "cutlass._mlir", "cutlass._mlir.dialects"):
        sys.modules[name] = Anything(name)
    module("flash_attn.cute", flash_attn_func=_cute_func, flash_attn_varlen_func=_cute_varlen)
    interface = Anything("flash_attn.cute.interface")
    interface.flash_attn_func, interface._flash_attn_fwd = _cute_func, _cute_forward
    interface._flash_attn_bwd = _cute_backward
    interface._tile_size_bwd_sm90 = _refused("FlashAttention-4's choice of tiles")
    interface._flash_attn_bwd_sparse_mla = _refused("a second product of queries (qv)")
    interface.flash_attn_varlen_func, interface.get_scheduler_metadata = _cute_varlen, lambda *_, **__: None
    sys.modules["flash_attn.cute.interface"] = interface
    load("flash_attn.cute.testing", folder / "flash_attn" / "cute" / "testing.py")
    for name in ("cache_utils", "compute_block_sparsity", "utils"):
        sys.modules[f"flash_attn.cute.{name}"] = Anything(name)
        setattr(sys.modules["flash_attn.cute"], name, sys.modules[f"flash_attn.cute.{name}"])
    sparsity = Anything("flash_attn.cute.block_sparsity")
    sparsity.BlockSparseTensorsTorch = flashcore_attn.BlockSparseTensors
    sparsity.fast_sampling = lambda function: function
    sys.modules["flash_attn.cute.block_sparsity"] = sparsity
    _record_masks(load("mask_mod_definitions", folder / "tests" / "cute" / "mask_mod_definitions.py"))
