"""The commit's one primitive, put if absent: frozen drivers that are thawed, and many that commit at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import JobError, UsageError
from pipeline.core.shardset import attempt as attempts
from pipeline.core.shardset import versions
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.shardset.commit import has_leftovers, remove_leftovers
from pipeline.core.shardset.manifest import missing_file, open_committed, read_committed
from pipeline.core.storage.local import LocalFiles
from pipeline.core.storage.store import Store
from tests.campaigns.commits import campaign
from tests.support.commits import assert_nothing_else, commit, watched, whole
from tests.support.places import STORE, elsewhere, put

pytestmark = pytest.mark.full  # dozens of processes a test


@dataclass
class Frozen:
    """A moment just before file change number ``at``, in which others work."""

    at: int
    others: Callable[[], object]
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self) -> None:
        with self.lock:
            self.done += 1
            if self.done - 1 == self.at:
                self.others()


@dataclass(frozen=True)
class FrozenStore(Store):
    moment: Frozen | None = None

    def files(self, uri: str) -> Any:
        assert self.moment
        return watched(super().files(uri), self.moment)


def rivals(output: str) -> dict[str, Callable[[], object]]:
    def tidied() -> None:
        with Attempt(STORE, output) as other:
            remove_leftovers(other)

    def twice() -> None:
        commit(STORE, output, "rival", 1)
        commit(STORE, output, "rival", 3)

    return {"commits": lambda: commit(STORE, output, "rival", 3), "tidies": tidied, "commits twice": twice}


def steps_of(place: str, folder: str) -> range:
    """The changes before which a driver is frozen: all of them, but on a remote store, where each takes seconds, a few. With
    EVERY_STEP in the environment all there too."""
    if place.startswith("/") or "EVERY_STEP" in os.environ:
        return range(1000)
    return range(5 if folder == "kept" else 9, 1000, 13)


@pytest.mark.parametrize(
    ("place", "older", "rival", "folder"),
    [
        ("file", True, "commits", "kept"),
        ("file", False, "tidies", "kept"),
        ("file", True, "commits twice", "kept"),
        ("file", True, "tidies", "deleted"),
        ("hdfs", True, "commits twice", "kept"),
        ("s3", True, "commits twice", "kept"),
        ("s3", True, "tidies", "deleted"),
    ],
    indirect=["place"],
)
def test_a_frozen_driver_commits_a_whole_set_or_none(
    older: bool, rival: str, folder: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """folder kept: what it has staged is still there when it is thawed, so that only the version can keep it out."""
    monkeypatch.setattr(Attempt, "alive", lambda *_: False)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # hundreds of commits, whose power is not cut
    if folder == "kept":
        monkeypatch.setattr(Attempt, "remove_abandoned", lambda *_: [])
    outcomes, steps = set(), steps_of(place, folder)
    for at in steps:
        output = f"{place}/{at}"
        if older:
            commit(STORE, output, "old", 2)
        moment = Frozen(at, rivals(output)[rival])
        try:
            commit(FrozenStore(moment=moment), output, "mine", 2)
            ended = "committed"
        except JobError as error:
            late = "committed, but not tidied up" in str(error)
            assert late or "another run considered this one dead" in str(error)  # noqa: PT017  either outcome is right
            ended = "committed" if late else "told"
        except FileNotFoundError:  # before it came to its commit
            assert folder == "deleted"
            ended = "told"
        found = whole(output)
        if ended == "told":
            assert found != "mine"
        outcomes.add((ended, found))
        commit(STORE, output, "next", 2)
        assert whole(output) == "next"
        assert_nothing_else(output)
        if moment.done <= at:
            break
    assert at > 25
    if steps.step == 1:
        assert {ended for ended, _ in outcomes} == {"committed", "told"} or rival == "commits"
    assert any(found == "mine" for _, found in outcomes)


def test_an_attempt_begins_though_others_remove_its_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that end delete empty folders, which may be several in the moment in which a run makes its own."""
    made: list[str] = []
    original = LocalFiles.makedirs

    def makedirs(self: LocalFiles, uri: str) -> None:
        made.append(uri)
        if len(made) == 1:
            raise FileNotFoundError(uri)  # a folder above it was removed
        original(self, uri)
        if len(made) < 6:
            Path(uri).rmdir()

    monkeypatch.setattr(LocalFiles, "makedirs", makedirs)
    monkeypatch.setattr(attempts, "CLAIM_PAUSE_S", 0.0)
    with Attempt(STORE, str(tmp_path / "set"), heartbeat_s=60) as attempt:
        assert Path(attempt.folder).is_dir()
    assert len(set(made)) == 1
    monkeypatch.setattr(attempts, "CLAIM_TRIES", 3)
    made.clear()
    with pytest.raises(FileNotFoundError, match="was removed 3 times"):
        Attempt(STORE, str(tmp_path / "set"), heartbeat_s=60).__enter__()


