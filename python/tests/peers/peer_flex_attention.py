"""PyTorch's tests of FlexAttention, in which ``torch.compile`` means FlashCore.

The tests compare a compiled call with an eager call in the same type, and both with a call in float64. Eager
calls remain PyTorch's. Calls in a function that a test compiles, and calls of tests that compile nothing, are
FlashCore's. The tests also compare gradients, which PyTorch's own CPU kernels lack.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from runner import not_applicable

import flashcore_attn

FILES = ("test/inductor/test_flex_attention.py",)
OF_A_FILE = ("test_flex_attention",)

_COMPILER = "what PyTorch's compiler makes of a call: its code, its graphs, or how often it compiles"
_WORDS = "the words of PyTorch's errors"
_MASKS = "PyTorch's BlockMask alone"
_PAGES = "the bookkeeping of PyTorch's pages alone"
# Words in the names of tests of features that FlashCore does not have.
NOT_APPLICABLE = {
    "dynamic": _COMPILER,
    "respect_decompostion": _COMPILER,
    "epilogue_fused": _COMPILER,
    "logsumexp_only_return": _COMPILER,
    "kernel_options_argument": _COMPILER,
    "symbol_closure": _COMPILER,
    "graph_correctness": _COMPILER,
    "compiling_create_block_mask": _COMPILER,
    "captured_reduction": "a reduction of a captured tensor, which PyTorch refuses",
    "symmetric_bias": "a gradient of two reads of one tensor, which PyTorch refuses",
    "mixed_dtypes_fails": _WORDS,
    "error_message": _WORDS,
    "invalid_block_size": _WORDS,
    "block_mask_vs_sequence_lengths": _WORDS,
    "make_block_mask": _MASKS,
    "custom_block_mask_generator": _MASKS,
    "block_mask_attributes": _MASKS,
    "test_block_size": _MASKS,
    "test_getitem": _MASKS,
    "device_change": _MASKS,
    "block_mask_viz": _MASKS,
    "from_kv_blocks": _MASKS,
    "init_mismatched": _MASKS,
    "page_allocation": _PAGES,
    "test_allocate": _PAGES,
    "test_convert_": _PAGES,
    "test_update": _PAGES,
}
if not torch.cuda.is_available():
    NOT_APPLICABLE["mask_mod_combiners"] = "the number of blocks in 2048 rows"
# Tests that call `flex_attention` without `torch.compile` and compare it with another function.
_EAGER = ("head_bias_req_grad", "learnable_bias", "test_no_q_info", "lse_masked_output", "masked_out_rows_0_check",
          "stride_ordering")  # fmt: skip
#: The sequence length of most tests. Without a GPU it is shorter: float64 scores take gigabytes.
_LENGTH, _SHORTER = "S = 2048\n", "S = 256\n"

_depth = 0
_test = ""


@contextlib.contextmanager
def _served() -> Iterator[None]:
    """Inside, ``flex_attention`` is FlashCore's."""
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def _flex(original: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's function, or FlashCore's in its place."""

    @functools.wraps(original)
    def call(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not _depth and not any(word in _test for word in _EAGER):
            return original(query, key, value, *args, **kwargs)
        if query.dtype == torch.float64:
            if _depth and _test.startswith("test_logsumexp_correctness"):  # a compiled reference
                return original(query, key, value, *args, **kwargs)
            not_applicable("float64")
        return flashcore_attn.flex_attention(query, key, value, *args, **kwargs)

    return call


def _compile(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile``; of a test's function, FlashCore in place of compiled code."""

    def compiled(model: Any = None, **options: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller not in OF_A_FILE:
            return original(model, **options)
        if model is None:
            return functools.partial(compiled_of_test, **options)
        return compiled_of_test(model)

    def compiled_of_test(model: Any, **_: Any) -> Any:
        @functools.wraps(model.forward if isinstance(model, torch.nn.Module) else _function(model))
        def call(*args: Any, **kwargs: Any) -> Any:
            with _served():
                return model(*args, **kwargs)

        return call

    return compiled


def _function(model: Any) -> Any:
    return getattr(model, "func", model)


def _named(instantiate: Callable[..., Any]) -> Callable[..., Any]:
    """Notes at each of a class's tests which test it is a parameter of."""

    def instantiated(cls: type) -> type:
        tests = sorted((name for name in dir(cls) if name.startswith("test_")), key=len, reverse=True)
        made: type = instantiate(cls)
        for name in dir(made):
            if callable(function := getattr(made, name)) and name.startswith("test_"):
                of = next((test for test in tests if name == test or name.startswith(f"{test}_")), name)
                function.__dict__["of_test"] = of
        return made

    return instantiated


def pytest_runtest_setup(item: Any) -> None:
    """Notes which test runs next."""
    global _test
    _test = item.name
    if "specific_gate" in _test and "float16" in _test and not torch.cuda.is_available():
        # The gradient of a head's gate has thousands of terms, and its error is larger than FlashCore's.
        not_applicable("a float64 reference whose gradient PyTorch's CPU code adds up in 16 bits")


def prepared(path: Path) -> Path:
    """The file of tests; without a GPU, a copy with shorter sequences."""
    if torch._C._cuda_getDeviceCount() > 0:
        return path
    copy = Path(tempfile.mkdtemp()) / path.parent.name / path.name
    copy.parent.mkdir()
    copy.write_text(path.read_text().replace(_LENGTH, _SHORTER, 1))
    return copy


def install(folder: Path) -> None:
    """Puts FlashCore behind ``torch.compile`` of ``flex_attention``."""
    common = importlib.import_module("torch.testing._internal.common_utils")
    devices = importlib.import_module("torch.testing._internal.common_device_type")
    cuda = importlib.import_module("torch.testing._internal.common_cuda")
    for name in ("_inductor.test_case", "_inductor.utils", "_dynamo.testing", "utils._triton"):
        importlib.import_module(f"torch.{name}")
    flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
    if torch._C._cuda_getDeviceCount() == 0:
        flex._validate_device = lambda *_: None  # PyTorch's eager function has gradients on the CPU
        devices.flex_attention_supported_platform = lambda test: test
        cuda.PLATFORM_SUPPORTS_BF16 = True
        torch.utils._triton.has_triton = lambda *_, **__: True
        torch.cuda.is_available = _is_available(torch.cuda.is_available)
    paged: Any = importlib.import_module("torch.nn.attention.experimental._paged_attention")
    paged.PagedAttention.assign = _assign(paged.PagedAttention.assign)
    flex.flex_attention = _flex(flex.flex_attention)
    torch.compile = _compile(torch.compile)
    common.instantiate_parametrized_tests = _named(common.instantiate_parametrized_tests)


def _assign(original: Callable[..., None]) -> Callable[..., None]:
    """``PagedAttention.assign``, also with the positions of older tests, which all sequences share."""

    def assign(self: Any, batch_idx: Any, input_pos: Any, *args: Any) -> None:
        positions = input_pos if input_pos.ndim == 2 else input_pos.expand(len(batch_idx), -1)
        original(self, batch_idx, positions, *args)

    return assign


def _is_available(original: Callable[[], bool]) -> Callable[[], bool]:
    """Whether there is a GPU; the tests' module is told that there is one."""
    return lambda: sys._getframe(1).f_globals.get("__name__") in OF_A_FILE or original()
