"""A host's work folder while it takes part in a run, and the thread that copies what is appended there to the home."""

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
from trainer.home.segments import Log, Superseded, begin, copy, lines_of_others, look, merge, settle
from trainer.run_files import LOGS, METRICS, NEWS, TENSORBOARD

COPY_S = 30.0
BOARD_S = 120.0
REACH_S = 10.0
LOG_BYTES = 1 << 20  # of a process's log, its end


def due(copied: float, heard: float) -> float:
    """When this process copies next: COPY_S after the last copy. Server 0's count, but only one at a time: it is here that
    other hosts' events are taken over, and a later start is noticed. copied: its own last; heard: server 0's. Pure."""
    return max(copied, min(heard, copied + COPY_S)) + COPY_S


class Work:
    """What a host does for its folders. Where the home is local, nothing."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self.trouble: str | None = None  # why the log was not copied the last time, for people
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
        """Raises Superseded (a JobError) once another start of the run leads it."""
        if self._ended:
            raise self._ended

    def copy(self) -> None:
        """Have what was appended here in the home now, and take over what other hosts have copied, where this one leads.
        Raises Superseded and OSError."""
        if self.folders.is_local:
            return
        log = copy(self.folders)
        if self.folders.leads and self._take(log):
            log = copy(self.folders)
        merge(self.folders, log)

    def settle(self) -> None:
        """On the host that leads, when the run ends and nobody appends any more: the home's metrics.jsonl and pushes.csv are
        whole. Raises Superseded and OSError."""
        self._end()
        if not self.folders.is_local:
            self.copy()
            settle(self.folders)

    def close(self) -> None:
        """Copy what is left, and the logs, as far as the home can be reached; the work folder is still there."""
        self._end()
        if self.folders.is_local or self._ended or not self._is_reached:
            return
        with suppress(OSError, Superseded):
            if not self.folders.leads:
                self.copy()
            self._copy_logs()
            self._copy_board()

    def _end(self) -> None:
        self._stop.set()
        if self._thread.is_alive():  # one of a host that never reached the home is not waited for
            self._thread.join(None if self._is_reached else REACH_S)

    def _keep(self) -> None:
        wait_s = COPY_S if self.folders.leads else 0.0
        while not self._stop.wait(wait_s):
            try:
                self._copy_what_is_due()
                self.trouble = None
            except JobError as error:
                self._ended = error
                return
            except OSError as error:
                self._size, self._copied = 0, time.monotonic()
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
        """When server 0 last told of a checkpoint, for which it had copied (monotonic seconds)."""
        try:
            return time.monotonic() - max(0.0, time.time() - (self.folders.work / NEWS).stat().st_mtime)
        except FileNotFoundError:
            return -math.inf

    def _has_grown(self) -> bool:
        path = self.folders.work / METRICS
        before, self._size = self._size, path.stat().st_size if path.exists() else 0
        return before != self._size

    def _take(self, log: Log) -> bool:
        """Whether there was anything."""
        path = self.folders.work / METRICS
        if self._known is None:
            self._known = set()
            if log.of_others() and path.exists():
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
def working(home: Place, *, leads: bool, scratch: Path | None = None) -> Iterator[Work]:
    """This host's part in a run whose home is ready for it. leads: server 0 is here. scratch: where a work folder is made,
    and removed at the end, unless the home is local.

    Raises DataError where the home's log is damaged, OSError where it cannot be reached."""
    if isinstance(home, Path):
        yield Work(Folders(home, home))
        return
    work = Path(tempfile.mkdtemp(prefix="trainer-", dir=scratch))
    try:
        found = Work(begin(home, work) if leads else Folders(home, work, f"host-{uuid4().hex[:16]}"))
        try:
            yield found
        finally:
            found.close()
    finally:
        shutil.rmtree(work, ignore_errors=True)
