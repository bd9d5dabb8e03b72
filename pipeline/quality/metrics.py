"""How far each shard is from the whole set: the figures, as pure functions of arrays and sums. No Spark, no files.

Every figure is taken over the owner rows (copy 0), so that broadcast duplicates, which are meant to be everywhere, do
not blur it; only the shard sizes count copies. ``measure.py`` takes the sums from a committed set.

Legend: N rows, W workers, L classes, K neighbourhoods, F numbers a thumbnail, R random frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]

CELLS = 4  # a thumbnail has at most 4 x 4 cells a channel: 48 numbers for an RGB image of any size
FREQUENCIES = 512
BANDWIDTH_ROWS = 1000  # 499,500 pairs: the mean distance is then known to about 1 %
NO_VARIANCE = 1e-6  # what float32 rounding leaves of the variance of equal images, with room to spare


def pooling_matrix(size: int, cells: int) -> npt.NDArray[np.float32]:
    """[size, cells] weights that average pixels into equal cells; a pixel on a border is shared by area."""
    edges = np.linspace(0, size, cells + 1)
    pixels = np.arange(size)[:, None]
    overlap = np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels)
    weights: npt.NDArray[np.float32] = (np.clip(overlap, 0, 1) * cells / size).astype(np.float32)
    return weights


def thumbnails(images_NCHW: npt.NDArray[np.uint8 | np.float32]) -> npt.NDArray[np.float32]:
    """Average-pool images to at most CELLS x CELLS cells a channel: float32 [N, F], of pixels in [0, 1]. O(pixels)."""
    rows, channels, height, width = images_NCHW.shape
    across = pooling_matrix(width, min(CELLS, width)) / np.float32(255)
    down = pooling_matrix(height, min(CELLS, height))
    pooled: npt.NDArray[np.float32] = np.matmul(down.T, images_NCHW.astype(np.float32) @ across)
    return pooled.reshape(rows, channels * down.shape[1] * across.shape[1])


def spread_evenly(rows: int, limit: int) -> npt.NDArray[np.int64]:
    """At most ``limit`` numbers spread evenly over [0, rows), ascending."""
    count = min(limit, rows)
    return np.arange(count, dtype=np.int64) * rows // max(count, 1)


def mean_distance(features: Floats) -> float:
    """Mean distance over all pairs of at most BANDWIDTH_ROWS evenly chosen rows; 1.0 where all are equal."""
    chosen = features[spread_evenly(len(features), BANDWIDTH_ROWS)].astype(np.float64)
    chosen -= chosen[:1]  # so that equal rows are 0 and nothing is left of them by rounding
    squares = np.einsum("np,np->n", chosen, chosen)
    pairs = np.triu_indices(len(chosen), 1)
    squared = (squares[:, None] + squares - 2 * (chosen @ chosen.T))[pairs]
    return float(np.sqrt(np.maximum(squared, 0)).sum() / max(1, len(squared))) or 1.0


def embed(features: Floats, bandwidth: float) -> npt.NDArray[np.float32]:
    """Random Fourier features of the kernel exp(-|x - y|^2 / (2 bandwidth^2)) (Rahimi and Recht 2007): [N, F] to
    [N, 2R].

    The dot product of two rows estimates their kernel with an error of order 1/sqrt(R); every row has length 1. The
    frequencies are always the same ones, so that two sets can be compared."""
    directions = np.random.default_rng(0).standard_normal((features.shape[1], FREQUENCIES)) / bandwidth
    phase = features.astype(np.float32) @ directions.astype(np.float32)
    waves: npt.NDArray[np.float32] = np.concatenate([np.cos(phase), np.sin(phase)], axis=1)
    return waves * np.float32(1 / math.sqrt(FREQUENCIES))


class Moments(NamedTuple):
    """Sums over owner rows; those of two disjoint parts add up to those of both."""

    classes: Ints  # [L] rows of each class
    neighbourhoods: Ints  # [K] rows in each neighbourhood
    embedded_sum: Floats  # [2R]
    feature_sum: Floats  # [F]
    feature_square_sum: float

    @property
    def rows(self) -> int:
        return int(self.classes.sum())


def moments(
    features: Floats, labels: Ints, neighbourhoods: Ints, num_classes: int, num_neighbourhoods: int, bandwidth: float
) -> Moments:
    """The sums over some rows: features [N, F], labels [N], neighbourhoods [N] or [0]. About 2 F R flops a row."""
    return Moments(
        np.bincount(labels, minlength=num_classes),
        np.bincount(neighbourhoods, minlength=num_neighbourhoods),
        embed(features, bandwidth).sum(axis=0, dtype=np.float64),
        features.sum(axis=0, dtype=np.float64),
        float(np.square(features, dtype=np.float64).sum()),
    )


def merge(left: Moments, right: Moments) -> Moments:
    """The sums over two disjoint sets of rows."""
    pairs: Iterable[tuple[Any, Any]] = zip(left, right, strict=True)
    return Moments(*(one + other for one, other in pairs))


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test that the rows of a table were split over its columns by chance alone."""

    statistic: float
    dof: int
    p_value: float
    cramers_v: float  # 0: no link between row and column, 1: complete, whatever the size

    @property
    def per_dof(self) -> float:
        """Near 1 for a random split, below for a more even one."""
        return self.statistic / self.dof


