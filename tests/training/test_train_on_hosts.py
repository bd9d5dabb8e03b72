"""Runs over several hosts that a launcher starts: each a process of this machine, as if it were a host of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline.core.errors import JobError, UsageError
from tests.support.configs import make_config
from tests.support.slow_model import SLOW
from tests.support.tiers import only
from tests.support.trainer_runs import End, Training, train_here, until
from tests.unit.test_addresses import free_port
from trainer import train
from trainer.__main__ import main
from trainer.checkpoints.read import whole
from trainer.cluster.launcher import LaunchArguments, Part
from trainer.cluster.local import LocalLauncher
from trainer.options import Options
from trainer.report.metrics import RunMetrics, serve_metrics
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.run import StartEvent
from trainer.runlog.kinds.training import TrainEvent
from trainer.simulation.replay import replay

COMMON = ("--model", "logistic", "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1, "--no-report")
BSP = ("--protocol", "bsp", "--servers", 2, "--steps", 400, "--checkpoint-every-s", 0.5)
HOSTS = ("--hosts", 3, "--launcher", "local")
Start = Callable[..., Training]


@pytest.fixture(scope="module")
def undisturbed(undisturbed_end: Callable[[int], End]) -> End:
    """Where the BSP run of these tests ends on a single host."""
    return undisturbed_end(400)


def assert_equal_bits(run: Training, undisturbed: End) -> None:
    np.testing.assert_array_equal(run.vector(), undisturbed.vector)
    assert run.model_digest() == undisturbed.model


@pytest.fixture
def start(shards: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a run on three hosts, of which nothing is left behind, whatever the test does."""
    runs: list[Training] = []

    def begin(*flags: object) -> Training:
        runs.append(Training(shards, tmp_path / "run", *COMMON, *HOSTS, *flags))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def parts(run: Training) -> list[psutil.Process]:
    """The processes that stand for hosts, by their number."""
    found: dict[int, psutil.Process] = {}
    for process in run.family():
        with suppress(psutil.NoSuchProcess):
            if "trainer.cluster.child" in process.cmdline():
                found[process.pid] = process
    return [found[pid] for pid in sorted(found)]


def part_of(run: Training, role: str) -> psutil.Process:
    """The process of the host where a role runs: the parent of the process that the role was forked from."""
    server = psutil.Process(run.send(role, 0)).parent()
    assert server
    host = server.parent()
    assert host
    assert host in parts(run)
    return host


def mechanisms(pid: int) -> list[bytes]:
    """Return the security mechanisms that the greetings of a process's ZeroMQ servers name."""
    named = []
    for found in psutil.Process(pid).net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN:
            with socket.create_connection(found.laddr, timeout=30.0) as peer:
                # No more of a greeting than its version: who names another mechanism is hung up on.
                peer.sendall(b"\xff" + bytes(8) + b"\x7f\3")
                named.append(peer.makefile("rb").read(64)[12:32].rstrip(b"\0"))
    return named


# The flags of a run on hosts by exchange, one of every client, and the stages that its result names.
FLAGS: dict[str, tuple[object, ...]] = {
    "all-reduce": ("--same-host", "socket"),
    "sync-switch": ("--servers", 2, "--encryption", "off"),
    "d-psgd": ("--topology", "links.txt"),
}
STAGES = {"sync-switch": ["parameter-server"] * 2}


