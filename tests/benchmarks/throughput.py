"""Images a second of whole training runs, beside one plain torch process and beside workers that exchange nothing.

Start-up and the first fifth of the steps are left out. Runs are shorter than an epoch, so the evaluator waits."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from pipeline.core.machine import usable_cores
from trainer.checkpoints.read import newest, read_state
from trainer.config import FRESH_MOMENTUM, Data, Optimiser
from trainer.data.mean_image import subtracted_mean
from trainer.run_files import CHECKPOINTS, PUSHES
from trainer.runlog.read import read_pushes

if TYPE_CHECKING:
    from trainer.data.batches import Batch
    from trainer.models.build import NetworkAndTask

ROOT = Path(__file__).resolve().parents[2]
BATCH = Data.batch_size
RATE = 0.01  # small enough for the asynchronous cnn with twelve workers
SKIP = 0.2  # of the steps: caches, threads and processes get going
GOAL, GOAL_WORKERS = 0.95, 4

Sets = Callable[[int], Path]


@dataclass(frozen=True)
class Training:
    """A training task that all contenders run.

    Attributes:
        model: name of the model.
        steps: of each worker.
        batch: mini-batch of all workers together, or of each.
        per_worker: whether the mini-batch is that of each worker.
        device: cpu or cuda.
    """

    model: str
    steps: int
    batch: int = BATCH
    per_worker: bool = False
    device: str = "cpu"

    def worker_batch(self, workers: int) -> int:
        """Return the mini-batch of one of so many workers."""
        return self.batch if self.per_worker else self.batch // workers


def ours(shards: Path, training: Training, workers: int, *more: object) -> tuple[float, int]:
    """Images a second of a run as users start it, ASP in shared memory; and the numbers of a push."""
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        output = Path(scratch) / "run"
        batch = training.batch * workers if training.per_worker else training.batch
        flags = ["--shards", shards, "--output", output, "--model", training.model, "--steps", training.steps]
        flags += ["--batch-size", batch, "--device", training.device, "--learning-rate", RATE]
        flags += ["--quiet", "--no-report", *more]
        _run([sys.executable, "-m", "trainer", *flags])
        version = newest(output / CHECKPOINTS)
        assert version is not None, "a finished run has its final checkpoint"
        return images_per_s(read_pushes(output / PUSHES)), read_state(output / CHECKPOINTS, version).total


def images_per_s(pushes: pd.DataFrame) -> float:
    """Of the accepted pushes after the first fifth, by the time the servers took them."""
    accepted = pushes[pushes.accepted == 1]
    first = int(SKIP * len(accepted))
    counted = accepted.iloc[first + 1 :]
    return float(counted.examples.sum() / (counted.seconds.iloc[-1] - accepted.seconds.iloc[first]))


def alone(shards: Path, training: Training, processes: int, threads: int) -> float:
    """Images a second, in all, of plain loops over these shards that start together and exchange nothing.

    One process has all rows and the whole mini-batch; several have a shard and a share of it each."""
    numbers = [str(value) for value in (training.worker_batch(processes), training.steps, threads)]
    workers = range(processes) if processes > 1 else [-1]
    names = [str(shards), training.model, training.device]
    command = [sys.executable, "-m", "tests.benchmarks.throughput", *names, *numbers]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    running = [subprocess.Popen([*command, str(worker)], **pipes) for worker in workers]
    try:
        for process in running:
            assert process.stdout
            process.stdout.readline()
        for process in running:
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        return sum(float(process.communicate()[0]) for process in running)
    finally:
        for process in running:
            process.kill()


def plain_loop(uri: str, model: str, device: str, batch: int, steps: int, threads: int, worker: int) -> None:
    """Model, augmentation and arithmetic of a run, with torch's own optimiser. worker: -1 for all shards' rows."""
    import torch

    from tests.support.draws import shuffled
    from trainer.data.batches import Batches
    from trainer.data.loading import load_worker
    from trainer.data.opening import open_shards
    from trainer.data.prefetch import Prefetch
    from trainer.data.rows import Rows
    from trainer.models import model_from_json
    from trainer.models.build import build

    torch.set_num_threads(threads)
    shards = open_shards(uri)
    chosen = [load_worker(shards, index) for index in ([worker] if worker >= 0 else range(shards.num_workers))]
    rows = Rows(*(np.concatenate(column) for column in zip(*map(_columns, chosen), strict=True)))
    built = build(model_from_json({"name": model}), shards.inputs, seed=0)
    built.model.to(device)
    number = max(0, worker)
    sampler = shuffled(rows, batch, seed=0, worker=number)
    with Prefetch(Batches(sampler, subtracted_mean(shards), seed=0, worker=number, augment=True).make) as ahead:
        print("ready", flush=True)
        input()
        ended = train_plainly(built, lambda clock: to_device(ahead.get(clock).tensors, device), steps)
    first = int(SKIP * steps)
    print(batch * (steps - 1 - first) / (ended[-1] - ended[first]))


def to_device(batch: Batch, device: str) -> Batch:
    """Return a mini-batch on the device; on a GPU by way of pinned memory, as with torch's DataLoader."""
    if device == "cpu":
        return batch
    return type(batch)(*(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch))


