"""What the shims of all peers share: it samples parameters, counts outcomes, and makes the CPU a GPU."""

from __future__ import annotations

import collections
import functools
import importlib.util
import random
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest import unittest

import flashcore_attn

_NOT_APPLICABLE = "not applicable: "
# The parameters that say how long a sequence or a cache is.
_ROWS = re.compile(r"seq_?len|kv_len|qo_len|num_tokens|num_blocks")


def not_applicable(reason: str) -> None:
    """Ends a test of a feature that FlashCore does not have."""
    pytest.skip(_NOT_APPLICABLE + reason)


def module(name: str, **members: Any) -> types.ModuleType:
    """Makes a module that tests import."""
    made = types.ModuleType(name)
    made.__path__ = []  # type: ignore[attr-defined]
    made.__dict__.update(members)
    sys.modules[name] = made
    return made


def load(name: str, path: Path) -> Any:
    """Loads a file of the peer as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


class Anything(types.ModuleType):
    """A module of which every name exists, is a decorator that changes nothing, and can be subscripted."""

    def __init__(self, name: str = "anything") -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return Anything(name)

    def __call__(self, *args: Any, **_: Any) -> Any:
        # A decorator's function, or the number of a scalar.
        return args[0] if args and (callable(args[0]) or isinstance(args[0], (int, float))) else self

    def __getitem__(self, _: Any) -> Any:
        return self

    def __or__(self, _: Any) -> Any:
        return self

    __ror__ = __or__


class Outcomes:
    """A pytest plugin."""

    def __init__(self, sample: int, most: int, skipped: dict[str, str]) -> None:
        self.sample, self.most, self.skipped = sample, most, skipped
        self.counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.reasons: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_generate_tests(self, metafunc: Any):
        """Samples while pytest multiplies the parameters, which takes minutes for all of them."""
        original, number = metafunc.parametrize, 1
        draw = random.Random(metafunc.function.__name__)

        def parametrize(*args: Any, **named: Any) -> None:
            nonlocal number
            before = max(len(metafunc._calls), 1)
            original(*args, **named)
            number *= len(metafunc._calls) // before
            keep(64 * self.sample)

        def keep(most: int) -> None:
            kept = [call for call in metafunc._calls if _rows(call.params) <= self.most] or metafunc._calls[:1]
            metafunc._calls = draw.sample(kept, most) if 0 < most < len(kept) else kept

        metafunc.parametrize = parametrize
        yield
        keep(self.sample)
        self.counts[_test(metafunc.definition)]["parameters"] = number
        if reason := self._skipped(metafunc.definition):
            self.counts[_test(metafunc.definition)]["not applicable"] = number
            self.reasons[reason] += number

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        small = lambda item: not hasattr(item, "callspec") or _rows(item.callspec.params) <= self.most  # noqa: E731
        by_test: dict[tuple[str, str], list[pytest.Function]] = collections.defaultdict(list)
        for item in items:
            by_test[_test(item)].append(item)
        drawn: set[pytest.Function] = set()
        for test, parameters in by_test.items():
            if isinstance(parameters[0], unittest.TestCaseFunction):  # whose parameters pytest does not multiply
                self._of_a_class(test, parameters)
            drawn.update(parameters)
        items[:] = [item for item in items if item in drawn and not self._skipped(item) and small(item)]

    def _of_a_class(self, test: tuple[str, str], parameters: list[pytest.Function]) -> None:
        """Counts and samples the parameters of a test of ``unittest``."""
        self.counts[test]["parameters"] = len(parameters)
        if reason := self._skipped(parameters[0]):
            self.counts[test]["not applicable"] = len(parameters)
            self.reasons[reason] += len(parameters)
        if 0 < self.sample < len(parameters):
            parameters[:] = random.Random(test[1]).sample(parameters, self.sample)

    def _skipped(self, item: Any) -> str | None:
        """Why a test is not applicable, by its name."""
        return next((why for word, why in self.skipped.items() if word in _test(item)[1]), None)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function, call: pytest.CallInfo):
        report = yield
        counts = self.counts[_test(item)]
        error = call.excinfo.value if call.excinfo else None
        if report.skipped:
            found = str(error)
            reason = found.removeprefix(_NOT_APPLICABLE) if found.startswith(_NOT_APPLICABLE) else "skips itself"
            counts["not applicable"] += 1
            self.reasons[reason] += 1
        elif report.failed and isinstance(error, flashcore_attn.UnsupportedError):
            counts["refused"] += 1
            self.reasons[f"refused: {error.reason}"] += 1
            report.outcome = "skipped"
        elif report.failed:
            counts["failed"] += 1
            self.failures.append(f"{item.nodeid}\n    {type(error).__name__}: {error}"[:600])
            # A run that is stopped has no table.
            print(f"FAILED {self.failures[-1]}", file=sys.stderr, flush=True)
        elif report.when == "call":
            counts["passed"] += 1
        return report

    def table(self) -> str:
        """Counts by test, the reasons, and what failed."""
        columns = ("parameters", "passed", "failed", "refused", "not applicable")
        lines = [f"| test | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
        total: collections.Counter[str] = collections.Counter()
        for (file, name), counts in sorted(self.counts.items()):
            lines.append(f"| {file} {name} | " + " | ".join(str(counts[column]) for column in columns) + " |")
            total.update(counts)
        lines.append("| **all** | " + " | ".join(str(total[column]) for column in columns) + " |")
        lines.append("")
        lines += [f"- {count}: {reason}" for reason, count in self.reasons.most_common()]
        lines += [f"- FAILED {failure}" for failure in self.failures]
        return "\n".join(lines)


def _test(item: pytest.Function) -> tuple[str, str]:
    name = getattr(getattr(item, "function", None), "of_test", None) or getattr(item, "originalname", item.name)
    return "/".join(item.path.parts[-2:]), name


def _rows(params: dict[str, Any]) -> int:
    """The longest sequence among the parameters of a test, as far as their names say."""
    named = [x for name, x in params.items() if _ROWS.search(name)]
    return max([x for x in _flat(named) if isinstance(x, int)], default=0)


def _flat(values: Any) -> Any:
    for x in values:
        yield from _flat(x) if isinstance(x, (list, tuple)) else (x,)


def cpu_for_cuda() -> None:
    """The device ``cuda`` means ``cpu``, of compute capability 9.0."""

    def device(x: Any) -> Any:
        is_cuda = (isinstance(x, str) and x.startswith("cuda")) or (isinstance(x, torch.device) and x.type == "cuda")
        return "cpu" if is_cuda else x

    def redirected(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(device, args), **{name: device(x) for name, x in kwargs.items()})

        return call

    names = "randn rand empty zeros ones full arange randint tensor randperm linspace empty_strided as_tensor"
    for name in names.split():
        setattr(torch, name, redirected(getattr(torch, name)))
    to = redirected(torch.Tensor.to)
    torch.Tensor.to = lambda x, *args, **named: to(  # type: ignore[method-assign]
        x, *("cpu" if type(given) is int else given for given in args), **named
    )
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign,assignment]
    import torch.nn.attention.flex_attention as flex

    flex.create_block_mask = redirected(flex.create_block_mask)
    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        total_memory=16 << 30, multi_processor_count=132, major=9, minor=0, name="none"
    )
    cuda.synchronize = cuda.empty_cache = lambda *_: None
    default = torch.set_default_device
    torch.set_default_device = lambda x: default(device(x))
