"""Files on a local disk that appear whole or not at all, and errors that name them."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Make the error of a full disk, or of a quota, name a path: write() and fsync() raise it without one."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM and error.filename is None:
            error.filename = str(path)
        raise


def write_durably(path: Path, data: bytes) -> None:
    """Replace a file by one with this content: after a crash there is the old one or the new one, whole.

    Raises OSError (a full disk) and leaves no trace of the attempt; what a killed one left, the next removes."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with naming(path), open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Make a file's content last, or the names in a folder, which fsync of its files does not cover. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
