"""A common interface to files on local disks, on HDFS and in object stores, for the driver and its tasks.

Paths without a scheme or with ``file:`` are local. ``hdfs://`` uses the native RPC client, which supports high-availability
name services and Kerberos, ``webhdfs://`` the package hdfs, and ``s3://`` (and s3a, gs, abfs, az) obstore. Errors are
FileNotFoundError, PermissionError, FileExistsError, and for everything else OSError, whose message contains the address.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from pipeline.core.errors import UsageError
from pipeline.core.storage.files import FileInfo, Files
from pipeline.core.storage.hadoop_conf import hadoop_conf, is_true
from pipeline.core.storage.hdfs import _hdfs, is_hdfs_setting
from pipeline.core.storage.local import LocalFiles
from pipeline.core.storage.objects import SCHEMES, ObjectFiles, object_files, object_uri
from pipeline.core.storage.retries import is_transient, with_retries
from pipeline.core.storage.s3a import PREFIX, PROVIDER_PATH, S3A_PROVIDER_PATH, is_s3a_setting
from pipeline.core.storage.uri import HDFS_SCHEMES, WEB_SCHEMES, is_remote, readable, refuse_home, split_uri
from pipeline.core.storage.webhdfs import web_files

CALLS = 8  # calls of a local disk or of a WebHDFS gateway that are made at once
REMOTE_CALLS = 64  # calls of an object store or of a NameNode that are made at once
BLOCK_BYTES = 4 << 20  # bytes of a copied file in memory at a time
ENCRYPTED_SPILL = "spark.io.encryption.enabled"  # temporary files on local disks must not hold data in the clear


@dataclass(frozen=True)
class Store:
    """Access to every file system by URI. Picklable, so that tasks reach the same files as the driver.

    ``conf`` holds Hadoop settings that executors may lack (name services, default file system, keys of S3). Its values are
    never printed."""

    conf: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @cached_property
    def hdfs_conf(self) -> tuple[tuple[str, str], ...]:
        """The settings for HDFS clients, without the keys of S3."""
        return tuple(setting for setting in self.conf if is_hdfs_setting(setting[0]) or setting[0].startswith("dfs."))

    @property
    def encrypts_spill(self) -> bool:
        """Whether temporary files on local disks must not contain unencrypted data."""
        return is_true(dict(self.conf).get(ENCRYPTED_SPILL, ""))

    def resolve(self, uri: str) -> str:
        """Return the canonical form of a path: an absolute local path, ``hdfs://authority/path`` or ``s3://bucket/path``.

        Raises UsageError for an invalid path."""
        uri = os.fspath(uri)  # a path of pathlib, from Python
        parts = split_uri(uri)
        scheme, authority, path = parts
        if not uri:
            raise UsageError("an empty path names no file or folder")
        # Neither Spark nor a manifest can hold such a path.
        if readable(uri) != uri:
            raise UsageError(f"{readable(uri)} cannot be read as UTF-8: set LC_ALL=C.UTF-8, or rename it")
        if scheme in ("", "file"):
            refuse_home(uri)
            if authority not in ("", "localhost"):
                raise UsageError(f"{uri} names the host {authority!r}; file: paths are local, so write file:///path")
            # abspath keeps two leading slashes, which would give one folder two names.
            return "/" + os.path.abspath(path).lstrip("/")
        if scheme in SCHEMES:
            return object_uri(uri, parts)
        if scheme not in HDFS_SCHEMES:
            raise UsageError(f"{uri}: the scheme {scheme!r} is not supported; use file:, hdfs:// or s3://")
        if scheme == "hdfs":
            authority = authority or self._default_name_node(uri)
        if not re.fullmatch(r"[^:\s]+(:\d{1,5})?", authority):
            raise UsageError(f"{uri}: {authority!r} is not host:port; write {scheme}://host:port/path")
        return f"{scheme}://{authority}/" + os.path.normpath(path or "/").lstrip("/")

    def _default_name_node(self, uri: str) -> str:
        """Return the host or name service of fs.defaultFS for an hdfs:// URI without one. Raises UsageError."""
        scheme, authority, _ = split_uri(dict(self.conf).get("fs.defaultFS", ""))
        # The default file system can only complete an address if it is HDFS: a bucket is no NameNode.
        if scheme not in ("", "hdfs"):
            raise UsageError(f"{uri} names no host and fs.defaultFS is {scheme}:; write hdfs://host:port/path")
        if not authority:
            raise UsageError(f"{uri} names no host and no fs.defaultFS is configured; write hdfs://host:port/path")
        return authority

    def files(self, uri: str) -> Files:
        """Return the file system of a path. Clients of remote ones are shared within a process."""
        scheme, authority, _ = split_uri(uri)
        if scheme == "hdfs":
            return _hdfs(authority, self.hdfs_conf, os.getpid())  # a forked task needs a client of its own
        if scheme in WEB_SCHEMES:
            return web_files(f"{scheme}://{authority}", self.hdfs_conf, os.getpid())
        if scheme in SCHEMES:
            return object_files(f"{SCHEMES[scheme]}://{authority}", self.conf, os.getpid())
        return LocalFiles()

    def info(self, uri: str) -> FileInfo:
        return self.files(uri).info(uri)

    def exists(self, uri: str) -> bool:
        try:
            self.info(uri)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self, uri: str) -> list[FileInfo]:
        """Return the entries of a folder, ordered by name; a missing folder has none."""
        try:
            return sorted(self.files(uri).list(uri), key=lambda entry: entry.name)
        except FileNotFoundError:
            return []

    def list_all(self, uris: Iterable[str]) -> dict[str, builtins.list[FileInfo]]:
        """Return the entries of folders of one store, as ``list`` does, by folder.

        Many folders of a remote store are listed at once, because a call mostly waits for its answer. In an object store,
        one listing of their common parent replaces them if the objects below it are few enough."""
        folders = list(dict.fromkeys(uris))
        if len(folders) < 2 or not is_remote(folders[0]):
            return {folder: self.list(folder) for folder in folders}
        files = self.files(folders[0])
        if isinstance(files, ObjectFiles) and len(folders) >= REMOTE_CALLS:
            listings = files.list_many(folders, len(folders) // REMOTE_CALLS)
            if listings is not None:
                return listings
        with ThreadPoolExecutor(min(calls_at_once(folders[0]), len(folders))) as pool:
            return dict(zip(folders, pool.map(self.list, folders), strict=True))

    def walk(self, uri: str) -> builtins.list[str]:
        """Return the paths of all files below a folder, ordered."""
        entries = self.list(uri)
        below = [path for entry in entries if entry.is_dir for path in self.walk(entry.path)]
        return sorted([entry.path for entry in entries if not entry.is_dir] + below)

    def open(self, uri: str) -> BinaryIO:
        return self.files(uri).open(uri)

    def read(self, uri: str) -> bytes:
        with self.open(uri) as file:
            return file.read()

    def read_range(self, uri: str, offset: int, length: int) -> bytes:
        """Return ``length`` bytes from ``offset``, fewer only at the end of the file."""
        return self.files(uri).read_range(uri, offset, length)

    def create(self, uri: str) -> BinaryIO:
        return self.files(uri).create(uri)

    def write_new(self, uri: str, data: bytes | Path) -> None:
        """Write a file; transient errors are retried. The caller has made sure that nobody else uses the name.

        data: the content, or a local file, which is read in blocks. A file of that name is replaced: an earlier try has
        left it, and its answer was lost."""

        def write() -> None:
            """Write the file once; delete a partial file before a retry."""
            try:
                with self.create(uri) as file:
                    if isinstance(data, bytes):
                        file.write(data)
                    else:
                        with open(data, "rb") as source:
                            shutil.copyfileobj(source, file, BLOCK_BYTES)
            except OSError as error:
                if is_transient(error):
                    self.delete(uri)
                raise

        try:
            with_retries(write)()
        except FileExistsError:  # a NameNode's answer to the second try of a call whose first answer was lost
            with_retries(self.delete)(uri)
            with_retries(write)()

    def replace(self, uri: str, data: bytes | Path) -> None:
        """Replace the content of a file atomically, and make its folder if it is missing.

        data: the content, or a local file, which is read in blocks. Readers see the complete old or new content, also if
        the process is killed, which can leave a temporary file beside it. Costs one put in an object store, in parts above
        5 MiB, elsewhere two operations."""
        files = self.files(uri)
        if isinstance(files, ObjectFiles):
            return with_retries(files.put)(uri, data)
        self._write_staged(uri, data, lambda draft: self.rename(draft, uri, overwrite=True))

    def put_new(self, uri: str, data: bytes) -> None:
        """Create a file atomically. Costs the same as ``replace``. Raises FileExistsError.

        If the answer is lost, the file may be there although this raises: see claim.py."""
        files = self.files(uri)
        if isinstance(files, ObjectFiles):
            # Not ``write_new``: it deletes the object before a retry, which may be that of another process.
            return with_retries(files.put_new)(uri, data)
        self._write_staged(uri, data, lambda draft: self.rename(draft, uri))

    def _write_staged(self, uri: str, data: bytes | Path, place: Callable[[str], None]) -> None:
        """Write a temporary file beside the target and move it there with ``place``; delete it if that fails."""
        folder, _, name = uri.rpartition("/")
        draft = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            try:
                self.write_new(draft, data)
            except FileNotFoundError:
                # The folder nearly always exists: making it only after a failure saves a request per write.
                self.makedirs(folder)
                self.write_new(draft, data)
            place(draft)
        except OSError:
            with suppress(OSError):
                self.delete(draft)
            raise

    def makedirs(self, uri: str) -> None:
        self.files(uri).makedirs(uri)

    def makedir(self, uri: str) -> None:
        """Make one folder unless it exists. Raises FileNotFoundError if its parent is missing."""
        self.files(uri).makedir(uri)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        self.files(source).rename(source, target, overwrite)

    def sync_folder(self, uri: str) -> None:
        """Make the names in a folder durable; the content of closed files already is."""
        self.files(uri).sync_folder(uri)

    def delete(self, uri: str) -> None:
        """Delete a file, or a folder with its content. A missing one is not an error."""
        self.files(uri).delete(uri)

    def remove_empty(self, uri: str) -> None:
        """Delete a folder if it is empty; otherwise, or if it is missing, do nothing."""
        with suppress(OSError):
            self.files(uri).remove_empty(uri)


def calls_at_once(uri: str) -> int:
    """Return how many calls that wait for a store are made at once. uri: a path of it."""
    return REMOTE_CALLS if is_remote(uri) and split_uri(uri)[0] not in WEB_SCHEMES else CALLS


def configured_store() -> Store:
    """Return the store of a command without Spark, configured by HADOOP_CONF_DIR."""
    return Store(configured_settings())


# The environment variable that passes a store's settings to child processes, as a JSON object.
SETTINGS = "SHARDING_STORE_SETTINGS"


def configured_settings() -> tuple[tuple[str, str], ...]:
    """Return the store's settings from HADOOP_CONF_DIR, which override settings from the parent process."""
    conf = json.loads(os.environ.get(SETTINGS) or "{}") | hadoop_conf(os.environ.get("HADOOP_CONF_DIR", ""))
    provider_path = conf.pop(S3A_PROVIDER_PATH, "") or conf.get(PROVIDER_PATH, "")
    if provider_path and f"{PREFIX}access.key" not in conf:  # else a job on Spark has read it and handed its keys on
        conf[S3A_PROVIDER_PATH] = provider_path
    ours = {key for key in conf if key.startswith("dfs.") or is_hdfs_setting(key) or is_s3a_setting(key)}
    return tuple(sorted((key, conf[key]) for key in ours))
