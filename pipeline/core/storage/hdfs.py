"""HDFS through its native protocol."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any, BinaryIO, cast

from pipeline.core.errors import UsageError
from pipeline.core.storage.files import FileInfo, RemoteReader
from pipeline.core.storage.retries import STALL_S, NoTicketError, call_within
from pipeline.core.storage.uri import split_uri

# Defaults for settings that are not configured. hdfs-native's own take three minutes to report an unreachable NameNode, and
# fail a write if no fourth DataNode can replace a lost one; HDFS restores the third replica by itself.
HDFS_DEFAULTS = {
    "dfs.client.failover.max.attempts": "5",
    "dfs.client.failover.sleep.max.millis": "1000",
    "dfs.client.block.write.replace-datanode-on-failure.policy": "NEVER",
}

BUFFER_BYTES = 1 << 16  # of a file that is being written; a task has hundreds of such files open

UMASK = "fs.permissions.umask-mode"
PROXY_USER = "sharding.proxy-user"  # our own setting: the user on whose behalf the job was submitted
KEYTAB = "sharding.keytab"  # our own settings: those of spark-submit --keytab and --principal
PRINCIPAL = "sharding.principal"
# Settings that HDFS's client or this module reads, by name and by the start of the name.
HDFS_SETTINGS = (
    "fs.defaultFS",
    UMASK,
    "hadoop.security.authentication",
    "hadoop.security.key.provider.path",
    *HDFS_DEFAULTS,
)
_PREFIXES = (
    "dfs.nameservices", "dfs.internal.nameservices", "dfs.ha.namenodes.", "dfs.namenode.rpc-address.",
    "dfs.namenode.http-address.", "dfs.namenode.https-address.", "dfs.client.",
    "dfs.data.transfer.", "fs.viewfs.mounttable.",
)  # fmt: skip

# The class name that the client puts in front of a NameNode's message.
JAVA_CLASS = re.compile(r"^.*?org\.apache\.hadoop\.[\w.$]+[\"\s:,]+")
# What servers and the client say of a process that has neither ticket nor token.
NO_LOGIN = re.compile(r"GSS|[Kk]erberos|SASL mechanism|SIMPLE authentication is not enabled")
LOGIN_ADVICE = (
    "HDFS asks for Kerberos and there is no valid ticket here: run kinit, or give spark-submit --principal and --keytab,"
    " with the HADOOP_CONF_DIR of the cluster"
)
# Descriptions of DataNodes in messages, which are kilobytes long.
SERVERS = re.compile(r": \[?Datanode.*", re.DOTALL)


def is_hdfs_setting(key: str) -> bool:
    """True if the HDFS client or this module reads a Hadoop setting."""
    return key in (*HDFS_SETTINGS, PROXY_USER, KEYTAB, PRINCIPAL) or key.startswith(_PREFIXES)


def parse_umask(text: str) -> int:
    """Return the bits of fs.permissions.umask-mode: octal (``027``) or symbolic (``u=rwx,g=rx,o=``, which names what stays).

    Raises UsageError for anything else."""
    if re.fullmatch(r"[0-7]{3,4}", text):
        return int(text, 8) & 0o777
    umask = 0o022  # Hadoop's default, for classes of users that no clause names
    for clause in text.split(","):
        match = re.fullmatch(r"([ugoa]*)=([rwx-]*)", clause.strip())
        if not match:
            raise UsageError(f"{UMASK}={text} is no umask; write it like 027 or u=rwx,g=rx,o=")
        permissions = sum({"r": 4, "w": 2, "x": 1}.get(letter, 0) for letter in set(match[2]))
        for who in {"u", "g", "o"} if "a" in match[1] or not match[1] else set(match[1]):
            shift = {"u": 6, "g": 3, "o": 0}[who]
            umask = umask & ~(7 << shift) | (7 - permissions) << shift
    return umask


def kerberos_login(conf: Mapping[str, str]) -> dict[str, str]:
    """Return the client's arguments to log in by spark-submit's keytab; none if there is none on this machine.

    The tickets are kept in memory, so that the user's own tickets are neither used nor replaced."""
    keytab = conf.get(KEYTAB, "")
    if not os.path.isfile(keytab):
        return {}
    names = ("kerberos_principal", "kerberos_keytab", "kerberos_cache")
    return dict(zip(names, (conf[PRINCIPAL], os.path.abspath(keytab), "MEMORY:sharding"), strict=True))