@pytest.mark.full
@pytest.mark.parametrize("exchange", FLAGS)
def test_an_exchange_has_the_bits_of_one_host_on_three(
    start: Start, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: str
) -> None:
    """A replay of its log has its bits; so has a run on one host, unless the order in which gradients come counts.

    Connections are encrypted unless --encryption off is given, and no process, line or file shows the run's token."""
    monkeypatch.chdir(tmp_path)
    Path("links.txt").write_text("0 1\n1 2\n")
    flags = ("--exchange", exchange, "--steps", 300, *FLAGS[exchange])
    run = start(*(tmp_path / flag if flag == "links.txt" else flag for flag in flags))
    run.wait_for_updates(10)
    named = [name for role in ("server-0", "worker-0") for name in mechanisms(run.send(role, 0))]
    assert set(named) == {b"PLAIN" if "off" in flags else b"CURVE"}
    assert mechanisms(run.process.pid) == [b"CURVE"], "the line to the starting process is always encrypted"
    readable = ""
    for process in run.family():
        with suppress(psutil.NoSuchProcess):
            readable += " ".join([*process.cmdline(), *process.environ().values()])
    assert run.wait() == 0, run.said()
    said = run.said()
    files = "".join(path.read_bytes().decode(errors="replace") for path in run.output.rglob("*") if path.is_file())
    assert not re.search(r"\b[0-9a-f]{64}\b", readable + said + files), "a token has so many digits"
    for line in ("host 0 has started on", "host 2 has started on"):
        assert line in said
    assert said.count("warning: --encryption off") == ("off" in flags)
    assert run.result()["cause"] == "finished"
    assert len(run.pushes()) == 3 * 300
    assert replay(run.output).is_equal
    if exchange in STAGES:
        assert [stage["exchange"] for stage in run.result()["stages"]] == STAGES[exchange]
    else:
        assert run.model_digest() == train_here(shards, tmp_path / "one", *COMMON, *flags, "--quiet").model_digest()
    until(lambda: not run.family(), "all processes end")


LOSSES = [("server-0", True, 2), ("worker-2", False, 3)]


@pytest.mark.parametrize(("role", "moves", "hosts"), only(LOSSES[:1], LOSSES))
def test_a_host_that_is_lost_is_replaced_and_the_bits_are_the_same(
    start: Start, undisturbed: End, role: str, moves: bool, hosts: int
) -> None:
    run = start(*BSP, "--hosts", hosts)
    run.wait_for_updates(100)
    until(lambda: whole(run.output / "checkpoints"), "a checkpoint is there")
    before = run.generation()
    part_of(run, role).kill()
    if moves:
        until(lambda: run.trains_after(before), "the servers go on from a checkpoint")
    assert run.wait() == 0, run.said()
    assert_equal_bits(run, undisturbed)
    lost = re.findall(r"host (\d) was lost, and is started again on", run.said())
    assert len(lost) == 1, run.said()
    until(lambda: not run.family(), "all processes end")


@pytest.mark.full
def test_a_run_goes_on_after_a_signal_and_after_a_killed_starter(start: Start, undisturbed: End) -> None:
    """The signal leaves a checkpoint. All processes end with their starter."""
    run = start(*BSP)
    run.wait_for_updates(100)
    run.process.terminate()
    assert run.wait() == 1
    assert re.search(r"error: interrupted at version \d+ .*--resume continues\n$", run.said()), run.said()
    until(lambda: not run.family(), "all processes end")
    version = max(whole(run.output / "checkpoints"))
    assert version >= 100
    second = start(*BSP, "--resume")
    until(lambda: len(second.events("start")) == 2, "the second start is logged")
    second.wait_for_updates(version + 10)
    second.process.kill()
    until(lambda: not second.family(), "every process on every host ends")
    again = start(*BSP, "--resume")
    assert again.wait() == 0, again.said()
    assert_equal_bits(again, undisturbed)
    assert again.result()["cause"] == "finished"
    resumed = [event["resumed_from"] for event in again.events("start")]
    assert resumed[1] == version
    assert resumed[2] >= version


