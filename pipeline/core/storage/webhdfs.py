"""HDFS through WebHDFS or an HttpFS gateway, for clusters whose NameNode and DataNodes are not reachable directly.

The client is the package ``hdfs``. ``webhdfs://`` is HTTP and ``swebhdfs://`` HTTPS, as in Hadoop."""

from __future__ import annotations

import errno
import getpass
import io
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import IO, Any, BinaryIO, cast

from pipeline.core.errors import UsageError
from pipeline.core.storage.files import IN_MEMORY_BYTES, FileInfo, RemoteReader, SpooledWriter
from pipeline.core.storage.hadoop_conf import is_kerberos, webhdfs_address
from pipeline.core.storage.hdfs import PROXY_USER, UMASK, parse_umask
from pipeline.core.storage.retries import LastingError, NoTicketError
from pipeline.core.storage.uri import split_uri

# per attempt; the caller retries
CONNECT_TIMEOUT_S = 10
SILENCE_TIMEOUT_S = 60
AHEAD_BYTES = 1 << 20  # fetched at least by each request of an open file
KINDS = {
    "FileNotFoundException": FileNotFoundError,
    "AccessControlException": PermissionError,
    "SecurityException": PermissionError,
    # A file that its writer has not closed, or that its killed writer never will, exists too.
    "FileAlreadyExistsException": FileExistsError,
    "AlreadyBeingCreatedException": FileExistsError,
    "RecoveryInProgressException": FileExistsError,
    "ParentNotDirectoryException": NotADirectoryError,
    "IllegalArgumentException": LastingError,  # such as a name that HDFS forbids
}
QUOTA = ("NSQuotaExceededException", "DSQuotaExceededException")
NO_TICKET = (
    "the gateway asks for Kerberos: run kinit first, and set hadoop.security.authentication=kerberos in the core-site.xml"
    " of HADOOP_CONF_DIR"
)


def user_name(conf: Mapping[str, str]) -> str:
    """Return the user name for HDFS without Kerberos. Raises UsageError if the user has no name.

    An executor's process may run as another user than the one who submitted the job."""
    submitted = conf.get(PROXY_USER) or os.environ.get("HADOOP_USER_NAME") or os.environ.get("SPARK_USER")
    try:
        return submitted or getpass.getuser()
    except (KeyError, OSError):
        raise UsageError(
            f"user {os.getuid()} has no name here (no line of /etc/passwd): set HADOOP_USER_NAME to that of HDFS"
        ) from None


def connect(url: str, conf: Mapping[str, str]) -> Any:
    """Return a client of WebHDFS at an address, the only place of the pipeline that makes one.

    Raises UsageError if Kerberos is needed and not installed, or the user has no name."""
    import hdfs
    from requests import Session

    logging.getLogger("hdfs").setLevel(logging.CRITICAL)  # it logs what it raises, with the server's whole answer
    session = Session()
    # Else a task that outlives its attempt would make the attempt's deleted folder again.
    session.params = {"createparent": "false"}
    timeout = (CONNECT_TIMEOUT_S, SILENCE_TIMEOUT_S)
    if not is_kerberos(conf):
        return hdfs.InsecureClient(url, user=user_name(conf), timeout=timeout, session=session)
    try:
        from hdfs.ext.kerberos import KerberosClient
    except ImportError as error:
        raise UsageError(f"{url} asks for Kerberos: install hdfs[kerberos] and run kinit first") from error
    return KerberosClient(url, proxy=conf.get(PROXY_USER), timeout=timeout, session=session)


