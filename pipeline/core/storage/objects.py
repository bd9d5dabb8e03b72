"""Objects of S3 as files, through obstore. gs://, abfs:// and az:// go the same way, and are untested.

An object store has no folders and no rename. A folder is what lies under a prefix: it is there as long as that is, it has no
time of its own, and nothing makes or removes it. A file appears whole when it is closed, or not at all. Moving a file is a
copy inside the store and a deletion, of which a process that is killed may leave the first. What is put where nothing may
be, the commit's one primitive, is a conditional PUT (If-None-Match: *): of many one succeeds."""

from __future__ import annotations

import io
import os
import re
import tempfile
import time
import uuid
from contextlib import AbstractContextManager, suppress
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from pipeline.core.atomic import naming
from pipeline.core.errors import UsageError
from pipeline.core.storage.files import FileInfo, RemoteReader
from pipeline.core.storage.object_client import client_of, told_plainly
from pipeline.core.storage.retries import LastingError
from pipeline.core.storage.uri import split_uri

if TYPE_CHECKING:
    from obstore import ObjectMeta

SCHEMES = {"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "abfs": "abfs", "abfss": "abfss", "az": "az"}
SINGLE_PUT_BYTES = PART_BYTES = 8 << 20  # what is longer is uploaded in parts
IN_MEMORY_BYTES = 64 << 10  # of a file being written, of which a task has hundreds; the rest is on the local disk
FIRST_BYTES, AHEAD_BYTES = 128 << 10, 1 << 20  # read at once
PUTS = 5  # tried where the store says that another writer was in the way, and nothing is there
PARENT_S = 5.0  # for which a folder that was there is believed to be
WRITER = "writer"  # the user metadata by which a put that succeeded, and whose answer was lost, is known again


def is_object(uri: str) -> bool:
    """Whether a URI is one of an object store."""
    return split_uri(uri)[0] in SCHEMES


def object_uri(uri: str) -> str:
    """The canonical form of an object's URI. Raises UsageError where it names no bucket, or holds credentials."""
    scheme, authority, path = split_uri(uri)
    azure = SCHEMES[scheme].startswith("abfs")
    if not re.fullmatch(r"[\w.-]+@[\w.-]+" if azure else r"[\w.-]+", authority):
        if azure:
            raise UsageError(
                f"{scheme}: names no container; write {scheme}://container@account.dfs.core.windows.net/path"
            )
        if "@" in authority or ":" in authority:
            raise UsageError(f"a {scheme}: address is {scheme}://bucket/path; keep keys and ports in the environment")
        raise UsageError(f"{uri} names no bucket; write {scheme}://bucket/path")
    return f"{SCHEMES[scheme]}://{authority}/" + os.path.normpath(path or "/").lstrip("/")


class ObjectFiles:
    """One bucket. Requests: info 1 (a folder: 2), open and read_range 1, list 1 for 1,000 entries, create 1 (beyond 8 MiB: 3
    and 1 for each 8 MiB), delete 2, rename 2. One that overwrites moves no byte through this process, another all."""

    def __init__(self, root: str, conf: tuple[tuple[str, str], ...]) -> None:
        import obstore

        self.root, self.api = root, cast(Any, obstore)
        with told_plainly(root, root, root):
            self.client, self.place = client_of(root, dict(conf))
        self._trusted: list[str] = []  # this place, once it has refused to overwrite
        self._parents: dict[str, float] = {}

    def _errors(self, path: str) -> AbstractContextManager[None]:
        return told_plainly(path, self.root, self.place)

    def _key(self, path: str) -> str:
        return split_uri(path)[2].strip("/")

    def _info(self, meta: ObjectMeta) -> FileInfo:
        modified = round(meta["last_modified"].timestamp() * 1000)
        return FileInfo(
            f"{self.root}/{meta['path']}", meta["size"], modified, False, tag=(tag := meta["e_tag"] or ""), change=tag
        )

    def _folder(self, key: str) -> FileInfo:
        return FileInfo(f"{self.root}/{key}", 0, 0, True)

    def _below(self, key: str) -> bool:
        """Whether anything lies under a prefix. One listing of up to 1,000 objects."""
        return any(map(bool, self.api.list(self.client, key or None, chunk_size=1)))

    def info(self, path: str) -> FileInfo:
        key = self._key(path)
        with self._errors(path):
            if key:
                with suppress(FileNotFoundError):
                    return self._info(self.api.head(self.client, key))
            if self._below(key) or not key:
                return self._folder(key)
            raise FileNotFoundError(path)

    def list(self, path: str) -> list[FileInfo]:
        key = self._key(path)
        with self._errors(path):
            found = self.api.list_with_delimiter(self.client, key or None)
            folders = [self._folder(prefix) for prefix in found["common_prefixes"]]
            # one of the folder's own name is an empty object "folder/", as consoles make
            files = [self._info(meta) for meta in found["objects"] if meta["path"] != key]
        if not (folders or found["objects"]) and not self.info(path).is_dir:
            raise NotADirectoryError(f"{path} is a file, not a folder")
        return folders + files

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, ObjectReader(self, path))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self._get(path, offset, length)[0] if length > 0 else b""

    def _get(self, path: str, offset: int, length: int, tag: str | None = None) -> tuple[bytes, ObjectMeta | None]:
        """Some bytes and what is known of the object, in one request; no bytes, and nothing known, beyond its end.

        tag: of the object that is meant. Raises OSError where another one has replaced it."""
        with self._errors(path):
            try:
                options: Any = {"range": (offset, offset + length)} | ({"if_match": tag} if tag else {})
                found = self.api.get(self.client, self._key(path), options=options)
                return bytes(found.bytes()), found.meta
            except self.api.exceptions.GenericError as error:
                if "416 " in str(error).partition("Debug source")[0]:
                    return b"", None
                raise

    def read_all(self, path: str) -> bytes:
        """An object as it is at one moment, in one request."""
        with self._errors(path):
            return bytes(self.api.get(self.client, self._key(path)).bytes())

    def create(self, path: str) -> BinaryIO:
        return cast(BinaryIO, ObjectWriter(self, path))

    def put(self, path: str, data: bytes) -> None:
        """Have an object hold this content, in one step, whether it is there or not."""
        with self._errors(path):
            self.api.put(self.client, self._key(path), data)

    def put_new(self, path: str, data: bytes) -> None:
        """Put an object where none is, in one step. Raises FileExistsError, and LastingError where the store overwrites."""
        self._put(path, data)
        if not self._trusted:  # a store that ignores the condition would have commits overwrite each other
            with suppress(FileExistsError):
                self._put(path, data)
                raise LastingError(
                    f"{path}: {self.place} ignores If-None-Match, which commits rest on; use a store that honours it"
                )
            self._trusted.append(self.place)

    def _put(self, path: str, data: bytes) -> None:
        key, writer = self._key(path), uuid.uuid4().hex
        mine = {WRITER: writer}
        with self._errors(path):
            for _ in range(PUTS):
                try:
                    self.api.put(self.client, key, data, mode="create", attributes=mine, use_multipart=False)
                    return
                except self.api.exceptions.AlreadyExistsError:
                    with suppress(FileNotFoundError):  # S3 refuses one of two at once, and the other may be a deletion
                        found = self.api.get(self.client, key, options={"head": True})
                        if found.attributes.get(WRITER) == writer:
                            return
                        raise FileExistsError(f"{path} exists") from None
            raise OSError(f"{path}: others write and delete it all the time")

    def put_parts(self, path: str, file: IO[bytes]) -> None:
        """Upload a long file. That nothing is there is asked before, as a step of its own. A failure leaves no parts."""
        key = self._key(path)
        with self._errors(path):
            with suppress(FileNotFoundError):
                self.api.head(self.client, key)
                raise FileExistsError(f"{path} exists")
            self.api.put(self.client, key, file, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=4)

    def makedirs(self, path: str) -> None:
        """Nothing: a folder is what lies in it."""

    def makedir(self, path: str) -> None:
        """Nothing, where anything lies in the folder that is to hold it. Raises FileNotFoundError otherwise. A listing, or
        none where there was something a few seconds ago."""
        parent = self._key(path).rpartition("/")[0]
        if parent and time.monotonic() - self._parents.get(parent, -PARENT_S) >= PARENT_S:
            with self._errors(path):
                if not self._below(parent):
                    raise FileNotFoundError(path)
            self._parents = {parent: time.monotonic()}  # a task asks of one

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        if overwrite:
            with self._errors(source):
                self.api.copy(self.client, self._key(source), self._key(target))
        else:
            self.put_new(target, self.read_all(source))
        with self._errors(source):
            self.api.delete(self.client, self._key(source))

    def delete(self, path: str) -> None:
        key = self._key(path)
        with self._errors(path):
            below = [meta["path"] for some in self.api.list(self.client, key or None) for meta in some]
            self.api.delete(self.client, [each for each in below if each != key])
            if key:
                with suppress(FileNotFoundError):  # Google's and Azure's stores say so
                    self.api.delete(self.client, key)
        self._parents.clear()

    def remove_empty(self, path: str) -> None:
        """Nothing: what is empty is not there."""

    def sync_folder(self, path: str) -> None:
        """Nothing: what was put is safe when the store answers."""


