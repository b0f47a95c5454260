"""The names that FlashInfer's tests of decode import, served by FlashCore."""

from __future__ import annotations

import math
import sys
import types
from pathlib import Path
from typing import Any

import torch
from runner import Anything, module, not_applicable

import flashcore_attn

FILES = tuple(
    f"tests/attention/test_{name}.py"
    for name in (
        "batch_decode_kernels", "sliding_window", "logits_cap", "alibi", "non_contiguous_decode",
        "tensor_cores_decode", "decode_prefill_lse",
    )
)  # fmt: skip
OF_A_FILE = ()
NOT_APPLICABLE = {
    "nvfp4": "keys of 4 bits",
    "cuda_graph": "graphs of a GPU",
    "fast_plan": "FlashInfer's plans on the host",
    "rejects_mismatched": "FlashInfer's plans on the host",
}


def _score(options: dict[str, Any], heads: int) -> dict[str, Any]:
    """FlashCore's options of FlashInfer's; the others have no meaning here."""
    encoding = options.get("pos_encoding_mode", "NONE")
    if encoding == "ROPE_LLAMA":
        not_applicable("rotary embedding of keys in a cache that has none")
    left = options.get("window_left", -1)
    scale = options.get("sm_scale")
    for name in ("q_scale", "k_scale"):
        if options.get(name) is not None:
            not_applicable("factors of 8-bit tensors in a plan")
    named = {"softmax_scale": scale, "softcap": options.get("logits_soft_cap") or 0.0, "window_size": (left, -1)}
    if encoding == "ALIBI":
        named["alibi_slopes"] = 2.0 ** (-8.0 / heads * torch.arange(1, heads + 1, dtype=torch.float32))
    return named


def _on(device: torch.device, named: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in named.items()}


def _with_lse(made: Any, wanted: bool, out: Any = None) -> Any:
    """FlashInfer's LSE has the base 2 and the heads last."""
    result, lse = made
    result = result if out is None else out.copy_(result)
    return (result, lse.mT / math.log(2)) if wanted else result


def _single(q: Any, k: Any, v: Any, causal: bool = False, kv_layout: str = "NHD", custom_mask: Any = None,
            return_lse: bool = False, **options: Any) -> Any:  # fmt: skip
    """``single_prefill_with_kv_cache``: dense queries, ``(rows, heads, dim)``."""
    k, v = (x if kv_layout == "NHD" else x.transpose(0, 1) for x in (k, v))
    named = _on(q.device, _score(options, q.shape[1]))
    if "alibi_slopes" in named and not causal and len(q) > 1:
        not_applicable("ALiBi whose bias has the sign of the distance")
    if custom_mask is not None:
        heads = (x.transpose(0, 1)[None] for x in (q, k, v))
        made = flashcore_attn.scaled_dot_product_attention(*heads, custom_mask, enable_gqa=True)
        return made[0].transpose(0, 1)
    q, k, v = (x[None].to(torch.float16 if x.dtype == torch.float8_e4m3fn else x.dtype) for x in (q, k, v))
    out, lse = flashcore_attn.flash_attn_func(q, k, v, causal=causal, return_lse=True, **named)
    return _with_lse((out[0], lse[0]), return_lse)


def _single_decode(q: Any, k: Any, v: Any, kv_layout: str = "NHD", pos_encoding_mode: str = "NONE",
                   use_tensor_cores: bool = False, **options: Any) -> Any:  # fmt: skip
    """``single_decode_with_kv_cache``: one query, ``(heads, dim)``."""
    made = _single(q[None], k, v, kv_layout=kv_layout, pos_encoding_mode=pos_encoding_mode, **options)
    return (made[0][0], made[1][0]) if isinstance(made, tuple) else made[0]