@pytest.mark.full
def test_a_run_goes_on_with_a_host_that_was_frozen(start: Start) -> None:
    """Its supervisor was: it goes on by itself, or leaves for another attempt. A signal to all processes ends the run."""
    run = start(*SLOW, "--protocol", "bsp", "--steps", 1_000_000)
    run.wait_for_updates(10)
    host = part_of(run, "worker-2")
    host.suspend()
    until(lambda: "does not answer" in run.said(), "its silence is told of")
    host.resume()
    until(lambda: re.search("answers again|is started again", run.said()), "it is back")
    before = run.updates()
    run.wait_for_updates(before + 10)
    earlier = len(run.said())
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 1
    said = run.said()[earlier:]
    assert re.search(r"error: interrupted at version \d+ ", said), said
    assert "Traceback" not in said
    assert any(whole(run.output / "checkpoints"))
    until(lambda: not run.family(), "all processes end")


@pytest.mark.full
def test_a_frozen_host_ends_the_run_after_the_stall_timeout(start: Start) -> None:
    run = start(*SLOW, "--protocol", "bsp", "--steps", 1_000_000, "--checkpoint-every-s", 0.5, "--stall-timeout-s", 11)
    run.wait_for_updates(10)
    part_of(run, "worker-2").suspend()
    assert run.wait() == 1
    assert re.search(r"error: host 2 did not answer for 1\d s \(--stall-timeout-s 11\); --resume continues", run.said())
    until(lambda: not run.family(), "every process on every host ends")


class OfThreads(LocalLauncher):
    """A cluster that gives each worker so many threads."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def threads(self, parts: Sequence[Part]) -> int:
        return self.count


@pytest.mark.full
def test_a_run_has_the_threads_it_began_with_wherever_it_goes_on(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(steps: int, count: int, threads: int = 0) -> int:
        config = make_config(shards, tmp_path / "run", model="logistic", batch_size=24, steps=steps, threads=threads)
        result = train(config, Options(resume=True, report=False), launcher=OfThreads(count), hosts=2)
        assert result
        started = [event for event in result.events() if isinstance(event, StartEvent)]
        return int((started[-1].plan or {})["threads_per_worker"])

    assert trained(2, 2) == 2
    assert "threads each as before" not in capsys.readouterr().err
    assert trained(4, 1) == 2
    assert "workers have 2 threads each as before, not 1; --threads 1 changes that" in capsys.readouterr().err
    assert trained(6, 2, threads=1) == 1


class OnIpv6(LocalLauncher):
    def host(self) -> str:
        return "::1"


@pytest.mark.full
def test_hosts_meet_over_ipv6(shards: Path, tmp_path: Path) -> None:
    free_port("::1")
    config = make_config(shards, tmp_path / "run", model="logistic", batch_size=24, steps=4)
    result = train(config, Options(silent=True, report=False), launcher=OnIpv6(), hosts=2)
    assert result
    assert result.cause == "finished"


@pytest.mark.full
def test_what_cannot_be_trained_is_said_in_a_line_and_leaves_nothing(shards: Path, tmp_path: Path) -> None:
    config = make_config(shards, tmp_path / "run", model="cnn", batch_size=3)
    with pytest.raises(UsageError, match="BatchNorm") as refused:
        train(config, Options(silent=True), launcher=LocalLauncher(), hosts=2)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


class WithoutRoom(LocalLauncher):
    def check(self, parts: Sequence[Part]) -> None:
        raise JobError("no room")


@pytest.mark.full
def test_metrics_of_an_overwritten_run_have_all_its_events(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They count from the beginning of the new log, however long the old one was, and end with a state.

    The leading host counts: the starting process reads no log, which may be on HDFS or in an object store."""
    used = []

    @contextmanager
    def serve(metrics: RunMetrics, endpoint: tuple[str, int]) -> Iterator[str]:
        with serve_metrics(metrics, endpoint) as address:
            used.append(metrics)
            yield address

    monkeypatch.setattr("trainer.report.metrics.serve_metrics", serve)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("\n" * 1_000_000)
    config = make_config(shards, tmp_path / "run", model="logistic", batch_size=24, steps=400)
    options = Options(silent=True, report=False, overwrite=True, metrics_port=("127.0.0.1", 0))
    result = train(config, options, launcher=LocalLauncher(), hosts=1)
    with pytest.raises(JobError, match="no room"):
        train(config, options, launcher=WithoutRoom(), hosts=1)
    trained, refused = (
        {(each.name, *each.labels.values()): each.value for family in metrics.collect() for each in family.samples}
        for metrics in used
    )
    assert result
    evaluations = sum(isinstance(event, EvaluationEvent) for event in result.events())
    assert trained["sharding_training_evaluations_total",] == evaluations > 0
    logged = [
        worker["images"] for event in result.events() if isinstance(event, TrainEvent) for worker in event.workers
    ]
    assert trained["sharding_training_images_total",] == sum(logged)
    assert trained["sharding_training_updates_total",] == result.updates
    assert trained["sharding_training_state", "finished"] == 1
    assert refused["sharding_training_state", "failed"] == 1


