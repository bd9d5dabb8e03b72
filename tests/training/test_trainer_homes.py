"""Whole runs whose folder is on HDFS or in an object store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.assignment.speeds import measured_ratios
from pipeline.core.storage.local import LocalFiles
from tests.clusters import free_ports
from tests.support.places import STORE, put
from tests.support.slow_model import SLOW
from tests.support.trainer_runs import ROOT, Training, train_here, until
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.unit.test_checkpoint import state_of, write
from trainer.checkpoints.prune import prune
from trainer.checkpoints.read import newest, read_state, read_vector, unevaluated, whole
from trainer.checkpoints.write import mark_evaluated
from trainer.evaluation import process as evaluation
from trainer.home import lease, work
from trainer.home.place import StorePlace, listing, write_whole
from trainer.home.segments import begin_start, copy
from trainer.report.page import write_report
from trainer.run_files import CHECKPOINTS, METRICS, PUSHES, SEGMENTS
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.run import StartEvent
from trainer.runlog.kinds.training import LoadedEvent
from trainer.runlog.read import best, evaluations
from trainer.runlog.result import is_best_of, read_result
from trainer.runlog.run_folder import OWNED
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay

BSP = (
    *("--model", "logistic", "--batch-size", 8, "--threads", 1, "--protocol", "bsp", "--servers", 2),
    *("--recipe", "constant", "--steps", 80),
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("homes"), [rows_of(30, 2), rows_of(50, 3, 100)], EVAL_ROWS)


class Far(Training):
    """A run whose output is elsewhere."""

    def __init__(self, shards: Path | str, home: StorePlace, tmp_path: Path, *flags: object) -> None:
        super().__init__(shards, tmp_path / "said", *flags, "--output", home)  # the last one counts
        self.home = home

    def vector(self) -> Any:
        version = newest(self.home / CHECKPOINTS, verify=True)
        assert version is not None
        return read_vector(self.home / CHECKPOINTS, version)

    def wait_for_checkpoint(self, version: int) -> None:
        root = self.home / CHECKPOINTS
        until(lambda: any(found >= version for found in whole(root)) or self.process.poll() is not None, "a checkpoint")
        assert self.process.poll() is None, self.said()


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where the BSP run of these tests ends in a local folder."""
    return train_here(shards, tmp_path_factory.mktemp("undisturbed") / "run", *BSP, "--no-report").vector()


