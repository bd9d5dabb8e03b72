"""The mini-batches of a worker that exchanges examples: its own, and one of its pool after every F of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, UsageError
from pipeline.core.seeds import Purpose, generator
from trainer.config import Config
from trainer.data.augment import Floats
from trainer.data.deal import dealt_sizes
from trainer.data.rows import Rows, join_rows
from trainer.data.sampling import Draw, RowSampler
from trainer.data.shard_file import pick_rows
from trainer.data.shards import Shards
from trainer.gossip import SELECTORS, STATIC
from trainer.gossip.losses import RecordedLosses
from trainer.gossip.rounds import MOST_EXAMPLE_BYTES, Examples, Pool
from trainer.gossip.weave import WovenStep, selection_epoch, woven_step

ReadRows = Callable[[Ints], Rows]  # returns the rows with some ids, in their order


class PoolSpan(NamedTuple):
    """A pool and the steps that use it.

    Attributes:
        clock: the first of them. They end before the next pool's first one.
        first: the worker's first step with any pool.
        read: returns its rows, in the order of the pool.
    """

    clock: int
    first: int
    read: Callable[[], Rows]


class GivenExamples(NamedTuple):
    """The examples that a worker gives to others. epoch: see ``selection_epoch``."""

    epoch: int
    examples: Examples


class GossipSampler:
    """Draws a worker's own mini-batches and, between them, mini-batches of its pool.

    Its thread may draw while another thread adopts a pool: a draw uses the pools before or after it. The owner must then
    drop what was drawn ahead.

    Args:
        own: draws from the worker's rows.
        rows: the worker's rows.
        config: the run.
        worker: number of the worker.
        batch_size: of the worker.
        epoch_steps: own mini-batches per pass over the worker's rows, rounded up.
        places: positions of the rows that it trains on, int64 and ascending; None for all. No other row goes to others.
        begin: its first clock, from which on it counts its passes.
        turn: number of its first pass.

    Attributes:
        spans: number of the newest pools that it keeps; None keeps all, as a replay needs them.
        losses: of the rows that it trains on, in its own mini-batches.
    """

    reads_table = False

    def __init__(
        self,
        own: RowSampler,
        rows: Rows,
        config: Config,
        worker: int,
        batch_size: int,
        epoch_steps: int,
        *,
        places: Ints | None = None,
        begin: int = 0,
        turn: int = 0,
    ) -> None:
        self.own = own
        self.rows = rows
        self.options = config.data
        self.seed = config.run.seed
        self.worker = worker
        self.batch_size = batch_size
        self.epoch_steps = epoch_steps
        self.begin = begin
        self.turn = turn
        self.spans: int | None = 2
        self._places = np.arange(len(rows)) if places is None else places
        self.losses = RecordedLosses(len(self._places))
        self._pools: tuple[PoolSpan, ...] = ()  # by their first steps
        self._read = lru_cache(maxsize=2)(lambda span: span.read())
        self._order = lru_cache(maxsize=2)(partial(_pool_order, self.seed, worker))

    def draw(self, clock: int, table: Floats | None = None) -> Draw:
        span, step = self._woven(clock)
        if not step.is_foreign:
            return self.own.draw(step.number)
        assert span is not None, "a worker without a pool draws its own rows"
        rows = self._read(span)
        # The first of its steps has the beginning of the order; after the end it begins again.
        number = step.number - (span.clock - span.first) // (self.options.gossip_every + 1)
        # BatchNorm cannot normalise a rest of one example: a rest of fewer than K belongs to the mini-batch before.
        least = min(self.options.gossip, self.batch_size)
        batches = max(1, -(-(len(rows) - least + 1) // self.batch_size))
        batch = number % batches
        end = len(rows) if batch == batches - 1 else (batch + 1) * self.batch_size
        return Draw(rows, self._order(len(rows))[batch * self.batch_size : end], is_foreign=True)

    def adopt(self, clock: int, first: int, read: Callable[[], Rows] | None) -> None:
        """Use a pool from a step on, instead of all pools of this and later steps. read: see PoolSpan; None for no pool."""
        spans = tuple(span for span in self._pools if span.clock < clock)
        if read is not None:
            spans = (*spans, PoolSpan(clock, first, read))
        self._pools = spans if self.spans is None else spans[-self.spans :]

    def note(self, draw: Draw, losses: Floats) -> None:
        """Record the losses of an own mini-batch; foreign ones do not count. losses: float32 [B]."""
        if not draw.is_foreign:
            # Rows that complete a pass of other workers may be none of its own.
            is_own = np.isin(draw.places, self._places)
            self.losses.note(np.searchsorted(self._places, draw.places[is_own]), losses[is_own])

    def forget_losses(self) -> None:
        """Begin without any losses, as a new process of the worker does."""
        self.losses = RecordedLosses(len(self._places))

    def restore_losses(self, history: Iterable[tuple[Ints, Floats]]) -> None:
        """Replace all losses by those of a ledger. history: ids and losses of any rows, in the order of their visits."""
        self.forget_losses()
        own_ids = self.rows.ids[self._places]
        order = np.argsort(own_ids, kind="stable")
        for ids, losses in history:
            places = order[np.searchsorted(own_ids, ids, sorter=order).clip(max=len(order) - 1)]
            is_own = own_ids[places] == ids
            self.losses.note(places[is_own], losses[is_own])

    def selection(self, clock: int) -> GivenExamples | None:
        """Return the examples that the worker gives to others before a step; None before most steps."""
        options = self.options
        step = self._woven(clock)[1]
        epoch = selection_epoch(step._replace(number=step.number - self.begin), self.epoch_steps, options.gossip_signal)
        if epoch is None:
            return None
        epoch += self.turn
        turn = 0 if options.selector == STATIC else epoch
        rng = generator(self.seed, Purpose.GOSSIP_SELECTION, self.worker, turn)
        places = SELECTORS[options.selector](self.losses, options.gossip, epoch, rng)
        selected = self.rows.select(self._places[places])
        return GivenExamples(epoch, Examples(selected.ids, selected.labels, np.asarray(selected.images_NCHW)))

    def passes(self, clock: int) -> int:
        """Return the number of passes over the worker's rows that end with the mini-batch at a clock."""
        step = self._woven(clock)[1]
        return 0 if step.is_foreign else self.own.draw(step.number).passes or 0

    def _woven(self, clock: int) -> tuple[PoolSpan | None, WovenStep]:
        """Return the pool of a step, None if it has none, and its mini-batch."""
        pools = self._pools
        span = next((span for span in reversed(pools) if span.clock <= clock), None)
        # Of a step before the pools that are still in memory only its kind is asked.
        first = span.first if span else (pools[0].first if pools else None)
        return span, woven_step(clock, first, self.options.gossip_every)


