"""What goes wrong around a run: full disks, damaged shards, broken models, frozen processes, impatient people."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline.core.errors import JobError
from tests.clusters.processes import is_alive
from tests.support.slow_model import SLOW
from tests.support.trainer_runs import RunFolder, Training, helper, train_here, until
from tests.support.trainer_sets import copy_of
from trainer.__main__ import main
from trainer.checkpoints.read import whole
from trainer.launch.fork_server import FORK_SERVER

COMMON = ("--model", "logistic", "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1, "--no-report")
LONG = (*SLOW, "--steps", 100_000)  # ended by the test
DIES = """
import os, torch
COUNT = {count!r}

class Dies(torch.nn.Module):
    def __init__(self, numbers, classes):
        super().__init__()
        self.linear = torch.nn.Linear(numbers, classes)

    def forward(self, images):
        if self.training and len(images) != 2:  # the check before a run has two images
            with open(COUNT, "a") as file:
                file.write("x")
            if os.path.getsize(COUNT) >= 3:
                raise RuntimeError("no forward any more")
        return self.linear(images.flatten(1))

def build(image_shape, num_classes):
    channels, height, width = image_shape
    return Dies(channels * height * width, num_classes)
"""
Start = Callable[..., Training]
Failure = Callable[..., JobError]


@pytest.fixture
def start(shards: Path, tmp_path: Path) -> Iterator[Start]:
    """Start runs that leave nothing behind, whatever the test does."""
    runs: list[Training] = []

    def begin(*flags: object, output: Path = tmp_path / "run", of: Path = shards) -> Training:
        runs.append(Training(of, output, *COMMON, *flags))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def gone(run: Training) -> None:
    until(lambda: not run.family(), "all its processes end")


def one_line(run: Training) -> str:
    """What a run that failed said: a line of its own, no stack trace."""
    lines = run.said().splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1, run.said()
    assert "Traceback" not in run.said()
    return lines[-1]


@pytest.fixture
def failure(shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Failure:
    """Train in this process, which has loaded torch, and return the error with which the run ends."""

    def train(*flags: object, of: Path = shards) -> JobError:
        with pytest.raises(JobError) as caught:
            main([*map(str, ("--shards", of, "--output", tmp_path / "run", *COMMON, *flags))])
        assert "\n" not in str(caught.value)
        assert "Traceback" not in "".join(capfd.readouterr())
        assert FORK_SERVER.pid
        fork_server = psutil.Process(FORK_SERVER.pid)
        until(lambda: not [child for child in fork_server.children() if is_alive(child)], "all its processes end")
        return caught.value

    return train


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    try:
        mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a small file system can be mounted by root only")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_stops_checkpoints_and_no_training(start: Start, small_disk: Path) -> None:
    flags = (*SLOW, "--protocol", "asp", "--servers", 2, "--steps", 600, "--checkpoint-every-s", 0.5)
    run = start(*flags, "--heartbeat-timeout-s", 1000, output=small_disk / "run")  # for the evaluator's sake
    evaluator = run.send("evaluator-0", signal.SIGSTOP)  # so that it has something to evaluate when there is no room
    behind = whole(run.output / "checkpoints")[-1]
    until(lambda: whole(run.output / "checkpoints")[-1] > behind, "an epoch ends")
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        _fill(file)
        os.kill(evaluator, signal.SIGCONT)
        last = whole(run.output / "checkpoints")[-1]
        until(lambda: "not written" in run.said(), "people are told")
        for _ in range(8):
            _fill(file)  # it stays full
            time.sleep(0.1)
    assert run.process.poll() is None, run.said()
    filler.unlink()
    until(lambda: whole(run.output / "checkpoints")[-1] > last, "a checkpoint after the disk was full")
    assert run.wait() == 0, run.said()
    state = run.result()
    assert state["cause"] == "finished"
    assert state["restarts"] == {"worker": 0, "server": 0, "evaluator": 0}
    assert (run.output / "model.safetensors").exists()
    used = run.pushes().query("accepted == 1")
    assert used["version"].tolist() == list(range(1, state["updates"] + 1)), "the log of a full disk has gaps"


@contextmanager
def kept_full(disk: Path) -> Iterator[None]:
    """Fill a disk, and again whatever is freed there."""
    stop = threading.Event()
    filler = disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        _fill(file)

        def fill() -> None:
            while not stop.wait(0.005):
                _fill(file)

        thread = threading.Thread(target=fill)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
    filler.unlink()


@pytest.mark.full
def test_a_trained_run_on_a_full_disk_says_so_and_loses_nothing(start: Start, shards: Path, small_disk: Path) -> None:
    flags = ("--protocol", "bsp", "--steps", 1500, "--checkpoint-every-s", 0.5)
    run = start(*flags, output=small_disk / "run")
    until(lambda: len(whole(run.output / "checkpoints")) > 1, "a checkpoint")
    with kept_full(small_disk):
        until(lambda: "finished, waiting for space on" in run.said(), "people are told")
        said = run.said()
        assert str(run.output) in said[said.index("finished, waiting") :].splitlines()[0]
        kept = whole(run.output / "checkpoints")[-1]
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.wait() == 1
        assert run.said().count("finished, waiting") == 1
        assert "--resume" in one_line(run)
        gone(run)
    assert whole(run.output / "checkpoints")[-1] >= kept
    train_here(shards, run.output, *COMMON, *flags, "--resume")
    assert (run.output / "model.safetensors").exists()


@pytest.mark.full
def test_a_trained_run_on_a_full_disk_ends_by_itself(
    shards: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.launch.disk_watch.SPACE_WAIT_S", 3.0)
    flags = ("--shards", shards, "--output", small_disk / "run", *COMMON, "--steps", 1500, "--checkpoint-every-s", 0.5)
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(main, [*map(str, flags)])
        until(lambda: len(whole(small_disk / "run" / "checkpoints")) > 1, "a checkpoint")
        with (
            kept_full(small_disk),
            pytest.raises(JobError, match=r"No space left.*kept is the run at version .*--resume"),
        ):
            ended.result()


def _fill(file: Any) -> None:
    """Until there is no room for a page more."""
    with suppress(OSError):
        while file.write(bytes(4096)):
            pass


def test_a_changed_shard_ends_the_run_with_its_name(failure: Failure, shards: Path, tmp_path: Path) -> None:
    damaged = copy_of(shards, tmp_path / "damaged")
    file = next((damaged / "worker=001").glob("*.parquet"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    error = failure(*LONG, of=damaged)
    assert error.exit_code == 3
    assert file.name in str(error)


def test_a_worker_that_always_dies_is_given_up_with_its_cause(
    failure: Failure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = tmp_path / "count"
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "broken_model_of_a_test.py").write_text(DIES.format(count=str(count)))
    monkeypatch.syspath_prepend(tmp_path / "models")
    error = failure(*LONG, "--max-restarts", 2, "--model", "broken_model_of_a_test:build")
    assert error.exit_code == 1
    assert "no forward any more" in str(error)
    assert "3 times" in str(error)
    assert RunFolder(tmp_path / "run").result()["cause"] == "failed"


@pytest.mark.full
def test_a_worker_that_always_dies_is_given_up_though_others_get_on(start: Start) -> None:
    """Under asp nobody waits for it, and nobody would train its shard."""
    run = start(*LONG, "--max-restarts", 2, "--protocol", "asp")
    run.wait_for_updates(10)
    while run.process.poll() is None:
        victim = run.pid("worker-1")
        if victim:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        time.sleep(0.02)
    assert run.wait() == 1
    line = one_line(run)
    assert "worker-1 failed 3 times in a row without progress" in line
    assert run.events("restart")[-1]["index"] == 1
    gone(run)


def test_a_diverging_run_says_so_once_and_keeps_a_checkpoint(failure: Failure, tmp_path: Path) -> None:
    error = failure(*LONG, "--learning-rate", 1e30, "--protocol", "asp")
    assert error.exit_code == 1
    assert "diverged" in str(error)
    assert "--learning-rate" in str(error)
    run = RunFolder(tmp_path / "run")
    assert np.isfinite(run.vector()).all()
    assert run.result()["cause"] == "failed"


@pytest.mark.full
def test_a_frozen_evaluator_is_started_again_and_misses_no_epoch(start: Start) -> None:
    run = start("--protocol", "bsp", "--epochs", 30, "--heartbeat-timeout-s", 3)
    run.wait_for_updates(10)
    run.send("evaluator-0", signal.SIGSTOP)
    assert run.wait() == 0, run.said()
    assert [event["epoch"] for event in run.events("eval")] == list(range(1, 31))
    assert run.result()["restarts"]["evaluator"] == 1


def test_two_runs_in_one_folder_are_refused_and_the_first_goes_on(start: Start, shards: Path) -> None:
    """Start the first one as a process; the others are refused in this process, which has loaded torch."""
    run = start(*LONG)
    run.wait_for_updates(5)
    flags = ("--shards", shards, "--output", run.output, *COMMON, *LONG)
    for more in ((), ("--resume",), ("--overwrite",)):
        with pytest.raises(JobError, match=re.escape(str(run.output))) as refused:
            main([*map(str, flags), *more])
        assert refused.value.exit_code == 1
    assert run.process.poll() is None
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 1


@pytest.mark.full
def test_a_restarting_server_keeps_its_address(start: Start) -> None:
    """He would be told the password of all workers."""
    run = start(*LONG, "--same-host", "socket")
    run.wait_for_updates(5)
    server = until(lambda: run.pid("server-0"), "the server runs")
    names = {
        each.laddr for each in psutil.Process(server).net_connections("unix") if each.laddr.startswith("@trainer-")
    }
    assert len(names) == 1
    name = "\0" + names.pop()[1:]
    run.send("server-0")
    until(lambda: is_taken(name) and run.events("restart"), "it is started again")
    before = len(run.pushes())
    until(lambda: is_taken(name) and len(run.pushes()) > before, "the workers go on with it")


def is_taken(name: str) -> bool:
    """Whether nobody can listen at a name, as long as that lasts."""
    with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(name)
    return True


def test_sigterm_leaves_a_checkpoint_as_ctrl_c_does(start: Start) -> None:
    """Also of a run whose fork server was killed together with a worker, which another one has started again."""
    run = start(*LONG)
    run.wait_for_updates(5)
    helper(run, "forkserver").kill()
    run.send("worker-1")
    until(lambda: any(event["role"] == "worker" for event in run.events("restart")), "the worker is started again")
    run.wait_for_updates(run.updates() + 20)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 1
    assert "--resume" in one_line(run)
    gone(run)
    assert whole(run.output / "checkpoints")[-1] >= 20
    assert run.result()["cause"] == "interrupted"
    assert run.result()["restarts"]["worker"] == 1


@pytest.mark.full
def test_a_second_ctrl_c_does_not_wait_for_a_checkpoint(start: Start) -> None:
    run = start(*LONG, "--heartbeat-timeout-s", 1000)
    run.wait_for_updates(20)
    run.send("server-0", signal.SIGSTOP)  # so there will be no checkpoint
    os.killpg(run.process.pid, signal.SIGINT)
    time.sleep(0.5)  # two signals at once are one
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 1
    assert "--resume" in one_line(run)
    gone(run)
