"""Similarities between the points of one class, as integers.

They are exp(-|x - y|^2 / (2 sigma^2)), sigma the mean distance, or (1 + cosine of the angle between x and y) / 2.

Squared distances between integer points are exact in any BLAS. Square roots are rounded as IEEE 754 prescribes, and
sigma is a sum of integers. The exponential comes from a table computed in decimal arithmetic, because the last bit of
numpy's differs between processors. The same points therefore give the same integers on every machine, with any number
of threads."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints

ONE = 1 << 20  # the similarity of a point to itself
STEPS = 1 << 16  # steps of the exponent per unit: a similarity is within 2^-17 of the exponential
LAST = 15 * STEPS  # from here on similarities are zero: exp(-15) * ONE < 0.5
FINE = 256.0  # distances are rounded to 1/256 of the grid
BLOCK_VALUES = 1 << 20  # distances that are computed at a time

Similarities = npt.NDArray[np.int32]


def similarities(points: npt.NDArray[np.int32], sigma: float | None = None) -> Similarities:
    """Return the similarities of int32 points [n, p], int32 [n, n], symmetric, with ONE on the diagonal.

    The points' grid must keep squared distances below 2^52 (``projection.grid_exponent``). If all points are equal,
    every similarity is ONE. The default sigma is the mean of all n^2 distances, including zero distances of points to
    themselves; He and Dube (2023) use the mean over all classes.

    Costs 2 n^2 p flop in float64: half of the matrix is computed, once for sigma and once for the similarities. For
    memory see ``similarity_bytes``."""
    matrix = np.empty((len(points), len(points)), np.int32)
    sigma = mean_distance(points) if sigma is None else sigma
    table = exponentials()
    factor = STEPS / (2 * sigma * sigma) if sigma else 0.0
    for low, squared in _upper_blocks(points):
        squared *= factor
        np.minimum(squared, LAST, out=squared)
        np.rint(squared, out=squared)
        block = table[squared.astype(np.int32)]
        matrix[low : low + len(block), low:] = block
        matrix[low:, low : low + len(block)] = block.T
    return matrix


def cosine_similarities(points: npt.NDArray[np.int32], centre: Ints) -> Similarities:
    """Return (1 + cosine) / 2 of the angles between int32 points [n, p] as seen from a centre, int64 [p]: int32 [n, n].

    A set function needs similarities of 0 or more. The angle of a point at the centre counts as 90 degrees, to itself
    as 0. Products of integers are exact, and IEEE 754 prescribes how roots and quotients are rounded. Costs n^2 p flop
    in float64."""
    matrix = np.empty((len(points), len(points)), np.int32)
    # Half the range, so that products of centred points stay exact as those of points do.
    wide = ((points - centre + 1) >> 1).astype(np.float64)
    norms = np.sqrt(np.einsum("np,np->n", wide, wide))
    norms[norms == 0] = np.inf
    step = max(1, BLOCK_VALUES // max(1, len(points)))
    for low in range(0, len(points), step):
        block = wide[low : low + step] @ wide[low:].T
        block /= norms[low : low + step, None] * norms[low:]
        whole = np.rint((1 + block) * (ONE / 2)).astype(np.int32)
        matrix[low : low + step, low:] = whole
        matrix[low:, low : low + step] = whole.T
    np.fill_diagonal(matrix, ONE)
    return matrix


def similarity_bytes(rows: int, dimensions: int) -> int:
    """Return the memory that the computation of a class's similarities takes, including the points."""
    return 4 * rows * rows + 24 * rows * dimensions + 32 * BLOCK_VALUES


def mean_distance(points: npt.NDArray[np.int32]) -> float:
    """Return the mean distance of all pairs, including pairs of a point with itself, in units of the grid.

    Each distance is rounded to 1/256 of the grid."""
    total = 0
    for _, squared in _upper_blocks(points):
        width = len(squared)
        distances = np.rint(np.sqrt(squared, out=squared) * FINE).astype(np.int64)
        total += int(distances[:, :width].sum()) + 2 * int(distances[:, width:].sum())
    return total / (int(FINE) * len(points) ** 2)


def _upper_blocks(points: npt.NDArray[np.int32]) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """Yield squared distances of blocks of rows to themselves and all later rows.

    Each item is (first row of the block, float64 [rows, n - first row])."""
    wide = points.astype(np.float64)
    squares = np.einsum("np,np->n", wide, wide)
    step = max(1, BLOCK_VALUES // max(1, len(points)))
    for low in range(0, len(points), step):
        block = wide[low : low + step] @ (-2 * wide[low:]).T
        block += squares[low : low + step, None]
        block += squares[low:]
        yield low, block


@lru_cache(maxsize=1)
def exponentials() -> Similarities:
    """Return ONE * exp(-i / STEPS), rounded, int32 [LAST + 1].

    The table is the same on every machine, because IEEE 754 prescribes how products are rounded."""
    coarse = np.array([float((Decimal(-i) / 256).exp()) for i in range(LAST // 256 + 1)])
    fine = np.array([float((Decimal(-i) / STEPS).exp()) for i in range(STEPS // 256)])
    table: Similarities = np.rint(np.outer(coarse, fine).ravel()[: LAST + 1] * ONE).astype(np.int32)
    return table
