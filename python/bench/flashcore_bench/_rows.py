"""The rows of a run: printed with ``--json``, appended to the file of ``--evidence``."""

from __future__ import annotations

import json
from typing import Any


class Rows:
    """The rows of a run so far.

    Raises:
        ValueError: rows are to be kept as evidence, and this wheel was built from no clean commit.
        OSError: the file of evidence cannot be written.
    """

    def __init__(self, args: Any, commit: str | None) -> None:
        self.every: list[dict[str, Any]] = []
        self._evidence, self._is_printed = args.evidence, args.json
        if self._evidence is None:
            return
        if commit is None:
            raise ValueError(
                "evidence comes from a clean commit, and this wheel was built from none; leave out --evidence"
            )
        self._evidence.open("a").close()  # checked now, so that the run is not lost

    def add(self, row: dict[str, Any], is_evidence: bool = True) -> None:
        self.every.append(row)
        if self._is_printed:
            print(json.dumps(row), flush=True)
        if self._evidence is not None and is_evidence:
            with self._evidence.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
