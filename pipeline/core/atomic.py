"""Atomic and durable writes to local files, and errors that name the file."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

REWRITES = 4  # of a temporary file, each after another process that began to write the same file has deleted it
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def path_in_errors(path: Path | str) -> Iterator[None]:
    """Add a path to errors about a full disk or quota, which write() and fsync() raise without one."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM and error.filename is None:
            error.filename = str(path)
        raise


def write_durably(path: Path, data: bytes) -> None:
    """Replace the content of a file. After a crash it has the complete old or new content.

    Raises OSError, for instance if the disk is full, and leaves no temporary file. The next call removes a
    temporary file that a killed process left, or that another process is writing, which then writes it again."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)
    for _ in range(REWRITES):
        with suppress(FileNotFoundError):
            return _replace(path, data)
    return _replace(path, data)


def _replace(path: Path, data: bytes) -> None:
    """Write a temporary file and rename it. Raises OSError; FileNotFoundError if another process deletes it meanwhile."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with path_in_errors(path), open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            # Without this, the rename could reach the disk before the content, and a crash would leave an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # The new name is stored in the folder, which has to be made durable too.
    sync(path.parent)


def is_at(file: IO[Any], path: Path) -> bool:
    """Return whether a path still names an open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    """Make a file's content durable, or the names in a folder, which fsync of its files does not. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with path_in_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
