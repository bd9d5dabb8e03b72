"""The commit: readers see the old set or the new one whole, whenever a driver dies or is frozen.

Layout under OUTPUT:
  _attempts/ID/...                    one run's work (attempt.py)
  worker=NNN/part-CCCCC-vN-ID.parquet moved here just before the commit: for version N, by attempt ID
  _assignment/part-CCCCC-vN-ID.parquet  which worker has which row
  _manifests/N.json                   put there if absent: the commit (versions.py)
  manifest.json                       a copy of the newest

Everything rests on that one put. A run reads which version is the last, moves its files under names of the next one, and
puts its manifest as that. Of several only one succeeds; the others keep its set, or move their files on to the number after
it where they may replace it. Whoever deletes files of version N that no manifest lists has seen to it before that version N
is taken, so a driver that was frozen in its commit and is thawed commits nothing of which a file is gone.

A run killed before the put leaves the old set as it was; after it, the new set is in force and at most some files of the
old one are left over, which the next run deletes. Readers go by the manifest. (A plain glob over worker=* may, for the
seconds of a commit over an older set or until the next run after a kill, see files of both.) A reader who holds an old
manifest while its files are deleted misses a file, and reads the manifest again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.shardset.attempt import ATTEMPTS, Attempt
from pipeline.core.shardset.generations import appended
from pipeline.core.shardset.manifest import ShardSet, dumps, read_committed, with_paths
from pipeline.core.shardset.versions import (
    FOLDER,
    NAME,
    STAMP,
    copy_newest,
    is_behind,
    last_taken,
    put,
    stamped,
    withhold,
)
from pipeline.core.storage.retries import with_retries
from pipeline.core.storage.store import Store

# What a sweep may delete; everything else under OUTPUT is somebody else's.
OWNED_FOLDER = re.compile(r"worker=\d+|_eval|_assignment|_model")
OWNED_FILE = re.compile(rf"(worker=\d+|_eval|_assignment)/part-\d+-{STAMP}\.parquet")
OWNED_MODEL = re.compile(rf"_model/{STAMP}/[\w-]+/(metadata/(part-00000|_SUCCESS)|arrays\.npz)")
DERIVED = ("report.html", "quality.json")  # made after a commit, from it; stale once another set is committed
DERIVED_PART = re.compile(r"_(report\.html|quality\.json)-[0-9a-f]{8}")
MOVERS = 8  # files moved or deleted at once
Move = tuple[str, str]  # where a file is, and its path under OUTPUT without its stamp


def check_reports(store: Store, output: str) -> None:
    """Raise UsageError if an output without a set holds a report: of a training run or a benchmark, which a set's own
    would replace. Costs up to four requests."""
    held = next((name for name in DERIVED if store.exists(f"{output}/{name}")), None)
    if held and not any(store.exists(f"{output}/{name}") for name in (NAME, FOLDER)):
        raise UsageError(f"--output {output} holds a {held} that is not of a shard set; choose another folder")


def publish(
    attempt: Attempt,
    manifest: dict[str, Any],
    moves: list[Move],
    *,
    before: ShardSet | None,
    supersedes: Callable[[ShardSet], bool],
    appends: bool = False,
) -> ShardSet:
    """Move files into place and commit the manifest, whose paths have no stamps yet, over ``before``. appends: as one more
    generation of that set, whose files stay (generations.py).

    Each step is tried again for a minute where a failure of the file system may pass: all the work is done by then.
    Where another run has committed since ``before`` was read: its set is kept and returned when ``supersedes(theirs)`` is
    false, and replaced otherwise. Raises JobError where this run was taken for dead, and its files were deleted."""
    store, output = attempt.store, attempt.output
    places, moved = [origin for origin, _ in moves], set[str]()
    undo = True
    try:
        while True:
            # Read before the set: who commits in between takes the next number.
            last = with_retries(last_taken)(store, output)
            current = with_retries(read_committed)(store, output)
            changed = (current.manifest if current else None) != (before.manifest if before else None)
            if current and changed and not supersedes(current):
                _delete(store, moved - _listed(current))
                return current
            stamp = f"v{last + 1}-{attempt.id}"
            origins, places = places, [f"{output}/{stamped(path, stamp)}" for _, path in moves]
            moved.update(places)
            _move(store, origins, places)
            made = with_paths(manifest, partial(stamped, stamp=stamp)) | {"version": last + 1, "generation": stamp}
            if appends:
                made = appended(current.manifest if current else None, made)
            staged = f"{attempt.folder}/{stamp}-{NAME}"
            store.write_new(staged, dumps(made))
            undo = False  # from here on it may be committed, whatever is raised
            if put(store, staged, output, last + 1):
                break
            undo = True
    except BaseException as error:
        if undo:
            with suppress(OSError, DataError):  # what cannot be deleted now is the next run's to delete
                _delete(store, moved - _listed(read_committed(store, output)))
        if isinstance(error, FileNotFoundError):
            raise JobError(
                f"{output}: files of this run are gone: another run took it for dead (was it frozen?); run it again"
            ) from error
        raise
    try:
        with_retries(attempt.finish)()  # before the set is read again: who replaces it from here on deletes these files
        with_retries(tidy)(attempt)
    except OSError as error:
        raise JobError(f"{output}: committed, but not tidied up: {error}; run it again") from error
    return ShardSet(store, output, made)


def _listed(current: ShardSet | None) -> set[str]:
    """Return the whole paths of a set's files.

    A generation that this run has put may be listed by a later one of another run, although this run has not seen it
    stand: files that are listed are never deleted."""
    return {f"{current.uri}/{path}" for path in current.paths()} if current else set()


def tidy(attempt: Attempt) -> int:
    """Finish what a run has begun that was killed in its commit, and delete what killed runs have left beside the committed
    set, or where there is none; returns how many files."""
    store, output = attempt.store, attempt.output
    if is_behind(store, output):
        for name in DERIVED:
            store.delete(f"{output}/{name}")
    copy_newest(store, output, attempt.folder)
    return sweep(attempt)


def sweep(attempt: Attempt) -> int:
    """Delete the files that no set lists and no live run is about to commit; returns how many.

    The set is read after the files were listed, and the versions that the files are for are taken before any is deleted:
    then nobody commits them any more, whether or not they live."""
    store, output = attempt.store, attempt.output
    while True:
        files, folders = owned(store, output)
        last, current = last_taken(store, output), read_committed(store, output)
        doomed = [*unlisted(files, current, attempt.may_commit)]
        late = max((file.version for file in doomed), default=0)
        if late <= last or withhold(store, output, late, attempt.folder):
            break
    _delete(store, {file.path for file in doomed})
    for folder in folders:
        store.remove_empty(folder)
    return len(doomed)


@dataclass(frozen=True)
class Owned:
    """A file of this program's making. path: whole; relative: under OUTPUT; version, attempt: what it was moved for, by
    whom; 0 and "" where its name does not tell."""

    path: str
    relative: str
    version: int = 0
    attempt: str = ""


def owned(store: Store, output: str) -> tuple[list[Owned], list[str]]:
    """Files of this program's making in a set's folders, and the folders, deepest first, which may be empty without them.
    Links are not followed. One listing a folder."""
    files: list[Owned] = []
    folders: list[str] = []

    def look(folder: str, relative: str) -> None:
        for entry in store.list(folder):
            path = f"{relative}/{entry.name}"
            if entry.is_dir and not entry.is_link:
                look(entry.path, path)
            elif match := OWNED_FILE.fullmatch(path) or OWNED_MODEL.fullmatch(path):
                files.append(Owned(entry.path, path, int(match["version"] or 0), match["attempt"]))
        folders.append(folder)

    for entry in store.list(output):
        if entry.is_dir and not entry.is_link and OWNED_FOLDER.fullmatch(entry.name):
            look(entry.path, entry.name)
        elif DERIVED_PART.fullmatch(entry.name):
            files.append(Owned(entry.path, entry.name))
    return files, folders


def unlisted(files: Iterable[Owned], committed: ShardSet | None, alive: Callable[[str], bool]) -> list[Owned]:
    """Those that are not of the set and whose run does not live. alive(id): asked once for each attempt."""
    keep = committed.paths() if committed else set()
    stray = [file for file in files if file.relative not in keep]
    live = {name for name in {file.attempt for file in stray} if name and alive(name)}
    return [file for file in stray if file.attempt not in live]


def has_leftovers(store: Store, committed: ShardSet) -> bool:
    """Whether runs that were killed have left anything beside a committed set. One listing of each of its folders."""
    uri = committed.uri
    if store.exists(f"{uri}/{ATTEMPTS}") or is_behind(store, uri):
        return True
    return bool(unlisted(owned(store, uri)[0], committed, lambda _: False))


def refuse_unless(overwrite: bool, committed: ShardSet, difference: str) -> None:
    """Raise UsageError where a set of another configuration stands in the way."""
    if not overwrite:
        held = f"{committed.manifest['strategy']} for {committed.num_workers} workers"
        raise UsageError(
            f"{committed.uri} already holds a committed set ({held}) of another {difference}; pass --overwrite to replace it"
        )


def _move(store: Store, origins: list[str], targets: list[str]) -> None:
    """Rename every file, and have the names last."""
    folders = {target.rpartition("/")[0] for target in targets}
    with ThreadPoolExecutor(MOVERS) as pool:
        list(pool.map(with_retries(store.makedirs), sorted(folders)))
        list(pool.map(with_retries(partial(_move_one, store)), origins, targets))
        list(pool.map(with_retries(store.sync_folder), folders))


def _move_one(store: Store, origin: str, target: str) -> None:
    while True:
        try:
            return store.rename(origin, target, overwrite=True)
        except FileNotFoundError:
            if not store.exists(origin):
                if store.exists(target):  # a lost answer: the name is this run's alone
                    return None
                raise
            store.makedirs(target.rpartition("/")[0])  # another run's sweep found the folder empty


def _delete(store: Store, paths: Iterable[str]) -> None:
    with ThreadPoolExecutor(MOVERS) as pool:
        list(pool.map(with_retries(store.delete), paths))
