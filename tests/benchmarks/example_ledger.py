"""Measure the cost of --example-ledger: the CPU time of its parts for a mini-batch, or pairs of whole runs.

    python -m tests.benchmarks.example_ledger [--model NAME]... [--batch-size B]... [--steps N]
    python -m tests.benchmarks.example_ledger --shards SET --pairs 9 [--model NAME]... [--batch-size B]... [--epochs N]

The parts are measured in one thread, as shares of a training step: steps on equal mini-batches with and without the losses
of examples, in turn; packing and parsing of the report, 13 bytes per example more; and the ledger's own work, with a Parquet
file for every 100 mini-batches, which is a short epoch.

A pair is the same command with and without --example-ledger, one after the other. The ratios of single pairs vary by more
than the ledger costs, so their median has an interval, by the sign test: it holds the true median with at least 95 %."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.stats import binom

from tests.benchmarks.machine import print_machine
from tests.support.configs import make_config
from trainer.coordination.orders import Record, RowLosses, StepMeasurements
from trainer.data.batches import Batch
from trainer.models.base import ModelInput
from trainer.models.build import build
from trainer.models.flat_vector import FlatModel
from trainer.runlog.example_ledger import ExampleLedger
from trainer.runlog.result import read_result
from trainer.transport.bodies.reports import pack_report, unpack_report
from trainer.worker.step import Step

SHAPE, CLASSES = (3, 32, 32), 10
WARM_STEPS = 3
FILE_STEPS = 100
REPORTS = 1000
GOAL = 0.05


def cpu_ms(call: Callable[[], object]) -> float:
    """Return the CPU milliseconds that this process spends in a call."""
    start = time.process_time()
    call()
    return 1000 * (time.process_time() - start)


def make_step(model: str, batch_size: int, *, example_ledger: bool) -> Step:
    """Return the training step of the only worker of a run."""
    config = make_config(model=model, protocol="asp", batch_size=batch_size, example_ledger=example_ledger)
    network = build(config.model, ModelInput(SHAPE, CLASSES, False, True), seed=0)
    start = FlatModel(network.model).read()
    return Step(config, network, start.copy(), np.zeros_like(start), torch.device("cpu"), 1)


def step_ms(model: str, batch_size: int, steps: int) -> tuple[float, float, RowLosses]:
    """Return the medians of a step without losses and of the difference that losses make, and the last losses."""
    plain, keeping = (make_step(model, batch_size, example_ledger=on) for on in (False, True))
    spent: dict[Step, list[float]] = {plain: [], keeping: []}
    for clock in range(WARM_STEPS + steps):
        generator = torch.Generator().manual_seed(clock)
        batch = Batch(
            torch.rand(batch_size, *SHAPE, generator=generator),
            torch.randint(CLASSES, (batch_size,), generator=generator),
        )
        # The second step on a mini-batch finds it in the processor's cache.
        for step in (plain, keeping) if clock % 2 else (keeping, plain):
            milliseconds = cpu_ms(partial(step, batch, clock))
            if clock >= WARM_STEPS:
                spent[step].append(milliseconds)
    added = statistics.median(b - a for a, b in zip(spent[plain], spent[keeping], strict=True))
    assert keeping.row_outcomes is not None
    ids = np.random.default_rng(0).integers(0, 1 << 20, batch_size)
    return statistics.median(spent[plain]), added, RowLosses(ids, *keeping.row_outcomes)


def report_ms(rows: RowLosses) -> float:
    """Return what the losses add to packing and parsing the report of a step."""
    plain = StepMeasurements(len(rows.ids), 1.0, 0, 0.1)

    def send(report: StepMeasurements) -> None:
        for _ in range(REPORTS):
            unpack_report(pack_report(report))

    with_rows = plain._replace(row_losses=rows)
    return (cpu_ms(partial(send, with_rows)) - cpu_ms(partial(send, plain))) / REPORTS


def ledger_ms(rows: RowLosses) -> float:
    """Return the ledger's own work for a mini-batch: its share of a file of FILE_STEPS mini-batches."""
    rng = np.random.default_rng(0)
    # Different in each mini-batch, because equal bytes are packed faster.
    drawn = [
        rows._replace(ids=rng.permutation(rows.ids), losses=rng.permutation(rows.losses)) for _ in range(FILE_STEPS)
    ]
    reports = [StepMeasurements(len(rows.ids), 1.0, 0, 0.1, row_losses=each) for each in drawn]
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        ledger = ExampleLedger(Path(scratch) / "examples", 1)

        def write_file(number: int) -> None:
            for version in range(number * FILE_STEPS, (number + 1) * FILE_STEPS):
                measured = reports[version % FILE_STEPS]
                ledger.add([Record(version + 1, 0, version, version, 0, measured, accepted=True)], number + 0.5)
            ledger.write((number + 1) * FILE_STEPS)

        return statistics.median(cpu_ms(partial(write_file, number)) for number in range(10)) / FILE_STEPS


