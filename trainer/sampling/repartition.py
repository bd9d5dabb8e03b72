"""Repartitioning: the rows of a set are divided over the workers anew, at random or by importance. Pure.

A run that repartitions draws from all rows of its set. It begins with the warm-up: every epoch is a new random deal of
all rows. With ``importance``, intervals follow. At the start of an interval, the rows are ranked by the losses that they
had in the warm-up, or in the interval before, and each worker trains on its stripe or block of the ranks, in passes, until
the interval ends. Sheikholeslami et al., "The Impact of Importance-aware Dataset Partitioning on Data-parallel Training of
Deep Neural Networks", DAIS 2023.

Row numbers count the rows of the set by id. A clock is the number of a worker's step, at which it changes over. If losses
divide the rows, it first waits at a barrier until all losses before are in the table. With random deals nobody waits.

The workers of a random deal may change. The next ones first draw what these have left of the epochs that have begun, then
the deals of the next epochs: the rows that all draw in step are one sequence, whatever the workers and mini-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Flags, Ints
from pipeline.core.errors import UsageError
from pipeline.core.importance import HEURISTIC_HELP, IGNORE_HELP, MEASURE_HELP, Heuristic, Measure, blocks, stripes
from pipeline.core.seeds import Purpose, generator
from pipeline.core.specs import Spec, option
from trainer.coordination.barriers import Barriers
from trainer.sampling.base import LossTable, Population, SetSizes, TableSampler, TableStream
from trainer.sampling.orders import indices, permutation
from trainer.sampling.remainder import MOST_OPEN


@dataclass(frozen=True, kw_only=True)
class RepartitionOptions(Spec):
    """The options of a run that repartitions."""

    repartition: Literal["fixed", "random", "importance"] = option(
        "fixed",
        "rows of a worker: fixed: its shard; random: a new random deal of all rows in every epoch; importance: the random"
        " deals of the warm-up, then stripes or blocks of the rows by their losses, anew after every interval",
        advanced=True,
    )
    warmup_epochs: int = option(
        10, "--repartition importance: number of first epochs with a random deal", least=1, advanced=True
    )
    interval: int = option(
        5, "--repartition importance: number of passes over its rows that a worker makes between two divisions", least=1,
        advanced=True,
    )  # fmt: skip
    importance: Measure = option("average", f"--repartition importance: {MEASURE_HELP}", advanced=True)
    heuristic: Heuristic = option("stripes", f"--repartition importance: {HEURISTIC_HELP}", advanced=True)
    ignore_epochs: int = option(5, f"--repartition importance: {IGNORE_HELP}", least=0, advanced=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repartition == "importance" and self.ignore_epochs >= self.warmup_epochs:
            raise UsageError(
                f"--ignore-epochs {self.ignore_epochs} leaves no losses of --warmup-epochs {self.warmup_epochs}: give fewer"
            )
        if self.repartition != "importance":
            self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Raise UsageError for an option that has no effect, because only ``importance`` has intervals."""
        for item in fields(RepartitionOptions):
            if item.name != "repartition" and getattr(self, item.name) != item.default:
                flag = f"--{item.name.replace('_', '-')}"
                raise UsageError(f"{flag} is for --repartition importance, not {self.repartition}: leave it out")

    def identity(self) -> dict[str, object]:
        """Return the fields that a resumed run must not change; without repartitioning none of these."""
        values = super().identity()
        if self.repartition == "importance":
            return values
        own = set(RepartitionOptions.__dataclass_fields__) - (
            {"repartition"} if self.repartition == "random" else set()
        )
        return {name: value for name, value in values.items() if name not in own}


class PartitionPhase(NamedTuple):
    """A part of a run in which the division of rows follows one rule.

    Attributes:
        number: 0 for the warm-up, then the number of the interval, from 1.
        first: its first clock.
    """

    number: int
    first: int


class PartitionDraw(NamedTuple):
    """The rows of a worker's mini-batch.

    Attributes:
        numbers: their numbers, int64 [B].
        ordinals: number of each loss among the losses of its row that count in this phase, from 1; 0 if it does not
            count. int64 [B].
    """

    numbers: Ints
    ordinals: Ints


