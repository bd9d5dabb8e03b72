"""Retries: which errors of a file system are transient, and for how long they are retried."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential

from pipeline.core.errors import DataError, UsageError

# hdfs-native sometimes waits forever for a DataNode that died during a write; the slowest live one answers sooner. Tests
# that kill DataNodes set the variable.
STALL_S = float(os.environ.get("SHARDING_STALL_S", "90"))
LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP}


# Errors of a machine or of a mount, which say nothing about the content of a file.
SHORTAGES = {
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT,
    errno.ENOBUFS,
}  # fmt: skip
NO_THREAD = "Failed to launch worker thread"  # pyarrow's words, in an error of its own


class LastingError(OSError):
    """A permanent error of a file system, such as a missing bucket or a wrong region. It is not retried."""


class NoTicketError(PermissionError):
    """HDFS asks for Kerberos, and this process has neither a ticket nor tokens. The message says what to do."""


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may help, as after a lost connection, unlike after a missing file or permission."""
    final = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError, LastingError)
    return isinstance(error, OSError) and not isinstance(error, final) and error.errno not in LASTING


def shortage_of(error: Exception, path: str) -> OSError | None:
    """Return an error of the machine or of a mount; None if the error is about the file, which may be damaged."""
    if isinstance(error, OSError) and error.errno in SHORTAGES:
        return error
    return OSError(errno.EAGAIN, NO_THREAD, path) if NO_THREAD in str(error) else None


@contextmanager
def unreadable_is_data_error(uri: str) -> Iterator[None]:
    """Raise DataError with the URI if a file of a set is permanently unreadable, and UsageError if a ticket is missing;
    other errors pass.

    Causes are missing permissions, a folder in place of a file, and an invalid path."""
    lasting = (PermissionError, NotADirectoryError, IsADirectoryError, LastingError)
    try:
        yield
    except NoTicketError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        if not isinstance(error, lasting) and error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
            raise
        reason = error.strerror if error.strerror and error.filename in (None, uri) else str(error)
        user = f" by user {os.geteuid()}" if error.errno == errno.EACCES else ""
        raise DataError(f"{uri} cannot be read{user}: {reason}; correct it, and start again") from None


# The NameNode offers a dead DataNode to writers until it misses a heartbeat, for seconds to half a minute.
with_retries = retry(
    retry=retry_if_exception(is_transient), stop=stop_after_attempt(5), wait=wait_exponential(4, max=30), reraise=True
)


_LEFT: list[threading.Thread] = []


def has_abandoned_threads() -> bool:
    """Return whether threads that ``call_within`` abandoned are still running.

    A thread of hdfs-native that returns during Python's shutdown aborts the process; end it by os._exit then."""
    return any(thread.is_alive() for thread in _LEFT)


def call_within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return the result of ``work``. Raises TimeoutError (an OSError) after ``seconds`` and abandons the thread.

    Costs 0.1 ms."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    # A daemon thread, because a call that hangs in native code cannot be cancelled, and must not delay the exit.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        _LEFT.append(thread)
        raise TimeoutError(f"no answer in {seconds:g} s")
    return results[0]
