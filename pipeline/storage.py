"""Files on a local disk or on HDFS behind one small interface, for the driver and for tasks alike. No Spark.

A path without a scheme, or with ``file:``, is local; ``hdfs://`` goes through the native RPC client, which knows
high-availability name services and Kerberos. Failures are Python's own: FileNotFoundError, PermissionError,
FileExistsError, and OSError (with the address) for everything else.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, BinaryIO, Protocol, cast

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential

from pipeline.errors import UsageError

# What the client should do where nobody has configured it. Unset, an unreachable NameNode takes three minutes to report,
# and a lost DataNode fails the write where no fourth one can stand in; HDFS restores the third replica by itself.
HDFS_DEFAULTS = {
    "dfs.client.failover.max.attempts": "5",
    "dfs.client.failover.sleep.max.millis": "1000",
    "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
}
# hdfs-native sometimes waits for ever for a DataNode that died under its write; the slowest live one answers sooner.
STALL_S = 90.0

LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP}


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: a lost DataNode or connection, but no missing file or right."""
    final = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, OSError) and not isinstance(error, final) and error.errno not in LASTING


# The NameNode sends writers to a dead DataNode until it misses its heartbeat: seconds to half a minute.
patiently = retry(
    retry=retry_if_exception(is_transient), stop=stop_after_attempt(5), wait=wait_exponential(4, max=30), reraise=True
)


@dataclass(frozen=True)
class FileInfo:
    """One directory entry; ``modified_ms`` is the file system's own clock, so compare it only with its peers."""

    path: str
    bytes: int
    modified_ms: int
    is_dir: bool
    is_link: bool = False

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]


class Files(Protocol):
    """What a file system must offer. ``rename`` is atomic; ``create`` fails where the file exists."""

    def info(self, path: str) -> FileInfo: ...
    def list(self, path: str) -> list[FileInfo]: ...
    def open(self, path: str) -> BinaryIO: ...
    def read_range(self, path: str, offset: int, length: int) -> bytes: ...
    def create(self, path: str) -> BinaryIO: ...
    def makedirs(self, path: str) -> None: ...
    def rename(self, source: str, target: str, overwrite: bool) -> None: ...
    def delete(self, path: str) -> None: ...
    def remove_empty(self, path: str) -> None: ...


class LocalFiles:
    def info(self, path: str) -> FileInfo:
        status = os.stat(path)
        is_dir = os.path.isdir(path)
        return FileInfo(path, 0 if is_dir else status.st_size, status.st_mtime_ns // 1_000_000, is_dir)

    def list(self, path: str) -> list[FileInfo]:
        found = []
        for entry in os.scandir(path):
            link = entry.is_symlink()
            try:
                status = os.stat(entry.path, follow_symlinks=os.path.exists(entry.path))
            except FileNotFoundError:
                continue  # gone since the listing began
            size, milliseconds = (0 if entry.is_dir() else status.st_size), status.st_mtime_ns // 1_000_000
            found.append(FileInfo(entry.path, size, milliseconds, entry.is_dir(), link))
        return found

    def open(self, path: str) -> BinaryIO:
        return open(path, "rb")

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            chunks = []
            while length > 0 and (chunk := file.read(length)):
                chunks.append(chunk)
                length -= len(chunk)
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def create(self, path: str) -> BinaryIO:
        return open(path, "xb")

    def makedirs(self, path: str) -> None:
        os.makedirs(path, exist_ok=True)

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        if overwrite:
            os.replace(source, target)
        elif os.path.isdir(source):
            os.rename(source, target)  # refuses a directory that holds anything
        else:
            os.link(source, target)  # unlike rename, refuses an existing target
            os.unlink(source)

    def delete(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(path)

    def remove_empty(self, path: str) -> None:
        os.rmdir(path)


class HdfsFiles:
    """HDFS through hdfs-native; one client a process and name service."""

    def __init__(self, authority: str, conf: tuple[tuple[str, str], ...]) -> None:
        from hdfs_native import Client

        self.root = f"hdfs://{authority}"
        with self._errors(self.root):
            self.client = Client(self.root, {**HDFS_DEFAULTS, **dict(conf)})

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, PermissionError, FileExistsError):
            raise
        except Exception as error:  # the client raises RuntimeError and OSError for what the servers say
            text = str(error).replace("\\n", "\n")  # Java's trace follows, its line ends sometimes escaped
            first = text.splitlines()[0] if text else type(error).__name__
            for signs, kind in (
                (("FileNotFound",), FileNotFoundError),
                (("AccessControlException",), PermissionError),  # any trace of Java's names an AccessController
                # a file that its writer has not closed yet, or did not live to close, exists too
                (("AlreadyExists", "AlreadyBeingCreated", "RecoveryInProgress"), FileExistsError),
            ):
                if any(sign in first for sign in signs):
                    raise kind(f"{path}: {first}") from error
            advice = f"; check that HDFS is up and reachable at {self.root}" if "(os error" in text else ""
            raise OSError(f"{path}: {first}{advice}") from error

    def _path(self, uri: str) -> str:
        return uri.removeprefix(self.root) or "/"

    def info(self, path: str) -> FileInfo:
        with self._errors(path):
            return self._info(self.client.get_file_info(self._path(path)))

    def _info(self, status: Any) -> FileInfo:
        path = self.root + (split_uri(status.path)[2] or "/")
        return FileInfo(path, status.length, status.modification_time, status.isdir)

    def list(self, path: str) -> list[FileInfo]:
        with self._errors(path):
            return [self._info(status) for status in self.client.list_status(self._path(path))]

    def open(self, path: str) -> BinaryIO:
        with self._errors(path):
            return cast(BinaryIO, self.client.read(self._path(path)))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with self._errors(path):
            reader = self.client.read(self._path(path))
            return reader.read_range(offset, max(0, min(length, len(reader) - offset)))

    def create(self, path: str) -> BinaryIO:
        from hdfs_native import WriteOptions

        with self._errors(path):
            options = WriteOptions(overwrite=False, create_parent=True)
            return cast(BinaryIO, HdfsWriter(self, path, self.client.create(self._path(path), options)))

    def makedirs(self, path: str) -> None:
        with self._errors(path):
            self.client.mkdirs(self._path(path), create_parent=True)

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        with self._errors(target):
            self.client.rename(self._path(source), self._path(target), overwrite)

    def delete(self, path: str) -> None:
        with self._errors(path):
            self.client.delete(self._path(path), recursive=True)

    def remove_empty(self, path: str) -> None:
        with self._errors(path):
            self.client.delete(self._path(path), recursive=False)


class HdfsWriter(io.RawIOBase):
    """A file being written, whose failures are OSErrors too. What fails first is what is raised: the client's own
    writer closes after a failed write, and reports only that this failed as well."""

    def __init__(self, files: HdfsFiles, path: str, inner: Any) -> None:
        self.files, self.path, self.inner = files, path, inner

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self.files._errors(self.path):
            return int(within(STALL_S, lambda: self.inner.write(data)))

    def close(self) -> None:
        if self.closed:
            return
        try:
            with self.files._errors(self.path):
                within(STALL_S, self.inner.close)
        finally:
            super().close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError) if kind else nullcontext():
            self.close()


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of work, or TimeoutError (an OSError) if it takes longer: then its thread is left behind. 0.1 ms."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return results[0]


