"""Locality-sensitive hash functions of images: near rows share a bucket more often than far ones. Pure numpy and scipy.

A function is floor((x . a + b) / w) of integers, or the place of the lowest of several (x . a + b): directions are
rounded to a grid after they are drawn or fitted. The bucket of a row therefore depends neither on the rows that are
hashed with it, nor on the BLAS or the number of threads. Rows share a bucket if all M functions agree on them: with
probability p^M, if p is the probability for one function (the AND of M).

- ``lsh``: a is normal, b uniform in [0, w) (p-stable hashing: Datar, Immorlica, Indyk and Mirrokni, SoCG 2004, section
  3.2). With c = distance / w, p = 1 - 2 N(-1/c) - 2c / sqrt(2 pi) * (1 - exp(-1 / 2c^2)), where N is the normal
  distribution function.
- ``sign``: the side of a random hyperplane through the mean of the sample (Charikar, STOC 2002, section 3):
  p = 1 - angle / pi, with the angle between two rows as seen from the mean.
- ``dsh``: the sides of the leading principal directions of the sample, at its medians, so that each function halves it.
  A simple data-sensitive hash; the DSH of Gao et al. (SIGMOD 2014) learns its functions by boosting.
- ``kmeans``: the nearest of k centroids of an integer k-means of a random half of the sample (Provatas et al.
  2021, section V). The nearest centroid c has the lowest |c|^2 - 2 c . x, which is linear in x."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt

from pipeline.clustering import dual, gram
from pipeline.clustering.fit import fit_in_process
from pipeline.clustering.lloyd import KMeansSettings
from pipeline.clustering.projection import BLOCK_ROWS, BLOCK_VALUES
from pipeline.core.arrays import Floats, Ints
from pipeline.core.errors import UsageError
from pipeline.core.hashing import row_hashes
from pipeline.core.npz import check_arrays
from pipeline.core.seeds import Purpose, generator

Family = Literal["lsh", "sign", "dsh", "kmeans"]
Rows = npt.NDArray[np.uint8] | npt.NDArray[np.int32]  # [rows, d]: pixels, or points on the grid of projection.Grid
MOST_FUNCTIONS = 64
SAMPLE_ROWS = 10_000
WIDTH_ROWS = 2000  # sample rows whose nearest neighbours determine the default width
WIDTH_COLUMNS = 4096  # columns of these rows that are converted to float64 at a time
WIDTH_DISTANCES = 4  # the default width in median distances between nearest neighbours
EXACT = 51  # products of rows and directions stay within 2^51, so that float64 adds them without rounding
POINT_NORM = 2.0**25  # the largest norm of a point on the grid; see projection.grid_exponent
CENTROIDS = 8  # centroids per function of kmeans
CENTROID_ITERATIONS = 25
SIDES = 1 << 53  # a width beyond all products, which leaves only the sign of a value


class _Function(NamedTuple):
    """A single hash function of a row x: floor((x @ weights + offset) / width) - first.

    weights: int64 [d]. values: the number of possible values, from 0 on."""

    weights: Ints
    offset: int
    width: int
    first: int
    values: int


@dataclass(frozen=True, eq=False)
class Hashes:
    """M fitted hash functions of rows of d numbers. Picklable.

    Attributes:
        family: the kind of functions.
        weights: integers in float64 [d, M * centroids].
        offsets: int64 [M * centroids].
        widths: int64 [M].
        firsts: int64 [M], the lowest value of each function, which counts as 0.
        multipliers: uint64 [M], which combine M values into one key.
        width: the step of ``lsh`` in the unit of the rows' numbers, else 0.
        rows: the size of the sample.
        centroids: k of ``kmeans``, whose functions have k columns of ``weights`` and ``offsets`` each; else 1.
    """

    family: Family
    weights: Floats
    offsets: Ints
    widths: Ints
    firsts: Ints
    multipliers: npt.NDArray[np.uint64]
    width: float
    rows: int
    centroids: int = 1

    @property
    def functions(self) -> int:
        return len(self.firsts)

    def values(self, rows: Rows) -> Ints:
        """Return the values of all functions, int64 [rows, M], 0 or more. Costs 2 * rows * d * M flop per column in
        float64."""
        hash_values = products(rows, self.weights) + self.offsets
        if self.family == "kmeans":
            places: Ints = hash_values.reshape(len(rows), self.functions, self.centroids).argmin(axis=2)
            return places
        # One function at a time, because numpy divides by a scalar much faster than by an array.
        for function, width in enumerate(self.widths.tolist()):
            hash_values[:, function] //= width
        return hash_values - self.firsts

    def buckets(self, rows: Rows) -> Ints:
        """Return the key of each row's bucket, int64 [rows]; a key can be any number.

        Equal values have equal keys. Different values have different keys if all possible values fit into 63 bits, as
        for up to 63 functions of ``sign`` and ``dsh``. Otherwise two of them share a key with a probability of at most
        2^(e - 63), where 2^e is the largest power of two that divides all their differences."""
        keys: Ints = (self.values(rows).view(np.uint64) @ self.multipliers).view(np.int64)
        return keys

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {item.name: np.asarray(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]]) -> Hashes:
        """Return the functions of saved arrays. Raises ValueError if names, types, shapes or values are invalid."""
        arrays = {"centroids": np.array(1)} | arrays  # older functions have one column each
        vectors = dict.fromkeys(("widths", "firsts"), "i8 m") | {"multipliers": "u8 m", "offsets": "i8 c"}
        check_arrays(arrays, family="U", weights="f8 d c", width="f8", rows="i8", centroids="i8", **vectors)
        if len(arrays["offsets"]) != len(arrays["firsts"]) * int(arrays["centroids"]):
            raise ValueError(f"{len(arrays['offsets'])} columns of {len(arrays['firsts'])} functions")
        if str(arrays["family"]) not in get_args(Family) or (arrays["widths"] < 1).any():
            raise ValueError(f"functions of the family {str(arrays['family'])[:20]!r}, or without widths")
        values: dict[str, Any] = {name: array if array.ndim else array.item() for name, array in arrays.items()}
        return cls(**values)


def fit(
    sample: Rows, family: Family, functions: int, seed: int, *, width: float | None = None, centroids: int = CENTROIDS
) -> Hashes:
    """Fit M = ``functions`` hash functions to a sample of at least one row.

    The result does not depend on the order of the sample. The directions of ``dsh`` come from LAPACK, which may round
    differently on another machine. For ``lsh`` and ``sign``, fewer functions are a prefix of more functions. ``dsh``
    returns fewer functions than requested if the sample varies in fewer directions.

    Costs 2 * 2,000^2 * d flop for the default width, and for ``dsh`` the PCA of the sample (gram.py).

    Args:
        sample: rows like those to be hashed.
        family: the kind of functions.
        functions: their number.
        seed: the seed of directions and offsets.
        width: the step of ``lsh`` in the unit of the rows' numbers; default: four times the median distance between
            nearest distinct neighbours among 2,000 rows of the sample.
        centroids: the number of centroids of each function of ``kmeans``.

    Raises:
        UsageError: the number of functions or dimensions is out of range.
    """
    if not 1 <= functions <= MOST_FUNCTIONS:
        raise UsageError(f"--functions must be at least 1 and at most {MOST_FUNCTIONS}, got {functions}")
    check_dimensions(family, sample.shape[1], sample.dtype)
    # A canonical order of the sample, by content.
    none = np.zeros(len(sample), np.int64)
    sample = sample[np.argsort(row_hashes(none, none, None, None, sample), kind="stable")]
    if family == "kmeans":
        return _nearest_centroids(sample, functions, seed, centroids)
    draws = [generator(seed, Purpose.HASH_FUNCTIONS, number=number) for number in range(functions)]
    if family == "lsh":
        width = width or WIDTH_DISTANCES * neighbour_distance(sample) or 1.0
        functions_fitted = [_step_function(sample, draw, width) for draw in draws]
    elif family == "sign":
        functions_fitted = [_mean_threshold_function(sample, draw) for draw in draws]
    else:
        functions_fitted = _median_threshold_functions(sample, principal_directions(sample, functions))
    weights, offsets, widths, firsts, values = zip(*functions_fitted, strict=True)
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


def _nearest_centroids(sample: Rows, functions: int, seed: int, centroids: int) -> Hashes:
    """Return functions of ``kmeans``, each fitted to a random half of the sample, so that they differ."""
    weights = []
    offsets = []
    for number in range(functions):
        draw = generator(seed, Purpose.HASH_FUNCTIONS, number=number)
        half = np.sort(draw.permutation(len(sample))[: max(1, len(sample) // 2)])
        settings = KMeansSettings(centroids, CENTROID_ITERATIONS, 1e-4, int(draw.integers(1 << 31)))
        centres = fit_in_process(half, sample[half].astype(np.int32), settings).centres
        # A half with fewer distinct rows repeats its last centroid, which then never is the first of the nearest.
        centres = centres[np.minimum(np.arange(centroids), len(centres) - 1)]
        weights.append(-2.0 * centres.T)
        offsets.append((centres**2).sum(axis=1))
    ones = np.ones(functions, np.int64)
    factors = multipliers([centroids] * functions, seed)
    return Hashes(
        "kmeans", np.hstack(weights), np.concatenate(offsets), ones, 0 * ones, factors, 0.0, len(sample), centroids
    )


def check_dimensions(family: Family, d: int, dtype: npt.DTypeLike) -> None:
    """Raise UsageError if functions of this family cannot be fitted to rows of d numbers of the type ``dtype``."""
    if family == "dsh" and dtype != np.uint8 and d > gram.MAX_PIXELS:
        raise UsageError(f"--family dsh takes at most {gram.MAX_PIXELS:,} features per row, got {d:,}; use lsh or sign")


def products(rows: Rows, weights: Floats) -> Ints:
    """Return rows @ weights, int64 [rows, M], exact; only one block of rows is float64 at a time."""
    result = np.empty((len(rows), weights.shape[1]), np.int64)
    step = max(1, min(BLOCK_ROWS, BLOCK_VALUES // len(weights)))
    for low in range(0, len(rows), step):
        result[low : low + step] = rows[low : low + step].astype(np.float64) @ weights
    return result


def multipliers(values: Sequence[int], seed: int) -> npt.NDArray[np.uint64]:
    """Return multipliers that combine M values into one key, uint64 [M].

    They are the place values of a mixed-radix number, or random odd numbers if that would have more than 63 bits."""
    if math.prod(values) <= 1 << 63:
        return np.array([math.prod(values[:place]) for place in range(len(values))], np.uint64)
    draw = generator(seed, Purpose.HASH_FUNCTIONS, worker=1)
    return draw.integers(1 << 64, size=len(values), dtype=np.uint64) | np.uint64(1)


def _round_to_grid(direction: Floats, sample: Rows) -> tuple[Ints, int]:
    """Return a direction as integers in units of 2^-exponent, and the exponent.

    The exponent is the largest for which products with rows like the sample's stay exact in float64."""
    norm = 255 * math.sqrt(len(direction)) if sample.dtype == np.uint8 else POINT_NORM
    length = math.sqrt(math.fsum(np.square(direction)))  # fsum, because the rounding of a BLAS norm varies
    exponent = math.floor(EXACT - math.log2(norm * length))
    return np.rint(np.ldexp(direction, exponent)).astype(np.int64), exponent


