"""Skewed shards beside those of Flower Datasets, in distribution: ``python -m tests.benchmarks.flower``.

FLOWER_PYTHON names the interpreter of an environment with flwr-datasets, which runs its partitioners in a process of its
own. Without it the comparison is skipped. The exit code is 1 if a figure that should agree does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
from scipy import stats

from pipeline.assignment.shares import class_table, dirichlet_table, sorted_table
from pipeline.assignment.sizes import named_ratios
from pipeline.core.arrays import Ints
from pipeline.core.reporting.tables import table
from pipeline.core.shardset.ratios import largest_remainder
from pipeline.quality.metrics import class_skew

VARIABLE = "FLOWER_PYTHON"
CLASSES = 10
ROWS = 6000
WORKERS = 12
SEEDS = 100
# The peer's side: reads a list of [class name, arguments] and prints the rows by class and partition of each.
PEER = """
import json, sys, warnings
import numpy as np
from datasets import Dataset, disable_progress_bars
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
    if name == "ShardPartitioner":  # whose indices are of sorted rows
        parts = [partitioner.load_partition(number)["label"] for number in range(request["workers"])]
    else:
        parts = [labels[partitioner._partition_id_to_indices[number]] for number in range(request["workers"])]
        assert parts[0].tolist() == list(first)
    tables.append(np.array([np.bincount(np.array(part, int), minlength=10) for part in parts]).T.tolist())
print(json.dumps(tables))
"""


def peer_tables(
    python: str, labels: Ints, calls: list[tuple[str, dict[str, Any]]], workers: int = WORKERS
) -> list[Ints]:
    """Return the rows by class and partition of each call of a partitioner, int64 [classes, partitions].

    Args:
        python: the interpreter of the peer's environment.
        labels: the class of each row.
        calls: name and arguments of the partitioners.
        workers: number of partitions.
    """
    request = json.dumps({"labels": labels.tolist(), "calls": calls, "workers": workers})
    done = subprocess.run([python, "-c", PEER], input=request, capture_output=True, text=True, check=True)
    return [np.array(each) for each in json.loads(done.stdout.splitlines()[-1])]


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


def compare(python: str) -> list[tuple[str, str, str, str, bool]]:
    """Return a row per partitioner: name, their figures, ours, the agreement in words, and whether it is expected."""
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(CLASSES), ROWS // CLASSES))
    sizes = np.bincount(labels)
    seeds = range(SEEDS)
    rows = []

    common = {"num_partitions": WORKERS, "partition_by": "label"}
    for alpha in (0.1, 0.5, 10.0):
        options = {**common, "alpha": alpha, "min_partition_size": 0, "self_balancing": False}
        theirs = peer_tables(python, labels, [("DirichletPartitioner", {**options, "seed": seed}) for seed in seeds])
        mine = [dirichlet_table(sizes, WORKERS, alpha, np.random.default_rng(seed), 0) for seed in seeds]
        rows.append(by_label(f"Dirichlet, alpha {alpha:g}", theirs, mine))
    # Both give a class's rows to its workers equally; theirs may draw some class more often than another.
    options = {**common, "num_classes_per_partition": 2, "class_assignment_mode": "first-deterministic"}
    theirs = peer_tables(python, labels, [("PathologicalPartitioner", {**options, "seed": seed}) for seed in seeds])
    mine = [class_table(sizes, WORKERS, 2, np.random.default_rng(seed)) for seed in seeds]
    each_has_two = all(((tables > 0).sum(axis=0) == 2).all() for tables in (*theirs, *mine))
    rows.append(
        ("Pathological, 2 classes", skew_text(theirs), skew_text(mine), "2 classes at every worker", each_has_two)
    )
    # Sorted rows cut into one piece per worker: the same pieces, which theirs then shuffles among the partitions.
    options = {**common, "num_shards_per_partition": 1}
    theirs = peer_tables(python, labels, [("ShardPartitioner", {**options, "seed": seed}) for seed in range(3)])
    pieces = sorted(sorted_table(sizes, WORKERS, 1.0).T.tolist())
    equal = all(sorted(each.T.tolist()) == pieces for each in theirs)
    rows.append(("Shard, 1 piece each", skew_text(theirs), skew_text([np.array(pieces).T]), "equal pieces", equal))
    for name in ("Linear", "Square", "Exponential"):
        (theirs_by_class,) = peer_tables(python, labels, [(f"{name}Partitioner", {"num_partitions": 8})], 8)
        theirs_sized = theirs_by_class.sum(axis=0)
        mine_sized = largest_remainder(np.array([ROWS]), named_ratios(name.lower(), 8))[0]
        worst = int(np.abs(mine_sized - theirs_sized).max())
        # They round down and give the remainder to the last; ours are whole parts of 16,384.
        rows.append((name, str(theirs_sized.tolist()), str(mine_sized.tolist()), f"within {worst} rows", worst <= 8))
    return rows


def main() -> int:
    """Print the comparison. Returns the exit code."""
    python = os.environ.get(VARIABLE)
    if not python:
        print(f"skipped: {VARIABLE} does not name the Python of an environment with flwr-datasets")
        return 0
    rows = compare(python)
    header = ("partitioner", "Flower Datasets", "this project", "agreement", "")
    print(table([(*row[:4], "" if row[4] else "DIFFERS") for row in rows], header))
    return 0 if all(row[4] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
