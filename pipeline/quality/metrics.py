"""The distance of each shard from the whole set, as pure functions of arrays and sums. No Spark, no files.

Every figure is computed over the owner rows (copy 0), because broadcast duplicates, which every worker has on purpose,
would blur it. Only the shard sizes count copies. ``measure.py`` computes the sums of a committed set.

Legend: N rows, W workers, L classes, K neighbourhoods, F numbers per thumbnail, R random frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from pipeline.quality.agreement import LabelAgreement
from pipeline.quality.moments import Floats, Ints, Moments, fourier_features, merge

NO_VARIANCE = 1e-6  # see has_variance


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's test of the hypothesis that the rows of a table were split over its columns by chance alone."""

    statistic: float
    dof: int
    p_value: float
    cramers_v: float  # 0: rows and columns are independent, 1: complete dependence; for any size

    @property
    def per_dof(self) -> float:
        """The statistic per degree of freedom: near 1 for a random split, less for a more even one."""
        return self.statistic / self.dof


def chi_square(table: Ints) -> ChiSquare | None:
    """Test a table [W, groups] without its empty rows and columns. Return None if fewer than 2 x 2 are left."""
    from scipy.special import chdtrc  # scipy.stats takes half a second to load; tasks need neither

    table = table[table.sum(axis=1) > 0][:, table.sum(axis=0) > 0]
    if min(table.shape) < 2:
        return None
    expected = expected_counts(table)
    statistic = float(((table - expected) ** 2 / expected).sum())
    dof = (table.shape[0] - 1) * (table.shape[1] - 1)
    cramers_v = math.sqrt(statistic / (table.sum() * (min(table.shape) - 1)))
    return ChiSquare(statistic, dof, float(chdtrc(dof, statistic)), cramers_v)


@dataclass(frozen=True)
class ClassSkew:
    """The distance of the shards' class shares from the whole set's, as means over the shards with rows.

    Attributes:
        total_variation: half the sum of absolute differences of the shares; 0: equal, 1: no class in common.
        random_total_variation: its expectation under a random split of the same sizes, by normal approximation.
        jensen_shannon: Jensen-Shannon divergence in bits; 0: equal, 1: no class in common.
        effective_classes: e to the entropy of a shard's shares: as many equally frequent classes are as diverse.
        whole_effective_classes: the same number for the whole set.
    """

    total_variation: float
    random_total_variation: float
    jensen_shannon: float
    effective_classes: float
    whole_effective_classes: float


def class_skew(table: Ints) -> ClassSkew | None:
    """Return the skew of a table of rows by shard and class [W, L], None for a single class or shard. O(W L)."""
    table = table[table.sum(axis=1) > 0]
    if len(table) < 2 or np.count_nonzero(table.sum(axis=0)) < 2:
        return None
    sizes = table.sum(axis=1, keepdims=True)
    shares = table / sizes
    whole = table.sum(axis=0) / table.sum()
    # The mean absolute deviation of a normal variable is sqrt(2 / pi) standard deviations.
    deviations = hypergeometric_deviations(table) / sizes * math.sqrt(2 / math.pi)
    between = (entropy((shares + whole) / 2) - (entropy(shares) + entropy(whole)) / 2) / math.log(2)
    return ClassSkew(
        float(np.abs(shares - whole).sum(axis=1).mean() / 2),
        float(deviations.sum(axis=1).mean() / 2),
        float(np.maximum(between, 0).mean()),
        float(np.exp(entropy(shares)).mean()),
        float(np.exp(entropy(whole))),
    )


def entropy(shares: Floats) -> Floats:
    """Return the entropy of shares along the last axis, in nats."""
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    total: Floats = -(shares * logs).sum(axis=-1)
    return total


def hypergeometric_deviations(table: Ints) -> Floats:
    """Return the standard deviation of each count of a table [W, groups] under a random split of the same sizes."""
    total = table.sum()
    shards = table.sum(axis=1, keepdims=True)
    groups = table.sum(axis=0, keepdims=True)
    variance = expected_counts(table) * (1 - groups / total) * (total - shards) / max(total - 1, 1)
    deviations: Floats = np.sqrt(variance)
    return deviations


def expected_counts(table: Ints) -> Floats:
    """Return the expected counts of a table [W, groups] if its rows and columns were independent."""
    rows, columns = (table.sum(axis=axis, dtype=np.float64) for axis in (1, 0))
    expected: Floats = np.outer(rows, columns) / rows.sum()
    return expected


