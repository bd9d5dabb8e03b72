"""Shards that are given by their paths, without a manifest: one Parquet file or folder of files per worker.

They are read once as a whole, which checks them and yields what a manifest would say: rows, digests, classes, means and
the fingerprint. Every process of a run opens its shards by itself, so this summary is kept in the host's temporary
folder; a name there depends on the paths, sizes and times of all files."""

from __future__ import annotations

import hashlib
import os
import posixpath
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.atomic import write_durably
from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import parse_object
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import dumps
from pipeline.core.shardset.parts import Image, Input, Labels, ShardFile, Worker
from pipeline.core.shardset.schema import DTYPES, TARGET_COLUMN, broken_is_data_error, declared_metadata, declared_shape
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.retries import unreadable_is_data_error, with_retries
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import split_uri
from trainer.data.shard_file import TABLE, row_groups, row_hashes_of
from trainer.data.shards import BARE, Shards

SUFFIX = ".parquet"
MOST_CLASSES = 1 << 16
ADVICE = "write the image column as pipeline/FILES.md says, or shard the data by sharding shard"


@dataclass(frozen=True)
class BareShard:
    """The shard of a worker. uri: as given, resolved. files: its Parquet files by name, at least one."""

    uri: str
    files: tuple[FileInfo, ...]


def bare_files(store: Store, uri: str) -> BareShard | None:
    """Return the Parquet file or files at a path, or None if there are none. Raises DataError for an unreadable path."""
    with unreadable_is_data_error(uri):
        try:
            about = with_retries(store.info)(uri)
        except (FileNotFoundError, NotADirectoryError):
            return None
        entries = with_retries(store.list)(uri) if about.is_dir else [about]
    files = sorted((entry for entry in entries if _is_shard(entry)), key=lambda entry: entry.path)
    return BareShard(uri, tuple(files)) if files else None


def _is_shard(entry: FileInfo) -> bool:
    return not entry.is_dir and entry.name.endswith(SUFFIX) and entry.name[0] not in "._"


def find_shards(store: Store, uris: Sequence[str]) -> list[BareShard]:
    """Return the shards at some paths.

    Raises UsageError for a path without Parquet files, or one that is given twice."""
    shards: list[BareShard] = []
    for uri in uris:
        shard = bare_files(store, store.resolve(uri))
        if shard is None:
            raise UsageError(
                f"--shards {uri}: no Parquet file, and no folder with any; give one such path per worker, or --mix, the"
                " share of each set"
            )
        if any(shard.uri == other.uri for other in shards):
            raise UsageError(f"--shards {uri} is given twice; every worker needs a shard of its own")
        shards.append(shard)
    return shards


def open_bare(store: Store, uris: Sequence[str]) -> Shards:
    """Return the shards at some paths, one per worker, as if they had been committed.

    Reads every file, unless this host has read the same files before. Raises UsageError for paths that are no shards,
    and DataError for a broken file, or one with other columns or another shape than the first."""
    shards = find_shards(store, uris)
    if len({split_uri(shard.uri)[:2] for shard in shards}) > 1:
        raise UsageError(f"--shards: {shards[0].uri} and {shards[-1].uri} are in different stores; copy them into one")
    # Paths in a manifest are relative to one folder, here the deepest one above all shards.
    root = "/".join(posixpath.commonprefix([shard.uri.split("/")[:-1] for shard in shards])) or "/"
    cache = _cache_path(root, shards)
    if cache:
        with suppress(OSError, ValueError):
            return Shards(store, root, Manifest.from_json(parse_object(cache.read_bytes())))
    manifest = _read_manifest(store, root, shards)
    if cache:
        with suppress(OSError):  # a full temporary folder costs time, not the run
            write_durably(cache, dumps(manifest))
    return Shards(store, root, manifest)


@dataclass(frozen=True)
class _FileHead:
    """The digest of a file, and the form of its rows."""

    file: ShardFile
    image: Image
    columns: tuple[str, ...]


def _read_head(store: Store, root: str, entry: FileInfo) -> _FileHead:
    """Return the digest of a file and the form of its rows. Raises DataError for a broken or foreign file."""
    with unreadable_is_data_error(entry.path):
        data = with_retries(store.read)(entry.path)
    with broken_is_data_error(entry.path):
        parquet = pq.ParquetFile(pa.BufferReader(data))
        schema = parquet.schema_arrow
        # The loader needs these columns, and the model the shape.
        missing = [name for name in ("id", "image") if name not in schema.names]
        if missing or not {"label", TARGET_COLUMN} & set(schema.names):
            raise DataError(f"{entry.path} has no column {(missing or ['label'])[0]}; {ADVICE}")
        shape = declared_shape(schema, "image")
        dtype = declared_metadata(schema, "image").get("dtype", "uint8")
    if shape is None or dtype not in DTYPES:
        raise DataError(f"{entry.path} does not say the shape and type of its images; {ADVICE}")
    path = entry.path.removeprefix(root).lstrip("/")
    file = ShardFile(path, parquet.metadata.num_rows, len(data), hashlib.sha256(data).hexdigest())
    columns = tuple(name for name in ("label", "coarse_label", TARGET_COLUMN) if name in schema.names)
    return _FileHead(file, Image(list(shape), dtype, "CHW", [0.0] * shape[0]), columns)


