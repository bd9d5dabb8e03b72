"""Overheads of importance-aware training, as Table 6 of its paper has them: seconds of each part, and bytes of messages.

One of N workers is measured in this process, on random images. The messages are those of N workers and their parameter
servers. ``python -m tests.benchmarks.repartition --help``; the paper's network is ``--model resnet18 --stem 7x7``."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from tests.support.configs import make_config
from trainer.config import Config
from trainer.data.batches import Batches
from trainer.data.network import TABLE
from trainer.data.repartition import PartitionSampler
from trainer.data.rows import Rows
from trainer.models.base import ModelInput
from trainer.models.build import build
from trainer.models.flat_vector import FlatModel
from trainer.sampling.base import SetSizes
from trainer.sampling.partition_plan import PartitionPlan
from trainer.worker.step import Step

SHAPE, CLASSES = (3, 32, 32), 10
WARM_STEPS = 3


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def step_of(config: Config, rows: int, workers: int) -> Step:
    """Return the step of a worker, with a loss table if its run has one."""
    network = build(config.model, ModelInput(SHAPE, CLASSES, False, True), seed=0)
    if statistics_of_rows := config.loss_statistics:
        length = statistics_of_rows.length(SetSizes(rows, CLASSES, 0))
        network.model.register_buffer(TABLE, torch.zeros(length))
    start = FlatModel(network.model).read()
    return Step(config, network, start.copy(), np.zeros_like(start), torch.device("cpu"), workers)


def batches_of(config: Config, images: np.ndarray, workers: int) -> Batches:
    """Return the mini-batches of worker 0, which draws from all rows."""
    count = len(images)
    rows = Rows(images, np.random.default_rng(1).integers(0, CLASSES, count), np.arange(count))
    size = config.data.batch_size
    plan = PartitionPlan(config.data, count, (size // workers,) * workers, 100 * count // size, 100.0, seed=0)
    sampler = PartitionSampler(rows, plan, 0, config.loss_statistics)
    return Batches(sampler, np.zeros(3, np.float32), seed=0, worker=0, augment=True)


def vector_bytes(step: Step) -> int:
    """Return the bytes of the vector in each push and each pull: parameters, statistics and the loss table."""
    return step.pulled.numel() * step.pulled.element_size()


def messages_line(before: int, after: int, messages: int) -> str:
    """Return text about the messages of an epoch. Losses travel in the vectors of pushes, and back in those of pulls.

    Args:
        before, after: bytes of a vector without and with the losses of all rows.
        messages: pushes and pulls of all workers in an epoch.
    """
    return (
        f"  messages per epoch       {messages:,}, none more; {messages * after / 1e6:,.1f} MB,"
        f" {messages * (after - before) / 1e6:,.1f} MB of them losses = {100 * (after - before) / before:.3g} % more"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000, help="default %(default)s")
    parser.add_argument("--workers", type=int, default=4, help="default %(default)s")
    parser.add_argument("--batch-size", type=int, default=1024, help="of all workers; default %(default)s")
    parser.add_argument("--model", default="cnn", help="default %(default)s")
    parser.add_argument("--stem", help="first layers of resnet18 or resnet34: 3x3 or 7x7 (default: as in training)")
    parser.add_argument("--importance", default="average", help="average or variance; default %(default)s")
    parser.add_argument("--heuristic", default="stripes", help="stripes or blocks; default %(default)s")
    parser.add_argument("--steps", type=int, default=15, help="of each kind; default %(default)s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    images = np.random.default_rng(0).integers(0, 256, (args.rows, *SHAPE), np.uint8)
    common = {"model": args.model, "protocol": "bsp", "batch_size": args.batch_size}
    if args.stem:
        common["stem"] = args.stem
    importance = {"repartition": "importance", "importance": args.importance, "heuristic": args.heuristic}
    configs = {"without": make_config(**common, repartition="random"), "with": make_config(**common, **importance)}
    steps = {name: step_of(config, args.rows, args.workers) for name, config in configs.items()}
    batches = {name: batches_of(config, images, args.workers) for name, config in configs.items()}

    # Both kinds of steps in turn, so that the machine's load falls on both.
    times: dict[str, list[float]] = {name: [] for name in steps}
    for clock in range(WARM_STEPS + args.steps):
        for name, step in steps.items():
            batch, draw, _ = batches[name].make(clock, step.read_table())
            spent = seconds(lambda step=step, batch=batch, draw=draw: (step.read_table(), step(batch, 0, draw=draw)))  # type: ignore[misc]
            if clock >= WARM_STEPS:
                times[name].append(spent)
    step_s = statistics.median(times["without"])
    tracking_s = statistics.median(a - b for a, b in zip(times["with"], times["without"], strict=True))

    # The division is computed in the first draw of an interval, and the rest of that draw is what any draw costs.
    sampler = batches["with"].sampler
    assert isinstance(sampler, PartitionSampler)
    plan = sampler.plan
    rng = np.random.default_rng(2)
    deals = [seconds(lambda: plan.divide(rng.random(args.rows, np.float32))) for _ in range(5)]
    tables = [rng.random(len(steps["with"].read_table()), np.float32) for _ in range(5)]  # type: ignore[arg-type]
    first = [seconds(lambda table=table: sampler.draw(plan.dealt_until, table)) for table in tables]  # type: ignore[misc]
    later = [seconds(lambda: sampler.draw(plan.dealt_until + 1, tables[-1])) for _ in range(5)]
    deal_s = statistics.median(deals)
    swap_s = max(0.0, statistics.median(first) - deal_s - statistics.median(later))

    steps_per_epoch = args.rows // args.batch_size
    epoch_s = step_s * steps_per_epoch
    tracked_s = tracking_s * steps_per_epoch
    print(
        f"{args.model}, {args.rows:,} rows, {args.workers} workers, {args.batch_size} examples per step; 1 core per worker"
    )
    print(f"  an epoch without losses           {epoch_s:8.2f} s")
    for part, spent, unit in (
        ("losses of all rows", tracked_s, "epoch"),
        ("division by them", deal_s, "interval"),
        ("change to the new rows", swap_s, "interval"),
    ):
        print(f"  {part:<24} per {unit:<8} {spent:8.4f} s = {100 * spent / epoch_s:.3g} % of an epoch")
    sizes = {name: vector_bytes(step) for name, step in steps.items()}
    print(messages_line(sizes["without"], sizes["with"], 2 * args.workers * steps_per_epoch))


if __name__ == "__main__":
    main()
