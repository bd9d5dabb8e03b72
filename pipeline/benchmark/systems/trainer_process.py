"""The trainer as a program: the one file of the benchmark that knows its flags and the files of its run folder.

Nothing of the trainer is imported: a run is a command, and what it came to is read from its folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from pipeline.benchmark.environment import ROOT
from pipeline.errors import JobError

POLL_S = 0.25
RUN_FLAGS: Mapping[str, object] = {
    "epoch_checkpoints": False,
    "checkpoint_every_s": 1e6,
    "report": False,
    "quiet": True,
    "overwrite": True,
}


@dataclass(frozen=True)
class TrainingRun:
    """A finished training run. began, ended: of the program and of training, in seconds since 1970."""

    num_workers: int
    updates: int
    converged: bool
    began: float
    ended: float
    seconds: float  # of training
    load_s: float  # of the slowest worker's rows
    server_cpu_s: float  # of the parameter server process, from its start
    pushes: pd.DataFrame  # the accepted ones: worker, seconds, examples, read_s, step_s
    weights: Mapping[str, Any]  # the model's arrays by name


def train(shards: str, output: Path, parameters: Mapping[str, object]) -> TrainingRun:
    """Train to the end of a run and delete its folder. parameters: fields of the trainer's configuration.

    Raises JobError with the trainer's own error line where it fails."""
    began = time.time()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(build_command(shards, output, parameters), cwd=ROOT, **pipes) as process:
        try:
            server_cpu_s = _watch_server_cpu(process)
        except BaseException:
            process.terminate()  # its supervisor ends all others
            raise
        printed = process.communicate()[0].strip()
    if process.returncode:
        raise JobError((printed or f"exit code {process.returncode}").splitlines()[-1].removeprefix("error: "))
    run = read_run(output, began, server_cpu_s)
    shutil.rmtree(output)
    return run


def build_command(shards: str, output: Path, parameters: Mapping[str, object]) -> list[str]:
    """The command line of a run: a flag for each parameter."""
    flags: list[object] = ["--shards", shards, "--output", output]
    for name, value in {**parameters, **RUN_FLAGS}.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", value]
    return [sys.executable, "-m", "trainer", *map(str, flags)]


def _watch_server_cpu(process: subprocess.Popen[str]) -> float:
    """CPU seconds of the server process, as last polled before it ended.

    The server is searched for only until it is found: a search reads the status of every process of the machine, which
    takes its time from the run."""
    server, spent = None, 0.0
    while True:
        with suppress(psutil.Error):
            server = server or _find_server(process.pid)
            spent = sum(server.cpu_times()[:2]) if server else 0.0
        with suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return spent


def _find_server(pid: int) -> psutil.Process | None:
    children = psutil.Process(pid).children(recursive=True)
    return next((child for child in children if child.name().startswith("server")), None)


def read_run(output: Path, began: float, server_cpu_s: float) -> TrainingRun:
    """What a finished run's folder holds."""
    from safetensors.numpy import load_file  # comes with the trainer, which this system needs anyway

    result = json.loads((output / "result.json").read_text())
    events = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    pushes = pd.read_csv(output / "pushes.csv")
    return TrainingRun(
        num_workers=int(result["num_workers"]),
        updates=int(result["updates"]),
        converged=bool(result["converged"]),
        began=began,
        ended=next(e["time"] for kind in ("converged", "end") for e in reversed(events) if e["event"] == kind),
        seconds=float(result["seconds"]),
        load_s=max(event["load_s"] for event in events if event["event"] == "loaded"),
        server_cpu_s=server_cpu_s,
        pushes=pushes[pushes.accepted == 1],
        weights=dict(load_file(output / "model.safetensors")),
    )
