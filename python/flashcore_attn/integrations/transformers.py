"""Attention of Hugging Face ``transformers``.

>>> import flashcore_attn.integrations.transformers
>>> model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flashcore")

Importing the module registers ``"flashcore"`` with ``AttentionInterface`` and ``AttentionMaskInterface``. Grouped
heads are read in place. Soft caps, attention sinks (GPT-OSS), position biases (T5), causal masks, windows, chunks and
padding and dropout are computed by the kernel, forward and backward. A call of a type that FlashCore does not compute
is left to the implementation "sdpa", with one warning per reason. A model whose layers compute attention themselves
(BLOOM, Falcon, MPT) is refused when it is made. Where "sdpa" would compute something else (soft caps,
sinks, lengths alone), the call raises an error that names the reason.

``transformers`` takes every name with "flash" in it for a variant of the package ``flash-attn``, which it imports or
replaces, and which has no chunked attention (Llama 4). :func:`register` exempts this name from both. Models that hand
cumulative lengths to such variants (the vision towers of Qwen) pass them to this one as well. Continuous batching
(``generate_batch``, ``ContinuousBatchingManager``) also takes the name for such a variant and passes a paged cache:
prefill and chunks read the keys that the cache gathers, and a batch of decodes appends to the pages and reads them in
one call.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import warnings
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .. import _dropout, _features, _memory, _torch
from .._errors import UnsupportedError, invalid
from .._functional import backend_of
from .._kvcache import flash_attn_with_kvcache
from .._varlen import flash_attn_varlen_func

__all__ = ["NAME", "attention", "register"]

#: The value of ``attn_implementation``.
NAME = "flashcore"

_told: set[str] = set()  # the reasons of warnings


def register() -> None:
    """Registers the implementation. Importing the module calls this function."""
    AttentionInterface.register(NAME, attention)
    # A mask of truth values, `(batch, 1, L, S)`, or none where attention is causal or full.
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if PreTrainedModel._check_and_adjust_attn_implementation is not _check_and_adjust:
        PreTrainedModel._check_and_adjust_attn_implementation = _check_and_adjust
    # Masks ask this only in order to refuse chunks that are longer than a chunk. Models ask their own copy.
    if _is_flash is not None and masking_utils.is_flash_attention_requested is not _is_flash_mask:
        masking_utils.is_flash_attention_requested = _is_flash_mask
    if _ensure is not None and _batching.ensure_decode_fast_path_is_available is not _ensure_decode:
        _batching.ensure_decode_fast_path_is_available = _ensure_decode


_adjusted = PreTrainedModel._check_and_adjust_attn_implementation
_is_flash = getattr(masking_utils, "is_flash_attention_requested", None)


try:
    from transformers.generation.continuous_batching import initialization as _batching
except ImportError:  # a release without continuous batching
    _batching = None
_kinds = getattr(_batching, "group_layers_by_attn_type", None)
_allocators = getattr(_batching, "ATTN_TYPE_TO_ALLOCATOR", None)
_ensure = getattr(_batching, "ensure_decode_fast_path_is_available", None)


@functools.wraps(_ensure or (lambda config: None))
def _ensure_decode(config: Any, *args: Any, **kwargs: Any) -> Any:
    """Lets a batch of decodes have a block table on every device, where all kinds of layers have one."""
    if getattr(config, "_attn_implementation", None) == NAME and _kinds is not None and _allocators is not None:
        kinds = _kinds(config)
        if all(getattr(_allocators.get(kind), "supports_block_table", False) for kind in kinds):
            return None
    return None if _ensure is None else _ensure(config, *args, **kwargs)


@functools.wraps(_is_flash or (lambda config: False))
def _is_flash_mask(config: Any = None, *args: Any, **kwargs: Any) -> bool:
    """Whether masks are those of FlashAttention; not for this name."""
    if getattr(config, "_attn_implementation", None) == NAME or _is_flash is None:
        return False
    return bool(_is_flash(config, *args, **kwargs))


@functools.wraps(_adjusted)
def _check_and_adjust(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
    """The name as it is, without the search for a package of FlashAttention.

    Raises:
        UnsupportedError: a model that computes attention itself.
    """
    if attn_implementation != NAME:
        return _adjusted(self, attn_implementation, *args, **kwargs)
    if not _asks_interface(self.__class__):
        words = f'{type(self).__name__} computes attention itself and takes no attn_implementation="{NAME}"'
        raise UnsupportedError(f"{words}; omit it, and call flashcore_attn.compat.enable()", "attn_implementation")
    return NAME


@functools.cache
def _asks_interface(model: type) -> bool:
    """Whether the layers of a class of models ask transformers for the function of a name. Other layers would get masks
    that they do not read."""
    has_layer = False
    if getattr(model, "_supports_attention_backend", False):
        return True
    for base in model.__mro__[: model.__mro__.index(PreTrainedModel)]:
        try:
            code = inspect.getsource(sys.modules[base.__module__])
        except (KeyError, OSError, TypeError):  # a class without a file
            continue
        if "ALL_ATTENTION_FUNCTIONS" in code or "AttentionInterface" in code:
            return True
        has_layer = has_layer or re.search(r"^class \w*Attention\w*\((torch\.)?nn\.Module\)", code, re.M) is not None
    return not has_layer


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None, cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None, max_length_q: int | None = None, max_length_k: int | None = None,
    sliding_window: int | None = None, cache: Any = None, block_table: torch.Tensor | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The function that models call, with the arguments of ``AttentionInterface``.

    Args:
        module: the attention layer; ``is_causal`` is its attribute.
        query: ``(batch, heads, L, head_dim)``.
        key: ``(batch, heads_k, S, head_dim)``.
        value: ``(batch, heads_k, S, head_dim_v)``.
        attention_mask: of bool or added to the scores; it broadcasts to ``(batch, heads, L, S)``. None means causal
            attention, aligned to the top left, if the module is causal and L > 1.
        dropout: the probability with which a weight is replaced by 0.
        scaling: factor on the scores.
        is_causal: instead of the module's attribute.
        softcap: bound of the scores' magnitude.
        s_aux: a logit per query head, which takes part in the denominator.
        position_bias: added to the scores; it broadcasts to ``(batch, heads, L, S)``. Not together with lengths alone.
        cu_seq_lens_q: the first row of each sequence that is packed into ``L``, and the end of the last. A mask says
            which rows belong together: beside one the lengths are not read, as by the implementation "sdpa".
        cu_seq_lens_k: the same of ``S``.
        max_length_q: the longest of these sequences, as ``max_length_k``.
        sliding_window: the keys that a query sees, with its own, in a paged cache; else windows are part of the mask.
        cache: the paged cache of continuous batching. Lengths of keys are those of each kind of layer then.
        block_table: the pages of each sequence, if each has one query.
        others: what other implementations take.

    Returns:
        ``(batch, L, heads, head_dim_v)``, and None for the weights.
    """
    reason = _lacks(query, key, value, attention_mask)
    if reason is not None:
        lengths_alone = cu_seq_lens_q is not None and attention_mask is None
        if softcap or s_aux is not None or lengths_alone or cache is not None or block_table is not None:
            words = 'and "sdpa" does not compute such a call; use attn_implementation="eager"'
            raise UnsupportedError(f"{reason}, {words}")
        if reason not in _told:
            _told.add(reason)
            warnings.warn(f'{reason}: attn_implementation="flashcore" leaves such calls to "sdpa"', stacklevel=2)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, **others
        )
    if others.get("output_attentions"):
        raise UnsupportedError(
            "output_attentions is not supported: FlashCore does not store the weights; use eager attention"
        )
    if cache is not None:
        named = {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k, "block_table": block_table, **others}
        keys = (cache, named, cu_seq_lens_q, max_length_q, sliding_window)
        # A model makes a mask of the new rows alone, which the lengths make superfluous.
        return _paged(module, (query, key, value), keys, scaling, softcap, s_aux), None
    if block_table is not None:
        raise UnsupportedError("block_table is given, and there is no cache beside it", "block_table")
    for name, lengths_of in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if isinstance(lengths_of, dict):
            raise UnsupportedError(f"{name} is a dict of lengths by kind of layer; expected one tensor", name)
    backend = backend_of(query)
    q, k, v = backend.admit(query, key, value)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    parts = _features.Parts()
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = bool(causal and attention_mask is None and shape[2] > 1)
    for name, tensor in (("attention_mask", attention_mask), ("position_bias", position_bias)):
        if tensor is not None:
            table = backend.as_table(name, tensor)
            given = tuple(table.shape)
            if given:
                table = table[..., : shape[3]]  # a mask may have more keys than there are
            if not _features.broadcasts(table.shape, shape):
                raise invalid(f"the shape of {name}", given, f"one that broadcasts to {shape}, or has more keys")
            _features.scores(parts, backend, name, table, shape)
    sink = None
    if s_aux is not None:
        sink = _features.sink("s_aux", backend, s_aux, shape[1])
    lengths, batch = _features.NO_LENGTHS, 0
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None and attention_mask is None:
        if position_bias is not None:
            raise UnsupportedError("position_bias beside cu_seq_lens_q is not supported; pack by an attention_mask")
        batch = cu_seq_lens_q.shape[0] - 1
        packed = (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k))
        for name, array in packed:
            _memory.check(name, array)
        lengths = (*(backend.as_lengths(name, array.int(), batch + 1) for name, array in packed), None, None, None)
    longest = tuple(rows if most is None else int(most) for most, rows in zip((max_length_q, max_length_k), shape[2:]))
    features = parts.features(lengths=lengths, batch=batch, max_q=longest[0], max_k=longest[1], sink=sink)
    if dropout:
        features = _dropout.with_dropout(features, backend, q, _dropout.probability(dropout))
    terms = (True, -1, 0 if causal else -1, scaling, float(softcap or 0.0))
    out, _ = backend.attend(q, k, v, 1, terms, False, features)
    return out.transpose(1, 2), None


