"""The exact block Gram matrix and the principal components that follow from it. Pure numpy and scipy.

(u8 - 128) products are integers of at most 2^14, so a float32 product of a block is exact while every diagonal sum stays
within 2^24 (by Cauchy-Schwarz the diagonal bounds all partial sums). Block results are added up as integers. The
covariance is therefore the same bits whatever the blocks, their order or the number of BLAS threads, and costs float32
speed. (Block bound and measurements: the design notes on sharding performance.)

Cost: rows * d^2 flop; d*d*12 bytes of state a task, d*d*2 to d*d*4 bytes from each task to the merge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg.blas import dsymv, ssyrk
from scipy.sparse.linalg import LinearOperator, eigsh
from threadpoolctl import threadpool_limits

from pipeline.core.errors import UsageError

EXACT_F32 = 1 << 24
SHIFT = 128
SYRK_ROWS = 2048
FIT_ROWS = 10_000
MAX_PIXELS = 12_288  # 64x64x3: the state of one task is 12 d^2 bytes, 1.8 GB there; larger images go by dual.py
LARGE_ROWS = 2000  # of those, by default
MOST_ROWS, MOST_BYTES = 10_000, 512 << 20  # of images that one task holds whole


@dataclass(frozen=True)
class Gram:
    """Sums over rows of z = pixel - 128. count; total int64 [d]; packed: the upper triangle by rows, int64 or int32."""

    count: int
    total: npt.NDArray[np.int64]
    packed: npt.NDArray[np.int64] | npt.NDArray[np.int32]


def rows_to_fit(asked: int | str, rows: int, pixels: int) -> int:
    """How many of ``rows`` the PCA is fitted to. By default ("auto") as many as make the Gram matrix cost about what its
    eigenvectors cost, 10,000, but three for each pixel at least; all of them where that would be more than half.

    Lanczos needs some 150 products with the d x d matrix for 50 components, each bound by memory: the flop of 8,000 rows in
    the time that they take. Of images with more than MAX_PIXELS pixels LARGE_ROWS, or fewer where one task holds no more.
    Raises UsageError where more of those are asked for than it holds."""
    if pixels > MAX_PIXELS:
        most = rows_at_most(pixels)
        wanted = min(rows, most, LARGE_ROWS) if asked == "auto" else rows if asked == "all" else min(rows, int(asked))
        if wanted > most:
            raise UsageError(
                f"the PCA of images of {pixels:,} values is fitted to at most {most:,} of them; leave out --fit-rows {asked}"
            )
        return wanted
    enough = max(FIT_ROWS, 3 * pixels)
    if asked == "auto":
        return rows if rows <= 2 * enough else enough
    return rows if asked == "all" else min(rows, int(asked))


def rows_at_most(pixels: int) -> int:
    """How many images one task may hold whole."""
    return min(MOST_ROWS, MOST_BYTES // pixels)


def rows_are_fewer(rows: int, pixels: int) -> bool:
    """Whether the products of rows are a much smaller matrix, and one task may hold them all: then dual.py fits."""
    return pixels > MAX_PIXELS or (2 * rows <= pixels and rows * pixels <= MOST_BYTES)


def _pack(full: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | npt.NDArray[np.int32]:
    small = full.diagonal().max(initial=0) < 1 << 31  # the diagonal bounds the rest
    kind = np.int32 if small else np.int64
    packed: npt.NDArray[Any] = np.concatenate([full[row, row:].astype(kind) for row in range(len(full))])
    return packed


def local(blocks: Iterable[npt.NDArray[np.uint8]], pixels: int) -> Gram:
    """The Gram sums of uint8 [rows, pixels] blocks of any number of rows, in one task."""
    exact = np.zeros((pixels, pixels), np.int64)  # C order; syrk's Fortran lower triangle is its upper one
    single = np.zeros((pixels, pixels), np.float32)
    diagonal = np.zeros(pixels, np.float32)
    total = np.zeros(pixels, np.int64)
    count = 0

    def flush() -> None:
        nonlocal single
        for row in range(0, pixels, 256):  # only the upper triangle moves
            exact[row : row + 256, row:] += single[row : row + 256, row:].astype(np.int64)
        single[:] = 0
        diagonal[:] = 0

    for block in _gathered(blocks):
        count += len(block)
        for low in range(0, len(block), SYRK_ROWS):
            pending = [(block[low : low + SYRK_ROWS].view(np.int8) ^ np.int8(-SHIFT)).astype(np.float32)]
            while pending:
                rows = pending.pop()
                squares = np.einsum("ij,ij->j", rows, rows)
                if len(rows) > 1024 and squares.max() >= EXACT_F32:
                    pending += [rows[len(rows) // 2 :], rows[: len(rows) // 2]]
                    continue
                if (diagonal + squares).max() > EXACT_F32:
                    flush()
                diagonal += squares
                total += rows.sum(axis=0, dtype=np.float64).astype(np.int64)
                # rows.T is Fortran-ordered without a copy: c = rows.T @ rows, lower in Fortran = upper in C
                ssyrk(1.0, rows.T, beta=1.0, c=single.T, overwrite_c=1, lower=1)
    flush()
    return Gram(count, total, _pack(exact))


def _gathered(blocks: Iterable[npt.NDArray[np.uint8]]) -> Iterator[npt.NDArray[np.uint8]]:
    """The rows in blocks large enough for a product to run at speed."""
    held: list[npt.NDArray[np.uint8]] = []
    rows = 0
    for block in blocks:
        held.append(block)
        rows += len(block)
        if rows >= SYRK_ROWS:
            yield np.concatenate(held) if len(held) > 1 else block
            held, rows = [], 0
    if held:
        yield np.concatenate(held)


def merge(left: Gram, right: Gram) -> Gram:
    """Exact, so associative and commutative to the last bit."""
    packed = left.packed.astype(np.int64) + right.packed
    return Gram(left.count + right.count, left.total + right.total, packed)


def upper_triangle(gram: Gram, centre: npt.NDArray[np.float64] | None = None) -> npt.NDArray[np.float64]:
    """float64 [d, d] with zeros below, less count times the products of ``centre``."""
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
    """The upper triangle, float64 [d, d] with zeros below, divided by count - 1 as scikit-learn and spark.ml do."""
    upper = upper_triangle(gram, gram.total / gram.count)
    upper /= max(gram.count - 1, 1)
    return upper


@dataclass(frozen=True)
class Spectrum:
    """components float64 [k, d], rows of unit length, largest entry positive; variances float64 [k], descending;
    total_variance: of all d directions."""

    components: npt.NDArray[np.float64]
    variances: npt.NDArray[np.float64]
    total_variance: float


def top_components(covariance: npt.NDArray[np.float64], components: float) -> Spectrum:
    """The leading eigenvectors: ``components`` of them (>= 1), or as few as explain that share of variance (< 1). Only the
    upper triangle of the covariance is read.

    More than a quarter of all are computed with all others, in about five matrices of the covariance's size.

    Lanczos with a fixed start and one BLAS thread, so that one machine gives one answer; another machine's LAPACK may
    round differently, which is why the fitted model is saved with the shards. Directions without variance are left
    out, so fewer may come back."""
    d = len(covariance)
    total = float(np.trace(covariance))
    if total <= 0:  # all rows are equal: any direction will do
        return Spectrum(np.eye(1, d), np.zeros(1), 0.0)
    wanted = min(int(components), d) if components >= 1 else min(64, d)
    with threadpool_limits(1, "blas"):
        while True:
            variances, vectors = _leading(covariance, wanted)
            if components >= 1 or wanted == d or variances.sum() >= components * total:
                break
            wanted = min(2 * wanted, d)
    if components < 1:
        share = np.cumsum(variances) / total
        keep = int(np.searchsorted(share, components - 1e-12)) + 1
    else:
        keep = wanted
    keep = max(1, min(keep, int((variances > total * 1e-12).sum())))
    return Spectrum(np.ascontiguousarray(upright(vectors[:, :keep].T)), variances[:keep], total)


def upright(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Directions [k, d] with their largest entry positive."""
    signs = np.sign(rows[np.arange(len(rows)), np.abs(rows).argmax(axis=1)])
    turned: npt.NDArray[np.float64] = rows * np.where(signs == 0, 1, signs)[:, None]
    return turned


def is_component_number(components: float) -> bool:
    """Whether it is a whole number of components, or a share of the variance."""
    return math.isfinite(components) and components > 0 and (components <= 1 or components == int(components))


def _leading(covariance: npt.NDArray[np.float64], k: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    d = len(covariance)
    if k > d // 4 or d < 64:
        # numpy's, which lets other threads run meanwhile: a heartbeat is among them, and this may take minutes.
        values, vectors = (found[..., -k:] for found in np.linalg.eigh(covariance, UPLO="U"))
    else:
        start = np.cos(np.arange(1, d + 1, dtype=np.float64))
        # Of one triangle: half the bytes, and these are what a product costs. C's upper one is Fortran's lower one.
        product = LinearOperator((d, d), matvec=lambda x: dsymv(1.0, covariance.T, x, lower=1), dtype=np.float64)
        values, vectors = eigsh(product, k=k, which="LA", v0=start)
    order = np.argsort(values)[::-1]
    return np.maximum(values[order], 0.0), vectors[:, order]
