"""The commit under fire: a writer that is killed before each single file operation, rivals, stale locks, live hearts."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import DataError, UsageError
from pipeline.input.dataset import serial
from pipeline.shardset.attempt import LEASE_S, Attempt, _whoami
from pipeline.shardset.commit import has_leftovers, publish, refuse_unless, stamped, tidy
from pipeline.shardset.damage import all_damage
from pipeline.shardset.manifest import ShardSet, missing_file, open_committed, read_committed
from pipeline.storage.retries import STALL_S
from pipeline.storage.store import Store

FATAL = ("create", "makedirs", "rename", "delete")


@dataclass
class FatalFiles:
    """A file system whose process is killed by SIGKILL just before change number ``countdown[0]``."""

    inner: Any
    countdown: list[int]

    def __getattr__(self, name: str) -> Any:
        if name in FATAL:
            self.countdown[0] -= 1
            if self.countdown[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self.inner, name)


@dataclass(frozen=True)
class FatalStore(Store):
    countdown: list[int] = field(default_factory=list)

    def files(self, uri: str) -> Any:
        return FatalFiles(super().files(uri), self.countdown)


@dataclass(frozen=True)
class LateStore(Store):
    """Whose first file is written by another function."""

    late: list[Any] = field(default_factory=list)

    def write_new(self, uri: str, data: bytes) -> None:
        (self.late.pop() if self.late else Store.write_new)(self, uri, data)


def contents(name: str, workers: int) -> dict[str, bytes]:
    return {
        f"worker={w:03d}/part-{c:05d}.parquet": f"{name} {w} {c}".encode() * 50
        for w in range(workers)
        for c in range(2)
    } | {"_model/pca/arrays.npz": name.encode()}


def manifest_of(name: str, files: dict[str, bytes], workers: int) -> dict[str, Any]:
    def entry(path: str) -> dict[str, Any]:
        data = files[path]
        return {"path": path, "rows": 1, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    return {
        "format_version": 1,
        "strategy": name,
        "num_workers": workers,
        "workers": [
            {"index": w, "files": [entry(p) for p in files if p.startswith(f"worker={w:03d}/")]} for w in range(workers)
        ],
        "eval": None,
        "model": {"files": [{"path": p} for p in files if p.startswith("_model")]},
    }


def commit(store: Store, output: Path | str, name: str, workers: int, *, overwrite: bool = True) -> None:
    files = contents(name, workers)

    def supersedes(theirs: ShardSet) -> bool:
        refuse_unless(overwrite, theirs, "run")
        return True

    with Attempt(store, str(output), heartbeat_s=60) as attempt:
        before = read_committed(store, str(output))
        moves = []
        for path, data in files.items():
            staged = f"{attempt.folder}/task/{path}"
            store.makedirs(staged.rpartition("/")[0])
            store.write_new(staged, data)
            moves.append((staged, path))
        publish(attempt, manifest_of(name, files, workers), moves, before=before, supersedes=supersedes)


def killed_at(output: Path | str, name: str, workers: int, step: int) -> bool:
    """Commit in a forked process that is killed before file change number ``step``.

    Returns False where the whole commit takes no more than ``step`` changes, and was therefore never killed. Raises
    AssertionError where the process ended in any other way; its stack trace is on stderr."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            commit(FatalStore(countdown=[step]), output, name, workers)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the commit ended with {code} before file change {step}"
    return code != 0


def whole(output: Path) -> str | None:
    """The set a reader finds, every byte of it checked; None for none."""
    found = read_committed(Store(), str(output))
    if found is None:
        return None
    assert missing_file(found) is None
    for file in found.files():
        assert hashlib.sha256((output / file.path).read_bytes()).hexdigest() == file.sha256
    return str(found.manifest["strategy"])


def files_below(output: Path) -> set[str]:
    return {p.relative_to(output).as_posix() for p in output.rglob("*") if p.is_file()}


def files_of(output: Path) -> set[str]:
    """Those of the committed set."""
    found = open_committed(Store(), str(output))
    return found.paths() | {"manifest.json", f"_manifests/{found.manifest['version']:06d}.json"}


def assert_nothing_else(output: Path) -> None:
    """Nothing lies beside the committed set but numbers that were taken to keep dead runs out."""
    strays = files_below(output) - files_of(output)
    assert {stray for stray in strays if not stray.startswith("_manifests") or (output / stray).stat().st_size} == set()


