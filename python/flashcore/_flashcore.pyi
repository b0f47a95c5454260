"""The Rust half of the package. Addresses are taken on trust: call it through :mod:`flashcore`."""

from __future__ import annotations

__version__: str

_Described = tuple[int, tuple[int, int, int, int], tuple[int, int, int, int]]

def attention_cpu(
    q: _Described,
    k: _Described,
    v: _Described,
    out: _Described,
    lse: int | None,
    dtype: str,
    causal: bool,
    scale: float | None,
) -> None:
    """Attention of tensors on the host: address, shape and strides in the order batch, head, sequence, dim."""

def describe_cpu() -> tuple[list[str], int]:
    """Instruction sets of this processor, best first, and the threads that share a call."""
