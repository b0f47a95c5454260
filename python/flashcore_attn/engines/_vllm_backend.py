"""FlashCore as an attention backend of vLLM. vLLM imports this module by the path in :mod:`.vllm`.

A step needs no plan and no second kernel: lengths and pages are read on the device. CUDA graphs therefore replay any
mixture of prefill and decode, and a draft model's metadata needs no refresh. The form of the cache is found by what
this vLLM has, never by its version.
"""

from __future__ import annotations

import copy
import functools
import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from .._slots import reshape_and_cache
from .._varlen import flash_attn_varlen_func
from . import _serving

_ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)
_FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def _flash_attention() -> Any:
    """vLLM's own FlashAttention backend, whose cache FlashCore reads."""
    return importlib.import_module("vllm.v1.attention.backends.flash_attn").FlashAttentionBackend


@functools.cache
def cache_form() -> str:
    """How a layer's cache holds keys and values.

    ``"packed"``: ``(pages, heads, rows, 2 * dim)``, in any order in memory; ``"pages first"``:
    ``(pages, 2, rows, heads, dim)``; ``"keys first"``: ``(2, pages, rows, heads, dim)``.

    Raises:
        UnsupportedError: this vLLM has another form.
    """
    if hasattr(AttentionBackend, "supported_kv_cache_layouts"):
        return "packed"
    shape = tuple(_flash_attention().get_kv_cache_shape(3, 16, 1, 16))
    forms = {(3, 1, 16, 32): "packed", (3, 2, 16, 1, 16): "pages first", (2, 3, 16, 1, 16): "keys first"}
    if shape not in forms:
        raise _serving.unsupported(f"a KV cache of shape {shape}", "one of " + ", ".join(map(str, forms)))
    return forms[shape]


