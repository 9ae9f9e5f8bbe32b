"""log.jsonl as it grows: a line at a time, whole or not at all, by one write to a file that stays open."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

from pydantic_core import to_json


class LogFile:
    """Opened at the first line, closed by `close` or with the last reference to it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._closing: Any = None

    def append(self, line: dict[str, Any]) -> None:
        """Raises OSError where it cannot be written; then nothing of it is there. Numbers are finite."""
        rest = memoryview(to_json(line) + b"\n")
        if self._file is not None and os.fstat(self._file).st_nlink == 0:
            self.close()  # somebody removed it: what is written there nobody would read
        if self._file is None:
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self._closing = weakref.finalize(self, os.close, self._file)
        written = os.write(self._file, rest)
        while written < len(rest):  # the disk is all but full
            try:
                written += os.write(self._file, rest[written:])
            except OSError:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
                raise

    def close(self) -> None:
        """What is appended later opens it again."""
        if self._file is not None:
            self._file = None
            self._closing()
