"""The endless stream of a worker's mini-batches: a pure function of (seed, worker, clock), prepared in the background.

A resumed run therefore needs no state but the clock, and workers of a run never share random numbers."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pipeline.core.seeds import Purpose, generator
from trainer.config import Config
from trainer.coordination.passes import Seen
from trainer.data.augment import augment, normalise
from trainer.data.follow import Following
from trainer.data.shards import Rows, Shards

Ints = npt.NDArray[np.int64]


class Batch(NamedTuple):
    """A mini-batch. images_BCHW: float32, normalised. labels: int64 [B], or targets in float32."""

    images_BCHW: torch.Tensor
    labels: torch.Tensor


def permutation(rows: int, seed: int, worker: int, turn: int) -> Ints:
    """Return the order of a worker's rows in pass ``turn`` over its shard: int64 [rows], read-only."""
    order = generator(seed, Purpose.ORDER, worker, turn).permutation(rows)
    order.flags.writeable = False
    return order


def indices(
    rows: int, batch: int, clock: int, seed: int, worker: int, order: Callable[[int], Ints] | None = None
) -> Ints:
    """Return the rows of the mini-batch at a clock: int64 [batch], from position clock * batch of consecutive passes.

    If a pass ends inside a mini-batch, the next pass fills it up, so that no row is left for a later pass. O(batch),
    and O(rows) for the first mini-batch of a pass, for any clock.

    Args:
        rows: number of rows in the shard.
        batch: rows per mini-batch.
        clock: number of the mini-batch.
        seed: of the run.
        worker: number of the worker.
        order: function from the number of a pass to the order of its rows; default: ``permutation``.
    """
    start = clock * batch
    stop = (clock + 1) * batch
    turns = range(start // rows, (stop - 1) // rows + 1)
    order = order or partial(permutation, rows, seed, worker)
    parts = [order(turn)[max(0, start - turn * rows) : stop - turn * rows] for turn in turns]
    return np.concatenate(parts)


def bernoulli(rows: int, fraction: float, clock: int, seed: int, worker: int) -> Ints | slice:
    """Return the rows of the mini-batch at a clock if each row is drawn independently with probability ``fraction``.

    The result is int64 [about rows * fraction], or the slice of all rows for a fraction of 1 or more. A binomial number
    of rows, drawn without replacement, has the same distribution as one coin per row, at a cost of O(drawn rows).

    Args:
        rows: number of rows in the shard.
        fraction: probability of a row.
        clock: number of the mini-batch.
        seed: of the run.
        worker: number of the worker.
    """
    if fraction >= 1:
        return slice(None)
    rng = generator(seed, Purpose.SAMPLING, worker, clock)
    return rng.choice(rows, rng.binomial(rows, fraction), replace=False, shuffle=False)


class Loader:
    """A worker's mini-batches by clock; one thread prepares the next ``depth`` while the caller computes.

    Clocks may be requested in any order; after a jump, as in a roll-back, nothing is prepared yet. Only pixels are
    augmented, not real-valued features. Raises ValueError without rows.

    Args:
        rows: the worker's rows.
        mean: float32 [C], in 0..255.
        batch_size: rows per mini-batch.
        seed: of the run.
        worker: number of the worker.
        augment: whether to crop and flip images at random.
        fraction: probability of a row under Bernoulli sampling; None for passes over the rows.
        depth: mini-batches to prepare ahead.
        follow: passes over rows that grow; None for fixed rows.
    """

    def __init__(
        self,
        rows: Rows,
        mean: npt.NDArray[np.float32],
        batch_size: int,
        *,
        seed: int,
        worker: int,
        augment: bool,
        fraction: float | None = None,
        depth: int = 2,
        follow: Following | None = None,
    ) -> None:
        if not len(rows) or batch_size < 1:
            raise ValueError(f"no mini-batches of {batch_size} out of {len(rows)} rows")
        self.rows = rows
        self.mean = mean
        self.batch_size = batch_size
        self.seed = seed
        self.worker = worker
        self.fraction = fraction
        self.depth = depth
        self.follow = follow
        self.augment = augment and rows.images_NCHW.dtype == np.uint8
        self._thread = ThreadPoolExecutor(1, f"batches-{worker}")
        self._ahead: dict[int, Future[tuple[Batch, float]]] = {}
        # Two entries: a mini-batch can contain the end of one pass and the beginning of the next.
        self._order = lru_cache(maxsize=2)(partial(permutation, len(rows), seed, worker))
        self._order_of = lru_cache(maxsize=2)(lambda rows, turn: permutation(rows, seed, worker, turn))
        self.read_s = 0.0  # seconds that the thread spent on the latest mini-batch

    @classmethod
    def of_run(
        cls,
        config: Config,
        shards: Shards,
        rows: Rows,
        worker: int,
        num_workers: int,
        *,
        follow: Following | None = None,
    ) -> Loader:
        """Return the mini-batches of one worker of a run. rows: the rows dealt to it."""
        return cls(
            rows,
            shards.mean,
            config.worker_batches(num_workers, shards.ratios_of(num_workers))[worker],
            seed=config.run.seed,
            worker=worker,
            augment=config.data.augment,
            fraction=config.fraction(shards.rows),
            follow=follow,
        )

    def prepare(self, clock: int) -> Batch:
        """Make the mini-batch at a clock in the calling thread: a pure function of the clock."""
        rows, chosen = self._drawn(clock)
        images = normalise(rows.images_NCHW[chosen], self.mean)
        if self.augment:
            images = augment(images, generator(self.seed, Purpose.AUGMENTATION, self.worker, clock))
        return Batch(torch.from_numpy(images), torch.from_numpy(rows.labels[chosen]))

    def _drawn(self, clock: int) -> tuple[Rows, Ints | slice]:
        """Return the rows of the worker, and the selection for the mini-batch at a clock."""
        if self.follow:
            return self.follow.chosen(self.batch_size, clock, self._order_of)
        return self.rows, self._chosen(clock)

    def _timed(self, clock: int) -> tuple[Batch, float]:
        began = time.perf_counter()
        return self.prepare(clock), time.perf_counter() - began

    def _chosen(self, clock: int) -> Ints | slice:
        if self.fraction is None:
            return indices(len(self.rows), self.batch_size, clock, self.seed, self.worker, self._order)
        return bernoulli(len(self.rows), self.fraction, clock, self.seed, self.worker)

    def seen(self, clock: int) -> Seen | None:
        """Return the hash sums of the mini-batch at a clock. O(batch).

        None if rows are not hashed, not drawn in passes, or not the same in every pass."""
        if self.fraction is not None or self.follow or not len(self.rows.hashes):
            return None
        rows = len(self.rows)
        start = clock * self.batch_size
        stop = (clock + 1) * self.batch_size
        hashes = self.rows.hashes[self._chosen(clock)]
        passes = stop // rows - start // rows
        # The rows after the last end of a pass in this mini-batch.
        begun = hashes[len(hashes) - stop % rows :] if passes else hashes[:0]
        return Seen(int(hashes.sum()), int(begun.sum()), passes)

    def batch(self, clock: int) -> Batch:
        """Return the mini-batch at a clock. Raises the errors of its preparation, and RuntimeError after ``close``."""
        wanted = range(clock, clock + self.depth + 1)
        # Prepared mini-batches outside the next clocks, as after a roll-back, would never be used.
        for other in self._ahead.keys() - set(wanted):
            self._ahead.pop(other).cancel()
        for number in wanted:
            if number not in self._ahead:
                self._ahead[number] = self._thread.submit(self._timed, number)
        batch, self.read_s = self._ahead.pop(clock).result()
        return batch

    def close(self) -> None:
        """End the thread. A mini-batch in preparation is finished and dropped."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
