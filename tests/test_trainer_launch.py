"""How the processes of a host start, are watched, and are started again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.trainer_runs import Training, train_here, until
from tests.trainer_sets import make_sets

COMMON = ("--model", "logistic", "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1, "--no-report", "--quiet")
BSP = ("--protocol", "bsp", "--servers", 2, "--steps", 1000, "--checkpoint-every-s", 0.3)
Start = Callable[..., Training]


@pytest.fixture(scope="module")
def shards(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images for three workers."""
    return make_sets(spark, tmp_path_factory.mktemp("launch"), 3)[3]


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Where the BSP run of these tests ends."""
    return train_here(shards, tmp_path_factory.mktemp("undisturbed") / "run", *COMMON, *BSP).vector()


@pytest.fixture
def start(shards: Path, tmp_path: Path) -> Iterator[Start]:
    """Start runs that leave nothing behind, whatever the test does."""
    runs: list[Training] = []

    def begin(*flags: object, output: Path = tmp_path / "run") -> Training:
        runs.append(Training(shards, output, *COMMON, *flags))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def helper(run: Training, named: str) -> psutil.Process:
    """The process of multiprocessing that runs such a module: the supervisor's own child."""

    def find() -> psutil.Process | None:
        for process in psutil.Process(run.process.pid).children():
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if named in " ".join(process.cmdline()):
                    return process
        return None

    found: psutil.Process = until(find, f"{named} runs")
    return found


def test_a_fork_server_killed_at_any_moment_costs_neither_the_run_nor_its_bits(
    start: Start, undisturbed: np.ndarray
) -> None:
    """While it imports torch, while it starts the roles, together with a role, and together with the resource tracker."""
    run = start(*BSP)
    helper(run, "forkserver").kill()
    until(lambda: run.pid("prepare") or run.pid("server-0"), "something was forked")
    helper(run, "forkserver").kill()
    until(lambda: run.pid("worker-0"), "the roles start")
    helper(run, "forkserver").kill()
    run.wait_for_updates(10)
    lived = {role: run.pid(role) for role in ("worker-0", "server-0", "evaluator-0")}
    helper(run, "forkserver").kill()
    run.send("worker-1")
    run.wait_for_updates(50)
    helper(run, "resource_tracker").kill()
    helper(run, "forkserver").kill()
    run.send("server-1")
    assert {role: run.pid(role) for role in lived} == lived, "whoever lives goes on"
    assert run.wait() == 0, run.said()
    np.testing.assert_array_equal(run.vector(), undisturbed)
    assert run.result()["restarts"] == {"worker": 1, "server": 1, "evaluator": 0}
    restarts = [event for event in run.events("restart") if event["role"] == "fork server"]
    assert len(restarts) >= 3
    assert {event["cause"] for event in restarts} == {"killed by SIGKILL"}
    assert "Warning" not in run.said()
    until(lambda: not run.family(), "its last processes end")


def test_a_role_that_outlives_its_fork_server_is_still_watched(start: Start, undisturbed: np.ndarray) -> None:
    """Killed, frozen or done: nobody but the role itself can tell any more."""
    run = start(*BSP, "--heartbeat-timeout-s", 3)
    run.wait_for_updates(10)
    helper(run, "forkserver").kill()
    run.send("worker-0")
    run.wait_for_updates(20)
    run.send("worker-1", signal.SIGSTOP)
    run.wait_for_updates(40)
    helper(run, "forkserver").kill()
    assert run.wait() == 0, run.said()
    np.testing.assert_array_equal(run.vector(), undisturbed)
    assert run.result()["restarts"] == {"worker": 2, "server": 0, "evaluator": 0}


def test_a_killed_preparation_is_tried_again(start: Start) -> None:
    run = start("--steps", 5)
    first = run.send("prepare")
    until(lambda: run.pid("prepare") not in (None, first), "another one")
    run.send("prepare")
    assert run.wait() == 0, run.said()


def test_a_preparation_that_is_killed_for_ever_ends_the_run_with_its_cause(start: Start) -> None:
    run = start("--steps", 5)
    while run.process.poll() is None:
        if pid := run.pid("prepare"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    assert run.wait() == 1
    assert run.said().splitlines()[-1].startswith("error: "), run.said()
    assert "SIGKILL" in run.said()