def _read_manifest(store: Store, root: str, shards: Sequence[BareShard]) -> Manifest:
    """Return the manifest of shards, for which every file is read twice: for its form, then for its rows.

    Raises DataError for files that cannot be shards of one set."""
    heads = [[_read_head(store, root, entry) for entry in shard.files] for shard in shards]
    first = heads[0][0]
    for head in (head for worker in heads for head in worker):
        if (head.image, head.columns) != (first.image, first.columns):
            raise DataError(
                f"{root}/{first.file.path} has {_form(first)}, {root}/{head.file.path} has {_form(head)}: shards of one run"
                " have equal forms"
            )
    workers = [
        Worker(index=index, rows=sum(head.file.rows for head in worker), files=[head.file for head in worker])
        for index, worker in enumerate(heads)
    ]
    # Rows are read by the trainer's own reader, whose limit of labels is not known yet.
    draft = Manifest(
        strategy=BARE,
        num_workers=len(workers),
        image=first.image,
        labels=Labels(columns=list(first.columns), num_classes=MOST_CLASSES),
        workers=workers,
    )
    total = BareSums(first.image.chw[0])
    for worker in workers:
        total.add_worker(Shards(store, root, draft), worker)
    return replace(
        draft,
        rows=total.rows,
        copies=total.copies,
        input=Input(
            uri=root,
            format="parquet",
            files=sum(map(len, heads)),
            bytes=sum(head.file.bytes for worker in heads for head in worker),
            rows=total.rows,
            fingerprint=f"{total.rows}-{total.fingerprint:016x}",
        ),
        image=replace(first.image, mean=total.means(first.image)),
        labels=Labels(columns=list(first.columns), num_classes=total.classes),
    )


class BareSums:
    """Sums over the rows of all shards, of which copies count only as such."""

    def __init__(self, channels: int) -> None:
        self.rows = 0
        self.copies = 0
        self.classes = 1
        self.fingerprint = 0
        self._channels = np.zeros(channels)

    def add_worker(self, shards: Shards, worker: Worker) -> None:
        """Add the rows of a worker. Raises DataError for a broken row, or none."""
        _, height, width = shards.shape
        for file in worker.files:
            for columns, data in row_groups(shards, file, TABLE):
                # A row counts once, at its owner.
                own = columns["copy"] == 0 if "copy" in columns else np.ones(len(data), np.bool_)
                values = np.ascontiguousarray(data[own]).view(shards.layout.dtype)
                values = values.reshape(int(own.sum()), len(self._channels), height * width)
                self._channels += values.sum(axis=(0, 2), dtype=np.float64)
                hashes = row_hashes_of(columns, data)[own]
                self.fingerprint = (self.fingerprint + sum(hashes.tolist())) % (1 << 64)
                self.classes = max(self.classes, int(columns["label"].max(initial=0)) + 1)
                self.rows += len(values)
                self.copies += len(data) - len(values)
        if not worker.rows:
            raise DataError(
                f"{shards.uri}/{worker.files[0].path} has no rows, and a worker without rows cannot train;"
                " delete it, or leave it out of --shards"
            )

    def means(self, image: Image) -> list[float]:
        """Return the mean of each channel."""
        _, height, width = image.chw
        return [float(total) / max(1, self.rows * height * width) for total in self._channels]


def _form(head: _FileHead) -> str:
    """Return the form of a file's rows in words."""
    return f"{'x'.join(map(str, head.image.shape))} {head.image.dtype} images with {', '.join(head.columns)}"


def describe_bare(shards: Shards) -> str:
    """Return the line about shards that have no manifest."""
    manifest = shards.manifest
    form = f"{'x'.join(map(str, manifest.image.shape))} {manifest.image.dtype}"
    copies = f" and {manifest.copies:,} copies" if manifest.copies else ""
    classes = f" in {shards.num_classes} classes" if shards.has_labels else ""
    return (
        f"{shards.num_workers} shards without a manifest below {shards.uri}: {shards.rows:,} rows{copies} of"
        f" {form}{classes}, fingerprint {manifest.input.fingerprint}"
    )


def _cache_path(root: str, shards: Sequence[BareShard]) -> Path | None:
    """Return the file in this user's temporary folder for the summary, or None if the folder is another user's."""
    folder = Path(tempfile.gettempdir()) / f"bare-shards-{os.getuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            return folder / f"{_listing(root, shards)}.json"
    return None


def _listing(root: str, shards: Sequence[BareShard]) -> str:
    """Return a digest of the shards and of the paths, sizes, times and change marks of their files."""
    # The summary has paths below the root, which is another one for a file than for the folder that holds it.
    lines = [root]
    lines += [
        f"{number} {file.path} {file.bytes} {file.modified_ms} {file.change}"
        for number, shard in enumerate(shards)
        for file in shard.files
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