def race(output: str, name: str, rounds: int, overwrite: bool) -> list[str]:
    """Commit again and again; what became of it: the number of the version, or why not."""
    told = []
    for _ in range(rounds):
        try:
            told.append(str(commit(STORE, output, name, 3, overwrite=overwrite)))
        except (JobError, UsageError) as error:
            told.append(str(error))
    return told


def race_of(count: int, output: str, rounds: int, overwrite: bool) -> list[list[str]]:
    """What became of the commits of so many processes at once, by process."""
    with get_context("fork").Pool(count) as pool:
        return pool.starmap(race, [(output, f"run{i}", rounds, overwrite) for i in range(count)])


def watch(output: str, stop: threading.Event) -> int:
    """Read whole sets until told to stop; how many. A reader whose set was replaced reads the manifest again."""
    seen = 0
    while not stop.is_set():
        found = read_committed(STORE, output)
        if found and (line := missing_file(found)):
            again = read_committed(STORE, output)
            assert again
            assert again.manifest != found.manifest, line
        seen += found is not None
    return seen


@pytest.mark.parametrize(
    ("place", "overwrite"),
    [("file", False), ("file", True), ("hdfs", True), ("s3", True)],
    indirect=["place"],
)
def test_eight_concurrent_commits_leave_whole_sets(overwrite: bool, place: str) -> None:
    stop, count, rounds = threading.Event(), 8, 3 if overwrite and place.startswith("/") else 1
    with ThreadPoolExecutor(1) as reader:
        watching = reader.submit(watch, place, stop)
        try:
            told = elsewhere(race_of, count, place, rounds, overwrite)
        finally:
            stop.set()
        assert watching.result()
    outcomes = [line for lines in told for line in lines]
    versions_won = [int(line) for line in outcomes if line.isdigit()]
    assert len(set(versions_won)) == len(versions_won), "of any one version one wins"
    assert len(versions_won) == (count * rounds if overwrite else 1)
    if not overwrite:
        assert all("already holds a committed set" in line for line in outcomes if not line.isdigit())
    last = str(max(versions_won))
    assert whole(place) == f"run{next(i for i, lines in enumerate(told) if last in lines)}"
    assert_nothing_else(place)
    assert not has_leftovers(STORE, open_committed(STORE, place))


def test_commits_killed_at_random_moments_leave_whole_sets(place: str) -> None:
    """A short campaign of ``python -m tests.campaigns.commits``."""
    done = elsewhere(campaign, place, 12, 7)
    assert done["kills"] >= 12
    assert done["taken over"] >= 1
    assert done["sets read"] > 0


def staged(folder: str, count: int) -> list[str]:
    paths = [f"{folder}/staged-{number}" for number in range(count)]
    for number, path in enumerate(paths):
        put(path, f"{number}".encode())
    return paths


def refuse_links(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def test_of_many_that_put_one_version_one_succeeds(place: str) -> None:
    assert_one_succeeds(place, 20 if place.startswith("/") else 4)


def test_one_of_many_concurrent_commits_of_a_version_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse_links)
    assert_one_succeeds(str(tmp_path), 20)


def assert_one_succeeds(place: str, numbers: int) -> None:
    for version in range(1, numbers):
        paths = staged(place, 8)
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(lambda path, n=version: versions.commit_version(STORE, path, place, n), paths))
        assert won.count(True) == 1
        assert STORE.read(versions.path_of(place, version)).decode() == str(won.index(True))
        assert not versions.withhold(STORE, place, version, f"{place}/mine")
    assert versions.versions_in_use(STORE, place).newest == numbers - 1
    assert versions.withhold(STORE, place, numbers, f"{place}/mine")
    assert not versions.commit_version(STORE, staged(place, 1)[0], place, numbers)