@dataclass(frozen=True)
class PartitionPlan:
    """The division of rows over workers: a pure function of (seed, clock, worker, importance).

    Attributes:
        options: the rule.
        rows: number of rows N.
        batches: rows per mini-batch of each worker, of sum B.
        steps: steps of each worker in the whole run.
        epochs: length of the run in epochs, of which each has floor(N / B) steps.
        seed: of the run.
        clock: the first clock of these workers.
        first_epoch: number of the first epoch whose rows they draw.
        left: rows that other workers have left of each epoch from there on, in the order in which these draw them, int64.
    """

    options: RepartitionOptions
    rows: int
    batches: tuple[int, ...]
    steps: int
    epochs: float
    seed: int
    clock: int = 0
    first_epoch: int = 0
    left: tuple[Ints, ...] = ()

    def __post_init__(self) -> None:
        if self.rows < 2 * self.batch:
            raise UsageError(
                f"--repartition {self.options.repartition} needs a --batch-size of at most half of the {self.rows} rows, got"
                f" {self.batch}"
            )
        if self.options.repartition == "importance" and self.warmup_steps >= self.steps:
            raise UsageError(
                f"--warmup-epochs {self.options.warmup_epochs} take all {self.steps:,} steps of the run, so that no rows are"
                " divided by importance: give fewer, or a longer run"
            )

    @property
    def batch(self) -> int:
        """Rows of all mini-batches of a step, B."""
        return sum(self.batches)

    @cached_property
    def warmup_steps(self) -> int:
        """Steps until every row was drawn once in each epoch of the warm-up; the whole run without intervals."""
        if self.options.repartition == "random":
            return self.steps
        return -(-self.options.warmup_epochs * self.rows // self.batch)

    @cached_property
    def interval_steps(self) -> int:
        """Steps until every worker has made the passes of an interval."""
        sizes = np.bincount(self.divide(np.zeros(self.rows)))
        return max(
            -(-self.options.interval * int(size) // batch) for size, batch in zip(sizes, self.batches, strict=True)
        )

    @cached_property
    def intervals(self) -> int:
        """Number of intervals: as many as fit into the epochs of the run, at least one. The last lasts until its end.

        Counted in epochs, because warm-up and intervals end with whole steps: for a B that does not divide N, the steps of
        an epoch are fewer than a pass needs, and the last interval is a little shorter."""
        by_epochs = int((self.epochs - self.options.warmup_epochs) // self.options.interval)
        by_steps = -(-(self.steps - self.warmup_steps) // self.interval_steps)
        return max(1, min(by_epochs, by_steps))

    def phase(self, clock: int) -> PartitionPhase:
        """Return the phase of a step."""
        after = clock - self.warmup_steps
        if after < 0 or self.options.repartition == "random":
            return PartitionPhase(0, 0)
        place = min(after // self.interval_steps, self.intervals - 1)
        return PartitionPhase(1 + place, self.warmup_steps + place * self.interval_steps)

    @property
    def first_steps(self) -> tuple[int, ...]:
        """The first step of each interval."""
        return tuple(self.warmup_steps + place * self.interval_steps for place in range(self.intervals))

    def divide(self, importance: npt.NDArray[np.floating]) -> Ints:
        """Return the worker of each row in an interval, int64 [N]. importance: of each row, [N]."""
        rule = {"stripes": stripes, "blocks": blocks}[self.options.heuristic]
        return rule(importance.astype(np.float64), len(self.batches))

    def begin(self, epoch: int) -> int:
        """Return the position at which an epoch begins in the rows that all workers draw, in step."""
        index = epoch - self.first_epoch
        return sum(len(part) for part in self.left[:index]) + max(0, index - len(self.left)) * self.rows

    def place(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the epoch of each position, and the position in its order: int64 each."""
        bounds = np.cumsum([0, *map(len, self.left)])
        index = np.searchsorted(bounds[1:], positions, side="right")
        # An interrupted epoch has no more rows than a whole one: the quotient is 0 there.
        whole, inside = np.divmod(positions - bounds[index], self.rows)
        return self.first_epoch + index + whole, inside

    def order(self, epoch: int) -> Ints:
        """Return the rows of an epoch in the order in which they are dealt, int64. O(N)."""
        index = epoch - self.first_epoch
        return self.left[index] if index < len(self.left) else self._deal(epoch)

    def followed_by(self, ends: Sequence[int], batches: tuple[int, ...]) -> PartitionPlan:
        """Return the plan of the next workers. They first draw what these have left of the epochs that have begun.

        Of more than MOST_OPEN such epochs, the older ones are left out.

        Args:
            ends: the clock at which each of these workers ends.
            batches: rows per mini-batch of each of the next ones.
        """
        clock = max(ends)
        last = (clock - self.clock) * self.batch - 1
        end = self.first_epoch + len(self.left)
        if last >= 0:
            end = max(end, int(self.place(np.array([last]))[0][0]) + 1)
        first = max(self.first_epoch, end - MOST_OPEN)
        left = tuple(self.order(epoch)[~self._is_drawn(epoch, ends)] for epoch in range(first, end))
        return replace(self, batches=batches, clock=clock, first_epoch=first, left=left)

    def left_out(self, ends: Sequence[int], later: PartitionPlan) -> int:
        """Return how many rows nobody draws, if workers end at some clocks. later: the plan of the next workers."""
        clock = max(ends)
        lacking = sum((clock - end) * batch for end, batch in zip(ends, self.batches, strict=True))
        not_begun = self.begin(later.first_epoch + len(later.left)) - (clock - self.clock) * self.batch
        return lacking + not_begun - sum(map(len, later.left))

    def _is_drawn(self, epoch: int, ends: Sequence[int]) -> Flags:
        """Return whether each row in the order of an epoch is drawn before workers end at some clocks: bool."""
        steps, slots = np.divmod(np.arange(self.begin(epoch), self.begin(epoch + 1)), self.batch)
        workers = np.searchsorted(np.cumsum(self.batches), slots, side="right")
        return steps < np.array(ends)[workers] - self.clock

    def _deal(self, epoch: int) -> Ints:
        """Return the order in which all rows are dealt in an epoch, int64 [N]. O(N).

        The step in which an epoch begins has rows of the epoch before. These are not among its rows of the new epoch, so
        that no row is in two mini-batches of a step."""
        order = self._shuffled(epoch)
        tail = self.begin(epoch) % self.batch
        head = -self.begin(epoch) % self.batch
        if tail:
            follows_left = epoch == self.first_epoch + len(self.left)
            before = np.concatenate(self.left) if follows_left else self._shuffled(epoch - 1)
            # The end of the order stays as it is, because the next epoch depends on it.
            free = self.rows - self.begin(epoch + 1) % self.batch
            is_repeated = np.isin(order, before[len(before) - tail :])
            repeated = np.flatnonzero(is_repeated[:head])
            others = head + np.flatnonzero(~is_repeated[head:free])[: len(repeated)]
            order[repeated], order[others] = order[others], order[repeated]
        return order

    def _shuffled(self, epoch: int) -> Ints:
        return generator(self.seed, Purpose.REPARTITION, number=epoch).permutation(self.rows)


@lru_cache(maxsize=8)
def plan_barriers(plan: PartitionPlan, *, reads_own_writes: bool) -> Barriers:
    """Return the barriers of workers that do not make each step together. O(N log N).

    All losses of a phase must be in the table before the next one begins. Within a phase, each loss of a row updates the
    statistics of the ones before (``LossStatistics``), so it must be computed with a table that has them. A row has
    another worker in every epoch of the warm-up, so that counted epochs begin with a barrier too. In an interval it has one
    worker, which needs barriers between passes only if its parameters may lack its own gradients.

    Args:
        plan: with intervals.
        reads_own_writes: see Protocol.
    """
    options = plan.options
    epochs = range(options.ignore_epochs + 1, options.warmup_epochs)
    clocks = _pass_steps(0, plan.rows, plan.batch, epochs) | set(plan.first_steps)
    if not reads_own_writes:
        sizes = np.bincount(plan.divide(np.zeros(plan.rows))).tolist()
        # The losses of the last interval divide nothing.
        for first in plan.first_steps[:-1]:
            for size, batch in set(zip(sizes, plan.batches, strict=True)):
                clocks |= _pass_steps(first, size, batch, range(1, options.interval))
    return Barriers(tuple(sorted(clocks)))


def _pass_steps(first: int, rows: int, batch: int, passes: range) -> set[int]:
    """Return the steps in which passes begin and, after a step that also has rows of the pass before, the next one.

    Args:
        first: the step in which pass 0 begins.
        rows: rows of a pass.
        batch: rows of a step.
        passes: numbers of the passes.
    """
    return {first + step for turn in passes for step in (turn * rows // batch, -(-turn * rows // batch))}


class PartitionStream:
    """The mini-batches of one worker by clock. Clocks may come in any order.

    Args:
        plan: the division of rows.
        worker: number of the worker.
    """

    def __init__(self, plan: PartitionPlan, worker: int) -> None:
        self.plan = plan
        self.worker = worker
        self._deal = lru_cache(maxsize=2)(plan.order)
        self._importance: npt.NDArray[np.floating] = np.empty(0)
        self._order = lru_cache(maxsize=2)(partial(permutation, seed=plan.seed, worker=worker))
        self._rows = np.empty(0, np.int64)

    def draw(self, clock: int, importance: npt.NDArray[np.floating] | None) -> PartitionDraw:
        """Return the mini-batch at a clock. importance: of each row, [N], at the start of the interval; None in the
        warm-up."""
        phase = self.plan.phase(clock)
        if not phase.number:
            return self._dealt(clock)
        assert importance is not None, "an interval follows losses"
        return self._interval_batch(clock - phase.first, phase, importance)

    def _dealt(self, clock: int) -> PartitionDraw:
        """Return a mini-batch of the warm-up: the worker's part of the rows that are dealt in a step."""
        plan = self.plan
        start = (clock - plan.clock) * plan.batch + sum(plan.batches[: self.worker])
        epochs, inside = plan.place(start + np.arange(plan.batches[self.worker]))
        numbers = np.empty(len(epochs), np.int64)
        for epoch in np.unique(epochs).tolist():
            numbers[epochs == epoch] = self._deal(epoch)[inside[epochs == epoch]]
        counts = (epochs >= plan.options.ignore_epochs) & (epochs < plan.options.warmup_epochs)
        return PartitionDraw(numbers, np.where(counts, epochs - plan.options.ignore_epochs + 1, 0))

    def _interval_batch(self, step: int, phase: PartitionPhase, importance: npt.NDArray[np.floating]) -> PartitionDraw:
        """Return a mini-batch of an interval. step: number of the step in the interval."""
        plan = self.plan
        # The rows are sorted once per interval. A roll-back may bring other values for the same clock.
        if not np.array_equal(self._importance, importance):
            self._importance = importance.copy()
            self._rows = np.flatnonzero(plan.divide(importance) == self.worker)
        rows = self._rows
        batch = plan.batches[self.worker]
        # Every pass of the run has an order of its own.
        first = plan.options.warmup_epochs + (phase.number - 1) * plan.options.interval
        places = indices(
            len(rows), batch, step, plan.seed, self.worker, lambda turn: self._order(len(rows), turn=first + turn)
        )
        passes = (step * batch + np.arange(batch)) // len(rows)
        return PartitionDraw(rows[places], np.where(passes < plan.options.interval, passes + 1, 0))


@dataclass(frozen=True)
class LossStatistics(TableSampler):
    """The losses of each row in this phase and the one before, as a loss table: their mean and their squared deviations.

    The table has two halves, of which phases use one in turn. A half is read in the phase after the one that wrote it, so
    that it does not change while rows are drawn by it. The first loss of a row in a phase replaces the values of an
    earlier one (Welford, "Note on a Method for Calculating Corrected Sums of Squares and Products", 1962)."""

    first_value = 0.0
    has_owners = True
    measure: Measure = "average"

    @property
    def columns(self) -> int:
        """Numbers per row and half: the mean, and for the variance the sum of squared deviations."""
        return 2 if self.measure == "variance" else 1

    def length(self, sizes: SetSizes) -> int:
        return 2 * self.columns * sizes.rows

    def keys(self, population: Population) -> Ints:
        raise AssertionError("the keys of a row depend on the step")

    def table_stream(self, population: Population) -> TableStream:
        raise AssertionError("rows are drawn by a PartitionStream")

    def row_keys(self, phase: PartitionPhase, selection: PartitionDraw, rows: int) -> Ints:
        """Return the keys of a mini-batch, int64 [B]: ordinal, half and row in one number. rows: number of all rows."""
        return (selection.ordinals * 2 + phase.number % 2) * rows + selection.numbers

    def importance(self, table: LossTable, phase: PartitionPhase, losses: int) -> LossTable:
        """Return the importance of each row at the start of an interval, float32 [N], up to a factor.

        Args:
            table: the table of any step of the interval.
            phase: the interval.
            losses: losses of each row that count in the phase before. With a single one, the variance is replaced by
                the loss.
        """
        half = table.reshape(2, self.columns, -1)[(phase.number - 1) % 2]
        column: LossTable = half[1 if self.measure == "variance" and losses > 1 else 0]
        return column

    def targets(
        self, table: LossTable, keys: Ints, losses: LossTable, hits: npt.NDArray[np.bool_]
    ) -> tuple[Ints, LossTable]:
        rows = len(table) // (2 * self.columns)
        ordinals, places = np.divmod(keys, 2 * rows)
        half, numbers = np.divmod(places, rows)
        result = table.copy()
        changed: list[Ints] = []
        # A row that is drawn in the last step of a pass and again in the next pass is there twice.
        for ordinal in np.unique(ordinals[ordinals > 0]).tolist():
            now = ordinals == ordinal
            means = half[now] * self.columns * rows + numbers[now]
            before = result[means] if ordinal > 1 else np.zeros(len(means), np.float32)
            deviation = losses[now] - before
            result[means] = before + deviation / np.float32(ordinal)
            changed.append(means)
            if self.columns > 1:
                squares = result[means + rows] if ordinal > 1 else np.zeros(len(means), np.float32)
                result[means + rows] = squares + deviation * (losses[now] - result[means])
                changed.append(means + rows)
        entries: Ints = np.unique(np.concatenate(changed)) if changed else np.empty(0, np.int64)
        return entries, result[entries]
