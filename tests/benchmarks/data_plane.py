"""Measure what gossip, a mixture and a change of workers cost, and what they do to the accuracy, in virtual time.

    python -m tests.benchmarks.data_plane RANDOM SORTED --output DIR [--seeds N] [--epochs N] [--only NAME]...

RANDOM and SORTED are shard sets of the same rows for the same number of workers, dealt at random and in the order of the
classes. Each run is compared with the plain run of the same set and seed: differences of the accuracy in percentage points
and of the CPU time in percent, with 95 % intervals by paired t-tests. The bytes are those of examples that workers send each
other. The published figures are of the first 2,400 images of CIFAR-10 at 16x16 over 4 workers."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.benchmarks.machine import print_machine
from tests.support.configs import make_config
from trainer.config.data import SEPARATOR
from trainer.data.opening import open_shards
from trainer.options import Options
from trainer.runlog.kinds.peers import GossipEvent
from trainer.runlog.result import Result
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.profiles import parse_profile
from trainer.study.analysis.statistics import paired_t_test

TRAINING: dict[str, Any] = {"model": "cnn", "norm": "group", "protocol": "asp", "batch_size": 120, "threads": 1}
PROFILE = parse_profile("lognormal:0.3")


class Arm(NamedTuple):
    """A configuration whose runs are compared with a baseline.

    Attributes:
        name: names it in the table.
        sets: names of its sets.
        values: settings that differ from TRAINING.
        workers: number of workers from half of the run on; None for those of the set.
    """

    name: str
    sets: tuple[str, ...]
    values: dict[str, Any]
    workers: int | None = None


class Measurement(NamedTuple):
    """The figures of a run: final accuracy, CPU seconds, and bytes of the examples that workers sent each other."""

    accuracy: float
    cpu_s: float
    example_bytes: int


GOSSIP = {"gossip": 5, "selector": "ab"}
BASELINES = {name: Arm("plain", (name,), {}) for name in ("random", "sorted")}
ARMS = (
    Arm("gossip, every 4", ("random",), GOSSIP),
    Arm("gossip, every 4", ("sorted",), GOSSIP),
    Arm("gossip, every 1", ("sorted",), GOSSIP | {"gossip_every": 1}),
    Arm("mixture", ("random", "sorted"), {"mix": "0.5,0.5"}),
    Arm("6 workers from half on", ("random",), {}, workers=6),
)


def run(arm: Arm, sets: dict[str, Path], output: Path, epochs: int, seed: int) -> Measurement:
    """Train a run of an arm from the start, and return its figures."""
    shards = SEPARATOR.join(str(sets[name]) for name in arm.sets)

    def train(end: int, workers: int | None, *, resume: bool = False) -> Result:
        config = make_config(shards, output, **TRAINING | arm.values, epochs=end, seed=seed)
        options = Options(silent=True, report=False, resume=resume, overwrite=not resume)
        return simulate(config, SimulationSettings(workers=workers, profile=PROFILE), options)

    # A mixture of two sets of the same rows has twice as many in an epoch.
    length = epochs // len(arm.sets)
    start = time.process_time()
    result = train(length // 2 if arm.workers else length, None)
    if arm.workers:
        result = train(length, arm.workers, resume=True)
    cpu_s = time.process_time() - start
    assert result.final_accuracy is not None
    return Measurement(result.final_accuracy, cpu_s, example_bytes(result, shards.partition(SEPARATOR)[0]))


def example_bytes(result: Result, shards: str) -> int:
    """Return the bytes of examples in all complete rounds: each worker sends its own, and gets those of all workers."""
    rounds = [event for event in result.events() if isinstance(event, GossipEvent)]
    size = int(np.prod(open_shards(shards).shape))
    return sum((1 + len(event.ids)) * sum(map(len, event.ids.values())) * size for event in rounds)


def interval_text(values: np.ndarray, baseline: np.ndarray) -> str:
    """Return the mean difference of paired values, with its 95 % interval."""
    low, high = paired_t_test(values, baseline)[0]
    return f"{(values - baseline).mean():+.2f} ({low:+.2f} to {high:+.2f})"


def compare_runs(arm: Arm, runs: list[Measurement], plain: list[Measurement]) -> str:
    """Return a row of the table. plain: runs of the baseline, by the same seeds."""
    accuracies, cpu, sizes = (np.array(column, np.float64) for column in zip(*runs, strict=True))
    before, cpu_before, _ = (np.array(column, np.float64) for column in zip(*plain, strict=True))
    accuracy = interval_text(100 * accuracies, 100 * before)
    cpu_percent = interval_text(100 * cpu / cpu_before, np.full(len(cpu), 100.0))
    p = paired_t_test(accuracies, before)[1]
    sets = " + ".join(arm.sets)
    return f"| {arm.name} | {sets} | {accuracy} | {p:.3f} | {cpu_percent} | {sizes.mean() / 1e6:.2f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("random", type=Path)
    parser.add_argument("sorted", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=9, help="runs of each (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="an even number; default %(default)s")
    parser.add_argument("--only", action="append", help="a name of the table; may be given again (default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sets = {"random": args.random, "sorted": args.sorted}
    arms = [arm for arm in ARMS if not args.only or arm.name in args.only]
    print_machine()
    runs: dict[int, list[Measurement]] = {}
    chosen = [*(BASELINES[name] for name in sets if any(arm.sets[0] == name for arm in arms)), *arms]
    # All arms of a seed one after the other, so that the machine's load falls on all.
    for seed in range(args.seeds):
        for number, arm in enumerate(chosen):
            runs.setdefault(number, []).append(run(arm, sets, args.output / "run", args.epochs, seed))
            print(f"seed {seed}, {arm.name}, {arm.sets[0]}: {runs[number][-1]}", file=sys.stderr, flush=True)
    by_set = {arm.sets[0]: runs[number] for number, arm in enumerate(chosen) if arm.name == "plain"}
    for name, plain in by_set.items():
        accuracies = [100 * each.accuracy for each in plain]
        print(f"plain, {name}: accuracy {np.mean(accuracies):.2f}, {np.mean([each.cpu_s for each in plain]):.1f} CPU s")
    print("| | set | accuracy, points | p | CPU time, % | MB of examples |\n|---|---|---:|---:|---:|---:|")
    for number, arm in enumerate(chosen):
        if arm.name != "plain":
            print(compare_runs(arm, runs[number], by_set[arm.sets[0]]))


if __name__ == "__main__":
    main()
