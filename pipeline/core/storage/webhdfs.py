"""Read-only access to files through a WebHDFS or HttpFS gateway, for clusters whose DataNodes are not reachable."""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from typing import Any, BinaryIO, NoReturn

from pipeline.core.errors import UsageError
from pipeline.core.storage.files import FileInfo, Files
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import split_uri

DEFAULT_PORT = 9870  # the NameNode's; HttpFS listens at 14000
# per attempt; the caller retries
CONNECT_TIMEOUT_S = 10
SILENCE_TIMEOUT_S = 60
KINDS = {
    "FileNotFoundException": FileNotFoundError,
    "AccessControlException": PermissionError,
    "SecurityException": PermissionError,
}


def user_name() -> str:
    """Return the user name for HDFS without Kerberos. Raises UsageError if the user has no name."""
    try:
        return os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
    except (KeyError, OSError):
        raise UsageError(
            f"user {os.getuid()} has no name here (no line of /etc/passwd): set HADOOP_USER_NAME to that of HDFS"
        ) from None


def connect(url: str, *, kerberos: bool = False, timeout: tuple[float, float] | None = None) -> Any:
    """Return a client of WebHDFS at an address, the only place of the pipeline that makes one.

    timeout: seconds to connect, and of silence; None for no limit. Raises UsageError if Kerberos is needed and not
    installed, or the user has no name."""
    import hdfs

    if not kerberos:
        return hdfs.InsecureClient(url, user=user_name(), timeout=timeout)
    try:
        from hdfs.ext.kerberos import KerberosClient
    except ImportError as error:
        raise UsageError(f"{url} asks for Kerberos: install hdfs[kerberos] and run kinit first") from error
    return KerberosClient(url, timeout=timeout)


class WebHdfsFiles:
    """A gateway through the ``hdfs`` package. Raises the errors of pipeline.core.storage.store; refuses to write."""

    def __init__(self, authority: str) -> None:
        host = authority if re.search(r":\d+$", authority) else f"{authority}:{DEFAULT_PORT}"
        self.root = f"webhdfs://{authority}"
        self.url = f"http://{host}"
        self.client = connect(self.url, timeout=(CONNECT_TIMEOUT_S, SILENCE_TIMEOUT_S))

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Convert errors of the client in a ``with`` block to the errors of a store, in one line that names the
        path."""
        import hdfs
        from requests import RequestException

        from pipeline.core.storage.http import innermost_reason

        try:
            yield
        except hdfs.HdfsError as error:
            # The lines after the first are Hadoop's stack trace.
            first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise KINDS.get(error.exception, OSError)(f"{path}: {first_line}") from error
        except RequestException as error:
            raise OSError(
                f"{path}: {innermost_reason(error)}; check that {self.url} is up and serves WebHDFS"
            ) from error

    def _path(self, uri: str) -> str:
        return uri.removeprefix(self.root) or "/"

    def info(self, path: str) -> FileInfo:
        with self._errors(path):
            return _info(path, self.client.status(self._path(path)))

    def list(self, path: str) -> list[FileInfo]:
        with self._errors(path):
            entries = self.client.list(self._path(path), status=True)
        return [_info(f"{path.rstrip('/')}/{name}", status) for name, status in entries]

    def open(self, path: str) -> BinaryIO:
        """Return the whole file in memory: an open connection could fail later, where it cannot be retried."""
        return BytesIO(self._read(path, 0, None))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self._read(path, offset, length) if length > 0 else b""

    def _read(self, path: str, offset: int, length: int | None) -> bytes:
        # In pieces, because only then does a connection that breaks half-way raise an error of requests.
        with self._errors(path), self.client.read(self._path(path), offset, length, chunk_size=1 << 20) as pieces:
            return b"".join(pieces)

    def _refuse(self, *args: Any, **_: Any) -> NoReturn:
        raise PermissionError(f"{args[0]}: webhdfs:// is for reading; write to hdfs://")

    create = makedirs = makedir = rename = delete = remove_empty = sync_folder = _refuse


def _info(path: str, status: dict[str, Any]) -> FileInfo:
    return FileInfo(path, status["length"], status["modificationTime"], status["type"] == "DIRECTORY")


@lru_cache(maxsize=16)
def _gateway(authority: str, _pid: int) -> WebHdfsFiles:
    return WebHdfsFiles(authority)


@dataclass(frozen=True)
class ReadStore(Store):
    """A store that can also read ``webhdfs://host:port/path``."""

    def resolve(self, uri: str) -> str:
        """Return the canonical form of a path: local, ``hdfs://``, ``s3://`` or ``webhdfs://host:port/path``.

        Raises UsageError for an invalid path."""
        scheme, authority, path = split_uri(uri)
        if scheme != "webhdfs":
            return super().resolve(uri)
        if not re.fullmatch(r"[^:\s]+(:\d{1,5})?", authority):
            raise UsageError(f"{uri}: {authority!r} is not host:port; write webhdfs://host:{DEFAULT_PORT}/path")
        return f"webhdfs://{authority}/" + os.path.normpath(path or "/").lstrip("/")

    def files(self, uri: str) -> Files:
        if not uri.startswith("webhdfs://"):
            return super().files(uri)
        return _gateway(split_uri(uri)[1], os.getpid())  # a forked process needs a session of its own
