"""BatchNorm statistics taken anew from training rows, and the rows for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipeline.core.seeds import Purpose, generator
from pipeline.core.shardset.ratios import largest_remainder
from trainer.config import slice_bounds
from trainer.data.augment import normalise
from trainer.data.batches import Batch
from trainer.data.shards import Rows, Shards, load_files


@contextmanager
def one_thread() -> Iterator[None]:
    """Have torch compute on one CPU thread, so that results do not depend on the cores of the host.

    The order in which torch and its kernels add up floats follows from the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
@one_thread()
def recalibrate(model: nn.Module, batches: Iterator[Batch]) -> None:
    """Replace BatchNorm's running statistics by means over these batches, each weighing the same.

    Statistics that workers merged belong to no single set of parameters. Only BatchNorm is in train mode, so dropout
    leaves the activations as they are in an evaluation. In place; a model without BatchNorm stays as it is. On the CPU the
    statistics are bit-equal whatever number of threads torch has."""
    norms = [module for module in model.eval().modules() if isinstance(module, _BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
        norm.momentum = None  # torch's name for the plain mean
    for images, _ in batches if norms else ():
        model(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    model.eval()


def batches(rows: Rows, mean: npt.NDArray[np.float32], size: int) -> Iterator[Batch]:
    """All rows in their order, normalised and not augmented, in batches of at most ``size`` that differ by one row."""
    for part in np.array_split(np.arange(len(rows)), -(-len(rows) // size)):
        images = normalise(rows.images_NCHW[part], mean)
        yield Batch(torch.from_numpy(images), torch.from_numpy(rows.labels[part]))


def sample_rows(shards: Shards, count: int, seed: int, *, targets: bool = False) -> Rows:
    """Return up to ``count`` distinct training rows, equally many of each worker where it has them, or as many as the set's
    ratios say: a function of the seed, and so is their order, which has nothing of the data set's: batches of one class
    would have statistics of their own.

    Reads the files that hold such rows, one in memory at a time. Raises DataError and OSError."""
    shares = [end - begin for begin, end in slice_bounds(count, shards.num_workers)]
    if shards.ratios:
        shares = largest_remainder(np.array([count]), shards.ratios)[0].tolist()
    parts = [part for worker, share in enumerate(shares) for part in _draw(shards, worker, share, seed, targets)]
    ids = np.concatenate([part.ids for part in parts])
    _, first = np.unique(ids, return_index=True)  # a row that sharding copied may be drawn for several workers
    first = generator(seed, Purpose.SAMPLE_ORDER).permutation(first)
    images = np.concatenate([part.images_NCHW for part in parts])
    return Rows(images[first], np.concatenate([part.labels for part in parts])[first], ids[first])


def _draw(shards: Shards, worker: int, count: int, seed: int, targets: bool) -> Iterator[Rows]:
    """Yield up to ``count`` rows of a worker, file by file."""
    rng = generator(seed, Purpose.TRAIN_SAMPLE, worker)
    chosen = np.sort(rng.permutation(shards.worker_rows(worker))[:count])
    first = 0
    for file in shards.worker_files(worker):
        here = chosen[(chosen >= first) & (chosen < first + file.rows)] - first
        first += file.rows
        if len(here):
            rows = load_files(shards, [file], targets=targets, hashed=False)
            yield Rows(rows.images_NCHW[here], rows.labels[here], rows.ids[here])
