"""The commit: readers see either the old set or the new one, complete, even if a driver dies or is suspended.

Layout under OUTPUT:
  _attempts/ID/...                      the working files of one run (attempt.py)
  worker=NNN/part-CCCCC-vN-ID.parquet   moved here just before the commit, for version N, by attempt ID
  _assignment/part-CCCCC-vN-ID.parquet  the worker of every row
  _manifests/N.json                     created only if absent: this is the commit (versions.py)
  manifest.json                         a copy of the newest version

The commit is a single put-if-absent. A run reads the number of the last version, moves its files to names of the next
version, and puts its manifest under that number. Only one of several concurrent runs succeeds. The others return its set
or, if they may replace it, move their files to the following number. Before a run deletes files of version N that no
manifest lists, it takes the number N itself. A driver that resumes after it was suspended in its commit therefore cannot
commit a set with missing files.

A run that is killed before the put leaves the old set unchanged. After the put the new set is valid, and the next run
deletes files of the old set that are left. Readers must use the manifest: a plain glob over worker=* can match files of
both sets during a commit, or after a kill until the next run. A reader that holds an old manifest while its files are
deleted gets a missing-file error and must read the manifest again."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.shardset.attempt import ATTEMPTS, Attempt
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.generations import append_generation
from pipeline.core.shardset.manifest import ShardSet, dumps, read_committed
from pipeline.core.shardset.versions import (
    FOLDER,
    NAME,
    STAMP,
    commit_version,
    copy_newest,
    is_behind,
    last_version_in_use,
    stamped_path,
    withhold,
)
from pipeline.core.storage.retries import with_retries
from pipeline.core.storage.store import Store, calls_at_once

# What a sweep may delete; everything else under OUTPUT may belong to other programs.
OWNED_FOLDER = re.compile(r"worker=\d+|_eval|_assignment|_model")
OWNED_FILE = re.compile(rf"(worker=\d+|_eval|_assignment)/part-\d+-{STAMP}\.parquet")
OWNED_MODEL = re.compile(rf"_model/{STAMP}/[\w-]+/(metadata/(part-00000|_SUCCESS)|arrays\.npz)")
DERIVED = ("report.html", "quality.json")  # made after a commit, from it; stale once another set is committed
DERIVED_PART = re.compile(r"_(report\.html|quality\.json)-[0-9a-f]{8}")
Move = tuple[str, str]  # where a file is, and its path under OUTPUT without its stamp


def check_reports(store: Store, output: str) -> None:
    """Raise UsageError if an output without a set holds the report of a training run or benchmark.

    A set's own report would replace it. Costs up to four requests."""
    report = next((name for name in DERIVED if store.exists(f"{output}/{name}")), None)
    if report and not any(store.exists(f"{output}/{name}") for name in (NAME, FOLDER)):
        raise UsageError(f"--output {output} holds a {report} that is not of a shard set; choose another folder")


