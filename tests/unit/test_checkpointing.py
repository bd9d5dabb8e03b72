"""Checkpoints while a run goes on: slow disks, disks that refuse, histories that were left, numbers that are none."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from pipeline.core.errors import DataError, JobError
from tests.support.configs import make_config
from tests.support.server_processes import START, Served
from tests.support.trainer_runs import until
from trainer import Options
from trainer.checkpoints.prune import WAITING
from trainer.checkpoints.read import newest, read_state, read_vector, unevaluated, versions, whole
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_state
from trainer.config import RunFacts
from trainer.context import RunContext
from trainer.home.folders import Folders
from trainer.leader import snapshots
from trainer.lifecycle.prepare import ensure_checkpoint
from trainer.run_files import CHECKPOINTS, METRICS, PUSHES
from trainer.runlog.kinds.run import WarningEvent
from trainer.runlog.read import read_events, read_pushes
from trainer.runlog.result import read_result, summarise
from trainer.simulate import simulate
from trainer.simulation.compute import MiniBatchResult, Quadratic, facts_of
from trainer.simulation.engine import Engine
from trainer.simulation.failures import parse_failures
from trainer.simulation.options import SimulationSettings
from trainer.transport.addresses import local_addresses
from trainer.transport.messages.heads import pack
from trainer.transport.messages.supervisors import End

T = TypeVar("T")
WORKERS, ROWS = 4, 400
TOY: dict[str, Any] = {"batch_size": 40, "learning_rate": 0.1, "checkpoint_every_s": 1e6}
SLOW_DISK = """
import os, time
write = os.fsync
def slow(descriptor):
    if "slice-" in os.readlink(f"/proc/self/fd/{descriptor}"):
        time.sleep(8)
    write(descriptor)
