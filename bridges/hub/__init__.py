"""FlashCore's attention as a kernel of the hub: FlashAttention's functions by name, on PyTorch's tensors.

Tensors are ``[batch, row, head, dim]``, on the CPU or on a CUDA device. ``attention`` is the function below
them: it takes the text of a call and any arrays that have DLPack.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm_ffi

__all__ = ["attention", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

_library = tvm_ffi.load_module(Path(__file__).with_name("libflashcore.so"))
#: ``attention("q k v out; causal", q, k, v, out)``: the names of the tensors, then items as ``scale=0.125``.
attention = _library.attention

try:
    import torch
except ImportError:  # arrays of another library: `attention` alone
    pass
else:

    class _Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, items: tuple[str, ...], deterministic: bool, names: tuple[str, ...], *given: Any) -> Any:
            inputs = _readable(names, given)
            out, lse = _forward(items, inputs, lse=True)
            ctx.save_for_backward(*inputs.values(), out, lse)
            ctx.call = (items, deterministic, names)
            ctx.set_materialize_grads(False)
            return out, lse

        @staticmethod
        def backward(ctx: Any, d_out: Any, d_lse: Any) -> Any:
            items, deterministic, names = ctx.call
            *given, out, lse = ctx.saved_tensors
            inputs = dict(zip(names, given))
            read = {**inputs, "out": out, "lse": lse}
            read["d_out"] = torch.zeros_like(out) if d_out is None else _rows(d_out)
            if d_lse is not None:
                read["d_lse"] = d_lse.contiguous()
            of = {"q": "dq", "k": "dk", "v": "dv", "sinks": "d_sinks"}
            results = {of[name]: torch.empty_like(x) for name, x in inputs.items() if name in of}
            _run(("backward", *(["deterministic"] if deterministic else []), *items), {**read, **results})
            return (None, None, None, *(results.get(of.get(name, "")) for name in names))

    def flash_attn_func(
        q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
        return_attn_probs: bool = False, *, learnable_sink: Any = None,
    ) -> Any:  # fmt: skip
        """Attention with gradients: ``out``, or ``(out, lse, None)`` with ``return_attn_probs``."""
        inputs = {"q": q, "k": k, "v": v, "sinks": learnable_sink}
        items = _items(dropout_p, causal, window_size, softmax_scale, softcap)
        return _attend(items, deterministic, inputs, return_attn_probs)

    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
        return_attn_probs: bool = False, *, learnable_sink: Any = None, page_table: Any = None, seqused_k: Any = None,
    ) -> Any:  # fmt: skip
        """Attention inside packed sequences ``[rows, heads, dim]``. The LSE is ``[heads, rows]``."""
        inputs = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "sinks": learnable_sink}
        inputs |= {"seqused_k": seqused_k, "page_table": page_table}
        if page_table is None:
            inputs["cu_seqlens_k"] = cu_seqlens_k
        items = _items(dropout_p, causal, window_size, softmax_scale, softcap)
        items += (f"longest_q={max_seqlen_q}", f"longest_k={max_seqlen_k}")
        return _attend(items, deterministic, inputs, return_attn_probs)

    def flash_attn_with_kvcache(
        q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, rotary_cos: Any = None,
        rotary_sin: Any = None, cache_seqlens: Any = None, page_table: Any = None, softmax_scale: float | None = None,
        causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
        rotary_interleaved: bool = True, return_softmax_lse: bool = False, *, block_table: Any = None,
        learnable_sink: Any = None,
    ) -> Any:  # fmt: skip
        """Attention to a cache, to which ``k`` and ``v`` are appended in place at ``cache_seqlens``."""
        if isinstance(cache_seqlens, int):
            cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
        inputs = {"q": q, "k": k_cache, "v": v_cache, "seqused_k": cache_seqlens, "sinks": learnable_sink}
        inputs |= {"page_table": block_table if page_table is None else page_table, "k_new": k, "v_new": v}
        inputs |= {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
        items = _items(0.0, causal, window_size, softmax_scale, softcap)
        if rotary_cos is not None and rotary_interleaved:
            items += ("interleaved",)
        named = {name: x for name, x in inputs.items() if x is not None}
        # The caches are written, so they are not copied.
        readable = _readable(tuple(named), tuple(named.values())) | {"k": k_cache, "v": v_cache}
        out, lse = _forward(items, readable, return_softmax_lse)
        return (out, lse) if return_softmax_lse else out

    def _attend(items: tuple[str, ...], deterministic: bool, inputs: dict[str, Any], wants_lse: bool) -> Any:
        inputs = {name: x for name, x in inputs.items() if x is not None}
        names, given = tuple(inputs), tuple(inputs.values())
        if torch.is_grad_enabled() and any(x.requires_grad for x in given):
            out, lse = _Attention.apply(items, deterministic, names, *given)
        else:
            out, lse = _forward(items, _readable(names, given), wants_lse)
        return (out, lse, None) if wants_lse else out

    def _forward(items: tuple[str, ...], inputs: dict[str, Any], lse: bool) -> Any:
        q, v = inputs["q"], inputs["v"]
        *batch, rows, heads, _ = q.shape
        results = {"out": q.new_empty((*batch, rows, heads, v.shape[-1]))}
        if lse:
            results["lse"] = q.new_empty((*batch, heads, rows), dtype=torch.float32)
        _run(items, {**inputs, **results})
        return results["out"], results.get("lse")

    def _run(items: tuple[str, ...], tensors: dict[str, Any]) -> None:
        attention("; ".join((" ".join(tensors), *items)), *tensors.values())

    def _readable(names: tuple[str, ...], given: tuple[Any, ...]) -> dict[str, Any]:
        """The tensors without their history; rows are contiguous."""
        return {name: _rows(x.detach()) for name, x in zip(names, given)}

    def _rows(x: Any) -> Any:
        return x if x.stride(-1) == 1 else x.contiguous()

    def _items(
        dropout_p: float,
        causal: bool,
        window_size: tuple[int, int],
        softmax_scale: float | None,
        softcap: float,
    ) -> tuple[str, ...]:
        if dropout_p:
            raise ValueError(f"invalid value '{dropout_p}' for dropout_p: expected 0.0")
        before, after = window_size
        limits = {"keys_before": before, "keys_after": 0 if causal else after}
        items = [f"{name}={keys}" for name, keys in limits.items() if keys >= 0]
        if softmax_scale is not None:
            items.append(f"scale={float(softmax_scale)!r}")
        return (*items, *([f"softcap={float(softcap)!r}"] if softcap else []))