def publish(
    attempt: Attempt,
    manifest: Manifest,
    moves: list[Move],
    *,
    before: ShardSet | None,
    supersedes: Callable[[ShardSet], bool],
    appends: bool = False,
) -> ShardSet:
    """Move files to their final names and commit the manifest.

    Steps that fail transiently are retried for a minute, because the run's results are complete by then. If another run
    has committed since ``before`` was read, its set is replaced if ``supersedes(its set)``, else kept and returned.

    Args:
        attempt: the claim of this run.
        manifest: its paths carry no stamps yet.
        moves: current path and unstamped path under OUTPUT of every file.
        before: the committed set that the run has seen, or None.
        supersedes: whether this run may replace a given set.
        appends: add the files to the set as one more generation, and keep its own (generations.py).

    Raises:
        JobError: another run considered this one dead and deleted its files.
    """
    store = attempt.store
    output = attempt.output
    places = [origin for origin, _ in moves]
    moved_paths = set[str]()
    undo = True  # whether an error deletes the moved files, as no manifest can list them yet
    try:
        while True:
            # Read before the set: a run that commits in between takes the next number, and the put below fails.
            last = with_retries(last_version_in_use)(store, output)
            current = with_retries(read_committed)(store, output)
            changed = (current.manifest if current else None) != (before.manifest if before else None)
            if current and changed and not supersedes(current):
                _delete(store, moved_paths - _paths_of_set(current))
                return current
            stamp = f"v{last + 1}-{attempt.id}"
            origins = places
            places = [f"{output}/{stamped_path(path, stamp)}" for _, path in moves]
            moved_paths.update(places)
            move_files(store, origins, places)
            new = manifest.with_paths(partial(stamped_path, stamp=stamp))
            new = replace(new, version=last + 1, generation=stamp)
            if appends:
                new = append_generation(current.manifest if current else None, new)
            staged = f"{attempt.folder}/{stamp}-{NAME}"
            store.write_new(staged, dumps(new))
            undo = False  # from here on it may be committed, whatever is raised
            if commit_version(store, staged, output, last + 1):
                break
            undo = True
    except BaseException as error:
        if undo:
            with suppress(OSError, DataError):  # the next run deletes the files that are left
                _delete(store, moved_paths - _paths_of_set(read_committed(store, output)))
        if isinstance(error, FileNotFoundError):
            raise JobError(
                f"{output}: another run considered this one dead and deleted its files (was it frozen?); run it again"
            ) from error
        raise
    try:
        with_retries(attempt.finish)()  # first, because a run that replaces this set may then delete its files
        with_retries(remove_leftovers)(attempt)
    except OSError as error:
        raise JobError(f"{output}: committed, but not tidied up: {error}; run it again") from error
    return ShardSet(store, output, new)


def _paths_of_set(current: ShardSet | None) -> set[str]:
    """Return the full paths of a set's files, which must not be deleted.

    The set of another run can list files of this run: if this run's commit succeeded, but its
    reply was lost, the other run may have appended a generation to it."""
    return {f"{current.uri}/{path}" for path in current.paths()} if current else set()


def remove_leftovers(attempt: Attempt) -> int:
    """Finish the commit of a killed run, delete the files of killed runs, and return the number of deleted files."""
    store = attempt.store
    output = attempt.output
    if is_behind(store, output):
        for name in DERIVED:
            store.delete(f"{output}/{name}")
    copy_newest(store, output, attempt.folder)
    return sweep(attempt)


def sweep(attempt: Attempt) -> int:
    """Delete files that no set lists and no live run is about to commit; return their number.

    The set is read after the files are listed. The version numbers of the files are taken before any file is deleted, so
    that no run, alive or not, can commit them afterwards."""
    store = attempt.store
    output = attempt.output
    while True:
        files, folders = own_files(store, output)
        last = last_version_in_use(store, output)
        current = read_committed(store, output)
        leftovers = [*unlisted_files(files, current, attempt.may_commit)]
        late = max((file.version for file in leftovers), default=0)
        # A run that was suspended in its commit could still put a version up to ``late``. If a run commits under that
        # number first, its manifest may list some of these files: look again.
        if late <= last or withhold(store, output, late, attempt.folder):
            break
    _delete(store, {file.path for file in leftovers})
    for folder in folders:
        store.remove_empty(folder)
    return len(leftovers)


@dataclass(frozen=True)
class OwnFile:
    """A file that this program wrote.

    Attributes:
        path: the full path.
        relative: the path under OUTPUT.
        version: the version that it was moved for, 0 if its name does not contain one.
        attempt: the id of the run that moved it, "" if its name does not contain one.
    """

    path: str
    relative: str
    version: int = 0
    attempt: str = ""


