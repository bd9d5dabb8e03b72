"""Repartitioning: the rows of a set are divided over the workers anew, at random or by importance. Pure.

A run that repartitions draws from all rows of its set. It begins with the warm-up: every epoch is a new random deal of
all rows. With ``importance``, intervals follow. At the start of an interval, the rows are ranked by the losses that they
had in the warm-up, or in the interval before, and each worker trains on its stripe or block of the ranks, in passes, until
the interval ends. Sheikholeslami et al., "The Impact of Importance-aware Dataset Partitioning on Data-parallel Training of
Deep Neural Networks", DAIS 2023.

Row numbers count the rows of the set by id. A clock is the number of a worker's step, at which it changes over. If losses
divide the rows, it first waits at a barrier until all losses before are in the table. With random deals nobody waits.

The workers may change. The next ones first draw what these have left of the epochs that have begun, then the deals of the
next epochs: the rows that all draw in step are one sequence, whatever the workers and mini-batches. In an interval they
deal what is left of its passes, each of which ends with a whole step. Then the same losses divide the rows over them, and
each makes the passes that the interval still needs. What is left of several epochs of a warm-up may have the same rows, so
that each of these epochs but the last ends with a whole step, too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.importance import blocks, stripes
from pipeline.core.seeds import Purpose, generator
from trainer.sampling.orders import permutation
from trainer.sampling.remainder import MOST_OPEN
from trainer.sampling.repartition import RepartitionOptions


class PartitionPhase(NamedTuple):
    """A part of a run in which some workers draw rows by one rule.

    Attributes:
        number: 0 for the warm-up, then the number of the interval, from 1.
        first: its first clock.
        is_dealt: whether all workers are dealt rows in step, as in the warm-up; else each makes passes over its own rows.
        passes: passes of the interval over the rows before ``first``; 0 if they are dealt.
    """

    number: int
    first: int
    is_dealt: bool
    passes: int = 0


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

    Epochs of the warm-up, and passes of an interval, are numbered from 0.

    Attributes:
        options: the rule.
        rows: number of rows N.
        batches: rows per mini-batch of each worker, of sum B.
        steps: the clock at which the workers end.
        epochs: length of the run in epochs, of which each has floor(N / B) steps.
        seed: of the run.
        before: the plan of the workers that these follow; None for the workers with which the run begins.
        ends: the clock at which each of those workers ended.
    """

    options: RepartitionOptions
    rows: int
    batches: tuple[int, ...]
    steps: int
    epochs: float
    seed: int
    before: PartitionPlan | None = None
    ends: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.rows < 2 * self.batch:
            raise UsageError(
                f"--repartition {self.options.repartition} needs a --batch-size of at most half of the {self.rows} rows, got"
                f" {self.batch}"
            )
        if self.before is None:
            self.check()

    def check(self) -> None:
        """Raise UsageError for a run that ends in its warm-up. O(N) for workers that follow others."""
        if self.options.repartition == "importance" and not self.start and self.dealt_until >= self.steps:
            raise UsageError(
                f"--warmup-epochs {self.options.warmup_epochs} take all {self.steps:,} steps of the run, so that no rows are"
                " divided by importance: give fewer, or a longer run"
            )

    def followed_by(
        self, ends: Sequence[int], batches: tuple[int, ...], *, steps: int | None = None, epochs: float | None = None
    ) -> PartitionPlan:
        """Return the plan of the next workers. They first draw what these have left of epochs or passes.

        Args:
            ends: the clock at which each of these workers ends.
            batches: rows per mini-batch of each of the next ones.
            steps, epochs: see the attributes (default: as these).
        """
        return replace(
            self,
            batches=batches,
            steps=self.steps if steps is None else steps,
            epochs=self.epochs if epochs is None else epochs,
            before=self,
            ends=tuple(ends),
        )

    @property
    def batch(self) -> int:
        """Rows of all mini-batches of a step, B."""
        return sum(self.batches)

    @property
    def clock(self) -> int:
        """The first clock of these workers."""
        return max(self.ends, default=0)

    @property
    def number(self) -> int:
        """The number of changes of workers so far."""
        return self.before.number + 1 if self.before else 0

    @cached_property
    def start(self) -> int:
        """The number of the phase in which these workers begin: the one of the last of the workers before."""
        return self.before.phase(min(self.ends)).number if self.before else 0

    @cached_property
    def _begun(self) -> range:
        """The epochs or passes of the phase ``start`` that the workers before have begun and not completed."""
        before = self.before
        if before is None:
            return range(0)
        if not self.start:
            slots = (np.array([min(self.ends), self.clock]) - before.clock) * before.batch - (0, 1)
            first, last = before.place(np.maximum(slots, 0))[0].tolist()
            return range(first, max(before.turns.stop, last + (slots[1] >= 0)))
        phase = before.own_phase(self.start)
        places = [
            divmod(max(0, end - phase.first) * batch, size)
            for end, batch, size in zip(self.ends, before.batches, before.sizes, strict=True)
        ]
        last = phase.passes + max(turn + (inside > 0) for turn, inside in places)
        # Rows beyond the passes of an interval only fill its last steps, unless it lasts until the end of the run.
        if self.start < self._most_intervals:
            last = min(last, self.options.interval)
        first = phase.passes + min(turn for turn, _ in places)
        is_dealing = before.start == self.start and min(self.ends) < phase.first
        return range(min(before.turns.start if is_dealing else first, last), last)

    @cached_property
    def turns(self) -> range:
        """The epochs or passes that these workers complete: the newest ones. Older ones are left out.

        A warm-up leaves out none. The losses of all passes of an interval count, so that it leaves out none, unless it lasts
        until the end."""
        if self.options.repartition == "random":
            return self._begun[-MOST_OPEN:]
        return self._begun[-max(MOST_OPEN, self.options.interval + 1) :] if self.start else self._begun

    @property
    def left_out(self) -> int:
        """The number of rows that nobody draws, of epochs or passes that are left out."""
        nothing = np.zeros(self.rows)
        return sum(len(self._undrawn(turn, nothing)) for turn in range(self._begun.start, self.turns.start))

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        """The number of rows that are left of each of ``turns``. It does not depend on the importance."""
        nothing = np.zeros(self.rows)
        return tuple(len(self._undrawn(turn, nothing)) for turn in self.turns)

    @cached_property
    def _lengths(self) -> tuple[int, ...]:
        """The number of positions of each of ``turns``: its rows, and rows that fill the last step; see _ends_with_step."""
        return tuple(
            -(-count // self.batch) * self.batch if self._ends_with_step(turn) else count
            for turn, count in zip(self.turns, self._counts, strict=True)
        )

    def _ends_with_step(self, turn: int) -> bool:
        """Return whether one of ``turns`` ends with a whole step.

        The rows that are left of the next epoch of a warm-up may be the same. A whole epoch needs none, see ``_deal``."""
        if self.options.repartition == "random":
            return False
        return bool(self.start) or turn + 1 in self.turns

    @cached_property
    def dealt_until(self) -> int:
        """The clock at which the last rows are dealt in step; the end of a run without intervals."""
        if self.options.repartition == "random":
            return self.steps
        end = self.begin(self.turns.stop if self.start else self.options.warmup_epochs)
        return self.clock - (-end // self.batch)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each worker in an interval. It does not depend on the importance."""
        return tuple(np.bincount(self.divide(np.zeros(self.rows)), minlength=len(self.batches)).tolist())

    @property
    def _most_intervals(self) -> int:
        """The greatest number of intervals: as many as fit into the epochs of the run, at least one.

        Counted in epochs, because warm-up and intervals end with whole steps: for a B that does not divide N, the steps of
        an epoch are fewer than a pass needs, and the last interval is a little shorter."""
        return max(1, self.start, int((self.epochs - self.options.warmup_epochs) // self.options.interval))

    @cached_property
    def phases(self) -> tuple[PartitionPhase, ...]:
        """The phases of these workers, in their order. The last interval lasts until the end of the run."""
        result = [PartitionPhase(self.start, self.clock, is_dealt=True)]
        if self.options.repartition == "random":
            return tuple(result)
        if self.start:
            result.append(PartitionPhase(self.start, self.dealt_until, is_dealt=False, passes=self.turns.stop))
        while result[-1].number < self._most_intervals:
            first = self._end(result[-1])
            if first >= self.steps:
                break
            result.append(PartitionPhase(result[-1].number + 1, first, is_dealt=False))
        return tuple(result)

    @property
    def intervals(self) -> int:
        """The number of intervals that the run has begun at its end, if these workers train it until then."""
        return self.phases[-1].number

    def _end(self, phase: PartitionPhase) -> int:
        """Return the clock at which a phase ends: every worker has then made the passes of an interval."""
        if phase.is_dealt:
            return self.dealt_until
        passes = max(0, self.options.interval - phase.passes)
        return phase.first + max(
            -(-passes * size // batch) for size, batch in zip(self.sizes, self.batches, strict=True)
        )

    def phase(self, clock: int) -> PartitionPhase:
        """Return the phase of a step."""
        return self.phases[bisect_right(self.phases, clock, key=lambda phase: phase.first) - 1]

    def own_phase(self, number: int) -> PartitionPhase:
        """Return the phase in which workers make the passes of an interval over their own rows."""
        return next(phase for phase in self.phases if phase.number == number and not phase.is_dealt)

    @property
    def first_steps(self) -> tuple[int, ...]:
        """The first step of each interval in which workers make passes over their own rows."""
        return tuple(phase.first for phase in self.phases if not phase.is_dealt)

    def divide(self, importance: npt.NDArray[np.floating]) -> Ints:
        """Return the worker of each row in an interval, int64 [N]. importance: of each row, [N]."""
        rule = {"stripes": stripes, "blocks": blocks}[self.options.heuristic]
        return rule(importance.astype(np.float64), len(self.batches))

    def run_pass(self, number: int, turn: int) -> int:
        """Return the number of a pass of an interval among all epochs and passes of the run."""
        return self.options.warmup_epochs + (number - 1) * self.options.interval + turn

    def begin(self, turn: int) -> int:
        """Return the position at which an epoch or a pass begins in the rows that are dealt in step."""
        index = turn - self.turns.start
        return sum(self._lengths[:index]) + max(0, index - len(self.turns)) * self.rows

    def place(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the epoch or pass of each position, and the position in its order: int64 each."""
        bounds = np.cumsum([0, *self._lengths])
        index = np.searchsorted(bounds[1:], positions, side="right")
        inside = positions - bounds[index]
        is_whole = index == len(self.turns)
        return self.turns.start + index + is_whole * (inside // self.rows), np.where(
            is_whole, inside % self.rows, inside
        )

    def ordinals(self, turns: Ints, inside: Ints) -> Ints:
        """Return the number of each dealt row's loss in the phase ``start``, from 1; 0 for a loss that does not count.

        turns, inside: the result of ``place``."""
        # The rows that fill the last step of an epoch or a pass do not count.
        counts = np.array([*self._counts, self.rows])
        is_left = inside < counts[np.minimum(turns - self.turns.start, len(self.turns))]
        if self.start:
            return np.where(is_left & (turns < self.options.interval), turns + 1, 0)
        is_counted = is_left & (turns >= self.options.ignore_epochs) & (turns < self.options.warmup_epochs)
        return np.where(is_counted, turns - self.options.ignore_epochs + 1, 0)

    def order(self, turn: int, importance: npt.NDArray[np.floating] | None = None) -> Ints:
        """Return the rows of an epoch or a pass in the order in which they are dealt in step, int64. O(N).

        importance: of each row, [N], if the workers begin in an interval."""
        if turn not in self.turns:
            return self._deal(turn)
        rows = self._undrawn(turn, importance)
        if not self._ends_with_step(turn):
            # Rows that are also left of the epoch before come last, so that a step seldom has a row twice.
            earlier = self._undrawn(turn - 1, importance) if turn - 1 in self.turns else rows[:0]
            return rows[np.argsort(np.isin(rows, earlier), kind="stable")]
        last_step = rows[len(rows) - len(rows) % self.batch :]
        others = self._shuffled(self.run_pass(self.start, turn) if self.start else turn)
        others = others[~np.isin(others, last_step)]
        return np.concatenate([rows, others[: -len(rows) % self.batch]])

    def _undrawn(self, turn: int, importance: npt.NDArray[np.floating] | None) -> Ints:
        """Return the rows of an epoch or a pass that the workers before have not drawn, int64. See ``order``."""
        before = self.before
        assert before is not None, "the first workers of a run complete nothing"
        if not self.start:
            return self._undealt(before, turn, importance)
        assert importance is not None, "an interval follows losses"
        is_dealt = before.start == self.start and turn in before.turns
        rows = (self._undealt if is_dealt else self._unvisited)(before, turn, importance)
        # Otherwise the rows of one worker would come after the other's.
        number = self.run_pass(self.start, turn)
        return rows[generator(self.seed, Purpose.REMAINDER, self.number, number).permutation(len(rows))]

    def _undealt(self, before: PartitionPlan, turn: int, importance: npt.NDArray[np.floating] | None) -> Ints:
        """Return ``_undrawn`` of an epoch or a pass that was dealt to the workers before in step. before: their plan."""
        rows = before.order(turn, importance)[: before.count(turn)]
        steps, slots = np.divmod(before.begin(turn) + np.arange(len(rows)), before.batch)
        workers = np.searchsorted(np.cumsum(before.batches), slots, side="right")
        return rows[steps >= np.array(self.ends)[workers] - before.clock]

    def _unvisited(self, before: PartitionPlan, turn: int, importance: npt.NDArray[np.floating]) -> Ints:
        """Return ``_undrawn`` of a pass that the workers before made over their own rows. before: their plan."""
        phase = before.own_phase(self.start)
        owners = before.divide(importance)
        number = self.run_pass(self.start, turn)
        parts = []
        for worker, (end, batch) in enumerate(zip(self.ends, before.batches, strict=True)):
            own = np.flatnonzero(owners == worker)
            # The worker's position in this pass is before it, in it or after it.
            position = max(0, end - phase.first) * batch - (turn - phase.passes) * len(own)
            parts.append(own[permutation(len(own), self.seed, worker, number)][max(0, position) :])
        return np.concatenate(parts)

    def count(self, turn: int) -> int:
        """Return the number of rows of an epoch or a pass that is dealt in step."""
        return self._counts[turn - self.turns.start] if turn in self.turns else self.rows

    def _deal(self, epoch: int) -> Ints:
        """Return the order in which all rows are dealt in an epoch, int64 [N]. O(N).

        The step in which an epoch begins has rows of the epoch before. These are not among its rows of the new epoch, so
        that no row is in two mini-batches of a step."""
        order = self._shuffled(epoch)
        tail = self.begin(epoch) % self.batch
        head = -self.begin(epoch) % self.batch
        if tail:
            follows_left = epoch == self.turns.stop and len(self.turns)
            before = (
                np.concatenate([self.order(each) for each in self.turns]) if follows_left else self._shuffled(epoch - 1)
            )
            # The end of the order stays as it is, because the next epoch depends on it.
            free = self.rows - self.begin(epoch + 1) % self.batch
            is_repeated = np.isin(order, before[len(before) - tail :])
            repeated = np.flatnonzero(is_repeated[:head])
            others = head + np.flatnonzero(~is_repeated[head:free])[: len(repeated)]
            order[repeated], order[others] = order[others], order[repeated]
        return order

    def _shuffled(self, epoch: int) -> Ints:
        return generator(self.seed, Purpose.REPARTITION, number=epoch).permutation(self.rows)