def expected_shift(shard_rows: int, rows: int, variance: float) -> float:
    """Return E |mean of a shard - mean of the whole|^2 for rows drawn without replacement, exactly.

    Args:
        shard_rows: rows of the shard.
        rows: rows of the whole set.
        variance: mean squared distance of the rows to their mean.
    """
    if rows < 2 or shard_rows < 1:
        return 0.0
    return variance / shard_rows * (rows - shard_rows) / (rows - 1)


def has_variance(variance: float, mean_square: float) -> bool:
    """True if a variance is more than float32 rounding of equal rows.

    Features, unlike pixels in [0, 1], may be tiny, so the limit shrinks with their mean square. It does not grow for large
    ones, as the sums are float64."""
    return variance > NO_VARIANCE * min(1.0, mean_square)


def shift_ratio(shift: float, shard_rows: int, rows: int, variance: float, mean_square: float = 1.0) -> float | None:
    """Return the shift divided by its expectation under a random split.

    Return None if a random split cannot shift the mean: one worker, or rows that are equal up to float32 rounding.

    Args:
        shift: the squared distance of the means.
        shard_rows: rows of the shard.
        rows: rows of the set.
        variance: mean squared distance of the rows to their mean.
        mean_square: mean squared length of the rows.
    """
    expected = expected_shift(shard_rows, rows, variance)
    return shift / expected if expected and has_variance(variance, mean_square) else None


def random_spread(vectors: Floats) -> float | None:
    """Return the standard deviation of one shard's shift ratio under a random split.

    For the mean over n equal shards it is sqrt(n - 1) times smaller. None for too few or equal rows. The shift is a sum
    of chi-squares weighted by the eigenvalues of the covariance C: sqrt(2 tr C^2) / tr C."""
    if len(vectors) < 3:
        return None
    # The result has no unit. Without one, no square is too large or too small for a float.
    scale = float(np.abs(vectors).max()) or 1.0
    scaled = vectors.astype(np.float64) / scale
    centred = scaled - scaled.mean(axis=0)
    # The products of rows have the same trace and sum of squares, and for long vectors they are fewer.
    products = centred @ centred.T if centred.shape[1] > len(centred) else centred.T @ centred
    covariance = products / len(vectors)
    trace = float(np.trace(covariance))
    mean_square = float(np.square(scaled).sum()) / len(vectors)
    if not has_variance(trace * scale**2, mean_square * scale**2):
        return None
    return math.sqrt(2 * float(np.square(covariance).sum())) / trace


@dataclass(frozen=True)
class ShardQuality:
    """The figures of one worker. Fields from mmd2 on are None for a shard without owners."""

    worker: int
    rows: int  # copies included
    owners: int
    mmd2: float | None = None  # squared maximum mean discrepancy between the owners and the whole set
    mmd_ratio: float | None = None  # mmd2 / its expectation under a random split of the same sizes
    mean_shift: float | None = None  # RMS difference of the mean thumbnail from the whole set's, grey levels of 0..255
    mean_ratio: float | None = None  # the squared shift / its expectation under a random split