def own_files(store: Store, output: str) -> tuple[list[OwnFile], list[str]]:
    """Return the files that this program wrote in a set's folders, and the folders, deepest first.

    Symbolic links are not followed. Costs one listing per folder, of which a remote store answers many at once."""
    files: list[OwnFile] = []
    folders: list[str] = []
    level: dict[str, str] = {}  # the folders to list next, and their paths under OUTPUT
    for entry in store.list(output):
        if entry.is_dir and not entry.is_link and OWNED_FOLDER.fullmatch(entry.name):
            level[entry.path] = entry.name
        elif DERIVED_PART.fullmatch(entry.name):
            files.append(OwnFile(entry.path, entry.name))
    while level:
        folders = [*level, *folders]  # the caller removes folders in this order, if they are empty
        below: dict[str, str] = {}
        for folder, entries in store.list_all(level).items():
            for entry in entries:
                path = f"{level[folder]}/{entry.name}"
                if entry.is_dir and not entry.is_link:
                    below[entry.path] = path
                elif match := OWNED_FILE.fullmatch(path) or OWNED_MODEL.fullmatch(path):
                    files.append(OwnFile(entry.path, path, int(match["version"] or 0), match["attempt"]))
        level = below
    return files, folders


def unlisted_files(files: Iterable[OwnFile], committed: ShardSet | None, alive: Callable[[str], bool]) -> list[OwnFile]:
    """Return the files that neither the committed set lists nor a live run owns.

    alive(id): whether the run of an attempt is alive; called once per attempt."""
    keep = committed.paths() if committed else set()
    stray = [file for file in files if file.relative not in keep]
    live = {name for name in {file.attempt for file in stray} if name and alive(name)}
    return [file for file in stray if file.attempt not in live]


def tidy(store: Store, committed: ShardSet) -> int:
    """Finish the commit of a killed run beside a committed set, and return the number of deleted files.

    Such files would repeat rows for a reader of all files of a worker's folder. Costs one listing per folder."""
    if not has_leftovers(store, committed):
        return 0
    with Attempt(store, committed.uri) as attempt:
        return remove_leftovers(attempt)


def has_leftovers(store: Store, committed: ShardSet) -> bool:
    """Return whether killed runs have left files beside a committed set. Costs one listing per folder."""
    uri = committed.uri
    if store.exists(f"{uri}/{ATTEMPTS}") or is_behind(store, uri):
        return True
    return bool(unlisted_files(own_files(store, uri)[0], committed, lambda _: False))


def refuse_unless(overwrite: bool, committed: ShardSet, difference: str) -> None:
    """Raise UsageError if a set of another configuration would have to be replaced without --overwrite."""
    if not overwrite:
        description = f"{committed.manifest.strategy} for {committed.num_workers} workers"
        raise UsageError(
            f"{committed.uri} already holds a committed set ({description}) of another {difference};"
            " pass --overwrite to replace it"
        )


def move_files(store: Store, origins: list[str], targets: list[str]) -> None:
    """Rename every file, and make the new names durable."""
    folders = {target.rpartition("/")[0] for target in targets}
    with ThreadPoolExecutor(max(map(calls_at_once, targets), default=1)) as pool:
        list(pool.map(with_retries(store.makedirs), sorted(folders)))
        list(pool.map(with_retries(partial(_move_one, store)), origins, targets))
        list(pool.map(with_retries(store.sync_folder), folders))


def _move_one(store: Store, origin: str, target: str) -> None:
    """Rename one file. A retry after a lost answer finds the file at its target, which is not an error.

    Raises FileNotFoundError if the file is neither at its origin nor at its target."""
    while True:
        try:
            return store.rename(origin, target, overwrite=True)
        except FileNotFoundError:
            if not store.exists(origin):
                if store.exists(target):  # moved by an earlier try whose answer was lost: only this run uses the name
                    return None
                raise
            store.makedirs(target.rpartition("/")[0])  # another run's sweep found the folder empty


def _delete(store: Store, paths: Collection[str]) -> None:
    with ThreadPoolExecutor(max(map(calls_at_once, paths), default=1)) as pool:
        list(pool.map(with_retries(store.delete), paths))
