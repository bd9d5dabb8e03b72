"""Fitted models as integers: images to grid points, grid points to neighbourhoods. Pure numpy, exact, picklable.

Floating point ends where a model is fitted. From there on pixels, weights, points and centres are integers. float64
holds them only while BLAS multiplies them, and they are bounded so that no product or sum is rounded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError

if TYPE_CHECKING:
    from pipeline.clustering.gram import Spectrum

MOST_EXPONENT = 1000  # the largest absolute exponent of a grid, so that 2^-exponent is a float64
# The limits of rows, and of values, that are converted to float64 at a time.
BLOCK_ROWS = 2048
BLOCK_VALUES = 8 << 20


def grid_exponent(bounds: npt.NDArray[np.float64]) -> int:
    """Return g of the finest grid 2^-g for points with |value_j| <= bounds_j, for bounds [features].

    On this grid squared distances between points stay below 2^52, and coordinates of points within int32."""
    spread = float(((2 * bounds) ** 2).sum())
    if spread == 0:
        return 0
    return min(math.floor((52 - math.log2(spread)) / 2), math.floor(30 - math.log2(float(bounds.max()))))


def grid_points(values: npt.NDArray[np.float64], exponent: int) -> npt.NDArray[np.float64]:
    """Round values to integers on the grid 2^-exponent, as float64, because new rows may lie far beyond a fit's range.

    Raises DataError for NaN and infinity."""
    points: npt.NDArray[np.float64] = np.rint(values * 2.0**exponent)
    if not np.isfinite(points).all():
        raise DataError("a point holds NaN, infinity or too large a number; clean the features before predicting")
    return points


def check_grid(exponent: int, shift: int = 0) -> None:
    """Raise ValueError if an exponent or a shift, read for instance from a saved model, is outside of its valid
    range."""
    if not (abs(exponent) <= MOST_EXPONENT and 0 <= shift < 64):
        raise ValueError(f"a grid of 2^-{exponent}, shifted by {shift} bits")


@dataclass(frozen=True)
class Projection:
    """A linear map from pixels to points on a grid.

    The point of a row of pixels is (pixels @ weights) / 2^shift, rounded to the nearest integers, halves up. An integer
    i stands for the value i * 2^-exponent.

    Attributes:
        weights: integers, held as float64 [pixels, k], so that BLAS multiplies them exactly.
        shift: the number of low bits of a product that the rounding removes.
        exponent: the exponent of the grid 2^-exponent.
    """

    weights: npt.NDArray[np.float64]
    shift: int
    exponent: int

    @property
    def dimensions(self) -> int:
        return int(self.weights.shape[1])

    def __call__(self, images: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """Project uint8 [rows, d] to int32 [rows, k]. Costs 2 * rows * d * k flop in float64."""
        points = np.empty((len(images), self.weights.shape[1]), np.int32)
        half = 1 << self.shift >> 1
        step = max(1, min(BLOCK_ROWS, BLOCK_VALUES // len(self.weights)))
        for low in range(0, len(images), step):
            block = images[low : low + step].astype(np.float64) @ self.weights
            points[low : low + len(block)] = (block.astype(np.int64) + half) >> self.shift
        return points


@dataclass(frozen=True)
class Grid:
    """A map that only rounds features to the grid 2^-exponent."""

    dimensions: int
    exponent: int

    def __call__(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """Round the bytes of float32 features, uint8 [rows, 4 d], to int32 [rows, d].

        Features beyond the range of the fit may be clipped. Raises DataError for NaN and infinity."""
        features = np.ascontiguousarray(rows).view(np.float32)
        limits = np.iinfo(np.int32)
        return grid_points(features.astype(np.float64), self.exponent).clip(limits.min, limits.max).astype(np.int32)


def quantise(spectrum: Spectrum, *, whiten: bool) -> Projection:
    """Return the integer projection of a spectrum. ``whiten`` divides each component by its standard deviation.

    Components without variance are not divided. The weights are as fine as possible while all products with 8-bit
    pixels stay exact in float64, and the grid is the finest for the range of the points."""
    has_variance = whiten & (spectrum.variances > 0)
    scale = np.sqrt(np.where(has_variance, spectrum.variances, 1.0))
    weights = (spectrum.components / scale[:, None]).T
    bounds = 255 * np.abs(weights).sum(axis=0)
    exponent = grid_exponent(bounds)
    fine = math.floor(51 - math.log2(float(bounds.max())))
    return Projection(np.rint(weights * 2.0**fine), fine - exponent, exponent)
