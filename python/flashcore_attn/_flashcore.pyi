"""The Rust half of the package. Addresses are taken on trust: call it through :mod:`flashcore_attn`."""

from __future__ import annotations

from os import PathLike
from typing import Any

__version__: str

# What changes the answer besides the tensors: whether the band is aligned to the top left, the keys that a query sees
# before and after the one level with it (-1: all), the factor on the scores, and the cap on them (0: none).
Terms = tuple[bool, int, int, float | None, float]

_Address = int | None
# Batch entries, the longest sequences, and the addresses of the arrays of lengths.
_Lengths = tuple[int, int, int, list[_Address]]
# Address, code of the type, extents and strides in elements.
_Table = tuple[int, int, tuple[int, ...], tuple[int, ...]]
# Address, strides of batch entries, KV heads and blocks of rows, and the rows of a block (0: one factor per KV head).
_Scales = tuple[int, tuple[int, int, int], int]
# Address, batch entries, and entries for each of them.
_Pages = tuple[int, int, int]
# Lengths, the names and addresses of operands with a value per query head, the texts of the score and the mask
# program, parameters, tables, descale factors, the page table, and the addresses of O and the log-sum-exp from which
# the call continues.
DescribedFeatures = tuple[
    _Lengths | None, list[tuple[str, int]], str, str, tuple[float, ...], tuple[int, ...], list[_Table],
    list[_Scales | None], _Pages | None, tuple[int, ...] | None, tuple[float, int] | None, str,
]  # fmt: skip

# Address, shape and strides in elements.
_Handed = tuple[int, tuple[int, ...], tuple[int, ...]]

# Addresses and row strides of cosines and sines, the code of their type, their shape, whether pairs are interleaved,
# and the address of the positions.
_Rotary = tuple[list[tuple[int, int]], int, tuple[int, ...], bool, _Address]
# New keys and values, the address of their cumulative lengths, and the rotary embedding.
DescribedAppend = tuple[_Handed, _Handed, _Address, _Rotary | None]
# Whether each run must return equal bits, dO, the address of the gradient of the LSE, dQ, dK and dV, the address of the
# gradient of the sinks, and numbers of tables with the addresses of their gradients.
_Gradients = tuple[
    bool,
    tuple[int, tuple[int, ...]],
    _Address,
    list[tuple[int, tuple[int, ...]]],
    _Address,
    list[tuple[int, int]],
]

def attend(
    q: _Handed, k: _Handed, v: _Handed, out: tuple[int, tuple[int, ...]], lse: int | None, heads: int, dtypes: int,
    terms: Terms, place: tuple[int | None, int], features: DescribedFeatures | None = None,
    append: DescribedAppend | None = None, gradients: _Gradients | None = None,
) -> None:  # fmt: skip
    """Attention of tensors of four dimensions in their own order, in which ``heads`` is 1 or 2. ``place``: the ordinal
    of a GPU and a stream, or None for the host and the number of PyTorch's threads that share the work, 0 for none.
    With ``gradients``, the backward pass, which reads ``out`` and ``lse``.
    """

class Eager:
    """Eager calls of PyTorch's tensors. The functions return None for calls that are left to Python code."""

    def __init__(self, capsule: Any, functions: Any) -> None: ...
    def flash(self, *arguments: Any) -> Any: ...
    def varlen(self, *arguments: Any) -> Any: ...
    def sdpa(self, *arguments: Any) -> Any: ...
    def gradients(self, *arguments: Any) -> Any: ...
    def recorded(self, *arguments: Any) -> Any: ...

def merge_states(
    parts: list[tuple[int, int]],
    to: tuple[int, int],
    extents: tuple[int, ...],
    dtype: str,
    place: tuple[int | None, int],
) -> None:
    """Merges dense results of the ``extents`` batch, row, head and dim: the addresses of each part's rows and of its
    log-sum-exps ``(batch, head, row)``, and those of the result."""

# Address, shape and strides in elements, in the order page (or 1), row, head, dim.
_Rows = tuple[int, tuple[int, ...], tuple[int, ...]]

def write_slots(
    new: list[_Rows],
    caches: list[_Rows],
    dtypes: tuple[str, str],
    slots: tuple[int, int, bool],
    factors: list[tuple[int, int, int]] | None,
    place: tuple[int | None, int],
) -> None:
    """Writes keys and values to slots of a cache, or enqueues that: slots and factors are addresses, numbers, and
    whether slots have 64 bits, or the stride."""

# Name of the 8-bit type, rows that share a factor (0: all), the seed of the rotation, and whether keys are
# smoothed.
_Quantization = tuple[str, int, int | None, bool]

def quantize_cpu(
    name: str, tensor: _Handed, heads_kv: int, dtype: str, options: _Quantization, to: tuple[int, int],
    threads: int | None = None,
) -> None:  # fmt: skip
    """Quantises q, k or v on the host. ``to`` are the addresses of the dense codes ``[batch, head, sequence, dim]`` and
    of the dense factors."""

def quantize_gpu(
    name: str, tensor: _Handed, heads_kv: int, dtype: str, options: _Quantization, to: tuple[int, int], ordinal: int,
    stream: int,
) -> None:  # fmt: skip
    """Enqueues the quantisation of q, k or v on a GPU's memory, as :func:`quantize_cpu` computes it."""

def describe_cpu() -> tuple[list[str], int]:
    """Instruction sets of this processor, best first, and the threads that share a call."""

def explain(
    q: _Handed, k: _Handed, v: _Handed, out: tuple[int, ...], heads: int, dtypes: int, terms: Terms, ordinal: int,
) -> dict[str, Any]:  # fmt: skip
    """The plan that such a call of :func:`attend` gets, and what it was compiled to."""

def lacks_gradients(ordinal: int | None, call: tuple[Any, ...]) -> str | None:
    """Why a GPU, or the CPU, computes no gradients of such calls; None if it does. Compiles nothing."""

def describe_gpus() -> list[str]:
    """The GPUs that the driver sees, a line each."""

def cache_folder() -> PathLike[str] | None:
    """Where compiled kernels are kept."""

def check_gpu(ordinal: int) -> None:
    """Raises why attention cannot be computed on a device, if so. Compiles nothing."""

HAS_SEARCH: bool
"""Whether the module was built with the search: what follows, down to ``ledger_check``."""

class Evolution:
    """A run of the evolution, from a configuration as JSON: ask what to evaluate, tell what came of it."""

    def __init__(self, wanted: str) -> None: ...
    def ask(self) -> str:
        """``{"task": ..., "device": bool}``, ``"wait"`` or ``"done"``, as JSON."""

    def tell(self, outcome: str) -> None:
        """Takes in an outcome, once however often it comes."""

    def stop(self) -> None: ...
    def report(self) -> str: ...
    def progress(self) -> str: ...
    @property
    def run(self) -> int: ...

def check_problems(argument: str, words: list[str]) -> None:
    """Raises where one of the words states no problem."""

def evaluate(task: str) -> str:
    """The outcome of a task, both JSON. Runs without the GIL, one at a time in a process."""

def lost(task: str, reason: str, detail: str, seconds: float) -> str:
    """The outcome of a task whose evaluation never came back."""

def describe_card(ordinal: int) -> str:
    """A GPU of this machine, as JSON, for a run that is begun elsewhere."""

def ledger_check(path: str) -> str:
    """Whether a ledger is sound, rows of its tables of facts, and its runs, as JSON."""