os.fsync = slow
"""


class SlowDisk:
    """A server's work that is done when the test lets it."""

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[[], Any], Callable[[Any], None]]] = deque()

    def submit(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        self.jobs.append((work, done))

    def step(self) -> None:
        work, done = self.jobs.popleft()
        done(work())


class Slow:
    """A virtual run whose servers have a slow disk each. observe(run) is called after every event."""

    def __init__(self, output: Path, observe: Callable[[Slow], None] = lambda _: None, **values: Any) -> None:
        config = make_config("", output, **TOY | {"epoch_checkpoints": False} | values)
        machines = SimulationSettings(compute="quadratic", workers=WORKERS, rows=ROWS)
        compute = Quadratic(RunContext.from_config(config, output), WORKERS)
        facts = facts_of(compute, WORKERS, ROWS)
        ensure_checkpoint(config, facts, compute.start(), output)
        self.root = output / CHECKPOINTS
        self.engine = Engine(config, facts, machines, compute, Folders.from_home(output), lambda _: observe(self))
        self.disks = [SlowDisk() for _ in self.engine.servers]
        for server, disk in zip(self.engine.servers, self.disks, strict=True):
            server.work = disk
        self.engine.leader.work = self.disks[0]

    @property
    def under_way(self) -> list[int]:
        training = self.engine.leader.training
        return [found.state.version for found in training.snapshots.under_way.values()] if training else []

    def settle(self) -> None:
        """The disks do all that waits, followers' first."""
        while any(disk.jobs for disk in self.disks):
            for disk in reversed(self.disks):
                if disk.jobs:
                    disk.step()


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    run = Slow(tmp_path, steps=30, servers=2, checkpoint_every_s=0.5)
    run.engine.run()
    status = run.engine.status()
    assert status.version == 30 * WORKERS
    assert not status.finished
    assert len(run.under_way) == 2, "one of the clock, which lets no other begin, and the final one"
    assert whole(run.root) == [0]
    run.settle()
    assert run.engine.status().finished
    assert read_state(run.root, 120).final
    assert len(whole(run.root)) == 2
    left, now = run.root / "00000120", np.concatenate([part.slice.values for part in run.engine.servers])
    assert left.is_dir()
    np.testing.assert_array_equal(read_vector(run.root, 120), now)


def test_a_late_checkpoint_has_the_parameters_of_its_order(tmp_path: Path) -> None:
    late = Slow(tmp_path / "late", steps=30, servers=2, checkpoint_every_s=0.5, protocol="bsp")
    late.engine.run()
    version = late.under_way[0]
    late.settle()
    short = Slow(tmp_path / "short", steps=version, protocol="bsp")
    short.engine.run()
    short.settle()
    np.testing.assert_array_equal(read_vector(late.root, version), read_vector(short.root, version))


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    """One of another momentum; one that says nothing of itself is taken."""
    other = Slow(tmp_path / "other", steps=3, momentum=0.25)
    other.engine.run()
    other.settle()
    config = make_config("", tmp_path / "other", **TOY | {"epoch_checkpoints": False, "steps": 9, "momentum": 0.5})
    facts, start = RunFacts(WORKERS, ROWS, 64, 0), np.ones(64, np.float32)
    with pytest.raises(DataError, match=r"00000012 is of a run with --momentum 0\.25, not 0\.5"):
        ensure_checkpoint(config, facts, start, tmp_path / "other")
    for identity in ("{}", "damaged", "3"):
        write_state(folder_of(other.root, 12), replace(read_state(other.root, 12), identity=identity))
        ensure_checkpoint(config, facts, start, tmp_path / "other")
    with pytest.raises(DataError, match=r"00000012 has 64 values .* this run has 72: the model"):
        ensure_checkpoint(config, replace(facts, num_buffers=8), np.ones(72, np.float32), tmp_path / "other")


def test_a_slow_disk_skips_no_end_of_an_epoch(tmp_path: Path) -> None:
    most = 0

    def observe(run: Slow) -> None:
        nonlocal most
        most = max(most, len(run.under_way))
        if len(run.under_way) == 2 or not run.engine.queue:
            for disk in reversed(run.disks):
                if disk.jobs:
                    disk.step()
            run.engine.leader.keep(run.engine.now)

    run = Slow(tmp_path, observe, epochs=12, epoch_checkpoints=True, checkpoint_every_s=0.3, servers=2)
    run.engine.run()
    run.settle()
    assert most == 2
    assert [state.epoch_boundary for state in unevaluated(run.root)] == list(range(1, 13))


def test_what_a_checkpoint_counts_is_logged_before_it_can_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, write = [], write_state

    def checked(folder: Path, state: RunState) -> None:
        logged = read_pushes(tmp_path / PUSHES)
        assert (logged["accepted"] == 1).sum() >= state.accepted
        written.append(state.version)
        write(folder, state)

    monkeypatch.setattr(snapshots, "write_state", checked)
    values = {"steps": 20, "servers": 2, "checkpoint_every_s": 0.3, "epoch_checkpoints": True}
    simulate(
        make_config("", tmp_path, **TOY | values), SimulationSettings(compute="quadratic", workers=4, rows=400), QUIET
    )
    assert len(written) > 5
    assert written[-1] == 80


@pytest.mark.full
def test_a_server_with_a_frozen_disk_trains_and_loses_no_worker(tmp_path: Path) -> None:
    patience: dict[str, Any] = {"heartbeat_timeout_s": 2.5, "epoch_checkpoints": False}
    served = Served(tmp_path, 2, local_addresses(f"slow-{time.time_ns()}", 2), start=SLOW_DISK + START, **patience)
    try:
        worker = served.worker()
        worker.step()
        served.asker.send_multipart([pack(End()), served.agreement.introduction()])
        served.asker.recv_multipart()
        root = tmp_path / CHECKPOINTS
        session = worker.client.session
        end = time.monotonic() + 3
        while time.monotonic() < end:
            worker.step()
        assert whole(root) == [0], "it is still being written"
        assert worker.client.session == session, "nobody had to join again"
        assert served.status()["version"] > 5
        until(lambda: whole(root)[-1] > 0, "it is written")
        worker.check()
        worker.client.close()
    finally:
        served.end()


def test_a_thawed_server_listens_before_it_drops_a_worker(tmp_path: Path) -> None:
    run = Slow(tmp_path, steps=100, heartbeat_timeout_s=10.0)
    leader = run.engine.leader
    run.engine._recover(first=True)
    for tick in range(20):
        leader.tick(1.0 + tick)
        for worker in range(WORKERS):
            leader.alive(worker, 1, 1.0 + tick)
    leader.tick(100.0)
    assert leader.status(100.0).alive == WORKERS, "what they said meanwhile is still to be read"
    for tick in range(15):
        leader.alive(0, 1, 100.0 + tick)
        leader.tick(100.0 + tick)
    assert leader.status(115.0).alive == 1, "the others said nothing"


QUIET = Options(silent=True, report=False)


def virtual(output: Path, **values: Any) -> Any:
    machines: dict[str, Any] = {"compute": "quadratic", "workers": WORKERS, "rows": ROWS}
    machines |= {key: values.pop(key) for key in list(values) if key in SimulationSettings.__dataclass_fields__}
    return simulate(
        make_config("", output, **TOY | {"epoch_checkpoints": False} | values), SimulationSettings(**machines), QUIET
    )


def test_no_old_generation_completes_a_checkpoint(tmp_path: Path) -> None:
    """Server 1 comes to its part of the old history's checkpoint last; the new history has one of the same version."""

    def observe(run: Slow) -> None:
        if run.under_way and not run.engine.leader.training.coordinator.finished:  # type: ignore[union-attr]
            run.disks[0].step()  # server 0's part, and nobody else's
            stale.append(run.disks[1].jobs.popleft())
            raise StopIteration

    stale: list[Any] = []
    run = Slow(tmp_path, observe, steps=10, servers=2, checkpoint_every_s=0.5)
    with pytest.raises(StopIteration):
        run.engine.run()
    (version,) = run.under_way
    for disk in run.disks:
        disk.jobs.clear()
    run.engine.leader.begin_generation("a server was started again")
    assert newest(run.root) == 0
    work, done = stale[0]
    done(work())
    assert whole(run.root) == [0]
    assert not list(folder_of(run.root, version).glob("slice-001*"))


@pytest.mark.parametrize("refused", ["rmtree", "unlink"])
def test_a_history_that_cannot_be_deleted_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """As on a file system that hosts share: what somebody still has open cannot be deleted."""
    calm = virtual(tmp_path / "calm", protocol="bsp", steps=30)

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY if refused == "rmtree" else errno.ESTALE, "refused")

    unlink = Path.unlink
    if refused == "rmtree":
        monkeypatch.setattr(shutil, "rmtree", busy)
    else:
        monkeypatch.setattr(
            Path, "unlink", lambda path, **more: busy() if path.name == "state.json" else unlink(path, **more)
        )
    run = virtual(
        tmp_path / "run",
        protocol="bsp",
        steps=30,
        servers=2,
        checkpoint_every_s=0.4,
        failures=parse_failures("server@1.1+1,server@3.5+1"),
    )
    assert run.rollbacks == 2
    root = tmp_path / "run" / CHECKPOINTS
    last = newest(root, verify=True)
    assert last == 30
    np.testing.assert_array_equal(read_vector(root, 30), read_vector(tmp_path / "calm" / CHECKPOINTS, 30))
    monkeypatch.undo()
    assert calm.updates == run.updates


