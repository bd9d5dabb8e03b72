"""What models learn with every flag at its default: each model under each protocol, on real images, in virtual time.

``python -m tests.benchmarks.defaults SET ... [FLAG ...]``: a shard set for each number of workers, with evaluation rows. The
published figures are of 10,000 images of CIFAR-10, sharded at random over 4 and over 12 workers. Prints a line a run, then
a table: evaluation accuracy at the end, the mean over seeds and its range. Other flags go to every run."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

from pipeline.core.reporting.tables import two_column_table
from tests.support.trainer_runs import ROOT, RunFolder
from trainer.data.opening import open_shards
from trainer.protocols import PROTOCOLS

EPOCHS = {"cnn": 3, "resnet20": 4, "logistic": 3, "perceptron": 3}


class Case(NamedTuple):
    shards: Path
    workers: int
    model: str
    protocol: str
    seed: int


def accuracy(case: Case, epochs: int, flags: list[str], root: Path) -> float:
    """The final evaluation accuracy of one run."""
    output = root / "-".join(map(str, case[1:]))
    command = [sys.executable, "-m", "trainer.simulate", "--shards", case.shards, "--output", output]
    command += ["--model", case.model, "--protocol", case.protocol, "--seed", case.seed, "--epochs", epochs]
    done = subprocess.run(
        [*map(str, command), "--no-report", "--quiet", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        print(f"{output.name}: {done.stderr.strip()}", file=sys.stderr)
        return float("nan")
    found = float(RunFolder(output).result()["final_accuracy"])
    print(f"{output.name} {found:.4f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.defaults", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("shards", type=Path, nargs="+", help="sets, one for each number of workers")
    parser.add_argument("--models", default=",".join(EPOCHS), help="default %(default)s")
    parser.add_argument("--protocols", default=",".join(PROTOCOLS), help="default %(default)s")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each (default %(default)s)")
    parser.add_argument("--epochs", type=int, help="of all (default: those of the published figures)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at once (default: one a core)")
    args, flags = parser.parse_known_args()
    sets = [(path, open_shards(str(path)).num_workers) for path in args.shards]
    kinds = list(product(args.models.split(","), args.protocols.split(",")))
    cases = [Case(*shards, *kind, seed) for kind in kinds for shards in sets for seed in range(args.seeds)]
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(args.jobs) as pool:
        epochs = [args.epochs or EPOCHS.get(case.model, 3) for case in cases]
        found = dict(
            zip(cases, pool.map(accuracy, cases, epochs, [flags] * len(cases), [Path(root)] * len(cases)), strict=True)
        )
    for model, protocol in kinds:
        cells = []
        for path, workers in sets:
            values = [found[Case(path, workers, model, protocol, seed)] for seed in range(args.seeds)]
            spread = f" ({min(values):.3f} to {max(values):.3f})" if len(values) > 1 else ""
            cells.append(f"{workers} workers {sum(values) / len(values):.3f}{spread}")
        print(two_column_table([(f"{model}, {protocol}", ", ".join(cells))]))


if __name__ == "__main__":
    main()
