"""Who takes part in a run on a cluster, and what launchers decide: without sockets, clocks and clusters."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import DataError, UsageError
from tests.support.configs import make_config
from trainer.cluster import part as part_module
from trainer.cluster import ray, spark
from trainer.cluster import run as cluster_module
from trainer.cluster.attempts import MOST_SHORT, SHORT_S, Attempts
from trainer.cluster.launcher import Part, roles_in_words, share_roles, visible
from trainer.cluster.local import LocalLauncher
from trainer.cluster.part import departing_at_sigterm
from trainer.cluster.rendezvous import PartEnd
from trainer.cluster.roster import CUT_S, LEASE_S, Roster
from trainer.cluster.run import ClusterRun
from trainer.launch.workers_request import Requests, WorkersRequest
from trainer.lifecycle.interruption import RunInterruptedError
from trainer.options import Options, Role, all_roles, parse_roles
from trainer.transport.status import NOT_READY

# --- parts ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 40), st.data())
def test_every_role_has_one_host_and_hosts_have_equal_shares(servers: int, workers: int, data: st.DataObject) -> None:
    hosts = data.draw(st.integers(1, workers))
    parts = share_roles(servers, workers, hosts)
    assert Counter(role for part in parts for role in part.roles) == Counter(all_roles(servers, workers))
    assert [part.index for part in parts] == list(range(hosts))
    assert [part.index for part in parts if part.leads] == [0]
    assert Role("evaluator") in parts[0].roles
    for kind in ("server", "worker"):
        counts = [part.count(kind) for part in parts]
        assert max(counts) - min(counts) <= 1
    assert parts[0].count("worker") == min(part.count("worker") for part in parts)
    for part in parts:
        assert parse_roles(roles_in_words(part.roles)) == part.roles


@pytest.mark.parametrize("hosts", [0, -1, 4])
def test_a_host_has_a_worker_at_least(hosts: int) -> None:
    with pytest.raises(UsageError, match=rf"--hosts {hosts}: give 1 to 3"):
        share_roles(1, 3, hosts)


def test_a_parts_devices_are_counted_among_those_that_its_host_sees() -> None:
    assert visible(("0", "1"), None) == "0,1"
    assert visible(("1",), "4,6") == "6"
    assert visible(("1",), "GPU-aa, GPU-bb") == "GPU-bb"
    assert visible(("GPU-cc",), "4,6") == "GPU-cc"
    assert visible((), "0") == ""


# --- the roster -------------------------------------------------------------------------------------------------------


def joined(roster: Roster, part: int, attempt: int = 0, now: float = 0.0) -> bool:
    """Parts 0 and 1 have a server each."""
    return roster.hello(part, attempt, {part: f"tcp://{part}.{attempt}:1"} if part < 2 else {}, now)


def complete() -> Roster:
    roster = Roster(3, 2)
    for part in range(3):
        joined(roster, part)
    return roster


def test_nobody_starts_before_all_are_there() -> None:
    roster = Roster(3, 2)
    assert joined(roster, 0)
    assert joined(roster, 2)
    assert not joined(roster, 2)  # it speaks again
    assert roster.address_table(0, 0, 1.0) is None
    joined(roster, 1)
    table = roster.address_table(0, 0, 1.0)
    assert table == roster.address_table(2, 0, 1.0)
    assert table is not None
    assert (table.edition, table.addresses) == (1, ("tcp://0.0:1", "tcp://1.0:1"))


def test_a_successor_waits_for_the_goodbye_of_its_predecessor() -> None:
    roster = complete()
    before = roster.address_table(2, 0, 0.0)
    assert joined(roster, 1, attempt=1, now=1.0)
    assert not roster.is_current(1, 0)
    assert roster.address_table(1, 1, 2.0) is None
    assert roster.address_table(2, 0, 2.0) == before, "the others go by the old addresses meanwhile"
    assert roster.address_table(1, 0, 2.0) is None
    roster.goodbye(1, 0)
    after = roster.address_table(1, 1, 2.0)
    assert after is not None
    assert (after.edition, after.addresses) == (2, ("tcp://0.0:1", "tcp://1.1:1"))
    assert roster.address_table(2, 0, 2.0) == after


def test_a_successor_waits_for_the_lease_of_a_silent_one() -> None:
    roster = complete()
    roster.heard(1, 0, 5.0)
    joined(roster, 1, attempt=1, now=6.0)
    assert roster.address_table(1, 1, 5.0 + LEASE_S) is None
    roster.heard(1, 0, 8.0)  # it was frozen, and lives
    assert roster.address_table(1, 1, 5.1 + LEASE_S) is None
    assert roster.address_table(1, 1, 8.1 + LEASE_S) is not None


def test_a_lost_connection_is_given_the_time_to_reconnect() -> None:
    roster = complete()
    joined(roster, 1, attempt=1, now=1.0)
    roster.cut(1, 0, 1.0)
    roster.cut(1, 0, 1.5)
    assert roster.address_table(1, 1, 1.0 + CUT_S) is None
    roster.heard(1, 0, 2.0)  # it has connected again
    assert roster.address_table(1, 1, 1.1 + CUT_S) is None
    roster.cut(1, 0, 3.0)
    assert roster.address_table(1, 1, 3.1 + CUT_S) is not None


def test_a_host_with_workers_only_changes_no_address() -> None:
    roster = complete()
    before = roster.address_table(0, 0, 0.0)
    joined(roster, 2, attempt=1, now=1.0)
    roster.goodbye(2, 0)
    assert roster.address_table(2, 1, 1.0) == before == roster.address_table(0, 0, 1.0)


def test_an_attempt_that_comes_after_its_successor_is_none() -> None:
    roster = complete()
    assert joined(roster, 1, attempt=3, now=1.0)
    assert not joined(roster, 1, attempt=2, now=2.0)
    assert roster.address_table(1, 2, 2.0) is None
    assert roster.is_current(1, 3)


def test_two_hosts_that_move_at_once_make_whole_editions_only() -> None:
    roster = complete()
    first = roster.address_table(2, 0, 0.0)
    joined(roster, 0, attempt=1, now=1.0)
    joined(roster, 1, attempt=1, now=1.0)
    roster.goodbye(0, 0)
    assert roster.address_table(0, 1, 1.0) == first, "server 1's address is not known yet"
    roster.goodbye(1, 0)
    found = roster.address_table(0, 1, 1.0)
    assert found is not None
    assert (found.edition, found.addresses) == (2, ("tcp://0.1:1", "tcp://1.1:1"))


def test_the_silent_are_named() -> None:
    roster = complete()
    roster.heard(2, 0, 9.0)
    assert roster.silent(LEASE_S) == {}
    assert roster.silent(LEASE_S + 1) == {0: LEASE_S + 1, 1: LEASE_S + 1}


# --- hosts that are to end -------------------------------------------------------------------------------------------


def cluster_run(home: Path, **fields: Any) -> ClusterRun:
    """Return a run of 7 workers on 3 hosts, of which none runs."""
    config = make_config(batch_size=70, **fields)
    run = ClusterRun(config, Options(silent=True), LocalLauncher(), share_roles(2, 7, 3), Requests(home))
    status = replace(NOT_READY, ready=True)
    run.rendezvous = SimpleNamespace(  # type: ignore[assignment]
        departures=SimpleQueue(), ends=SimpleQueue(), texts=SimpleQueue(), status=status, want=lambda *_: None
    )
    return run


def departed(run: ClusterRun, *hosts: int) -> WorkersRequest | None:
    for host in hosts:
        run.rendezvous.departures.put(host)
        run._release_hosts()
    return run.requests.take()


def test_a_run_continues_without_hosts_that_are_to_end(tmp_path: Path) -> None:
    """Its hosts have 2, 2 and 3 workers. Without any host it is interrupted."""
    run = cluster_run(tmp_path, protocol="asp")
    assert departed(run, 1) == WorkersRequest("", 5)
    assert departed(run, 2) == WorkersRequest("", 2)
    assert run.requests.departed_hosts == 2
    assert not run.is_to_end
    assert departed(run, 0) is None
    assert run.is_to_end
    assert not run.interrupted, "a signal to this process would count as its second one, and cut the checkpoint off"


def test_a_trained_run_and_one_on_a_single_host_do_not_change(tmp_path: Path) -> None:
    run = cluster_run(tmp_path, protocol="asp")
    run.rendezvous.status = replace(run.rendezvous.status, trained=True)
    assert departed(run, 1) is None
    alone = cluster_run(tmp_path, protocol="asp")
    alone.parts = share_roles(2, 7, 1)
    assert departed(alone, 0) is None
    assert not alone.is_to_end, "its host is started again, as under every protocol"


@pytest.mark.parametrize("also", [None, "signal", "all hosts"])
def test_a_change_without_a_checkpoint_in_time_continues(
    also: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leading host has died, for example. If the run is to end meanwhile, it does not continue."""
    monkeypatch.setattr(cluster_module, "CHECKPOINT_S", 0.2)
    run = cluster_run(tmp_path, protocol="asp")
    monkeypatch.setattr(run.launcher, "failure", lambda: "")
    run.interrupted = also == "signal"
    for host in (0, 1, 2) if also == "all hosts" else (0,):
        run.rendezvous.departures.put(host)
    with pytest.raises(RunInterruptedError, match="no checkpoint") as caught:
        run._leave_checkpoint(changes=True)
    assert caught.value.changes == (also is None)


