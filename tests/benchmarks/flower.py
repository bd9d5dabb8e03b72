"""Skewed shards beside those of Flower Datasets, in distribution: ``python -m tests.benchmarks.flower``.

Its partitioners run in a process of the environment READERS, which has flwr-datasets. The exit code is 1 if a figure that
should agree does not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
from scipy import stats

from pipeline.assignment.shares import class_table, dirichlet_table, sorted_table
from pipeline.assignment.sizes import named_ratios
from pipeline.core.arrays import Ints
from pipeline.core.reporting.tables import table
from pipeline.core.shardset.ratios import largest_remainder
from pipeline.quality.metrics import class_skew
from tests.clusters.environments import READERS

CLASSES = 10
ROWS = 6000
WORKERS = 12
SEEDS = 100
# The peer's side: reads a list of [class name, arguments] and prints the rows by class and partition of each.
PEER = """
import importlib.util, json, sys, types, warnings
import numpy as np
from datasets import Dataset, disable_progress_bars
# The package itself imports libraries that draw; its module of partitioners needs none of them.
package = types.ModuleType("flwr_datasets")
package.__path__ = importlib.util.find_spec("flwr_datasets").submodule_search_locations
sys.modules["flwr_datasets"] = package
import flwr_datasets.partitioner as partitioners
warnings.simplefilter("ignore")
disable_progress_bars()
request = json.load(sys.stdin)
labels = np.array(request["labels"])
rows = Dataset.from_dict({"label": labels})
tables = []
for name, arguments in request["calls"]:
    partitioner = getattr(partitioners, name)(**arguments)
    partitioner.dataset = rows
    first = partitioner.load_partition(0)["label"]  # computes the indices of all
    numbers = range(arguments["num_partitions"])
    if name == "ShardPartitioner":  # whose indices are of sorted rows
        parts = [partitioner.load_partition(number)["label"] for number in numbers]
    else:
        parts = [labels[partitioner._partition_id_to_indices[number]] for number in numbers]
        assert parts[0].tolist() == list(first)
    tables.append(np.array([np.bincount(np.array(part, int), minlength=10) for part in parts]).T.tolist())
print(json.dumps(tables))
"""


Call = tuple[str, dict[str, Any]]  # the name of a partitioner and its arguments


def peer_tables(python: str, labels: Ints, calls: list[Call]) -> list[Ints]:
    """Return the rows by class and partition of each call of a partitioner, int64 [classes, partitions].

    Args:
        python: the interpreter of the peer's environment, which runs once.
        labels: the class of each row.
        calls: name and arguments of the partitioners.
    """
    request = json.dumps({"labels": labels.tolist(), "calls": calls})
    done = subprocess.run([python, "-c", PEER], input=request, capture_output=True, text=True, check=True)
    return [np.array(each) for each in json.loads(done.stdout.splitlines()[-1])]


def calls_of(alphas: Sequence[float], sizes: Sequence[str], seeds: int) -> dict[str, list[Call]]:
    """Return the calls of the comparison by their row: of each partitioner that draws, one per seed."""
    common = {"num_partitions": WORKERS, "partition_by": "label"}
    calls: dict[str, list[Call]] = {}
    for alpha in alphas:
        options = {**common, "alpha": alpha, "min_partition_size": 0, "self_balancing": False}
        calls[f"Dirichlet, alpha {alpha:g}"] = [
            ("DirichletPartitioner", {**options, "seed": seed}) for seed in range(seeds)
        ]
    options = {**common, "num_classes_per_partition": 2, "class_assignment_mode": "first-deterministic"}
    calls["Pathological, 2 classes"] = [("PathologicalPartitioner", {**options, "seed": seed}) for seed in range(seeds)]
    options = {**common, "num_shards_per_partition": 1}
    calls["Shard, 1 piece each"] = [("ShardPartitioner", {**options, "seed": seed}) for seed in range(3)]
    return calls | {name: [(f"{name}Partitioner", {"num_partitions": 8})] for name in sizes}


def skew_text(tables: list[Ints]) -> str:
    """Return mean total variation and effective classes over some tables."""
    skews = [skew for each in tables if (skew := class_skew(each.T))]
    variations = np.mean([skew.total_variation for skew in skews])
    classes = np.mean([skew.effective_classes for skew in skews])
    return f"TV {variations:.3f}, classes {classes:.2f}"


def by_label(name: str, theirs: list[Ints], ours: list[Ints]) -> tuple[str, str, str, str, bool]:
    """Compare the total variations of tables over seeds by a Kolmogorov-Smirnov test."""
    variations = [
        [skew.total_variation for each in tables if (skew := class_skew(each.T))] for tables in (theirs, ours)
    ]
    p_value = float(stats.ks_2samp(*variations).pvalue)
    return name, skew_text(theirs), skew_text(ours), f"KS p = {p_value:.2f}", p_value > 0.001


def compare(python: str, seeds: int = SEEDS) -> list[tuple[str, str, str, str, bool]]:
    """Return a row per partitioner: name, their figures, ours, the agreement in words, and whether it is expected."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(CLASSES), ROWS // CLASSES))
    sizes = np.bincount(labels)
    alphas, ratios = (0.1, 0.5, 10.0), ("Linear", "Square", "Exponential")
    calls = calls_of(alphas, ratios, seeds)
    # One process computes all tables, because its start takes longer than a call.
    tables = iter(peer_tables(python, labels, [call for of_row in calls.values() for call in of_row]))
    theirs = {name: list(islice(tables, len(of_row))) for name, of_row in calls.items()}

    rows = []
    for alpha in alphas:
        name = f"Dirichlet, alpha {alpha:g}"
        mine = [dirichlet_table(sizes, WORKERS, alpha, np.random.default_rng(seed), 0) for seed in range(seeds)]
        rows.append(by_label(name, theirs[name], mine))
    # Both give a class's rows to its workers equally; theirs may draw some class more often than another.
    name = "Pathological, 2 classes"
    mine = [class_table(sizes, WORKERS, 2, np.random.default_rng(seed)) for seed in range(seeds)]
    each_has_two = all(((table > 0).sum(axis=0) == 2).all() for table in (*theirs[name], *mine))
    rows.append((name, skew_text(theirs[name]), skew_text(mine), "2 classes at every worker", each_has_two))
    # Sorted rows cut into one piece per worker: the same pieces, which theirs then shuffles among the partitions.
    name = "Shard, 1 piece each"
    pieces = sorted(sorted_table(sizes, WORKERS, 1.0).T.tolist())
    equal = all(sorted(each.T.tolist()) == pieces for each in theirs[name])
    rows.append((name, skew_text(theirs[name]), skew_text([np.array(pieces).T]), "equal pieces", equal))
    for name in ratios:
        theirs_sized = theirs[name][0].sum(axis=0)
        mine_sized = largest_remainder(np.array([ROWS]), named_ratios(name.lower(), 8))[0]
        worst = int(np.abs(mine_sized - theirs_sized).max())
        # They round down and give the remainder to the last; ours are whole parts of 16,384.
        rows.append((name, str(theirs_sized.tolist()), str(mine_sized.tolist()), f"within {worst} rows", worst <= 8))
    return rows


def main() -> int:
    """Print the comparison. Returns the exit code."""
    rows = compare(str(READERS.make()))
    header = ("partitioner", "Flower Datasets", "this project", "agreement", "")
    print(table([(*row[:4], "" if row[4] else "DIFFERS") for row in rows], header))
    return 0 if all(row[4] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