def _normal_direction(sample: Rows, draw: np.random.Generator) -> Floats:
    return draw.standard_normal((sample.shape[1],))


def _step_function(sample: Rows, draw: np.random.Generator, width: float) -> _Function:
    """Return a function of ``lsh``: steps of equal width along a normal direction, with a random offset.

    width: width of a step in the unit of the rows' numbers."""
    weights, exponent = _round_to_grid(_normal_direction(sample, draw), sample)
    # The same width in the unit of the products, whose directions are multiplied by 2^exponent.
    scaled_width = max(1, min(SIDES, round(width * 2.0**exponent)))
    offset = int(draw.integers(scaled_width))
    # The lowest and the highest product of any row limit the values that the function can have.
    if sample.dtype == np.uint8:
        low = 255 * int(weights[weights < 0].sum())
        high = 255 * int(weights[weights > 0].sum())
    else:
        low = -(1 << EXACT)
        high = 1 << EXACT
    first = (low + offset) // scaled_width
    last = (high + offset) // scaled_width
    return _Function(weights, offset, scaled_width, first, values=last - first + 1)


def _threshold_function(weights: Ints, threshold: int) -> _Function:
    """Return the function that is 1 if the product exceeds the threshold, else 0."""
    return _Function(weights, -threshold - 1, SIDES, -1, 2)


