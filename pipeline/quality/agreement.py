"""The agreement of two groupings of the same rows: of two sets, or of neighbourhoods and labels.

Pure functions of arrays, and of sums over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from pipeline.core.arrays import Ints


@dataclass(frozen=True)
class Cells:
    """The number of rows by (left, right) group, without empty cells.

    keys: int64 [cells], left * number of right groups + right, ascending. counts: int64 [cells]."""

    keys: Ints
    counts: Ints

    @classmethod
    def from_groups(cls, left: Ints, right: Ints, right_groups: int) -> Cells:
        """Return the cells of some rows from their groups, int64 [rows]."""
        return cls(*np.unique(left * right_groups + right, return_counts=True))

    @classmethod
    def total(cls, parts: Iterable[Cells]) -> Cells:
        """Return the cells of all parts of the rows, with their counts added. O(cells log cells)."""
        parts = list(parts)
        keys, places = np.unique(np.concatenate([part.keys for part in parts]), return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, places, np.concatenate([part.counts for part in parts]))
        return cls(keys, counts)

    def select(self, rows: Ints) -> Cells:
        return Cells(self.keys[rows], self.counts[rows])


@dataclass(frozen=True)
class PairSums:
    """The numbers of row pairs in common groups. The sums of parts without a common left group add up to the whole.

    same_cell: pairs in one cell. same_left: pairs in one left group. right_sizes: int64 [right groups], rows."""

    same_cell: int
    same_left: int
    right_sizes: Ints

    @classmethod
    def from_cells(cls, cells: Cells, right_groups: int) -> PairSums:
        """Return the numbers of row pairs in some cells. right_groups: the number of right groups."""
        left, right = np.divmod(cells.keys, right_groups)
        _, places = np.unique(left, return_inverse=True)
        left_sizes = np.zeros(len(left), np.int64)
        right_sizes = np.zeros(right_groups, np.int64)
        np.add.at(left_sizes, places, cells.counts)
        np.add.at(right_sizes, right, cells.counts)
        return cls(count_pairs(cells.counts), count_pairs(left_sizes), right_sizes)

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(
            self.same_cell + other.same_cell, self.same_left + other.same_left, self.right_sizes + other.right_sizes
        )

    def adjusted_rand(self) -> float:
        """Return the adjusted Rand index (Hubert and Arabie 1985): 1 for equal groups, about 0 for independent ones."""
        same_right = count_pairs(self.right_sizes)
        rows = int(self.right_sizes.sum())
        expected = Fraction(self.same_left * same_right, max(1, rows * (rows - 1) // 2))
        most = Fraction(self.same_left + same_right, 2)
        return float((self.same_cell - expected) / (most - expected)) if most != expected else 1.0


@dataclass(frozen=True)
class LabelAgreement:
    """The agreement of neighbourhoods with a label of their rows.

    adjusted_rand: adjusted Rand index. purity: share of the rows that have the most frequent label of their
    neighbourhood. largest_label: share of the most frequent label, the purity of a single neighbourhood."""

    adjusted_rand: float
    purity: float
    largest_label: float


def label_agreement(cells: Cells, labels: int) -> LabelAgreement:
    """Return the agreement of neighbourhoods, the left groups of the cells, with labels, the right groups."""
    sums = PairSums.from_cells(cells, labels)
    neighbourhoods, places = np.unique(cells.keys // labels, return_inverse=True)
    most = np.zeros(len(neighbourhoods), np.int64)
    np.maximum.at(most, places, cells.counts)
    rows = int(cells.counts.sum())
    return LabelAgreement(sums.adjusted_rand(), int(most.sum()) / rows, int(sums.right_sizes.max()) / rows)


def count_pairs(sizes: Ints) -> int:
    """Return the number of row pairs inside groups of the given sizes."""
    return sum(int(size) * (int(size) - 1) // 2 for size in sizes.tolist())


def contingency_table(cells: Cells, left_groups: int, right_groups: int) -> Ints:
    """Return the cells as a table, int64 [left groups, right groups]."""
    table = np.zeros(left_groups * right_groups, np.int64)
    table[cells.keys] = cells.counts
    return table.reshape(left_groups, right_groups)