class HdfsFiles:
    """HDFS through hdfs-native, with one client per process and name service."""

    def __init__(self, authority: str, conf: tuple[tuple[str, str], ...]) -> None:
        from hdfs_native import Client

        self.root = f"hdfs://{authority}"
        # NameNodes do not apply a umask to the permissions that a client requests.
        umask = parse_umask(dict(conf).get(UMASK, "022"))
        self.file_permission = 0o666 & ~umask
        self.folder_permission = 0o777 & ~umask
        # An executor's process may run as another user than its JVM acts as, which is the user who submitted the job.
        if proxied := dict(conf).get(PROXY_USER):
            # With the Kerberos ticket of the submitting user the client reads the first variable, otherwise the second.
            os.environ["HADOOP_PROXY_USER"] = os.environ["HADOOP_USER_NAME"] = proxied
        if "SPARK_USER" in os.environ:
            os.environ.setdefault("HADOOP_USER_NAME", os.environ["SPARK_USER"])
        with self._errors(self.root):
            self.client = Client(self.root, {**HDFS_DEFAULTS, **dict(conf)}, **kerberos_login(dict(conf)))

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Convert errors of the client in a ``with`` block to the errors of a store.

        The message becomes one line, which begins with the path."""
        try:
            yield
        except Exception as error:  # the client raises RuntimeError and OSError for errors of servers
            text = str(error).replace("\\n", "\n")  # a Java trace may follow, with escaped line ends
            first = text.splitlines()[0] if text else type(error).__name__
            first = SERVERS.sub("", first)[:300]
            if isinstance(error, FileNotFoundError | PermissionError | FileExistsError):
                if first == text:
                    raise
                raise type(error)(f"{path}: {first}") from error
            if NO_LOGIN.search(first):
                # A GSSAPIError contains the quoted text of the library, "name of the code: reason". Keep the reason.
                quoted = re.search(r', "(?:[^":]*: )?([^"]*)"\)', text)
                reason = quoted[1] if quoted else JAVA_CLASS.sub("", first)
                raise NoTicketError(f"{path}: {LOGIN_ADVICE} ({reason})") from error
            for signs, kind in (
                (("FileNotFound",), FileNotFoundError),
                (("AccessControlException",), PermissionError),  # in full: every Java trace names an AccessController
                # A file that its writer has not closed, or that its killed writer never will, exists too.
                (("AlreadyExists", "AlreadyBeingCreated", "RecoveryInProgress"), FileExistsError),
            ):
                if any(sign in first for sign in signs):
                    raise kind(f"{path}: {JAVA_CLASS.sub('', first)}") from error
            if "QuotaExceeded" in first:  # a permanent error, which must not be retried
                raise OSError(errno.EDQUOT, f"{path}: {first}") from error
            # The client, written in Rust, ends the text of a failed connection with "(os error N)".
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
            return cast(BinaryIO, HdfsReader(self, path, self.client.read(self._path(path))))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        with self._errors(path):
            reader = self.client.read(self._path(path))
            return reader.read_range(offset, max(0, min(length, len(reader) - offset)))

    def create(self, path: str) -> BinaryIO:
        from hdfs_native import WriteOptions

        with self._errors(path):
            options = WriteOptions(overwrite=False, create_parent=False, permission=self.file_permission)
            return BufferedFile(HdfsWriter(self, path, self.client.create(self._path(path), options)), BUFFER_BYTES)

    def makedirs(self, path: str) -> None:
        with self._errors(path):
            self.client.mkdirs(self._path(path), self.folder_permission, create_parent=True)

    def makedir(self, path: str) -> None:
        with self._errors(path):
            self.client.mkdirs(self._path(path), self.folder_permission, create_parent=False)

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        with self._errors(target):
            self.client.rename(self._path(source), self._path(target), overwrite)

    def delete(self, path: str) -> None:
        with self._errors(path):
            self.client.delete(self._path(path), recursive=True)

    def remove_empty(self, path: str) -> None:
        with self._errors(path):
            self.client.delete(self._path(path), recursive=False)

    def sync_folder(self, path: str) -> None:
        """Do nothing: the NameNode's journal is durable when it answers."""


class HdfsReader(RemoteReader):
    """A reader whose errors are OSErrors."""

    def __init__(self, files: HdfsFiles, path: str, inner: Any) -> None:
        self.files = files
        self.path = path
        self.inner = inner

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.inner.seek(offset, whence)
        return self.tell()

    def tell(self) -> int:
        return int(self.inner.tell())

    def read(self, size: int = -1) -> bytes:
        with self.files._errors(self.path):
            return bytes(self.inner.read(size))


class HdfsWriter(io.RawIOBase):
    """A writer whose errors are OSErrors, and which raises the first one.

    The client's own writer closes after a failed write and only reports the error of closing."""

    def __init__(self, files: HdfsFiles, path: str, inner: Any) -> None:
        self.files = files
        self.path = path
        self.inner = inner
        # The client's writer never reports that it is closed, so its finaliser would close it again and wait more than a
        # minute for a dead DataNode. Python is told from the start that it is closed; close() below closes it.
        io.RawIOBase.close(inner)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with self.files._errors(self.path):
            return int(call_within(STALL_S, lambda: self.inner.write(data)))

    def close(self) -> None:
        """Close the file, within STALL_S: the client would wait longer for a dead DataNode."""
        if self.closed:
            return
        try:
            with self.files._errors(self.path):
                call_within(STALL_S, self.inner.close)
        finally:
            super().close()


class BufferedFile(io.BufferedWriter):
    """A writer that collects small writes.

    A file has a block, and connections to its DataNodes, from its first write. One of at most BUFFER_BYTES has them only
    while it is closed, so that a task may have hundreds of such files open. What it passes on are unsigned bytes:
    hdfs-native copies the elements of a buffer and refuses negative ones, as Arrow's signed buffers have them."""

    def close(self) -> None:
        """Write what is left and close the file. Raises the first error: that of closing after it would say less."""
        if self.closed:
            return
        try:
            self.flush()
        except BaseException:
            with suppress(OSError):
                self.raw.close()
            raise
        super().close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the file. If the block has raised, its error is the one to report."""
        with suppress(OSError) if kind else nullcontext():
            self.close()


@lru_cache(maxsize=16)
def _hdfs(authority: str, conf: tuple[tuple[str, str], ...], _pid: int) -> HdfsFiles:
    return HdfsFiles(authority, conf)
