"""Makes tests/support/peer_vectors.json: the greedy sequences of apricot and submodlib, which the tests hold ours against.

    python -m venv peers && peers/bin/pip install apricot-select==0.6.1 submodlib-py==0.0.3 numpy xxhash
    peers/bin/python -m tests.support.peer_vectors

The packages are no part of the tests' environment: they compile (numba, C++) and hold numpy back. Similarities are this
project's integers, as float64, so all sums are exact. Where several points add as much, apricot's naive greedy takes the
lowest, as ours does, and submodlib another one. So submodlib is asked for the points before the first such tie."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.assignment.blocks import FUNCTIONS, FunctionName
from pipeline.clustering.similarity import similarities

FILE = Path(__file__).with_suffix(".json")
Greedy = tuple[list[int], list[int]]  # the points taken, and what each added
SHAPES = ((60, 4), (40, 2), (90, 12))  # points, dimensions


def apricot_greedy(name: FunctionName, similar: Any, budget: int, *, lazy: bool = False) -> Greedy:
    apricot: Any = import_module("apricot")
    options: dict[str, Any] = {"metric": "precomputed", "optimizer": "lazy" if lazy else "naive"}
    if name == "graph-cut":
        chosen = apricot.GraphCutSelection(budget, alpha=1, **options).fit(similar)
    else:
        chosen = apricot.FacilityLocationSelection(budget, **options).fit(similar)
    return chosen.ranking.tolist(), [round(gain) for gain in chosen.gains.tolist()]


def submodlib_greedy(name: FunctionName, similar: Any, budget: int, *, lazy: bool = False) -> Greedy:
    submodlib: Any = import_module("submodlib")
    options: dict[str, Any] = {"n": len(similar), "mode": "dense", "separate_rep": False}
    if name == "graph-cut":
        function = submodlib.GraphCutFunction(lambdaVal=1.0, ggsijs=similar, **options)
    else:
        function = submodlib.FacilityLocationFunction(sijs=similar, **options)
    found = function.maximize(
        budget=budget,
        optimizer="LazyGreedy" if lazy else "NaiveGreedy",
        stopIfZeroGain=False,
        stopIfNegativeGain=False,
        show_progress=False,
    )
    return [point for point, _ in found], [round(gain) for _, gain in found]


# By package: the module that is imported, and its greedy
PEERS: dict[str, tuple[str, Callable[..., Greedy]]] = {
    "apricot-select": ("apricot", apricot_greedy),
    "submodlib-py": ("submodlib", submodlib_greedy),
}


def before_a_tie(name: FunctionName, similar: Any) -> int:
    """How many points greedy takes before several add as much, by the definition of the function."""
    free, cut = list(range(len(similar))), name == "graph-cut"
    nearest, inside = np.zeros(len(similar)), np.zeros(len(similar))
    while len(free) > 1:
        if cut:
            gains = [similar[i].sum() - similar[i, i] - 2 * inside[i] for i in free]
        else:
            gains = [np.maximum(similar[i] - nearest, 0).sum() for i in free]
        order = np.argsort(gains)
        if gains[order[-1]] == gains[order[-2]]:
            break
        taken = free.pop(int(order[-1]))
        nearest, inside = np.maximum(nearest, similar[taken]), inside + similar[taken]
    return len(similar) - len(free)


def main() -> None:
    rng = np.random.default_rng(0)
    cases = []
    for rows, dimensions in SHAPES:
        points = rng.integers(-900, 900, (rows, dimensions)).astype(np.int32)
        similar = similarities(points).astype(np.float64)
        for name in FUNCTIONS:
            budgets = {"apricot-select": rows - 1, "submodlib-py": before_a_tie(name, similar)}
            for peer, budget in budgets.items():
                taken, gains = PEERS[peer][1](name, similar, budget)
                case = {"peer": peer, "function": name, "points": points.tolist(), "taken": taken, "gains": gains}
                cases.append(case)
                print(f"{peer}, {name}, {rows} points: {budget} taken")
    packages = {name: version(name) for name in (*PEERS, "numpy")}
    FILE.write_text(
        json.dumps({"made_by": "python -m tests.support.peer_vectors", "packages": packages, "cases": cases}) + "\n"
    )


if __name__ == "__main__":
    main()
