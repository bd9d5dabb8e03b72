"""Files on a local disk."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.core.atomic import path_in_errors, sync
from pipeline.core.storage.files import FileInfo


class DurableWriter(io.BufferedWriter):
    """A writer that flushes its content to the disk when it is closed."""

    def write(self, data: Any, /) -> int:
        with path_in_errors(self.name):
            return super().write(data)

    def close(self) -> None:
        """Flush the content to the disk and close the file. Errors about a full disk name the file."""
        try:
            if not self.closed:
                with path_in_errors(self.name):
                    self.flush()
                    os.fsync(self.fileno())
        finally:
            with path_in_errors(self.name):
                super().close()  # closes the file below even where there is no room to flush


def rename_no_replace(source: str, target: str) -> None:
    """Rename a file, unless the target exists, on a file system without hard links.

    Calls Linux's renameat2 with the flag RENAME_NOREPLACE. Raises FileExistsError if the target
    exists, and OSError if the system or the file system does not support the flag."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        raise OSError(errno.ENOSYS, "neither hard links nor renameat2 are supported here", target)
    # The values of AT_FDCWD and RENAME_NOREPLACE in Linux's headers.
    at_working_folder = -100
    no_replace = 1
    if library.renameat2(at_working_folder, os.fsencode(source), at_working_folder, os.fsencode(target), no_replace):
        code = ctypes.get_errno()
        if code == errno.EINVAL:
            raise OSError(code, "the file system supports neither hard links nor RENAME_NOREPLACE", target)
        raise OSError(code, os.strerror(code), target)


class LocalFiles:
    def info(self, path: str) -> FileInfo:
        status = os.stat(path)
        is_dir = os.path.isdir(path)
        size = 0 if is_dir else status.st_size
        change = str(status.st_ctime_ns)
        return FileInfo(path, size, status.st_mtime_ns // 1_000_000, is_dir, change=change)

    def list(self, path: str) -> list[FileInfo]:
        """Return the entries of a folder, without those that vanish meanwhile. A dangling link is described as
        itself."""
        entries = []
        for entry in os.scandir(path):
            link = entry.is_symlink()
            try:
                status = os.stat(entry.path, follow_symlinks=os.path.exists(entry.path))
            except FileNotFoundError:
                continue  # gone since the listing began
            size = 0 if entry.is_dir() else status.st_size
            milliseconds = status.st_mtime_ns // 1_000_000
            change = str(status.st_ctime_ns)
            entries.append(FileInfo(entry.path, size, milliseconds, entry.is_dir(), link, change=change))
        return entries

    def open(self, path: str) -> BinaryIO:
        return open(path, "rb")

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset`` on, fewer if the file ends before."""
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            chunks = []
            while length > 0 and (chunk := file.read(length)):
                chunks.append(chunk)
                length -= len(chunk)
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def create(self, path: str) -> BinaryIO:
        return DurableWriter(open(path, "xb", buffering=0))

    def makedirs(self, path: str) -> None:
        """Make a folder and its parents, again if another process removes an empty parent meanwhile."""
        for _ in range(100):
            with suppress(FileNotFoundError):  # another process has just removed an empty parent
                return os.makedirs(path, exist_ok=True)
        return os.makedirs(path, exist_ok=True)

    def makedir(self, path: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(path)

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        """Rename a file or folder. Raises an OSError if the target exists and ``overwrite`` is False.

        A folder may replace an empty folder in both cases."""
        if overwrite:
            os.replace(source, target)
        elif os.path.isdir(source):
            os.rename(source, target)  # refuses a directory that holds anything
        else:
            self._put_if_absent(source, target)

    def _put_if_absent(self, source: str, target: str) -> None:
        """Move a file unless the target exists, by link() or, without hard links, by renameat2.

        rename() would overwrite. Raises OSError on a file system that supports neither."""
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            rename_no_replace(source, target)
        else:
            os.unlink(source)

    def delete(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):
                os.unlink(path)

    def remove_empty(self, path: str) -> None:
        os.rmdir(path)

    def sync_folder(self, path: str) -> None:
        sync(Path(path))
