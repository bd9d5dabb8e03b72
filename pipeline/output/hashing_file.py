"""A file that records the size and hash of its contents."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, BinaryIO


@dataclass
class HashingFile:
    """A write-only file that records the size and SHA-256 of the data written to it."""

    raw: BinaryIO
    bytes: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    closed: bool = False

    def write(self, data: Any) -> int:
        """Hash and write a buffer, and return its length in bytes. ``raw`` must write the whole buffer."""
        view = memoryview(data)
        self.digest.update(view)
        self.raw.write(view)
        self.bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None: ...

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.raw.close()
