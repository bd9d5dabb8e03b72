"""Plain loops of D-PSGD on the toy loss of virtual time: dense weights, float64, one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.seeds import Purpose, generator

Matrix = npt.NDArray[np.float64]

ELEMENTS = 64
CURVATURE = np.geomspace(1, 0.01, ELEMENTS)


def toy_gradient(values: Matrix, worker: int, clock: int, size: int, seed: int = 0) -> Matrix:
    """The gradient of a worker's mini-batch of ``size`` examples."""
    noise = generator(seed, Purpose.TOY, worker, clock).standard_normal(ELEMENTS, np.float32)
    gradient: Matrix = CURVATURE * values + noise / np.sqrt(size)
    return gradient


def ring_weights(workers: int) -> Matrix:
    """W = I - a L of a ring, a = 2 / (lambda_2 + lambda_max)."""
    laplacian = np.zeros((workers, workers))
    for worker in range(workers):
        laplacian[worker, worker] += 2
        laplacian[worker, (worker + 1) % workers] -= 1
        laplacian[worker, (worker - 1) % workers] -= 1
    values = np.sort(np.linalg.eigvalsh(laplacian))
    weights: Matrix = np.eye(workers) - 2 / (values[1] + values[-1]) * laplacian
    return weights


def d_psgd(
    weights: Callable[[int], Matrix],
    sizes: list[int],
    rounds: int,
    *,
    rate: float,
    momentum: float = 0.0,
    order: str = "avg-then-grad",
    weigh: bool = False,
) -> Matrix:
    """The models [N, P] after some rounds. weights: W of a round; sizes: examples per mini-batch of each worker."""
    workers = len(sizes)
    models = np.ones((workers, ELEMENTS))
    velocity = np.zeros_like(models)
    for k in range(rounds):
        gradients: Any = [toy_gradient(models[i], i, k, sizes[i]) for i in range(workers)]
        if weigh:
            gradients = [g * size / np.mean(sizes) for g, size in zip(gradients, sizes, strict=True)]
        velocity = momentum * velocity + rate * np.array(gradients)
        models = weights(k) @ models - velocity if order == "avg-then-grad" else weights(k) @ (models - velocity)
    return models
