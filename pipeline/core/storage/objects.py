"""Objects of S3 as files, through obstore. gs://, abfs:// and az:// use the same code and are untested.

An object store has neither folders nor renames. A folder is the set of objects under a prefix: it exists as long as there
are any, has no modification time, and is not made or removed. A file appears complete when it is closed, or not at all. A
move is a copy inside the store and a deletion; a process that is killed in between leaves both files. Put-if-absent, on
which commits rely, is a conditional PUT (If-None-Match: *), of which exactly one succeeds."""

from __future__ import annotations

import builtins
import io
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from pipeline.core.atomic import path_in_errors
from pipeline.core.errors import UsageError
from pipeline.core.storage.files import FileInfo, RemoteReader, SpooledWriter
from pipeline.core.storage.object_client import client_of, convert_errors
from pipeline.core.storage.retries import LastingError
from pipeline.core.storage.uri import split_uri

if TYPE_CHECKING:
    from obstore import ObjectMeta

SCHEMES = {"s3": "s3", "s3a": "s3", "s3n": "s3", "gs": "gs", "abfs": "abfs", "abfss": "abfss", "az": "az"}
SINGLE_PUT_BYTES = PART_BYTES = 8 << 20  # longer files are uploaded in parts of at least this size
MOST_PARTS = 10_000  # of an upload to S3
SURE_COPY_BYTES = 1 << 30  # a failed copy of a longer object may have been too long: S3 copies 5 GiB by a request
FIRST_BYTES = 128 << 10  # fetched when a file is opened
AHEAD_BYTES = 1 << 20  # fetched at least by later requests
LISTED = 1000  # objects in an answer to a listing
PUTS = 5  # tries if the store reports a conflicting writer and there is no object
PARENT_S = 5.0  # how long the existence of a folder is cached
WRITER = "writer"  # key of the metadata that identify an object after a lost answer


