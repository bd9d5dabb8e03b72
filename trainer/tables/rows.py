"""The images of a table, read by ranges of ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import JobError, UsageError
from pipeline.core.shardset.manifest import open_committed
from pipeline.core.storage.store import Store
from pipeline.input.committed import committed_dataset
from pipeline.input.dataset import Dataset, discover, list_input, listing_digest, serial
from pipeline.input.files import check_apart
from pipeline.input.read_options import ReadOptions
from trainer.home.enclosing import enclosing_set
from trainer.home.place import place_of
from trainer.tables.options import TableOptions
from trainer.tables.resumable import TableFile

Images = npt.NDArray[np.uint8]


def open_rows(store: Store, options: TableOptions) -> Dataset:
    """Open the images of --input or --shards, without labels.

    Raises DataError if there are none, UsageError if the table is among them, or in any set."""
    check_apart(store, store.resolve(options.output), store.resolve(options.input or str(options.shards)))
    if around := enclosing_set(place_of(options.output, store)):
        raise UsageError(f"--output {options.output} lies in the shard set {around}; choose another")
    if options.shards is not None:
        dataset: Dataset = committed_dataset(open_committed(store, options.shards))
        return dataset
    assert options.input is not None, "checked by TableOptions"
    return discover(store, store.resolve(options.input), run=serial, read_options=_read_options(options))


def _read_options(options: TableOptions) -> ReadOptions:
    """Return how the rows of --input are read: without labels, so that they need none."""
    return ReadOptions(
        options.format,
        options.image_shape,
        unlabelled=True,
        channels=options.channels,
        resize=options.resize,
        image_column=options.image_column,
    )


def refuse_change(store: Store, options: TableOptions, dataset: Dataset, table: TableFile) -> None:
    """Raise JobError, and delete the table's work folder, if files of --input have changed since they were opened.

    Files of a set do not change. dataset: the rows that the table was made of."""
    if options.input is None:
        return
    # Most inputs are compared without opening a file. A folder of images, or files without rows, are surveyed again.
    entries = list_input(store, store.resolve(options.input), _read_options(options))
    before = dataset.listing()
    if listing_digest(entries) != before and open_rows(store, options).listing() != before:
        table.clear()
        raise JobError(f"{dataset.uri} has changed while it was read; run it again")


def read_rows(dataset: Dataset, low: int, high: int) -> npt.NDArray[np.uint8 | np.float32]:
    """Return the rows low..high-1 as numbers of the dataset's type, [rows, C, H, W]."""
    blocks = [block.numbers(dataset.layout) for block in dataset.read(low, high)]
    return np.concatenate(blocks).reshape(-1, *dataset.layout.shape)
