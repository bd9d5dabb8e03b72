"""The log of a run whose home is elsewhere: copied as segments, joined by whoever starts next."""

from __future__ import annotations

import io
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import JobError
from pipeline.core.storage.store import Store
from tests.support.configs import make_config
from tests.support.full_disk import limited_files
from trainer.home import segments
from trainer.home.folders import Folders
from trainer.home.place import Place, StorePlace, listing, write_whole
from trainer.home.segments import (
    SegmentListing,
    SupersededError,
    apply_segments,
    begin_start,
    complete_log,
    copy,
    list_segments,
    merge,
    unread,
    write_whole_log,
)
from trainer.home.work import WorkFolder, next_copy_time, working
from trainer.run_files import METRICS, PUSHES, SEGMENTS
from trainer.runlog import event_tail
from trainer.runlog.event_tail import HomeTail
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.read import events_in, read_events
from trainer.runlog.run_folder import OWNED, Start, prepare_folder
from trainer.runlog.run_record import RunRecord


def with_segments(base: bytes, parts: list[tuple[int, bytes]]) -> bytes:
    file = io.BytesIO(base)
    apply_segments(file, parts)
    return file.getvalue()


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=6), have=st.integers(0, 40))
def test_segments_put_in_their_places_twice_change_nothing(data: bytes, cuts: list[int], have: int) -> None:
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [(first, data[first:last]) for first, last in itertools.pairwise(ends)]
    assert with_segments(data[:have], parts) == data
    assert with_segments(with_segments(b"", parts), parts) == data


def test_the_later_start_counts_and_gaps_are_errors() -> None:
    assert with_segments(b"base", [(4, b"-late-old"), (4, b"-new")]) == b"base-new"
    assert with_segments(b"base", [(2, b"s")]) == b"base"
    with pytest.raises(ValueError, match="bytes 4 to 9 are missing"):
        with_segments(b"base", [(9, b"x")])


def test_settled_segments_do_not_count() -> None:
    """The segments of starts are in their order and settled ones do not count."""
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
    log = SegmentListing.from_listing(names)
    assert [(part.source, part.offset) for part in log.leader_segments(METRICS)] == [
        ("000009", 0),
        ("000009", 7),
        ("000010", 0),
    ]
    assert (log.last_start, log.last_settled_start) == (10, 8)
    assert (log.end("000009", METRICS), log.end("000009", PUSHES)) == (10, None)
    assert [part.source for part in log.foreign_segments()] == ["host-0a"]
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


def test_a_start_begins_with_the_log_of_killed_starts(home: StorePlace, tmp_path: Path) -> None:
    """A start begins with the log of those before it wherever they were killed."""
    first = begin_start(home, folder(tmp_path, "first"))
    add(first, METRICS, "a", "b")
    copy(first)
    add(first, METRICS, "c")
    add(first, PUSHES, "columns", "1")
    copy(first)
    copied = log_of(first)
    (first.work / METRICS).write_bytes(copied[METRICS] + b"torn")
    copy(first)
    second = begin_start(home, folder(tmp_path, "second"))
    assert log_of(second) == copied
    add(second, PUSHES, "2")
    complete_log(second)
    third = begin_start(home, folder(tmp_path, "third"))
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
        folders = begin_start(root, folder(tmp_path, f"a{step}"))
        for line in "abc":
            add(folders, METRICS, line)
            add(folders, PUSHES, line)
            copy(folders)
        with monkeypatch.context() as patched:
            changes[0] = step
            for name in ("replace", "put_new", "delete"):
                patched.setattr(Store, name, failing(changes, getattr(Store, name)))
            try:
                complete_log(folders)
                done = True
            except JobError:
                done = False
        assert log_of(begin_start(root, folder(tmp_path, f"b{step}"))) == log_of(folders)
        if done:
            break
    assert step > 6


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments are merged three at a time where there are more than four."""
    monkeypatch.setattr(segments, "MOST", 4)
    monkeypatch.setattr(segments, "MERGED", 3)


def segments_in(home: StorePlace) -> list[str]:
    return [name for name in listing(home / SEGMENTS) if name.endswith(METRICS)]


def copy_and_merge(folders: Folders) -> None:
    merge(folders, copy(folders))


def test_a_long_runs_segments_stay_few(near: StorePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each copy holds is written to the home a few times at most."""
    monkeypatch.setattr(segments, "MOST", 16)
    monkeypatch.setattr(segments, "MERGED", 8)
    work = begin_start(near, folder(tmp_path, "work"))
    written = 0
    put, replace = Store.put_new, Store.replace

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(store: Store, path: str, data: bytes) -> Any:
            nonlocal written
            written += len(data)
            return change(store, path, data)

        return call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Store, "put_new", counted(put))
        patched.setattr(Store, "replace", counted(replace))
        for line in range(200):
            add(work, METRICS, f"{line:09d}")
            copy_and_merge(work)
            assert len(segments_in(near)) <= segments.MOST + 1
    assert written < 4 * 10 * 200
    assert log_of(begin_start(near, folder(tmp_path, "next"))) == log_of(work)


