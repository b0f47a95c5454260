"""The plugin under test runs suites of its own (pytester)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from flashcore_check import _session

pytest_plugins = ["pytester"]


@pytest.fixture
def session() -> Iterator[_session.Session]:
    """A session of its own, whose emulator ends with the test."""
    made = _session.Session()
    _session.set_current(made)
    yield made
    _session.set_current(None)
    made.emulator.close()


@pytest.fixture
def report_of(pytester: pytest.Pytester) -> Callable[..., str]:
    """Runs a suite with the plugin, compares its outcomes and returns what it prints."""

    def run(suite: str, **outcomes: int) -> str:
        pytester.makepyfile(test_suite=suite)
        result = pytester.runpytest_subprocess("--flashcore")
        result.assert_outcomes(**outcomes)
        return str(result.stdout)

    return run
