"""The command ``flashcore-check SCRIPT``: runs a Python script whose GPU kernels run in the emulator."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__, _device
from ._active import Active
from ._emulator import CommandError
from ._session import CHECKS, HazardError, IncompleteError, Session, Settings


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script. The result is 0, 1 after a hazard, 2 without a verdict, or 3 for bad usage."""
    parser = argparse.ArgumentParser(prog="flashcore-check", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("--checks", choices=CHECKS, default="once", help="schedules of each launch (default: once)")
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of a launch (default: 600)")
    parser.add_argument("--arch", type=int, choices=_device.ARCHS, default=90, help="device (default: 90)")
    parser.add_argument("script", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    args = parser.parse_args(argv)
    session = Session(Settings(checks=args.checks, seconds=args.seconds, arch=args.arch))
    try:
        session.emulator.version()
        active = Active(session)
    except (CommandError, RuntimeError) as error:
        print(f"flashcore-check: {error}", file=sys.stderr)
        return 3
    for note in active.notes:
        print(f"flashcore-check: {note}", file=sys.stderr)
    before = sys.argv, sys.path[0]
    sys.argv, sys.path[0] = [args.script, *args.arguments], str(Path(args.script).resolve().parent)
    try:
        runpy.run_path(args.script, run_name="__main__")
    except (HazardError, IncompleteError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, HazardError) else 2
    finally:
        sys.argv, sys.path[0] = before
        active.end()
        session.emulator.close()
    totals = session.totals
    print(
        f"flashcore-check: {len(totals.kernels)} kernels, {totals.launches} launches passed, "
        f"{totals.seconds:.1f} s in the emulator",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
