"""Real training runs, started as a user starts them, whose processes can be found, killed and counted."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import psutil

from pipeline.spark.shipping import PACKAGE
from tests.clusters.processes import is_alive
from trainer.__main__ import main
from trainer.checkpoints.read import newest, read_vector
from trainer.runlog.read import read_pushes

ROOT = PACKAGE.parent


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    """The events of a kind as they are in metrics.jsonl, whatever the product's reader makes of them."""
    lines = filter(str.strip, path.read_text().splitlines()) if path.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


class End(NamedTuple):
    """The end of a run: parameters and statistics, float32 [P + Q], and the sha256 of the model file."""

    vector: npt.NDArray[np.float32]
    model: str


class RunFolder:
    """What a run has left in its folder."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.output / "result.json").read_text())
        return found

    def events(self, kind: str) -> list[dict[str, Any]]:
        return lines_of(self.output / "metrics.jsonl", kind)

    def pushes(self) -> pd.DataFrame:
        return read_pushes(self.output / "pushes.csv")

    def vector(self) -> npt.NDArray[np.float32]:
        """Parameters and statistics of the newest whole checkpoint."""
        root = self.output / "checkpoints"
        version = newest(root, verify=True)
        assert version is not None
        return read_vector(root, version)

    def model_digest(self) -> str:
        """Return the sha256 of the model file."""
        return hashlib.sha256((self.output / "model.safetensors").read_bytes()).hexdigest()


def words_of(shards: Path | str, output: Path, *flags: object) -> list[str]:
    """Return the words of a training command. A --shards among the flags replaces ``shards``, which it would add to."""
    places = () if "--shards" in flags else ("--shards", shards)
    return [*map(str, (*places, "--output", output, *flags))]


def train_here(shards: Path | str, output: Path, *flags: object) -> RunFolder:
    """A run to its end, with this process as its supervisor: all of a test process's share one that has loaded torch."""
    assert main(words_of(shards, output, *flags)) == 0
    return RunFolder(output)


class Training(RunFolder):
    """``python -m trainer`` in a session of its own, so that everything it starts can be found afterwards."""

    def __init__(self, shards: Path | str, output: Path, *flags: object, inside: tuple[str, ...] = ()) -> None:
        """inside: a command that runs another, such as in a network of its own."""
        super().__init__(output)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (not beside the output: a test may fill that disk)
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "trainer", *words_of(shards, output, *flags)],
            cwd=ROOT,
            stdout=self._said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, seconds: float = 120) -> int:
        return self.process.wait(seconds)

    def said(self) -> str:
        return os.pread(self._said.fileno(), os.fstat(self._said.fileno()).st_size, 0).decode()

    def family(self) -> list[psutil.Process]:
        """Every process of the run's session but zombies, wherever its parent is."""
        found = []
        for pid in psutil.pids():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                # Before a Process is made, which reads a file: tests ask often, and a machine has hundreds.
                if os.getsid(pid) == self.process.pid and is_alive(process := psutil.Process(pid)):
                    found.append(process)
        return found

    def pid(self, role: str) -> int | None:
        return next((pid for pid, name in self.names().items() if name == role), None)

    def names(self) -> dict[int, str]:
        """Of the family's processes, by number."""
        found = {}
        for process in self.family():
            with suppress(psutil.NoSuchProcess):  # it has ended since it was found
                found[process.pid] = process.name()
        return found

    def send(self, role: str, number: int = signal.SIGKILL) -> int:
        """Signal a role's process, waiting for it to be there; returns its number."""
        pid = self.until(lambda: self.pid(role), f"{role} runs")
        os.kill(pid, number)
        return int(pid)

    def wait_for_updates(self, updates: int) -> None:
        self.until(lambda: self.updates() >= updates, f"version {updates}")

    def until(self, condition: Callable[[], Any], event: str) -> Any:
        """Wait for an event while the run goes on; return the first true value of its condition."""
        found = until(lambda: condition() or self.process.poll() is not None, event, said=self.said)
        assert self.process.poll() is None, f"the run ended before {event}: {self.said()}"
        return found

    def trains_after(self, generation: int) -> bool:
        """Whether it has pushed gradients in a later generation, or has ended."""
        return self.generation() > generation or self.process.poll() is not None

    def generation(self) -> int:
        """Of the last push; it grows with every start and roll-back."""
        return self._last_push()[0]

    def updates(self) -> int:
        """The version of the last push."""
        return self._last_push()[1]

    def _last_push(self) -> tuple[int, int]:
        """Its generation and version."""
        try:
            with open(self.output / "pushes.csv", "rb") as file:  # its end: a test asks often
                file.seek(max(0, os.path.getsize(file.fileno()) - 1000))
                generation, version = file.read().decode().rsplit("\n", 2)[-2].split(",")[:2]
            return int(generation), int(version)
        except (OSError, IndexError, ValueError):
            return 0, 0

    def end(self) -> None:
        """Whatever is still there goes."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):  # a role may go with its launcher before its turn comes
                process.kill()
        self.process.wait()


def until(condition: Callable[[], Any], what: str, seconds: float = 180, said: Callable[[], str] = str) -> Any:
    """The first true value of a condition. said: returns the output that explains why it stays false."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s in vain: {what}\n{said()}")


def helper(run: Training, named: str) -> psutil.Process:
    """The process of multiprocessing that runs such a module: the supervisor's own child."""

    def find() -> psutil.Process | None:
        for process in psutil.Process(run.process.pid).children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if named in " ".join(process.cmdline()):
                    return process
        return None

    found: psutil.Process = run.until(find, f"{named} runs")
    return found