def test_a_scripted_kill_that_never_comes_is_no_kill_and_a_commit_that_fails_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not killed_at(tmp_path / "set", "new", 2, 1000)
    assert whole(tmp_path / "set") == "new"
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(AssertionError, match="the commit ended with 1 before file change 1000"):
        killed_at(tmp_path / "file", "new", 2, 1000)
    assert "NotADirectoryError" in capfd.readouterr().err


@pytest.mark.parametrize("older", [False, True], ids=["first commit", "over an older set"])
def test_a_writer_killed_before_any_file_change_leaves_the_old_set_or_the_new_one_whole(
    tmp_path: Path, older: bool
) -> None:
    seen: set[str | None] = set()
    step = 0
    while True:
        output = tmp_path / str(step)
        if older:
            commit(Store(), output, "old", 3)
        killed = killed_at(output, "new", 2, step)
        found = whole(output)
        assert found in (("old" if older else None, "new") if killed else ("new",))
        seen.add(found)
        # the next run takes over, though the dead one's heartbeat is a moment old, and leaves nothing of it
        commit(Store(), output, "next", 2)
        assert whole(output) == "next"
        assert_nothing_else(output)
        if not killed:
            break
        step += 1
    assert step > 25, "the commit has more steps than that"
    assert seen == ({"old", "new"} if older else {None, "new"})


@pytest.mark.slow
def test_a_writer_killed_at_random_moments_never_shows_a_mixture(tmp_path: Path) -> None:
    began = time.monotonic()
    commit(Store(), tmp_path, "old", 3)
    usual = time.monotonic() - began
    script = (
        "import sys; from pathlib import Path\n"
        "from pipeline.storage.store import Store; from tests.test_commit import commit\n"
        "print('go', flush=True)\n"
        "while True: commit(Store(), Path(sys.argv[1]), 'a', 3); commit(Store(), Path(sys.argv[1]), 'b', 2)"
    )
    rng = random.Random(7)
    found = set()
    for _ in range(12):
        writer = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(rng.uniform(0, 6 * usual))
        writer.kill()
        writer.communicate()
        found.add(whole(tmp_path))
    assert found <= {"old", "a", "b"}
    assert len(found) > 1
    commit(Store(), tmp_path, "next", 1)
    time.sleep(0.01)  # one killed while it wrote its very first heartbeat names no process, so it is given its lease
    with Attempt(Store(), str(tmp_path), lease_s=0.001):
        pass
    assert whole(tmp_path) == "next"
    assert_nothing_else(tmp_path)


def test_a_run_killed_before_its_first_heartbeat_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "_attempts" / "0123456789ab").mkdir(parents=True)
    commit(Store(), tmp_path, "next", 1)
    assert whole(tmp_path) == "next"
    assert_nothing_else(tmp_path)


def test_a_run_whose_folder_is_removed_before_its_first_heartbeat_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_live_attempt_is_never_cleaned_away(tmp_path: Path) -> None:
    with Attempt(Store(), str(tmp_path)) as alive:
        Store().write_new(f"{alive.folder}/work", b"in progress")
        commit(Store(), tmp_path, "other", 2)
        assert Store().read(f"{alive.folder}/work") == b"in progress"
    assert whole(tmp_path) == "other"


def test_an_attempt_on_another_host_is_given_its_lease_and_then_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pipeline.shardset.attempt._whoami", lambda: {"host": "elsewhere", "namespace": "pid:[1]", "pid": 1}
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


def test_a_process_that_runs_on_this_host_is_alive_however_long_its_heart_has_not_been_heard(tmp_path: Path) -> None:
    """A computation that holds the interpreter's lock, or a stalled write, holds the heartbeat up too."""
    with Attempt(Store(), str(tmp_path), heartbeat_s=3600) as held_up, Attempt(Store(), str(tmp_path)) as other:
        old = time.time() - 100 * LEASE_S
        os.utime(f"{held_up.folder}/beat", (old, old))
        assert other.alive(held_up.id)
        assert other.remove_abandoned() == []


def test_another_process_of_the_same_number_is_not_the_one_that_died(tmp_path: Path) -> None:
    with Attempt(Store(), str(tmp_path)) as other:
        gone = f"{tmp_path}/_attempts/0123456789ab"
        Store().makedirs(gone)
        owner = _whoami() | {"started": "1"}  # this process began later
        Store().write_new(f"{gone}/beat", json.dumps(owner).encode())
        assert not other.alive("0123456789ab")
        assert other.remove_abandoned() == ["0123456789ab"]


