"""The export of a shard set to a folder: one file for each shard file, in the format of another reader, and a card."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pipeline.core.errors import UsageError
from pipeline.core.shardset.manifest import dumps
from pipeline.core.shardset.parts import ShardFile
from pipeline.core.storage.store import configured_store
from pipeline.input.files import check_apart
from trainer.data.opening import open_shards
from trainer.data.shards import Shards
from trainer.export import dataset, mds, webdataset
from trainer.export.formats import BEGUN, DATASET, MDS, WEBDATASET
from trainer.export.samples import Samples, read_samples
from trainer.export.set_card import worker_name, write_card
from trainer.export.target import check_outside, locked_folder, names_in, read_begun, unwritable_is_usage_error
from trainer.home.place import Place, delete_tree, entries, is_file, make, place_of, write_whole
from trainer.run_files import METRICS
from trainer.tables.progress import TableProgress

FILES = "data"  # the folder of the exported files
CARD = "README.md"  # written last
EVALUATION = "test"  # the files of evaluation rows
INDEX = "index.json"  # of a folder


class SetFormat(NamedTuple):
    """A format of exported sets.

    Attributes:
        suffix: of its files.
        make: (set, samples of a file) to the content of the exported file.
        make_index: the folder of a worker's files to the content of its index; None for a format whose files lie in one
            folder, without an index.
    """

    suffix: str
    make: Callable[[Shards, Samples], bytes]
    make_index: Callable[[Place], bytes] | None = None


FORMATS = {
    WEBDATASET: SetFormat(webdataset.SUFFIX, webdataset.make_tar),
    DATASET: SetFormat(dataset.SUFFIX, dataset.make_parquet),
    MDS: SetFormat(mds.SUFFIX, mds.make_shard, mds.make_index),
}


def export_set(uri: str, to: str, kind: str, *, overwrite: bool = False, quiet: bool = False) -> Place:
    """Write the shards and evaluation rows of a set for another reader, and return the folder.

    Every file appears atomically, and an export that was killed is continued. Keeps one shard file in memory, with its
    images and their encoded form.

    Args:
        uri: a committed set, or shards without a manifest, local, on HDFS or in an object store.
        to: the folder.
        kind: a key of ``FORMATS``.
        overwrite: whether to replace an earlier export.
        quiet: print no progress.
    Raises:
        DataError: there is no such set, or a file is damaged.
        UsageError: the folder holds something else, or cannot be written.
        OSError: a file of the set cannot be read.
    """
    if (place_of(uri) / METRICS).exists():
        raise UsageError(f"{uri} is a run, and --as {kind} writes shard sets; choose a format of models")
    target = place_of(to)
    check_apart(configured_store(), str(target), str(place_of(uri)), flag="--to")
    shards = open_shards(uri)
    identity = {"set": hashlib.sha256(dumps(shards.manifest)).hexdigest(), "format": kind}
    with unwritable_is_usage_error(target):
        _check_target(target, identity, overwrite=overwrite)  # before anything is written into the folder, even a lock
    with locked_folder(target):
        _export(target, shards, identity, overwrite=overwrite, progress=TableProgress(quiet, "export"))
    return target


def _export(
    target: Place, shards: Shards, identity: dict[str, str], *, overwrite: bool, progress: TableProgress
) -> None:
    """Write what a folder lacks of an export. See ``export_set`` for the errors. identity: of the export."""
    kind = identity["format"]
    with unwritable_is_usage_error(target):
        written = _begin(target, identity, overwrite=overwrite)
    make_index = FORMATS[kind].make_index
    files = list(_files(shards, FORMATS[kind].suffix, has_folders=make_index is not None))
    if shards.manifest.columns:
        kept_columns = ", ".join(column.name for column in shards.manifest.columns)
        progress.warn(f"the columns that --keep-columns kept are left out ({kept_columns})")
    rows = sum(file.rows for name, file in files if name in written)
    total = sum(file.rows for _, file in files)
    progress.begin("export", total, rows)
    for name, file in files:
        if name in written:
            continue
        data = FORMATS[kind].make(shards, read_samples(shards, file))
        with unwritable_is_usage_error(target):
            if make_index:  # only these have a folder for each worker
                make((target / FILES / name).parent)
            write_whole(target / FILES / name, data)
        rows += file.rows
        progress.advance(rows, f"{rows:,} of {total:,} rows")
    if make_index:
        for folder in sorted({name.partition("/")[0] for name, _ in files}):
            with unwritable_is_usage_error(target):
                if f"{folder}/{INDEX}" not in written:
                    write_whole(target / FILES / folder / INDEX, make_index(target / FILES / folder))
    # The card comes last: a folder without one is unfinished. One that is there may have been edited.
    with unwritable_is_usage_error(target):
        if not (target / CARD).exists():
            write_whole(target / CARD, write_card(shards, kind).encode(errors="replace"))


def _check_target(
    target: Place, identity: dict[str, str], *, overwrite: bool
) -> tuple[dict[str, str] | None, set[str]]:
    """Return the identity of the export in a folder, None if there is none, and the names of its files and folders.

    Raises UsageError if the folder holds anything else, or another export without ``overwrite``."""
    if is_file(target):
        raise UsageError(f"--to {target} is a file; name a folder")
    check_outside(target)
    names = names_in(target)
    earlier = read_begun(target, "set")
    if names and earlier is None:
        raise UsageError(f"--to {target} is not empty, and holds no export of a set; choose another")
    if earlier not in (None, identity) and not overwrite:
        raise UsageError(f"--to {target} holds another export: give --overwrite, or choose another")
    return earlier, names


def _begin(target: Place, identity: dict[str, str], *, overwrite: bool) -> set[str]:
    """Return the names of the files that an earlier start of this export has written, after making the folders.

    Raises UsageError as ``_check_target``."""
    earlier, names = _check_target(target, identity, overwrite=overwrite)
    # An export that was killed continues; a finished one is replaced.
    if overwrite and earlier and (earlier != identity or CARD in names):
        (target / CARD).unlink(missing_ok=True)
        if FILES in names:
            delete_tree(target / FILES)
    # This file comes first, so that the next start recognises what a killed one has left.
    make(target)
    write_whole(target / BEGUN, json.dumps(identity).encode())
    make(target / FILES)
    names = set(_names(target / FILES))
    drafts = {name for name in names if name.endswith(".tmp")}
    for name in drafts:
        (target / FILES / name).unlink(missing_ok=True)
    return names - drafts


def _names(folder: Place) -> Iterator[str]:
    """Yield the names of the files in a folder and in its folders."""
    for entry in entries(folder):
        if entry.is_dir:
            yield from (f"{entry.name}/{each.name}" for each in entries(folder / entry.name))
        else:
            yield entry.name


def _files(shards: Shards, suffix: str, *, has_folders: bool) -> Iterator[tuple[str, ShardFile]]:
    """Yield the name of each exported file and its shard file. The names of a worker's files begin with its number.

    has_folders: whether each worker, and the evaluation rows, have a folder."""
    middle = "/shard." if has_folders else "-"
    for worker in range(shards.num_workers):
        for number, file in enumerate(shards.worker_files(worker)):
            yield f"{worker_name(worker)}{middle}{number:05d}{suffix}", file
    for number, file in enumerate(shards.eval_files()):
        yield f"{EVALUATION}{middle}{number:05d}{suffix}", file
