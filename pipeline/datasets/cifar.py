"""Download CIFAR-10 or CIFAR-100 from its home page and publish the official files in a folder, on HDFS or on S3.

The archive is downloaded into a cache folder. A broken download resumes at its last byte, and pooch checks the MD5. The
files then appear all at once: they are written to a hidden folder next to the target, which is renamed. An object store
cannot rename, so there a file ``_fetching`` marks the folder as unfinished until all files exist. ``_fetched.json``
lists the files and their sizes, so that a rerun can check that they are complete."""

import argparse
import json
import logging
import os
import shutil
import tarfile
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol
from urllib.parse import urlparse

import pooch
import requests

from pipeline.core import command_line
from pipeline.core.atomic import path_in_errors
from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.storage.http import BACKOFF_S, CHUNK_BYTES, ResumingDownloader, innermost_reason
from pipeline.core.storage.objects import is_object
from pipeline.core.storage.store import Store, configured_store
from pipeline.core.storage.uri import local_folder, split_uri
from pipeline.datasets.local_target import LocalTarget

HOME_PAGE = "https://www.cs.toronto.edu/~kriz/"
# Spark and Hadoop ignore names that begin with _ or .
RECORD = "_fetched.json"
UNFINISHED = "_fetching"


@dataclass(frozen=True)
class Archive:
    """A published tar file: its name below the home page, its checksum, its folder and the wanted files."""

    name: str
    md5: str
    folder: str
    members: tuple[str, ...]


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
ARCHIVES: Mapping[tuple[str, str], Archive] = {
    ("cifar10", "bin"): Archive(
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        ("batches.meta.txt", *(f"{name}.bin" for name in _BATCHES), "test_batch.bin"),
    ),
    ("cifar10", "py"): Archive(
        "cifar-10-python.tar.gz",
        "c58f30108f718f92721af3b95e74349a",
        "cifar-10-batches-py",
        ("batches.meta", *_BATCHES, "test_batch"),
    ),
    ("cifar100", "bin"): Archive(
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        ("coarse_label_names.txt", "fine_label_names.txt", "train.bin", "test.bin"),
    ),
    ("cifar100", "py"): Archive(
        "cifar-100-python.tar.gz",
        "eb9058c3a382ffc7106e4002c42a8d85",
        "cifar-100-python",
        ("meta", "train", "test"),
    ),
}


def download(archive: Archive, base_url: str, cache: Path, backoff_s: float = BACKOFF_S) -> Path:
    """Return the checked archive in the cache folder, downloaded if it is not there yet. Raises JobError.

    Args:
        archive: the archive.
        base_url: the home page or a mirror.
        cache: the folder for archives.
        backoff_s: the pause before the first retry.
    """
    pooch.get_logger().setLevel(logging.ERROR)
    url = f"{base_url.rstrip('/')}/{archive.name}"
    cache.mkdir(parents=True, exist_ok=True)
    # The checksum in the name keeps archives of one name from two mirrors apart.
    part = cache / f"{archive.name}.{archive.md5[:8]}.part"
    try:
        path = pooch.retrieve(
            url,
            known_hash=f"md5:{archive.md5}",
            fname=archive.name,
            path=cache,
            downloader=ResumingDownloader(part, backoff_s),
        )
    except ValueError as error:  # pooch raises it for a wrong checksum, after deleting the file
        if "hash" not in str(error):
            raise UsageError(f"{url} is no address to download from: {error}") from error
        raise JobError(
            f"{url} is not the published file: its MD5 is not {archive.md5}; run it again, or name another --base-url"
        ) from error
    except requests.RequestException as error:
        raise UsageError(
            f"{url} is no address to download from: {innermost_reason(error)}; check --base-url"
        ) from error
    return Path(path)


# ------------------------------------------------------------------------------------------ the target folder


class Target(Protocol):
    """A folder to be published. ``sizes`` is None if it does not exist."""

    def sizes(self) -> dict[str, int] | None: ...
    def read(self, name: str) -> bytes: ...
    def publish(self, fill: Callable[[Path], None]) -> None: ...


@dataclass(frozen=True)
class StoreTarget:
    """A folder on HDFS or in an object store."""

    uri: str
    store: Store

    def sizes(self) -> dict[str, int] | None:
        if not is_object(self.uri):
            if not self.store.exists(self.uri):
                return None
            if not self.store.info(self.uri).is_dir:
                raise UsageError(f"{self.uri} is a file; give --to a folder that does not exist yet")
        sizes = {entry.name: entry.bytes for entry in self.store.list(self.uri)}
        return None if UNFINISHED in sizes else sizes

    def read(self, name: str) -> bytes:
        return self.store.read(f"{self.uri}/{name}")

    def publish(self, fill: Callable[[Path], None]) -> None:
        """Fill a local temporary folder and upload its files.

        On HDFS they go to a hidden folder, which is renamed. An object store cannot rename: files appear there one by
        one, and are valid once the marker UNFINISHED is deleted."""
        with tempfile.TemporaryDirectory() as work:
            with path_in_errors(tempfile.gettempdir()):
                fill(Path(work))
            if is_object(self.uri):
                self.store.replace(f"{self.uri}/{UNFINISHED}", b"")
                self._upload(Path(work), self.uri)
                self.store.delete(f"{self.uri}/{UNFINISHED}")
                return
            parent, _, name = self.uri.rpartition("/")
            partial = f"{parent}/.{name}.{uuid.uuid4().hex[:12]}"
            try:
                self.store.makedirs(partial)
                self._upload(Path(work), partial)
                self.store.remove_empty(self.uri)
                self.store.rename(partial, self.uri)  # fails if the target folder is not empty
            finally:
                self.store.delete(partial)

    def _upload(self, source: Path, uri: str) -> None:
        for file in sorted(source.iterdir()):
            self.store.replace(f"{uri}/{file.name}", file.read_bytes())  # 30 MB each