def test_a_host_that_fails_before_the_last_checkpoint_ends_the_run(tmp_path: Path) -> None:
    run = cluster_run(tmp_path, protocol="asp")
    run.rendezvous.ends.put(PartEnd(1, 0, DataError.exit_code, "worker-2: shard 2 is torn"))
    with pytest.raises(DataError, match=r"^host 1: worker-2: shard 2 is torn$"):
        run._leave_checkpoint(changes=True)


def test_hosts_that_depart_during_a_change_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = cluster_run(tmp_path, protocol="asp")
    run.rendezvous.close = lambda: None  # type: ignore[method-assign]
    monkeypatch.setattr(run.launcher, "is_over", lambda: False)
    monkeypatch.setattr(cluster_module, "LEAVE_S", 0.0)
    run._start_time, run._is_changing = 1.0, True
    run.requests.submit(5)
    run.rendezvous.departures.put(2)
    run.close()
    assert run.requests.take() == WorkersRequest("", 4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"protocol": "bsp"}, "a run of bsp would end with other bits"),
        ({"exchange": "all-reduce"}, "a run of all-reduce would end with other bits"),
        ({"exchange": "matcha"}, "a run of matcha would end with other bits"),
        ({"protocol": "k-asp", "k": 6}, "--k 6"),
        ({"protocol": "asp", "follow": True}, "--follow adds the rows of a stream"),
    ],
)
def test_a_run_that_keeps_its_workers_waits_for_a_host(
    fields: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = cluster_run(tmp_path, **fields)
    lines: list[str] = []
    monkeypatch.setattr(run.progress, "message", lines.append)
    assert departed(run, 2, 1, 0) is None
    assert run.requests.departed_hosts == 0
    assert not run.is_to_end
    assert len(lines) == 3
    assert lines[0].startswith("host 2 got SIGTERM; it is replaced once it has ended, because ")
    assert named in lines[0]


@pytest.mark.parametrize("also", [(), (signal.SIGTERM,)], ids=["alone", "before SIGTERM"])
def test_sighup_alone_ends_a_part(also: tuple[signal.Signals, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark sends it when an executor ends, also just before a part gets the SIGTERM of all processes of its host.

    Both signals are pending when the first handler runs."""
    kills: list[tuple[int, int]] = []
    monkeypatch.setattr(part_module, "HANGUP_S", 0.05)
    monkeypatch.setattr(os, "kill", lambda *arguments: kills.append(arguments))
    line: Any = SimpleNamespace(departs=False)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signals = (signal.SIGHUP, *also)
    try:
        with departing_at_sigterm(line):
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)
            for number in signals:
                signal.raise_signal(number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
            time.sleep(0.15)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert line.departs == bool(also)
    assert kills == ([] if also else [(os.getpid(), signal.SIGHUP)])


# --- launchers --------------------------------------------------------------------------------------------------------


def test_a_part_that_always_dies_at_once_is_given_up() -> None:
    attempts, now, starts = Attempts(), 0.0, 0
    due: float | None = 0.0
    while due is not None:
        assert attempts.begin(1, now) == starts
        starts += 1
        due = attempts.lost(1, now + 1.0)
        now = due or now
    assert starts == MOST_SHORT + 1
    assert now > 10, "with pauses between"


def test_a_part_that_lives_is_started_again_without_end() -> None:
    attempts, now = Attempts(), 0.0
    for number in range(50):
        assert attempts.begin(0, now) == number
        now += SHORT_S
        assert attempts.lost(0, now) == now, "at once"


YARN = {"spark.master": "yarn"}


@pytest.mark.parametrize(
    ("conf", "cores", "named"),
    [
        ({"spark.master": "local[2]"}, 2, "local[2] has room for 2"),
        ({"spark.master": "local[4]", "spark.task.cpus": "2"}, 4, "local[4] has room for 2"),
        ({"spark.master": "spark://h:1", "spark.cores.max": "2"}, 2, "spark.cores.max has room for 2"),
        (
            {"spark.master": "spark://h:1", "spark.executor.cores": "1", "spark.task.cpus": "2"},
            2,
            "spark.task.cpus is 2",
        ),
        (YARN, 2, "spark.executor.instances 2, of 1 each"),
        (
            YARN | {"spark.executor.instances": "2", "spark.executor.cores": "3", "spark.task.cpus": "2"},
            2,
            "room for 2",
        ),
        (
            YARN | {"spark.dynamicAllocation.enabled": "True", "spark.dynamicAllocation.maxExecutors": "2"},
            2,
            "spark.dynamicAllocation.maxExecutors 2",
        ),
        ({"spark.master": "local[8]", "spark.speculation": "TRUE"}, 8, "spark.speculation is true"),
        ({"spark.master": "local-cluster[2,1,1024]"}, 8, "local-cluster[2,1,1024] has room for 2"),
        ({"spark.master": "local-cluster[3,1,1024]", "spark.task.cpus": "2"}, 8, "room for 0"),
    ],
)
def test_the_setting_that_leaves_too_few_slots_is_named(conf: dict[str, str], cores: int, named: str) -> None:
    found = spark.problem(conf, 3, cores)
    assert found is not None
    assert named in found
    assert "\n" not in found


@pytest.mark.parametrize(
    "conf",
    [
        {"spark.master": "local[3]"},
        {"spark.master": "local-cluster[3,1,1024]"},
        {"spark.master": "local-cluster[ 1 , 3 , 1024 ]"},
        {"spark.master": "spark://h:1"},
        {"spark.master": "spark://h:1", "spark.cores.max": "6", "spark.task.cpus": "2"},
        YARN | {"spark.executor.instances": "3"},
        YARN | {"spark.executor.instances": "1", "spark.executor.cores": "3"},
        YARN | {"spark.dynamicAllocation.enabled": "true"},
    ],
)
def test_settings_that_do_are_none(conf: dict[str, str]) -> None:
    assert spark.problem(conf, 3, 3) is None


def test_a_rays_nodes_must_have_what_the_hosts_take() -> None:
    assert ray.problem({"CPU": 6.0}, 3, 2, 0) is None
    assert "--host-cores 2 takes 6 CPUs, and the Ray cluster has 5" in str(ray.problem({"CPU": 5.0}, 3, 2, 0))
    assert "--host-gpus 1 takes 3 GPUs" in str(ray.problem({"CPU": 6.0, "GPU": 2.0}, 3, 2, 1))


PYTHON = """Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent failure: Lost task 0.3 in stage
0.0 (TID 3) (host executor 1): org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "worker.py", line 1, in main
{line}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)
"""
KILLED = """Job aborted due to stage failure: Task 1 in stage 0.0 failed 4 times, most recent failure: Lost task 1.3 in stage
0.0 (TID 7) (host executor 9): ExecutorLostFailure (executor 9 exited caused by one of the running tasks) Reason: Command
exited with code 137
Driver stacktrace:"""


def test_only_a_failure_that_would_come_again_is_final() -> None:
    missing = "ModuleNotFoundError: No module named 'torch'"
    assert spark.cause_of(PYTHON.format(line=missing)) == missing
    assert spark.cause_of(PYTHON.format(line="trainer.cluster.rendezvous.AttemptLostError: nothing is heard")) is None
    assert spark.cause_of(KILLED) is None


def test_threads_depend_on_settings_only() -> None:
    launcher = spark.SparkLauncher(lambda: (None, ""))
    launcher._conf = {"spark.task.cpus": "8"}
    parts = [Part(0, parse_roles("server:0,worker:0,evaluator")), Part(1, parse_roles("worker:1-3"))]
    assert launcher.threads(parts) == 2
    launcher._conf = {}
    assert launcher.threads(parts) == 1