def run_seconds(command: list[str], output: Path) -> tuple[float, float]:
    """Run a training command in a folder of its own. Return its seconds, and those of them that trained."""
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--output", str(output), "--overwrite"], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr.splitlines()[-1])
    trained = read_result(output).seconds
    assert trained is not None, "the run has ended"
    return seconds, trained


def median_interval(values: list[float]) -> str:
    """Return the median of values and its 95 % interval by the sign test; the whole range for fewer than six."""
    ordered = sorted(values)
    # The greatest number of values that may be cut off on each side.
    cut = max(int(binom.ppf(0.025, len(ordered), 0.5)) - 1, 0)
    return f"{statistics.median(ordered):+.1%} ({ordered[cut]:+.1%} to {ordered[-1 - cut]:+.1%})"


def compare_runs(shards: Path, model: str, batch_size: int, epochs: int, pairs: int) -> str:
    """Return a row of the table of pairs: what the ledger adds to the time of the command, and to the training's."""
    command = [sys.executable, "-m", "trainer", "--shards", str(shards), "--model", model, "--epochs", str(epochs)]
    command += ["--batch-size", str(batch_size)]
    plain: list[tuple[float, float]] = []
    keeping: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for number in range(pairs):
            arms = [(plain, command), (keeping, [*command, "--example-ledger"])]
            # What comes first in a pair may find a machine that is a little slower or faster.
            for seconds, each in arms if number % 2 else reversed(arms):
                seconds.append(run_seconds(each, Path(scratch) / "run"))
    added = [[b[kind] / a[kind] - 1 for a, b in zip(plain, keeping, strict=True)] for kind in (0, 1)]
    median = statistics.median(whole for whole, _ in plain)
    return f"  {model:<10}{batch_size:>6}{median:>9.1f}{median_interval(added[0]):>28}{median_interval(added[1]):>28}"


def print_pairs(args: argparse.Namespace) -> None:
    """Print the table of pairs."""
    print(f"{args.pairs} pairs of {args.epochs} epochs: seconds of the command; added to them, and to the training's")
    print(f"  {'model':<10}{'batch':>6}{'s':>9}{'command':>28}{'training':>28}  goal {GOAL:.0%}")
    for model in args.model or ("logistic",):
        for batch_size in args.batch_size or (128,):
            print(compare_runs(args.shards, model, batch_size, args.epochs, args.pairs), flush=True)


def print_parts(args: argparse.Namespace) -> None:
    """Print the table of the parts."""
    torch.set_num_threads(1)
    print("CPU ms per mini-batch: the step; what the losses add to the step, to the report, and in the ledger")
    print(
        f"  {'model':<10}{'batch':>6}{'step':>9}{'losses':>9}{'report':>9}{'ledger':>9}{'in all':>9}  goal {GOAL:.0%}"
    )
    for model in args.model or ("logistic", "cnn", "resnet20"):
        for batch_size in args.batch_size or (32, 128):
            step, losses, rows = step_ms(model, batch_size, args.steps)
            parts = (losses, report_ms(rows), ledger_ms(rows))
            columns = "".join(f"{part:>9.3f}" for part in (step, *parts))
            print(f"  {model:<10}{batch_size:>6}{columns}{sum(parts) / step:>9.1%}", flush=True)


def main() -> None:
    """Print the table of the parts, or that of pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", action="append", help="may be given again (default: logistic, cnn, resnet20; of pairs logistic)"
    )
    parser.add_argument(
        "--batch-size", action="append", type=int, help="may be given again (default: 32, 128; of pairs 128)"
    )
    parser.add_argument("--steps", type=int, default=60, help="of each kind; default %(default)s")
    parser.add_argument("--shards", type=Path, help="a shard set: compare whole runs on it")
    parser.add_argument("--pairs", type=int, default=9, help="of whole runs; default %(default)s")
    parser.add_argument("--epochs", type=int, default=5, help="of a whole run; default %(default)s")
    args = parser.parse_args()
    print_machine()
    if args.shards:
        print_pairs(args)
    else:
        print_parts(args)


if __name__ == "__main__":
    main()
