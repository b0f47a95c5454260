"""The pytest plugin: options, the marker ``flashcore``, the fixture ``check_launches`` and the summary."""

from __future__ import annotations

import os
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from . import _device
from ._active import Active
from ._emulator import CommandError, Emulator
from ._session import CHECKS, HazardError, IncompleteError, Session, Settings, Verdicts

_SETTINGS = ("checks", "seconds", "allow")
#: The most hazards and reasons that the summary lists.
_LISTED = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flashcore", "GPU kernels in FlashCore's emulator, without a GPU")
    group.addoption("--flashcore", action="store_true", help="run the GPU kernels of all tests in the emulator")
    group.addoption(
        "--flashcore-checks",
        choices=CHECKS,
        default="once",
        help="check each launch on one schedule, or thoroughly on several, or compute its results only",
    )
    group.addoption(
        "--flashcore-seconds",
        type=_positive,
        default=60.0,
        metavar="SECONDS",
        help="time limit of a launch, beyond which it has no verdict and its test fails (default: 60)",
    )
    group.addoption(
        "--flashcore-arch",
        type=int,
        choices=_device.ARCHS,
        default=90,
        help="compute capability of the device, times 10 (default: 90)",
    )
    group.addoption(
        "--flashcore-all-configs",
        action="store_true",
        help="run every configuration of an autotuned kernel; default: the first that compiles",
    )
    group.addoption(
        "--flashcore-recheck",
        action="store_true",
        help="check launches again that passed in an earlier run",
    )


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise ValueError("expected a number of seconds above 0")
    return value


class Plugin:
    """The state of a run of pytest."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.settings = Settings(
            checks=options.flashcore_checks,
            seconds=options.flashcore_seconds,
            arch=options.flashcore_arch,
            all_configs=options.flashcore_all_configs,
        )
        self.session = Session(self.settings, Emulator(threads=_threads()))
        self.active: Active | None = None
        self.is_everywhere = bool(options.flashcore)

    def start(self) -> Active:
        if self.active is None:
            self.active = Active(self.session)
        return self.active

    def stop(self) -> None:
        if self.active is not None:
            self.active.end()
            self.active = None


def _threads() -> int | None:
    """Threads of the emulator beside other workers of pytest-xdist; ``None`` for all cores."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    return max(1, (os.cpu_count() or 1) // workers) if workers > 1 else None


