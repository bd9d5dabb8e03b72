"""Recalibration of BatchNorm statistics on a sample of training rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from pipeline.core.shardset.ratios import largest_remainder
from trainer.config import slice_bounds
from trainer.data.augment import normalise
from trainer.data.batches import Batch
from trainer.data.rows import Rows, join_rows
from trainer.data.shard_file import pick_rows
from trainer.data.shards import Shards


@contextmanager
def one_thread() -> Iterator[None]:
    """Make torch compute on one CPU thread, so that results do not depend on the cores of the host.

    The number of threads determines the order in which torch and its kernels sum floats."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
@one_thread()
def recalibrate(model: nn.Module, batches: Iterator[Batch]) -> None:
    """Replace BatchNorm's running statistics, in place, by means over batches of equal weight.

    A no-op without BatchNorm. Running statistics that are merged from several workers do not belong to one set of
    parameters. Only BatchNorm is in train mode, so that dropout is inactive as in an evaluation. On the CPU the
    statistics are bit-identical for any number of threads."""
    norms = [module for module in model.eval().modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
        norm.momentum = None  # torch then computes the plain mean
    for images, _ in batches if norms else ():
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def batches(rows: Rows, mean: npt.NDArray[np.float32], size: int) -> Iterator[Batch]:
    """Yield all rows in order, normalised and not augmented, in batches of at most ``size`` that differ by one row."""
    for part in np.array_split(np.arange(len(rows)), -(-len(rows) // size)):
        images = normalise(rows.images_NCHW[part], mean)
        yield Batch(torch.from_numpy(images), torch.from_numpy(rows.labels[part]))


def sample_rows(shards: Shards, count: int, seed: int, *, targets: bool = False) -> Rows:
    """Return up to ``count`` distinct training rows, divided among workers by the set's ratios (default: equally).

    The rows and their order are functions of the seed. The order is random, because in the order of the data set a
    batch may contain a single class, with different statistics. Reads the files that hold such rows, block by block.
    Raises DataError and OSError.

    Args:
        shards: the shard set.
        count: maximum number of rows.
        seed: seed of the run.
        targets: whether labels are real targets instead of classes.
    """
    shares = [end - begin for begin, end in slice_bounds(count, shards.num_workers)]
    if shards.ratios:
        shares = largest_remainder(np.array([count]), shards.ratios)[0].tolist()
    parts = [part for worker, share in enumerate(shares) for part in _draw_rows(shards, worker, share, seed, targets)]
    rows = join_rows(parts)
    _, first = np.unique(rows.ids, return_index=True)  # a row that is in several shards may be drawn more than once
    return rows.select(generator(seed, Purpose.SAMPLE_ORDER).permutation(first))


def _draw_rows(shards: Shards, worker: int, count: int, seed: int, targets: bool) -> Iterator[Rows]:
    """Yield up to ``count`` randomly chosen rows of a worker, file by file."""
    rng = generator(seed, Purpose.TRAIN_SAMPLE, worker)
    row_numbers = np.sort(rng.permutation(shards.worker_rows(worker))[:count])
    first = 0
    for file in shards.worker_files(worker):
        rows_of_file = row_numbers[(row_numbers >= first) & (row_numbers < first + file.rows)] - first
        first += file.rows
        if len(rows_of_file):
            yield pick_rows(shards, file, partial(_places_in_block, rows_of_file), targets=targets)


def _places_in_block(numbers: Ints, rows: Rows, first: int) -> Ints:
    """Return the places of the rows with some numbers in a block of a file. first: number of the block's first row."""
    return numbers[(numbers >= first) & (numbers < first + len(rows))] - first