def _paged(
    module: Any,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    keys: tuple[Any, ...],
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal attention of packed sequences to a paged cache, ``(1, L, heads, head_dim)``."""
    cache, lengths, starts, longest, window = keys
    if not callable(getattr(cache, "update", None)):
        raise UnsupportedError(f"cache is a {type(cache).__name__}; expected a PagedAttentionCache", "cache")
    q, k, v = tensors
    k, v = cache.update(key_states=k, value_states=v, layer_idx=module.layer_idx, kwargs=lengths)
    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))  # (rows, heads, head_dim)
    options: dict[str, Any] = {
        "softmax_scale": scaling, "causal": True, "softcap": float(softcap or 0.0), "learnable_sink": sinks,
        "window_size": (-1 if window is None else window - 1, -1),
    }  # fmt: skip
    starts_k = lengths["cu_seq_lens_k"]
    if lengths["block_table"] is None:
        out = flash_attn_varlen_func(q, k, v, starts, starts_k, longest, lengths["max_length_k"], **options)
    else:
        used = starts_k[1:] - starts_k[:-1] - 1  # before the append
        out = flash_attn_with_kvcache(
            q[:, None], lengths["k_cache"], lengths["v_cache"], k[:, None], v[:, None], cache_seqlens=used,
            block_table=lengths["block_table"], **options,
        )[:, 0]  # fmt: skip
    return out[None]


def _lacks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> str | None:
    """Why FlashCore does not compute a call that PyTorch may compute."""
    lacks = _torch.lacks(query, key, value, mask)
    if lacks == "requires_grad":
        return "an input requires grad, and the GPU's kernels do not compute its gradient"
    return None if lacks is None else f"FlashCore does not compute {lacks}"


register()
