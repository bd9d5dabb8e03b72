"""The mixing weights of D-PSGD and the probabilities and weight of MATCHA, from the spectra of Laplacian matrices.

lambda_2, the second smallest eigenvalue of a Laplacian, says how well a graph is connected: it is 0 for a graph in
several parts. J is the matrix whose elements are all 1/N."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipeline.core.arrays import Floats
from trainer.exchange.topologies import Link


def laplacian(links: Iterable[Link], num_workers: int) -> Floats:
    """Return the Laplacian matrix [num_workers, num_workers] of a graph: degrees minus adjacency."""
    matrix = np.zeros((num_workers, num_workers))
    for i, j in links:
        matrix[i, j] -= 1
        matrix[j, i] -= 1
        matrix[i, i] += 1
        matrix[j, j] += 1
    return matrix


def extremes(links: Iterable[Link], num_workers: int) -> tuple[float, float]:
    """Return lambda_2 and the largest eigenvalue of a graph's Laplacian. O(N^3)."""
    values = np.linalg.eigvalsh(laplacian(links, num_workers))
    return float(values[1]), float(values[-1])


def constant_weight(lambda_2: float, lambda_max: float) -> float:
    """Return the weight of all links with which averaging converges fastest (Xiao and Boyd 2004, eq. 23)."""
    return 2 / (lambda_2 + lambda_max)
