"""The commit's one primitive, put if absent: frozen drivers that are thawed, and many that commit at once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import JobError, UsageError
from pipeline.shardset import versions
from pipeline.shardset.attempt import Attempt
from pipeline.shardset.commit import has_leftovers, tidy
from pipeline.shardset.manifest import missing_file, open_committed, read_committed
from pipeline.storage.local import LocalFiles
from pipeline.storage.store import Store
from tests.test_commit import FATAL, assert_nothing_else, commit, whole

pytestmark = pytest.mark.slow  # dozens of processes a test


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


@dataclass
class FrozenFiles:
    inner: Any
    moment: Frozen

    def __getattr__(self, name: str) -> Any:
        if name in FATAL:
            self.moment()
        return getattr(self.inner, name)


@dataclass(frozen=True)
class FrozenStore(Store):
    moment: Frozen | None = None

    def files(self, uri: str) -> Any:
        assert self.moment
        return FrozenFiles(super().files(uri), self.moment)


def rivals(output: Path) -> dict[str, Callable[[], object]]:
    def tidied() -> None:
        with Attempt(Store(), str(output)) as other:
            tidy(other)

    def twice() -> None:
        commit(Store(), output, "rival", 1)
        commit(Store(), output, "rival", 3)

    return {"commits": lambda: commit(Store(), output, "rival", 3), "tidies": tidied, "commits twice": twice}


@pytest.mark.parametrize(
    ("older", "rival", "folder"),
    [
        (True, "commits", "kept"),
        (False, "tidies", "kept"),
        (True, "commits twice", "kept"),
        (True, "tidies", "deleted"),
    ],
)
def test_a_driver_that_is_frozen_before_any_file_change_and_taken_for_dead_commits_a_whole_set_or_none(
    older: bool, rival: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """folder kept: what it has staged is still there when it is thawed, so that only the version can keep it out."""
    monkeypatch.setattr(Attempt, "alive", lambda *_: False)
    if folder == "kept":
        monkeypatch.setattr(Attempt, "remove_abandoned", lambda *_: [])
    outcomes, at = set(), 0
    while True:
        output = tmp_path / str(at)
        if older:
            commit(Store(), output, "old", 2)
        moment = Frozen(at, rivals(output)[rival])
        try:
            commit(FrozenStore(moment=moment), output, "mine", 2)
            ended = "committed"
        except JobError as error:
            late = "committed, but not tidied up" in str(error)
            assert late or "another run took it for dead" in str(error)  # noqa: PT017  either outcome is right
            ended = "committed" if late else "told"
        except FileNotFoundError:  # before it came to its commit
            assert folder == "deleted"
            ended = "told"
        found = whole(output)
        if ended == "told":
            assert found != "mine"
        outcomes.add((ended, found))
        commit(Store(), output, "next", 2)
        assert whole(output) == "next"
        assert_nothing_else(output)
        if moment.done <= at:
            break
        at += 1
    assert at > 25
    assert {ended for ended, _ in outcomes} == {"committed", "told"} or rival == "commits"
    assert any(found == "mine" for _, found in outcomes)


def race(output: str, name: str, rounds: int, overwrite: bool) -> list[str]:
    told = []
    for _ in range(rounds):
        try:
            commit(Store(), Path(output), name, 3, overwrite=overwrite)
            told.append("ok")
        except (JobError, UsageError) as error:
            told.append(str(error))
    return told


def watch(output: Path, stop: threading.Event) -> int:
    """Read whole sets until told to stop; how many. A reader whose set was replaced reads the manifest again."""
    seen = 0
    while not stop.is_set():
        found = read_committed(Store(), str(output))
        if found and (line := missing_file(found)):
            again = read_committed(Store(), str(output))
            assert again
            assert again.manifest != found.manifest, line
        seen += found is not None
    return seen


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_many_that_commit_at_once_readers_see_whole_sets_and_nobody_is_undone(
    overwrite: bool, tmp_path: Path
) -> None:
    stop, count, rounds = threading.Event(), 4, 6 if overwrite else 1
    with get_context("fork").Pool(count) as pool, ThreadPoolExecutor(1) as reader:
        watched = reader.submit(watch, tmp_path, stop)
        try:
            told = pool.starmap(race, [(str(tmp_path), f"run{i}", rounds, overwrite) for i in range(count)])
        finally:
            stop.set()
        assert watched.result()
    outcomes = [line for lines in told for line in lines]
    if overwrite:
        assert outcomes == ["ok"] * count * rounds
    else:
        assert outcomes.count("ok") == 1
        assert all("already holds a committed set" in line for line in outcomes if line != "ok")
        assert whole(tmp_path) == f"run{[lines[0] for lines in told].index('ok')}"
    assert_nothing_else(tmp_path)
    assert not has_leftovers(Store(), open_committed(Store(), str(tmp_path)))


def staged(folder: Path, count: int) -> Iterator[str]:
    for number in range(count):
        path = folder / f"staged-{number}"
        path.write_text(f"{number}")
        yield str(path)


def refuse_links(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "a file system without hard links"])
def test_of_many_that_put_one_version_one_succeeds(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", refuse_links)
    for version in range(1, 20):
        with ThreadPoolExecutor(8) as pool:
            won = list(
                pool.map(lambda path, n=version: versions.put(Store(), path, str(tmp_path), n), staged(tmp_path, 8))
            )
        assert won.count(True) == 1
        assert Path(versions.path_of(str(tmp_path), version)).read_text() == str(won.index(True))
        assert not versions.withhold(Store(), str(tmp_path), version, f"{tmp_path}/mine")
    assert versions.taken(Store(), str(tmp_path)).newest == 19


def test_a_number_is_withheld_without_deleting_what_another_has_put_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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

    path = next(staged(tmp_path, 1))
    monkeypatch.setattr(LocalFiles, "rename", beaten)
    assert not versions.put(Store(), path, str(tmp_path), 1)


def test_a_number_that_was_freed_below_the_newest_is_no_commit(tmp_path: Path) -> None:
    """A driver frozen for several commits finds its number free again, as older versions are deleted."""
    for name in ("a", "b", "c"):
        commit(Store(), tmp_path, name, 2)
    assert versions.taken(Store(), str(tmp_path)) == versions.Taken(last=3, newest=3)
    late = next(staged(tmp_path, 1))
    assert not versions.put(Store(), late, str(tmp_path), 2)
    assert whole(tmp_path) == "c"
    assert versions.taken(Store(), str(tmp_path)) == versions.Taken(last=3, newest=3)


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


@pytest.mark.parametrize("lost", ["the copy", "the versions", "both are older"])
def test_the_newest_of_manifest_json_and_the_versions_is_the_set(lost: str, tmp_path: Path) -> None:
    commit(Store(), tmp_path, "first", 2)
    older = (tmp_path / "manifest.json").read_bytes()
    commit(Store(), tmp_path, "second", 3)
    if lost == "the versions":  # of a set that was copied without them
        for path in (tmp_path / "_manifests").iterdir():
            path.unlink()
    else:  # a driver that died before it copied, or wrote an older copy once it was thawed
        (tmp_path / "manifest.json").unlink()
        if lost == "both are older":
            (tmp_path / "manifest.json").write_bytes(older)
    assert whole(tmp_path) == "second"
    assert has_leftovers(Store(), open_committed(Store(), str(tmp_path))) == (lost != "the versions")
    commit(Store(), tmp_path, "third", 1)
    assert open_committed(Store(), str(tmp_path)).manifest["version"] == 3
    assert whole(tmp_path) == "third"
    assert_nothing_else(tmp_path)


def test_a_report_of_the_set_before_is_deleted_though_the_commit_was_cut_off_right_after_it(tmp_path: Path) -> None:
    commit(Store(), tmp_path, "first", 2)
    older = (tmp_path / "manifest.json").read_bytes()
    commit(Store(), tmp_path, "second", 3)
    (tmp_path / "manifest.json").write_bytes(older)
    (tmp_path / "report.html").write_text("of the first")
    with Attempt(Store(), str(tmp_path)) as attempt:
        tidy(attempt)
    assert not (tmp_path / "report.html").exists()
    assert b"second" in (tmp_path / "manifest.json").read_bytes()
