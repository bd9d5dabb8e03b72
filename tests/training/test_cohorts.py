"""Real runs that continue with another number of workers: resumed after SIGKILL, or changed while they train."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import UsageError
from tests.support.divisions import drawn_rows
from tests.support.draws import ids_in_steps
from tests.support.recent_losses import assert_drawn_by_recent_losses
from tests.support.slow_model import SLOW
from tests.support.trainer_runs import Training, train_here, until
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from trainer.checkpoints.read import newest, read_state
from trainer.config import SEPARATOR
from trainer.coordination.passes import WORD
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.data.shards import SET_BITS
from trainer.runlog.kinds.training import PassEvent
from trainer.runlog.read import iter_events, surviving_events
from trainer.runlog.run_record import read_record
from trainer.simulation.replay import replay
from trainer.workers_command import main as workers_command

COMMON = (*SLOW, "--learning-rate", 0.02, "--threads", 1, "--no-report", "--quiet")
DEALS = ("--repartition", "random", "--example-ledger")
MIX = ("--mix", "0.7,0.3", "--example-ledger")
CASES = [
    pytest.param(("--protocol", "ssp", "--servers", 2), 5, id="ssp"),
    pytest.param((*DEALS, "--protocol", "bsp"), 5, marks=pytest.mark.full, id="random-deals"),
    pytest.param(("--exchange", "d-psgd"), 5, marks=pytest.mark.full, id="d-psgd"),
    pytest.param(
        ("--gossip", 3, "--gossip-every", 2, "--exchange", "all-reduce"),
        2,
        marks=pytest.mark.full,
        id="gossip-all-reduce",
    ),
    pytest.param((*MIX, "--protocol", "bsp"), 5, marks=pytest.mark.full, id="mixture"),
]


@pytest.mark.parametrize(("flags", "workers"), CASES)
def test_a_killed_run_resumes_with_other_workers(
    flags: tuple[str, ...], workers: int, tmp_path: Path, runs: list[Training]
) -> None:
    """Every pass has the fingerprint of all rows, also the interrupted pass; every epoch of random deals has all ids.

    So has every pass over a set of a mixture."""
    parts = [rows_of(380, 10 + number, 1000 * number) for number in range(3)]
    shards: Path | str = write_shards(tmp_path / "set", parts, EVAL_ROWS)
    if "--mix" in flags:
        parts = [rows_of(110, 20 + number, 1000 * number) for number in range(3)]
        shards = f"{shards}{SEPARATOR}{write_shards(tmp_path / 'other', parts, None)}"
    output = tmp_path / "run"
    own = (*COMMON, *flags, "--checkpoint-every-s", 0.3, "--no-epoch-checkpoints")
    run = Training(shards, output, *own, "--batch-size", 24, "--steps", 100_000)
    runs.append(run)
    until(lambda: newest(output / "checkpoints"), "a checkpoint after the first")
    run.end()
    version = newest(output / "checkpoints", verify=True)
    assert version is not None
    steps = max(read_state(output / "checkpoints", version).clocks.values()) + 100
    train_here(shards, output, *own, "--batch-size", 50, "--steps", steps, "--resume", "--workers", workers)
    if "random" in flags:
        assert_dealt_once(output, 3 * 380)
    elif "--mix" in flags:
        assert_mixed(output)
    else:
        assert_complete(Path(shards), output, version)


@pytest.mark.parametrize(
    "flags",
    [("--protocol", "ssp"), pytest.param(("--exchange", "matcha", "--topology", "complete"), marks=pytest.mark.full)],
    ids=lambda flags: flags[1],
)
def test_a_run_changes_its_workers_while_it_trains(
    flags: tuple[str, ...], tmp_path: Path, runs: list[Training], capsys: pytest.CaptureFixture[str]
) -> None:
    """It gains two workers, cannot lose all, loses three, and ends as usual at SIGTERM."""
    parts = [rows_of(380, 10 + number, 1000 * number) for number in range(3)]
    shards = write_shards(tmp_path / "set", parts, EVAL_ROWS)
    output = tmp_path / "run"
    run = Training(shards, output, *COMMON, *flags, "--batch-size", 60, "--steps", 1_000_000)
    runs.append(run)
    run.wait_for_updates(20)
    assert workers_command([str(output), "--add", "2"]) == 0
    assert re.search(r": 5 workers since version [1-9]\d*, 3 before$", capsys.readouterr().out.strip())
    run.wait_for_updates(run.updates() + 60)
    with pytest.raises(UsageError, match="has 5 workers: remove at most 4"):
        workers_command([str(output), "--remove", "5"])
    assert workers_command([str(output), "--remove", "3"]) == 0
    run.wait_for_updates(run.updates() + 60)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 1
    assert_complete(shards, output, 1)
    record = read_record(output)
    assert [each.workers for each in record.config.cohorts.entries] == [3, 5, 2]
    with pytest.raises(UsageError, match=r"is not in progress: .* --resume --workers 3 continues"):
        workers_command([str(output), "--add", "1"])
    assert not (output / "workers.json").exists()


@pytest.mark.full
def test_losses_of_rows_go_to_their_new_workers(tmp_path: Path, runs: list[Training]) -> None:
    """Kill a run after its first pass, continue it with five workers, and remove three of them while it trains."""
    parts = [rows_of(380, 10 + number, 1000 * number) for number in range(3)]
    shards = write_shards(tmp_path / "set", parts, EVAL_ROWS)
    output = tmp_path / "run"
    draws = ("--exchange", "d-psgd", "--sampling", "recency", "--example-ledger")
    own = (*COMMON, *draws, "--checkpoint-every-s", 0.3, "--no-epoch-checkpoints", "--batch-size", 60)
    run = Training(shards, output, *own, "--steps", 1_000_000)
    runs.append(run)
    until(lambda: (newest(output / "checkpoints") or 0) > 20, "a checkpoint after the first pass")
    run.end()
    run = Training(shards, output, *own, "--steps", 1_000_000, "--resume", "--workers", 5)
    runs.append(run)
    run.wait_for_updates(run.updates() + 50)
    assert workers_command([str(output), "--remove", "3"]) == 0
    until(lambda: read_record(output).config.cohorts.present.workers == 2, "two workers go on")
    run.wait_for_updates(run.updates() + 20)
    run.end()
    train_here(shards, output, *own, "--steps", run.updates() + 20, "--resume")
    assert [each.workers for each in read_record(output).config.cohorts.entries] == [3, 5, 2]
    assert assert_drawn_by_recent_losses(output) > 10
    assert replay(output).is_equal


@pytest.mark.full
def test_a_run_with_a_switch_changes_its_workers(tmp_path: Path, runs: list[Training]) -> None:
    """Add two workers under all-reduce, and send SIGTERM; two workers then switch in the middle of the run's new length."""
    parts = [rows_of(380, 10 + number, 1000 * number) for number in range(3)]
    shards = write_shards(tmp_path / "set", parts, EVAL_ROWS)
    output = tmp_path / "run"
    own = (*COMMON, "--exchange", "strategy-switch", "--alpha", 0.5, "--batch-size", 60)
    run = Training(shards, output, *own, "--epochs", 100_000)
    runs.append(run)
    run.wait_for_updates(20)
    assert workers_command([str(output), "--add", "2"]) == 0
    run.wait_for_updates(run.updates() + 50)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 1
    version = newest(output / "checkpoints", verify=True)
    assert version is not None
    half = int(read_state(output / "checkpoints", version).epoch) + 3
    done = train_here(shards, output, *own, "--epochs", 2 * half, "--resume", "--workers", 2)
    assert [each.workers for each in read_record(output).config.cohorts.entries] == [3, 5, 2]
    assert [(stage["exchange"], stage["first_epoch"]) for stage in done.result()["stages"]] == [
        ("all-reduce", 0),
        ("parameter-server", half),
    ]
    assert_complete(shards, output, version)
    assert replay(output).is_equal