@pytest.mark.usefixtures("few")
def test_a_merge_that_is_killed_anywhere_loses_nothing(
    near: StorePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same start goes on, as when a store did not answer, or another one begins."""
    for step in itertools.count():
        root = near / str(step)
        first = begin_start(root, folder(tmp_path, f"a{step}"))
        for line in "abcde":
            add(first, METRICS, line)
            log = copy(first)
        log = list_segments(root)
        with monkeypatch.context() as patched:
            changes = [step]
            for name in ("replace", "put_new", "delete"):
                patched.setattr(Store, name, failing(changes, getattr(Store, name)))
            try:
                merge(first, log)
                done = True
            except JobError:
                done = False
        copy_of_log = tmp_path / "log"
        write_whole_log(root, METRICS, list_segments(root), copy_of_log)
        assert copy_of_log.read_bytes() == log_of(first)[METRICS]
        for line in "fgh":
            add(first, METRICS, line)
            copy_and_merge(first)
        assert len(segments_in(root)) <= 5
        assert log_of(begin_start(root, folder(tmp_path, f"b{step}"))) == log_of(first)
        if done:
            break
    assert step == 3, "one merged segment is written, and two others are deleted"


@pytest.mark.usefixtures("few")
def test_a_frozen_start_that_merges_changes_no_later_log(near: StorePlace, tmp_path: Path) -> None:
    frozen = begin_start(near, folder(tmp_path, "frozen"))
    for line in "abcde":
        add(frozen, METRICS, line)
        log = copy(frozen)
    log = list_segments(near)
    later = begin_start(near, folder(tmp_path, "later"))
    for line in "fghijk":
        add(later, METRICS, line)
        copy_and_merge(later)
    merge(frozen, log)  # it had asked before the later one began
    assert log_of(begin_start(near, folder(tmp_path, "after"))) == log_of(later)
    complete_log(last := begin_start(near, folder(tmp_path, "last")))
    merge(frozen, log)
    assert log_of(begin_start(near, folder(tmp_path, "end"))) == log_of(last) == log_of(later)


@pytest.mark.usefixtures("few")
def test_a_start_that_begins_while_segments_are_merged_reads_all(
    near: StorePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = begin_start(near, folder(tmp_path, "first"))
    for line in "abcde":
        add(first, METRICS, line)
        copy(first)
    log, write = list_segments(near), segments.write_whole_log

    def merged_meanwhile(*args: Any) -> int:
        merge(first, log)
        return write(*args)

    monkeypatch.setattr(segments, "write_whole_log", merged_meanwhile)
    assert log_of(begin_start(near, folder(tmp_path, "second"))) == log_of(first)


@pytest.mark.usefixtures("few")
def test_merged_segments_are_read_once(near: StorePlace, tmp_path: Path) -> None:
    """By an evaluator on another host, and by the host that leads of what others log."""
    lead = WorkFolder(begin_start(near, folder(tmp_path, "lead")))
    other = WorkFolder(Folders(near, folder(tmp_path, "other"), "host-0a"))
    tail = HomeTail(Folders(near, folder(tmp_path, "far"), "host-0b"))
    found: list[int] = []
    for version in range(40):
        kind, of = ("eval", other) if version % 2 else ("epoch", lead)
        add(of.folders, METRICS, json.dumps({"event": kind, "version": version}))
        of.copy()
        if not version % 7:
            lead.copy()
        found += [event.version_or_zero() for event in tail.new()]
    lead.copy()
    found += [event.version_or_zero() for event in tail.new()]
    assert sorted(found) == list(range(40))
    logged = [json.loads(line)["version"] for line in (lead.folders.work / METRICS).read_bytes().splitlines()]
    assert sorted(logged) == list(range(40))
    assert len(segments_in(near)) <= 2 * (segments.MOST + 1)
    lead.close()
    other.close()


def test_a_segment_that_is_being_merged_is_read_at_the_next_look(near: StorePlace, tmp_path: Path) -> None:
    """A listing may name a segment that is gone, or lack one that was there."""
    lead = begin_start(near, folder(tmp_path, "lead"))
    for line in "abcd":
        add(lead, METRICS, line)
        copy(lead)
    listed, taken = list_segments(near).leader_segments(METRICS), dict[str, int]()
    first, second, third, fourth = listed
    write_whole(near / SEGMENTS / first.name, b"a\nb\nc\n")
    (near / SEGMENTS / second.name).unlink()
    (near / SEGMENTS / third.name).unlink()
    assert b"".join(unread(near, [first, second, third, fourth], taken)) == b"a\nb\nc\nd\n"
    taken = {first.source: 2}
    assert list(unread(near, [second, third, fourth], taken)) == []
    assert list(unread(near, [third, fourth], taken)) == []
    assert b"".join(unread(near, list_segments(near).leader_segments(METRICS), taken)) == b"b\nc\nd\n"


def failing(left: list[int], change: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **more: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise JobError("killed")
        return change(*args, **more)

    return call


def test_a_frozen_start_writes_nothing_after_a_later_one(near: StorePlace, tmp_path: Path) -> None:
    """A start that was frozen writes no more once a later one has begun."""
    frozen = WorkFolder(begin_start(near, folder(tmp_path, "frozen")))
    add(frozen.folders, METRICS, "a")
    frozen.copy()
    later = begin_start(near, folder(tmp_path, "later"))
    add(frozen.folders, METRICS, "of the frozen one")
    add(later, METRICS, "b")
    before = listing(near)
    for act in (frozen.copy, frozen.settle):
        with pytest.raises(SupersededError, match="later start"):
            act()
    assert listing(near) == before
    frozen.close()
    # one that was already past the question
    late = f"{int(frozen.folders.source):06d}-000000000002.{METRICS}"
    write_whole(near / SEGMENTS / late, b"of the frozen one\n")
    copy(later)
    assert log_of(begin_start(near, folder(tmp_path, "last")))[METRICS] == b"a\nb\n"
    complete_log(later_of := begin_start(near, folder(tmp_path, "settling")))
    write_whole(near / SEGMENTS / late, b"of the frozen one\n")
    assert log_of(begin_start(near, folder(tmp_path, "after")))[METRICS] == log_of(later_of)[METRICS] == b"a\nb\n"


def test_a_start_that_stalls_at_its_end_keeps_a_later_ones_log(
    near: StorePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last writes may wait for the home until another host has begun."""
    slow = begin_start(near, folder(tmp_path, "slow"))
    add(slow, METRICS, "a")
    later: list[Folders] = []

    def write_late(place: Place, data: bytes) -> None:
        if not later:
            later.append(begin_start(near, folder(tmp_path, "later")))
            add(later[0], METRICS, "b")
            copy(later[0])
        write_whole(place, data)

    copy(slow)
    with monkeypatch.context() as patch:
        patch.setattr(segments, "write_whole", write_late)
        with pytest.raises(SupersededError, match="later start"):
            complete_log(slow)
    assert log_of(begin_start(near, folder(tmp_path, "last")))[METRICS] == b"a\nb\n"


def test_a_new_run_has_nothing_of_an_earlier_frozen_start(near: StorePlace, tmp_path: Path) -> None:
    """A run that begins anew has nothing of a frozen start of the run before."""
    frozen = begin_start(near, folder(tmp_path, "frozen"))
    add(frozen, METRICS, "a")
    copy(frozen)
    record = RunRecord(make_config(), 2, 80, "digest")
    with prepare_folder(near, record, resume=False, overwrite=True) as start:
        assert start is Start.NEW
        anew = begin_start(near, folder(tmp_path, "anew"))
        add(anew, METRICS, "new")
        add(frozen, METRICS, "b")
        with pytest.raises(SupersededError):
            copy(frozen)
        write_whole(near / SEGMENTS / f"{frozen.source}-000000000002.{METRICS}", b"b\n")  # it had asked before
        complete_log(anew)
    assert (near / METRICS).read_bytes() == b"new\n"


def test_a_host_copies_at_least_each_minute() -> None:
    """A host copies half a minute after server 0 has but at least each minute."""
    assert next_copy_time(100.0, -math.inf) == 130.0
    assert next_copy_time(100.0, 110.0) == 140.0
    assert [next_copy_time(100.0, heard) for heard in (130.0, 159.0, 400.0)] == [160.0] * 3


def test_concurrent_copies_have_no_gap_and_no_repeated_line(near: StorePlace, tmp_path: Path) -> None:
    """Processes of a host copy at once without a gap or a line twice."""
    folders = begin_start(near, folder(tmp_path, "work"))
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
    assert log_of(begin_start(near, folder(tmp_path, "next"))) == log_of(folders)


def test_a_restarted_leader_takes_over_other_hosts_lines_once(near: StorePlace, tmp_path: Path) -> None:
    other = WorkFolder(Folders(near, folder(tmp_path, "other"), "host-0a"))
    lead = WorkFolder(begin_start(near, folder(tmp_path, "lead")))
    add(lead.folders, METRICS, '{"event": "start"}')
    add(other.folders, METRICS, '{"event": "eval", "version": 3}')
    other.copy()
    lead.copy()
    lead.copy()
    lead.close()
    again = WorkFolder(begin_start(near, folder(tmp_path, "again")))
    add(other.folders, METRICS, '{"event": "eval", "version": 4}')
    other.close()
    again.settle()
    events = [json.loads(line) for line in (near / METRICS).read_bytes().splitlines()]
    assert [event.get("version") for event in events] == [None, 3, 4]
    again.close()


def test_an_evaluator_elsewhere_reads_the_leaders_events(near: StorePlace, tmp_path: Path) -> None:
    """An evaluator on another host reads the events of the one that leads."""
    lead = begin_start(near, folder(tmp_path, "lead"))
    other = Folders(near, folder(tmp_path, "other"), "host-0a")
    write_whole(near / METRICS, b"")
    tail = HomeTail(other)
    add(lead, METRICS, '{"event": "generation", "generation": 1, "version": 1}')
    add(other, METRICS, '{"event": "eval", "version": 2}')
    assert [event.version for event in tail.new()] == [2]
    copy(lead)
    assert [event.version for event in tail.new()] == [1]
    assert list(tail.new()) == []
    assert [event.version for event in HomeTail(other).new()] == [1, 2]


def test_a_full_disk_costs_no_events_of_other_hosts(near: StorePlace, tmp_path: Path) -> None:
    """The leading host takes over again the events that it could not write."""
    other = Folders(near, folder(tmp_path, "other"), "host-0a")
    lines = [json.dumps({"event": "eval", "version": version}) for version in (1, 2, 3)]
    add(other, METRICS, *lines)
    copy(other)
    lead = WorkFolder(begin_start(near, folder(tmp_path, "lead")))
    with limited_files(len(lines[0]) + 9), pytest.raises(OSError, match="No space left"):
        lead.copy()
    lead.copy()
    assert [event.version for event in read_events(lead.folders.work / METRICS)] == [1, 2, 3]
    lead.close()


def test_a_failed_read_of_the_log_is_repeated(
    near: StorePlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluator tries again after an error, and must then know the evaluations before a resume."""
    lines = [json.dumps({"event": "eval", "version": version}).encode() + b"\n" for version in (1, 2)]
    write_whole(near / METRICS, b"".join(lines))
    tail = HomeTail(Folders(near, folder(tmp_path, "other"), "host-0a"))

    def fail_after_a_line(path: StorePlace) -> Iterator[LogEvent]:
        yield from events_in(lines[0])
        raise OSError("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(event_tail, "iter_events", fail_after_a_line)
        events = tail.new()
        assert next(events).version == 1
        with pytest.raises(OSError, match="the store is away"):
            next(events)
    assert [event.version for event in tail.new()] == [2]
    assert list(tail.new()) == []


def test_a_work_folder_goes_with_its_run_and_its_logs_stay(near: StorePlace, tmp_path: Path) -> None:
    with working(near, leads=True, scratch=folder(tmp_path, "scratch")) as work:
        (work.folders.work / "logs").mkdir()
        (work.folders.work / "logs" / "server-0.log").write_text("said\n")
        assert str(work.folders.home_place(work.folders.work / "logs" / "server-0.log")) == f"{near}/logs/server-0.log"
        work.settle()
    assert list((tmp_path / "scratch").iterdir()) == []
    assert (near / "logs" / "server-0.log").read_bytes() == b"said\n"
