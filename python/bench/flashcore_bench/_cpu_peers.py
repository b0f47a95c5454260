"""Attention of other libraries on the CPU, from their wheels: vLLM's kernel and llama.cpp's.

Neither library is imported. vLLM's operators are loaded from the shared library in its package. The wheel of
xllamacpp exports ggml's functions.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._features import Call

#: Rows of a page of vLLM's cache; its kernel takes multiples of 32.
_PAGE = 32
#: ggml's numbers of the types.
_F32, _BF16 = 0, 30


def _package(name: str) -> Path:
    """The folder of a package, which is not imported."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"no package {name}")
    return Path(next(iter(spec.submodule_search_locations)))


def vllm(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: float) -> Call:
    """vLLM's attention over its paged cache. ``q`` is ``(batch, heads, dim)``, ``k`` and ``v`` are ``(batch, rows,
    heads, dim)`` in q's type. With a ``factor`` other than 1, the cache is in e4m3 with this factor."""
    has_amx, has_avx512 = torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx512_supported()
    name = "_C" if has_amx else "_C_AVX512" if has_avx512 else "_C_AVX2"
    torch.ops.load_library(str(_package("vllm") / f"{name}.abi3.so"))
    operators: Any = torch.ops._C
    (batch, heads, dim), (_, rows, heads_k, _) = q.shape, k.shape
    kind = "auto" if factor == 1.0 else "fp8_e4m3"
    isa = "amx" if has_amx and q.dtype == torch.bfloat16 else "vec"
    each = -(-rows // _PAGE)
    shape = (batch * each, heads_k, 2 * _PAGE, dim)
    # Both caches are halves of one tensor.
    caches = torch.zeros(shape, dtype=q.dtype if factor == 1.0 else torch.uint8).chunk(2, dim=2)
    slots = (torch.arange(batch)[:, None] * each * _PAGE + torch.arange(rows)).flatten()
    new = [x.reshape(batch * rows, heads_k, dim) for x in (k, v)]
    operators.cpu_attn_reshape_and_cache(*new, *caches, slots, isa, factor, factor, kind)
    table = torch.arange(batch * each, dtype=torch.int32).reshape(batch, each)
    starts, out = torch.arange(batch + 1, dtype=torch.int32), torch.empty_like(q)
    plan = operators.get_scheduler_metadata(
        batch, heads, heads_k, dim, lengths, q.dtype, starts, True, -1, isa, True, None, kind
    )

    def call() -> Tensor:
        operators.cpu_attention_with_kv_cache(
            q, *caches, out, starts, lengths, dim**-0.5, True, None, -1, table, 0.0, plan, None, None, factor, factor,
            kind,
        )  # fmt: skip
        return out[:, None]

    return call


class _Parameters(ctypes.Structure):
    """``ggml_init_params``."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _ggml() -> Any:
    """ggml's functions, with their types."""
    (library,) = _package("xllamacpp").glob("xllamacpp*.so")
    ggml, address, real = ctypes.CDLL(str(library)), ctypes.c_void_p, ctypes.c_float
    types: dict[str, tuple[Any, list[Any]]] = {
        "init": (address, [_Parameters]),
        "free": (None, [address]),
        "new_tensor_4d": (address, [address, ctypes.c_int, *[ctypes.c_int64] * 4]),
        "get_data": (address, [address]),
        "flash_attn_ext": (address, [*[address] * 5, real, real, real]),
        "new_graph": (address, [address]),
        "build_forward_expand": (None, [address, address]),
        "graph_compute_with_ctx": (ctypes.c_int, [address, address, ctypes.c_int]),
    }
    for name, (result, arguments) in types.items():
        function = getattr(ggml, f"ggml_{name}")
        function.restype, function.argtypes = result, arguments
    return ggml


class _LlamaCpp:
    """A graph with one operation, ``flash_attn_ext``: queries in float32, keys and values in bfloat16."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._ggml = ggml = _ggml()
        (batch, heads, dim), (_, rows, heads_k, _) = q.shape, k.shape
        room = 2 * 2 * k.numel() + 2 * 4 * q.numel()  # the tensors; the computation takes memory beside them
        self._context = ggml.ggml_init(_Parameters(room + (256 << 20), None, False))
        shape = (dim, rows, heads_k, batch)
        values = [(q.float(), _F32, (dim, 1, heads, batch)), *((x.transpose(1, 2), _BF16, shape) for x in (k, v))]
        tensors = []
        for x, kind, extents in values:
            tensor = ggml.ggml_new_tensor_4d(self._context, kind, *extents)
            dense = x.contiguous()
            ctypes.memmove(ggml.ggml_get_data(tensor), dense.data_ptr(), dense.nbytes)
            tensors.append(tensor)
        out = ggml.ggml_flash_attn_ext(self._context, *tensors, None, dim**-0.5, 0.0, 0.0)
        self._graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(self._graph, out)
        memory = (ctypes.c_float * q.numel()).from_address(ggml.ggml_get_data(out))
        self._out = torch.frombuffer(memory, dtype=torch.float32).view(batch, 1, heads, dim)

    def __call__(self) -> Tensor:
        self._ggml.ggml_graph_compute_with_ctx(self._context, self._graph, torch.get_num_threads())
        return self._out

    def __del__(self) -> None:
        if hasattr(self, "_context"):
            self._ggml.ggml_free(self._context)


def llama_cpp(q: Tensor, k: Tensor, v: Tensor) -> Call:
    """llama.cpp's attention on dense caches of equal lengths, heads before rows. The shapes are those of
    :func:`vllm`; keys and values are in bfloat16."""
    return _LlamaCpp(q, k, v)