def chi_square(table: Ints) -> ChiSquare | None:
    """Test a table [W, groups]; empty rows and columns do not count. None if fewer than 2 x 2 are left."""
    table = table[table.sum(axis=1) > 0][:, table.sum(axis=0) > 0]
    if min(table.shape) < 2:
        return None
    expected = expected_counts(table)
    statistic = float(((table - expected) ** 2 / expected).sum())
    dof = (table.shape[0] - 1) * (table.shape[1] - 1)
    cramers_v = math.sqrt(statistic / (table.sum() * (min(table.shape) - 1)))
    # Of scipy.special: scipy.stats takes half a second to load, in every task too.
    return ChiSquare(statistic, dof, float(chdtrc(dof, statistic)), cramers_v)


def expected_counts(table: Ints) -> Floats:
    """What a table [W, groups] would hold if its rows and columns had nothing to do with each other."""
    rows, columns = (table.sum(axis=axis, dtype=np.float64) for axis in (1, 0))
    expected: Floats = np.outer(rows, columns) / rows.sum()
    return expected


def expected_shift(shard_rows: int, rows: int, variance: float) -> float:
    """E |mean of a shard - mean of the whole|^2 for ``shard_rows`` of ``rows`` drawn without replacement, exactly.

    variance: mean squared distance of the rows to their mean."""
    if rows < 2 or shard_rows < 1:
        return 0.0
    return variance / shard_rows * (rows - shard_rows) / (rows - 1)


def shift_ratio(shift: float, shard_rows: int, rows: int, variance: float) -> float | None:
    """shift / its expectation under a random split; None where that cannot shift the mean either: one worker, or
    images that are equal up to the rounding of float32."""
    expected = expected_shift(shard_rows, rows, variance)
    return shift / expected if expected and variance > NO_VARIANCE else None


def random_spread(vectors: Floats) -> float | None:
    """Standard deviation of one shard's shift ratio under a random split; that of the mean over n equal shards is
    sqrt(n - 1) times less. None for too few rows or equal ones.

    The shift is a sum of chi-squares weighted by the eigenvalues of the covariance C: sqrt(2 tr C^2) / tr C."""
    if len(vectors) < 3:
        return None
    centred = vectors - vectors.mean(axis=0)
    covariance = (centred.T @ centred) / len(vectors)
    trace = float(np.trace(covariance))
    return math.sqrt(2 * float(np.square(covariance).sum())) / trace if trace > NO_VARIANCE else None


@dataclass(frozen=True)
class ShardQuality:
    """One worker's figures; those from mmd2 on are None for a shard without owners."""

    worker: int
    rows: int  # copies included
    owners: int
    mmd2: float | None = None  # squared maximum mean discrepancy between the owners and the whole set
    mmd_ratio: float | None = None  # mmd2 / its expectation under a random split of the same sizes
    mean_shift: float | None = None  # RMS difference of the mean thumbnail from the whole set's, grey levels of 0..255
    mean_ratio: float | None = None  # the squared shift / its expectation under a random split


