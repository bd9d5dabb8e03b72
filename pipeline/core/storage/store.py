"""Files on a local disk, on HDFS or in an object store behind one small interface, for the driver and for tasks alike.

A path without a scheme, or with ``file:``, is local; ``hdfs://`` goes through the native RPC client, which knows
high-availability name services and Kerberos; ``s3://`` (and s3a, gs, abfs, az) goes through obstore. Failures are
Python's own: FileNotFoundError, PermissionError, FileExistsError, and OSError (with the address) for everything else.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import BinaryIO

from pipeline.core.errors import UsageError
from pipeline.core.storage.files import FileInfo, Files
from pipeline.core.storage.hadoop_conf import hadoop_conf
from pipeline.core.storage.hdfs import _hdfs, is_hdfs_setting
from pipeline.core.storage.local import LocalFiles
from pipeline.core.storage.objects import SCHEMES, ObjectFiles, object_files, object_uri
from pipeline.core.storage.retries import is_transient, with_retries
from pipeline.core.storage.s3a import PREFIX, PROVIDER_PATH, S3A_PROVIDER_PATH, is_s3a_setting
from pipeline.core.storage.uri import split_uri

ENCRYPTED_SPILL = "spark.io.encryption.enabled"  # temporary files on local disks must not hold data in the clear


@dataclass(frozen=True)
class Store:
    """Every file system by URI; picklable, so that a task reaches what the driver reaches.

    ``conf`` holds the Hadoop settings that executors may lack (name services, default file system, S3's keys); it is not
    printed."""

    conf: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @cached_property
    def hdfs_conf(self) -> tuple[tuple[str, str], ...]:
        """The settings without S3's keys, which are none of HDFS's business."""
        return tuple(setting for setting in self.conf if is_hdfs_setting(setting[0]) or setting[0].startswith("dfs."))

    @property
    def encrypts_spill(self) -> bool:
        """Tell whether the user wants no temporary file of data in the clear on a local disk."""
        return dict(self.conf).get(ENCRYPTED_SPILL) == "true"

    def resolve(self, uri: str) -> str:
        """The canonical form of a path: absolute for local ones, ``hdfs://authority/path`` for HDFS, ``s3://bucket/path``."""
        scheme, authority, path = split_uri(uri)
        if not uri:
            raise UsageError("an empty path names no file or folder")
        if scheme in ("", "file"):
            if authority not in ("", "localhost"):
                raise UsageError(f"{uri} names the host {authority!r}; a file: path is local, write file:///path")
            return "/" + os.path.abspath(path).lstrip("/")
        if scheme in SCHEMES:
            return object_uri(uri)
        if scheme != "hdfs":
            raise UsageError(f"{uri}: the scheme {scheme!r} is not supported; use file:, hdfs:// or s3://")
        default = split_uri(dict(self.conf).get("fs.defaultFS", ""))
        if not authority and default[0] not in ("", "hdfs"):
            raise UsageError(f"{uri} names no host and fs.defaultFS is {default[0]}:; write hdfs://host:port/path")
        authority = authority or default[1]
        if not authority:
            raise UsageError(f"{uri} names no host and no fs.defaultFS is configured; write hdfs://host:port/path")
        if not re.fullmatch(r"[^:\s]+(:\d{1,5})?", authority):
            raise UsageError(f"{uri}: {authority!r} is not host:port")
        return f"hdfs://{authority}/" + os.path.normpath(path or "/").lstrip("/")

    def files(self, uri: str) -> Files:
        scheme, authority, _ = split_uri(uri)
        if scheme == "hdfs":
            return _hdfs(authority, self.hdfs_conf, os.getpid())  # a forked task needs a client of its own
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
        """Write a file that does not exist yet, again where a server fails under it. Raises FileExistsError."""

        def write() -> None:
            try:
                with self.create(uri) as file:
                    file.write(data)
            except OSError as error:
                if is_transient(error):
                    self.delete(uri)
                raise

        with_retries(write)()

    def replace(self, uri: str, data: bytes) -> None:
        """Have a file hold this content, with its folder where that is missing: readers see the old file or the new one,
        whole, whatever is killed meanwhile. A draft beside it is left only by a kill. One put in an object store, else two
        operations."""
        files = self.files(uri)
        if isinstance(files, ObjectFiles):
            return with_retries(files.put)(uri, data)
        self._staged(uri, data, lambda draft: self.rename(draft, uri, overwrite=True))

    def put_new(self, uri: str, data: bytes) -> None:
        """Have a file hold this content where there is none; it is whole as soon as it is there. Raises FileExistsError,
        unless what is there is the same. Costs as ``replace``."""
        try:
            if isinstance(self.files(uri), ObjectFiles):
                return self.write_new(uri, data)
            self._staged(uri, data, lambda draft: self.rename(draft, uri))
        except OSError:
            with suppress(OSError):  # what is there tells, if an answer was lost
                if self.read(uri) == data:
                    return
            raise

    def _staged(self, uri: str, data: bytes, place: Callable[[str], None]) -> None:
        """Write a draft beside a file, and put it in its place; no trace of it stays where that fails."""
        folder, _, name = uri.rpartition("/")
        draft = f"{folder}/.{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            try:
                self.write_new(draft, data)
            except FileNotFoundError:
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
        """One folder, which may be there. Raises FileNotFoundError where that which is to hold it is not."""
        self.files(uri).makedir(uri)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        self.files(source).rename(source, target, overwrite)

    def sync_folder(self, uri: str) -> None:
        """Have the names in a folder survive a loss of power, as the content of files that were closed does."""
        self.files(uri).sync_folder(uri)

    def delete(self, uri: str) -> None:
        """A file, or a folder with all that is in it."""
        self.files(uri).delete(uri)

    def remove_empty(self, uri: str) -> None:
        """A folder that holds nothing; one that holds anything, or is not there, stays as it is."""
        with suppress(OSError):
            self.files(uri).remove_empty(uri)


def configured_store() -> Store:
    """A store for commands without Spark: HADOOP_CONF_DIR tells it of name services, the default file system and S3."""
    return Store(configured())


# The environment variable by which a process hands its store's settings to those that it starts, as a JSON object.
SETTINGS = "SHARDING_STORE_SETTINGS"


def configured() -> tuple[tuple[str, str], ...]:
    """What HADOOP_CONF_DIR has of a store's settings, over those that the process that started this one handed on."""
    conf = json.loads(os.environ.get(SETTINGS) or "{}") | hadoop_conf(os.environ.get("HADOOP_CONF_DIR", ""))
    provider_path = conf.pop(S3A_PROVIDER_PATH, "") or conf.get(PROVIDER_PATH, "")
    if provider_path and f"{PREFIX}access.key" not in conf:  # else a job on Spark has read it and handed its keys on
        conf[S3A_PROVIDER_PATH] = provider_path
    ours = {key for key in conf if key.startswith("dfs.") or is_hdfs_setting(key) or is_s3a_setting(key)}
    return tuple(sorted((key, conf[key]) for key in ours))
