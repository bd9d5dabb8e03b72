"""The parts of ``make bench-exchange`` that need no processes: its yardsticks, its figures and their picture."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.benchmarks.exchange_peers import CHUNK, SharedSums, Vector, add_in_memory


@pytest.mark.parametrize("workers", [2, 3])
def test_the_floor_sums_all_gradients(workers: int) -> None:
    """Two rounds, in ranges longer than a chunk, by threads instead of processes."""
    elements = workers * CHUNK + 1001
    arrivals = [[threading.Semaphore(0) for _ in range(workers)] for _ in range(2)]
    memory = [np.zeros(elements, np.float32) for _ in range(workers)]
    shared = SharedSums(memory, np.zeros(elements, np.float32), arrivals)
    gradients = np.random.default_rng(0).normal(size=(2, workers, elements)).astype(np.float32)

    def reduce(rank: int) -> list[Vector]:
        own, add_up = add_in_memory(rank, shared)
        totals = [np.empty(elements, np.float32) for _ in gradients]
        for gradient, total in zip(gradients, totals, strict=True):
            own[:] = gradient[rank]
            add_up(total)
        return totals

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(reduce, range(workers)))
    for totals in results:
        np.testing.assert_allclose(totals, gradients.sum(axis=1), rtol=1e-5, atol=1e-5)