@pytest.mark.full
def test_a_refused_change_leaves_the_run_as_it_is(tmp_path: Path, runs: list[Training]) -> None:
    """A run on two hosts: 61 workers cannot divide a mini-batch of 60, and 5 can."""
    parts = [rows_of(380, 10 + number, 1000 * number) for number in range(3)]
    shards = write_shards(tmp_path / "set", parts, EVAL_ROWS)
    output = tmp_path / "run"
    hosts = ("--launcher", "local", "--hosts", 2)
    run = Training(shards, output, *COMMON, *hosts, "--protocol", "bsp", "--batch-size", 60, "--steps", 1_000_000)
    runs.append(run)
    run.wait_for_updates(20)
    with pytest.raises(UsageError, match=r"stays with 3 workers: .*61"):
        workers_command([str(output), "--add", "58"])
    run.wait_for_updates(run.updates() + 60)
    assert workers_command([str(output), "--add", "2"]) == 0
    run.wait_for_updates(run.updates() + 60)
    assert_complete(shards, output, 1)


@pytest.mark.full
def test_other_workers_continue_an_interval(tmp_path: Path, runs: list[Training]) -> None:
    """Kill a run in its first interval: the run ends by the rule, and a replay has its bits."""
    parts = [rows_of(200, 10 + number, 1000 * number) for number in range(3)]
    shards = write_shards(tmp_path / "set", parts, EVAL_ROWS)
    output = tmp_path / "run"
    phases = ("--repartition", "importance", "--warmup-epochs", 2, "--ignore-epochs", 1, "--interval", 12)
    length = ("--protocol", "bsp", "--checkpoint-every-s", 0.1, "--epochs", 27)
    own = (*COMMON, *length, *phases, "--example-ledger")
    run = Training(shards, output, *own, "--batch-size", 24)
    runs.append(run)
    until(lambda: (newest(output / "checkpoints") or 0) > 100, "a checkpoint of the interval")
    run.end()
    train_here(shards, output, *own, "--batch-size", 50, "--resume", "--workers", 5)
    config = read_record(output).config
    plan = config.partition_plan(600, 3)
    assert (plan.start, plan.intervals) == (1, 2)
    last = drawn_rows(output, 10)
    owners = last[last["clock"] >= plan.first_steps[-1]].groupby("row")["worker"].agg(["min", "max"])
    assert len(owners) == 600
    assert (owners["min"] == owners["max"]).all()
    assert replay(output).is_equal


