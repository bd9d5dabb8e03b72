"""Arm 2: the parameter server, started as a program on committed shards, like any training run.

Nothing of the trainer is imported here: what a run came to is read from its files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from pipeline.benchmark import arithmetic
from pipeline.benchmark.cells import Cell, Outcome
from pipeline.benchmark.timing import CpuMeter
from pipeline.errors import JobError

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.25
PROTOCOLS = {"ps-sync": "bsp", "ps-async": "asp"}


def command(cell: Cell, arm: str, shards: str, output: Path, seed: int) -> list[str]:
    """The command line of a run that does what MLlib does. More workers than cores stand for other nodes, and talk over
    sockets."""
    settings = cell.settings
    flags: list[object] = ["--shards", shards, "--output", output, "--model", cell.model, "--seed", seed]
    flags += ["--protocol", PROTOCOLS[arm], "--servers", 1, "--threads", 1, "--device", "cpu"]
    flags += ["--sampling", "bernoulli", "--batch-size", cell.batch, "--steps", cell.mini_batches or settings.most]
    flags += ["--recipe", "constant" if settings.constant else "inverse-sqrt", "--learning-rate", settings.step]
    flags += ["--momentum", 0, "--weight-decay", settings.decay]
    flags += ["--tolerance", 0 if cell.mini_batches else cell.tolerance]
    flags += [] if cell.model == "perceptron" else ["--no-intercept"]
    flags += ["--same-host", "socket"] if cell.tasks else []
    flags += ["--no-epoch-checkpoints", "--checkpoint-every-s", 1e6, "--no-report", "--quiet", "--overwrite"]
    return [sys.executable, "-m", "trainer", *map(str, flags)]


def run(cell: Cell, arm: str, shards: str, output: Path, seed: int, features: int, meter: CpuMeter) -> Outcome:
    """One run, to its end. Raises JobError with the trainer's own line where it fails."""
    began = time.time()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command(cell, arm, shards, output, seed), cwd=ROOT, **pipes) as process:
        try:
            spent = _server_cpu_s(process)
        except BaseException:
            process.terminate()  # its supervisor ends all others
            raise
        said = process.communicate()[0].strip()
    if process.returncode:
        raise JobError((said or f"exit code {process.returncode}").splitlines()[-1].removeprefix("error: "))
    outcome = read_run(output, cell, features, meter, began, spent)
    shutil.rmtree(output)
    return outcome


def _server_cpu_s(process: subprocess.Popen[str]) -> float:
    """CPU seconds of the server process, as last seen before it ended. It is looked for until it is there: that reads the
    status of every process of the machine, which would take its time from the run."""
    server, spent = None, 0.0
    while True:
        with suppress(psutil.Error):
            server = server or _server(process.pid)
            spent = sum(server.cpu_times()[:2]) if server else 0.0
        with suppress(subprocess.TimeoutExpired):
            process.wait(LOOK_S)
            return spent


def _server(pid: int) -> psutil.Process | None:
    children = psutil.Process(pid).children(recursive=True)
    return next((child for child in children if child.name().startswith("server")), None)


def read_run(output: Path, cell: Cell, features: int, meter: CpuMeter, began: float, server_cpu_s: float) -> Outcome:
    """What a finished run's files say; began: when its program was started."""
    result = json.loads((output / "result.json").read_text())
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    pushes = pd.read_csv(output / "pushes.csv")
    used = pushes[pushes.accepted == 1]
    workers = int(result["num_workers"])
    mini_batches = len(used) // workers
    seconds = float(result["seconds"])
    ended = next(e["time"] for kind in ("converged", "end") for e in reversed(events) if e["event"] == kind)
    return Outcome(
        mini_batches=mini_batches,
        updates=int(result["updates"]),
        examples=int(used.examples.sum()),
        converged=bool(result["converged"]),
        seconds=seconds,
        compute_s=_together_s(used, workers) or seconds / mini_batches,
        read_s=float(used.read_s.mean()),
        cpu=meter.between(ended - seconds, ended),
        load_s=max(event["load_s"] for event in events if event["event"] == "loaded"),
        start_s=max(0.0, ended - seconds - began),
        server_s=server_cpu_s / len(used),
        step_s=float(used.step_s.mean()),
        weights=tuple(in_mllibs_order(named_weights(output), cell, features)),
    )


def _together_s(used: pd.DataFrame, workers: int) -> float:
    """Seconds a mini-batch after the first of every worker, which holds what is done once: compilers, pages, the first
    mini-batches drawn. 0 where none came after that."""
    began = used.groupby("worker").seconds.min().max()
    later = used[used.seconds > began]
    return workers * float(used.seconds.max() - began) / len(later) if len(later) else 0.0


def initial_weights(cell: Cell, shards: str, output: Path, seed: int, features: int) -> np.ndarray[Any, Any]:
    """What the parameter server starts a run from, for the others to start from too: a run that learns nothing."""
    idle = replace(cell, mini_batches=1)
    flags = command(idle, "ps-sync", shards, output, seed)
    flags[flags.index("--learning-rate") + 1] = "1e-30"
    done = subprocess.run(flags, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise JobError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
    weights = in_mllibs_order(named_weights(output), cell, features)
    shutil.rmtree(output)
    return weights


def named_weights(output: Path) -> dict[str, Any]:
    """The model's arrays by name, in the order of its layers."""
    from safetensors.numpy import load_file  # comes with the trainer, which this arm needs anyway

    return dict(load_file(output / "model.safetensors"))


def in_mllibs_order(named: dict[str, Any], cell: Cell, features: int) -> np.ndarray[Any, Any]:
    """Weights flat in float64, as arithmetic.py has them."""
    matrices = [named[name] for name in sorted(named, key=_layer) if named[name].ndim == 2]
    biases = [named[name] for name in sorted(named, key=_layer) if named[name].ndim == 1]
    if not biases:
        return np.asarray(matrices[0], np.float64).reshape(-1)
    parts = [np.concatenate([m.T.reshape(-1), b]) for m, b in zip(matrices, biases, strict=True)]
    flat = np.concatenate(parts).astype(np.float64)
    assert len(flat) == arithmetic.num_weights(cell.model, features)
    return np.asarray(flat)


def _layer(name: str) -> int:
    return int(name.split(".")[0])
