"""The names that vLLM's tests of attention import, served by FlashCore."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
from runner import Anything, module

import flashcore_attn
from flashcore_attn.engines import _serving

FILES = tuple(
    f"tests/kernels/attention/test_{name}.py"
    for name in (
        "flash_attn", "cascade_flash_attn", "triton_unified_attention", "triton_prefill_attention",
        "mixed_causal_attn",
    )
)  # fmt: skip
OF_A_FILE = ()
NOT_APPLICABLE = {
    "fp8_output": "results of 8 bits",
    "use_td": "vLLM's tensor descriptors",
    "fa4_hd256_paged_call_shape": "the arguments with which vLLM calls FlashAttention-4",
    "kv_tile_width": "vLLM's choice of tiles",
    "rdna_narrows": "vLLM's choice of tiles",
}


def _paged(
    q: Any, k: Any, v: Any, out: Any = None, *, cu_seqlens_q: Any, seqused_k: Any, max_seqlen_q: Any,
    max_seqlen_k: Any, softmax_scale: Any, block_table: Any, causal: Any = False, window_size: Any = (-1, -1),
    softcap: Any = 0.0, q_descale: Any = None, k_descale: Any = None, v_descale: Any = None,
    dynamic_causal: Any = None, **_: Any,
) -> Any:  # fmt: skip
    """vLLM's ``flash_attn_varlen_func`` and ``unified_attention``: queries of 16 bits as vLLM's backend has them."""
    causal = causal if dynamic_causal is None else dynamic_causal
    groups = (len(seqused_k), k.shape[2])
    factors = [
        None if x is None or isinstance(x, float) else x.expand(groups) for x in (q_descale, k_descale, v_descale)
    ]
    if q.dtype == torch.float8_e4m3fn:
        made = flashcore_attn.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q, None, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, seqused_k=seqused_k, block_table=block_table,
            q_descale=factors[0], k_descale=factors[1], v_descale=factors[2],
        )  # fmt: skip
        return made if out is None else out.copy_(made)
    by_request = causal.int() if isinstance(causal, torch.Tensor) else causal
    batch = _serving.Batch(cu_seqlens_q, seqused_k, block_table, max_seqlen_q, max_seqlen_k, by_request)
    score = _serving.Score(softmax_scale, tuple(window_size), float(softcap or 0.0))
    return _serving.attend(q, k, v, batch, score, descale=(factors[1], factors[2]), out=out)[0]


def _cascade(
    output: Any, query: Any, key_cache: Any, value_cache: Any, cu_query_lens: Any, max_query_len: Any,
    suffix_kv_lens: Any, softmax_scale: Any, logits_soft_cap: Any, block_table: Any, common_prefix_len: Any,
    **_: Any,
) -> None:  # fmt: skip
    """vLLM's ``cascade_attention``."""
    output.copy_(
        flashcore_attn.flash_attn_with_shared_prefix(
            query, key_cache, value_cache, common_prefix_len, suffix_kv_lens + common_prefix_len,
            block_table=block_table, cu_seqlens_q=cu_query_lens, max_seqlen_q=max_query_len,
            softmax_scale=softmax_scale, causal=True, softcap=logits_soft_cap,
        )
    )  # fmt: skip


def _merged(output: Any, prefix: Any, prefix_lse: Any, suffix: Any, suffix_lse: Any) -> None:
    """vLLM's ``merge_attn_states``."""
    output.copy_(flashcore_attn.merge_states([prefix, suffix], [prefix_lse, suffix_lse])[0])


def _prefill(
    q: Any, k: Any, v: Any, o: Any, b_start_loc: Any, b_seq_len: Any, max_input_len: int, is_causal: bool = True,
    sliding_window_q: Any = None, sliding_window_k: Any = None,
) -> None:  # fmt: skip
    """vLLM's ``context_attention_fwd`` of packed prompts. A window of 0 is none there."""
    starts = torch.cat([b_start_loc, b_start_loc[-1:] + b_seq_len[-1:]]).int()
    window = tuple(x if x else -1 for x in (sliding_window_q, sliding_window_k))
    made = flashcore_attn.flash_attn_varlen_func(
        q, k, v, starts, starts, max_input_len, max_input_len, causal=is_causal, window_size=window
    )
    o.copy_(made)


def install(folder: Path) -> None:
    """Makes the modules that the tests import. Versions 2 and 3 of FlashAttention have one meaning here."""
    platform: Any = Anything("platform")
    platform.fp8_dtype = lambda: torch.float8_e4m3fn
    platform.is_cuda, platform.is_rocm = lambda: True, lambda: False
    platform.get_device_capability = lambda *_: types.SimpleNamespace(major=9, minor=0)
    platform.device_type = "cuda"
    for name in ("", ".utils", ".v1", ".v1.attention", ".v1.attention.ops", ".v1.attention.backends"):
        module(f"vllm{name}")
    module("vllm.platforms", current_platform=platform)
    module("vllm.utils.torch_utils", set_random_seed=torch.manual_seed)
    module("vllm.utils.math_utils", next_power_of_2=lambda n: 1 << (n - 1).bit_length())
    module("vllm.v1.kv_cache_interface", KVQuantMode=Anything("modes"))
    module(
        "vllm.vllm_flash_attn",
        flash_attn_varlen_func=_paged,
        is_fa_version_supported=lambda version: version in (2, 3, 4),
        fa_version_unsupported_reason=lambda version: "",
    )
    module("vllm.v1.attention.backends.flash_attn", cascade_attention=_cascade, merge_attn_states=_merged)
    module("vllm.v1.attention.ops.triton_unified_attention", unified_attention=_paged)
    module("vllm.v1.attention.ops.triton_prefill_attention", context_attention_fwd=_prefill)
