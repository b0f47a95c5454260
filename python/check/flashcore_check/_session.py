"""The launches of a test session: how they are checked, and what came out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._emulator import Answer, Emulator
from ._memory import Memory

CHECKS = ("once", "thorough", "none")


class HazardError(AssertionError):
    """A launch has a hazard: a data race, an access out of bounds, a deadlock."""

    __module__ = "flashcore_check"


class IncompleteError(RuntimeError):
    """A launch has no verdict: an instruction that the emulator does not know, or no end within the time."""

    __module__ = "flashcore_check"


@dataclass
class Settings:
    """How launches are checked."""

    #: ``once`` (one schedule), ``thorough`` (several schedules) or ``none`` (results only).
    checks: str = "once"
    #: Seconds of a launch, after which it is incomplete.
    seconds: float = 60.0
    #: Compute capability of the device, times 10.
    arch: int = 90
    #: Kinds of hazards that do not fail a test.
    allow: frozenset[str] = frozenset()
    #: Whether an autotuner launches all its configurations, each checked; otherwise the first that compiles.
    all_configs: bool = False


@dataclass
class Launch:
    """A launch that ran."""

    kernel: str
    grid: tuple[int, int, int]
    verdict: str
    #: Whether the same launch on the same memory passed before, so that only its results were computed.
    kept: bool
    seconds: float
    #: The causes, as ``flashcore check --json`` prints them.
    hazards: list[dict[str, Any]] = field(default_factory=list)
    #: The findings in words, as ``flashcore check`` prints them.
    text: str = ""


@dataclass
class Totals:
    """Counts for the end of a run, which workers of pytest-xdist send to the main process."""

    kernels: set[str] = field(default_factory=set)
    launches: int = 0
    kept: int = 0
    seconds: float = 0.0
    verdicts: Counter[str] = field(default_factory=Counter)
    #: By kernel and sentence, the tests that saw the hazard.
    hazards: dict[str, list[str]] = field(default_factory=dict)
    incomplete: dict[str, int] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The totals in types that every channel can send."""
        return {**dataclasses.asdict(self), "kernels": sorted(self.kernels), "verdicts": dict(self.verdicts)}

    def add(self, other: dict[str, Any]) -> None:
        """Adds what :meth:`plain` returned in another process."""
        self.kernels |= set(other["kernels"])
        self.launches += other["launches"]
        self.kept += other["kept"]
        self.seconds += other["seconds"]
        self.verdicts.update(other["verdicts"])
        for sentence, tests in other["hazards"].items():
            self.hazards.setdefault(sentence, []).extend(tests)
        for reason, count in other["incomplete"].items():
            self.incomplete[reason] = self.incomplete.get(reason, 0) + count


class Verdicts:
    """Launches that passed, by their hash; with a folder also those of earlier runs."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._passed: set[str] = set()

    def has(self, key: str) -> bool:
        return key in self._passed or (self._folder is not None and (self._folder / key).exists())

    def keep(self, key: str) -> None:
        self._passed.add(key)
        if self._folder is not None:
            try:
                (self._folder / key).touch()
            except OSError:
                # A cache that cannot be written costs time only.
                self._folder = None


class Session:
    """Runs launches in the emulator and keeps what came out."""

    def __init__(
        self, settings: Settings | None = None, emulator: Emulator | None = None, verdicts: Verdicts | None = None
    ) -> None:
        self.settings = settings or Settings()
        self.emulator = emulator or Emulator()
        self.verdicts = verdicts or Verdicts()
        self.totals = Totals()
        #: The launches since the last :meth:`begin`.
        self.launches: list[Launch] = []
        self.test = ""

    def begin(self, test: str) -> None:
        """Starts a test, whose launches are counted on their own."""
        self.test = test
        self.launches = []

    def hazards(self) -> list[Launch]:
        """The launches of the test that failed."""
        return [launch for launch in self.launches if launch.verdict == "failed"]

    def run(self, kernel: str, ptx: str, described: dict[str, Any], memory: Memory) -> Launch:
        """Runs a launch on the memory of this process and stores its results there.

        Raises:
            HazardError: the launch has a hazard that the settings do not allow.
            IncompleteError: there is no verdict.
        """
        __tracebackhide__ = True
        header = {**described, **memory.header(), "ptx": ptx, "seconds": self.settings.seconds}
        # Triton orders memory by shuffles, and its kernels cannot call __syncwarp.
        header["warp_order"] = "assume"
        key = self._key(header, memory)
        checks = self.settings.checks
        kept = checks != "none" and self.verdicts.has(key)
        header["checks"] = "none" if kept else checks
        began = time.perf_counter()
        answer, outputs = self.emulator.run(header, memory.contents())
        memory.store(outputs)
        launch = self._launch(kernel, described, answer, kept, time.perf_counter() - began)
        for printed in answer["printed"]:
            print(printed["text"], end="")
        if launch.verdict == "passed" and checks != "none":
            # A comment of the source may be gone in the next run.
            if not any(note["allowed"] for note in answer["notes"]):
                self.verdicts.keep(key)
        elif launch.verdict == "failed":
            raise HazardError(_message(launch, answer))
        elif launch.verdict == "incomplete":
            raise IncompleteError(_message(launch, answer))
        return launch

    def _key(self, header: dict[str, Any], memory: Memory) -> str:
        hashed = hashlib.sha256()
        allowed = sorted(self.settings.allow)
        hashed.update(json.dumps([self.emulator.version(), self.settings.checks, allowed, header]).encode())
        for part in memory.contents():
            hashed.update(part)
        return hashed.hexdigest()

    def _launch(self, kernel: str, described: dict[str, Any], answer: Answer, kept: bool, seconds: float) -> Launch:
        allowed = [cause for cause in answer["hazards"] if cause["kind"] in self.settings.allow]
        verdict = answer["verdict"]
        if verdict == "failed" and len(allowed) == len(answer["hazards"]) > 0:
            verdict = "passed"
        grid = tuple(described["launch"]["grid"])
        launch = Launch(kernel, grid, verdict, kept, seconds, answer["hazards"], answer["text"])
        self.launches.append(launch)
        totals = self.totals
        totals.kernels.add(kernel)
        totals.launches += 1
        totals.kept += kept
        totals.seconds += seconds
        totals.verdicts[verdict] += 1
        if verdict == "failed":
            for reason in answer["reasons"]:
                totals.hazards.setdefault(f"{kernel}: {reason}", []).append(self.test)
        elif verdict == "incomplete":
            for reason in answer["reasons"]:
                said = f"{kernel}: {reason}"
                totals.incomplete[said] = totals.incomplete.get(said, 0) + 1
        return launch


def _message(launch: Launch, answer: Answer) -> str:
    grid = ", ".join(map(str, launch.grid))
    runs = "1 run" if answer["runs"] == 1 else f"{answer['runs']} runs"
    return f"{launch.verdict} after {runs} of {launch.kernel}, grid ({grid})\n{launch.text.rstrip()}"


_current: Session | None = None


def current() -> Session | None:
    """The session whose device tests use, if any."""
    return _current


def set_current(session: Session | None) -> None:
    global _current
    _current = session
