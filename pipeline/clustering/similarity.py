"""Similarities between the points of one class, as integers: exp(-|x - y|^2 / (2 sigma^2)), sigma the mean distance.

Squared distances between integer points are exact in any BLAS. Square roots are rounded in one way (IEEE 754), and sigma is
a sum of integers. The exponential comes out of a table made in decimal arithmetic, as numpy's own differs by processor
in its last bit. So the same points give the same integers on every machine, with any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache

import numpy as np
import numpy.typing as npt

ONE = 1 << 20  # the similarity of a point to itself
STEPS = 1 << 16  # of the exponent, a unit: a similarity is within 2^-17 of the exponential
LAST = 15 * STEPS  # from here on similarities are zero: exp(-15) * ONE < 0.5
FINE = 256.0  # parts of the grid that distances are rounded to
BLOCK_VALUES = 1 << 20  # of distances at a time

Similarities = npt.NDArray[np.int32]


def similarities(points: npt.NDArray[np.int32]) -> Similarities:
    """int32 [n, n] of int32 [n, p] on a grid on which squared distances stay below 2^52 (``projection.grid_exponent``):
    symmetric, ONE on the diagonal; ONE everywhere where all points are the same.

    sigma is the mean of all n^2 distances, those to itself included (He and Dube 2023, who take that of all classes).
    2 n^2 p flop in float64, as half of the matrix is computed, twice; see ``held_bytes``."""
    found = np.empty((len(points), len(points)), np.int32)
    sigma = mean_distance(points)
    table = exponentials()
    factor = STEPS / (2 * sigma * sigma) if sigma else 0.0
    for low, squared in _upper_blocks(points):
        squared *= factor
        np.minimum(squared, LAST, out=squared)
        np.rint(squared, out=squared)
        block = table[squared.astype(np.int32)]
        found[low : low + len(block), low:] = block
        found[low:, low : low + len(block)] = block.T
    return found


def held_bytes(rows: int, dimensions: int) -> int:
    """Memory that the similarities of a class take while they are made, the points included."""
    return 4 * rows * rows + 24 * rows * dimensions + 32 * BLOCK_VALUES


def mean_distance(points: npt.NDArray[np.int32]) -> float:
    """Of all pairs, those of a point with itself included, in units of the grid; each is rounded to 1/256 of it."""
    total = 0
    for _, squared in _upper_blocks(points):
        width = len(squared)
        distances = np.rint(np.sqrt(squared, out=squared) * FINE).astype(np.int64)
        total += int(distances[:, :width].sum()) + 2 * int(distances[:, width:].sum())
    return total / (int(FINE) * len(points) ** 2)


def _upper_blocks(points: npt.NDArray[np.int32]) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """Squared distances of some rows to themselves and to all later ones: (first row, float64 [rows, n - first row])."""
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
    """ONE * exp(-i / STEPS), rounded, int32 [LAST + 1]; the same on every machine, as products are rounded in one way."""
    coarse = np.array([float((Decimal(-i) / 256).exp()) for i in range(LAST // 256 + 1)])
    fine = np.array([float((Decimal(-i) / STEPS).exp()) for i in range(STEPS // 256)])
    table: Similarities = np.rint(np.outer(coarse, fine).ravel()[: LAST + 1] * ONE).astype(np.int32)
    return table
