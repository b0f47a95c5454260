"""The command ``flashcore emulate`` as a child process: one request and one answer at a time."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

Answer = dict[str, Any]


class CommandError(RuntimeError):
    """The command ``flashcore`` is missing, does not know ``emulate``, or ended."""


def find_command() -> str:
    """The command: ``FLASHCORE_COMMAND``, else beside this Python, else in ``PATH``."""
    given = os.environ.get("FLASHCORE_COMMAND")
    if given:
        return given
    beside = Path(sys.executable).parent / "flashcore"
    found = str(beside) if beside.exists() else shutil.which("flashcore")
    if found is None:
        raise CommandError(
            "the command `flashcore` is neither beside this Python nor in PATH: "
            "`pip install flashcore-attn-cli` installs it, and FLASHCORE_COMMAND names another one"
        )
    return found


class Emulator:
    """Starts the command with the first request, and again after it ended or this process forked."""

    def __init__(self, command: str | None = None, threads: int | None = None) -> None:
        self._command = command
        self._threads = threads
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()
        self._version: str | None = None

    @property
    def command(self) -> str:
        if self._command is None:
            self._command = find_command()
        return self._command

    def version(self) -> str:
        """The version of the command with its commit, as ``flashcore version`` prints it."""
        if self._version is None:
            try:
                done = subprocess.run([self.command, "version", "--json"], capture_output=True, text=True, check=True)
                told = json.loads(done.stdout)
            except (OSError, subprocess.CalledProcessError, ValueError) as error:
                raise CommandError(f"`{self.command} version` failed: {error}") from error
            self._version = " ".join(str(told[key]) for key in ("version", "commit") if told.get(key))
        return self._version

    def run(self, header: dict[str, Any], contents: Sequence[memoryview]) -> tuple[Answer, dict[int, bytes]]:
        """Sends a request and returns the answer with the changed buffers by their number."""
        with self._lock:
            try:
                return self._exchange(header, contents)
            except (BrokenPipeError, EOFError) as error:
                code = self._child.wait() if self._child else None
                self.close()
                raise CommandError(
                    f"`{self.command} emulate` ended with exit code {code}; its message is on standard error"
                ) from error
            except BaseException:
                # After an interrupt the next answer would be read from the middle of this one.
                self.close()
                raise

    def _exchange(self, header: dict[str, Any], contents: Sequence[memoryview]) -> tuple[Answer, dict[int, bytes]]:
        sink, source = self._pipes()
        sink.write(json.dumps(header).encode() + b"\n")
        for part in contents:
            sink.write(part)
        sink.flush()
        line = source.readline()
        if not line:
            raise EOFError
        answer: Answer = json.loads(line)
        outputs = {}
        for output in answer["outputs"]:
            data = source.read(output["bytes"])
            if len(data) < output["bytes"]:
                raise EOFError
            outputs[int(output["buffer"])] = data
        return answer, outputs

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        if self._child is not None and self._owner != os.getpid():
            # The parent of this process uses the pipes.
            self._child = None
        if self._child is None:
            environment = dict(os.environ)
            if self._threads is not None:
                environment.setdefault("RAYON_NUM_THREADS", str(self._threads))
            try:
                self._child = subprocess.Popen(
                    [self.command, "emulate"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
                )
            except OSError as error:
                raise CommandError(f"{self.command} does not start: {error}") from error
            self._owner = os.getpid()
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        return child.stdin, child.stdout

    def close(self) -> None:
        """Ends the child process."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
