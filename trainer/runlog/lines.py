"""The lines that a full disk has refused: they stay in memory until the log of the run has room for them."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from threading import Lock

from trainer.home.place import append_lines

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # that wait for room in one file; some 100,000 events or a million pushes


class RefusedLines:
    """The lines that files have refused, by file, in the order in which they were logged. Thread-safe.

    max_bytes: of the lines of one file; later ones are lost, with a warning."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self._lock = Lock()
        self._lines: dict[Path, bytes] = {}
        self._is_losing: set[Path] = set()  # files of which lines have been lost since they were last written

    def append(self, path: Path, lines: bytes) -> None:
        """Append lines to a file, behind those that it has refused. If it refuses them, too, that is a warning, once."""
        with self._lock:
            is_known = path in self._lines
            try:
                self._write(path, lines)
            except OSError as error:
                if not is_known:
                    logger.warning(
                        f"{path} was not written: {error}; its lines are written when there is room for them"
                    )

    def has(self, path: Path) -> bool:
        """Return whether lines of a file are waiting."""
        return path in self._lines

    def write(self, folder: Path) -> None:
        """Write what the files of a folder have refused. Raises OSError, with the file, if one refuses it again."""
        with self._lock:
            for path in [path for path in self._lines if path.parent == folder]:
                self._write(path, b"")

    def _write(self, path: Path, lines: bytes) -> None:
        """Write the refused lines of a file and then ``lines``; keep what it refuses, and raise OSError then."""
        lines = self._lines.pop(path, b"") + lines
        try:
            lines = append_lines(path, lines)
            if lines:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            self._is_losing.discard(path)
        except OSError:
            self._lines[path] = self._cut(path, lines)
            raise

    def _cut(self, path: Path, lines: bytes) -> bytes:
        """Return the first whole lines, of at most ``max_bytes``; warn once of a file if others are lost."""
        if len(lines) <= self.max_bytes:
            return lines
        if path not in self._is_losing:
            self._is_losing.add(path)
            logger.warning(f"{path} has refused {self.max_bytes >> 20} MiB: lines of the log are lost from now on")
        return lines[: lines.rfind(b"\n", 0, self.max_bytes) + 1]