@dataclass(frozen=True)
class Quality:
    """All figures of a set. A ratio of 1 is what a random split gives on average; less is better."""

    rows: int  # distinct examples
    copies: int
    duplicate_share: float  # copies / rows
    max_rows: int  # of a shard, copies included
    min_rows: int
    size_ratio: float | None  # max / min; None if a shard is empty
    classes: ChiSquare | None
    neighbourhoods: (
        ChiSquare | None
    )  # over the dense ones: the sparse are broadcast, not split; of very many the largest
    bandwidth: float
    mmd_ratio: float | None  # mean over the workers
    mmd_ratio_sd: float | None  # its standard deviation under random splits
    shard_mmd_ratio_sd: float | None  # that of one shard's ratio
    mean_ratio: float | None
    mean_ratio_sd: float | None
    shards: tuple[ShardQuality, ...]
    class_table: Ints  # [W, L] owners
    neighbourhood_table: Ints | None  # [W, K] owners, of those that are counted
    feature_means: Floats  # [W, F] mean thumbnails; nan for an empty shard

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values; mean thumbnails are left out."""
        plain = {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in asdict(self).items()
        }
        del plain["feature_means"]
        return {**plain, "shards": list(plain["shards"])}


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of those that are known, or None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def shard_quality(worker: int, size: int, part: Moments, whole: Moments) -> ShardQuality:
    """Compare one worker's sums with the whole set's. size: its rows, copies included."""
    if not part.rows:
        return ShardQuality(worker, size, 0)
    embedded_mean = whole.embedded_sum / whole.rows
    feature_mean = whole.feature_sum / whole.rows
    mmd2 = float(np.square(part.embedded_sum / part.rows - embedded_mean).sum())
    shift = float(np.square(part.feature_sum / part.rows - feature_mean).sum())
    # Every embedded row has length 1, so the mean square is 1.
    embedded_variance = 1 - float(embedded_mean @ embedded_mean)
    feature_variance = whole.feature_square_sum / whole.rows - float(feature_mean @ feature_mean)
    return ShardQuality(
        worker,
        size,
        part.rows,
        mmd2,
        shift_ratio(mmd2, part.rows, whole.rows, embedded_variance),
        255 * math.sqrt(shift / len(feature_mean)),
        shift_ratio(shift, part.rows, whole.rows, feature_variance),
    )


def assess(
    sizes: Sequence[int], parts: Sequence[Moments], dense: Sequence[bool], sample: Floats, bandwidth: float
) -> Quality:
    """The figures from each worker's rows (copies included) and sums. O(W (L + K + R)).

    dense: [K] whether a neighbourhood was split, not broadcast. sample: [rows, F] thumbnails from all over the set, for
    the spread that chance would give."""
    whole = reduce(merge, parts)
    copies = sum(sizes) - whole.rows
    class_table = np.stack([part.classes for part in parts])
    neighbourhood_table = np.stack([part.neighbourhoods for part in parts]) if len(dense) else None
    shards = tuple(
        shard_quality(worker, size, part, whole) for worker, (size, part) in enumerate(zip(sizes, parts, strict=True))
    )
    mmd_sd = random_spread(embed(sample, bandwidth)) if len(parts) > 1 else None
    mean_sd = random_spread(sample) if len(parts) > 1 else None
    narrower = math.sqrt(max(len(parts) - 1, 1))
    with np.errstate(invalid="ignore"):  # 0 / 0 of an empty shard
        feature_means = np.stack([part.feature_sum / np.float64(part.rows) for part in parts])
    return Quality(
        rows=whole.rows,
        copies=copies,
        duplicate_share=copies / whole.rows,
        max_rows=max(sizes),
        min_rows=min(sizes),
        size_ratio=max(sizes) / min(sizes) if min(sizes) else None,
        classes=chi_square(class_table),
        neighbourhoods=None if neighbourhood_table is None else chi_square(neighbourhood_table[:, np.array(dense)]),
        bandwidth=bandwidth,
        mmd_ratio=mean_of(shard.mmd_ratio for shard in shards),
        mmd_ratio_sd=None if mmd_sd is None else mmd_sd / narrower,
        shard_mmd_ratio_sd=mmd_sd,
        mean_ratio=mean_of(shard.mean_ratio for shard in shards),
        mean_ratio_sd=None if mean_sd is None else mean_sd / narrower,
        shards=shards,
        class_table=class_table,
        neighbourhood_table=neighbourhood_table,
        feature_means=feature_means,
    )
