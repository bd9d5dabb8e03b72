"""Memory of every process of a run, shared pages counted once, beside as many Pythons that only import torch."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.support.trainer_runs import Training

SERVERS = 2
UPDATES_A_WORKER = 3  # before the first look: by then every buffer has been in use
LOOKS, LOOK_EVERY_S = 3, 1.0
ROLES = ("supervisor", "forkserver", "tracker", "server", "worker", "evaluator")
Sizes = dict[str, list[tuple[float, float]]]  # PSS and USS in MB, of each process of a role


def role_of(process: psutil.Process, supervisor: int) -> str:
    """Roles name themselves; the two helpers of multiprocessing are known by what they run."""
    named = process.name().partition("-")[0]
    if named in ROLES or process.pid == supervisor:
        return named if named in ROLES else "supervisor"
    return "tracker" if "resource_tracker" in " ".join(process.cmdline()) else "forkserver"


def megabytes(process: psutil.Process) -> tuple[float, float]:
    """PSS (a page that n processes share counts 1/n) and USS (pages of its own)."""
    found = process.memory_full_info()
    return found.pss / 1e6, found.uss / 1e6


def look(training: Training) -> Sizes:
    sizes: Sizes = {}
    for process in training.family():
        sizes.setdefault(role_of(process, training.process.pid), []).append(megabytes(process))
    return sizes


def total(sizes: Sizes) -> tuple[float, float]:
    every = [size for found in sizes.values() for size in found]
    return sum(pss for pss, _ in every), sum(uss for _, uss in every)


def looks_at_a_run(shards: Path, model: str, workers: int, count: int, *flags: object) -> list[Sizes]:
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        fixed = ["--servers", SERVERS, "--steps", 10**6, "--quiet", "--no-report"]
        training = Training(shards, Path(scratch) / "run", "--model", model, *fixed, *flags)
        try:
            training.wait_for_updates(UPDATES_A_WORKER * workers)
            found = []
            for _ in range(count):
                found.append(look(training))
                time.sleep(LOOK_EVERY_S)
            return found
        finally:
            training.end()


@contextmanager
def pythons_with_torch(count: int) -> Iterator[list[psutil.Process]]:
    """Started one by one, as a launcher without a common ancestor starts them; they share torch's files only."""
    program = "import torch; print(flush=True); input()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    running = [subprocess.Popen([sys.executable, "-c", program], **pipes) for _ in range(count)]
    try:
        for process in running:
            assert process.stdout
            process.stdout.readline()
        yield [psutil.Process(process.pid) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()


def activation_mb(model: str, batch: int, shape: tuple[int, int, int], num_classes: int) -> float:
    """What backward needs kept of a mini-batch: tensors that autograd saves, each once, parameters left out."""
    import torch

    from trainer.models import model_from_json
    from trainer.models.base import ModelInput
    from trainer.models.build import build

    built = build(model_from_json({"name": model}), ModelInput(shape, num_classes), seed=0)
    own = {parameter.untyped_storage().data_ptr() for parameter in built.model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = built.model(torch.rand(batch, *shape))
        loss = built.task.loss(outputs, torch.zeros(batch, dtype=torch.int64))
    size = sum(nbytes for place, nbytes in saved.items() if place not in own) / 1e6
    del loss
    return size


def needed_mb(shards: Path, model: str, batch: int) -> dict[str, float]:
    """What a run cannot do without, whatever it is written in: its rows, vectors and activations."""
    from trainer.data.opening import open_shards
    from trainer.models import model_from_json
    from trainer.models.build import build
    from trainer.models.flat_vector import FlatModel

    found = open_shards(str(shards))
    layout = FlatModel(build(model_from_json({"name": model}), found.inputs, seed=0).model)
    vector = 4e-6 * (layout.num_parameters + layout.num_buffers)
    workers = found.num_workers
    channels, height, width = found.shape
    rows = sum(found.worker_rows(worker) for worker in range(workers)) * channels * height * width / 1e6
    share = max(1, batch // workers)
    activations = workers * activation_mb(model, share, found.shape, found.num_classes)
    return {"rows": rows, "vectors": vector * (2 * workers + 2), "activations": activations}


def run(shards: Path, model: str, workers: int, batch: int) -> None:
    found = looks_at_a_run(shards, model, workers, LOOKS)
    with pythons_with_torch(1) as one:
        torch_once = megabytes(one[0])[0]
    with pythons_with_torch(workers) as many:
        bare = total({"python": [megabytes(process) for process in many]})
    print(f"\n3. Memory of a {model} run: {workers} workers, {SERVERS} servers, mini-batch {batch} in all (MB, 10^6)")
    print(f"  {'role':<14}{'processes':>10}{'PSS each':>11}{'USS each':>11}{'PSS in all':>13}")
    for role in sorted(found[0], key=ROLES.index):
        print(_line(role, found))
    ours = [statistics.median(total(sizes)[kind] for sizes in found) for kind in (0, 1)]
    print(f"  in all: PSS {ours[0]:.0f}, USS {ours[1]:.0f}  (medians of {LOOKS} looks)")
    print(f"  {workers} Pythons that import torch and do nothing: PSS {bare[0]:.0f}, USS {bare[1]:.0f};", end=" ")
    print(f"ours, all roles, over that: {ours[0] / bare[0]:.2f}")
    _print_limit(needed_mb(shards, model, batch), torch_once, ours[0])


def _line(role: str, looks: Sequence[Sizes]) -> str:
    count = len(looks[0][role])
    pss, uss = (
        statistics.median(statistics.mean(size[kind] for size in sizes[role]) for sizes in looks) for kind in (0, 1)
    )
    return f"  {role:<14}{count:>10}{pss:>11.1f}{uss:>11.1f}{count * pss:>13.1f}"


def _print_limit(needed: dict[str, float], torch_once: float, ours: float) -> None:
    least = torch_once + sum(needed.values())
    parts = ", ".join(f"{name} {size:.1f}" for name, size in needed.items())
    print(f"  limit: torch loaded once {torch_once:.0f}, {parts}: {least:.0f}; ours is {ours / least:.1f} x that")
