"""The folder of a run: the files that it may hold, and the kind of a start there (new, resume or already finished).

config.json says whose folder it is: it is written before anything else, and removed first."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path, PurePath
from typing import IO

from pipeline.core.atomic import is_at
from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.storage.uri import is_remote
from trainer.checkpoints.decisions import STOP, SWITCH
from trainer.checkpoints.generations import GENERATIONS
from trainer.home import segments
from trainer.home.lease import leased
from trainer.home.place import Place, is_file, listing, remove_empty, resolve_home, write_whole
from trainer.run_files import (
    BEST,
    BEST_OF,
    CHECKPOINTS,
    CONFIG,
    EXAMPLES,
    FOLLOWED,
    LEASE,
    LOCK,
    LOGS,
    METRICS,
    MODEL,
    PUSHES,
    REPORT,
    RESULT,
    ROWS,
    SEGMENTS,
    TENSORBOARD,
    WORKERS,
)
from trainer.runlog.run_record import RunRecord, SavedRun, has_stopped_early, is_finished, saved_run

_FILE = "(" + "|".join(map(re.escape, (CONFIG, RESULT, METRICS, PUSHES, REPORT, MODEL, BEST, BEST_OF, WORKERS))) + ")"
_DRAFT = rf"\.?{_FILE}(\.[0-9a-f]{{8}})?\.tmp"
_HISTORY_NAME = "|".join(map(re.escape, (GENERATIONS, SWITCH, STOP)))
_HISTORY = rf"(({_HISTORY_NAME})|\.({_HISTORY_NAME})\.[0-9a-f]{{8}}\.tmp)"
_LOG = rf"{LOGS}/[\w.-]+\.(log|tmp)"
_ROWS = rf"{ROWS}/[\w.-]+/[\w.-]+"  # left by a start that was killed
_HELD = rf"{re.escape(LOCK)}|{re.escape(LEASE)}/[\w.-]+"
# All files that a run writes; --overwrite deletes no others.
OWNED = re.compile(
    rf"{_FILE}|{_DRAFT}|{_LOG}|{_HELD}|{_ROWS}|{CHECKPOINTS}/(\d{{8,}}|\.void)/[\w.-]+"
    rf"|{EXAMPLES}/(\d{{8,}}-\d+\.parquet|\.[\w.-]+\.tmp)"
    rf"|{FOLLOWED}/(worker-\d+-\d+\.json|\.[\w.-]+\.tmp)"
    rf"|{CHECKPOINTS}/{_HISTORY}|{TENSORBOARD}/\.?events\.out\.tfevents\.[\w.-]+"
    rf"|{segments.NAMES.pattern}|{SEGMENTS}/\.[\w.-]+\.tmp"
)
# Files of a start that failed before its first update, or of another host that began earlier: nothing of value.
EARLY = re.compile(
    rf"{re.escape(CONFIG)}|{_DRAFT}|{_LOG}|{_HELD}|{_ROWS}|{CHECKPOINTS}/0{{8}}/[\w.-]+|{SEGMENTS}/(\d+\.(begun|settled)|host-.*)"
)
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Start(Enum):
    """The kind of a start in a folder."""

    NEW = "new"
    RESUME = "resume"
    FINISHED = "finished"


def resolve_output(output: str) -> Path:
    """Return the folder of a virtual run or a study as an absolute path. Raises UsageError if it is not local."""
    home = resolve_home(output)
    if is_remote(home):
        raise UsageError(
            f"--output {output} must be a folder of this machine: virtual runs and studies are written there"
        )
    return Path(home)


@contextmanager
def locked(output: Place, on_lost: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Lock the folder of a run, because two runs in one folder would mix their checkpoints.

    A local folder has a file lock, which the kernel releases however the process ends; a store has a lease.
    Raises JobError while another process holds it, OSError if the folder cannot be written.

    on_lost: called by a thread if this process was frozen and another start has taken its lease."""
    if not isinstance(output, Path):
        with leased(output, on_lost):
            yield
        return
    while True:
        output.mkdir(parents=True, exist_ok=True)
        with open(output / LOCK, "w", encoding="utf-8") as file:
            if not _lock_exclusively(file):
                raise JobError(
                    f"{output} is in use by a run that has not ended; wait for it, or choose another --output"
                )
            # A refused start deletes its lock before it releases it, and another start may have made a new one since.
            if is_at(file, output / LOCK):
                yield
                return


