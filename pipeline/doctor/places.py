"""Checks of the paths that a run reads and writes: rights, room, put-if-absent, and access by executors."""

from __future__ import annotations

import errno
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipeline.core.atomic import NO_ROOM
from pipeline.core.errors import JobError, UsageError
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.storage.retries import NoTicketError
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import is_remote
from pipeline.doctor.checks import FAILED, OK, Check, shorten_names
from pipeline.doctor.clocks import Reading
from pipeline.doctor.facts import ExecutorAccess
from pipeline.input.files import match_paths

REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
NO_FOLDER = (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
ELSEWHERE = "a path that all machines mount, or hdfs:// or s3://"


def output_error(output: str, error: OSError) -> JobError | None:
    """Return the error for an output that cannot be written, or None for failures of other kinds."""
    if isinstance(error, NoTicketError):
        return UsageError(f"--output {error}")
    # The path in the message is a folder of the attempt, which means nothing to the user.
    words = re.sub(rf"^{re.escape(output)}[^\s:]*: ", "", error.strerror or str(error))
    if isinstance(error, PermissionError) or error.errno in REFUSED:
        return UsageError(
            f"--output {output} may not be written: {words}; choose another folder, or ask for permission"
        )
    if error.errno in NO_FOLDER:
        return UsageError(f"--output {output} cannot be a folder: {words}; choose another")
    if error.errno in NO_ROOM:
        return JobError(f"--output {output}: {words}; make room there, or choose another folder")
    return None


class Reach(NamedTuple):
    """The paths that a task on an executor could use.

    Attributes:
        where: the name of its machine.
        problems: the errors by flag.
    """

    where: str
    problems: Mapping[str, str]


def reach_from_task(store: Store, source: str | None, folder: str | None, _: int) -> Reach:
    """Return the paths that this process can read and write.

    Args:
        store: the driver's store.
        source: the resolved --input, or None.
        folder: the folder of the driver's attempt at the output, or None. A file is written there and deleted.
        _: the number of the task.
    """
    problems: dict[str, str] = {}
    # Errors are values, because Spark retries a task that raises.
    if source:
        try:
            match_paths(store, source)
        except (OSError, JobError) as error:
            problems["--input"] = str(error)
    if folder:
        try:
            store.info(f"{folder}/beat")
            test_file = f"{folder}/task-{uuid.uuid4().hex}"
            try:
                store.write_new(test_file, b"doctor")
            finally:
                store.delete(test_file)
        except FileNotFoundError:
            problems["--output"] = "the file that the driver has written does not exist"
        except OSError as error:
            problems["--output"] = str(error)
    return Reach(socket.gethostname(), problems)


def check_reach(flag: str, path: str, reaches: Sequence[Reach]) -> Check:
    """Return the check of a path on executors: failed if some cannot use it like the driver.

    Args:
        flag: the flag of the path, --input or --output.
        path: the path.
        reaches: the answer of each executor.
    """
    lacking = [each for each in reaches if flag in each.problems]
    name = flag.removeprefix("--")
    if not lacking:
        return Check(name, OK, f"{path}: executors on {shorten_names([each.where for each in reaches])} reach it too")
    where = shorten_names([each.where for each in lacking])
    if not is_remote(path):
        return Check(name, FAILED, f"{path} is local, and {where} cannot use it as the driver does", f"use {ELSEWHERE}")
    return Check(name, FAILED, f"{where}: {lacking[0].problems[flag]}", f"see that executors may reach {path}")


def invisible_path_error(flag: str, path: str, at: int, views: Sequence[ExecutorAccess]) -> str:
    """Return the error line for a local path that executors do not see, or an empty text.

    Args:
        flag: the flag of the path.
        path: the path.
        at: its index in the views.
        views: the access of each executor.
    """
    lacking = [view.where for view in views if not view.visible[at]]
    if not lacking:
        return ""
    return f"{flag} {path} is local, and {shorten_names(lacking)} of the cluster do not see it: use {ELSEWHERE}"


def check_input(store: Store, uri: str) -> Check:
    """Return the check of an input on the driver: failed if it does not exist or may not be read."""
    try:
        path = store.resolve(uri)
        entries = match_paths(store, path)
        # The right to list a folder does not include the right to read its files, so read a byte of the first.
        for entry in entries[:1]:
            files = (
                [each for each in store.files(path).list(entry.path) if not each.is_dir] if entry.is_dir else [entry]
            )
            for file in files[:1]:
                store.read_range(file.path, 0, 1)
    except JobError as error:
        return Check("input", FAILED, str(error))  # which names the next step
    except OSError as error:
        return Check("input", FAILED, f"{uri}: {error}", "check --input, and the rights to read there")
    return Check("input", OK, f"{path}: can be read")


def read_clock(store: Store, attempt: Attempt) -> Reading:
    """Return the clock of an output's store, read by writing a file."""
    file = f"{attempt.folder}/clock"
    before = time.time()
    store.write_new(file, b"doctor")
    written_s = store.info(file).modified_ms / 1000
    # File times are whole seconds on S3, and kernel clock ticks on a local disk: widen the interval by a second.
    return Reading("the output's store", before - 1, written_s, time.time() + 1)
