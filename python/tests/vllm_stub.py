"""Five generations of vLLM: the parts that an attention backend meets, and the cache of FlashAttention."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any, Generic, TypeVar

#: The shape of a layer's cache by generation; from 0.29 on, a backend is not asked for one.
GENERATIONS = ("0.22", "0.23", "0.26", "0.29", "0.33")

T = TypeVar("T")


class Group:
    """The ranks of decode context parallelism, of which this process is one."""

    rank_in_group = 0
    exchange: Any = None

    def all_gather(self, x: Any, dim: int) -> Any:
        return self.exchange(x, dim)


def shape_of(generation: str, pages: int, rows: int, heads: int, dim: int) -> tuple[int, ...]:
    return {
        "0.22": (2, pages, rows, heads, dim),
        "0.23": (pages, 2, rows, heads, dim),
    }.get(generation, (pages, heads, rows, 2 * dim))


def install(monkeypatch: Any, generation: str, ranks: int = 1, shape: Any = None) -> types.SimpleNamespace:
    """Puts the modules into place, and imports the backend afresh."""
    registered: dict[Any, str] = {}

    class AttentionType(str, enum.Enum):
        DECODER = "decoder"
        ENCODER = "encoder"
        ENCODER_ONLY = "encoder_only"
        ENCODER_DECODER = "encoder_decoder"

    class AttentionCGSupport(enum.Enum):
        ALWAYS = 3
        NEVER = 0

    class AttentionBackend:
        pass

    class AttentionMetadataBuilder(Generic[T]):
        def __init__(self, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any) -> None:
            self.device = device

    class AttentionImpl(Generic[T]):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            self = super().__new__(cls)
            self.dcp_world_size = ranks
            return self

    class FlashAttentionBackend:
        pass

    if generation in ("0.29", "0.33"):
        AttentionBackend.supported_kv_cache_layouts = classmethod(lambda cls: None)
    else:
        FlashAttentionBackend.get_kv_cache_shape = staticmethod(shape or (lambda *a: shape_of(generation, *a)))

    class AttentionBackendEnum(enum.Enum):
        FLASH_ATTN = "flash"
        CUSTOM = None

        def is_overridden(self) -> bool:
            return self in registered

        def get_path(self) -> str:
            return registered[self]

    def register_backend(backend: Any, class_path: str) -> Any:
        registered[backend] = class_path

    group = Group()
    parallel = types.SimpleNamespace(decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=1)
    scheduler = types.SimpleNamespace(max_num_seqs=8)
    config = types.SimpleNamespace(parallel_config=parallel, scheduler_config=scheduler)

    def local(lengths: Any, size: int, rank: int, interleave: int) -> Any:
        return (lengths - rank + size - 1) // size

    modules = {
        "vllm": {},
        "vllm.config": {"get_current_vllm_config": lambda: config},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {"get_dcp_group": lambda: group},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backend": {
            "AttentionBackend": AttentionBackend, "AttentionCGSupport": AttentionCGSupport,
            "AttentionImpl": AttentionImpl, "AttentionMetadataBuilder": AttentionMetadataBuilder,
            "AttentionType": AttentionType, "MultipleOf": lambda base: ("multiple of", base),
        },
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backends.flash_attn": {"FlashAttentionBackend": FlashAttentionBackend},
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum, "register_backend": register_backend,
        },
        "vllm.v1.attention.backends.utils": {"get_dcp_local_seq_lens": local},
        "vllm.v1.attention.ops": {},
    }  # fmt: skip
    for name, values in modules.items():
        module = types.ModuleType(name)
        module.__path__ = []
        for key, value in values.items():
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, name, module)
    backend = "flashcore_attn.engines._vllm_backend"
    monkeypatch.delitem(sys.modules, backend, raising=False)
    loaded = __import__(backend, fromlist=["Backend"])
    monkeypatch.setitem(sys.modules, backend, loaded)
    return types.SimpleNamespace(
        backend=loaded, config=config, group=group, registered=registered, enum=AttentionBackendEnum,
        types=AttentionType, graphs=AttentionCGSupport,
    )  # fmt: skip