def _lock_exclusively(file: IO[str]) -> bool:
    """Lock a file and return whether that succeeded within a moment.

    Not longer, because another run may take days; but `sharding workers` looks whether the file is locked."""
    for pause_s in (0.05, 0.2, None):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if pause_s:
                time.sleep(pause_s)
        except OSError as error:
            if error.errno not in NO_LOCKS:  # of a mount without flock, as of Lustre by default
                raise
            raise UsageError(
                f"{file.name}: this file system has no file locks ({error.strerror}); mount it with them (flock), or choose"
                " another --output"
            ) from None
    return False


def unchecked(record: RunRecord, saved: SavedRun) -> RunRecord:
    return record


@contextmanager
def prepare_folder(
    output: Place,
    requested: RunRecord,
    *,
    resume: bool,
    overwrite: bool,
    check: Callable[[RunRecord, SavedRun], RunRecord] = unchecked,
    on_lost: Callable[[], object] = lambda: None,
) -> Iterator[Start]:
    """Decide the kind of a start in a folder, prepare the folder for it, and lock it meanwhile. Yields the kind.

    Needs no torch, because the roles may run on other hosts.

    Args:
        output: the folder.
        requested: the run that the caller wants.
        resume, overwrite: the options of that name.
        check: called before anything in the folder is changed, unless the run is already finished. Gets the requested
            record, whose threads are the saved ones if the number of workers is unchanged, and the run in the folder;
            returns the record to write. Raises UsageError or DataError if the run cannot start; the folder is then left
            as it was.
        on_lost: see ``locked``.
    Raises:
        UsageError: the start would mix runs or lose results.
        DataError: config.json is damaged.
        JobError: another run uses the folder.
        OSError: the folder cannot be reached.
    """
    if is_file(output):
        raise UsageError(f"--output {output} is not a folder; choose another")
    if overwrite or not (output / CONFIG).exists():
        _refuse_foreign(output, listing(output))
    missing = [folder for folder in _with_parents(output) if not folder.exists()]  # before the lock makes them
    # Undone while it is locked, because another start may wait for the lock.
    with locked(output, on_lost), _undo_refused_start(output, missing):
        names = listing(output)
        saved = saved_run(output, overwrite=overwrite)
        is_new = overwrite or all(EARLY.fullmatch(name) for name in names)
        saved_record = None if is_new else saved.intact()
        start = Start.NEW
        if not is_new:
            start = decide(
                output,
                saved_record,
                requested,
                is_finished=is_finished(output),
                resume=resume,
                has_stopped_early=has_stopped_early(output),
            )
        if start is Start.RESUME:
            _require_writable_log(output)
        if start is not Start.FINISHED:
            # Other workers have another number of threads on the same cores.
            if saved_record and saved_record.num_workers == requested.num_workers:
                requested = replace(requested, threads=saved_record.threads)
            record = check(requested, saved)
            _clear(output, names, start, overwrite=overwrite)
            (output / RESULT).unlink(missing_ok=True)  # first, so that a longer run killed now does not look finished
            write_whole(output / CONFIG, (json.dumps(record.to_json(), indent=1) + "\n").encode())
        yield start


def _require_writable_log(output: Place) -> None:
    """Raise UsageError if another user's log is there to which this one may not append: a run goes on without its log."""
    for path in (output / METRICS, output / PUSHES):
        if isinstance(path, Path) and path.exists() and not os.access(path, os.W_OK):
            raise UsageError(
                f"{path} may not be written by user {os.geteuid()}: let its owner run `chmod g+w` on the files of the run,"
                " or resume as its owner"
            )


def _clear(output: Place, names: list[str], start: Start, *, overwrite: bool) -> None:
    """Delete the files of a folder that a start does not continue. names: its files."""
    if start is Start.NEW:
        others = () if overwrite else (f"{LOGS}/", f"{ROWS}/")  # of hosts that began earlier
        _delete(output, [name for name in names if not name.startswith(others)])
    elif not isinstance(output, Path):
        _delete(output, [name for name in names if re.fullmatch(_DRAFT, name)])  # local writes do it themselves
    if start is Start.NEW and not isinstance(output, Path):
        segments.void(output)