def one_line(run: Training) -> str:
    lines = [line for line in run.said().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, run.said()
    assert "Traceback" not in run.said()
    return lines[0]


@pytest.mark.full
@pytest.mark.parametrize("place", ["hdfs"], indirect=True)  # on S3: tests/training/test_follow.py
def test_a_killed_run_on_a_store_resumes_to_the_local_bits(
    shards: Path, place: str, tmp_path: Path, runs: list[Training]
) -> None:
    home = StorePlace(place, STORE)
    killed = Far(shards, home, tmp_path, *BSP, *SLOW, "--steps", 100_000, "--heartbeat-timeout-s", 600, "--tensorboard")
    runs.append(killed)
    killed.wait_for_checkpoint(30)
    for worker in ("worker-0", "worker-1"):
        killed.send(worker, signal.SIGSTOP)
    second = Far(shards, home, tmp_path, *BSP, *SLOW, "--resume")
    runs.append(second)
    assert second.wait() == 1
    assert "is in use by a run that has not ended" in one_line(second)
    killed.end()
    last = newest(home / CHECKPOINTS)
    assert last is not None
    steps = last + 20
    flags = (*BSP, *SLOW, "--steps", steps)
    local = train_here(shards, tmp_path / "local", *flags, "--no-report")
    resumed = Far(shards, home, tmp_path, *flags, "--tensorboard", "--resume")
    runs.append(resumed)
    assert resumed.wait() == 0, resumed.said()
    np.testing.assert_array_equal(resumed.vector(), local.vector())
    result = read_result(home)
    assert (result.cause, result.updates, result.examples) == ("finished", steps, 8 * steps)
    assert [event.resumed_from for event in result.events() if isinstance(event, StartEvent)][-1] == last
    pushes = result.pushes()
    assert (len(pushes), set(Counter(pushes["worker"]).values())) == (2 * steps, {steps})
    assert sorted(result.weights()) == ["1.bias", "1.weight"]
    assert len(evaluations(result.events())) == steps // 10
    top = best(evaluations(result.events()))
    assert top
    assert is_best_of(home, top)
    assert [name for name in listing(home) if not OWNED.fullmatch(name)] == []
    assert [name for name in listing(home) if name.startswith(SEGMENTS)] == [f"{SEGMENTS}/000002.settled"]
    assert b"Traceback" not in (home / "logs" / "server-0.log").read_bytes()

    check_board(home, tmp_path, result.events())
    assert write_report(home).read_bytes().startswith(b"<!")
    assert replay(home).is_equal
    assert len(measured_ratios(place)) == 2
    assert parse_profile(f"trace:{place}").seconds(1.0, 0, 1, 3) > 0

    before = {name: (home / name).read_bytes() for name in listing(home) if not name.startswith(".lease")}
    for more, code, part in (
        ((), 0, "finished already"),
        (("--seed", 1), 2, "holds a run with --seed 0, not 1"),
        (("--resume", "--servers", 1), 0, "finished already"),
    ):
        again = Far(shards, home, tmp_path, *flags, *more)
        runs.append(again)
        assert again.wait() == code, again.said()
        assert part in again.said()
    assert {name: (home / name).read_bytes() for name in listing(home) if not name.startswith(".lease")} == before

    put(f"{place}/thesis.tex", b"mine")
    refused = Far(shards, home, tmp_path, *BSP, "--overwrite")
    runs.append(refused)
    assert refused.wait() == 2
    assert "holds thesis.tex, which no run wrote" in one_line(refused)
    STORE.delete(f"{place}/thesis.tex")
    anew = Far(shards, home, tmp_path, *BSP, "--overwrite", "--steps", 5, "--seed", 1, "--no-report")
    runs.append(anew)
    assert anew.wait() == 0, anew.said()
    assert (read_result(home).updates, read_result(home).seed) == (5, 1)
    assert not [name for name in listing(home) if name.startswith(("tensorboard", "report"))]


def check_board(home: StorePlace, tmp_path: Path, events: list[LogEvent]) -> None:
    """TensorBoard reads the figures of the run's events."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "board"
    folder.mkdir()
    for name in listing(home / "tensorboard"):
        (folder / name).write_bytes((home / "tensorboard" / name).read_bytes())
    found = accumulators.EventAccumulator(str(folder))
    found.Reload()
    measured = {point.step: point.value for point in found.Scalars("evaluation/accuracy")}
    expected = {event.version: event.accuracy for event in evaluations(events)}
    assert set(measured) == set(expected)
    assert all(measured[version] == pytest.approx(expected[version]) for version in measured)


@pytest.mark.full
def test_hosts_that_share_only_hdfs_end_with_the_bits_of_one(
    shards: Path, undisturbed: Any, hdfs: Any, tmp_path: Path, runs: list[Training]
) -> None:
    home = StorePlace(f"{hdfs.uri}/two-hosts/run", STORE)
    where = ",".join(f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    (tmp_path / "token").write_text("0123456789abcdef\n")
    common = (*BSP, "--addresses", where, "--token-file", tmp_path / "token", "--no-report", "--same-host", "socket")
    for roles in ("server:0,worker:0", "server:1,worker:1,evaluator"):
        runs.append(Far(shards, home, tmp_path, *common, "--roles", roles))
    leading, following = runs
    for run in (leading, following):
        assert run.wait() == 0, run.said()
    np.testing.assert_array_equal(Far.vector(leading), undisturbed)  # type: ignore[arg-type]
    result = read_result(home)
    assert (result.cause, result.updates) == ("finished", 80)
    assert sorted(event.worker for event in result.events() if isinstance(event, LoadedEvent))[:1] == [0]
    state = read_state(home / CHECKPOINTS, 80)
    assert state.final
    assert unevaluated(home / CHECKPOINTS) == [], "the evaluator of the other host came to all"
    assert result.weights()
    assert {"server-0.log", "server-1.log", "evaluator-0.log"} <= set(listing(home / "logs"))


# --- what cannot be ---------------------------------------------------------------------------------------------------


def trainer(shards: Path, output: str, **environment: str | None) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in (os.environ | environment).items() if value is not None}
    command = [sys.executable, "-m", "trainer", "--shards", str(shards), "--output", output, *map(str, BSP)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)


def error_of(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_where_no_namenode_answers_the_address_is_told(shards: Path) -> None:
    port = free_ports(1)[0]
    line = error_of(trainer(shards, f"hdfs://127.0.0.1:{port}/run"), 1)
    assert f"hdfs://127.0.0.1:{port}" in line
    assert "check that HDFS is up" in line


@pytest.mark.full
def test_a_foreign_folder_or_a_file_on_hdfs_is_refused(shards: Path, hdfs: Any) -> None:
    put(f"{hdfs.uri}/refused/file", b"mine")
    hdfs.client().set_permission("/refused", "755")
    before = listing(StorePlace(f"{hdfs.uri}/refused", STORE))
    assert "is not a folder" in error_of(trainer(shards, f"{hdfs.uri}/refused/file"), 2)
    denied = error_of(trainer(shards, f"{hdfs.uri}/refused/run", HADOOP_USER_NAME="alice"), 1)
    assert "Permission denied" in denied
    assert listing(StorePlace(f"{hdfs.uri}/refused", STORE)) == before
    unfit = trainer(shards, f"{hdfs.uri}/refused/new/run")
    assert unfit.returncode == 0, unfit.stderr


@pytest.mark.full
@pytest.mark.parametrize("place", [pytest.param("s3", marks=pytest.mark.full)], indirect=True)
def test_a_bucket_without_keys_is_refused(shards: Path, place: str) -> None:
    line = error_of(
        trainer(shards, place, AWS_ACCESS_KEY_ID=None, AWS_SECRET_ACCESS_KEY=None, AWS_EC2_METADATA_DISABLED="true"), 1
    )
    assert "AWS_ACCESS_KEY_ID" in line


def test_a_start_that_is_refused_leaves_no_trace(shards: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from trainer.runlog.run_folder import prepare_folder\n"
        "from trainer.runlog.run_record import RunRecord\n"
        "from tests.support.configs import make_config\n"
        "from trainer.home.place import StorePlace; from pipeline.core.storage.store import Store\n"
        "from pipeline.core.errors import UsageError\n"
        "home, record = StorePlace(sys.argv[1], Store()), RunRecord(make_config(), 2, 80, 'digest')\n"
        "def refuse(record, saved): raise UsageError('no GPU')\n"
        "try:\n"
        "    with prepare_folder(home, record, resume=False, overwrite=False, check=refuse): pass\n"
        "except UsageError as error: print(error)\n"
        "with prepare_folder(home, record, resume=False, overwrite=False) as start:\n"
        "    print(start.value, 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "home")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["no GPU", "new False"], done.stderr
    assert [name for name in listing(tmp_path / "home") if not name.startswith(".lease")] == ["config.json"]


# --- how often a store is asked ---------------------------------------------------------------------------------------

OPERATIONS = ("info", "list", "open", "read_range", "create", "makedirs", "makedir", "rename", "delete", "remove_empty")


def test_a_minute_costs_a_store_fewer_than_sixty_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two servers, the evaluator and their supervisor; in the steady state, after the first checkpoints."""
    home = StorePlace(str(tmp_path / "home"), STORE)
    (tmp_path / "work").mkdir()
    folders, held = begin_start(home, tmp_path / "work"), lease.Lease(home / ".lease")
    held.take()
    root, counts = folders.checkpoints, Counter[str]()

    def minute(version: int) -> None:
        with open(folders.work / METRICS, "a") as file:
            file.write(f"{version}\n")
        with open(folders.work / PUSHES, "a") as file:
            file.write(f"{version}\n")
        for _ in range(int(60 / lease.RENEW_S)):
            assert held.renew()
        for _ in range(int(60 / work.COPY_S)):
            copy(folders)
        write(root, state_of(version, epoch_boundary=version))
        prune(root)
        for _ in range(int(60 / evaluation.TOLD_POLL_S)):
            for state in unevaluated(root):
                read_vector(root, state.version)
                write_whole(home / "best.safetensors", b"model")
                with open(folders.work / METRICS, "a") as file:
                    file.write("evaluated\n")
                copy(folders, (METRICS,))
                mark_evaluated(root, state, 1 / version)
            is_best_of(home, EvaluationEvent(version=1))

    for name in OPERATIONS:
        monkeypatch.setattr(LocalFiles, name, counted(name, counts, getattr(LocalFiles, name)))
    for version in (1, 2, 3, 4):
        counts.clear()
        minute(version)
    assert counts.total() < 60, counts


def counted(name: str, counts: Counter[str], operation: Any) -> Any:
    def call(*args: Any) -> Any:
        counts[name] += 1
        return operation(*args)

    return call