class ObjectReader(RemoteReader):
    """An object being read, with what follows read ahead. Where another one replaces it, reading on is an error."""

    def __init__(self, files: ObjectFiles, path: str) -> None:
        self.files, self.path, self._at, self._start = files, path, 0, 0
        self._held, meta = files._get(path, 0, FIRST_BYTES)
        self._size, self._tag = (meta["size"], meta["e_tag"]) if meta else (0, None)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        whole = size is None or size < 0
        size = left if size is None or size < 0 else min(size, left)
        inside = self._at - self._start
        if inside < 0 or inside + size > len(self._held):
            if whole and self._at == 0:  # in one request, so that a manifest is of one moment
                data = self.files.read_all(self.path)
                self._at = self._size = len(data)
                return data
            self._fetch(size)
            inside = 0
        data = self._held[inside : inside + size]
        self._at += len(data)
        return data

    def _fetch(self, size: int) -> None:
        self._start = self._at
        self._held = self.files._get(self.path, self._at, max(size, AHEAD_BYTES), self._tag)[0]
        if len(self._held) < size:
            raise OSError(f"{self.path}: {len(self._held)} bytes came of {size}; read it again")


class ObjectWriter(io.RawIOBase):
    """An object being written: a local file until it is closed. One that is left by an exception, or forgotten, was never
    there."""

    def __init__(self, files: ObjectFiles, path: str) -> None:
        self.files, self.path = files, path
        self._spool = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115  closed with this one

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        with naming(tempfile.gettempdir()):
            return self._spool.write(data)

    def close(self) -> None:
        if self.closed:
            return
        try:
            size = self._spool.tell()
            with naming(tempfile.gettempdir()):
                self._spool.seek(0)  # writes what is buffered
            if size <= SINGLE_PUT_BYTES:
                self.files.put_new(self.path, self._spool.read())
            else:
                self.files.put_parts(self.path, self._spool)
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


_users: list[int] = []  # the process whose threads carry obstore's requests


@lru_cache(maxsize=16)
def object_files(root: str, conf: tuple[tuple[str, str], ...], pid: int) -> ObjectFiles:
    """The files of a bucket. Raises LastingError in a process forked from one that has used any: its requests would wait for
    threads that it does not have."""
    if _users and _users[0] != pid:
        raise LastingError(
            f"{root}: process {pid} was forked from one that has used object stores; start it by spawn or forkserver"
        )
    _users[:] = [pid]
    return ObjectFiles(root, conf)