class WebHdfsFiles:
    """The files of a NameNode or gateway.

    Requests: info 1, list 1, open 1, read_range 2, create 2, rename 1, delete 1, makedir 2."""

    def __init__(self, root: str, conf: tuple[tuple[str, str], ...]) -> None:
        settings = dict(conf)
        scheme, authority, _ = split_uri(root)
        self.root = root
        self.url = webhdfs_address(authority, settings, secure=scheme == "swebhdfs")
        umask = parse_umask(settings.get(UMASK, "022"))
        # NameNodes do not apply a umask to the permissions that a client requests.
        self.file_permission = f"{0o666 & ~umask:o}"
        self.folder_permission = f"{0o777 & ~umask:o}"
        self._settings = settings
        self._of_thread = threading.local()
        _ = self.client  # so that a login that lacks something is refused here

    @property
    def client(self) -> Any:
        """The client of this thread: requests-kerberos keeps the state of one request at a time."""
        if not hasattr(self._of_thread, "client"):
            self._of_thread.client = connect(self.url, self._settings)
        return self._of_thread.client

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
            if error.exception is None and first_line.startswith("Authentication failure"):
                raise NoTicketError(f"{path}: {NO_TICKET}") from error
            if error.exception in QUOTA:  # a permanent error, which must not be retried
                raise OSError(errno.EDQUOT, f"{path}: {first_line}") from error
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
        return cast(BinaryIO, io.BufferedReader(WebHdfsReader(self, path), AHEAD_BYTES))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self._read(path, offset, length) if length > 0 else b""

    def read_from(self, path: str, offset: int) -> bytes:
        """Return all bytes from an offset, by one request and so from one version of the file.

        Asking for the length that an earlier request reported would truncate a longer file that has replaced it since."""
        return self._read(path, offset, None)

    def _read(self, path: str, offset: int, length: int | None) -> bytes:
        # In pieces, because only then does a connection that breaks half-way raise an error of requests.
        with self._errors(path), self.client.read(self._path(path), offset, length, chunk_size=1 << 20) as pieces:
            return b"".join(pieces)

    def create(self, path: str) -> BinaryIO:
        """Return a writer that spools: a gateway closes connections that are silent while a task computes."""
        return cast(BinaryIO, SpooledWriter(partial(self._upload, path)))

    def _upload(self, path: str, file: IO[bytes], size: int) -> None:
        data = file.read() if size <= IN_MEMORY_BYTES else file
        with self._errors(path):
            self.client.write(self._path(path), data, permission=self.file_permission)

    def makedirs(self, path: str) -> None:
        with self._errors(path):
            self.client.makedirs(self._path(path), permission=self.folder_permission)

    def makedir(self, path: str) -> None:
        """Make one folder. WebHDFS also makes parents, so the parent is looked up before, not atomically."""
        self.info(path.rpartition("/")[0])
        self.makedirs(path)

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        # The public rename() cannot replace a file, and moves a file into a target that is a folder.
        options = {"renameoptions": "OVERWRITE" if overwrite else "NONE"}
        with self._errors(target):
            self.client._rename(self._path(source), destination=self._path(target), **options)

    def delete(self, path: str) -> None:
        with self._errors(path):
            self.client.delete(self._path(path), recursive=True)

    def remove_empty(self, path: str) -> None:
        with self._errors(path):
            self.client.delete(self._path(path), recursive=False)

    def sync_folder(self, path: str) -> None:
        """Do nothing: the NameNode's journal is durable when it answers."""


def _info(path: str, status: dict[str, Any]) -> FileInfo:
    return FileInfo(path, status["length"], status["modificationTime"], status["type"] == "DIRECTORY")


class WebHdfsReader(RemoteReader):
    """A reader of which each read is a request. Raises FileNotFoundError for a missing file."""

    def __init__(self, files: WebHdfsFiles, path: str) -> None:
        self.files = files
        self.path = path
        self._at = 0
        self._size = files.info(path).bytes

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            data = self.files.read_from(self.path, self._at)
        else:
            data = self.files.read_range(self.path, self._at, min(size, max(0, self._size - self._at)))
        self._at += len(data)
        return data


@lru_cache(maxsize=16)
def web_files(root: str, conf: tuple[tuple[str, str], ...], _pid: int) -> WebHdfsFiles:
    return WebHdfsFiles(root, conf)
