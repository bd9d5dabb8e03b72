"""Thumbnails of images, random Fourier features of them, and the sums from which shards are compared. No Spark, no files.

Legend: N rows, L classes, K neighbourhoods, F numbers per thumbnail, R random frequencies."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.integer[Any]]
Floats = npt.NDArray[np.floating[Any]]

CELLS = 4  # a thumbnail has at most 4 x 4 cells per channel: 48 numbers for an RGB image of any size
FREQUENCIES = 512
BANDWIDTH_ROWS = 1000  # 499,500 pairs, which give the mean distance to about 1 %
# Rows per step between two arrays, so that both stay in a core's cache; all rows at once take a fifth longer.
POOLED_ROWS = 64
WAVE_ROWS = 128


def pooling_matrix(size: int, cells: int) -> npt.NDArray[np.float32]:
    """Return weights [size, cells] that average pixels into equal cells; a pixel on a border is shared by area."""
    edges = np.linspace(0, size, cells + 1)
    pixels = np.arange(size)[:, None]
    overlap = np.minimum(edges[1:], pixels + 1) - np.maximum(edges[:-1], pixels)
    weights: npt.NDArray[np.float32] = (np.clip(overlap, 0, 1) * cells / size).astype(np.float32)
    return weights


def thumbnails(images_NCHW: npt.NDArray[np.uint8 | np.float32]) -> npt.NDArray[np.float32]:
    """Average-pool images to at most CELLS x CELLS cells per channel, float32 [N, F], of pixels in [0, 1].

    O(pixels)."""
    rows, channels, height, width = images_NCHW.shape
    across = pooling_matrix(width, min(CELLS, width)) / np.float32(255)
    down = pooling_matrix(height, min(CELLS, height))
    pooled = np.empty((rows, channels, down.shape[1], across.shape[1]), np.float32)
    for at in range(0, rows, POOLED_ROWS):
        part = images_NCHW[at : at + POOLED_ROWS].astype(np.float32)
        np.matmul(down.T, part @ across, out=pooled[at : at + POOLED_ROWS])
    return pooled.reshape(rows, channels * down.shape[1] * across.shape[1])


def spread_evenly(rows: int, limit: int) -> npt.NDArray[np.int64]:
    """Return at most ``limit`` numbers spread evenly over [0, rows), ascending."""
    count = min(limit, rows)
    return np.arange(count, dtype=np.int64) * rows // max(count, 1)


def mean_distance(features: Floats) -> float:
    """Return the mean distance over all pairs of at most BANDWIDTH_ROWS evenly chosen rows; 1.0 if all are equal."""
    sample = features[spread_evenly(len(features), BANDWIDTH_ROWS)].astype(np.float64)
    sample -= sample[:1]  # equal rows become exactly 0, without rounding errors
    squares = np.einsum("np,np->n", sample, sample)
    pairs = np.triu_indices(len(sample), 1)
    squared_distances = (squares[:, None] + squares - 2 * (sample @ sample.T))[pairs]
    return float(np.sqrt(np.maximum(squared_distances, 0)).sum() / max(1, len(squared_distances))) or 1.0


def fourier_features(features: Floats, bandwidth: float) -> npt.NDArray[np.float32]:
    """Return random Fourier features of a Gaussian kernel (Rahimi and Recht 2007): [N, F] to [N, 2R].

    The kernel is exp(-|x - y|^2 / (2 bandwidth^2)). The dot product of two rows estimates it with an error of order
    1/sqrt(R); every row has length 1. The frequencies are fixed, so that two sets can be compared."""
    directions = _standard_directions(features.shape[1]) / bandwidth
    # Not in steps: the last bits of a product depend on its number of rows.
    phase = features.astype(np.float32) @ directions.astype(np.float32)
    waves = np.empty((len(phase), 2 * FREQUENCIES), np.float32)
    for at in range(0, len(phase), WAVE_ROWS):
        rows = slice(at, at + WAVE_ROWS)
        np.cos(phase[rows], out=waves[rows, :FREQUENCIES])
        np.sin(phase[rows], out=waves[rows, FREQUENCIES:])
        waves[rows] *= np.float32(1 / math.sqrt(FREQUENCIES))
    return waves


@lru_cache(maxsize=8)
def _standard_directions(count: int) -> Floats:
    """Return the frequencies for a bandwidth of 1, [count, R]. Drawing them takes longer than the features of ten rows."""
    return np.random.default_rng(0).standard_normal((count, FREQUENCIES))


class Moments(NamedTuple):
    """Sums over owner rows. The sums of disjoint parts add up to the sums of their union."""

    classes: Ints  # [L] rows of each class
    neighbourhoods: Ints  # [K] rows in each neighbourhood
    embedded_sum: Floats  # [2R]
    feature_sum: Floats  # [F]
    feature_square_sum: float
    class_embedded_sums: Floats  # [L, 2R], or [0, 2R] if classes are not compared

    @property
    def rows(self) -> int:
        return int(self.classes.sum())


def moments(
    features: Floats,
    labels: Ints,
    neighbourhoods: Ints,
    num_classes: int,
    num_neighbourhoods: int,
    bandwidth: float,
    by_class: bool = False,
) -> Moments:
    """Return the sums over some rows. About 2 F R flops per row.

    Args:
        features: [N, F].
        labels: [N].
        neighbourhoods: [N], or [0] if there are none.
        num_classes: L.
        num_neighbourhoods: K.
        bandwidth: the kernel's bandwidth.
        by_class: also sum the embedded rows of each class.
    """
    classes = np.bincount(labels, minlength=num_classes)
    class_sums = np.zeros((num_classes if by_class else 0, 2 * FREQUENCIES))
    if by_class:
        # Slices of sorted rows are summed as fast as all rows at once; np.add.reduceat takes twenty times as long.
        embedded = fourier_features(features[np.argsort(labels, kind="stable")], bandwidth)
        ends = np.cumsum(classes)
        for number in np.flatnonzero(classes):
            rows = embedded[ends[number] - classes[number] : ends[number]]
            class_sums[number] = rows.sum(axis=0, dtype=np.float64)
        embedded_sum = class_sums.sum(axis=0)
    else:
        embedded_sum = fourier_features(features, bandwidth).sum(axis=0, dtype=np.float64)
    return Moments(
        classes,
        np.bincount(neighbourhoods, minlength=num_neighbourhoods),
        embedded_sum,
        features.sum(axis=0, dtype=np.float64),
        float(np.square(features, dtype=np.float64).sum()),
        class_sums,
    )


def merge(left: Moments, right: Moments) -> Moments:
    """Return the sums over two disjoint sets of rows."""
    pairs: Iterable[tuple[Any, Any]] = zip(left, right, strict=True)
    return Moments(*(one + other for one, other in pairs))