def _pool_order(seed: int, worker: int, size: int) -> Ints:
    order: Ints = generator(seed, Purpose.GOSSIP_ORDER, worker).permutation(size)
    return order


def rows_of_pool(pool: Pool, read_rows: ReadRows) -> Callable[[], Rows] | None:
    """Return a function that returns the rows of a pool; None for a pool without examples.

    read_rows: reads them by their ids if the pool has no content."""
    if not pool.round:
        return None
    examples = pool.others()
    if not examples.has_content:
        return lambda: read_rows(examples.ids)
    rows = Rows(examples.images_KCHW, examples.labels, examples.ids)
    return lambda: rows


def find_rows(parts: Iterable[Rows], ids: Ints) -> Rows:
    """Return the rows with some ids, in their order. Raises DataError if one is missing."""
    rows = join_rows([part.select(np.flatnonzero(np.isin(part.ids, ids))) for part in parts])
    missing = np.setdiff1d(ids, rows.ids)
    if len(missing):
        raise DataError(f"the shard set has no row {missing[0]}, which workers had exchanged: it has changed")
    order = np.argsort(rows.ids, kind="stable")
    return rows.select(order[np.searchsorted(rows.ids, ids, sorter=order)])


def read_rows(shards: Shards, ids: Ints, *, targets: bool) -> Rows:
    """Read the rows with some ids from a set. Reads every file, block by block. Raises DataError if one is missing.

    targets: read real targets instead of labels."""

    def choose(block: Rows, first: int) -> Ints:
        return np.flatnonzero(np.isin(block.ids, ids))

    return find_rows((pick_rows(shards, file, choose, targets=targets) for file in shards.files() if file.rows), ids)


def check_gossip(config: Config, shards: Shards, num_workers: int) -> None:
    """Raise UsageError if the workers of a run cannot exchange as many examples as it says."""
    if not config.data.gossip:
        return
    if num_workers < 2:
        raise UsageError(
            f"--gossip {config.data.gossip} exchanges examples among workers, and the run has one: leave it out"
        )
    # The transport would drop a longer message, and no round would ever be complete.
    image_bytes = shards.layout.record_bytes
    if image_bytes > MOST_EXAMPLE_BYTES:
        raise UsageError(
            f"--gossip {config.data.gossip} sends images of at most {MOST_EXAMPLE_BYTES:,} bytes, and those of {shards.uri}"
            f" have {image_bytes:,}: leave it out, or make the images smaller (--resize of the sharding jobs)"
        )
    is_even = config.cohorts.entries and num_workers != shards.num_workers
    least = sum(shards.shard_rows) // num_workers if is_even else min(dealt_sizes(shards, num_workers))
    if config.data.gossip > least:
        raise UsageError(f"--gossip {config.data.gossip} exceeds the {least} rows of a worker: give at most {least}")
