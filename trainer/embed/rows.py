"""The training images of an embedding."""

from __future__ import annotations

from functools import partial

import numpy as np

from pipeline.core.hashing import is_drawn
from pipeline.core.seeds import Purpose, word
from pipeline.input.dataset import Dataset, ranges
from trainer.tables.rows import Images

FIT_BYTES = 1 << 30  # most bytes of training images, which are kept in memory
IDS_AT_ONCE = 1 << 20


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
