"""The rows to embed. They are read as by the sharding jobs, so that ids are the same. No Spark, no torch."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import UsageError
from pipeline.core.hashing import is_drawn
from pipeline.core.seeds import Purpose, word
from pipeline.core.shardset.manifest import open_committed
from pipeline.core.storage.store import Store
from pipeline.input.committed import committed_dataset
from pipeline.input.dataset import Dataset, discover, ranges, serial
from pipeline.input.read_options import ReadOptions
from trainer.embed.options import Embedding

FIT_BYTES = 1 << 30  # most bytes of training images, which are kept in memory
IDS_AT_ONCE = 1 << 20

Images = npt.NDArray[np.uint8]


def open_rows(store: Store, embedding: Embedding) -> Dataset:
    """Open the images of --input or --shards, without labels.

    Raises DataError if there are none, UsageError for rows without pixels."""
    if embedding.shards is not None:
        dataset: Dataset = committed_dataset(open_committed(store, embedding.shards))
    else:
        assert embedding.input is not None
        dataset = discover(
            store,
            store.resolve(embedding.input),
            run=serial,
            read_options=ReadOptions(
                embedding.format, embedding.image_shape, unlabelled=True, channels=embedding.channels
            ),
        )
    # Real-valued features need no embedding: the jobs use them directly.
    if dataset.layout.dtype != "uint8":
        raise UsageError(
            f"{dataset.uri} holds {dataset.layout.describe()}: the jobs look at such features as they are, without a table"
        )
    return dataset


def rows_to_fit(dataset: Dataset, fit_rows: int) -> int:
    """Return the approximate number of training rows: ``fit_rows``, or fewer if FIT_BYTES is too small for them."""
    return min(fit_rows, dataset.rows, max(1, FIT_BYTES // dataset.record_bytes))


def draw_rows(dataset: Dataset, count: int, seed: int) -> Images:
    """Return about ``count`` random rows, uint8 [rows, C, H, W], in the order of ids; at least one.

    They are drawn by a hash of their ids with a key from the seed, and so do not depend on how the input is read."""
    select = partial(is_drawn, rows=dataset.rows, count=count, key=word(seed, Purpose.FIT_ROWS))
    spans = ranges(0, dataset.rows, -(-dataset.rows // IDS_AT_ONCE))
    total = sum(int(select(np.arange(low, high)).sum()) for low, high in spans)
    if not total:  # for a very small ``count`` the hash may draw no row: take the first ones
        select = partial(np.greater, count)
        total = count
    # Counted first, so that the array is allocated once at its full size.
    sample = np.empty((total, dataset.record_bytes), np.uint8)
    at = 0
    for images in dataset.read_some(0, dataset.rows, select):
        sample[at : at + len(images)] = images
        at += len(images)
    return sample.reshape(-1, *dataset.layout.shape)


def read_rows(dataset: Dataset, low: int, high: int) -> Images:
    """Return the rows low..high-1, uint8 [rows, C, H, W]."""
    blocks = [block.images for block in dataset.read(low, high)]
    return np.concatenate(blocks).reshape(-1, *dataset.layout.shape)