def target_of(uri: str, webhdfs: str | None) -> Target:
    """Return the target for a path or URI. Raises UsageError for an unknown scheme, or a URI without a host or folder.

    webhdfs: the web address through which an hdfs:// URI is written; None: HDFS's own protocol."""
    scheme, _, path = split_uri(uri)
    if scheme in ("", "file"):
        return LocalTarget(Path(os.path.abspath(local_folder(uri, "--to"))))
    if scheme == "hdfs" and webhdfs:
        web = urlparse(webhdfs)
        uri = f"{'swebhdfs' if web.scheme == 'https' else 'webhdfs'}://{web.netloc}{path}"
    store = configured_store()
    if not (is_object(uri) or path.strip("/")):
        raise UsageError(f"{uri} names no folder; write {scheme}://host:port/folder")
    return StoreTarget(store.resolve(uri), store)


# -------------------------------------------------------------------------------------------------- the whole


def extract(archive: Archive, source: Path, folder: Path) -> None:
    """Write the archive's members into ``folder`` under their own names, and the record. Raises DataError.

    Only members of known names are read, as plain files, so that no path in the archive reaches the disk."""
    sizes = {}
    try:
        with tarfile.open(source) as tar:
            for name in archive.members:
                # A member is looked up by name and not extracted, so that paths and links in the tar have no effect.
                try:
                    member: IO[bytes] | None = tar.extractfile(f"{archive.folder}/{name}")
                except KeyError:
                    member = None
                if member is None:
                    raise DataError(f"{source} contains no file {archive.folder}/{name}; delete it and run it again")
                with member, open(folder / name, "wb") as file:
                    shutil.copyfileobj(member, file, CHUNK_BYTES)
                    sizes[name] = file.tell()
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{source} cannot be unpacked: {error}; delete it and run it again") from error
    record = {"archive": archive.name, "md5": archive.md5, "files": sizes}
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def is_complete(archive: Archive, target: Target, uri: str) -> bool:
    """Return whether the target holds the archive's files, by size. Raises UsageError if it holds anything else."""
    sizes = target.sizes()
    if not sizes:
        return False
    try:
        # A record of another archive, or a damaged one, counts as other files.
        record = json.loads(target.read(RECORD)) if RECORD in sizes else {}
        expected = record["files"] if record.get("md5") == archive.md5 else {}
    except (ValueError, KeyError, AttributeError):
        expected = {}
    if expected and all(sizes.get(name) == size for name, size in expected.items()):
        return True
    missing = [name for name, size in expected.items() if sizes.get(name) != size]
    problem = f"lost or changed {missing[0]} since it was fetched" if missing else "contains other files"
    raise UsageError(f"{uri} {problem}; delete it, or give --to another folder")


def fetch(
    archive: Archive,
    to: str,
    *,
    base_url: str,
    webhdfs: str | None,
    cache: Path,
    backoff_s: float = BACKOFF_S,
) -> bool:
    """Publish the archive's files at ``to``; return False if they exist already. Raises JobError.

    Args:
        archive: the archive.
        to: the folder, local or as a URI.
        base_url: the home page or a mirror.
        webhdfs: the web address through which hdfs:// is written; None: HDFS's own protocol.
        cache: the folder for archives.
        backoff_s: the pause before the first retry, in seconds.
    """
    target = target_of(to, webhdfs)
    try:
        if is_complete(archive, target, to):
            return False
        source = download(archive, base_url, cache, backoff_s)
        try:
            target.publish(lambda folder: extract(archive, source, folder))
        except OSError:
            if is_complete(archive, target, to):  # another fetch has filled the folder meanwhile
                return False
            raise
    except OSError as error:
        raise JobError(
            f"{error.filename or to}: {error.strerror or error}; free space or choose another --to or --cache"
        ) from error
    return True


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser(
        "python -m pipeline fetch",
        "Download the official files of a data set from its home page; an interrupted download resumes.",
        "",
    )
    parser.add_argument("name", choices=sorted({name for name, _ in ARCHIVES}), help="data set to download")
    parser.add_argument(
        "--layout", choices=("bin", "py"), default="bin", help="binary records or pickles (default: %(default)s)"
    )
    parser.add_argument(
        "--to", required=True, metavar="URI", help="folder to create, local, hdfs://, webhdfs:// or s3://"
    )
    parser.add_argument(
        "--webhdfs", metavar="URL", help="write hdfs:// through this web address, such as http://host:9870"
    )
    parser.add_argument(
        "--base-url", default=HOME_PAGE, metavar="URL", help="home page or mirror (default: %(default)s)"
    )
    # Archives are kept outside of --to, so that a second copy of the data set downloads nothing.
    parser.add_argument(
        "--cache",
        type=Path,
        default=Path(pooch.os_cache("sharding")),
        metavar="DIR",
        help="folder of downloaded archives (default: %(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str], archives: Mapping[tuple[str, str], Archive] = ARCHIVES) -> None:
    args = parse(argv)
    archive = archives[args.name, args.layout]
    fresh = fetch(
        archive,
        args.to,
        base_url=args.base_url,
        webhdfs=args.webhdfs,
        cache=args.cache,
        backoff_s=BACKOFF_S,
    )
    note = "complete" if fresh else "already complete, nothing downloaded"
    print(f"fetch: {args.name} in {args.to}: {note} ({len(archive.members)} files)")
