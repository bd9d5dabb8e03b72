"""How the processes of a host start, are watched, and are started again."""

from __future__ import annotations

import errno
import importlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn
from unittest.mock import Mock

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.ledger_origin import with_origin
from tests.support.configs import make_config
from tests.support.slow_model import SLOW, SLOWLY_PREPARED
from tests.support.trainer_runs import End, Training, helper, train_here, until
from trainer.checkpoints.read import whole
from trainer.context import RunContext
from trainer.home.folders import Folders
from trainer.launch import fork_server
from trainer.launch.child import UNFINISHED, Child
from trainer.launch.fork_server import FORK_SERVER, ForkServer, ProcessKilledError
from trainer.launch.leaving import Patience
from trainer.launch.restarts import Restarts, pause_s
from trainer.launch.run import preparation_log, prepare
from trainer.protocols import PROTOCOLS
from trainer.run_files import PREPARE_LOG

COMMON = ("--model", "logistic", "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1, "--no-report", "--quiet")
STEPS = 300
BSP = (*SLOW, "--protocol", "bsp", "--servers", 2, "--steps", STEPS, "--checkpoint-every-s", 0.3)
Start = Callable[..., Training]


@pytest.fixture(scope="module")
def undisturbed(undisturbed_end: Callable[[int], End]) -> np.ndarray:
    """Where the BSP run of these tests ends."""
    return undisturbed_end(STEPS).vector


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


@pytest.mark.full
def test_a_run_keeps_its_bits_whenever_its_fork_server_is_killed(start: Start, undisturbed: np.ndarray) -> None:
    """While it imports torch, while it starts the roles, together with a role, and together with the resource tracker."""
    run = start(*BSP)
    helper(run, "forkserver").kill()
    until(lambda: run.pid("prepare") or run.pid("server-0"), "something was forked")
    helper(run, "forkserver").kill()
    until(lambda: run.pid("worker-0"), "the roles start")
    helper(run, "forkserver").kill()
    run.wait_for_updates(10)
    # Not the evaluator: it may be forked only after the workers have ended, if its fork server has to import torch first.
    lived = {role: run.until(partial(run.pid, role), role) for role in ("worker-0", "server-0")}
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
    assert len(restarts) >= 1  # multiprocessing may start another in between, in silence
    assert {event["cause"] for event in restarts} == {"killed by SIGKILL"}
    assert "Warning" not in run.said()
    until(lambda: not run.family(), "its last processes end")


def test_a_folder_that_processes_may_not_enter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate root's home folder after `su`."""
    monkeypatch.setattr(os, "access", lambda path, mode: path != ".")
    with pytest.raises(UsageError, match=r"user \d+ may not enter the current folder, /.*: change to another one"):
        fork_server.start_process("worker-0", ())


@pytest.mark.full
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


@pytest.mark.full
def test_a_killed_preparation_is_tried_again(start: Start) -> None:
    run = start(*SLOWLY_PREPARED, "--steps", 5)
    first = run.send("prepare")
    until(lambda: run.pid("prepare") not in (None, first), "another one")
    run.send("prepare")
    assert run.wait() == 0, run.said()


@pytest.mark.full
def test_a_preparation_that_always_dies_ends_the_run(start: Start) -> None:
    run = start(*SLOWLY_PREPARED, "--steps", 5, "--max-restarts", 2)
    while run.process.poll() is None:
        if pid := run.pid("prepare"):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    assert run.wait() == 1
    assert run.said().splitlines()[-1].startswith("error: prepare failed 3 times in a row, last: "), run.said()
    assert "SIGKILL" in run.said()


@pytest.mark.full
def test_a_preparation_survives_a_fork_server_killed_often(start: Start) -> None:
    """More often than one process is tried at once."""
    run = start("--steps", 5)
    killed: set[int] = set()
    while len(killed) < 2 * fork_server.STARTS + 2:
        server = helper(run, "forkserver")
        if server.pid not in killed:
            with suppress(psutil.NoSuchProcess):
                server.kill()
            killed.add(server.pid)
        time.sleep(0.01)
    assert run.wait() == 0, run.said()
    assert run.result()["cause"] == "finished"


def test_a_preparation_has_the_tries_and_pauses_of_a_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = RunContext.from_config(make_config(output=str(tmp_path), max_restarts=4))
    pauses: list[float] = []
    monkeypatch.setattr("trainer.launch.run.time.sleep", pauses.append)

    def fail(*arguments: object, **options: object) -> NoReturn:
        raise ProcessKilledError("killed by SIGKILL")

    monkeypatch.setattr("trainer.launch.run._prepared", fail)
    with pytest.raises(JobError, match=r"prepare failed 5 times in a row, last: killed by SIGKILL; see .*prepare\.log"):
        prepare(context, Folders.from_home(tmp_path), computes=True, home=None, write=False)
    assert pauses == [pause_s(failures) for failures in (1, 2, 3, 4)]


def test_hosts_that_share_a_folder_are_refused_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second host prepares, and removes its log and the empty folder, while the first one does."""
    context = RunContext.from_config(make_config(output=str(tmp_path)))
    folders = Folders.from_home(tmp_path)
    names = [preparation_log(folders, leads=False), PREPARE_LOG, preparation_log(folders, leads=True)]
    assert names[0] != names[1] == names[2]

    def refuse(context: RunContext, log: Path, *arguments: object, **options: object) -> NoReturn:
        log.parent.mkdir(exist_ok=True)
        log.touch()
        if names:
            with pytest.raises(UsageError, match="of the configuration"):
                prepare(context, folders, computes=True, home=None, write=False, log_name=names.pop())
        raise UsageError("of the configuration")

    monkeypatch.setattr("trainer.launch.run._prepared", refuse)
    with pytest.raises(UsageError, match="of the configuration"):
        prepare(context, folders, computes=True, home=None, write=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("other", [0, 1])
def test_a_run_warns_of_an_example_table_of_other_rows(
    shards: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], other: int
) -> None:
    """The process that prepares reads the table, and the one that the user sees has the warning."""
    folder = tmp_path / "set"
    shutil.copytree(shards, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = {"uri": "in", "format": "npz", "files": 1, "bytes": 1, "rows": manifest["rows"]}
    entry["fingerprint"] = f"{manifest['rows']}-{7:016x}"
    (folder / "manifest.json").write_text(json.dumps(manifest | {"input": entry}))
    columns = {"id": pa.array([0], pa.int64()), "weight": pa.array([1.0])}
    table = pa.table(columns, with_origin(pa.schema([("id", pa.int64()), ("weight", pa.float64())]), 7 + other))
    pq.write_table(table, tmp_path / "table.parquet")
    values = {"model": "logistic", "sampling": "weighted", "example_table": str(tmp_path / "table.parquet")}
    context = RunContext.from_config(make_config(folder, output=str(tmp_path / "run"), **values))
    (tmp_path / "run").mkdir()
    prepare(context, Folders.from_home(tmp_path / "run"), computes=True, home=None, write=False)
    line = f"warning: --example-table {tmp_path}/table.parquet is of rows with fingerprint {8:016x}"
    assert (line in capfd.readouterr().err) == (other == 1)


def test_a_set_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A part of a run on a cluster opens its set for the first time here."""
    context = RunContext.from_config(make_config(tmp_path / "none", output=str(tmp_path / "run")), digest="0123")
    with pytest.raises(DataError, match=r"none has no manifest\.json: no shards were ever committed there"):
        prepare(context, Folders.from_home(tmp_path / "run"), computes=True, home=None, write=False)
    assert not list((tmp_path / "run").iterdir())


def test_threads_replace_a_dead_fork_server_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread would wait for a process of which the first one has the exit status."""
    server = ForkServer()
    state = SimpleNamespace(_forkserver_pid=os.getpid())
    is_free: list[bool] = []

    def try_lock() -> None:
        if fork_server._START_LOCK.acquire(blocking=False):
            fork_server._START_LOCK.release()
            is_free.append(True)

    def wait_for_end(pid: int, options: int) -> tuple[int, int]:
        other = threading.Thread(target=try_lock)
        other.start()
        other.join()
        return pid, signal.SIGKILL

    monkeypatch.setattr(forkserver, "_forkserver", state)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: None)
    monkeypatch.setattr(server, "_forget", lambda: None)
    monkeypatch.setattr(os, "waitpid", wait_for_end)
    server.ensure()
    assert (server.losses, is_free) == (["killed by SIGKILL"], [])


@pytest.mark.full
def test_a_role_that_cannot_be_forked_is_tried_again(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [3]

    def child(name: str, *arguments: object) -> Child:
        if name == "worker-1" and left[0]:
            left[0] -= 1
            raise ProcessKilledError("worker-1 could not be started")
        return Child(name, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("trainer.launch.role_processes.Child", child)
    run = train_here(shards, tmp_path / "run", *COMMON, "--steps", 5, "--protocol", "bsp")
    assert (run.result()["cause"], left) == ("finished", [0])


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("trainer.launch.fork_server.FORK_SERVER.ensure", OSError(errno.EAGAIN, "no process is free")),
        ("multiprocessing.context.ForkServerContext.Pipe", OSError(errno.EMFILE, "no descriptor is free")),
        ("threading.Timer.start", RuntimeError("no thread is free")),
    ],
)
def test_a_host_without_resources_starts_a_role_later(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server, "SETTLE_S", 0.0)
    monkeypatch.setattr(FORK_SERVER, "ensure", lambda: None)
    monkeypatch.setattr(place, Mock(side_effect=error))
    before = psutil.Process().num_fds()
    with pytest.raises(ProcessKilledError, match=r"^nobody could not be started, tried 5 times: .*no \w+ is free$"):
        Child("nobody", tmp_path / "log", "time")
    assert psutil.Process().num_fds() == before


@pytest.mark.full
def test_a_frozen_fork_server_is_killed_and_another_one_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = FORK_SERVER.kill

    def kill_once() -> None:
        """Whoever takes the frozen one's place may take long to import torch."""
        monkeypatch.setattr(fork_server, "START_S", 120.0)
        kill()

    monkeypatch.setattr(FORK_SERVER, "kill", kill_once)
    monkeypatch.setattr(fork_server, "START_S", 2.0)
    FORK_SERVER.ensure()
    FORK_SERVER.losses.clear()
    assert FORK_SERVER.pid
    os.kill(FORK_SERVER.pid, signal.SIGSTOP)
    child = Child("nobody", tmp_path / "log", "time")
    child.join()
    assert "'time' has no attribute 'main'" in child.cause()
    child.kill()
    assert set(FORK_SERVER.losses) == {"killed by SIGKILL"}


def test_an_exit_before_the_end_is_a_failure(tmp_path: Path) -> None:
    """Report a process as failed that a library ends with exit code 0 while a step computes."""
    child = Child("nobody", tmp_path / "log", "tests.support.leaving")
    child.join()
    assert (child.exit_code(), child.cause()) == (UNFINISHED, "exit code 0 before its work was done")
    child.kill()


def test_a_role_has_the_environment_of_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server may have been started before the program changed its environment."""
    FORK_SERVER.ensure()
    for width in ("8", "16"):
        monkeypatch.setenv("WIDTH_OF_A_NET", width)
        child = Child("reader", tmp_path / width, "tests.support.leaving_note", str(tmp_path / f"{width}.txt"))
        child.join()
        assert child.exit_code() == 0, child.cause()
        child.kill()
    assert [(tmp_path / f"{width}.txt").read_text() for width in ("8", "16")] == ["8", "16"]


def test_starts_in_several_threads_leave_the_program_alone(tmp_path: Path) -> None:
    before, main = dict(os.environ), sys.modules["__main__"]
    texts = [tmp_path / f"{number}.txt" for number in range(4)]
    children: list[Child] = []

    def begin(text: Path) -> None:
        children.append(Child("reader", text.with_suffix(".log"), "tests.support.leaving_note", str(text)))

    threads = [threading.Thread(target=begin, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for child in children:
        child.join()
        child.kill()
    assert all(text.exists() for text in texts)
    assert sys.modules["__main__"] is main
    assert dict(os.environ) == before


# --- hung threads -----------------------------------------------------------------------------------------------------

HANGS = """
import os, time, torch
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from trainer.protocols.bsp import BSP

HERE = Path(__file__).parent

def hang_once(role):
    with suppress(FileNotFoundError):
        if Path("/proc/self/comm").read_text().strip() == role:
            os.unlink(HERE / role)
            time.sleep(1000)

class Model(torch.nn.Module):
    def __init__(self, numbers, classes):
        super().__init__()
        self.linear = torch.nn.Linear(numbers, classes)

    def forward(self, images):
        if len(images) > 2:  # not when the model is checked
            hang_once("worker-1")
            hang_once("evaluator-0")
        return self.linear(images.flatten(1))

def build(image_shape, num_classes):
    channels, height, width = image_shape
    return Model(channels * height * width, num_classes)

@dataclass(frozen=True)
class Hanging(BSP):
    name: ClassVar[str] = "hanging"

    def update_size(self, num_workers):
        hang_once("server-0")
        return super().update_size(num_workers)
"""


@pytest.mark.full
def test_whoever_hangs_though_it_has_a_pulse_is_started_again(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker in a step, server 0 in a decision, the evaluator in a batch: each once."""
    roles = ("worker-1", "server-0", "evaluator-0")
    (tmp_path / "hanging_parts_of_a_test.py").write_text(HANGS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PROTOCOLS, "hanging", importlib.import_module("hanging_parts_of_a_test").Hanging)
    flags = ("--model", "hanging_parts_of_a_test:build", "--steps", 60, "--stall-timeout-s", 15)
    calm = train_here(shards, tmp_path / "calm", *COMMON, *flags, "--protocol", "hanging")
    assert not calm.events("restart")
    for role in roles:
        (tmp_path / role).touch()
    run = train_here(shards, tmp_path / "run", *COMMON, *flags, "--protocol", "hanging")
    np.testing.assert_array_equal(run.vector(), calm.vector())
    found = {f"{event['role']}-{event['index']}": event["cause"] for event in run.events("restart")}
    assert found == dict.fromkeys(roles, "no progress for 15 s")
    assert [event["epoch"] for event in run.events("eval")] == [1, 2]


STARTS_SLOWLY = """
import ctypes
from pathlib import Path
import torch

def build(image_shape, num_classes):
    if Path("/proc/self/comm").read_text().startswith("worker"):
        ctypes.PyDLL(None).sleep(3)  # no other thread of Python runs meanwhile
    channels, height, width = image_shape
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(channels * height * width, num_classes))
"""


@pytest.mark.full
def test_a_worker_may_start_without_heartbeats(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block all threads of a worker for longer than all-reduce's 2 s, as the loading of CUDA does."""
    (tmp_path / "slow_start_of_a_test.py").write_text(STARTS_SLOWLY)
    monkeypatch.syspath_prepend(tmp_path)
    flags = ("--model", "slow_start_of_a_test:build", "--steps", 4, "--exchange", "all-reduce")
    run = train_here(shards, tmp_path / "run", *COMMON, *flags)
    assert not run.events("restart")


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_failures_are_in_a_row_until_there_is_progress() -> None:
    restarts, row = Restarts(), []
    for version in (7, 7, 7, 8, 8, 3, 8, 9):  # a roll-back to 3, and what is done again after it, is no progress
        row.append(restarts.failed("worker-1", version))
    assert row == [1, 2, 3, 1, 2, 3, 4, 1]
    assert restarts.failed("worker-2", 9) == 1, "each has a row of its own"


def test_failures_count_alike_however_far_apart_they_are() -> None:
    """In virtual time: (how long it lives, updates of the run meanwhile) -> when its sixth restart would be."""

    def given_up_at(life_s: float, updates: int) -> float | None:
        restarts, now, version = Restarts(), 0.0, 0
        for _ in range(1000):
            now, version = now + life_s, version + updates
            failures = restarts.failed("worker-1", version)
            if failures > 5:
                return now
            now += pause_s(failures)
        return None

    pauses = 0 + 1 + 2 + 4 + 8
    assert given_up_at(0.1, 0) == pytest.approx(6 * 0.1 + pauses)
    assert given_up_at(61, 0) == pytest.approx(6 * 61 + pauses)
    assert given_up_at(0.1, 1) is None


def test_pauses_before_restarts_double_up_to_a_limit() -> None:
    assert [pause_s(failures) for failures in (1, 2, 3, 4, 5, 6, 7, 100_000)] == [0, 1, 2, 4, 8, 16, 30, 30]


@pytest.mark.full
def test_a_run_that_rolls_back_without_progress_ends(start: Start) -> None:
    """Two servers die by turns, so neither does it often."""
    flags = (*SLOW, "--protocol", "bsp", "--servers", 3, "--steps", 100_000, "--checkpoint-every-s", 1000)
    run = start(*flags, "--no-epoch-checkpoints", "--max-restarts", 3)
    run.wait_for_updates(50)
    for server in (1, 2, 1, 2):
        before = run.generation()
        run.send(f"server-{server}")
        until(partial(run.trains_after, before), "it trains again")
    assert run.wait() == 1
    line = run.said().splitlines()[-1]
    assert line.startswith("error: the run went back to a checkpoint 4 times in a row without progress"), line
    assert "server 2 was started again" in line


# --- the end of an interrupted run ------------------------------------------------------------------------------------


def test_patience_ends_a_while_after_the_last_change() -> None:
    waits = Patience(10, now=100)
    assert [waits.is_over(size, now) for size, now in ((0, 101), (0, 111), (5, 115), (6, 124), (6, 134))] == [False] * 5
    assert waits.is_over(6, 134.1)


@pytest.mark.full
def test_a_sigterm_to_every_process_of_a_run_leaves_a_checkpoint(start: Start) -> None:
    """As schedulers send it."""
    flags = (*SLOW, "--protocol", "bsp", "--servers", 2, "--steps", 100_000)
    run = start(*flags, "--checkpoint-every-s", 1000, "--no-epoch-checkpoints")
    run.wait_for_updates(20)
    os.killpg(run.process.pid, signal.SIGTERM)
    assert run.wait() == 1
    assert whole(run.output / "checkpoints")[-1] >= 20
    assert f"interrupted at version {whole(run.output / 'checkpoints')[-1]} " in run.said()


@pytest.mark.full
def test_ctrl_c_waits_while_a_checkpoint_is_being_written(start: Start) -> None:
    """Server 0 stands still for longer than nothing may be written, while a file grows beside its own."""
    flags = (*SLOW, "--protocol", "bsp", "--servers", 2, "--steps", 100_000, "--checkpoint-every-s", 1000)
    run = start(*flags, "--no-epoch-checkpoints", "--heartbeat-timeout-s", 1000)
    run.wait_for_updates(20)
    server = run.send("server-0", signal.SIGSTOP)
    os.kill(run.process.pid, signal.SIGINT)
    with open(run.output / "checkpoints" / "slow", "wb", buffering=0) as file:
        for _ in range(24):
            file.write(b"x")
            time.sleep(0.5)
    assert run.process.poll() is None, run.said()
    os.kill(server, signal.SIGCONT)
    assert run.wait() == 1
    assert whole(run.output / "checkpoints")[-1] >= 20
