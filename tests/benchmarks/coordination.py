"""What deciding costs: the coordinator alone, by protocol and number of workers, and what a virtual push costs.

Nothing is sent and no gradient is computed: a queue stands for the workers, and all steps take the same."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from torch import nn

from pipeline.core.reporting.tables import table
from tests.benchmarks.throughput import RATE, ROOT, SKIP, train_plainly
from tests.support.draws import shuffled
from trainer.checkpoints.slice_file import Float32s
from trainer.config import Config, Data, Optimiser, RunSpec
from trainer.coordination.budget import Budget
from trainer.coordination.coordinator import Coordinator
from trainer.coordination.orders import StepMeasurements
from trainer.data.batches import Batches
from trainer.data.loading import load_worker
from trainer.data.mean_image import subtracted_mean
from trainer.data.opening import open_shards
from trainer.models.build import build
from trainer.models.cnn import CNN
from trainer.models.networks.dropout import Dropout
from trainer.options import Options
from trainer.protocols import PROTOCOLS, Protocol
from trainer.simulate import SimulationSettings, simulate

WORKERS = (16, 140, 1_000, 10_000)
GOALS_MS = {140: 3.0, 1_000: 25.0}  # of a BSP update
GOAL_US = 50.0  # of an event of the asynchronous protocols with 10,000 workers
LEAST_EVENTS = 20_000
ENDLESS = 10**9
LARGE = ("asp", "k-batch-asp")
LARGE_WORKERS, LARGE_STEPS, LARGE_GOAL_S, LARGE_GOAL_GB = 10_000, 10, 60, 2.0
BATCH = 10  # one worker's share of 120 over 12
GOAL = 0.9  # of the plain loop's images a second


def event_us(protocol: Protocol, workers: int, events: int) -> float:
    """Microseconds of a pushed gradient and all that follows from it."""
    coordinator = Coordinator(protocol, Budget(workers, ENDLESS, ENDLESS), rate=lambda epoch: 0.1)
    for worker in range(workers):
        coordinator.join(0, worker, 1, 0.0)
    queue = deque(reply for order, _ in coordinator.advance(0.0) for reply in order.unblocked)
    measured = StepMeasurements(10, 1.0, 5, 0.1)
    begun = time.perf_counter()
    for event in range(events):
        worker, session, clock = queue.popleft()
        coordinator.push(0, worker, session, clock, float(event), measured)
        for order, _ in coordinator.advance(float(event)):
            queue.extend(order.unblocked)
        coordinator.records = []
    return (time.perf_counter() - begun) / events * 1e6


def coordinator_alone(workers: Sequence[int] = WORKERS, least: int = LEAST_EVENTS) -> None:
    print("\n4. The coordinator alone: microseconds an event (a pushed gradient), and ms of a BSP update")
    rows = []
    for name, kind in PROTOCOLS.items():
        rows.append((name, *(f"{event_us(kind(), n, max(least, 3 * n)):.1f}" for n in workers)))
    print(table(rows, ("protocol", *(f"N={n:,}" for n in workers)), right=range(1, len(workers) + 1), indent="  "))
    updates = {n: event_us(PROTOCOLS["bsp"](), n, max(least, 3 * n)) * n / 1e3 for n in workers}
    print("  ms a BSP update: " + ", ".join(f"N={n:,} {ms:.2f}" for n, ms in updates.items()))
    for n, goal in GOALS_MS.items():
        if n in updates:
            print(
                f"  goal: at most {goal:g} ms a BSP update of {n:,} workers: {'met' if updates[n] <= goal else 'missed'}"
            )
    if workers[-1] == WORKERS[-1]:
        worst = max(float(row[-1]) for row in rows if row[0] != "bsp")
        met = "met" if worst <= GOAL_US else "missed"
        print(f"  goal: at most {GOAL_US:g} us an event of the others with {workers[-1]:,} workers: {met}, {worst:.1f}")


def virtual_time(shards: Path, steps: int, repeat: int, *, large: bool = True) -> None:
    """Real gradients beside a plain loop of one thread, and runs of 10,000 workers with a toy gradient."""
    print(
        f"\n5. Virtual time: images/s of the cnn's gradients ({BATCH} examples a step, one thread) beside a plain loop"
    )
    ours, plain = [], []
    for _ in range(repeat):
        ours.append(_virtual_images_per_s(shards, steps))
        plain.append(_plain_images_per_s(shards, steps))
    ratios = [mine / other for mine, other in zip(ours, plain, strict=True)]
    middle = statistics.median(ratios)
    print(
        f"  virtual {statistics.median(ours):,.0f}, plain loop {statistics.median(plain):,.0f}: {middle:.2f} of it"
        f" ({min(ratios):.2f} to {max(ratios):.2f}); goal {GOAL}: {'met' if middle >= GOAL else 'missed'}"
    )
    for protocol in LARGE if large else ():
        seconds, gigabytes = _large(protocol)
        met = "met" if seconds <= LARGE_GOAL_S and gigabytes <= LARGE_GOAL_GB else "missed"
        print(
            f"  {LARGE_WORKERS:,} workers, {LARGE_WORKERS * LARGE_STEPS:,} pushes, {protocol}, toy gradient:"
            f" {seconds:.1f} s, {gigabytes:.2f} GB with its report (goal {LARGE_GOAL_S} s, {LARGE_GOAL_GB:g} GB: {met})"
        )


def _virtual_images_per_s(shards: Path, steps: int) -> float:
    """Of a run in virtual time, all that a push costs included, without the evaluation."""
    from trainer.simulation import compute

    ended: list[float] = []

    class Timed(compute.RealCompute):
        def step(self, worker: int, clock: int, parameters: Sequence[Float32s]) -> compute.MiniBatchResult:
            ended.append(time.perf_counter())
            return super().step(worker, clock, parameters)

    workers = open_shards(str(shards)).num_workers
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch, patch.dict(compute.COMPUTES, real=Timed):
        config = Config(
            Data(str(shards), batch_size=BATCH * workers),
            RunSpec(str(Path(scratch) / "run"), steps=max(1, steps // workers), epoch_checkpoints=False),
            CNN(),
            Optimiser(learning_rate=RATE),
        )
        simulate(config, SimulationSettings(), Options(silent=True, report=False))
    return _speed(ended)


def _plain_images_per_s(shards: Path, steps: int) -> float:
    """Of one torch process with the same mini-batches, augmentation and arithmetic, in one thread."""
    import torch

    found = open_shards(str(shards))
    built = build(CNN(), found.inputs, seed=0)
    with_torch_dropout(built.model)
    torch.set_num_threads(1)
    sampler = shuffled(load_worker(found, 0), BATCH, seed=0, worker=0)
    batches = Batches(sampler, subtracted_mean(found), seed=0, worker=0, augment=True)
    ended = train_plainly(built, lambda clock: batches.make(clock).tensors, steps)
    return _speed(ended)


def with_torch_dropout(model: nn.Module) -> None:
    """Put torch's own dropout in place of the product's: a plain loop has no other."""
    for name, layer in model.named_children():
        if isinstance(layer, Dropout):
            setattr(model, name, nn.Dropout(layer.rate))
        else:
            with_torch_dropout(layer)


def _speed(ended: list[float]) -> float:
    first = int(SKIP * len(ended))
    return BATCH * (len(ended) - 1 - first) / (ended[-1] - ended[first])


def _large(protocol: str) -> tuple[float, float]:
    flags = [
        "--compute",
        "quadratic",
        "--workers",
        LARGE_WORKERS,
        "--batch-size",
        LARGE_WORKERS,
        "--steps",
        LARGE_STEPS,
    ]
    own = ["--k", 100] if protocol != "asp" else []
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        return _measured([*flags, "--protocol", protocol, *own, "--output", Path(scratch) / "run", "--quiet"])


def _measured(flags: Sequence[object]) -> tuple[float, float]:
    """Seconds and gigabytes (most held) of a whole simulation, its start and report included."""
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer.simulate", *map(str, flags)], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"the simulation of {LARGE_WORKERS:,} workers failed")
    return time.monotonic() - begun, usage.ru_maxrss * 1024 / 1e9