@dataclass(frozen=True)
class Quality:
    """The figures of a set. A ratio of 1 is the average of random splits; less is better."""

    rows: int  # distinct examples
    copies: int
    duplicate_share: float  # copies / rows
    max_rows: int  # rows of the largest shard, copies included
    min_rows: int
    size_ratio: float | None  # max / min; None if a shard is empty
    classes: ChiSquare | None
    skew: ClassSkew | None  # of the classes; None without labels
    neighbourhoods: ChiSquare | None  # dense ones by worker, the largest of very many; sparse ones are not split
    bandwidth: float
    mmd_ratio: float | None  # mean over the workers
    mmd_ratio_sd: float | None  # its standard deviation under random splits
    class_mmd_ratio: float | None  # the same ratio inside classes, mean over classes and workers; None if not compared
    shard_mmd_ratio_sd: float | None  # the standard deviation of one shard's ratio
    mean_ratio: float | None
    mean_ratio_sd: float | None
    shards: tuple[ShardQuality, ...]
    class_table: Ints  # [W, L] owners
    neighbourhood_table: Ints | None  # [W, K] owners, for counted neighbourhoods
    feature_means: Floats  # [W, F] mean thumbnails; nan for an empty shard
    label_agreement: dict[str, LabelAgreement] = field(default_factory=dict)  # by column of labels

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain JSON values, without the mean thumbnails."""
        plain = {
            name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in asdict(self).items()
        }
        del plain["feature_means"]
        return {**plain, "shards": list(plain["shards"])}


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None, or None if there are none."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def shard_quality(worker: int, size: int, part: Moments, whole: Moments) -> ShardQuality:
    """Compare one worker's sums with the whole set's.

    Args:
        worker: the number of the worker.
        size: its rows, copies included.
        part: its sums.
        whole: the sums of the whole set.
    """
    if not part.rows:
        return ShardQuality(worker, size, 0)
    embedded_mean = whole.embedded_sum / whole.rows
    feature_mean = whole.feature_sum / whole.rows
    mmd2 = float(np.square(part.embedded_sum / part.rows - embedded_mean).sum())
    shift = float(np.square(part.feature_sum / part.rows - feature_mean).sum())
    # Every embedded row has length 1, so the mean square is 1.
    embedded_variance = 1 - float(embedded_mean @ embedded_mean)
    feature_square = whole.feature_square_sum / whole.rows
    feature_variance = feature_square - float(feature_mean @ feature_mean)
    return ShardQuality(
        worker,
        size,
        part.rows,
        mmd2,
        shift_ratio(mmd2, part.rows, whole.rows, embedded_variance),
        255 * math.sqrt(shift / len(feature_mean)),
        shift_ratio(shift, part.rows, whole.rows, feature_variance, feature_square),
    )


def class_mmd_ratio(parts: Sequence[Moments], whole: Moments) -> float | None:
    """Return the mean ratio of the MMD between a worker's rows of a class and all rows of this class.

    Each is divided by its expectation if the rows of the class were divided at random into parts of the same sizes. None
    if classes were not summed, or no class is on several workers. O(W L R).

    Args:
        parts: the sums of each worker.
        whole: the sums of the whole set.
    """
    ratios: list[float | None] = []
    for number in np.flatnonzero(whole.classes[: len(whole.class_embedded_sums)]):
        rows = int(whole.classes[number])
        mean = whole.class_embedded_sums[number] / rows
        for part in parts:
            shard_rows = int(part.classes[number])
            if shard_rows:
                mmd2 = float(np.square(part.class_embedded_sums[number] / shard_rows - mean).sum())
                ratios.append(shift_ratio(mmd2, shard_rows, rows, 1 - float(mean @ mean)))
    return mean_of(ratios)


def assess(
    sizes: Sequence[int], parts: Sequence[Moments], dense: Sequence[bool], sample: Floats, bandwidth: float
) -> Quality:
    """Return the figures. O(W (L R + K)).

    Args:
        sizes: rows per worker, copies included.
        parts: the sums of each worker.
        dense: [K] whether a neighbourhood was split, not broadcast.
        sample: [rows, F] thumbnails from the whole set, for the spread under random splits.
        bandwidth: the kernel's bandwidth.
    """
    whole = reduce(merge, parts)
    copies = sum(sizes) - whole.rows
    class_table = np.stack([part.classes for part in parts])
    neighbourhood_table = np.stack([part.neighbourhoods for part in parts]) if len(dense) else None
    shards = tuple(
        shard_quality(worker, size, part, whole) for worker, (size, part) in enumerate(zip(sizes, parts, strict=True))
    )
    mmd_sd = random_spread(fourier_features(sample, bandwidth)) if len(parts) > 1 else None
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
        skew=class_skew(class_table),
        neighbourhoods=None if neighbourhood_table is None else chi_square(neighbourhood_table[:, np.array(dense)]),
        bandwidth=bandwidth,
        mmd_ratio=mean_of(shard.mmd_ratio for shard in shards),
        mmd_ratio_sd=None if mmd_sd is None else mmd_sd / narrower,
        class_mmd_ratio=class_mmd_ratio(parts, whole),
        shard_mmd_ratio_sd=mmd_sd,
        mean_ratio=mean_of(shard.mean_ratio for shard in shards),
        mean_ratio_sd=None if mean_sd is None else mean_sd / narrower,
        shards=shards,
        class_table=class_table,
        neighbourhood_table=neighbourhood_table,
        feature_means=feature_means,
    )
