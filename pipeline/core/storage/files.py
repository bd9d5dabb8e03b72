"""The interface of a file system."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, BinaryIO, Protocol

from pipeline.core.atomic import path_in_errors

IN_MEMORY_BYTES = 64 << 10  # of each open file, of which a task has hundreds; the rest is spooled to the local disk


@dataclass(frozen=True)
class FileInfo:
    """An entry of a folder.

    Attributes:
        path: the whole path or URI.
        bytes: the size of a file; 0 of a folder.
        modified_ms: time of the last change in ms since 1970, by the file system's own clock: comparable only with
            times of the same file system.
        is_dir: whether it is a folder.
        is_link: whether it is a symbolic link; local disks only.
        change: a mark of the last change that programs cannot reset: the inode's change time on a local disk, the ETag
            in an object store; "" on HDFS.
    """

    path: str
    bytes: int
    modified_ms: int
    is_dir: bool
    is_link: bool = False
    change: str = ""

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]


class RemoteReader(io.RawIOBase):
    """Base class of readers of remote files; subclasses implement ``read``, ``seek`` and ``tell``."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readall(self) -> bytes:
        return self.read() or b""

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer)) or b""
        buffer[: len(data)] = data
        return len(data)


class SpooledWriter(io.RawIOBase):
    """A writer that spools to a local file and uploads it when it is closed.

    After an exception in its ``with`` block, or if it is never closed, nothing is uploaded.

    upload(file, bytes): creates the remote file from the spooled one, which is at its beginning."""

    def __init__(self, upload: Callable[[IO[bytes], int], None]) -> None:
        self._upload = upload
        self._spool = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115  closed with this one

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with path_in_errors(tempfile.gettempdir()):
            return self._spool.write(data)

    def close(self) -> None:
        """Upload the spooled bytes and delete the spool."""
        if self.closed:
            return
        try:
            size = self._spool.tell()
            with path_in_errors(tempfile.gettempdir()):
                self._spool.seek(0)  # writes what is buffered
            self._upload(self._spool, size)
        finally:
            self._discard()

    def _discard(self) -> None:
        self._spool.close()
        super().close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._discard() if kind else self.close()

    def __del__(self) -> None:
        if not self.closed:
            self._discard()


class Files(Protocol):
    """The operations of a file system.

    ``rename`` is atomic. ``create`` fails if the file exists. The content of a closed file is durable, as far as the file
    system guarantees it."""

    def info(self, path: str) -> FileInfo: ...
    def list(self, path: str) -> list[FileInfo]: ...
    def open(self, path: str) -> BinaryIO: ...
    def read_range(self, path: str, offset: int, length: int) -> bytes: ...
    def create(self, path: str) -> BinaryIO: ...
    def makedirs(self, path: str) -> None: ...
    def makedir(self, path: str) -> None: ...
    def rename(self, source: str, target: str, overwrite: bool) -> None: ...
    def delete(self, path: str) -> None: ...
    def remove_empty(self, path: str) -> None: ...
    def sync_folder(self, path: str) -> None: ...
