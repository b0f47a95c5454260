"""FlashCore: fused attention that needs only the NVIDIA driver, and also runs on CPUs.

>>> import numpy as np, flashcore_attn
>>> q = np.random.rand(1, 128, 8, 64).astype(np.float16)  # batch, sequence, heads, head_dim
>>> out = flashcore_attn.flash_attn_func(q, q, q, causal=True)
>>> out.shape
(1, 128, 8, 64)

:func:`flash_attn_func` follows FlashAttention, :func:`scaled_dot_product_attention` follows PyTorch. Both take PyTorch
tensors (on a GPU or not), NumPy arrays, and arrays with DLPack, and return the same kind where its library can make
one from DLPack, else NumPy arrays or, on a GPU, PyTorch tensors. Nothing is copied as long as the last dimension is
contiguous. Element types are float16, bfloat16 and float32; sums are always float32. :func:`quantize` makes 8-bit
tensors, which :func:`flash_attn_func` takes too.
:func:`flash_attn_func` also takes sliding windows and caps on the scores; :func:`flash_attn_qkvpacked_func` and
:func:`flash_attn_kvpacked_func` take packed tensors.

:mod:`flashcore_attn.compat` sends an existing model's attention here, ``python -m flashcore_bench`` measures it
against every other implementation present, :mod:`flashcore_attn.ray` evolves kernels on a cluster, and :func:`doctor`
says what this machine can do.
"""

from __future__ import annotations

from . import compat
from ._blocks import BlockSparseTensors, block_sparse_mask
from ._doctor import doctor
from ._errors import (
    ArgumentError,
    DeviceError,
    DeviceMemoryError,
    DTypeError,
    FlashCoreError,
    GroupError,
    LedgerError,
    UnsupportedError,
)
from ._flashcore import __version__
from ._flex import flex_attention, table
from ._functional import explain, flash_attn_func, scaled_dot_product_attention
from ._kvcache import flash_attn_with_kvcache
from ._merge import merge_states
from ._packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from ._padding import pad_input, unpad_input
from ._prefix import flash_attn_with_shared_prefix
from ._quantize import Quantized, quantize
from ._slots import reshape_and_cache
from ._varlen import flash_attn_varlen_func

__all__ = [
    "ArgumentError",
    "BlockSparseTensors",
    "DTypeError",
    "DeviceError",
    "DeviceMemoryError",
    "FlashCoreError",
    "GroupError",
    "LedgerError",
    "Quantized",
    "UnsupportedError",
    "__version__",
    "block_sparse_mask",
    "compat",
    "doctor",
    "explain",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "flash_attn_with_shared_prefix",
    "flex_attention",
    "merge_states",
    "pad_input",
    "quantize",
    "reshape_and_cache",
    "scaled_dot_product_attention",
    "table",
    "unpad_input",
]


def __dir__() -> list[str]:
    return sorted(__all__)
