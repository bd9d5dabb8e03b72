"""A host's work folder while it takes part in a run, and the thread that copies what is appended there to the home."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from trainer.home.folders import Folders
from trainer.home.place import Place, write_whole
from trainer.home.segments import Log, Superseded, begin, copy, lines_of_others, look, settle
from trainer.run_files import LOGS, METRICS, NEWS, TENSORBOARD

COPY_S = 30.0
BOARD_S = 120.0
REACH_S = 10.0
LOG_BYTES = 1 << 20  # of a process's log, its end


class Work:
    """What a host does for its folders. Where the home is local, nothing."""

    def __init__(self, folders: Folders) -> None:
        self.folders = folders
        self._superseded: Superseded | None = None
        self._taken: set[str] = set()
        self._known: set[bytes] | None = None  # lines that an earlier start of this host's run took over
        self._copied = self._boarded = time.monotonic()
        self._size = self._news = 0
        self._is_reached = folders.leads
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="copies", daemon=True)
        if not folders.is_local:
            self._thread.start()

    def check(self) -> None:
        """Raises Superseded (a JobError) once another start of the run leads it."""
        if self._superseded:
            raise self._superseded

    def copy(self) -> None:
        """Have what was appended here in the home now, and take over what other hosts have copied, where this one leads.
        Raises Superseded and OSError."""
        if self.folders.is_local:
            return
        log = copy(self.folders)
        if self.folders.leads and self._take(log):
            copy(self.folders)

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
        if self.folders.is_local or self._superseded or not self._is_reached:
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
        if not self._is_reached:
            try:
                look(self.folders.home)
            except OSError as error:  # hosts with workers only need not reach it
                print(f"{self.folders.home}: events of this host stay here: {error}", flush=True)
                return
            self._is_reached = True
        while not self._stop.wait(self._due_s()):
            if self._due_s() > 0:
                continue  # server 0 has copied for a checkpoint
            self._copied = time.monotonic()
            try:
                if self.folders.leads or self._has_grown():
                    self.copy()
                if time.monotonic() - self._boarded > BOARD_S:
                    self._boarded = time.monotonic()
                    self._copy_board()
            except Superseded as error:
                self._superseded = error
                return
            except OSError as error:
                self._size = 0
                print(f"{self.folders.home}: copying the log is tried again: {error}", flush=True)

    def _due_s(self) -> float:
        """Until the next copy: COPY_S after the last, be it server 0's."""
        news = self.folders.work / NEWS
        if news.exists() and (size := news.stat().st_size) != self._news:
            self._news, self._copied = size, time.monotonic()
        return max(0.0, self._copied + COPY_S - time.monotonic())

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
            with open(path, "ab", buffering=0) as file:
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