class Elsewhere(LocalLauncher):
    """A host that finds another folder at the path of --output: its own disk's."""

    def begin(self, arguments: LaunchArguments, attempt: int) -> Any:
        config = arguments.config
        if not arguments.part.leads:
            config = replace(config, run=replace(config.run, output=config.run.output + "-of-another-disk"))
        return super().begin(replace(arguments, config=config), attempt)


@pytest.mark.full
def test_an_output_that_hosts_do_not_share_is_refused(shards: Path, tmp_path: Path) -> None:
    config = make_config(shards, tmp_path / "run", model="logistic", batch_size=24, steps=10)
    with pytest.raises(UsageError, match=r"host 1: --output .* is not a folder that .* shares with") as refused:
        train(config, Options(silent=True), launcher=Elsewhere(), hosts=2)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run-of-another-disk").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--hosts", 2), "--hosts 2 needs --launcher: spark, ray or local"),
        (("--hosts", 4, "--launcher", "local"), "--hosts 4: give 1 to 3"),
        (("--hosts", 0, "--launcher", "local"), "--hosts must be at least 1"),
        (
            (*HOSTS, "--roles", "server:0", "--addresses", "tcp://h:1", "--token-file", os.devnull),
            "--roles is for hosts",
        ),
    ],
)
def test_hosts_that_cannot_be_are_refused(shards: Path, tmp_path: Path, flags: tuple[object, ...], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        main(["--shards", str(shards), "--output", str(tmp_path / "run"), "--steps", "1", *map(str, flags)])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("token", "said"),
    [(b"short", "holds 5 characters"), (bytes(range(128, 160)), "cannot be read as text"), (None, "No such file")],
)
def test_a_wrong_token_leaves_the_old_run(shards: Path, tmp_path: Path, token: bytes | None, said: str) -> None:
    output = tmp_path / "run"
    output.mkdir()
    before = {"config.json": b"of the old run", "result.json": b"{}"}
    for name, content in before.items():
        (output / name).write_bytes(content)
    if token:
        (tmp_path / "token").write_bytes(token)
    where = ("--roles", "server:0", "--addresses", "tcp://127.0.0.1:1", "--token-file", str(tmp_path / "token"))
    with pytest.raises(UsageError, match=said):
        main(["--shards", str(shards), "--output", str(output), "--steps", "1", "--overwrite", *where])
    assert {path.name: path.read_bytes() for path in output.iterdir()} == before


def test_a_finished_run_starts_no_host(shards: Path, tmp_path: Path) -> None:
    flags = (*COMMON, "--protocol", "bsp", "--steps", 5, "--quiet")
    done = train_here(shards, tmp_path / "run", *flags)
    before = done.result()

    class Nowhere(LocalLauncher):
        def begin(self, arguments: LaunchArguments, attempt: int) -> Any:
            raise AssertionError("a host was started")

    config = make_config(
        shards, tmp_path / "run", model="logistic", protocol="bsp", batch_size=24, learning_rate=0.02, steps=5
    )
    train(config, Options(silent=True), launcher=Nowhere(), hosts=3)
    assert done.result() == before