def test_no_run_resumes_from_a_discarded_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Slow(tmp_path, steps=10, protocol="bsp", checkpoint_every_s=0.3)
    run.engine.run()
    run.settle()
    assert newest(run.root) == 10
    broken = next(folder_of(run.root, 10).glob("slice-*"))
    content = broken.read_bytes()
    broken.write_bytes(content[:-1])
    monkeypatch.setattr(shutil, "rmtree", lambda folder: None)
    monkeypatch.setattr(Path, "unlink", lambda path, **more: None)
    run.engine.leader.begin_generation("a test")
    back = run.engine.leader.version
    assert 0 < back < 10
    broken.write_bytes(content)  # the host that held it is back
    assert newest(run.root, verify=True) == back
    assert [state.version for state in unevaluated(run.root)] == []


def test_a_refusing_file_system_costs_a_try_and_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Slow(tmp_path, steps=10)
    run.engine._recover(first=True)
    scan = os.scandir

    def stale(path: Any) -> Any:
        if Path(path) == run.root:
            raise OSError(errno.ESTALE, "Stale file handle")
        return scan(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", stale)
        run.engine.leader.begin_generation("a test")
        run.engine.leader.tick(1.0)
        assert not run.engine.leader.status(1.0).ready
    run.engine.leader.tick(2.0)
    assert run.engine.leader.status(2.0).ready


def test_a_run_with_unreadable_checkpoints_is_refused(tmp_path: Path) -> None:
    run = Slow(tmp_path, steps=10, checkpoint_every_s=0.3)
    run.engine.run()
    run.settle()
    for path in run.root.glob("*/slice-*"):
        path.rename(path.with_name("slice-000-of-001.safetensors"))
    with pytest.raises(DataError, match="--overwrite"):
        ensure_checkpoint(run.engine.config, RunFacts(WORKERS, ROWS, 64, 0), np.ones(64, np.float32), tmp_path)


@pytest.mark.full
def test_the_result_counts_checkpoints_without_an_evaluation(
    tmp_path: Path,
) -> None:
    run = Slow(tmp_path, lambda run: run.settle(), epochs=WAITING + 7, epoch_checkpoints=True)
    run.engine.run()
    run.settle()
    assert [state.epoch_boundary for state in unevaluated(run.root)] == list(range(8, WAITING + 8))
    assert len(versions(run.root)) == WAITING
    events = read_events(tmp_path / METRICS)
    (warning,) = (event.message for event in events if isinstance(event, WarningEvent))
    assert "wait for the evaluator" in warning
    assert summarise(events, read_pushes(tmp_path / PUSHES))["evaluations_given_up"] == 7


@pytest.mark.parametrize(("servers", "at"), [(1, 63), (2, 0), (2, 63)])
def test_a_last_update_of_nan_ends_a_virtual_run_as_diverged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, servers: int, at: int
) -> None:
    step = Quadratic.step

    def bad(self: Quadratic, worker: int, clock: int, parameters: Any) -> MiniBatchResult:
        found = step(self, worker, clock, parameters)
        if clock == 9:
            found.vector[at] = np.nan
        return found

    monkeypatch.setattr(Quadratic, "step", bad)
    with pytest.raises(JobError, match=f"diverged.*server {servers - 1 if at else 0}.*version 10"):
        virtual(tmp_path, steps=10, protocol="bsp", servers=servers, checkpoint_every_s=0.3)
    assert read_result(tmp_path).cause == "failed"
    last = newest(tmp_path / CHECKPOINTS, verify=True)
    assert last
    assert last < 10
    assert np.isfinite(read_vector(tmp_path / CHECKPOINTS, last)).all()