def _mean_threshold_function(sample: Rows, draw: np.random.Generator) -> _Function:
    """Return a function of ``sign``: the side of a random hyperplane through the sample's mean."""
    weights, _ = _round_to_grid(_normal_direction(sample, draw), sample)
    total = sample.sum(axis=0, dtype=np.int64).astype(object)  # Python's integers: their products pass 64 bits
    return _threshold_function(weights, int(total @ weights.astype(object)) // len(sample))


def _median_threshold_functions(sample: Rows, directions: Floats) -> list[_Function]:
    """Return the functions of ``dsh``: per direction, the side of the sample's median. directions: float64 [m, d]."""
    weights = [_round_to_grid(direction, sample)[0] for direction in directions]
    middle = (len(sample) - 1) // 2
    projections = products(sample, np.column_stack(weights).astype(np.float64))
    medians = np.partition(projections, middle, axis=0)[middle].tolist()
    return [_threshold_function(direction, median) for direction, median in zip(weights, medians, strict=True)]


def neighbour_distance(sample: Rows) -> float:
    """Return the median distance of at most WIDTH_ROWS rows to the nearest row that differs; 0 if all are equal.

    Squared distances are exact."""
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
    """Return the leading directions in which the sample varies, float64 [at most functions, d].

    If the sample does not vary, return an arbitrary direction."""
    rows, d = sample.shape
    if sample.dtype != np.uint8:
        return gram.top_components(_covariance(sample), functions).components
    pixels = cast("npt.NDArray[np.uint8]", sample)
    if gram.rows_are_fewer(rows, d):
        return dual.fit(pixels, functions)[0].components
    return gram.top_components(gram.covariance(gram.gram_of_blocks([pixels], d)), functions).components


def _covariance(points: Rows) -> Floats:
    """Return the upper triangle of the covariance, float64 [d, d].

    Points are rounded to so few bits that all sums are exact."""
    centred = points - points.sum(axis=0, dtype=np.int64) // len(points)
    largest = max(1, int(np.abs(centred).max()))
    coarser = max(0, math.ceil(math.log2(largest) - (52 - math.log2(len(points))) / 2))
    whole = (centred >> coarser).astype(np.float64)
    total = whole.sum(axis=0)
    covariance: Floats = np.triu(whole.T @ whole - np.outer(total, total) / len(points)) / max(len(points) - 1, 1)
    return covariance
