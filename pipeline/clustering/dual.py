"""Principal components of fewer images than pixels, from the matrix of the images' products (the dual PCA). Pure numpy.

The matrix is rows x rows instead of pixels x pixels, and has the same leading eigenvalues. Its sums are exact too:
gram.gram_of_blocks adds them up on the transposed images. Costs rows^2 * d flop, and in one task rows * d bytes for the
images and 12 bytes per pair of rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from pipeline.clustering import gram
from pipeline.clustering.gram import Spectrum, top_components
from pipeline.core.hashing import row_hashes

STEP = 4096  # pixels at a time


def fit(images: npt.NDArray[np.uint8], components: float) -> tuple[Spectrum, npt.NDArray[np.float64]]:
    """Return the spectrum of images [rows, pixels] and their mean [pixels], bit-identical for any order of the rows."""
    # A canonical order of the rows, because floating point sums below depend on it.
    none = np.zeros(len(images), np.int64)
    images = images[np.argsort(row_hashes(none, none, None, None, images), kind="stable")]
    rows, pixels = images.shape
    total = images.sum(axis=0, dtype=np.int64) - gram.SHIFT * rows
    shift = total / rows  # the mean minus SHIFT
    mean = shift + gram.SHIFT
    if not np.ptp(images, axis=0).any():  # any direction will do
        return Spectrum(np.eye(1, pixels), np.zeros(1), 0.0), mean
    spectrum = top_components(_covariance(images, total), components)
    components_by_pixel = np.empty((len(spectrum.variances), pixels))
    with threadpool_limits(1, "blas"):  # the result must not depend on the number of threads
        for low, part in _parts(images):
            components_by_pixel[:, low : low + STEP] = spectrum.components @ (part - shift[low : low + STEP])
    components_by_pixel /= np.linalg.norm(components_by_pixel, axis=1, keepdims=True)
    return Spectrum(gram.fix_signs(components_by_pixel), spectrum.variances, spectrum.total_variance), mean


def _covariance(images: npt.NDArray[np.uint8], total: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the products of the centred rows over rows - 1, float64 [rows, rows], upper triangle.

    All sums are integers below 2^53 until the last step."""
    rows, pixels = images.shape
    column_blocks = (np.ascontiguousarray(images[:, low : low + STEP].T) for low in range(0, pixels, STEP))
    upper = gram.upper_triangle(gram.gram_of_blocks(column_blocks, rows))
    with_all = np.zeros(rows)
    for low, part in _parts(images):
        with_all += part @ total[low : low + STEP].astype(np.float64)
    with_all /= rows
    upper += np.triu(with_all.mean() - with_all[:, None] - with_all)
    upper /= max(rows - 1, 1)
    return upper


def _parts(images: npt.NDArray[np.uint8]) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """Yield all rows minus SHIFT, in slices of STEP pixels."""
    for low in range(0, images.shape[1], STEP):
        yield low, images[:, low : low + STEP].astype(np.float64) - gram.SHIFT
