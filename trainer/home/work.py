"""The work folder of a host during a run, and the thread that copies its log to the home."""

from __future__ import annotations

import math
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from pipeline.core.atomic import naming
from pipeline.core.errors import JobError
from trainer.home.folders import Folders
from trainer.home.place import Place, write_whole
from trainer.home.segments import Log, SupersededError, begin, copy, lines_of_others, look, merge, settle
from trainer.run_files import LOGS, METRICS, NEWS, TENSORBOARD

COPY_S = 30.0
BOARD_S = 120.0
REACH_S = 10.0
LOG_BYTES = 1 << 20  # bytes of the end of a process's log that are copied


def due(copied: float, heard: float) -> float:
    """Return the time of this process's next copy: COPY_S after its last copy or server 0's, whichever is later. Pure.

    It is at most 2 * COPY_S after its last copy: only its copies take over other hosts' events and notice later starts.

    copied: time of this process's last copy; heard: time of server 0's last copy."""
    return max(copied, min(heard, copied + COPY_S)) + COPY_S


class WorkFolder:
    """The work folder of a host, with a thread that keeps the home up to date. A no-op if the home is local."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self.trouble: str | None = None  # why the last copy of the log failed
        self._ended: JobError | None = None
        self._taken: dict[str, int] = {}
        self._known: set[bytes] | None = None  # lines that an earlier start of this host's run took over
        self._copied = self._boarded = time.monotonic()
        self._size = 0
        self._is_reached = folders.leads
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="copies", daemon=True)
        if not folders.is_local:
            self._thread.start()

    def check(self) -> None:
        """Raise SupersededError (a JobError) if another start of the run leads it now."""
        if self._ended:
            raise self._ended

    def copy(self) -> None:
        """Copy the log to the home now; on the leading host also take over the events of other hosts.

        Raises SupersededError and OSError."""
        if self.folders.is_local:
            return
        log = copy(self.folders)
        if self.folders.leads and self._take(log):
            log = copy(self.folders)
        merge(self.folders, log)

    def settle(self) -> None:
        """Complete the home's metrics.jsonl and pushes.csv, on the leading host at the end of the run.

        No process may append to them any more. Raises SupersededError and OSError."""
        self._end()
        if not self.folders.is_local:
            self.copy()
            settle(self.folders)

    def close(self) -> None:
        """Copy processes' logs and, on a host that does not lead, the rest of its events, if the home can be reached.

        Keeps the work folder."""
        self._end()
        if self.folders.is_local or self._ended or not self._is_reached:
            return
        with suppress(OSError, SupersededError):
            if not self.folders.leads:
                self.copy()
            self._copy_logs()
            self._copy_board()

    def _end(self) -> None:
        self._stop.set()
        if self._thread.is_alive():  # if the home was never reached, the thread may be blocked: wait only REACH_S
            self._thread.join(None if self._is_reached else REACH_S)

    def _keep(self) -> None:
        # The leading host has just written to the home; the others find out at once whether they can reach it.
        wait_s = COPY_S if self.folders.leads else 0.0
        while not self._stop.wait(wait_s):
            try:
                self._copy_what_is_due()
                self.trouble = None
            except JobError as error:
                self._ended = error
                return
            except OSError as error:
                # The next attempt then copies even if the log has not grown since.
                self._size = 0
                self._copied = time.monotonic()
                self.trouble = f"{self.folders.home}: the log was not copied: {error}"
            wait_s = max(0.0, due(self._copied, self._heard()) - time.monotonic())

    def _copy_what_is_due(self) -> None:
        if not self._is_reached:
            look(self.folders.home)
            self._is_reached = True
        if due(self._copied, self._heard()) > time.monotonic():
            return  # server 0 has copied meanwhile
        if self.folders.leads or self._has_grown():
            self.copy()
        self._copied = time.monotonic()
        if self._copied - self._boarded > BOARD_S:
            self._boarded = self._copied
            self._copy_board()

    def _heard(self) -> float:
        """Return the time of server 0's last copy, which it makes for every checkpoint (monotonic seconds)."""
        try:
            return time.monotonic() - max(0.0, time.time() - (self.folders.work / NEWS).stat().st_mtime)
        except FileNotFoundError:
            return -math.inf

    def _has_grown(self) -> bool:
        path = self.folders.work / METRICS
        before = self._size
        self._size = path.stat().st_size if path.exists() else 0
        return before != self._size

    def _take(self, log: Log) -> bool:
        """Append the new events of other hosts to this host's log and return whether there were any."""
        path = self.folders.work / METRICS
        if self._known is None:
            self._known = set()
            if log.foreign_segments() and path.exists():
                self._known = set(path.read_bytes().splitlines(keepends=True))
        lines = [line for line in lines_of_others(self.folders.home, log, self._taken) if line not in self._known]
        if lines:
            with naming(path), open(path, "ab", buffering=0) as file:
                file.write(b"".join(lines))
        return bool(lines)

    def _copy_logs(self) -> None:
        for path in sorted((self.folders.work / LOGS).glob("*.log")):
            if self.folders.leads or path.name != "prepare.log":  # every host has one
                with open(path, "rb") as file:
                    file.seek(max(0, path.stat().st_size - LOG_BYTES))
                    write_whole(self.folders.home / LOGS / path.name, file.read())

    def _copy_board(self) -> None:
        for path in sorted((self.folders.work / TENSORBOARD).glob("*")):
            write_whole(self.folders.home / TENSORBOARD / path.name, path.read_bytes())


@contextmanager
def working(home: Place, *, leads: bool, scratch: Path | None = None) -> Iterator[WorkFolder]:
    """Create a work folder for a run whose home is ready, and remove it at the end. A no-op if the home is local.

    Raises DataError if the home's log is damaged, OSError if the home cannot be reached.

    Args:
        home: the run's folder.
        leads: whether server 0 runs on this host.
        scratch: parent of the work folder of a remote run (default: the system's temporary folder).
    """
    if isinstance(home, Path):
        yield WorkFolder(Folders.from_home(home))
        return
    work = Path(tempfile.mkdtemp(prefix="trainer-", dir=scratch))
    try:
        found = WorkFolder(begin(home, work) if leads else Folders(home, work, f"host-{uuid4().hex[:16]}"))
        try:
            yield found
        finally:
            found.close()
    finally:
        shutil.rmtree(work, ignore_errors=True)
