"""Runs the tests of another project under flashcore-check and counts what came out.

    PYTHONPATH=python/check/tools pytest --flashcore -p survey --survey out.jsonl TESTS
    python python/check/tools/survey.py out.jsonl
    python python/check/tools/survey.py out.jsonl --row PROJECT COMMIT TRITON >> xtask/corpus/suites.jsonl

Of each test function the smallest set of parameters runs, for at most 60 seconds of processor time. The first
command writes a line for each test, the second one prints the counts: tests that ran, tests that did not by
reason, hazards. The third one prints them as one row of the guide's table, which `cargo xtask corpus` writes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from flashcore_check._session import current

#: Errors that say that a launch has no verdict.
_NO_VERDICT = "IncompleteError"


class TestTimeout(BaseException):
    """A test took longer than its seconds. No ``except Exception`` of a test catches it."""


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("survey")
    group.addoption("--survey", metavar="FILE", help="write a line for each test to FILE")
    group.addoption("--survey-seconds", type=int, default=60, help="time limit of a test (default: 60)")
    group.addoption("--survey-all", action="store_true", help="run all sets of parameters")
    group.addoption("--survey-part", default="0/1", help="run part I of N, I/N, by the order of the functions")


def _numbers(value: Any) -> Iterator[float]:
    """The numbers in a parameter: shapes, sizes, counts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for element in value:
            yield from _numbers(element)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        yield abs(value)


def _size(item: Any) -> float:
    """The logarithm of the product of all numbers among the parameters of a test."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return sum(math.log2(1 + number) for value in parameters.values() for number in _numbers(value))


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keeps the smallest set of parameters of each test function."""
    if config.option.survey_all:
        return
    functions: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.split("[")[0]].append(item)
    part, parts = map(int, config.option.survey_part.split("/"))
    kept = [min(group, key=_size) for at, group in enumerate(functions.values()) if at % parts == part]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def pytest_runtest_protocol(item: Any) -> None:
    item.user_properties.append(("began", _processor_seconds()))


def _processor_seconds() -> float:
    """Processor time of this process, of the emulator and of the children that ended."""
    times = os.times()
    seconds = times.user + times.system + times.children_user + times.children_system
    session = current()
    child = session.emulator._child if session else None
    if child is not None and child.poll() is None:
        fields = Path(f"/proc/{child.pid}/stat").read_text().rsplit(")", 1)[1].split()
        seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Generator[None, Any, Any]:
    limit, began = item.config.option.survey_seconds, _processor_seconds()

    def look(*_: Any) -> None:
        if _processor_seconds() - began > limit:
            raise TestTimeout(f"more than {limit} seconds")

    before = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1, 1)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def pytest_runtest_makereport(item: Any, call: Any) -> None:
    """Writes the line of a test after its call, or after a phase that did not pass."""
    if item.config.option.survey is None or call.when == "teardown" or (call.when == "setup" and not call.excinfo):
        return
    session = current()
    launches = session.launches if session and session.test == item.nodeid else []
    error = call.excinfo
    began = dict(item.user_properties)["began"]
    with open(item.config.option.survey, "a") as file:
        file.write(
            json.dumps(
                {
                    "test": item.nodeid,
                    "seconds": round(_processor_seconds() - began, 2),
                    "launches": len(launches),
                    "kernels": sorted({launch.kernel for launch in launches}),
                    "emulated": round(sum(launch.seconds for launch in launches), 2),
                    "hazards": [f"{launch.kernel}: {launch.text}" for launch in launches if launch.verdict == "failed"],
                    "error": error and error.type.__name__,
                    "said": error and _short(str(error.value)),
                }
            )
            + "\n"
        )


def _short(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return "\n".join(lines[:12])[:1500]


def category(test: dict[str, Any]) -> tuple[str, str]:
    """Whether the kernels of a test were judged, and why not."""
    error, said = test["error"], test["said"] or ""
    if test["hazards"]:
        return "ran", "hazard"
    if error is None:
        return "ran", "passed" if test["launches"] else "passed without a launch"
    if error == "Skipped":
        return "not run", "skipped by the suite: " + said.split("\n")[0][-100:]
    if error == "TestTimeout":
        return "not run", said
    if error == _NO_VERDICT:
        reason = said.split("\n")[1] if "\n" in said else said
        return "not run", "no verdict: " + re.sub(r"\bCTA .*|0x[0-9a-f]+", "…", reason)[:150]
    if error == "AssertionError" and test["launches"]:
        return "ran", "its own assertion failed"
    return "not run", f"{error}: " + said.split("\n")[0][:150]


def _row(tests: list[dict[str, Any]], project: str, commit: str, triton: str) -> dict[str, Any]:
    """The counts of a suite. A test without a kernel passed without a launch."""
    counts = Counter(category(test) for test in tests)
    skipped = sum(n for (_, reason), n in counts.items() if reason.startswith("skipped by the suite"))
    without = counts["ran", "passed without a launch"]
    return {
        "project": project,
        "commit": commit,
        "triton": triton,
        "functions": len(tests),
        "judged": sum(n for (state, _), n in counts.items() if state == "ran") - without,
        "without_kernel": without,
        "skipped": skipped,
        "not_run": sum(n for (state, _), n in counts.items() if state != "ran") - skipped,
        "hazards": counts["ran", "hazard"],
    }


def main(paths: list[str], row: list[str] | None) -> None:
    """Prints the counts of files that the plugin wrote."""
    latest = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            test = json.loads(line)
            latest[test["test"]] = test
    if row:
        print(json.dumps(_row(list(latest.values()), *row), separators=(",", ":")))
        return
    counts: Counter[tuple[str, str]] = Counter(category(test) for test in latest.values())
    for (state, reason), count in sorted(counts.items(), key=lambda pair: (pair[0][0] != "ran", -pair[1])):
        print(f"{count:5} {state:8} {reason}")
    kernels = {kernel for test in latest.values() for kernel in test["kernels"]}
    launches = sum(test["launches"] for test in latest.values())
    seconds = sum(test["seconds"] for test in latest.values())
    emulated = sum(test["emulated"] for test in latest.values())
    print(
        f"{len(latest)} test functions, {len(kernels)} kernels, {launches} launches; "
        f"{seconds:.0f} s, {emulated:.0f} s of them in the emulator"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="+", metavar="FILE")
    parser.add_argument("--row", nargs=3, metavar=("PROJECT", "COMMIT", "TRITON"))
    arguments = parser.parse_args()
    main(arguments.paths, arguments.row)
