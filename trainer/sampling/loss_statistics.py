"""The loss table of a run whose rows are divided by importance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.importance import Measure
from trainer.sampling.base import LossTable, Population, SetSizes, TableSampler, TableStream
from trainer.sampling.partition_plan import PartitionDraw, PartitionPhase


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
