"""The rows to embed, read as the sharding jobs read them, so that their ids are the same. No Spark, no torch."""

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
from trainer.embed.options import Embedding

FIT_BYTES = 1 << 30  # of images that are learned from, which are held in memory
IDS_AT_ONCE = 1 << 20

Images = npt.NDArray[np.uint8]


def open_rows(store: Store, asked: Embedding) -> Dataset:
    """The images, without labels. Raises DataError where there are none, UsageError for rows without pixels."""
    if asked.shards is not None:
        dataset: Dataset = committed_dataset(open_committed(store, asked.shards))
    else:
        assert asked.input is not None
        dataset = discover(
            store,
            asked.input,
            run=serial,
            format=asked.format,
            shape=asked.image_shape,
            unlabelled=True,
            channels=asked.channels,
        )
    if dataset.layout.dtype != "uint8":
        raise UsageError(
            f"{dataset.uri} holds {dataset.layout.describe()}: the jobs look at such features as they are, without a table"
        )
    return dataset


def rows_to_fit(dataset: Dataset, wanted: int) -> int:
    """About as many as are wanted, of large images at most as many as FIT_BYTES hold."""
    return min(wanted, dataset.rows, max(1, FIT_BYTES // dataset.record_bytes))


def drawn_rows(dataset: Dataset, wanted: int, seed: int) -> Images:
    """About so many rows, uint8 [rows, C, H, W], in the order of ids. A keyed hash of their ids draws them, so they are the
    same rows however the input is read."""
    chosen = partial(is_drawn, rows=dataset.rows, wanted=wanted, key=word(seed, Purpose.FIT_ROWS))
    spans = ranges(0, dataset.rows, -(-dataset.rows // IDS_AT_ONCE))
    total = sum(int(chosen(np.arange(low, high)).sum()) for low, high in spans)
    if not total:  # of very few that are wanted the hash may draw none
        chosen, total = partial(np.greater, wanted), wanted
    found = np.empty((total, dataset.record_bytes), np.uint8)
    at = 0
    for images in dataset.read_some(0, dataset.rows, chosen):
        found[at : at + len(images)] = images
        at += len(images)
    return found.reshape(-1, *dataset.layout.shape)


def read_rows(dataset: Dataset, low: int, high: int) -> Images:
    """The rows low..high-1, uint8 [rows, C, H, W]."""
    blocks = [block.images for block in dataset.read(low, high)]
    return np.concatenate(blocks).reshape(-1, *dataset.layout.shape)
