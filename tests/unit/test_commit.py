"""The commit under fire: a writer that is killed before each single file operation, rivals, stale locks, live hearts."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.shardset.attempt import LEASE_S, Attempt, is_running, whoami
from pipeline.core.shardset.commit import has_leftovers, publish, refuse_unless, tidy
from pipeline.core.shardset.damage import all_damage
from pipeline.core.shardset.manifest import ShardSet, open_committed
from pipeline.core.shardset.versions import stamped_path, unstamped
from pipeline.core.storage.retries import STALL_S
from pipeline.core.storage.store import Store
from pipeline.input.dataset import serial
from pipeline.runs.report import replace_below
from pipeline.upkeep.clean import leftovers
from tests.support.commits import assert_nothing_else, commit, contents, killed_at, manifest_of, staged, whole
from tests.support.places import STORE, elsewhere, put


@dataclass(frozen=True)
class LateStore(Store):
    """Whose first file is written by another function."""

    late: list[Any] = field(default_factory=list)

    def write_new(self, uri: str, data: bytes | Path) -> None:
        (self.late.pop() if self.late else Store.write_new)(self, uri, data)


class OnceFaulty:
    """Files of which one operation, number ``at``, fails once with an error that passes. lost: after it was carried out."""

    NAMES = ("create", "delete", "info", "list", "makedirs", "open", "rename", "sync_folder")

    def __init__(self, inner: Any, at: int, *, lost: bool) -> None:
        self.inner, self.left, self.lost, self.lock = inner, at, lost, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.inner, name)
        if name not in self.NAMES:
            return function

        def call(*arguments: Any) -> Any:
            with self.lock:
                self.left -= 1
                now = self.left == -1
            if now and not self.lost:
                raise OSError(errno.EIO, "the NameNode is failing over")
            result = function(*arguments)
            if now:
                raise OSError(errno.EIO, "the answer was lost")
            return result

        return call


@dataclass(frozen=True)
class OnceFaultyStore(Store):
    faulty: list[Any] = field(default_factory=list)

    def files(self, uri: str) -> Any:
        return self.faulty[0]


@pytest.mark.parametrize(
    ("lost", "each"),
    [
        pytest.param(False, 1, marks=pytest.mark.full, id="refused"),
        pytest.param(True, 1, marks=pytest.mark.full, id="lost-answer"),
        pytest.param(True, 5, id="lost-answer-of-every-fifth"),
    ],
)
def test_a_failure_that_passes_ends_no_commit(
    lost: bool, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail each operation of a commit once: the work of hours is staged by then."""
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # hundreds of commits, whose power is not cut
    commit(STORE, tmp_path / "old", "old", 2)
    for at in count(0, each):
        output = str(shutil.copytree(tmp_path / "old", tmp_path / str(at)))
        files = contents("new", 2)
        with Attempt(STORE, output, heartbeat_s=3600) as attempt:
            moves, before = staged(attempt, files), open_committed(STORE, output)
            faulty = OnceFaulty(STORE.files(output), at, lost=lost)
            attempt.store = OnceFaultyStore(faulty=[faulty])
            publish(attempt, manifest_of("new", files, 2), moves, before=before, supersedes=lambda _: True)
            attempt.store = STORE
        assert whole(output) == "new", at
        assert_nothing_else(output)
        if faulty.left >= 0:
            break
    assert at > 20