def train_plainly(built: NetworkAndTask, batch_at: Callable[[int], Batch], steps: int) -> list[float]:
    """Train with torch's own optimiser; the seconds of a clock at which each step ended."""
    import torch

    rate, momentum, decay = RATE, FRESH_MOMENTUM, Optimiser.weight_decay
    optimiser = torch.optim.SGD(built.model.parameters(), rate, momentum, weight_decay=decay, fused=True)
    ended = []
    for clock in range(steps):
        images_BCHW, labels = batch_at(clock)
        optimiser.zero_grad()
        outputs = built.model(images_BCHW)
        loss = built.task.loss(outputs, labels)
        loss.backward()
        optimiser.step()
        loss.item(), built.task.correct(outputs.detach(), labels).item()
        ended.append(time.monotonic())
    return ended


def _columns(rows: Any) -> tuple[Any, Any, Any]:
    return rows.images_NCHW, rows.labels, rows.ids


def _run(command: Sequence[object]) -> None:
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}{done.stdout[-2000:]}")


def make_sets(folder: Path, rows: int) -> Sets:
    """Return shard sets of the generated sample by number of workers, which the pipeline makes when they are needed.

    Sets that are in the folder already are used."""

    def get(workers: int) -> Path:
        shards = folder / f"shards-{workers}"
        if shards.exists():
            return shards
        if not (folder / "sample").exists():
            _run([sys.executable, "-m", "pipeline", "sample", "--to", folder / "sample", "--rows", rows])
        source = ["--input", folder / "sample", "--eval-input", folder / "sample", "--output", shards]
        job = ["spark-submit", "--master", f"local[{usable_cores()}]", ROOT / "jobs" / "baseline.py"]
        _run([*job, *source, "--strategy", "round_robin", "--workers", workers, "--no-report"])
        return shards

    return get


def run(sets: Sets, workers: Sequence[int], models: Sequence[str], repeat: int, steps: int, copy_gb_s: float) -> None:
    """Print the table of several models on the CPU, as the second part of ``make bench-trainer``."""
    print("\n2. Images/s of training on the CPU")
    print_heading(repeat, Training("", steps))
    for model in models:
        compare(sets, workers, Training(model, steps), repeat, copy_gb_s)
    if GOAL_WORKERS in workers:
        print(f"  goal: ours / plain >= {GOAL} at N = {GOAL_WORKERS}")


def print_heading(repeat: int, training: Training) -> None:
    """Print what is compared, and the names of the columns."""
    whose = "a worker" if training.per_worker else "in all"
    print(f"  ASP, shared memory, 1 server, mini-batch {training.batch} {whose}, {training.steps} steps a worker;")
    print(f"  {repeat} interleaved repeats; ratios are medians of the repeats' own. plain: one torch process,")
    print(
        f"  {usable_cores()} threads; no exchange: N of them with their share of rows, threads and mini-batch, the limit"
    )
    print("  of N processes here")
    print(f"  {'model':<10}{'N':>3}{'ours':>9}   {'range':<18}{'plain':>8}{'ratio':>8}{'no exchange':>14}{'ratio':>8}")


def compare(
    sets: Sets, workers: Sequence[int], training: Training, repeat: int, copy_gb_s: float | None = None
) -> None:
    """Measure one model with several numbers of workers, and print a line for each.

    Args:
        sets: shard sets by number of workers.
        workers: numbers of workers.
        training: what is trained.
        repeat: measurements of each.
        copy_gb_s: the rate of a copy in memory, beside which the pushed and pulled bytes are printed, if given.
    """
    cores = usable_cores()
    plain: list[float] = []
    single: list[float] = []
    mine: dict[int, list[float]] = {n: [] for n in workers}
    apart: dict[int, list[float]] = {n: [] for n in workers}
    numbers = 0
    for _ in range(repeat):
        plain.append(alone(sets(workers[0]), training, 1, cores))
        if training.device == "cpu":
            single.append(alone(sets(workers[0]), training, 1, 1))
        for n in workers:
            rate, numbers = ours(sets(n), training, n)
            mine[n].append(rate)
            apart[n].append(alone(sets(n), training, n, max(1, cores // n)) if n > 1 else plain[-1])
    for n in workers:
        print(_line(training.model, n, mine[n], plain, apart[n]), flush=True)
    if single:
        print(on_one_thread(plain, single))
    if copy_gb_s is not None:
        busiest = max(workers)
        moved = 8 * numbers * statistics.median(mine[busiest]) / training.worker_batch(busiest) / 1e9
        print(f"  {'':<10}N{busiest}: {moved:.2f} GB/s pushed and pulled, {moved / copy_gb_s:.1%} of a memcpy's rate")


def on_one_thread(plain: list[float], single: list[float]) -> str:
    """Threads of one process wait for each other spinning, so on a busy machine more of them are slower."""
    line = f"  {'':<10}plain on one thread: {statistics.median(single):.0f}"
    if statistics.median(single) > statistics.median(plain):
        line += ", faster than on all cores: the machine is busy, and ratios to plain mean nothing"
    return line


def _line(model: str, workers: int, mine: list[float], plain: list[float], apart: list[float]) -> str:
    extent = f"{min(mine):.0f} to {max(mine):.0f}"
    columns = [f"  {model:<10}{workers:>3}{statistics.median(mine):>9.0f}   {extent:<18}"]
    columns += [f"{statistics.median(plain):>8.0f}{_ratio(mine, plain):>8.2f}"]
    columns += [f"{statistics.median(apart):>14.0f}{_ratio(mine, apart):>8.2f}"]
    return "".join(columns)


def _ratio(mine: list[float], theirs: list[float]) -> float:
    """Median over the repeats of ratios taken within one."""
    return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


if __name__ == "__main__":
    uri, name, place, *numbers = sys.argv[1:]
    plain_loop(uri, name, place, *map(int, numbers))