def test_a_lease_outlasts_every_stall_that_a_live_driver_may_wait_for() -> None:
    assert LEASE_S > 2 * STALL_S


def test_what_a_killed_overwrite_left_is_found_and_deleted_and_other_peoples_files_are_not(tmp_path: Path) -> None:
    commit(Store(), tmp_path, "first", 2)
    (tmp_path / "worker=000" / "mine.txt").write_text("keep")
    committed = open_committed(Store(), str(tmp_path))
    assert not has_leftovers(Store(), committed)
    (tmp_path / "worker=001" / "part-00000-old.parquet").write_bytes(b"of an earlier set")
    (tmp_path / "_report.html-01234567").write_bytes(b"half")
    assert has_leftovers(Store(), committed)
    with Attempt(Store(), str(tmp_path)) as attempt:
        assert tidy(attempt) == 2
    assert not has_leftovers(Store(), committed)
    assert (tmp_path / "worker=000" / "mine.txt").read_text() == "keep"
    assert whole(tmp_path) == "first"


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
    stamp = open_committed(Store(), str(tmp_path)).manifest["generation"]
    for path in contents("first", 2):
        place = f"{tmp_path}/{stamped(path, stamp)}"
        moved = before.index(f"-> {place}")
        assert any(event.endswith(path) for event in before[:moved]), path
        assert place.rpartition("/")[0] in before[moved:], path
    assert before[-1].endswith(f"{stamp}-manifest.json")
    assert after[1] == f"{tmp_path}/_manifests"
    assert f"-> {tmp_path}/manifest.json" in after
    assert str(tmp_path) in after


@pytest.mark.parametrize("damage", ["bytes", "cut", "gone", "none"])
def test_damage_is_told_by_content_and_not_by_size_alone(damage: str, tmp_path: Path) -> None:
    commit(Store(), tmp_path, "first", 2)
    victim = tmp_path / open_committed(Store(), str(tmp_path)).files()[-1].path
    data = victim.read_bytes()
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes({"bytes": data[:-1] + b"?", "cut": data[:-1], "none": data}[damage])
    found = all_damage(open_committed(Store(), str(tmp_path)), serial)
    expected = {"bytes": "has other content than was committed", "cut": "bytes, not", "gone": "is missing"}
    assert [expected[damage] in line for line in found] == ([True] if damage != "none" else [])


def test_of_two_runs_the_later_one_does_not_undo_the_first_without_overwrite(tmp_path: Path) -> None:
    store, output = Store(), str(tmp_path)

    def refuse(theirs: ShardSet) -> bool:
        refuse_unless(False, theirs, "run")
        return True

    with Attempt(store, output) as late:
        commit(store, tmp_path, "first", 2)
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
    assert kept.manifest["strategy"] == whole(tmp_path) == "first"


def test_other_peoples_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    (tmp_path / "worker=000").mkdir()
    (tmp_path / "worker=000" / "mine.parquet").write_text("keep")
    commit(Store(), tmp_path, "a", 1)
    commit(Store(), tmp_path, "b", 1)
    assert (tmp_path / "notes" / "mine.txt").read_text() == "keep"
    assert (tmp_path / "worker=000" / "mine.parquet").read_text() == "keep"


@pytest.mark.parametrize(
    ("text", "expected"),
    [(None, "no shards were ever committed"), ("{", "not a shard manifest"), ('{"format_version": 9}', "version 9")],
)
def test_what_is_not_a_committed_set_is_refused_in_one_line(tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(DataError, match=expected):
        open_committed(Store(), str(tmp_path))


def test_links_in_an_output_are_neither_followed_nor_taken_for_an_empty_folder(tmp_path: Path) -> None:
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


def test_a_report_does_not_outlive_the_set_it_tells_of(tmp_path: Path) -> None:
    commit(Store(), tmp_path, "a", 1)
    for name in ("report.html", "quality.json", "_report.html-0123abcd"):
        (tmp_path / name).write_text("of a")
    commit(Store(), tmp_path, "b", 1)
    assert whole(tmp_path) == "b"
    assert_nothing_else(tmp_path)
