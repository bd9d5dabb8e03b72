"""Which failures of a file system pass by themselves, and how long they are waited for."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tenacity import retry, retry_if_exception, stop_after_attempt, wait_exponential

from pipeline.core.errors import DataError

# hdfs-native sometimes waits for ever for a DataNode that died under its write; the slowest live one answers sooner. The
# variable is for tests that kill DataNodes.
STALL_S = float(os.environ.get("SHARDING_STALL_S", "90"))
LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENAMETOOLONG, errno.ELOOP}


class LastingError(OSError):
    """A failure of a file system that waiting does not mend: a bucket that is not there, a wrong region."""


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: a lost DataNode or connection, but no missing file or right."""
    final = (FileNotFoundError, PermissionError, FileExistsError, NotADirectoryError, IsADirectoryError, LastingError)
    return isinstance(error, OSError) and not isinstance(error, final) and error.errno not in LASTING


@contextmanager
def unreadable_is_data_error(uri: str) -> Iterator[None]:
    """Raise DataError, which names the place, where a file of a set cannot be read however often it is tried: no right to
    it, another kind of file at its path, a path that leads nowhere. Other errors pass."""
    lasting = (PermissionError, NotADirectoryError, IsADirectoryError, LastingError)
    try:
        yield
    except OSError as error:
        if not isinstance(error, lasting) and error.errno not in (errno.ELOOP, errno.ENAMETOOLONG):
            raise
        reason = error.strerror if error.strerror and error.filename in (None, uri) else str(error)
        user = f" by user {os.geteuid()}" if error.errno == errno.EACCES else ""
        raise DataError(f"{uri} cannot be read{user}: {reason}; correct it, and start again") from None


# The NameNode sends writers to a dead DataNode until it misses its heartbeat: seconds to half a minute.
with_retries = retry(
    retry=retry_if_exception(is_transient), stop=stop_after_attempt(5), wait=wait_exponential(4, max=30), reraise=True
)


_LEFT: list[threading.Thread] = []


def are_left() -> bool:
    """Whether threads that ``within`` has left behind are still at work. One of hdfs-native's that comes back while Python
    ends aborts the process, so that a program has to end without ado then (os._exit)."""
    return any(thread.is_alive() for thread in _LEFT)


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of work, or TimeoutError (an OSError) if it takes longer: then its thread is left behind. 0.1 ms."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        _LEFT.append(thread)
        raise TimeoutError(f"no answer in {seconds:g} s")
    return results[0]
