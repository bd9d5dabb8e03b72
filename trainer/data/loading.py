"""The loading of the rows of a worker, or of evaluation rows, into memory or memory-mapped files."""

from __future__ import annotations

import numpy as np

from pipeline.core.errors import UsageError
from pipeline.core.shardset.parts import ShardFile
from trainer.data.mapped_images import Pixels
from trainer.data.row_files import map_rows
from trainer.data.rows import Rows
from trainer.data.shard_file import column_types, row_blocks
from trainer.data.shards import Shards


def load_worker(shards: Shards, index: int, *, targets: bool = False) -> Rows:
    """Read the files of one worker and no others. A lost DataNode is waited for.

    Keeps the rows, one file and one row group of it in memory.

    Args:
        shards: the set.
        index: number of the worker.
        targets: read real targets instead of labels.
    Raises:
        UsageError: the set has no such worker.
        DataError: a file differs from the manifest.
        OSError: a file cannot be read.
    """
    if not 0 <= index < shards.num_workers:
        raise UsageError(f"there is no worker {index}: {shards.uri} has workers 0..{shards.num_workers - 1}")
    return load_files(shards, shards.worker_files(index), targets=targets)


def load_files(shards: Shards, files: list[ShardFile], *, targets: bool = False) -> Rows:
    """Read some files of a worker, with the checks of ``load_worker``.

    Args:
        shards: the set.
        files: of one worker.
        targets: read real targets instead of labels.
    """
    return _load(shards, files, targets=targets, with_hashes=True)


def load_eval(shards: Shards, *, targets: bool = False) -> Rows | None:
    """Read and verify the evaluation rows; None if the set has none."""
    files = shards.eval_files()
    return _load(shards, files, targets=targets, with_hashes=False) if files else None


def _load(shards: Shards, files: list[ShardFile], *, targets: bool, with_hashes: bool) -> Rows:
    """Read and check files into one allocation, or map them. Raises DataError and OSError.

    Args:
        shards: the set.
        files: the files, in the order of the result.
        targets: read real targets instead of labels.
        with_hashes: compute the hashes of the rows, 0 for copies, and read their neighbourhoods.
    """
    total = sum(file.rows for file in files)
    if shards.mapped and total:
        return map_rows(shards, files, targets=targets, with_hashes=with_hashes)
    # Allocated once at full size: joining parts at the end would need the memory twice.
    images: Pixels = np.empty((total, *shards.shape), shards.layout.dtype)
    dtypes = column_types(shards, targets=targets, with_hashes=with_hashes)
    rows = Rows(images, **{name: np.empty(total, dtype) for name, dtype in dtypes.items()})
    at = 0
    for file in files:
        for block in row_blocks(shards, file, targets=targets, with_hashes=with_hashes):
            part = slice(at, at + len(block))
            images[part] = block.images_NCHW
            for name in dtypes:
                getattr(rows, name)[part] = getattr(block, name)
            at += len(block)
    return rows
