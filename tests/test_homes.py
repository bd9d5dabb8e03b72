"""Runs whose home is anywhere: their checkpoints, their log as segments, and who may write there.

A ``StorePlace`` of a local folder goes the ways of HDFS, but for the network."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import DataError, JobError, UsageError
from pipeline.storage.hdfs import HdfsFiles, HdfsWriter
from pipeline.storage.local import LocalFiles
from pipeline.storage.objects import ObjectFiles
from pipeline.storage.store import Store
from tests.configs import make_config
from tests.places import STORE, elsewhere
from tests.test_checkpoint import numbers, state_of, write
from tests.trainer_runs import until
from trainer.checkpoints.generations import Generations, write_generations
from trainer.checkpoints.prune import go_back, prune
from trainer.checkpoints.read import (
    evaluation_of,
    is_whole,
    newest,
    read_slice_range,
    read_state,
    read_vector,
    unevaluated,
    versions,
    whole,
)
from trainer.checkpoints.state import folder_of, slice_name
from trainer.checkpoints.write import mark_evaluated, reopen, write_state
from trainer.home import lease as leases
from trainer.home.folders import Folders
from trainer.home.lease import Lease, leased
from trainer.home.place import StorePlace, listing, place_of, resolve_home, write_whole
from trainer.home.segments import Log, Superseded, begin, copy, joined, settle
from trainer.home.work import Work, due, working
from trainer.run_files import CHECKPOINTS, LEASE, METRICS, PUSHES, SEGMENTS
from trainer.runlog.event_tail import HomeTail
from trainer.runlog.run_folder import OWNED, RunRecord, Start, settled


@pytest.fixture
def home(place: str) -> StorePlace:
    return StorePlace(place, STORE)


@pytest.fixture
def near(tmp_path: Path) -> StorePlace:
    """A home that is reached in no time."""
    return StorePlace(str(tmp_path / "home"), STORE)


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_is_put_where_none_is_and_replaced_whole_with_its_folder(place: str) -> None:
    path = f"{place}/a/b/file"
    STORE.put_new(path, b"one")
    STORE.put_new(path, b"one")  # as after a lost answer
    with pytest.raises(FileExistsError):
        STORE.put_new(path, b"two")
    assert STORE.read(path) == b"one"
    STORE.replace(path, b"two")
    STORE.replace(f"{place}/c/file", b"three")
    assert (STORE.read(path), STORE.read(f"{place}/c/file")) == (b"two", b"three")
    assert listing(StorePlace(place, STORE)) == ["a/b/file", "c/file"], "no draft is left"


# --- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_anywhere_reads_back_cut_into_any_ranges(home: StorePlace) -> None:
    write(home, state_of(5), [3, 4, 9])
    assert (whole(home), versions(home)) == ([5], [5])
    np.testing.assert_array_equal(read_vector(home, 5), numbers(5, 10))
    for begin_at, end in itertools.combinations(range(11), 2):
        values, momentum = read_slice_range(home, 5, begin_at, end)
        np.testing.assert_array_equal(values, numbers(5, 10)[begin_at:end])
        np.testing.assert_array_equal(momentum, -numbers(5, 10)[:7][begin_at:end])


def test_a_checkpoint_anywhere_is_whole_with_all_its_files_and_the_newest_sound_one_is_found(home: StorePlace) -> None:
    for version in (1, 2, 3):
        write(home, state_of(version))
    (folder_of(home, 3) / slice_name(0, 2)).unlink()
    assert whole(home) == [1, 2]
    torn = folder_of(home, 2) / slice_name(1, 2)
    write_whole(torn, torn.read_bytes()[:-1])
    warnings: list[str] = []
    assert newest(home, verify=True, warn=warnings.append) == 1
    assert [str(torn) in warning for warning in warnings] == [True]
    with pytest.raises(DataError, match="torn"):
        read_vector(home, 2)


def test_what_replaces_a_file_is_seen_though_it_was_read_before(home: StorePlace) -> None:
    """Files that a listing says have not changed are not read again."""
    write(home, state_of(1, final=True, epoch_boundary=1))
    before = read_state(home, 1)
    assert before.final
    assert evaluation_of(home, before) is None
    mark_evaluated(home, before, 0.5)
    reopen(home, 1)
    after = read_state(home, 1)
    assert not after.final
    assert (is_whole(home, before), is_whole(home, after)) == (False, True)
    assert unevaluated(home) == []
    other = replace(after, generation=0, examples=after.examples + 1)  # of the same length
    write_state(folder_of(home, 1), other)
    assert read_state(home, 1) == other


def test_old_checkpoints_anywhere_are_deleted_and_a_roll_back_voids_later_ones(home: StorePlace) -> None:
    for version in range(1, 6):
        write(home, state_of(version, epoch_boundary=version))
        mark_evaluated(home, read_state(home, version), 0.9 if version == 2 else 0.5)
    assert prune(home) == []
    assert versions(home) == [2, 4, 5], "the best, and the newest two"
    slow = folder_of(home, 5) / slice_name(1, 2)
    slow.unlink()
    assert go_back(home, 7) == (4, 7)
    assert versions(home) == [2, 4]
    write_generations(home, Generations(((7, 3),)))
    assert whole(home) == [2]


# --- killed writers ---------------------------------------------------------------------------------------------------

CHANGES = ("create", "makedirs", "rename", "delete", "put", "put_new")


def killed_at_every_change(uri: str) -> list[int | None]:
    """Have processes of this one write checkpoint 4 over three others and delete old ones, each killed one change of the
    store later than the one before; the newest sound checkpoint that each has left. In a process without a client."""
    found: list[int | None] = []
    mine, theirs = os.pipe()
    for step in itertools.count():
        root = StorePlace(f"{uri}/{step}", STORE)
        assert not in_a_child(partial(write_all, root, 1, 2, 3))
        died = in_a_child(partial(go_on, root, step))
        assert not in_a_child(partial(tell, root, theirs))
        found.append(json.loads(os.read(mine, 100)))
        if not died:
            break
    return found


def write_all(root: StorePlace, *versions: int) -> None:
    for version in versions:
        write(root, state_of(version))


def go_on(root: StorePlace, step: int) -> None:
    kill_at(step)
    write_all(root, 4)
    prune(root, keep=1)


def tell(root: StorePlace, pipe: int) -> None:
    os.write(pipe, json.dumps(sound(root)).encode())


def sound(root: StorePlace) -> int | None:
    """The newest; every whole checkpoint has the numbers that were written, and the next writer finds its way."""
    for version in whole(root):
        np.testing.assert_array_equal(read_vector(root, version), numbers(version, 10))
    latest = newest(root, verify=True)
    write(root, state_of(9))
    prune(root, keep=1)
    assert whole(root) == [9]
    return latest


def in_a_child(work: Callable[[], object]) -> bool:
    """Whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def kill_at(step: int) -> None:
    """Before change number ``step`` of a store, or half-way through a write, this process is killed."""
    left = [step]

    def die_here() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def fatal(change: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*args: Any, **more: Any) -> Any:
            die_here()
            return change(*args, **more)

        return dying

    def half(writer: HdfsWriter, data: bytes) -> int:
        written = whole_write(writer, data[: len(data) // 2])
        die_here()
        return written + whole_write(writer, data[len(data) // 2 :])

    whole_write = HdfsWriter.write
    for kind in (LocalFiles, HdfsFiles, ObjectFiles):
        for name in CHANGES:
            if hasattr(kind, name):
                setattr(kind, name, fatal(getattr(kind, name)))
    vars_of: Any = HdfsWriter
    vars_of.write = half


def test_a_writer_killed_at_any_change_of_a_store_leaves_the_old_checkpoint_or_the_new_one_whole(place: str) -> None:
    found = elsewhere(killed_at_every_change, place)
    assert len(found) > 5, "there are more steps than that"
    assert found == sorted(found)
    assert set(found) == {3, 4}


def test_on_hdfs_a_lost_datanode_costs_no_checkpoint(hdfs: Any) -> None:
    root = StorePlace(f"{hdfs.uri}/lost-datanode/{CHECKPOINTS}", STORE)
    write(root, state_of(1))
    hdfs.kill_datanode(0)
    try:
        write(root, state_of(2))  # the NameNode still sends writers to it
        assert whole(root) == [1, 2]
        for version in (1, 2):
            np.testing.assert_array_equal(read_vector(root, version), numbers(version, 10))
    finally:
        hdfs.restart_datanode(0)
        hdfs.wait_live(3)


# --- the log as segments ----------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6), have=st.integers(0, 40))
def test_segments_put_in_their_places_twice_change_nothing(data: bytes, cuts: list[int], have: int) -> None:
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [(first, data[first:last]) for first, last in itertools.pairwise(ends)]
    assert joined(data[:have], parts) == data
    assert joined(joined(b"", parts), parts) == data


def test_where_two_starts_wrote_the_later_one_counts_and_what_is_missing_is_told() -> None:
    assert joined(b"base", [(4, b"-late-old"), (4, b"-new")]) == b"base-new"
    with pytest.raises(ValueError, match="bytes 4 to 9 are missing"):
        joined(b"base", [(9, b"x")])


def test_the_segments_of_starts_are_in_their_order_and_settled_ones_do_not_count() -> None:
    names = {
        "000010-000000000000.metrics.jsonl": 5,
        "000009-000000000007.metrics.jsonl": 3,
        "000009-000000000000.metrics.jsonl": 7,
        "000008-000000000000.metrics.jsonl": 2,
        "000008.settled": 0,
        "000010.begun": 9,
        "host-0a-000000000000.metrics.jsonl": 4,
        ".000010-000000000005.metrics.jsonl.0123abcd.tmp": 4,
    }
    log = Log.of(names)
    assert [(part.source, part.offset) for part in log.of_leaders(METRICS)] == [
        ("000009", 0),
        ("000009", 7),
        ("000010", 0),
    ]
    assert (log.begun, log.settled) == (10, 8)
    assert (log.end("000009", METRICS), log.end("000009", PUSHES)) == (10, None)
    assert [part.source for part in log.of_others()] == ["host-0a"]
    assert all(OWNED.fullmatch(f"{SEGMENTS}/{name}") for name in names)


@pytest.mark.parametrize(
    "name",
    [
        ".lease/.000003.0123abcd.tmp", "logs/.server-0.log.0123abcd.tmp", "segments/.000001.settled.0123abcd.tmp",
        "checkpoints/00000001/.state.json.0123abcd.tmp", "tensorboard/.events.out.tfevents.1.vm.1.0.0123abcd.tmp",
        ".result.json.0123abcd.tmp", "checkpoints/.generations.json.0123abcd.tmp",
    ],
)  # fmt: skip
def test_a_draft_that_a_killed_writer_left_is_a_runs_own(name: str) -> None:
    assert OWNED.fullmatch(name)


def folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


def add(folders: Folders, file: str, *lines: str) -> None:
    with open(folders.work / file, "a") as found:
        found.writelines(f"{line}\n" for line in lines)


def log_of(folders: Folders) -> dict[str, bytes]:
    return {file: (folders.work / file).read_bytes() for file in (METRICS, PUSHES) if (folders.work / file).exists()}


def test_a_start_begins_with_the_log_of_those_before_it_wherever_they_were_killed(
    home: StorePlace, tmp_path: Path
) -> None:
    first = begin(home, folder(tmp_path, "first"))
    add(first, METRICS, "a", "b")
    copy(first)
    add(first, METRICS, "c")
    add(first, PUSHES, "columns", "1")
    copy(first)
    copied = log_of(first)
    (first.work / METRICS).write_bytes(copied[METRICS] + b"torn")
    copy(first)
    second = begin(home, folder(tmp_path, "second"))
    assert log_of(second) == copied
    add(second, PUSHES, "2")
    settle(second)
    third = begin(home, folder(tmp_path, "third"))
    assert log_of(third) == log_of(second)
    assert (home / PUSHES).read_bytes() == b"columns\n1\n2\n"
    assert [name for name in listing(home) if name.startswith(SEGMENTS)] == [
        f"{SEGMENTS}/000002.settled",
        f"{SEGMENTS}/000003.begun",
    ]


def test_a_log_that_was_being_made_whole_is_whole_wherever_that_ended(
    near: StorePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = [0]
    for step in itertools.count():
        root = near / str(step)
        folders = begin(root, folder(tmp_path, f"a{step}"))
        for line in "abc":
            add(folders, METRICS, line)
            add(folders, PUSHES, line)
            copy(folders)
        with monkeypatch.context() as patched:
            changes[0] = step
            for name in ("replace", "put_new", "delete"):
                patched.setattr(Store, name, failing(changes, getattr(Store, name)))
            try:
                settle(folders)
                done = True
            except JobError:
                done = False
        assert log_of(begin(root, folder(tmp_path, f"b{step}"))) == log_of(folders)
        if done:
            break
    assert step > 6


def failing(left: list[int], change: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise JobError("killed")
        return change(*args, **more)

    return call


def test_a_start_that_was_frozen_writes_no_more_once_a_later_one_has_begun(near: StorePlace, tmp_path: Path) -> None:
    frozen = Work(begin(near, folder(tmp_path, "frozen")))
    add(frozen.folders, METRICS, "a")
    frozen.copy()
    later = begin(near, folder(tmp_path, "later"))
    add(frozen.folders, METRICS, "of the frozen one")
    add(later, METRICS, "b")
    before = listing(near)
    for act in (frozen.copy, frozen.settle):
        with pytest.raises(Superseded, match="later start"):
            act()
    assert listing(near) == before
    frozen.close()
    # one that was already past the question
    late = f"{int(frozen.folders.source):06d}-000000000002.{METRICS}"
    write_whole(near / SEGMENTS / late, b"of the frozen one\n")
    copy(later)
    assert log_of(begin(near, folder(tmp_path, "last")))[METRICS] == b"a\nb\n"
    settle(later_of := begin(near, folder(tmp_path, "settling")))
    write_whole(near / SEGMENTS / late, b"of the frozen one\n")
    assert log_of(begin(near, folder(tmp_path, "after")))[METRICS] == log_of(later_of)[METRICS] == b"a\nb\n"


def test_a_run_that_begins_anew_has_nothing_of_a_frozen_start_of_the_run_before(
    near: StorePlace, tmp_path: Path
) -> None:
    frozen = begin(near, folder(tmp_path, "frozen"))
    add(frozen, METRICS, "a")
    copy(frozen)
    record = RunRecord(make_config(), 2, 80, "digest")
    with settled(near, record, resume=False, overwrite=True) as start:
        assert start is Start.NEW
        anew = begin(near, folder(tmp_path, "anew"))
        add(anew, METRICS, "new")
        add(frozen, METRICS, "b")
        with pytest.raises(Superseded):
            copy(frozen)
        write_whole(near / SEGMENTS / f"{frozen.source}-000000000002.{METRICS}", b"b\n")  # it had asked before
        settle(anew)
    assert (near / METRICS).read_bytes() == b"new\n"


def test_a_host_copies_half_a_minute_after_server_0_has_but_at_least_each_minute() -> None:
    assert due(100.0, -math.inf) == 130.0
    assert due(100.0, 110.0) == 140.0
    assert [due(100.0, heard) for heard in (130.0, 159.0, 400.0)] == [160.0] * 3


def test_processes_of_a_host_copy_at_once_without_a_gap_or_a_line_twice(near: StorePlace, tmp_path: Path) -> None:
    folders = begin(near, folder(tmp_path, "work"))
    errors: list[BaseException] = []

    def add_and_copy(who: int) -> None:
        try:
            for at in range(25):
                add(folders, METRICS, f"{who} {at}")
                copy(folders)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add_and_copy, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert log_of(begin(near, folder(tmp_path, "next"))) == log_of(folders)


def test_what_other_hosts_log_is_taken_over_once_though_the_host_that_leads_starts_again(
    near: StorePlace, tmp_path: Path
) -> None:
    other = Work(Folders(near, folder(tmp_path, "other"), "host-0a"))
    lead = Work(begin(near, folder(tmp_path, "lead")))
    add(lead.folders, METRICS, '{"event": "start"}')
    add(other.folders, METRICS, '{"event": "eval", "version": 3}')
    other.copy()
    lead.copy()
    lead.copy()
    lead.close()
    again = Work(begin(near, folder(tmp_path, "again")))
    add(other.folders, METRICS, '{"event": "eval", "version": 4}')
    other.close()
    again.settle()
    events = [json.loads(line) for line in (near / METRICS).read_bytes().splitlines()]
    assert [event.get("version") for event in events] == [None, 3, 4]
    again.close()


def test_an_evaluator_on_another_host_reads_the_events_of_the_one_that_leads(near: StorePlace, tmp_path: Path) -> None:
    lead = begin(near, folder(tmp_path, "lead"))
    other = Folders(near, folder(tmp_path, "other"), "host-0a")
    write_whole(near / METRICS, b"")
    tail = HomeTail(other)
    add(lead, METRICS, '{"event": "generation", "version": 1}')
    add(other, METRICS, '{"event": "eval", "version": 2}')
    assert [event["version"] for event in tail.new()] == [2]
    copy(lead)
    assert [event["version"] for event in tail.new()] == [1]
    assert list(tail.new()) == []
    assert [event["version"] for event in HomeTail(other).new()] == [1, 2]


def test_a_work_folder_goes_with_its_run_and_its_logs_stay(near: StorePlace, tmp_path: Path) -> None:
    with working(near, leads=True, scratch=folder(tmp_path, "scratch")) as work:
        (work.folders.work / "logs").mkdir()
        (work.folders.work / "logs" / "server-0.log").write_text("said\n")
        assert str(work.folders.at_home(work.folders.work / "logs" / "server-0.log")) == f"{near}/logs/server-0.log"
        work.settle()
    assert list((tmp_path / "scratch").iterdir()) == []
    assert (near / "logs" / "server-0.log").read_bytes() == b"said\n"


# --- the lease --------------------------------------------------------------------------------------------------------


@pytest.fixture
def strangers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holders of leases that nobody can ask, and whose leases expire at once."""
    monkeypatch.setattr(leases, "is_running", lambda owner: None)
    monkeypatch.setattr(leases, "whoami", lambda: {"host": f"{random.random()}"})
    monkeypatch.setattr(leases, "EXPIRES_S", 0.0)


def test_of_many_who_take_a_lease_at_once_one_gets_it(home: StorePlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "is_running", lambda owner: True)
    monkeypatch.setattr(leases, "whoami", lambda: {"host": f"{random.random()}"})
    STORE.makedirs(home.uri)
    got, refused = [], []

    def take() -> None:
        mine = Lease(home / "lease")
        try:
            mine.take()
            got.append(mine)
        except JobError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 5)
    assert all("is in use by a run that has not ended" in line for line in refused)
    assert got[0].renew()
    got[0].release()
    Lease(home / "lease").take()


def test_a_holder_that_was_frozen_finds_that_it_has_lost(home: StorePlace, strangers: None) -> None:
    frozen, taker, third = (Lease(home / "lease") for _ in range(3))
    frozen.take()
    assert frozen.renew()
    taker.take()
    assert taker.renew()
    assert not frozen.renew()
    assert taker.renew()
    taker.release()
    third.take()
    assert not taker.renew()
    assert not frozen.renew()
    assert third.renew()


@pytest.mark.parametrize("seed", range(8))
def test_in_any_order_of_takings_and_renewals_the_last_taker_alone_renews(
    near: StorePlace, strangers: None, seed: int
) -> None:
    drawn, holders = random.Random(seed), [Lease(near / "lease") for _ in range(4)]
    owner: Lease | None = None
    for _ in range(80):
        at = drawn.randrange(len(holders))
        if drawn.random() < 0.3:
            holders[at] = Lease(near / "lease")  # its process starts again
        one = holders[at]
        if not one.number and drawn.random() < 0.5:
            one.take()
            owner = one
        elif one is owner and drawn.random() < 0.1:
            one.release()
            owner = None
        else:
            assert one.renew() == (one is owner)
    assert len(listing(near)) <= 3


def test_a_lease_that_is_renewed_while_somebody_waits_for_it_is_not_taken(
    near: StorePlace, strangers: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(leases, "EXPIRES_S", 60.0)
    holder = Lease(near / "lease")
    holder.take()
    monkeypatch.setattr(time, "sleep", lambda seconds: holder.renew())
    with pytest.raises(JobError, match="is in use by a run that has not ended"):
        Lease(near / "lease").take()
    assert capsys.readouterr().err == (
        f"{near} may still be in use by an earlier start; waiting 60 s to see whether it is\n"
    )
    assert holder.renew()


def test_a_lease_of_a_dead_process_of_this_machine_is_taken_at_once(near: StorePlace) -> None:
    program = (
        "import os, sys; from tests.test_homes import *; Lease(StorePlace(sys.argv[1], STORE)).take(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program, f"{near}/lease"], check=True)
    with leased(near):
        pass
    taken = Lease(near / "lease")
    taken.take()
    with pytest.raises(JobError, match="in use"):
        Lease(near / "lease").take()


def test_a_lease_that_could_not_be_given_back_is_free_for_the_same_process(
    near: StorePlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no NameNode")

    with monkeypatch.context() as patched, leased(near):
        patched.setattr(Store, "put_new", refuse)
    with leased(near):
        pass


def test_who_has_lost_a_lease_is_told_so(near: StorePlace, strangers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "RENEW_S", 0.01)
    lost = threading.Event()
    with leased(near, lost.set):
        until(partial(takes, Lease(near / LEASE)), "a taking between two renewals")
        assert lost.wait(60)


def takes(one: Lease) -> bool:
    try:
        one.take()
    except JobError:
        return False
    return True


# --- addresses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "part"),
    [
        ("webhdfs://name:9870/run", "for reading"),
        ("http://name/run", "for reading"),
        ("hdfs:/x", "no host"),
        ("ftp://name/run", "'ftp' is not supported"),
        ("s3://", "no bucket"),
        ("", "empty path"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_in_one_line(output: str, part: str) -> None:
    with pytest.raises(UsageError, match=part) as refused:
        resolve_home(output)
    assert str(refused.value).startswith("--output")
    assert "\n" not in str(refused.value)


def test_an_output_is_said_in_its_canonical_form() -> None:
    assert resolve_home("hdfs://name:8020/a/../run/") == "hdfs://name:8020/run"
    assert resolve_home("s3a://bucket/run/") == "s3://bucket/run"
    assert resolve_home("file:///x/run") == "/x/run"
    assert place_of("x") == Path.cwd() / "x"
