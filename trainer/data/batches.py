"""The endless stream of a worker's mini-batches: a pure function of (seed, worker, clock), prepared in the background.

So a resumed run needs no state but the clock, and workers of one run never share a random number."""

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
    """images_BCHW: float32, normalised; labels: int64 [B], or targets in float32."""

    images_BCHW: torch.Tensor
    labels: torch.Tensor


def permutation(rows: int, seed: int, worker: int, turn: int) -> Ints:
    """The order of a worker's rows in pass ``turn`` over its shard: int64 [rows], read-only."""
    order = generator(seed, Purpose.ORDER, worker, turn).permutation(rows)
    order.flags.writeable = False
    return order


def indices(
    rows: int, batch: int, clock: int, seed: int, worker: int, order: Callable[[int], Ints] | None = None
) -> Ints:
    """Which rows the mini-batch at a clock holds: int64 [batch], places clock*batch onwards in the endless sequence of
    passes. A pass that ends inside a mini-batch is continued by the next, so no row waits for another pass.

    order: of the rows in a pass, ``permutation`` where it is not given. O(batch), and O(rows) for the first mini-batch of
    a pass, whatever the clock."""
    start, stop = clock * batch, (clock + 1) * batch
    turns = range(start // rows, (stop - 1) // rows + 1)
    order = order or partial(permutation, rows, seed, worker)
    parts = [order(turn)[max(0, start - turn * rows) : stop - turn * rows] for turn in turns]
    return np.concatenate(parts)


def bernoulli(rows: int, fraction: float, clock: int, seed: int, worker: int) -> Ints | slice:
    """Which rows the mini-batch at a clock holds if each is in it by itself with a probability: int64 [about
    rows * fraction], or the slice of all of them from a fraction of 1 on.

    A binomial number of rows, drawn without replacement, has the law of one coin a row and costs O(their number)."""
    if fraction >= 1:
        return slice(None)
    rng = generator(seed, Purpose.SAMPLING, worker, clock)
    return rng.choice(rows, rng.binomial(rows, fraction), replace=False, shuffle=False)


class Loader:
    """A worker's mini-batches by clock, the next ``depth`` prepared by one thread while the caller computes.

    Any clock may be asked for at any time; one out of turn (after a rollback) only finds nothing prepared.
    mean: float32 [C] in 0..255; fraction: of Bernoulli sampling instead of passes over the rows; follow: of passes over
    rows that grow. Only pixels are augmented. Raises ValueError without rows."""

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
        self.rows, self.mean, self.batch_size = rows, mean, batch_size
        self.seed, self.worker, self.fraction, self.depth = seed, worker, fraction, depth
        self.follow = follow
        self.augment = augment and rows.images_NCHW.dtype == np.uint8
        self._thread = ThreadPoolExecutor(1, f"batches-{worker}")
        self._ahead: dict[int, Future[tuple[Batch, float]]] = {}
        # The pass that ends in a mini-batch and the one that begins.
        self._order = lru_cache(maxsize=2)(partial(permutation, len(rows), seed, worker))
        self._order_of = lru_cache(maxsize=2)(lambda rows, turn: permutation(rows, seed, worker, turn))
        self.read_s = 0.0  # that the thread spent on the latest mini-batch

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
        """Return the mini-batches of one worker of a run. rows: those dealt to it."""
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
        """The mini-batch at a clock, made here and now: a pure function of the clock."""
        rows, chosen = self._drawn(clock)
        images = normalise(rows.images_NCHW[chosen], self.mean)
        if self.augment:
            images = augment(images, generator(self.seed, Purpose.AUGMENTATION, self.worker, clock))
        return Batch(torch.from_numpy(images), torch.from_numpy(rows.labels[chosen]))

    def _drawn(self, clock: int) -> tuple[Rows, Ints | slice]:
        """The rows, and which of them the mini-batch holds."""
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
        """What the mini-batch at a clock shows of the rows; None where they are not hashed, not drawn in passes, or not the
        same in every pass. O(batch)."""
        if self.fraction is not None or self.follow or not len(self.rows.hashes):
            return None
        rows, start, stop = len(self.rows), clock * self.batch_size, (clock + 1) * self.batch_size
        hashes = self.rows.hashes[self._chosen(clock)]
        passes = stop // rows - start // rows
        begun = hashes[len(hashes) - stop % rows :] if passes else hashes[:0]
        return Seen(int(hashes.sum()), int(begun.sum()), passes)

    def batch(self, clock: int) -> Batch:
        """The mini-batch at a clock. Raises what preparing it raised; RuntimeError after ``close``."""
        wanted = range(clock, clock + self.depth + 1)
        for other in self._ahead.keys() - set(wanted):
            self._ahead.pop(other).cancel()
        for number in wanted:
            if number not in self._ahead:
                self._ahead[number] = self._thread.submit(self._timed, number)
        batch, self.read_s = self._ahead.pop(clock).result()
        return batch

    def close(self) -> None:
        """End the thread; what it has in work is finished and dropped."""
        self._ahead.clear()
        self._thread.shutdown(cancel_futures=True)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
