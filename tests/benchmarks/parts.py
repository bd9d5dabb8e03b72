"""What a class in parts loses, and what a second round would bring back: ``python -m tests.benchmarks.parts --data FOLDER``.

FOLDER is CIFAR-10, binary (or CIFAR10_DIR). Of its 5,000 cats in five parts, for three keys that cut them:
  one block    an eighth of the class by greedy: its value over that of greedy on the whole class. Parts each give their
               share of it. In GreeDi (Mirzasoleiman et al. 2013) each gives as many as the block is to have, of which
               greedy on the whole class takes the best.
  all blocks   MMD^2 of eight blocks and the class, over that of random ones. All rows have to be placed, so GreeDi's
               second round would be greedy on the whole class. Here it is a matching: which block of a part goes to which
               worker, so that the class's function of what workers hold grows most."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from pipeline.assignment.blocks import FUNCTIONS, FunctionName
from pipeline.clustering.similarity import Similarities, similarities
from pipeline.core.arrays import Ints
from pipeline.core.reporting.tables import table
from pipeline.strategies.submodular import Parts
from tests.benchmarks.submodular import read_points
from tests.unit.test_submodular import in_parts, mean_mmd

WORKERS, PARTS, KEYS = 8, 5, 3


def value(name: FunctionName, similar: Similarities, rows: Ints) -> int:
    """The class's function of a block."""
    inside = np.zeros(len(similar), np.bool_)
    inside[rows] = True
    if name == "graph-cut":
        return int(similar[np.ix_(~inside, inside)].sum(dtype=np.int64))
    return int(similar[:, inside].max(axis=1).sum(dtype=np.int64))


def greedy(name: FunctionName, similar: Similarities, budget: int, among: Ints | None = None) -> Ints:
    """A block of so many rows, of all or among some."""
    blocks: Any = FUNCTIONS[name](similar, 1)
    if among is not None:
        barred = np.setdiff1d(np.arange(len(similar)), among)
        if name == "graph-cut":
            blocks._gains[:, barred] = -(1 << 62)
        else:
            for row in barred.tolist():
                blocks._free[row] = False
    return np.array([blocks.add_best_point(0) for _ in range(budget)])


def matched(name: FunctionName, similar: Similarities, owners: Ints, groups: Ints) -> Ints:
    """The owners after the second round, part by part."""
    held = [np.flatnonzero((owners == worker) & (groups == 0)) for worker in range(WORKERS)]
    found = owners.copy()
    for part in range(1, PARTS):
        blocks = [np.flatnonzero((owners == worker) & (groups == part)) for worker in range(WORKERS)]
        gains = [[value(name, similar, np.concatenate([rows, block])) for block in blocks] for rows in held]
        for worker, block in zip(*linear_sum_assignment(-np.array(gains, np.float64)), strict=True):
            held[worker] = np.concatenate([held[worker], blocks[block]])
            found[blocks[block]] = worker
    return found


def show(numbers: list[float], digits: int) -> str:
    return f"{np.mean(numbers):.{digits}f} ({min(numbers):.{digits}f} to {max(numbers):.{digits}f})"


def main() -> None:
    points = read_points(__doc__)
    similar, budget = similarities(points), len(points) // WORKERS
    plain = np.arange(len(points)) % WORKERS
    rng = np.random.default_rng(0)
    chance = float(np.mean([mean_mmd(similar, rng.permutation(plain)) for _ in range(5)]))
    rows = []
    for name in FUNCTIONS:
        exact = value(name, similar, greedy(name, similar, budget))
        one: dict[str, list[float]] = {"parts": [], "greedi": []}
        every: dict[str, list[float]] = {"parts": [], "matched": []}
        for key in range(KEYS):
            groups = Parts(np.array([0, PARTS]), key)(np.zeros(len(points), np.int64), np.arange(len(points)))
            parts = [np.flatnonzero(groups == part) for part in range(PARTS)]
            first = [part[greedy(name, similarities(points[part]), budget)] for part in parts]
            union = np.concatenate([part[: budget // PARTS] for part in first])
            best = greedy(name, similar, budget, among=np.concatenate(first))
            one["parts"].append(value(name, similar, union) / exact)
            one["greedi"].append(value(name, similar, best) / exact)
            owners = in_parts(points, PARTS, name, (1,) * WORKERS, key=key)
            every["parts"].append(mean_mmd(similar, owners) / chance)
            every["matched"].append(mean_mmd(similar, matched(name, similar, owners, groups)) / chance)
        whole = mean_mmd(similar, in_parts(points, 1, name, (1,) * WORKERS)) / chance
        rows.append(
            (
                name,
                show(one["parts"], 4),
                show(one["greedi"], 4),
                f"{whole:.2f}",
                *(show(each, 2) for each in every.values()),
            )
        )
    print(table(rows, ("", "one block: parts", "GreeDi", "all blocks: whole class", "parts", "matched")))


if __name__ == "__main__":
    main()