_KEY = pytest.StashKey[Plugin]()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Starts before any conftest.py is imported, which may ask for a GPU."""
    plugin = Plugin(early_config.known_args_namespace)
    early_config.stash[_KEY] = plugin
    if plugin.is_everywhere:
        try:
            plugin.session.emulator.version()
            plugin.start()
        except (CommandError, RuntimeError) as error:
            raise pytest.UsageError(f"flashcore: {error}") from error


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "flashcore(checks, seconds, allow): run the GPU kernels of the test in FlashCore's emulator"
    )
    if _KEY not in config.stash:
        plugin = Plugin(config.option)
        config.stash[_KEY] = plugin
        if plugin.is_everywhere:
            plugin.start()
    plugin = config.stash[_KEY]
    cache = getattr(config, "cache", None)
    if cache is not None and not plugin.options.flashcore_recheck:
        plugin.session.verdicts = Verdicts(Path(cache.mkdir("flashcore")))


def pytest_unconfigure(config: pytest.Config) -> None:
    plugin = config.stash.get(_KEY, None)
    if plugin is not None:
        plugin.stop()
        plugin.session.emulator.close()


def pytest_report_header(config: pytest.Config) -> list[str]:
    plugin = config.stash[_KEY]
    if not plugin.is_everywhere:
        return []
    major, minor = divmod(plugin.settings.arch, 10)
    lines = [f"flashcore: {plugin.session.emulator.version()}, device of compute capability {major}.{minor}"]
    return lines + [f"flashcore: {note}" for note in (plugin.active.notes if plugin.active else [])]


def _marked(item: pytest.Item) -> dict[str, Any] | None:
    """The settings of the marker; ``None`` without one."""
    found = item.get_closest_marker("flashcore")
    if found is None:
        return {} if "check_launches" in getattr(item, "fixturenames", ()) else None
    unknown = sorted(set(found.kwargs) - set(_SETTINGS))
    if unknown or found.args:
        wrong = unknown[0] if unknown else found.args[0]
        raise pytest.UsageError(
            f"{item.nodeid}: invalid argument {wrong!r} of the marker flashcore: expected {', '.join(_SETTINGS)}"
        )
    if found.kwargs.get("checks", "once") not in CHECKS:
        raise pytest.UsageError(
            f"{item.nodeid}: invalid value {found.kwargs['checks']!r} for checks: expected {', '.join(CHECKS)}"
        )
    return dict(found.kwargs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: Any) -> Generator[None, object, object]:
    plugin = item.config.stash[_KEY]
    marked = _marked(item)
    if marked is None and not plugin.is_everywhere:
        return (yield)
    session = plugin.session
    given = marked or {}
    session.settings = replace(plugin.settings, **{**given, "allow": frozenset(given.get("allow", ()))})
    session.begin(item.nodeid)
    plugin.start()
    try:
        return (yield)
    finally:
        session.settings = plugin.settings
        if not plugin.is_everywhere:
            plugin.stop()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Fails a test that caught the error of a launch with a hazard."""
    result = yield
    session = item.config.stash[_KEY].session
    if session.test == item.nodeid and session.hazards() and "check_launches" not in item.fixturenames:  # type: ignore[attr-defined]
        pytest.fail(f"the test caught the error of a launch with a hazard\n{session.hazards()[0].text}", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Leaves the frames of the kernel language out of the report of a hazard."""
    if call.excinfo is not None and isinstance(call.excinfo.value, (HazardError, IncompleteError)):
        last = entry = call.excinfo.value.__traceback__
        while entry is not None:
            if not {"triton", "nvidia_cutlass_dsl", "flashcore_check"} & set(
                Path(entry.tb_frame.f_code.co_filename).parts
            ):
                last = entry
            entry = entry.tb_next
        if last is not None:
            last.tb_next = None
    return (yield)


@pytest.fixture
def check_launches(request: pytest.FixtureRequest) -> Any:
    """The launches of this test in the emulator: a list of :class:`flashcore_check.Launch` that grows.

    A test with this fixture sees the hazards itself and may expect one.
    """
    return request.config.stash[_KEY].session.launches


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["flashcore"] = session.config.stash[_KEY].session.totals.plain()


class _Workers:
    """Collects the totals of the workers of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        totals = getattr(node, "workeroutput", {}).get("flashcore")
        if totals is not None:
            self._config.stash[_KEY].session.totals.add(totals)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(_Workers(session.config), "flashcore-workers")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    totals = config.stash[_KEY].session.totals
    if totals.launches == 0:
        return
    terminalreporter.section("flashcore")
    found = [(sentence, _counted(len(set(tests)), "test")) for sentence, tests in totals.hazards.items()]
    found += [(f"no verdict: {said}", _counted(count, "launch")) for said, count in totals.incomplete.items()]
    for sentence, where in found[:_LISTED]:
        terminalreporter.write_line(f"{sentence} ({where})")
    if len(found) > _LISTED:
        terminalreporter.write_line(f"… and {len(found) - _LISTED} more")
    tests = {test for seen in totals.hazards.values() for test in seen}
    verdicts = totals.verdicts
    terminalreporter.write_line(
        f"{_counted(len(totals.kernels), 'kernel')}, {_counted(totals.launches, 'launch')}: "
        f"{verdicts['passed']} passed ({totals.kept} of them in an earlier check), {verdicts['failed']} failed, "
        f"{verdicts['incomplete']} without a verdict; {_counted(len(totals.hazards), 'hazard')} in "
        f"{_counted(len(tests), 'test')}; {totals.seconds:.1f} s in the emulator"
    )


def _counted(count: int, thing: str) -> str:
    ending = "" if count == 1 else "es" if thing.endswith("ch") else "s"
    return f"{count} {thing}{ending}"