def assert_dealt_once(output: Path, rows: int) -> None:
    """Check that workers in step have drawn every row once in each epoch, and that a replay has the bits of the run."""
    ids = ids_in_steps(output)
    assert len(ids) > 2 * rows
    for begin in range(0, len(ids), rows):
        epoch = ids[begin : begin + rows]
        assert len(np.unique(epoch)) == len(epoch)
    assert replay(output).is_equal


def assert_mixed(output: Path) -> None:
    """Check that workers in step have drawn the rows of each of two sets equally often, and that a replay has the bits."""
    ids = ids_in_steps(output)
    assert np.mean(ids >> SET_BITS) == pytest.approx(0.3, abs=0.01)
    for number, rows in enumerate((3 * 380, 3 * 110)):
        counts = np.unique(ids[ids >> SET_BITS == number], return_counts=True)[1]
        assert len(counts) == rows
        assert np.ptp(counts) <= 1
    assert replay(output).is_equal


def assert_complete(shards: Path, output: Path, version: int) -> None:
    """Check that every pass of a run has trained each row once, also passes after a version."""
    live = [each for each in surviving_events(iter_events(output / "metrics.jsonl")) if isinstance(each, PassEvent)]
    assert [each.first for each in live] == [1, *(each.last + 1 for each in live[:-1])]
    assert (live[-1].version or 0) > version
    # The manifest of this set has no fingerprint: it is summed up here.
    opened = open_shards(str(shards))
    total = sum(int(hash_) for worker in range(opened.num_workers) for hash_ in load_worker(opened, worker).hashes)
    assert [each.fingerprint for each in live] == [
        f"{total * (each.last - each.first + 1) % WORD:016x}" for each in live
    ]