def pools_of(cache: Tensor, head_size: int, heads: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """The pools of keys and of values, ``(pages, rows, heads, dim)``, views of a layer's cache."""
    form = cache_form()
    expected = (heads, 2 * head_size) if form == "packed" else (2, heads, head_size)
    if form == "packed" and cache.ndim == 4:
        found: tuple[int, ...] = (cache.shape[1], cache.shape[3])
        k, v = cache.transpose(1, 2).split(head_size, -1) if found == expected else (cache, cache)
    elif form != "packed" and cache.ndim == 5:
        axis = 1 if form == "pages first" else 0
        found = (cache.shape[axis], *cache.shape[3:])
        k, v = cache.unbind(axis) if found == expected else (cache, cache)
    else:
        found = tuple(cache.shape)
    if found != expected:
        raise _serving.unsupported(
            f"a KV cache of shape {tuple(cache.shape)}", f"{form}, with {heads} heads of {head_size}"
        )
    return (k, v) if dtype is None else (k.view(dtype), v.view(dtype))


class Backend(AttentionBackend):  # type: ignore[misc]
    """What FlashCore supports."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    # The layer writes keys and values to the cache by `do_kv_cache_update`, before the attention.
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        # The layer looks the name up among vLLM's names of backends.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Layer]:
        return Layer

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        """The shape in releases in which a backend chooses it: that of FlashAttention."""
        shape: tuple[int, ...] = _flash_attention().get_kv_cache_shape(*args, **kwargs)
        return shape

    @staticmethod
    def get_kv_cache_stride_order(*args: Any, **kwargs: Any) -> tuple[int, ...]:
        """As :meth:`get_kv_cache_shape`."""
        order: tuple[int, ...] = _flash_attention().get_kv_cache_stride_order(*args, **kwargs)
        return order

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        known = kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes
        return known or (kv_cache_dtype in _FP8 and _serving.takes_fp8_caches())

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 512

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return tuple(capability) >= (8, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (*_ENCODERS, AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return _serving.takes_fp8_caches()


@dataclass
class Metadata:
    """The requests of a step."""

    num_actual_tokens: int
    batch: _serving.Batch
    slot_mapping: Tensor
    # Keys in this rank's share of the context, with decode context parallelism.
    context: Tensor | None = None


class Builder(AttentionMetadataBuilder[Metadata]):  # type: ignore[misc]
    """Makes metadata from what the runner has. It computes nothing on the host, and waits for nothing."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel = getattr(vllm_config, "parallel_config", None)
        # A draft model's cache may not be shared between the ranks.
        shared = getattr(kv_cache_spec, "dcp_sharded", True)
        self.ranks = getattr(parallel, "decode_context_parallel_size", 1) if shared else 1
        self.interleave = getattr(parallel, "cp_kv_cache_interleave_size", 1)
        # The lengths of a share are computed by `build`, which a draft's graph does not repeat.
        self.supports_draft_decode_metadata_update = self.ranks == 1
        self.shares: Tensor | None = None  # memory that graphs read
        if self.ranks > 1:
            most = vllm_config.scheduler_config.max_num_seqs
            self.shares = torch.zeros(most, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        common = common_attn_metadata
        requests = common.num_reqs
        starts, used = common.query_start_loc[: requests + 1], common.seq_lens[:requests]
        batch = _serving.Batch(
            starts, used, common.block_table_tensor[:requests], common.max_query_len, common.max_seq_len, common.causal
        )
        return Metadata(common.num_actual_tokens, batch, common.slot_mapping, self._context(starts, used))

    def _context(self, starts: Tensor, used: Tensor) -> Tensor | None:
        if self.shares is None:
            return None
        utils = importlib.import_module("vllm.v1.attention.backends.utils")
        rank = _dcp_group().rank_in_group
        lengths = utils.get_dcp_local_seq_lens(used - starts.diff(), self.ranks, rank, self.interleave)
        return self.shares[: len(used)].copy_(lengths)

    def update_block_table(self, metadata: Metadata, blk_table: Tensor, slot_mapping: Tensor) -> Metadata:
        made = copy.copy(metadata)
        made.batch = metadata.batch._replace(table=blk_table[: metadata.batch.used.shape[0]])
        made.slot_mapping = slot_mapping
        return made

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Nothing: the kernel reads lengths and pages from the runner's tensors."""


class Layer(AttentionImpl[Metadata]):  # type: ignore[misc]
    """The attention of a layer."""

    can_return_lse_for_decode = True
    lse_base_on_e = True
    supports_dcp = True
    # The cache may have 8 bits, queries have 16.
    supports_quant_query_input = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        if not Backend.supports_kv_cache_dtype(kv_cache_dtype):
            raise _serving.unsupported(f"kv_cache_dtype={kv_cache_dtype!r}", "auto, float16 or bfloat16")
        self.cache_type = _FP8.get(kv_cache_dtype)
        left = -1 if sliding_window is None else sliding_window - 1
        right = left if attn_type in _ENCODERS or left < 0 else 0
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sliding_window = (left, right)
        self.score = _serving.Score(self.scale, (left, right), float(logits_soft_cap or 0.0), slopes, sinks)
        self.combine = None
        if getattr(self, "dcp_world_size", 1) > 1:
            if left >= 0 or slopes is not None or sinks is not None:
                raise _serving.unsupported(
                    "decode context parallelism with windows, ALiBi or sinks", "attention to all keys of a share"
                )
            self.combine = _combine()

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Metadata | None,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes the result of the step's tokens to ``output``; tokens of padding keep their memory."""
        if output_scale is not None or output_block_scale is not None:
            raise _serving.unsupported("output_scale", "None: the result is not quantised")
        if attn_metadata is None:  # a profiling run
            return output.fill_(0)
        rows, batch = attn_metadata.num_actual_tokens, attn_metadata.batch
        score = self._score_on(query.device)
        out = output[:rows].view(rows, self.num_heads, -1)
        if self.attn_type in _ENCODERS:
            self._encode((query, key, value), rows, batch, score, out)
            return output
        k, v = pools_of(kv_cache, self.head_size, self.num_kv_heads, self.cache_type)
        descale = self._descale(layer, batch)
        if attn_metadata.context is not None:
            self._with_context((query, key, value), (k, v), attn_metadata, descale, out)
        else:
            _serving.attend(query[:rows], k, v, batch, score, descale=descale, out=out)
        return output

    def _score_on(self, device: torch.device) -> _serving.Score:
        if self.score.slopes is not None and self.score.slopes.device != device:
            self.score = self.score._replace(slopes=self.score.slopes.to(device))
        return self.score

    def _descale(self, layer: Any, batch: _serving.Batch) -> tuple[Tensor | None, Tensor | None]:
        if self.cache_type is None:
            return None, None
        shape = (batch.used.shape[0], self.num_kv_heads)
        return layer._k_scale.expand(shape), layer._v_scale.expand(shape)

    def _encode(
        self, tensors: tuple[Tensor, ...], rows: int, batch: _serving.Batch, score: _serving.Score, out: Tensor
    ) -> None:
        """Attention of packed sequences to themselves, without a cache and from both sides."""
        q, k, v = (x[:rows] for x in tensors)
        made = _packed(q, k, v, batch, score, False)[0]
        out.copy_(made)

    def _with_context(
        self,
        tensors: tuple[Tensor, ...],
        pools: tuple[Tensor, Tensor],
        metadata: Metadata,
        descale: tuple[Tensor | None, Tensor | None],
        out: Tensor,
    ) -> None:
        """The context, of which each rank has a share, and the new tokens, which each rank has."""
        assert metadata.context is not None and self.combine is not None
        rows, batch, group = metadata.num_actual_tokens, metadata.batch, _dcp_group()
        q, k, v = (x[:rows] for x in tensors)
        shares = batch._replace(used=metadata.context, causal=False)
        everyone = group.all_gather(q.contiguous(), 1)  # the heads of all ranks
        part, lse = _serving.attend(everyone, *pools, shares, self.score, True, descale)
        assert lse is not None
        old, old_lse = self.combine(part, lse.transpose(0, 1).contiguous(), group, return_lse=True)
        new, new_lse = _packed(q, k, v, batch, self.score, batch.causal)
        merge = importlib.import_module("vllm.v1.attention.ops.merge_attn_states").merge_attn_states
        merge(out, old, old_lse.transpose(0, 1).contiguous(), new, new_lse)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes the step's keys and values; slots below 0 are left out."""
        shared = self.kv_sharing_target_layer_name is not None
        if shared or key is None or self.attn_type in _ENCODERS:
            return
        k, v = pools_of(kv_cache, self.head_size, self.num_kv_heads, self.cache_type)
        scales = (None, None) if self.cache_type is None else (layer._k_scale, layer._v_scale)
        k, v = _serving.repaired(k), _serving.repaired(v)
        reshape_and_cache(key, value, k, v, slot_mapping, "auto", *scales)


def _packed(q: Tensor, k: Tensor, v: Tensor, batch: _serving.Batch, score: _serving.Score, causal: Any) -> Any:
    if isinstance(causal, Tensor):
        raise _serving.unsupported("causal of each request beside packed keys", "a bool")
    with torch.no_grad():
        return flash_attn_varlen_func(
            q, k, v, batch.starts, batch.starts, batch.max_q, batch.max_q, 0.0, score.scale, bool(causal),
            score.window, score.softcap, score.slopes, learnable_sink=score.sinks, return_lse=True,
        )  # fmt: skip


def _dcp_group() -> Any:
    return importlib.import_module("vllm.distributed.parallel_state").get_dcp_group()


def _combine() -> Any:
    """vLLM's function that merges the shares of all ranks, as its configuration says."""
    config = importlib.import_module("vllm.config").get_current_vllm_config()
    a2a = getattr(config.parallel_config, "dcp_comm_backend", "ag_rs") == "a2a"
    name = "dcp_a2a_lse_reduce" if a2a else "cp_lse_ag_out_rs"
    for place in ("dcp", "dcp_alltoall", "common"):
        try:
            found = getattr(importlib.import_module(f"vllm.v1.attention.ops.{place}"), name, None)
        except ImportError:
            found = None
        if found is not None:
            return found
    raise _serving.unsupported(f"where this vLLM has {name}", "vllm.v1.attention.ops.dcp")
