"""The work folder of a host during a run, and the thread that copies its log to the home.

The home is the run's folder, perhaps on another file system. The work folder is the local folder to which a host appends
its events and logs; it is the home itself if that is local."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from pipeline.core.atomic import path_in_errors
from pipeline.core.errors import JobError
from trainer.home.folders import Folders
from trainer.home.place import Place, append_lines, write_whole
from trainer.home.segments import (
    SegmentListing,
    SupersededError,
    begin_start,
    complete_log,
    copy,
    lines_of_others,
    list_segments,
    merge,
)
from trainer.run_files import LOGS, METRICS, NEWS, PREPARE_LOG, TENSORBOARD

COPY_S = 30.0
BOARD_S = 120.0
REACH_S = 10.0
LOG_BYTES = 1 << 20  # bytes of the end of a process's log that are copied


def next_copy_time(last_copy: float, last_heard: float) -> float:
    """Return the time at which this process next copies its log to the home. Pure; times in seconds of one clock.

    That is COPY_S after the last copy of the log by this process or by server 0, whichever is later, but at most twice
    COPY_S after this process's own: only its own copies fetch other hosts' events and notice a later start of the run.

    Args:
        last_copy: time of this process's last copy, or of its last check that nothing was to copy.
        last_heard: time of server 0's last copy, -inf if it has made none on this host.
    """
    return max(last_copy, min(last_heard, last_copy + COPY_S)) + COPY_S


class WorkFolder:
    """The work folder of a host, with a thread that keeps the home up to date. A no-op if the home is local.

    Attributes:
        folders: the folders of the run on this host.
        trouble: why the last copy of the log failed, as text; None if it succeeded.
    """

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self.trouble: str | None = None
        self._stop_error: JobError | None = None  # the error of ``check``
        self._offsets: dict[str, int] = {}  # by other host: bytes of its log that were taken over
        self._known_lines: set[bytes] | None = None  # lines of the log that an earlier start may have taken over
        # the last copies of the log and of the TensorBoard files (monotonic seconds)
        self._last_copy = self._last_board_copy = time.monotonic()
        self._size = 0  # bytes of the log at the last copy
        self._board_sizes: dict[str, int] = {}  # bytes of each TensorBoard file that the home has
        self._is_reached = folders.leads  # whether the home was reached at least once
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run_copies, name="copies", daemon=True)
        if not folders.is_local:
            self._thread.start()

    def check(self) -> None:
        """Raise SupersededError (a JobError) if the thread has found that a later start leads the run now."""
        if self._stop_error:
            raise self._stop_error

    def copy(self) -> None:
        """Copy the log to the home now; on the leading host also take over the events of other hosts.

        Raises SupersededError if a later start leads the run, OSError if the home cannot be reached."""
        if self.folders.is_local:
            return
        listing = copy(self.folders)
        if self.folders.leads and self._append_foreign_events(listing):
            listing = copy(self.folders)
        merge(self.folders, listing)

    def settle(self) -> None:
        """Complete the home's metrics.jsonl and pushes.csv at the end of the run; only the leading host does this.

        No process may append to them any more. Ends the thread. Raises SupersededError and OSError as ``copy`` does."""
        self._stop_thread()
        if not self.folders.is_local:
            self.copy()
            complete_log(self.folders)

    def close(self) -> None:
        """Stop the thread, and copy processes' logs, TensorBoard files and new events to the home.

        The leading host copies no events here, because ``settle`` and every checkpoint do. Nothing
        is copied if the home was never reached or a later start leads the run. Errors of the home
        are ignored, and the work folder stays."""
        self._stop_thread()
        if self.folders.is_local or self._stop_error or not self._is_reached:
            return
        with suppress(OSError, SupersededError):
            if not self.folders.leads:
                self.copy()
            self._copy_logs()
            self._copy_board()

    def _stop_thread(self) -> None:
        self._stop.set()
        if self._thread.is_alive():  # if the home was never reached, the thread may be blocked: wait only REACH_S
            self._thread.join(None if self._is_reached else REACH_S)

    def _run_copies(self) -> None:
        """Copy the log and the TensorBoard files when they are due. Runs in the thread.

        Ends when the folder is closed or a later start leads the run."""
        # The leading host has just written to the home, so it can wait; the others find out at once whether they
        # can reach it.
        wait_s = COPY_S if self.folders.leads else 0.0
        while not self._stop.wait(wait_s):
            try:
                self._copy_what_is_due()
                self.trouble = None
            except JobError as error:
                self._stop_error = error
                return
            except OSError as error:
                # Makes the next attempt copy even if the log has not grown since.
                self._size = 0
                self._last_copy = time.monotonic()
                self.trouble = f"{self.folders.home}: the log was not copied: {error}"
            wait_s = max(0.0, next_copy_time(self._last_copy, self._last_server_copy()) - time.monotonic())

    def _copy_what_is_due(self) -> None:
        """Copy the log if it is time for that, and every BOARD_S the TensorBoard files.

        A host that does not lead copies only a log that has grown. The leading host copies in any case, because only
        that fetches other hosts' events and notices a later start."""
        if not self._is_reached:
            list_segments(self.folders.home)
            self._is_reached = True
        if next_copy_time(self._last_copy, self._last_server_copy()) > time.monotonic():
            return  # server 0 has copied meanwhile
        if self.folders.leads or self._has_grown():
            self.copy()
        self._last_copy = time.monotonic()
        if self._last_copy - self._last_board_copy > BOARD_S:
            self._last_board_copy = self._last_copy
            self._copy_board()

    def _last_server_copy(self) -> float:
        """Return the time of server 0's last copy, which it makes for every checkpoint (monotonic seconds)."""
        try:
            return time.monotonic() - max(0.0, time.time() - (self.folders.work / NEWS).stat().st_mtime)
        except FileNotFoundError:
            return -math.inf

    def _has_grown(self) -> bool:
        """Return whether metrics.jsonl has another size than at the last call."""
        path = self.folders.work / METRICS
        before = self._size
        self._size = path.stat().st_size if path.exists() else 0
        return before != self._size

    def _append_foreign_events(self, listing: SegmentListing) -> bool:
        """Append the new events of other hosts to this host's log, and return whether there were any.

        The first call after a restart or an error reads again from the beginning, and skips the lines that the log
        already has.
        listing: of the home's segments."""
        path = self.folders.work / METRICS
        if self._known_lines is None:
            self._known_lines = set()
            if listing.foreign_segments() and path.exists():
                with open(path, "rb") as file:
                    self._known_lines.update(file)
        try:
            lines = [
                line
                for line in lines_of_others(self.folders.home, listing, self._offsets)
                if line not in self._known_lines
            ]
            if lines:
                with path_in_errors(path):
                    if append_lines(path, b"".join(lines)):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._known_lines = set()  # from now on the offsets say which lines are new
        except OSError:
            # The next call reads everything again, because these lines are not all in the log.
            self._known_lines = None
            self._offsets = {}
            raise
        return bool(lines)

    def _copy_logs(self) -> None:
        """Copy the last LOG_BYTES of every process's log to the home."""
        for path in sorted((self.folders.work / LOGS).glob("*.log")):
            # Every host has a prepare.log; the home gets the leading host's.
            if self.folders.leads or path.name != PREPARE_LOG:
                with open(path, "rb") as file:
                    file.seek(max(0, path.stat().st_size - LOG_BYTES))
                    write_whole(self.folders.home / LOGS / path.name, file.read())

    def _copy_board(self) -> None:
        for path in sorted((self.folders.work / TENSORBOARD).glob("*")):
            # A start writes to a file of its own, and the files of earlier starts do not change any more.
            if (size := path.stat().st_size) != self._board_sizes.get(path.name):
                write_whole(self.folders.home / TENSORBOARD / path.name, path)
                self._board_sizes[path.name] = size


@contextmanager
def working(home: Place, *, leads: bool, scratch: Path | None = None) -> Iterator[WorkFolder]:
    """Yield this host's work folder for a run whose home is ready.

    If the home is local, that is the home itself, and nothing is created or removed. Otherwise it is a new temporary
    folder, on the leading host with the log so far. It is removed at the end, after its remaining content has been
    copied to the home, if that can be reached.

    Args:
        home: the run's folder.
        leads: whether server 0 runs on this host. If so, this begins a new start, which supersedes earlier ones.
        scratch: parent of the temporary folder (default: the system's).

    Raises:
        DataError: the home's log is damaged.
        OSError: the home cannot be reached.
    """
    if isinstance(home, Path):
        yield WorkFolder(Folders.from_home(home))
        return
    work = Path(tempfile.mkdtemp(prefix="trainer-", dir=scratch))
    try:
        folder = WorkFolder(begin_start(home, work) if leads else Folders(home, work, f"host-{uuid4().hex[:16]}"))
        try:
            yield folder
        finally:
            folder.close()
    finally:
        shutil.rmtree(work, ignore_errors=True)
