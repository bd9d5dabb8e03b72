"""Decoded rows in memory-mapped files, which all processes of a host share, so that shards may exceed their memory.

FOLDER/8c1f..-0-hashes.rows has the rows of one shard file: columns one after the other, each from a multiple of ALIGNMENT
on, and then MARK, which is written last. The name contains the digest of the shard file. The first process that needs a
file makes it under a temporary name, on which it holds a lock, and renames it when it is complete. Others make other files
meanwhile, or wait. A process that is killed loses its lock, and the next one begins the file anew."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from pipeline.core.atomic import is_at, path_in_errors, sync
from pipeline.core.shardset.parts import ShardFile
from trainer.data.mapped_images import MappedFile, MappedImages
from trainer.data.rows import COLUMNS, Rows
from trainer.data.shard_file import column_types, row_blocks
from trainer.data.shards import Shards
from trainer.watchdog import kick

IMAGES = "images_NCHW"
ALIGNMENT = 4096
LOOK_S = 0.1
FLUSH_BYTES = 256 << 20
DRAFT = ".draft"
MARK = b"complete"


@dataclass(frozen=True)
class RowFile:
    """A file of decoded rows.

    Attributes:
        file: the shard file with these rows.
        path: the decoded file.
        targets: whether labels are real targets.
        types: type of each column by its name in ``Rows``, images last.
        shapes: shape of one row of each column.
    """

    file: ShardFile
    path: Path
    targets: bool
    types: dict[str, np.dtype[Any]]
    shapes: dict[str, tuple[int, ...]]

    def offsets(self) -> dict[str, int]:
        """Return the first byte of each column."""
        offsets = {}
        end = 0
        for name in self.types:
            offsets[name] = -(-end // ALIGNMENT) * ALIGNMENT
            end = offsets[name] + self.file.rows * self.row_bytes(name)
        return offsets

    def row_bytes(self, name: str) -> int:
        """Return the size of a row of a column."""
        return self.types[name].itemsize * int(np.prod(self.shapes[name], dtype=np.int64))

    @property
    def bytes(self) -> int:
        """The size of the decoded file."""
        return self.offsets()[IMAGES] + self.file.rows * self.row_bytes(IMAGES) + len(MARK)

    def is_made(self) -> bool:
        """Return whether the file is complete. One of another size was damaged from outside, and is made anew."""
        try:
            with open(self.path, "rb") as source:
                is_whole = os.fstat(source.fileno()).st_size == self.bytes
                # The size alone says nothing: a file has its full size before its rows are written.
                return is_whole and os.pread(source.fileno(), len(MARK), self.bytes - len(MARK)) == MARK
        except FileNotFoundError:
            return False

    def read(self) -> tuple[dict[str, npt.NDArray[Any]], MappedFile]:
        """Return the columns by name, mapped and read-only, and the images. Raises OSError, FileNotFoundError if the file
        is not there."""
        with open(self.path, "rb") as source:
            data = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_READ)
        columns = {
            name: np.frombuffer(data, dtype, self.file.rows * self.row_bytes(name) // dtype.itemsize, offset).reshape(
                self.file.rows, *self.shapes[name]
            )
            for (name, dtype), offset in zip(self.types.items(), self.offsets().values(), strict=True)
        }
        return columns, MappedFile(columns.pop(IMAGES), data, self.offsets()[IMAGES])


def row_file(shards: Shards, file: ShardFile, folder: Path, *, targets: bool, with_hashes: bool) -> RowFile:
    """Return the decoded file of a shard file, whether it is made or not. See ``map_rows`` for the arguments."""
    types = {
        name: np.dtype(dtype) for name, dtype in column_types(shards, targets=targets, with_hashes=with_hashes).items()
    }
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(types, ())
    # The content depends on the number of the set in a mixture, too, because it is a part of the ids.
    words = [file.sha256, f"{shards.first_id(file):x}", *["targets"] * targets, *["hashes"] * with_hashes]
    types[IMAGES] = np.dtype(shards.layout.dtype)
    shapes[IMAGES] = shards.shape
    return RowFile(file, folder / f"{'-'.join(words)}.rows", targets, types, shapes)


def map_rows(shards: Shards, files: Sequence[ShardFile], *, targets: bool, with_hashes: bool) -> Rows:
    """Return the rows of some files with images in memory-mapped files, which are made if they do not exist.

    Args:
        shards: the set, with a folder for mapped rows.
        files: the files, in the order of the result, with at least one row.
        targets: read real targets instead of labels.
        with_hashes: compute the hashes of the rows, and read their neighbourhoods.
    Raises:
        DataError: a file differs from the manifest.
        OSError: a file cannot be read or written.
    """
    assert shards.mapped
    rows = [
        row_file(shards, file, shards.mapped, targets=targets, with_hashes=with_hashes) for file in files if file.rows
    ]
    columns, images = zip(*_read_all(shards, rows), strict=True)
    # The columns beside the images are copied, because samplers search and sort them as a whole.
    small = {name: np.concatenate([part[name] for part in columns]) for name in COLUMNS if name in columns[0]}
    return Rows(MappedImages(images), **small)


def _read_all(shards: Shards, files: Sequence[RowFile]) -> list[tuple[dict[str, npt.NDArray[Any]], MappedFile]]:
    """Return the columns and images of decoded files, which are made if they do not exist. Raises as ``map_rows``."""
    while True:
        make_all(shards, files)
        # The end of another process's run may delete them at any time.
        with suppress(FileNotFoundError):
            return [each.read() for each in files]


def make_all(shards: Shards, files: Sequence[RowFile]) -> None:
    """Make the decoded files that do not exist, or wait while other processes make them. Raises as ``map_rows``."""
    missing = [each for each in files if not each.is_made()]
    while missing:
        unmade = [each for each in missing if not _make(shards, each)]
        is_stuck = len(unmade) == len(missing)
        missing = unmade
        # Only files that others make are left.
        if missing and is_stuck:
            kick()
            time.sleep(LOOK_S)


def _make(shards: Shards, target: RowFile) -> bool:
    """Make a decoded file unless another process does, and return whether it is complete. Raises as ``map_rows``."""
    with _draft(target) as draft:
        if draft is None:
            return target.is_made()
        _write(shards, target, draft)
        _write_at(draft, np.frombuffer(MARK, np.uint8), target.bytes - len(MARK))
        # Before the rename: after a crash of the system, a resumed run uses every file with a final name.
        draft.flush()
        os.fsync(draft.fileno())
        # The end of another process's run may have removed the folder, and a third process may have begun the file anew.
        if is_at(draft, _draft_path(target)):
            with suppress(FileNotFoundError):
                os.rename(_draft_path(target), target.path)
                sync(target.path.parent)
    return target.is_made()


@contextmanager
def _draft(target: RowFile) -> Iterator[BinaryIO | None]:
    """Yield an empty file with the temporary name of a decoded file, locked; None if another process has the lock.

    An error removes it. The kernel releases the lock when the process ends, however it does."""
    path = _draft_path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as draft, path_in_errors(path):
        try:
            fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        # Between the opening and the lock, another process may have completed the file or given it up.
        if not is_at(draft, path):
            yield None
            return
        try:
            if target.is_made():
                path.unlink()
                yield None
                return
            draft.truncate(0)
            yield draft
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def remove_drafts(folder: Path) -> None:
    """Delete the unfinished files of processes that were killed, whose space counts as taken.

    Errors are ignored: the process that makes the file begins it anew."""
    for path in folder.glob(f"*{DRAFT}"):
        with suppress(OSError), open(path, "rb") as draft:
            fcntl.flock(draft, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def remove_row_files(folder: Path) -> None:
    """Delete decoded files, complete or not. Errors are ignored: nobody reads them any more."""
    for path in (*folder.glob("*.rows"), *folder.glob(f"*.rows{DRAFT}")):
        with suppress(OSError):
            path.unlink()


def _draft_path(target: RowFile) -> Path:
    return target.path.with_name(target.path.name + DRAFT)


def _write(shards: Shards, target: RowFile, draft: BinaryIO) -> None:
    """Write the rows of a shard file into an empty file, block by block."""
    # Fails at once if there is no room, and not after minutes.
    if hasattr(os, "posix_fallocate"):
        # In pieces, because a file system without this operation writes zeros, which may take minutes.
        for begin in range(0, target.bytes, FLUSH_BYTES):
            os.posix_fallocate(draft.fileno(), begin, min(FLUSH_BYTES, target.bytes - begin))
            kick()
    else:
        os.truncate(draft.fileno(), target.bytes)
    offsets = target.offsets()
    at = 0
    unflushed = 0
    for block in row_blocks(shards, target.file, targets=target.targets, with_hashes="hashes" in target.types):
        for name in target.types:
            column = np.ascontiguousarray(getattr(block, name))
            _write_at(draft, column, offsets[name] + at * target.row_bytes(name))
        at += len(block)
        unflushed += block.images_NCHW.nbytes
        # A flush of a large file at the end would take longer than the watchdog allows.
        if unflushed > FLUSH_BYTES:
            os.fsync(draft.fileno())
            unflushed = 0


def _write_at(file: BinaryIO, data: npt.NDArray[Any], offset: int) -> None:
    """Write an array at an offset of a file. The system may take a part of it at a time."""
    view = data.reshape(-1).view(np.uint8).data
    while len(view):
        count = os.pwrite(file.fileno(), view, offset)
        view = view[count:]
        offset += count
