"""The context manager that chooses launches to record. No program here launches any: there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import flashcore_check
import pytest

PROGRAM = """
import flashcore_check
with flashcore_check.capture("attention", at=[1, 3], after=True):
    print("inside")
"""


def test_a_program_under_the_command_chooses_launches() -> None:
    command = os.environ.get("FLASHCORE_COMMAND", "flashcore")
    run = [command, "capture", "--json", "--", sys.executable, "-c", PROGRAM]
    done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The program's own output is not in that of the command.
    assert "inside" in done.stderr
    assert json.loads(done.stdout) == {"counts": {}, "launches": [], "schema": "flashcore.capture/1"}


def test_without_the_command_it_is_refused() -> None:
    with (
        pytest.raises(RuntimeError, match="`flashcore capture -- python …` has started"),
        flashcore_check.capture("attention"),
    ):
        pass
    for kernel, at in (("", 1), ("attention", 0), ("attention", [])):
        refused = pytest.raises(ValueError, match="expected a name and numbers from 1")
        with refused, flashcore_check.capture(kernel, at):  # type: ignore[arg-type]
            pass