@contextmanager
def _undo_refused_start(output: Place, missing: Sequence[Place]) -> Iterator[None]:
    """Leave the folder as it was, absent or empty, if a start is refused before it has written its configuration.

    missing: the folders that were absent, innermost first."""
    try:
        yield
    except (UsageError, DataError):
        left = listing(output)
        if all(re.fullmatch(_HELD, name) for name in left):
            _delete(output, left, with_locks=True)
        for folder in missing:
            remove_empty(folder)  # a no-op if others have written into it
        raise


def _with_parents(folder: Place) -> Iterator[Place]:
    """Yield a folder and its parents, innermost first. A store manages the parents itself, so they are left out."""
    yield folder
    yield from folder.parents if isinstance(folder, Path) else ()


def decide(
    output: Place,
    saved_record: RunRecord | None,
    requested: RunRecord,
    *,
    is_finished: bool,
    resume: bool,
    has_stopped_early: bool,
) -> Start:
    """Return the kind of a start without --overwrite in a folder that holds results. Raises UsageError. Pure.

    Args:
        output: the folder, for messages.
        saved_record: the run in the folder, None if config.json is missing.
        requested: the run that the caller wants.
        is_finished: whether the run in the folder has finished.
        resume: whether --resume was given.
        has_stopped_early: whether evaluations have ended the finished run early.
    """
    if saved_record is None:
        raise UsageError(f"{output} holds a run without its {CONFIG}; choose another --output, or --overwrite")
    _refuse_other(output, saved_record, requested, resume)
    if not is_finished and not resume:
        raise UsageError(
            f"{output} holds a run that has not ended; --resume continues with it, --overwrite starts anew"
        )
    if not is_finished:
        return Start.RESUME
    # Training beyond the requested length cannot be undone.
    if requested.steps < saved_record.steps:
        raise UsageError(
            f"{output} holds a finished run of {saved_record.mini_batches} steps per worker, more than the"
            f" {requested.mini_batches} asked for; choose another --output, or --overwrite"
        )
    # Without --resume the longer run may be meant as a new one.
    run = requested.config.run
    other_patience = (run.patience, run.min_delta) != (
        saved_record.config.run.patience,
        saved_record.config.run.min_delta,
    )
    is_longer = requested.steps > saved_record.steps
    if has_stopped_early and (other_patience or is_longer) and not resume:
        raise UsageError(
            f"{output} holds a run that --patience has ended early; --resume continues with another --patience, --overwrite"
            " starts anew"
        )
    if is_longer and not resume:
        raise UsageError(
            f"{output} holds a finished run of {saved_record.mini_batches} steps per worker; --resume continues to the"
            f" {requested.mini_batches} asked for, --overwrite starts anew"
        )
    # A decision to end the run counts for any length.
    resumes = other_patience if has_stopped_early else is_longer
    return Start.RESUME if resumes else Start.FINISHED


def _refuse_other(output: Place, saved_record: RunRecord, requested: RunRecord, resume: bool) -> None:
    """Raise UsageError with the first essential value in which the run in the folder differs from the requested one."""
    before = saved_record.essentials()
    now = requested.essentials()
    for name in now | before:
        if before.get(name) != now.get(name):
            other = f"{name} {before.get(name)}, not {now.get(name)}"
            advice = "--resume cannot change it: " if resume else ""
            raise UsageError(f"{output} holds a run with {other}; {advice}choose another --output, or --overwrite")


def _refuse_foreign(output: Place, names: list[str]) -> None:
    """Raise UsageError if the folder has a file that no run writes, and so serves another purpose."""
    foreign = [name for name in names if not OWNED.fullmatch(name)]
    if foreign:
        raise UsageError(f"{output} holds {foreign[0]}, which no run wrote; choose another folder for --output")


def _delete(output: Place, names: list[str], *, with_locks: bool = False) -> None:
    """Remove files, config.json first, and the folders that become empty.

    with_locks: whether to remove the lock or lease and the marks of starts too."""
    for name in sorted(names, key=lambda name: name != CONFIG):
        if with_locks or not (re.fullmatch(_HELD, name) or segments.MARKS.fullmatch(name)):
            (output / name).unlink(missing_ok=True)
    folders = {str(folder) for name in names for folder in PurePath(name).parents} - {"."}
    for folder in sorted(folders, reverse=True):
        remove_empty(output / folder)