def test_withholding_a_number_keeps_a_committed_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system fails for a moment, and a driver that is thawed in it commits as that number."""
    rename = LocalFiles.rename

    def meanwhile(self: LocalFiles, source: str, target: str, overwrite: bool) -> None:
        if "_manifests" in target:
            monkeypatch.setattr(LocalFiles, "rename", rename)
            commit(Store(), tmp_path, "thawed", 2)
            raise OSError(5, "the connection was lost")
        rename(self, source, target, overwrite)

    monkeypatch.setattr(LocalFiles, "rename", meanwhile)
    assert not versions.withhold(Store(), str(tmp_path), 1, f"{tmp_path}/mine")
    assert whole(tmp_path) == "thawed"


def test_a_put_that_lost_to_one_that_was_deleted_since_has_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def beaten(self: LocalFiles, source: str, target: str, overwrite: bool) -> None:
        raise FileExistsError(target)

    path = staged(str(tmp_path), 1)[0]
    monkeypatch.setattr(LocalFiles, "rename", beaten)
    assert not versions.commit_version(Store(), path, str(tmp_path), 1)


def test_a_number_that_was_freed_below_the_newest_is_no_commit(place: str) -> None:
    """A driver frozen for several commits finds its number free again, as older versions are deleted."""
    for name in ("a", "b", "c"):
        commit(STORE, place, name, 2)
    assert versions.versions_in_use(STORE, place) == versions.VersionNumbers(last=3, newest=3)
    late = staged(place, 1)[0]
    assert not versions.commit_version(STORE, late, place, 2)
    assert whole(place) == "c"
    assert versions.versions_in_use(STORE, place) == versions.VersionNumbers(last=3, newest=3)


def test_a_lost_answer_of_the_file_system_does_not_undo_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, lost = LocalFiles.rename, list[str]()

    def answer_lost(self: LocalFiles, source: str, target: str, overwrite: bool) -> None:
        rename(self, source, target, overwrite)
        if "_manifests" in target:
            lost.append(target)
            raise FileExistsError(target)  # what a NameNode says to the second try of a call that it has carried out

    monkeypatch.setattr(LocalFiles, "rename", answer_lost)
    commit(Store(), tmp_path, "first", 2)
    assert lost
    assert whole(tmp_path) == "first"


def test_creations_whose_answer_is_lost_are_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the first answer for every file of an attempt, among them the manifest and its copy."""
    create, lost = LocalFiles.create, list[str]()

    def answer_lost(self: LocalFiles, path: str) -> Any:
        file = create(self, path)
        if "/_attempts/" in path and path not in lost:
            file.close()
            lost.append(path)
            raise FileExistsError(path)  # what a NameNode says to the second try of a call that it has carried out
        return file

    monkeypatch.setattr(LocalFiles, "create", answer_lost)
    commit(Store(), tmp_path, "first", 2)
    assert any("-manifest.json" in path for path in lost)
    assert any("manifest.json-1" in path for path in lost)
    assert whole(tmp_path) == "first"


@pytest.mark.parametrize("lost", ["the copy", "the versions", "both are older"])
def test_the_newest_of_manifest_json_and_the_versions_is_the_set(lost: str, place: str) -> None:
    commit(STORE, place, "first", 2)
    older = STORE.read(f"{place}/manifest.json")
    commit(STORE, place, "second", 3)
    if lost == "the versions":  # of a set that was copied without them
        STORE.delete(f"{place}/_manifests")
    else:  # a driver that died before it copied, or wrote an older copy once it was thawed
        STORE.delete(f"{place}/manifest.json")
        if lost == "both are older":
            put(f"{place}/manifest.json", older)
    assert whole(place) == "second"
    assert has_leftovers(STORE, open_committed(STORE, place)) == (lost != "the versions")
    commit(STORE, place, "third", 1)
    assert open_committed(STORE, place).manifest.version == 3
    assert whole(place) == "third"
    assert_nothing_else(place)


def test_an_outdated_report_is_deleted_after_a_killed_commit(place: str) -> None:
    """A report of the set before is deleted though the commit was cut off right after it."""
    commit(STORE, place, "first", 2)
    older = STORE.read(f"{place}/manifest.json")
    commit(STORE, place, "second", 3)
    put(f"{place}/manifest.json", older)
    put(f"{place}/report.html", b"of the first")
    with Attempt(STORE, place) as attempt:
        remove_leftovers(attempt)
    assert not STORE.exists(f"{place}/report.html")
    assert b"second" in STORE.read(f"{place}/manifest.json")