def split_uri(uri: str) -> tuple[str, str, str]:
    """(scheme, authority, path); the path as it stands, whatever #, ? or ; it holds."""
    match = re.fullmatch(r"(?:([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)|(file|hdfs):(?!//))?(.*)", uri, re.DOTALL)
    assert match, "the pattern matches every text"
    return match[1] or match[3] or "", match[2] or "", match[4]


@lru_cache(maxsize=16)
def _hdfs(authority: str, conf: tuple[tuple[str, str], ...], _pid: int) -> HdfsFiles:
    return HdfsFiles(authority, conf)


@dataclass(frozen=True)
class Store:
    """Every file system by URI; picklable, so that a task reaches what the driver reaches.

    ``conf`` holds the Hadoop client settings that executors may lack (name services, default file system)."""

    conf: tuple[tuple[str, str], ...] = field(default=())

    def resolve(self, uri: str) -> str:
        """The canonical form of a path: absolute for local ones, ``hdfs://authority/path`` for HDFS."""
        scheme, authority, path = split_uri(uri)
        if not uri:
            raise UsageError("an empty path names no file or folder")
        if scheme in ("", "file"):
            if authority not in ("", "localhost"):
                raise UsageError(f"{uri} names the host {authority!r}; a file: path is local, write file:///path")
            return "/" + os.path.abspath(path).lstrip("/")
        if scheme != "hdfs":
            raise UsageError(f"{uri}: the scheme {scheme!r} is not supported; use file: or hdfs:")
        authority = authority or split_uri(dict(self.conf).get("fs.defaultFS", ""))[1]
        if not authority:
            raise UsageError(f"{uri} names no host and no fs.defaultFS is configured; write hdfs://host:port/path")
        if not re.fullmatch(r"[^:\s]+(:\d{1,5})?", authority):
            raise UsageError(f"{uri}: {authority!r} is not host:port")
        return f"hdfs://{authority}/" + os.path.normpath(path or "/").lstrip("/")

    def files(self, uri: str) -> Files:
        if not uri.startswith("hdfs://"):
            return LocalFiles()
        return _hdfs(split_uri(uri)[1], self.conf, os.getpid())  # a forked task needs a client of its own

    def info(self, uri: str) -> FileInfo:
        return self.files(uri).info(uri)

    def exists(self, uri: str) -> bool:
        try:
            self.info(uri)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self, uri: str) -> list[FileInfo]:
        """The entries of a folder by name; an absent folder is empty."""
        try:
            return sorted(self.files(uri).list(uri), key=lambda entry: entry.name)
        except FileNotFoundError:
            return []

    def walk(self, uri: str) -> builtins.list[str]:
        """Every file below a folder, by path."""
        entries = self.list(uri)
        below = [path for entry in entries if entry.is_dir for path in self.walk(entry.path)]
        return sorted([entry.path for entry in entries if not entry.is_dir] + below)

    def open(self, uri: str) -> BinaryIO:
        return self.files(uri).open(uri)

    def read(self, uri: str) -> bytes:
        with self.open(uri) as file:
            return file.read()

    def read_range(self, uri: str, offset: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``offset``; fewer only where the file ends."""
        return self.files(uri).read_range(uri, offset, length)

    def create(self, uri: str) -> BinaryIO:
        return self.files(uri).create(uri)

    def write_new(self, uri: str, data: bytes) -> None:
        """Write a file that does not exist yet, again where a DataNode fails under it. Raises FileExistsError."""

        def write() -> None:
            try:
                with self.create(uri) as file:
                    file.write(data)
            except OSError as error:
                if is_transient(error):
                    self.delete(uri)
                raise

        patiently(write)()

    def makedirs(self, uri: str) -> None:
        self.files(uri).makedirs(uri)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        self.files(source).rename(source, target, overwrite)

    def delete(self, uri: str) -> None:
        """A file, or a folder with all that is in it."""
        self.files(uri).delete(uri)

    def remove_empty(self, uri: str) -> None:
        """A folder that holds nothing; one that holds anything, or is not there, stays as it is."""
        with suppress(OSError):
            self.files(uri).remove_empty(uri)
