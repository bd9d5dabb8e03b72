"""The exact block Gram matrix and the principal components that follow from it. Pure numpy and scipy.

Products of (u8 - 128) are integers of at most 2^14, so a float32 product of a block is exact while every diagonal sum
stays within 2^24 (by Cauchy-Schwarz the diagonal bounds all partial sums). Block results are added as integers. The
covariance is therefore bit-identical for any blocks, any order and any number of BLAS threads, at the speed of float32.

Costs rows * d^2 flop; d*d*12 bytes of state per task, and d*d*2 to d*d*4 bytes from each task to the merge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from pipeline.core.errors import UsageError

EXACT_F32 = 1 << 24
SHIFT = 128
SYRK_ROWS = 2048
FIT_ROWS = 10_000
MAX_PIXELS = 12_288  # 64x64x3: the state of a task is 12 d^2 bytes, here 1.8 GB; dual.py fits larger images
LARGE_ROWS = 2000  # the default number of rows for larger images
# images that one task may hold
MOST_ROWS = 10_000
MOST_BYTES = 512 << 20


@dataclass(frozen=True)
class Gram:
    """Sums over rows of z = pixel - 128.

    count: rows. total: int64 [d]. packed: the upper triangle of the products, by rows, int64 or int32."""

    count: int
    total: npt.NDArray[np.int64]
    packed: npt.NDArray[np.int64] | npt.NDArray[np.int32]


def rows_to_fit(fit_rows: int | str, rows: int, pixels: int) -> int:
    """Return the number of rows that the PCA is fitted to.

    The default ("auto") is the number for which the Gram matrix costs about as much as its eigenvectors, 10,000, but at
    least three per pixel; all rows if that would be more than half of them. Lanczos needs about 150 products with the d x d
    matrix for 50 components, each bound by memory bandwidth: they take as long as the flop of 8,000 rows. For images of
    more than MAX_PIXELS pixels the default is LARGE_ROWS, or fewer if one task cannot hold so many.

    Args:
        fit_rows: a number of rows, "all" or "auto".
        rows: rows of the input.
        pixels: numbers per image.

    Raises:
        UsageError: more very large images are requested than one task can hold.
    """
    num_rows = requested_rows(fit_rows, rows)
    if pixels <= MAX_PIXELS:
        enough = max(FIT_ROWS, 3 * pixels)
        return enough if fit_rows == "auto" and rows > 2 * enough else num_rows
    # Larger images are fitted in one task, whose memory limits their number.
    most = rows_at_most(pixels)
    if fit_rows == "auto":
        return min(rows, LARGE_ROWS, most)
    if num_rows > most:
        raise UsageError(
            f"the PCA of images of {pixels:,} values is fitted to at most {most:,} of them;"
            f" leave out --fit-rows {fit_rows}"
        )
    return num_rows


def requested_rows(fit_rows: int | str, rows: int) -> int:
    """Return the number of rows that --fit-rows asks for: all of them for "all" and "auto"."""
    return rows if isinstance(fit_rows, str) else min(rows, fit_rows)


def rows_at_most(pixels: int) -> int:
    """Return the largest number of images that one task may hold."""
    return min(MOST_ROWS, MOST_BYTES // pixels)


def rows_are_fewer(rows: int, pixels: int) -> bool:
    """True if the row products are a much smaller matrix and one task may hold all rows: then dual.py fits."""
    return pixels > MAX_PIXELS or (2 * rows <= pixels and rows * pixels <= MOST_BYTES)


def _pack(full: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | npt.NDArray[np.int32]:
    """Return the upper triangle of a matrix by rows, as int32 if all of its products fit, else as int64."""
    small = full.diagonal().max(initial=0) < 1 << 31  # the diagonal bounds the rest
    kind = np.int32 if small else np.int64
    upper_triangle_values: npt.NDArray[Any] = np.concatenate([full[row, row:].astype(kind) for row in range(len(full))])
    return upper_triangle_values


def gram_of_blocks(blocks: Iterable[npt.NDArray[np.uint8]], pixels: int) -> Gram:
    """Return the Gram sums of uint8 [rows, pixels] blocks of any number of rows, in one task."""
    from scipy.linalg.blas import ssyrk  # loads in 0.2 s, which tasks of other strategies save

    exact = np.zeros((pixels, pixels), np.int64)  # syrk's lower triangle in Fortran order is the upper one in C
    single = np.zeros((pixels, pixels), np.float32)  # single-precision products since the last flush
    diagonal = np.zeros(pixels, np.float32)  # diagonal of ``single``; its maximum bounds all products
    total = np.zeros(pixels, np.int64)
    count = 0

    def flush() -> None:
        """Add the float32 products to the exact sums, and clear them and ``diagonal``.

        Called before a product could exceed 2^24, beyond which float32 does not hold every integer."""
        for row in range(0, pixels, 256):  # the result holds only the upper triangle
            exact[row : row + 256, row:] += single[row : row + 256, row:].astype(np.int64)
        single[:] = 0
        diagonal[:] = 0

    for block in _join_small_blocks(blocks):
        count += len(block)
        for low in range(0, len(block), SYRK_ROWS):
            # Flipping the top bit of a uint8 and reading it as an int8 gives the pixel minus 128.
            pending = [(block[low : low + SYRK_ROWS].view(np.int8) ^ np.int8(-SHIFT)).astype(np.float32)]
            while pending:
                rows = pending.pop()
                squares = np.einsum("ij,ij->j", rows, rows)
                # Halve a block that alone would exceed the bound of exact float32 sums; 1,024 such rows do not.
                if len(rows) > 1024 and squares.max() >= EXACT_F32:
                    pending += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
                    continue
                if (diagonal + squares).max() >= EXACT_F32:  # above the bound, this sum too may be rounded down to it
                    flush()
                diagonal += squares
                total += rows.sum(axis=0, dtype=np.float64).astype(np.int64)
                # rows.T is Fortran-ordered without a copy: c = rows.T @ rows, lower in Fortran = upper in C
                ssyrk(1.0, rows.T, beta=1.0, c=single.T, overwrite_c=1, lower=1)
    flush()
    return Gram(count, total, _pack(exact))


def _join_small_blocks(blocks: Iterable[npt.NDArray[np.uint8]]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the rows in blocks large enough for a product to run at full speed."""
    pending: list[npt.NDArray[np.uint8]] = []
    rows = 0
    for block in blocks:
        pending.append(block)
        rows += len(block)
        if rows >= SYRK_ROWS:
            yield np.concatenate(pending) if len(pending) > 1 else block
            pending = []
            rows = 0
    if pending:
        yield np.concatenate(pending)