def test_a_kill_that_never_comes_and_a_failed_commit_are_told_apart(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scripted kill that never comes is no kill and a commit that fails is an error."""
    assert not killed_at(tmp_path / "set", "new", 2, 1000)
    assert whole(tmp_path / "set") == "new"
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(AssertionError, match="the work ended with 1 before file change 1000"):
        killed_at(tmp_path / "file", "new", 2, 1000)
    assert "NotADirectoryError" in capfd.readouterr().err


def kill_before_changes(place: str, older: bool, workers: int, every: int) -> list[int]:
    """Commit into folders of their own, each time killed before another change; the changes, and their number at last."""
    steps = [0]
    while killed_at(f"{place}/{steps[-1]}", "new", workers, steps[-1], older):
        steps.append(steps[-1] + every)
    return steps


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "older"),
    [
        ("file", False),
        ("file", True),
        ("hdfs", True),
        ("s3", True),
    ],
    indirect=["place"],
)
def test_a_killed_writer_leaves_the_old_or_the_new_set_whole(place: str, older: bool) -> None:
    """A writer killed before any file change leaves the old set or the new one whole: on a remote store any second one."""
    is_local = place.startswith("/")
    workers = 2 if is_local else 1
    every = 1 if is_local else 2
    steps = elsewhere(kill_before_changes, place, older, workers, every)
    assert steps[-1] > 15, "the commit has more steps than that"
    before = "old" if older else None
    seen = []
    for step in steps:
        output = f"{place}/{step}"
        seen.append(whole(output))
        if step % 4 and not is_local:
            continue
        # the next run takes over, though the dead one's heartbeat is a moment old, and leaves nothing of it
        commit(STORE, output, "next", workers)
        assert whole(output) == "next"
        assert_nothing_else(output)
    # one change is the commit: before it the old set, after it the new
    assert seen == [before] * seen.count(before) + ["new"] * seen.count("new")
    assert set(seen) == {before, "new"}


def test_an_output_that_is_a_broken_link_is_named(tmp_path: Path) -> None:
    output = tmp_path / "link"
    output.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"link is a symbolic link to \S+/nowhere, which does not exist; create it"):
        Attempt(Store(), str(output)).__enter__()
    assert not (tmp_path / "nowhere").exists()


def test_a_run_killed_before_its_first_heartbeat_leaves_nothing(tmp_path: Path) -> None:
    """A run killed before its first heartbeat leaves nothing to the next."""
    (tmp_path / "_attempts" / "0123456789ab").mkdir(parents=True)
    commit(Store(), tmp_path, "next", 1)
    assert whole(tmp_path) == "next"
    assert_nothing_else(tmp_path)


def test_the_next_run_completes_a_killed_removal(place: str) -> None:
    """The heartbeat may be gone already, and the rest of the folder is a moment old."""
    put(f"{place}/_attempts/0123456789ab/groups/kept", b"of a task")
    assert leftovers(STORE, place).attempts == [f"{place}/_attempts/0123456789ab"]
    commit(STORE, place, "next", 1)
    assert whole(place) == "next"
    assert_nothing_else(place)


def test_a_run_restores_a_folder_removed_before_its_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose folder is removed before its first heartbeat makes it again."""
    write_new = Store.write_new

    def late(store: Store, uri: str, data: bytes) -> None:
        with Attempt(Store(), str(tmp_path)):  # finds the folder without a heartbeat
            assert not Path(uri).parent.exists()
        write_new(store, uri, data)

    attempt = Attempt(Store(), str(tmp_path))
    monkeypatch.setattr(attempt, "store", LateStore(late=[late]))
    with attempt:
        assert Path(attempt.folder, "beat").read_bytes()
    assert list(tmp_path.iterdir()) == []


def test_a_live_attempt_is_never_cleaned_away(place: str) -> None:
    with Attempt(STORE, place) as alive:
        STORE.write_new(f"{alive.folder}/work", b"in progress")
        commit(STORE, place, "other", 2)
        assert STORE.read(f"{alive.folder}/work") == b"in progress"
    assert whole(place) == "other"


def test_another_hosts_attempt_is_cleaned_after_its_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt on another host is given its lease and then cleaned."""
    monkeypatch.setattr(
        "pipeline.core.shardset.attempt.whoami", lambda: {"host": "elsewhere", "namespace": "pid:[1]", "pid": 1}
    )
    first = Attempt(Store(), str(tmp_path))
    Store().makedirs(first.folder)
    first._send_heartbeat()
    monkeypatch.undo()
    with Attempt(Store(), str(tmp_path)) as second:
        assert second.alive(first.id)
        assert second.remove_abandoned() == []
        old = time.time() - LEASE_S - 1
        os.utime(f"{first.folder}/beat", (old, old))
        assert second.remove_abandoned() == [first.id]


@pytest.mark.full
def test_the_lease_of_another_host_counts_by_the_stores_clock(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3's clock has whole seconds."""
    monkeypatch.setattr(
        "pipeline.core.shardset.attempt.whoami", lambda: {"host": "elsewhere", "namespace": "n", "pid": 1}
    )
    with Attempt(STORE, place, heartbeat_s=3600) as silent, Attempt(STORE, place, heartbeat_s=0.3) as living:
        monkeypatch.undo()
        with Attempt(STORE, place, lease_s=8.0) as other:
            assert other.alive(silent.id)
            assert other.remove_abandoned() == []
            time.sleep(9.5)
            assert other.alive(living.id)
            assert other.remove_abandoned() == [silent.id]


def test_equal_host_names_do_not_identify_a_machine(tmp_path: Path) -> None:
    """Machines made from one image share a host name, and each one's first namespace of processes has the same number."""
    here = whoami()
    assert is_running(here)
    assert is_running(here | {"boot": "of another machine", "pid": 1 << 30}) is None
    assert is_running({key: value for key, value in here.items() if key != "boot"}) is None


def test_a_file_system_that_always_overwrites_is_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some FUSE and SMB mounts have neither hard links nor renameat2."""

    def no_links(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", target)

    def no_rename(source: str, target: str) -> None:
        raise OSError(errno.EINVAL, "a file system without hard links", target)

    monkeypatch.setattr(os, "link", no_links)
    monkeypatch.setattr("pipeline.core.storage.local.rename_no_replace", no_rename)
    output = tmp_path / "set"
    with pytest.raises(UsageError, match=r"no hard links .* choose another --output"), Attempt(STORE, str(output)):
        pytest.fail("the run began")
    assert not output.exists()


def test_a_running_local_process_is_alive_without_heartbeats(place: str) -> None:
    """A computation that holds the interpreter's lock, or a stalled write, holds the heartbeat up too."""
    with Attempt(STORE, place, heartbeat_s=3600) as held_up, Attempt(STORE, place, lease_s=-100) as other:
        assert other.alive(held_up.id)
        assert other.remove_abandoned() == []


def test_another_process_of_the_same_number_is_not_the_one_that_died(place: str) -> None:
    with Attempt(STORE, place) as other:
        gone = f"{place}/_attempts/0123456789ab"
        owner = whoami() | {"started": "1"}  # this process began later
        put(f"{gone}/beat", json.dumps(owner).encode())
        assert not other.alive("0123456789ab")
        assert other.remove_abandoned() == ["0123456789ab"]


def test_a_lease_outlasts_every_stall_that_a_live_driver_may_wait_for() -> None:
    assert LEASE_S > 2 * STALL_S


def test_leftovers_are_deleted_and_foreign_files_are_not(place: str) -> None:
    commit(STORE, place, "first", 2)
    put(f"{place}/worker=000/mine.txt", b"keep")
    committed = open_committed(STORE, place)
    assert not has_leftovers(STORE, committed)
    put(f"{place}/worker=001/part-00000-old.parquet", b"of an earlier set")
    put(f"{place}/_report.html-01234567", b"half")
    assert has_leftovers(STORE, committed)
    assert tidy(STORE, committed) == 2
    assert not has_leftovers(STORE, committed)
    assert tidy(STORE, committed) == 0
    assert STORE.read(f"{place}/worker=000/mine.txt") == b"keep"
    assert whole(place) == "first"


def test_what_was_written_is_on_the_disk_when_the_manifest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file, and the names in every folder, before the rename that commits; and that rename itself after it."""
    events: list[str] = []
    fsync, replace, link = os.fsync, os.replace, os.link

    def note(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def rename(source: str, target: str) -> None:
        events.append(f"-> {target}")
        replace(source, target)

    def put(source: str, target: str) -> None:
        events.append(f"-> {target}")
        link(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", rename)
    monkeypatch.setattr(os, "link", put)
    commit(Store(), tmp_path, "first", 2)
    at = events.index(f"-> {tmp_path}/_manifests/000001.json")
    before, after = events[:at], events[at:]
    stamp = open_committed(Store(), str(tmp_path)).manifest.generation
    for path in contents("first", 2):
        place = f"{tmp_path}/{stamped_path(path, stamp)}"
        moved = before.index(f"-> {place}")
        assert any(event.endswith(path) for event in before[:moved]), path
        assert place.rpartition("/")[0] in before[moved:], path
    assert before[-1].endswith(f"{stamp}-manifest.json")
    assert after[1] == f"{tmp_path}/_manifests"
    assert f"-> {tmp_path}/manifest.json" in after
    assert str(tmp_path) in after


@pytest.mark.parametrize("damage", ["bytes", "cut", "gone", "none"])
def test_damage_is_told_by_content_and_not_by_size_alone(damage: str, place: str) -> None:
    commit(STORE, place, "first", 2)
    victim = f"{place}/{open_committed(STORE, place).files()[-1].path}"
    data = STORE.read(victim)
    if damage == "gone":
        STORE.delete(victim)
    else:
        put(victim, {"bytes": data[:-1] + b"?", "cut": data[:-1], "none": data}[damage])
    found = all_damage(open_committed(STORE, place), serial).values()
    expected = {"bytes": "has other content than was committed", "cut": "bytes, not", "gone": "is missing"}
    assert [expected[damage] in line for line in found] == ([True] if damage != "none" else [])


@pytest.mark.parametrize("damage", ["byte", "cut", "gone"])
def test_damage_of_a_saved_model_is_found(damage: str, place: str) -> None:
    commit(STORE, place, "first", 2)
    shards = open_committed(STORE, place)
    path = (shards.manifest.model or [""])[0]
    data = STORE.read(f"{place}/{path}")
    STORE.delete(f"{place}/{path}")
    if damage != "gone":
        changed = data.replace("first".encode("utf-32-le"), "worst".encode("utf-32-le"))
        assert changed != data
        put(f"{place}/{path}", changed if damage == "byte" else data[:-1])
    [line] = all_damage(shards, serial).values()
    expected = {"byte": "Bad CRC-32", "cut": "it is no .npz file", "gone": "is missing"}
    assert expected[damage] in line


def test_a_later_run_replaces_the_first_only_with_overwrite(place: str) -> None:
    store, output = STORE, place

    def refuse(theirs: ShardSet) -> bool:
        refuse_unless(False, theirs, "run")
        return True

    with Attempt(store, output) as late:
        commit(store, place, "first", 2)
        files = contents("late", 2)
        with pytest.raises(UsageError, match="already holds a committed set"):
            publish(
                late,
                manifest_of("late", files, 2),
                [],
                before=None,
                supersedes=refuse,
            )
        kept = publish(late, manifest_of("late", files, 2), [], before=None, supersedes=lambda theirs: False)
    assert kept.manifest.strategy == whole(place) == "first"


def test_other_peoples_files_are_left_alone(place: str) -> None:
    mine = [f"{place}/notes/mine.txt", f"{place}/worker=000/mine.parquet"]
    for path in mine:
        put(path, b"keep")
    commit(STORE, place, "a", 1)
    commit(STORE, place, "b", 1)
    assert [STORE.read(path) for path in mine] == [b"keep", b"keep"]


def test_one_shard_is_told_from_its_set(tmp_path: Path) -> None:
    commit(STORE, tmp_path, "a", 2)
    with pytest.raises(DataError, match=rf"one shard of a set; give the folder of the set, {tmp_path}$"):
        open_committed(STORE, f"{tmp_path}/worker=001")
    with pytest.raises(DataError, match="no shards were ever committed"):
        open_committed(STORE, f"{tmp_path}/worker=001/deeper")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "no shards were ever committed"), ("{", "not a shard manifest"), ('{"format_version": 9}', "version 9")],
)
def test_what_is_not_a_committed_set_is_refused_in_one_line(place: str, text: str | None, expected: str) -> None:
    if text is not None:
        put(f"{place}/manifest.json", text.encode())
    with pytest.raises(DataError, match=expected):
        open_committed(STORE, place)


HOSTILE = (
    "../outside",
    "/etc/passwd",
    "worker=000/../../outside",
    "_model/x/../../../.bashrc",
    "",
    "a//b",
    "C:\\x",
    7,
    None,
)


@pytest.mark.parametrize("path", HOSTILE)
@pytest.mark.parametrize("part", ["workers", "eval", "assignment", "model"])
def test_a_path_out_of_the_set_is_refused(tmp_path: Path, part: str, path: object) -> None:
    """A manifest comes from whoever wrote the set; resharding would replace files that its paths name."""
    commit(STORE, tmp_path / "set", "a", 1)
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    entry = {"files": [{"path": path, "rows": 1, "bytes": 1, "sha256": "0" * 64}]}
    manifest[part] = [entry] if part == "workers" else entry
    for name in ("manifest.json", "_manifests/000001.json"):
        (tmp_path / "set" / name).write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"is damaged: .*not one inside the set's folder"):
        open_committed(STORE, str(tmp_path / "set"))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"workers": None}, "num_workers or workers is missing"),
        ({"num_workers": "two"}, "num_workers or workers is missing"),
        ({"workers": [3]}, r"workers\[0\] has no list of files"),
        ({"workers": [{"files": ["x"]}]}, r"workers\[0\] has no list of files"),
        ({"workers": [{"files": [{"path": "worker=000/a"}]}]}, "without its rows, bytes and sha256"),
        ({"eval": {"files": 3}}, "eval has no list of files"),
        ({"model": {"files": [{"path": "_model"}]}}, "is not _model/VERSION/NAME"),
    ],
)
def test_a_malformed_manifest_is_one_line(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    commit(STORE, tmp_path / "set", "a", 1)
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text()) | change
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=fault):
        open_committed(STORE, str(tmp_path / "set"))


def test_keys_that_a_later_version_adds_are_ignored(tmp_path: Path) -> None:
    commit(STORE, tmp_path / "set", "a", 1)
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    manifest["workers"][0]["files"][0]["compression"] = "zstd"
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    assert open_committed(STORE, str(tmp_path / "set")).files()[0].rows == 1


@pytest.mark.parametrize("name", ["1.json", "0000001.json", "00002.json"])
def test_a_version_under_another_name_is_no_version(tmp_path: Path, name: str) -> None:
    """Counted as version 1 or 2, it was looked for under the name of that version, for ever."""
    commit(STORE, tmp_path / "set", "a", 1)
    (tmp_path / "set" / "_manifests" / "000001.json").rename(tmp_path / "set" / "_manifests" / name)
    (tmp_path / "set" / "manifest.json").unlink()
    with pytest.raises(DataError, match="no shards were ever committed"):
        open_committed(STORE, str(tmp_path / "set"))


@pytest.mark.parametrize("version", [1, None])
def test_a_manifest_of_another_version_is_refused(tmp_path: Path, version: int | None) -> None:
    """manifest.json was overwritten with it for ever, as it stayed older than the version."""
    commit(STORE, tmp_path, "a", 1)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    del manifest["version"]
    own = {} if version is None else {"version": version}
    (tmp_path / "_manifests" / "000002.json").write_text(json.dumps(manifest | own))
    with pytest.raises(DataError, match=r"000002.json is damaged: its version is [01], not 2; restore it"):
        leftovers(STORE, str(tmp_path))


def test_links_in_an_output_are_not_followed(tmp_path: Path) -> None:
    """Links in an output are neither followed nor taken for an empty folder."""
    output, elsewhere = tmp_path / "o", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious.txt").write_text("keep")
    commit(Store(), output, "a", 2)
    (output / "latest").symlink_to("gone")
    (output / "worker=000" / "dangling").symlink_to("gone")
    (output / "_model" / "kept").symlink_to(elsewhere)
    (output / "_model_notes").mkdir()
    commit(Store(), output, "b", 2)
    assert whole(output) == "b"
    assert (elsewhere / "precious.txt").read_text() == "keep"
    assert (output / "latest").is_symlink()
    assert (output / "_model_notes").is_dir()


def test_a_refused_run_leaves_a_folder_that_was_there_before(tmp_path: Path) -> None:
    with Attempt(Store(), str(tmp_path)):
        pass
    assert tmp_path.is_dir()
    assert not any(tmp_path.iterdir())


@dataclass(frozen=True)
class SweptStore(Store):
    """Whose next renames find that another run's sweep has deleted the source; before: what that run does beside."""

    before: list[Any] = field(default_factory=list)

    def rename(self, source: str, target: str, *, overwrite: bool = False) -> None:
        if self.before:
            Store().delete(source)
            self.before.pop()()
        super().rename(source, target, overwrite=overwrite)


def test_a_report_whose_draft_was_swept_is_written_again(tmp_path: Path) -> None:
    commit(STORE, tmp_path, "a", 1)
    shards = replace(open_committed(STORE, str(tmp_path)), store=SweptStore(before=[lambda: None, lambda: None]))
    replace_below(shards, "report.html", b"page")
    assert (tmp_path / "report.html").read_bytes() == b"page"
    late = replace(shards, store=SweptStore(before=[lambda: commit(STORE, tmp_path, "b", 1)]))
    with pytest.raises(JobError, match="holds another set, or none, since it was measured; if it has no report, run"):
        replace_below(late, "report.html", b"of a")
    assert not (tmp_path / "report.html").exists()


def test_a_late_report_leaves_no_file_of_an_older_set(tmp_path: Path) -> None:
    commit(STORE, tmp_path, "a", 1)

    def overtaken(store: Store, uri: str, data: bytes) -> None:
        commit(STORE, tmp_path, "b", 1)
        Store.write_new(store, uri, data)

    late = replace(open_committed(STORE, str(tmp_path)), store=LateStore(late=[overtaken]))
    with pytest.raises(JobError, match="holds another set"):
        replace_below(late, "quality.json", b"of a")
    assert not (tmp_path / "quality.json").exists()


def test_a_late_report_keeps_that_of_the_newer_set(tmp_path: Path) -> None:
    commit(STORE, tmp_path, "a", 1)
    shards = open_committed(STORE, str(tmp_path))
    commit(STORE, tmp_path, "b", 1)
    replace_below(open_committed(STORE, str(tmp_path)), "quality.json", b"of b")
    with pytest.raises(JobError, match="holds another set"):
        replace_below(shards, "quality.json", b"of a, measured until b was committed")
    assert (tmp_path / "quality.json").read_bytes() == b"of b"


def test_a_report_does_not_outlive_the_set_it_tells_of(place: str) -> None:
    commit(STORE, place, "a", 1)
    for name in ("report.html", "quality.json", "_report.html-0123abcd"):
        put(f"{place}/{name}", b"of a")
    commit(STORE, place, "b", 1)
    assert whole(place) == "b"
    assert_nothing_else(place)


@pytest.mark.parametrize("path", ["worker=000/part-00001.parquet", "_eval/part-00000.parquet"])
@pytest.mark.parametrize("stamp", ["v1-0123456789ab", "v42-ffffffffffff", "0123456789ab"])
def test_a_file_s_place_is_the_same_whichever_version_it_is_of(path: str, stamp: str) -> None:
    """By it runs and studies know a set again that was made once more."""
    assert stamped_path(path, stamp) != path
    assert unstamped(stamped_path(path, stamp)) == unstamped(path) == path
