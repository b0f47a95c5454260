"""The plugin under test runs suites of its own (pytester)."""

from __future__ import annotations

from collections.abc import Iterator

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