def merge(left: Gram, right: Gram) -> Gram:
    """Add two sums. Exact, so associative and commutative to the last bit."""
    triangle = left.packed.astype(np.int64) + right.packed
    return Gram(left.count + right.count, left.total + right.total, triangle)


def upper_triangle(gram: Gram, centre: npt.NDArray[np.float64] | None = None) -> npt.NDArray[np.float64]:
    """Return the products as float64 [d, d] with zeros below, minus count times the products of ``centre``."""
    d = len(gram.total)
    upper = np.zeros((d, d))
    at = 0
    for row in range(d):
        upper[row, row:] = gram.packed[at : at + d - row]
        if centre is not None:
            upper[row, row:] -= gram.count * centre[row] * centre[row:]
        at += d - row
    return upper


def covariance(gram: Gram) -> npt.NDArray[np.float64]:
    """Return the upper triangle (zeros below), float64 [d, d], divided by count - 1 like scikit-learn and spark.ml."""
    upper = upper_triangle(gram, gram.total / gram.count)
    upper /= max(gram.count - 1, 1)
    return upper


@dataclass(frozen=True)
class Spectrum:
    """Principal components and their variances.

    components: float64 [k, d], rows of unit length, largest entry positive. variances: float64 [k], descending.
    total_variance: the variance in all d directions."""

    components: npt.NDArray[np.float64]
    variances: npt.NDArray[np.float64]
    total_variance: float


def top_components(covariance: npt.NDArray[np.float64], components: float) -> Spectrum:
    """Return the leading eigenvectors of a covariance, of which only the upper triangle is read.

    ``components`` >= 1 is their number; below 1, the share of variance that as few as possible explain. Directions
    without variance are omitted, so there can be fewer.

    More than a quarter of all eigenvectors are computed together with all others, in about five matrices of the
    covariance's size. Fewer come from Lanczos with a fixed start. One BLAS thread makes results reproducible on one
    machine; the LAPACK of another machine may round differently, which is why the fitted model is saved with the
    shards."""
    # Imported here, as most tasks do without it, and before the limit, which holds for libraries that are loaded.
    from pipeline.clustering.eigenvectors import leading_eigenvectors

    d = len(covariance)
    total = float(np.trace(covariance))
    if total <= 0:  # all rows are equal: any direction will do
        return Spectrum(np.eye(1, d), np.zeros(1), 0.0)
    num_components = min(int(components), d) if components >= 1 else min(64, d)
    with threadpool_limits(1, "blas"):
        # For a share of variance the number is unknown: double it until it suffices.
        while True:
            variances, vectors = leading_eigenvectors(covariance, num_components)
            if components >= 1 or num_components == d or variances.sum() >= components * total:
                break
            num_components = min(2 * num_components, d)
    if components < 1:
        share = np.cumsum(variances) / total
        keep = int(np.searchsorted(share, components - 1e-12)) + 1
    else:
        keep = num_components
    keep = max(1, min(keep, int((variances > total * 1e-12).sum())))
    return Spectrum(np.ascontiguousarray(fix_signs(vectors[:, :keep].T)), variances[:keep], total)


def fix_signs(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return directions [k, d] with their largest entry positive."""
    signs = np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(axis=1)])
    signed_rows: npt.NDArray[np.float64] = rows * np.where(signs == 0, 1, signs)[:, None]
    return signed_rows


def is_component_number(components: float) -> bool:
    """True for a whole number of components, or a share of the variance."""
    return math.isfinite(components) and components > 0 and (components <= 1 or components == int(components))