def part_bytes(size: int) -> int:
    """Return the size of the parts of a long file: the least that S3's number of parts allows. size: of the file."""
    return max(PART_BYTES, -(-size // MOST_PARTS))


def is_object(uri: str) -> bool:
    """True if a URI belongs to an object store."""
    return split_uri(uri)[0] in SCHEMES


def object_uri(uri: str, parts: tuple[str, str, str]) -> str:
    """Return the canonical form of an object's URI. Raises UsageError if it has no bucket, or contains credentials.

    parts: the result of ``split_uri``."""
    scheme, authority, path = parts
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
    """The files of one bucket.

    Requests: info 1 (2 for a folder), open 1, read_range 1, list 1 per 1,000 entries, list_many 1 per 1,000 objects,
    create 1 (3 and 1 per 8 MiB for more than 8 MiB), delete 2, rename 2. A rename that may overwrite copies inside the
    store, except for objects that are too long for it; a rename that must not overwrite transfers the content through this
    process."""

    def __init__(self, root: str, conf: tuple[tuple[str, str], ...]) -> None:
        import obstore

        self.root = root
        self.api = cast(Any, obstore)
        with convert_errors(root, root, root):
            self.client, self.place = client_of(root, dict(conf))
        self._trusted: list[str] = []  # the store's address once it has honoured If-None-Match
        self._parents: dict[str, float] = {}

    def _errors(self, path: str) -> AbstractContextManager[None]:
        return convert_errors(path, self.root, self.place)

    def _key(self, path: str) -> str:
        return split_uri(path)[2].strip("/")

    def _info(self, meta: ObjectMeta) -> FileInfo:
        modified = round(meta["last_modified"].timestamp() * 1000)
        return FileInfo(f"{self.root}/{meta['path']}", meta["size"], modified, False, change=meta["e_tag"] or "")

    def _folder(self, key: str) -> FileInfo:
        return FileInfo(f"{self.root}/{key}", 0, 0, True)

    def _any_below(self, key: str) -> bool:
        """Return whether there is any object under a prefix. Costs one listing of up to 1,000 objects."""
        return any(map(bool, self.api.list(self.client, key or None, chunk_size=1)))

    def info(self, path: str) -> FileInfo:
        """Return the entry of an object, or of a folder if there are objects below the path. Raises
        FileNotFoundError."""
        key = self._key(path)
        with self._errors(path):
            if key:
                with suppress(FileNotFoundError):
                    return self._info(self.api.head(self.client, key))
            if self._any_below(key) or not key:
                return self._folder(key)
            raise FileNotFoundError(path)

    def list(self, path: str) -> list[FileInfo]:
        """Return the folders and then the files directly in a folder. Raises FileNotFoundError or
        NotADirectoryError."""
        key = self._key(path)
        with self._errors(path):
            listing = self.api.list_with_delimiter(self.client, key or None)
            folders = [self._folder(prefix) for prefix in listing["common_prefixes"]]
            # An object with the folder's own name is an empty "folder/", as web consoles make it.
            files = [self._info(meta) for meta in listing["objects"] if meta["path"] != key]
        if not (folders or listing["objects"]) and not self.info(path).is_dir:
            raise NotADirectoryError(f"{path} is a file, not a folder")
        return folders + files

    def list_many(self, paths: Iterable[str], most: int) -> dict[str, builtins.list[FileInfo]] | None:
        """Return the entries of folders, by folder and ordered by name, from one listing of their common parent.

        A missing folder has none. Returns None after ``most`` requests, of 1,000 objects each, if there are more objects
        below the parent."""
        keys = {self._key(path): path for path in paths}
        entries: dict[str, dict[str, FileInfo]] = {key: {} for key in keys}
        parent = os.path.commonpath([f"/{key}" for key in keys]).strip("/")
        with self._errors(f"{self.root}/{parent}"):
            for requests, page in enumerate(self.api.list(self.client, parent or None, chunk_size=LISTED)):
                if requests == most:
                    return None
                for key, entry in chain.from_iterable(self._with_folders(meta, parent) for meta in page):
                    siblings = entries.get(key.rpartition("/")[0], {})
                    # An empty "folder/", as web consoles make it, has the key of its folder.
                    if entry.is_dir or key not in siblings:
                        siblings[key] = entry
        return {path: [entry for _, entry in sorted(entries[key].items())] for key, path in keys.items()}

    def _with_folders(self, meta: ObjectMeta, parent: str) -> Iterator[tuple[str, FileInfo]]:
        """Yield the key and the entry of an object, and of each folder between it and a parent."""
        yield meta["path"], self._info(meta)
        folder = meta["path"].rpartition("/")[0]
        while len(folder) > len(parent):
            yield folder, self._folder(folder)
            folder = folder.rpartition("/")[0]

    def open(self, path: str) -> BinaryIO:
        return cast(BinaryIO, ObjectReader(self, path))

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        return self._get(path, offset, length)[0] if length > 0 else b""

    def _get(self, path: str, offset: int, length: int, tag: str | None = None) -> tuple[bytes, ObjectMeta | None]:
        """Return a range of bytes and the object's metadata, by one request; empty and None beyond the end.

        tag: the expected ETag. Raises OSError if the object was replaced."""
        with self._errors(path):
            try:
                options: Any = {"range": (offset, offset + length)} | ({"if_match": tag} if tag else {})
                response = self.api.get(self.client, self._key(path), options=options)
                return bytes(response.bytes()), response.meta
            except self.api.exceptions.GenericError as error:
                if "416 " in str(error).partition("Debug source")[0]:
                    return b"", None
                raise

    def read_all(self, path: str) -> bytes:
        """Return the content of an object by one request, and so from one version of it."""
        with self._errors(path):
            return bytes(self.api.get(self.client, self._key(path)).bytes())

    def create(self, path: str) -> BinaryIO:
        return cast(BinaryIO, SpooledWriter(partial(self._upload, path)))

    def _upload(self, path: str, file: IO[bytes], size: int) -> None:
        """Create an object from a spooled file, a small one by one conditional PUT and a large one in parts."""
        if size <= SINGLE_PUT_BYTES:
            self.put_new(path, file.read())
        else:
            self.put_parts(path, file, size)

    def put(self, path: str, data: bytes | Path) -> None:
        """Write an object atomically, whether it exists or not. data: the content, or a local file."""
        with self._errors(path):
            self.api.put(self.client, self._key(path), data)

    def put_new(self, path: str, data: bytes) -> None:
        """Create an object atomically. Raises FileExistsError, and LastingError if the store ignores the condition."""
        self._put(path, data)
        # Test the store once with a second PUT: if it ignored the condition, commits would overwrite each other.
        if not self._trusted:
            with suppress(FileExistsError):
                self._put(path, data)
                raise LastingError(
                    f"{path}: {self.place} ignores If-None-Match, which commits rest on; use a store that honours it"
                )
            self._trusted.append(self.place)

    def _put(self, path: str, data: bytes) -> None:
        """Create an object if it does not exist. Raises FileExistsError.

        The client repeats a request without an answer, which can find the object of the first try. Each call therefore
        writes a random mark into the object's attributes and recognises its own object by it."""
        key = self._key(path)
        writer = uuid.uuid4().hex
        attributes = {WRITER: writer}
        with self._errors(path):
            for _ in range(PUTS):
                try:
                    self.api.put(self.client, key, data, mode="create", attributes=attributes, use_multipart=False)
                    return
                except self.api.exceptions.AlreadyExistsError:
                    # S3 also refuses a put during a deletion. If the object is gone now, the put is tried again.
                    with suppress(FileNotFoundError):
                        response = self.api.get(self.client, key, options={"head": True})
                        if response.attributes.get(WRITER) == writer:
                            return
                        raise FileExistsError(f"{path} exists") from None
            raise OSError(f"{path}: others write and delete it all the time")

    def put_parts(self, path: str, file: IO[bytes], size: int) -> None:
        """Upload a long file in parts. Existence is checked before, not atomically. A failed upload leaves no parts."""
        with self._errors(path):
            with suppress(FileNotFoundError):
                self.api.head(self.client, self._key(path))
                raise FileExistsError(f"{path} exists")
            self._put_parts(path, file, size)

    def _put_parts(self, path: str, file: IO[bytes], size: int) -> None:
        self.api.put(
            self.client,
            self._key(path),
            file,
            use_multipart=True,
            chunk_size=part_bytes(size),
            max_concurrency=4,
        )

    def _copy(self, source: str, target: str) -> None:
        """Copy an object inside the store; a long one that the store does not copy at once through this process.

        obstore has no copy in parts."""
        try:
            with self._errors(source):
                self.api.copy(self.client, self._key(source), self._key(target))
        except FileNotFoundError:
            raise
        except OSError:
            size = self.info(source).bytes
            if size <= SURE_COPY_BYTES:
                raise
            # Through a local file, as obstore cannot read one object while it uploads another.
            with tempfile.TemporaryFile() as spool:
                with self.open(source) as reader, path_in_errors(tempfile.gettempdir()):
                    shutil.copyfileobj(reader, spool, PART_BYTES)
                spool.seek(0)
                with self._errors(target):
                    self._put_parts(target, spool, size)

    def makedirs(self, path: str) -> None:
        """Do nothing: object stores have no folders."""

    def makedir(self, path: str) -> None:
        """Raise FileNotFoundError if there is no object in the parent folder. Costs a listing, cached for PARENT_S."""
        parent = self._key(path).rpartition("/")[0]
        if parent and time.monotonic() - self._parents.get(parent, -PARENT_S) >= PARENT_S:
            with self._errors(path):
                if not self._any_below(parent):
                    raise FileNotFoundError(path)
            self._parents = {parent: time.monotonic()}  # a task only uses one

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        """Move an object by a copy and a deletion. Raises FileExistsError if the target exists and ``overwrite`` is
        False."""
        if overwrite:
            self._copy(source, target)
        else:
            self.put_new(target, self.read_all(source))
        with self._errors(source):
            self.api.delete(self.client, self._key(source))

    def delete(self, path: str) -> None:
        """Delete an object and all objects below its path. A missing object is not an error."""
        key = self._key(path)
        with self._errors(path):
            below = [meta["path"] for some in self.api.list(self.client, key or None) for meta in some]
            self.api.delete(self.client, [each for each in below if each != key])
            if key:
                with suppress(FileNotFoundError):  # Google's and Azure's stores report a missing object
                    self.api.delete(self.client, key)
        self._parents.clear()

    def remove_empty(self, path: str) -> None:
        """Do nothing: object stores have no empty folders."""

    def sync_folder(self, path: str) -> None:
        """Do nothing: an object is durable once the store has answered."""


class ObjectReader(RemoteReader):
    """A reader of an object, with read-ahead. Raises OSError if the object is replaced while it is read."""

    def __init__(self, files: ObjectFiles, path: str) -> None:
        self.files = files
        self.path = path
        self._at = 0
        self._start = 0
        self._ahead, meta = files._get(path, 0, FIRST_BYTES)
        self._size, self._tag = (meta["size"], meta["e_tag"]) if meta else (0, None)

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return the next ``size`` bytes, fewer at the end; all bytes that are left if ``size`` is None or negative."""
        left = max(0, self._size - self._at)
        whole = size is None or size < 0
        size = left if size is None or size < 0 else min(size, left)
        inside = self._at - self._start
        if inside < 0 or inside + size > len(self._ahead):
            if whole and self._at == 0:  # by one request, so that a manifest is read from one version
                data = self.files.read_all(self.path)
                self._at = self._size = len(data)
                return data
            self._fetch(size)
            inside = 0
        data = self._ahead[inside : inside + size]
        self._at += len(data)
        return data

    def _fetch(self, size: int) -> None:
        """Fill the buffer from the current position with at least ``size`` bytes, and more for the reads that follow.

        Raises OSError if fewer bytes arrive, or if the object was replaced."""
        self._start = self._at
        self._ahead = self.files._get(self.path, self._at, max(size, AHEAD_BYTES), self._tag)[0]
        if len(self._ahead) < size:
            raise OSError(f"{self.path}: {len(self._ahead)} bytes came of {size}; read it again")


_users: list[int] = []  # id of the process that owns obstore's threads


@lru_cache(maxsize=16)
def object_files(root: str, conf: tuple[tuple[str, str], ...], pid: int) -> ObjectFiles:
    """Return the files of a bucket.

    Raises LastingError in a process forked from one that used obstore: its requests would wait for threads of the parent."""
    if _users and _users[0] != pid:
        raise LastingError(
            f"{root}: process {pid} was forked from one that has used object stores; start it by spawn or forkserver"
        )
    _users[:] = [pid]
    return ObjectFiles(root, conf)
