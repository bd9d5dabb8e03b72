"""Locality-sensitive hash functions of images: near rows share a bucket more often than far ones. Pure numpy and scipy.

A function is floor((x . a + b) / w) of integers: directions are rounded to a grid once they are drawn or fitted. So a row
has the same bucket whatever rows are hashed beside it, in any BLAS, with any number of threads. Rows share a bucket where
all M functions agree on them: with the probability p^M, if p is that of one function (the AND of M).

- ``lsh``: a is normal, b uniform in [0, w) (p-stable hashing: Datar, Immorlica, Indyk and Mirrokni, SoCG 2004, section 3.2).
  With c = distance / w, p = 1 - 2 N(-1/c) - 2c / sqrt(2 pi) * (1 - exp(-1 / 2c^2)), where N is the normal distribution's.
- ``sign``: the side of a random hyperplane through the mean of the sample (Charikar, STOC 2002, section 3):
  p = 1 - angle / pi, of the angle that two rows make there.
- ``dsh``: the sides of the leading principal directions of the sample, at its medians, so that every function halves it. A
  simple data-sensitive hash; that of Gao et al. (DSH, SIGMOD 2014) learns its functions by boosting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt

from pipeline.clustering import dual, gram
from pipeline.clustering.npz import expect
from pipeline.clustering.projection import BLOCK_ROWS, BLOCK_VALUES
from pipeline.core.arrays import Floats, Ints
from pipeline.core.errors import UsageError
from pipeline.core.hashing import row_hashes
from pipeline.core.seeds import Purpose, generator

Family = Literal["lsh", "sign", "dsh"]
Rows = npt.NDArray[np.uint8] | npt.NDArray[np.int32]  # [rows, d]: pixels, or points on the grid of projection.Grid
MOST_FUNCTIONS = 64
SAMPLE_ROWS = 10_000
WIDTH_ROWS = 2000  # of the sample, whose nearest neighbours tell the width
WIDTH_COLUMNS = 4096  # of them at once, in float64
WIDTH_DISTANCES = 4  # between nearest neighbours
EXACT = 51  # products of rows and directions stay within 2^51, so that float64 adds them up without rounding
POINT_NORM = 2.0**25  # of a point on the grid; see projection.grid_exponent
SIDES = 1 << 53  # a width beyond all products: of a value only the sign is left


class _Function(NamedTuple):
    """See Hashes. weights int64 [d]; values: how many there may be."""

    weights: Ints
    offset: int
    width: int
    first: int
    values: int


@dataclass(frozen=True, eq=False)
class Hashes:
    """M fitted functions of rows of d numbers. Picklable.

    weights: integers in float64 [d, M]; offsets, widths int64 [M]; firsts int64 [M], the lowest value of each, which counts
    as 0; multipliers uint64 [M], which make one key of M values. width: that of ``lsh``, in the unit of the rows' numbers,
    else 0; rows: of the sample."""

    family: Family
    weights: Floats
    offsets: Ints
    widths: Ints
    firsts: Ints
    multipliers: npt.NDArray[np.uint64]
    width: float
    rows: int

    @property
    def functions(self) -> int:
        return len(self.offsets)

    def values(self, rows: Rows) -> Ints:
        """Of each function, int64 [rows, M], 0 or more. 2 * rows * d * M flop in float64."""
        found = products(rows, self.weights) + self.offsets
        for function, width in enumerate(self.widths.tolist()):  # numpy divides by one number much faster than by many
            found[:, function] //= width
        return found - self.firsts

    def buckets(self, rows: Rows) -> Ints:
        """The key of each row's bucket, int64 [rows], any of them.

        Equal values have equal keys. Different ones have different keys where all that there may be fit into 63 bits, as up
        to 63 functions of ``sign`` and ``dsh`` do; else two of them have one key with a probability of at most 2^(e - 63),
        where 2^e divides all their differences."""
        keys: Ints = (self.values(rows).view(np.uint64) @ self.multipliers).view(np.int64)
        return keys

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {item.name: np.asarray(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]]) -> Hashes:
        """Return the functions that ``arrays`` made these of. Raises ValueError for any others."""
        vectors = dict.fromkeys(("offsets", "widths", "firsts"), "i8 m") | {"multipliers": "u8 m"}
        expect(arrays, family="U", weights="f8 d m", width="f8", rows="i8", **vectors)
        if str(arrays["family"]) not in get_args(Family) or (arrays["widths"] < 1).any():
            raise ValueError(f"functions of the family {str(arrays['family'])[:20]!r}, or without widths")
        found: dict[str, Any] = {name: array if array.ndim else array.item() for name, array in arrays.items()}
        return cls(**found)


def fit(sample: Rows, family: Family, functions: int, seed: int, *, width: float | None = None) -> Hashes:
    """M = ``functions`` for rows like those of a sample, at least one.

    The same for any order of the sample; the directions of ``dsh`` are LAPACK's, and another machine may round them
    otherwise. Of ``lsh`` and ``sign`` the first of more functions are those of fewer. Of ``dsh`` there are fewer than asked
    for where the sample varies in fewer directions.

    width: of ``lsh``, in the unit of the rows' numbers; by default four times the median distance between nearest neighbours
    that differ, of 2,000 rows of the sample. Cost: 2 * 2,000^2 * d flop for that, the PCA of the sample for ``dsh``
    (gram.py). Raises UsageError."""
    if not 1 <= functions <= MOST_FUNCTIONS:
        raise UsageError(f"--functions must be at least 1 and at most {MOST_FUNCTIONS}, got {functions}")
    check_dimensions(family, sample.shape[1], sample.dtype)
    none = np.zeros(len(sample), np.int64)
    sample = sample[np.argsort(row_hashes(none, none, None, None, sample), kind="stable")]
    draws = [generator(seed, Purpose.HASH_FUNCTIONS, number=number) for number in range(functions)]
    if family == "lsh":
        width = width or WIDTH_DISTANCES * neighbour_distance(sample) or 1.0
        made = [_steps(sample, draw, width) for draw in draws]
    elif family == "sign":
        made = [_side_of_mean(sample, draw) for draw in draws]
    else:
        made = _sides_of_medians(sample, principal_directions(sample, functions))
    weights, offsets, widths, firsts, values = zip(*made, strict=True)
    return Hashes(
        family,
        np.column_stack(weights).astype(np.float64),
        np.array(offsets, np.int64),
        np.array(widths, np.int64),
        np.array(firsts, np.int64),
        multipliers(values, seed),
        float(width) if width and family == "lsh" else 0.0,
        len(sample),
    )


def check_dimensions(family: Family, d: int, dtype: npt.DTypeLike) -> None:
    """Raises UsageError for rows that no such functions are fitted to."""
    if family == "dsh" and dtype != np.uint8 and d > gram.MAX_PIXELS:
        raise UsageError(f"--family dsh takes at most {gram.MAX_PIXELS:,} features a row, got {d:,}; use lsh or sign")


def products(rows: Rows, weights: Floats) -> Ints:
    """rows @ weights, int64 [rows, M], exact: a block of rows is float64 at a time."""
    found = np.empty((len(rows), weights.shape[1]), np.int64)
    step = max(1, min(BLOCK_ROWS, BLOCK_VALUES // len(weights)))
    for low in range(0, len(rows), step):
        found[low : low + step] = rows[low : low + step].astype(np.float64) @ weights
    return found


def multipliers(values: Sequence[int], seed: int) -> npt.NDArray[np.uint64]:
    """What makes one number of M values, uint64 [M]: the places of a number with such digits, or where that has more than 63
    bits, random odd ones."""
    if math.prod(values) <= 1 << 63:
        return np.array([math.prod(values[:place]) for place in range(len(values))], np.uint64)
    draw = generator(seed, Purpose.HASH_FUNCTIONS, worker=1)
    return draw.integers(1 << 64, size=len(values), dtype=np.uint64) | np.uint64(1)


def _on_grid(direction: Floats, sample: Rows) -> tuple[Ints, int]:
    """A direction as integers, in units of 2^-exponent, and the exponent."""
    norm = 255 * math.sqrt(len(direction)) if sample.dtype == np.uint8 else POINT_NORM
    length = math.sqrt(math.fsum(np.square(direction)))  # which no BLAS rounds
    exponent = math.floor(EXACT - math.log2(norm * length))
    return np.rint(np.ldexp(direction, exponent)).astype(np.int64), exponent


def _normal(sample: Rows, draw: np.random.Generator) -> Floats:
    return draw.standard_normal((sample.shape[1],))


def _steps(sample: Rows, draw: np.random.Generator, width: float) -> _Function:
    weights, exponent = _on_grid(_normal(sample, draw), sample)
    steps = max(1, min(SIDES, round(width * 2.0**exponent)))
    offset = int(draw.integers(steps))
    if sample.dtype == np.uint8:
        low, high = 255 * int(weights[weights < 0].sum()), 255 * int(weights[weights > 0].sum())
    else:
        low, high = -(1 << EXACT), 1 << EXACT
    first = (low + offset) // steps
    return _Function(weights, offset, steps, first, (high + offset) // steps - first + 1)


def _side(weights: Ints, threshold: int) -> _Function:
    """Whether the product is more than the threshold."""
    return _Function(weights, -threshold - 1, SIDES, -1, 2)


def _side_of_mean(sample: Rows, draw: np.random.Generator) -> _Function:
    weights, _ = _on_grid(_normal(sample, draw), sample)
    total = sample.sum(axis=0, dtype=np.int64).astype(object)  # Python's integers: their products pass 64 bits
    return _side(weights, int(total @ weights.astype(object)) // len(sample))


def _sides_of_medians(sample: Rows, directions: Floats) -> list[_Function]:
    weights = [_on_grid(direction, sample)[0] for direction in directions]
    middle = (len(sample) - 1) // 2
    found = products(sample, np.column_stack(weights).astype(np.float64))
    medians = np.partition(found, middle, axis=0)[middle].tolist()
    return [_side(direction, median) for direction, median in zip(weights, medians, strict=True)]


def neighbour_distance(sample: Rows) -> float:
    """The median distance from a row to the nearest one that differs from it, of at most WIDTH_ROWS rows; 0 where all are
    equal. Squared distances are exact."""
    count = min(len(sample), WIDTH_ROWS)
    rows = sample[np.arange(count) * len(sample) // count]
    inner = np.zeros((count, count))
    for low in range(0, rows.shape[1], WIDTH_COLUMNS):
        part = rows[:, low : low + WIDTH_COLUMNS].astype(np.float64)
        inner += part @ part.T
    squares = inner.diagonal()
    distances = squares[:, None] + squares - 2 * inner
    distances[distances == 0] = np.inf
    nearest = np.sort(distances.min(axis=1))
    nearest = nearest[np.isfinite(nearest)]
    return math.sqrt(nearest[(len(nearest) - 1) // 2]) if len(nearest) else 0.0


def principal_directions(sample: Rows, functions: int) -> Floats:
    """The leading ones in which the sample varies, float64 [at most functions, d]; any one where it does not."""
    rows, d = sample.shape
    if sample.dtype != np.uint8:
        return gram.top_components(_covariance(sample), functions).components
    pixels = cast("npt.NDArray[np.uint8]", sample)
    if gram.rows_are_fewer(rows, d):
        return dual.fit(pixels, functions)[0].components
    return gram.top_components(gram.covariance(gram.local([pixels], d)), functions).components


def _covariance(points: Rows) -> Floats:
    """The upper triangle, float64 [d, d], of points rounded to so many bits that all sums are exact."""
    centred = points - points.sum(axis=0, dtype=np.int64) // len(points)
    largest = max(1, int(np.abs(centred).max()))
    coarser = max(0, math.ceil(math.log2(largest) - (52 - math.log2(len(points))) / 2))
    whole = (centred >> coarser).astype(np.float64)
    total = whole.sum(axis=0)
    covariance: Floats = np.triu(whole.T @ whole - np.outer(total, total) / len(points)) / max(len(points) - 1, 1)
    return covariance