class _Wrapper:
    """A plan keeps the page table; the batch has one query for each sequence, or cumulative ones."""

    causal = False

    def __init__(self, workspace: Any, kv_layout: str = "NHD", *_: Any, **__: Any) -> None:
        self.layout = kv_layout

    def plan(self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int,
             head_dim: int, page_size: int, *encoding: Any, **options: Any) -> None:  # fmt: skip
        if encoding:
            options["pos_encoding_mode"] = encoding[0]
        pages = indptr.diff()
        self.used = ((pages - 1).clamp(min=0) * page_size + last_page_len.to(pages.device)).int() * (pages > 0)
        self.table = torch.zeros(len(pages), max(int(pages.max()), 1), dtype=torch.int32, device=pages.device)
        for row, (start, count) in enumerate(zip(indptr.tolist(), pages.tolist())):
            self.table[row, :count] = indices[start : start + count]
        self.rows: Any = options.pop("qo_indptr", None)
        self.causal = options.pop("causal", False)
        self.named = _score(options, num_qo_heads)

    def run(self, q: Any, cache: Any, out: Any = None, return_lse: bool = False, k_scale: Any = None,
            v_scale: Any = None, **_: Any) -> Any:  # fmt: skip
        # Plans are made on the host.
        self.used, self.table = self.used.to(q.device), self.table.to(q.device)
        self.rows = None if self.rows is None else self.rows.to(q.device)
        named = _on(q.device, self.named)
        k, v = cache if isinstance(cache, tuple) else cache.unbind(1)
        k, v = (x if self.layout == "NHD" else x.transpose(1, 2) for x in (k, v))
        factors = {
            name: torch.full((len(self.used), k.shape[2]), float(x), device=q.device)
            for name, x in (("k_descale", k_scale), ("v_descale", v_scale))
            if x is not None
        }
        if self.rows is None and q.shape[0] != len(self.used):
            not_applicable("several queries of each sequence in a wrapper of decode")
        made = flashcore_attn.flash_attn_with_kvcache(
            q if self.rows is not None else q[:, None], k, v, cache_seqlens=self.used, page_table=self.table,
            causal=self.causal, cu_seqlens_q=self.rows, return_softmax_lse=True, **named, **factors,
        )  # fmt: skip
        if self.rows is None:
            made = (made[0][:, 0], made[1][..., 0].mT)
        return _with_lse(made, return_lse, out)

    def run_return_lse(self, q: Any, cache: Any) -> Any:
        return self.run(q, cache, return_lse=True)


class _Prefill(_Wrapper):
    def plan(self, qo_indptr: Any, indptr: Any, indices: Any, last_page_len: Any, *rest: Any, **options: Any) -> None:
        super().plan(indptr, indices, last_page_len, *rest, qo_indptr=qo_indptr.int(), **options)


class _Ragged(_Wrapper):
    def plan(self, qo_indptr: Any, kv_indptr: Any, num_qo_heads: int, *rest: Any, **options: Any) -> None:
        self.starts, self.causal = (qo_indptr.int(), kv_indptr.int()), options.pop("causal", False)
        self.named = _score(options, num_qo_heads)

    def run(self, q: Any, k: Any, v: Any, out: Any = None, return_lse: bool = False, **_: Any) -> Any:
        starts = [x.to(q.device) for x in self.starts]
        named = _on(q.device, self.named)
        made = flashcore_attn.flash_attn_varlen_func(q, k, v, *starts, causal=self.causal, return_lse=True, **named)
        return _with_lse(made, return_lse, out)


def install(folder: Path) -> None:
    """Makes the modules that the tests import."""
    sys.path.insert(0, str(folder))  # its package of test helpers
    for name in ("jit_utils", "utils_fp4"):
        sys.modules[f"tests.test_helpers.{name}"] = Anything(name)
    named = {
        "single_prefill_with_kv_cache": _single, "single_decode_with_kv_cache": _single_decode,
        "BatchDecodeWithPagedKVCacheWrapper": _Wrapper, "BatchPrefillWithPagedKVCacheWrapper": _Prefill,
        "BatchPrefillWithRaggedKVCacheWrapper": _Ragged,
    }  # fmt: skip
    flashinfer = module("flashinfer", **named)
    flashinfer.decode = flashinfer.prefill = types.SimpleNamespace(**named)  # type: ignore[attr-defined]
    flashinfer.jit = flashinfer.fast_decode_plan = Anything("jit")  # type: ignore[attr-defined]
    capability = lambda device: (9, 0)  # noqa: E731
    module("flashinfer.utils", get_compute_capability=capability, has_flashinfer_jit_cache=lambda: True)
