"""Who holds a folder on HDFS or in an object store: flock's counterpart, by numbered files that are put where none is.

FOLDER/.lease/000012   with content: somebody took the lease with this number, or gave it back; empty: its holder has renewed
                       it. The highest number is the lease.

A number is taken once, so of several who try the next one gets it. The holder takes the next every RENEW_S. Who wants the
lease, and has seen no new number for EXPIRES_S of its own clock, takes the next; at once where the holder ran on this
machine and is dead, or has given the lease back. A holder that was frozen finds a number that is not its own, or a higher
one, and knows that it has lost. A renewal needs no DataNode, so none that dies makes a living holder late."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pipeline.core.errors import JobError
from pipeline.core.json_values import parse_object
from pipeline.core.shardset.attempt import is_running, whoami
from pipeline.core.storage.files import FileInfo
from trainer.home.place import StorePlace, entries
from trainer.run_files import LEASE

logger = logging.getLogger(__name__)

_mine: set[str] = set()  # the leases that this process holds

RENEW_S = 10.0
EXPIRES_S = 3 * RENEW_S
LOOK_S = 2.0
FREE: dict[str, Any] = {"free": True}


@contextmanager
def leased(folder: StorePlace, lost: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a folder's lease; a thread renews it. lost: called by that thread where another has taken it.

    Waits up to EXPIRES_S where nobody can tell whether the holder lives. Costs two operations a RENEW_S. Raises JobError
    while another holds it, OSError where the folder cannot be written."""
    lease = Lease(folder / LEASE)
    lease.take()
    stop = threading.Event()

    def keep() -> None:
        while not stop.wait(RENEW_S):
            with suppress(OSError):  # the next try finds whether another has taken it meanwhile
                if not lease.renew():
                    lost()
                    return

    thread = threading.Thread(target=keep, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with suppress(OSError):
            lease.release()


@dataclass(frozen=True)
class Held:
    """The highest number, and the highest with content; 0 for none."""

    number: int = 0
    taken: int = 0

    @classmethod
    def of(cls, names: list[FileInfo]) -> Held:
        numbers = {int(entry.name): entry.bytes for entry in names if entry.name.isdecimal()}
        return cls(max(numbers, default=0), max((number for number, size in numbers.items() if size), default=0))


class Lease:
    """One process's view of a lease. number: the last that it took; 0 while it holds none."""

    def __init__(self, folder: StorePlace, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.clock, self.number, self._first = folder, clock, 0, 0
        self._renewed = 0.0  # when the last number that it took was tried, by the clock
        self._token = uuid.uuid4().hex

    def take(self) -> None:
        """Raises JobError while another holds it, and OSError."""
        seen = self._look()
        if self._is_held(seen):
            self._watch(seen)
        self._renewed = self.clock()
        if not self._put(seen.number + 1, whoami() | {"token": self._token}):
            raise self._in_use()
        self.number = self._first = seen.number + 1
        if not self._keeps():
            raise self._in_use()
        _mine.add(self._token)

    def renew(self) -> bool:
        """Take the next number; whether the lease was, and is, this process's. Two operations; a listing too, where the last
        renewal is so long ago that others may have taken it. Raises OSError."""
        if not self.number:
            return False
        begun = self.clock()
        try:
            self.folder.store.create(str(self._path(self.number + 1))).close()
        except FileExistsError:  # another's, unless the answer to an earlier try was lost
            if self._look() != Held(self.number + 1, self._first):
                self.number = 0
                return False
        self.number += 1
        is_late, self._renewed = self.clock() - self._renewed >= EXPIRES_S, begun
        if is_late:
            return self._keeps()
        if self.number - 1 != self._first:
            self.folder.store.delete(str(self._path(self.number - 1)))
        return True

    def release(self) -> None:
        """Give it back, where it is still held. Raises OSError: then it is free for this process at once, for others when it
        has expired."""
        _mine.discard(self._token)
        if self.number and self._put(self.number + 1, FREE):
            self.number += 1
            self._first = self.number
            self._keeps()
            self.number = 0

    def _keeps(self) -> bool:
        """Whether no number is above this process's; those below are deleted, but for that which says whose it is."""
        numbers = [int(entry.name) for entry in entries(self.folder) if entry.name.isdecimal()]
        if max(numbers, default=0) > self.number:
            self.folder.store.delete(str(self._path(self.number)))
            self.number = 0
            return False
        for number in numbers:
            if number < self.number and number != self._first:
                self.folder.store.delete(str(self._path(number)))
        return True

    def _watch(self, seen: Held) -> None:
        """Wait until the lease has expired. Raises JobError as soon as it is renewed."""
        logger.warning(
            f"{self.folder.parent} may still be in use by an earlier start; waiting {EXPIRES_S:.0f} s to see whether it is"
        )
        since = self.clock()
        while self.clock() - since < EXPIRES_S:
            time.sleep(LOOK_S)
            if self._look() != seen:
                raise self._in_use()

    def _is_held(self, seen: Held) -> bool:
        """False: nobody holds it; True: nobody can tell. Raises JobError where somebody does."""
        if not seen.taken:
            return bool(seen.number)
        try:
            owner = parse_object(self._path(seen.taken).read_bytes())
        except (FileNotFoundError, ValueError):
            return True
        if owner == FREE:
            return seen.number > seen.taken
        mine = {key: owner.get(key) for key in whoami()} == whoami()
        running = owner.get("token") in _mine if mine else is_running(owner)
        if running:
            raise self._in_use()
        return running is None

    def _look(self) -> Held:
        return Held.of(entries(self.folder))

    def _put(self, number: int, content: dict[str, Any]) -> bool:
        try:
            self.folder.store.put_new(str(self._path(number)), json.dumps(content).encode())
        except FileExistsError:
            return False
        return True

    def _path(self, number: int) -> StorePlace:
        return self.folder / f"{number:06d}"

    def _in_use(self) -> JobError:
        return JobError(
            f"{self.folder.parent} is in use by a run that has not ended; wait for it, or choose another --output"
        )
