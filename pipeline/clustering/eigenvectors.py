"""Leading eigenvectors of a covariance: apart from gram.py, which every task imports, as scipy loads in 0.2 s."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy.linalg.blas import dsymv
from scipy.sparse.linalg import LinearOperator, eigsh


def leading_eigenvectors(
    covariance: npt.NDArray[np.float64], k: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the k largest eigenvalues, descending, and their eigenvectors as columns, float64 [d, k]."""
    d = len(covariance)
    if k > d // 4 or d < 64:
        # numpy's solver releases the GIL. It can take minutes, and the heartbeat thread must run meanwhile.
        values, vectors = (part[..., -k:] for part in np.linalg.eigh(covariance, UPLO="U"))
    else:
        start = np.cos(np.arange(1, d + 1, dtype=np.float64))
        # A product costs its memory traffic, and one triangle is half the bytes. C's upper is Fortran's lower triangle.
        product = LinearOperator((d, d), matvec=lambda x: dsymv(1.0, covariance.T, x, lower=1), dtype=np.float64)
        values, vectors = eigsh(product, k=k, which="LA", v0=start)
    order = np.argsort(values)[::-1]
    return np.maximum(values[order], 0.0), vectors[:, order]
