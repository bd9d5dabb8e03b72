"""How like its class each worker's part of it is, and what that costs.

    python -m tests.benchmarks.submodular --data FOLDER

FOLDER is CIFAR-10, binary (or CIFAR10_DIR). Of class 3, "cat", on 64 principal components of its own: MMD^2 between a
worker's rows and the class, mean over workers, over that of random rows, as many a worker (1 is chance, less is more even).
Beside it seconds of one core. Then the same with the class in parts. At the end an eighth of the class by plain greedy,
beside apricot's and submodlib's lazy greedy where these are installed."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.assignment.blocks import FUNCTIONS, BlockRule, FunctionName
from pipeline.clustering.similarity import Similarities, similarities
from pipeline.core.reporting.tables import table
from pipeline.core.shardset.ratios import Ratios, largest_remainder
from tests.support.peer_vectors import PEERS
from tests.unit.test_submodular import cat_points, in_parts, mean_mmd

CASES: tuple[tuple[Ratios, BlockRule, int], ...] = (
    ((1,) * 8, "paper", 1),
    ((1,) * 8, "size", 1),
    ((4, 2, 1, 1), "paper", 1),
    ((4, 2, 1, 1), "size", 1),
    ((4, 2, 1, 1), "micro", 1),
    ((1,) * 8, "micro", 2),
    ((1,) * 8, "micro", 4),
    ((4, 2, 1, 1), "micro", 2),
    ((4, 2, 1, 1), "micro", 4),
)
REPEATS = 3
DRAWS = 5  # of random parts, and of keys that cut the class


def print_peers(similar: Similarities) -> None:
    """Seconds of an eighth of a class, taken one by one out of ready similarities; medians of REPEATS."""
    budget = len(similar) // 8
    wide = similar.astype(np.float64)
    rows = [["ours", *(f"{seconds(partial(take, name, similar, budget)):.2f}" for name in FUNCTIONS)]]
    for peer, (module, greedy) in PEERS.items():
        if find_spec(module) is None:
            print(f"{peer} is not installed, so nothing is measured of it (tests/support/peer_vectors.py)")
            continue
        lazy = partial(greedy, lazy=True)
        for name in FUNCTIONS:
            lazy(name, wide[:50, :50], 5)  # compiles
        rows.append([peer, *(f"{seconds(partial(lazy, name, wide, budget)):.2f}" for name in FUNCTIONS)])
    print(table(rows, (f"{budget:,} of {len(similar):,} rows, s", *FUNCTIONS), right=range(1, 3)))


def take(name: FunctionName, similar: Similarities, budget: int) -> None:
    blocks = FUNCTIONS[name](similar, 1)
    for _ in range(budget):
        blocks.add_best_point(0)


def seconds(work: Callable[[], object]) -> float:
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def read_points(description: str | None) -> np.ndarray[Any, Any]:
    """The points of a class, of the data that the command line or CIFAR10_DIR names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("CIFAR10_DIR"))
    folder = parser.parse_args().data
    if not folder:
        parser.error("--data FOLDER, or CIFAR10_DIR, is needed")
    return cat_points(folder)


def main() -> None:
    points = read_points(__doc__)
    began = time.perf_counter()
    similar = similarities(points)
    print(f"{len(points):,} rows; similarities alone {time.perf_counter() - began:.2f} s")
    rng = np.random.default_rng(0)
    rows = []
    for ratios, rule, parts in CASES:
        plain = np.repeat(np.arange(len(ratios)), largest_remainder(np.array([len(points)]), ratios)[0])
        chance = np.mean([mean_mmd(similar, rng.permutation(plain)) for _ in range(DRAWS)])
        row = [":".join(map(str, ratios)), rule, str(parts)]
        for name in FUNCTIONS:
            began, found = time.perf_counter(), []
            for key in range(DRAWS if parts > 1 else 1):
                found.append(in_parts(points, parts, name, ratios, rule, key))
            seconds = (time.perf_counter() - began) / len(found)
            ratio = [mean_mmd(similar, owners) / chance for owners in found]
            spread = f" ({min(ratio):.2f} to {max(ratio):.2f})" if len(ratio) > 1 else ""
            row += [f"{np.mean(ratio):.2f}{spread}", f"{seconds:.1f}"]
        rows.append(row)
    titles = [title for name in FUNCTIONS for title in (name, "s")]
    print(table(rows, ("ratios", "rule", "parts", *titles), right=range(2, 7)))
    print_peers(similar)


if __name__ == "__main__":
    main()
