"""FlashCore as an attention backend of SGLang.

A step is planned nowhere: the kernel reads lengths and pages on the device, so that no length is copied to the host.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from . import _serving


class Backend(AttentionBackend):  # type: ignore[misc]
    """Attention of decoders and encoders with a token-major cache in two pools.

    Raises:
        UnsupportedError: MLA, speculative decoding, a hybrid pool of windows, another order of the cache.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        layout = getattr(pool, "kv_cache_layout", "nhd")
        if layout != "nhd":
            raise _serving.unsupported(f"kv_cache_layout={layout!r}", "'nhd'")
        if getattr(runner, "use_mla_backend", False):
            raise _serving.unsupported("MLA of SGLang", "a model with keys and values in two pools")
        if hasattr(pool, "translate_loc_from_full_to_swa"):
            raise _serving.unsupported("a hybrid pool of windows", "--disable-hybrid-swa-memory")
        algorithm = getattr(runner, "spec_algorithm", None)
        if algorithm is not None and not algorithm.is_none():
            raise _serving.unsupported("speculative decoding of SGLang", "none")
        if pool.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and not _serving.takes_fp8_caches():
            raise _serving.unsupported(f"a KV cache of {pool.dtype}", "one of 16 bits")
        self.pool, self.page = pool, runner.page_size
        self.slots: Tensor = runner.req_to_token_pool.req_to_token
        self.longest = runner.model_config.context_len
        self.forward_metadata: _serving.Batch | None = None
        self._captured: _serving.Batch | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The requests of a step that no graph replays."""
        if forward_batch.forward_mode.is_idle():
            self.forward_metadata = None
            return
        self._check_mode(forward_batch.forward_mode)
        requests, lengths = forward_batch.batch_size, getattr(forward_batch, "seq_lens_cpu", None)
        most = self.longest if lengths is None else int(max(lengths))
        used = forward_batch.seq_lens[:requests].int()
        if forward_batch.forward_mode.is_decode():
            starts, longest = torch.arange(requests + 1, dtype=torch.int32, device=used.device), 1
        else:
            rows = forward_batch.extend_seq_lens[:requests]
            starts = torch.nn.functional.pad(rows.cumsum(0), (1, 0)).int()
            longest = int(max(forward_batch.extend_seq_lens_cpu))
        table = self._pages(forward_batch.req_pool_indices[:requests], most)
        self.forward_metadata = _serving.Batch(starts, used, table, longest, most)

    def _check_mode(self, mode: Any) -> None:
        if not (mode.is_decode() or mode.is_extend() or mode.is_mixed()):
            raise _serving.unsupported(f"forward mode {mode}", "decode, extend or mixed")

    def _pages(self, requests: Tensor, most: int) -> Tensor:
        """The pages of requests, of each the first slot."""
        columns = self.slots[:, : -(-most // self.page) * self.page : self.page]
        return (columns[requests.long()] // self.page).int()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        device = self.slots.device
        pages = -(-self.longest // self.page)
        self._captured = _serving.Batch(
            torch.arange(max_bs + 1, dtype=torch.int32, device=device),
            torch.ones(max_bs, dtype=torch.int32, device=device),
            torch.zeros(max_bs, pages, dtype=torch.int32, device=device),
            1,
            self.longest,
        )

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """The memory that a graph reads: its kernels fill it, by :meth:`init_forward_metadata_in_graph`."""
        if not forward_batch.forward_mode.is_decode_or_idle():
            raise _serving.unsupported(f"a CUDA graph of mode {forward_batch.forward_mode}", "decode")
        whole, requests = self._captured, forward_batch.batch_size
        assert whole is not None, "init_cuda_graph_state comes first"
        self.forward_metadata = whole._replace(
            starts=whole.starts[: requests + 1], used=whole.used[:requests], table=whole.table[:requests]
        )

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        batch = self.forward_metadata
        assert batch is not None
        requests = forward_batch.batch_size
        batch.used.copy_(forward_batch.seq_lens[:requests])
        batch.table.copy_(self._pages(forward_batch.req_pool_indices[:requests], self.longest))

    def forward_decode(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **named: Any
    ) -> Tensor:
        """Appends the new tokens, and attends to their requests' caches."""
        return self.forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **named)

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **named: Any
    ) -> Tensor:
        """As :meth:`forward_decode`, of any number of new tokens."""
        sinks = named.pop("sinks", None)
        for name, value in named.items():
            if value is not None:
                raise _serving.unsupported(f"the argument {name} of SGLang", "sinks alone")
        if getattr(layer, "is_cross_attention", False):
            raise _serving.unsupported("cross-attention of SGLang", "attention of a request to itself")
        if save_kv_cache and k is not None:
            self.pool.set_kv_buffer(layer, _location(forward_batch), k, v, layer.k_scale, layer.v_scale)
        batch = self.forward_metadata
        assert batch is not None
        encoder = str(getattr(getattr(layer, "attn_type", None), "value", "decoder")).startswith("encoder")
        pools = tuple(
            x.view(-1, self.page, heads, dim)
            for x, heads, dim in zip(
                self.pool.get_kv_buffer(layer.layer_id), (layer.tp_k_head_num, layer.tp_v_head_num),
                (layer.qk_head_dim, layer.v_head_dim),
            )
        )  # fmt: skip
        # SGLang has subtracted the query's own key.
        left = -1 if layer.sliding_window_size is None else layer.sliding_window_size
        score = _serving.Score(layer.scaling, (left, -1 if left < 0 else 0), float(layer.logit_cap or 0.0), None, sinks)
        out, _ = _serving.attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim), pools[0], pools[1],
            batch._replace(causal=not encoder), score, descale=self._descale(layer, batch),
        )  # fmt: skip
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    def _descale(self, layer: Any, batch: _serving.Batch) -> tuple[Tensor | None, Tensor | None]:
        if self.pool.dtype.itemsize > 1:
            return None, None
        shape = (batch.used.shape[0], layer.tp_k_head_num)
        one = torch.ones(1, device=batch.used.device)
        factors = (one if x is None else x.reshape(-1).float() for x in (layer.k_scale, layer.v_scale))
        k, v = (x.expand(shape) for x in factors)
        return k, v


def _location(forward_batch: Any) -> Any:
    """Where the step's tokens go, in the class that this SGLang has for it."""
    pools = importlib.import_module("sglang.srt.mem_cache.memory_pool")
    kind = getattr(pools, "KVWriteLoc", None)
    return forward_batch.out_cache_loc if kind is None else kind(forward_batch.out_cache_loc)
