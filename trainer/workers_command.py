"""``sharding workers RUN``: change the number of workers of a run in progress."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from pipeline.core import command_line
from pipeline.core.command_line import Parser
from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.specs import Spec, add_flags, from_flags, option
from pipeline.core.storage.retries import unreadable_is_data_error
from trainer.home.place import Place, place_of
from trainer.launch.workers_request import WorkersRequest, delete_request, read_request, write_request
from trainer.regroup import has_followed_stream, obstacle
from trainer.run_files import LOCK
from trainer.runlog.run_record import RunRecord, is_finished, saved_run

UNANSWERED = "the request is withdrawn, unless the run is changing its workers already"
INTERRUPTED = "the request is withdrawn, unless the run has met it already"
POLL_S = 0.2
FAR_POLL_S = 5.0
GAP_S = 15.0  # a start takes the lock of the folder within less
ANSWER_S = 120.0  # how long a run may take to write a checkpoint and to start again
EPILOG = """\
example: sharding workers build/run --add 2

The run writes a checkpoint and continues from it with the other workers, in the
middle of a pass. Without --add and --remove the number of workers is printed.
Exit codes: 0 done, 2 wrong usage, or workers that cannot change, 3 no run
there, 1 other errors."""


@dataclass(frozen=True)
class WorkersChange(Spec):
    """The change that the command asks for."""

    add: int | None = option(None, "continue with N more workers", metavar="N", least=1, shown="no change")
    remove: int | None = option(None, "continue with N fewer workers", metavar="N", least=1, shown="no change")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.add and self.remove:
            raise UsageError(f"--add {self.add} and --remove {self.remove}: give only one of them")


def parser() -> Parser:
    """Return the parser of the command, with the fields of WorkersChange as flags."""
    result = command_line.parser("sharding workers", "Change the number of workers of a run in progress.", EPILOG)
    result.add_argument("run", metavar="RUN", help="folder of the run, local, hdfs:// or s3://")
    add_flags(result.add_argument_group("change"), WorkersChange)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError, DataError and JobError."""
    args = command_line.parse(parser(), argv)
    change = from_flags(WorkersChange, args)
    home = place_of(args.run)
    with unreadable_is_data_error(args.run):
        record = _record(home)
        present = record.num_workers
        # Without either the number is only printed.
        if change.add or change.remove:
            change_workers(home, record, present + (change.add or 0) - (change.remove or 0))
            record = _record(home)
    version = record.config.cohorts.present.version
    since = f" since version {version}, {present} before" if record.num_workers != present else ""
    print(f"{home}: {record.num_workers} workers{since}")
    return 0


def change_workers(home: Place, record: RunRecord, workers: int) -> None:
    """Have the run in a folder continue with another number of workers, and wait until it does.

    Args:
        home: the folder.
        record: the run as it is.
        workers: the new number.
    Raises:
        UsageError: the run does not run, or cannot have so many workers.
        JobError: it has ended, or has not answered within ANSWER_S.
    """
    _check(home, record, workers)
    request = WorkersRequest(uuid4().hex, workers)
    try:
        write_request(home, request)
    except PermissionError as error:
        raise UsageError(f"{home} cannot be written: {error.strerror}; change its workers as the run's user") from None
    try:
        _wait(home, record, request)
    finally:
        delete_request(home, request)
    if _record(home).num_workers != workers:
        raise JobError(f"{home}: a later start of the run has not taken the request; give the command again")


def _wait(home: Place, record: RunRecord, request: WorkersRequest) -> None:
    """Wait until a run has met a request. Raises UsageError if it refuses it, JobError if it has ended, or does not answer.

    Args:
        home: the run's folder.
        record: the run as it was before.
        request: the request.
    """
    begin = time.monotonic()
    # The run deletes the request when it starts with the new workers. A later one has another id.
    while (present := read_request(home)) and present.id == request.id:
        waited = time.monotonic() - begin
        if present.refusal:
            raise UsageError(f"{home} stays with {record.num_workers} workers: {present.refusal}")
        if is_finished(home):
            raise JobError(f"{home}: the run has finished, with {record.num_workers} workers")
        # Between two starts of a change nobody holds the lock, for a moment.
        if waited > GAP_S and not _may_run(home):
            raise JobError(
                f"{home}: the run has ended; its command with --resume --workers {request.workers} continues it"
            )
        if waited > ANSWER_S:
            raise JobError(f"{home}: no answer within {ANSWER_S:.0f} s; {UNANSWERED}")
        time.sleep(POLL_S if isinstance(home, Path) else FAR_POLL_S)


def _check(home: Place, record: RunRecord, workers: int) -> None:
    """Raise UsageError if a run cannot continue with another number of workers."""
    if workers < 1:
        raise UsageError(f"{home} has {record.num_workers} workers: remove at most {record.num_workers - 1}")
    if record.simulated is not None:
        raise UsageError(f"{home} is in virtual time: sharding simulate --resume --workers {workers} continues it")
    reason = obstacle(record.config, workers, has_followed=has_followed_stream(record.config, home))
    # The run would refuse the request too, after it has stopped.
    if reason:
        raise UsageError(f"{home} stays with {record.num_workers} workers: {reason}")
    # First, because nobody holds the lock of a run for a moment while it changes its workers.
    present = read_request(home)
    if present and not present.refusal:
        raise UsageError(
            f"{home}: another request waits for the run's answer; wait for it, or start the run with --resume"
        )
    if is_finished(home) or not _may_run(home):
        raise UsageError(
            f"{home} is not in progress: its command with --resume --workers {workers} continues it with other workers"
        )


def _record(home: Place) -> RunRecord:
    record = saved_run(home).record
    if record is None:
        raise DataError(f"{home} holds no training run, or a damaged config.json")
    return record


def _may_run(home: Place) -> bool:
    """Return whether a process may train the run in a folder. True for a remote one, whose lease has no test."""
    if not isinstance(home, Path):
        return True
    try:
        with open(home / LOCK, encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
