"""The device that tests see: a GPU that does not exist, of a given compute capability."""

from __future__ import annotations

from types import SimpleNamespace

from ._session import current

#: By compute capability times 10: name, shared memory of a CTA, shared memory of an SM, and number of SMs.
_GPUS = {
    80: ("NVIDIA A100-SXM4-80GB", 166912, 167936, 108),
    86: ("NVIDIA A10", 101376, 102400, 72),
    89: ("NVIDIA L4", 101376, 102400, 58),
    90: ("NVIDIA H200", 232448, 233472, 132),
    100: ("NVIDIA B200", 232448, 233472, 148),
}
ARCHS = tuple(_GPUS)
_MEMORY = 80 << 30


def _gpu() -> tuple[str, int, int, int]:
    session = current()
    return _GPUS[session.settings.arch if session else 90]


def capability() -> tuple[int, int]:
    """Major and minor compute capability."""
    session = current()
    return divmod(session.settings.arch if session else 90, 10)


def name() -> str:
    """The product name."""
    return _gpu()[0]


def properties_for_triton() -> dict[str, int]:
    """The properties that Triton reads from a driver."""
    _, shared, _, processors = _gpu()
    return {
        "max_shared_mem": shared,
        "max_num_regs": 65536,
        "multiprocessor_count": processors,
        "warpSize": 32,
        "sm_clock_rate": 1980000,
        "mem_clock_rate": 3201000,
        "mem_bus_width": 6144,
    }


def properties() -> SimpleNamespace:
    """The properties that PyTorch tells of a device."""
    called, shared, of_processor, processors = _gpu()
    major, minor = capability()
    return SimpleNamespace(
        name=called,
        major=major,
        minor=minor,
        total_memory=_MEMORY,
        multi_processor_count=processors,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048 if major * 10 + minor in (80, 90, 100) else 1536,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=of_processor,
        warp_size=32,
        L2_cache_size=50 << 20,
        gcnArchName="",
        uuid="",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


def attribute(number: int) -> int:
    """An attribute by its number in ``cudaDeviceAttr``; 0 for one that no program was seen to read."""
    told, (major, minor) = properties(), capability()
    known = {
        1: told.max_threads_per_block,
        8: told.shared_memory_per_block,
        10: told.warp_size,
        12: told.regs_per_multiprocessor,
        13: 1980000,
        16: told.multi_processor_count,
        38: told.L2_cache_size,
        39: told.max_threads_per_multi_processor,
        75: major,
        76: minor,
        81: told.shared_memory_per_multiprocessor,
        95: 1,
        97: told.shared_memory_per_block_optin,
    }
    return known.get(number, 0)


def memory() -> tuple[int, int]:
    """Free and total bytes."""
    return _MEMORY, _MEMORY
