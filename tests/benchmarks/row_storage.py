"""Images a second of training with rows in memory, and with memory-mapped rows, cached by the system and not."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.core.machine import usable_cores
from tests.benchmarks.throughput import ROOT, Sets, Training, ours, train_plainly
from trainer.data.mean_image import subtracted_mean

GOAL = 0.9
WARM_STEPS = 5
CONTENDERS = ("memory", "cached", "cold")


def run(sets: Sets, workers: Sequence[int], models: Sequence[str], repeat: int, steps: int) -> None:
    """Print the table of several models on the CPU."""
    print("\n6. Images/s of training with memory-mapped rows, beside rows in memory")
    print(
        f"  runs: ASP with N workers, the files just written; {repeat} interleaved repeats; ratios are medians of the"
    )
    print(
        f"  repeats' own. loop: one torch process with {usable_cores()} threads over shard 0, mini-batches made ahead by a"
    )
    print("  thread; cold: the file is not in the system's cache at the start, and each row is drawn at most once")
    print(f"  {'model':<10}{'N':>3}{'memory':>9}{'mapped':>9}{'ratio':>8}", end="")
    print(f"{'loop: memory':>15}{'cached':>9}{'ratio':>8}{'cold':>9}{'ratio':>8}")
    for model in models:
        for n in workers:
            print(_line(sets(n), Training(model, steps), n, repeat), flush=True)
    print(f"  goal: cached / memory >= {GOAL}")


def _line(shards: Path, training: Training, workers: int, repeat: int) -> str:
    whole: dict[str, list[float]] = {"memory": [], "mapped": []}
    loops: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(repeat):
        for name, rates in whole.items():
            rates.append(ours(shards, training, workers, "--row-storage", name)[0])
        for name, rates in loops.items():
            rates.append(alone(shards, training, name))
    columns = [
        f"  {training.model:<10}{workers:>3}",
        *(f"{statistics.median(rates):>9.0f}" for rates in whole.values()),
    ]
    columns.append(f"{_ratio(whole['mapped'], whole['memory']):>8.2f}")
    columns.append(f"{statistics.median(loops['memory']):>15.0f}")
    for name in CONTENDERS[1:]:
        columns.append(f"{statistics.median(loops[name]):>9.0f}{_ratio(loops[name], loops['memory']):>8.2f}")
    return "".join(columns)


def _ratio(some: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the repeats of ratios taken within one."""
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def alone(shards: Path, training: Training, contender: str) -> float:
    """Return the images a second of a plain loop over shard 0, in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    command = [sys.executable, "-m", "tests.benchmarks.row_storage", shards, training.model, training.steps]
    command += [training.batch, contender, folder]
    try:
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=True)
    finally:
        shutil.rmtree(folder)
    return float(done.stdout)


def plain_loop(uri: str, model: str, steps: int, batch: int, contender: str, folder: Path) -> float:
    """Train on shard 0, and return the images a second, after some steps on random images."""
    import torch

    from tests.support.draws import shuffled
    from trainer.data.batches import Batch, Batches
    from trainer.data.loading import load_worker
    from trainer.data.opening import open_shards
    from trainer.data.prefetch import Prefetch
    from trainer.models import model_from_json
    from trainer.models.build import build

    torch.set_num_threads(usable_cores())
    shards = open_shards(uri)
    if contender != "memory":
        shards = replace(shards, mapped=folder)
        load_worker(shards, 0)  # makes the file
    if contender == "cold":
        evict(folder)
    rows = load_worker(shards, 0)
    built = build(model_from_json({"name": model}), shards.inputs, seed=0)
    batches = Batches(shuffled(rows, batch, seed=0, worker=0), subtracted_mean(shards), seed=0, worker=0, augment=True)
    if contender == "cold":
        steps = min(steps, len(rows) // batch)
    # Threads and kernels get going before the first row is read, because a cold file is cold only once.
    noise = Batch(torch.rand(batch, *shards.shape), torch.zeros(batch, dtype=torch.int64))
    train_plainly(built, lambda _: noise, WARM_STEPS)
    begin = time.monotonic()
    with Prefetch(batches.make) as ahead:
        ended = train_plainly(built, lambda clock: ahead.get(clock).tensors, steps)
    return batch * steps / (ended[-1] - begin)


def evict(folder: Path) -> None:
    """Take the files of a folder, which no process has mapped, out of the system's cache."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    set_uri, name, step_count, batch_size, kind, place = sys.argv[1:]
    print(plain_loop(set_uri, name, int(step_count), int(batch_size), kind, Path(place)))
