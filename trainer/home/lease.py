"""A lock for a folder on HDFS or in an object store, like flock on a local disk: a sequence of numbered files.

FOLDER/.lease/000012   With content: takes or releases the lease; empty: renews it. The highest number is the lease.

A file is created only if it does not exist, so that exactly one process gets each number. The holder creates the next
number every RENEW_S. Another process takes over with the next number after it has seen no new one for EXPIRES_S of its
own clock; at once if the holder has released the lease, or was a process of this machine that is dead. A holder that
was frozen finds its next number taken, or a higher one, and knows that it has lost the lease. A renewal writes no data,
so that the failure of an HDFS DataNode does not delay it."""

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
from pipeline.core.storage.claim import claim
from pipeline.core.storage.files import FileInfo
from trainer.home.place import StorePlace, entries
from trainer.run_files import LEASE

logger = logging.getLogger(__name__)

_own_tokens: set[str] = set()  # tokens of the leases that this process holds

RENEW_S = 10.0
EXPIRES_S = 3 * RENEW_S
LOOK_S = 2.0
FREE: dict[str, Any] = {"free": True}


def boot_clock() -> float:
    """Return the seconds since the start of the machine; unlike ``time.monotonic``, with the time it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@contextmanager
def leased(folder: StorePlace, on_lost: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold the lease of a folder, which a thread renews.

    Waits up to EXPIRES_S if it is unknown whether the present holder lives. Costs two operations of the store per
    RENEW_S. Raises JobError if another process holds the lease, OSError if the folder cannot be written.

    on_lost: called once, in that thread, if another process has taken the lease."""
    lease = Lease(folder / LEASE)
    lease.take()
    stop = threading.Event()

    def renew_until_stopped() -> None:
        while not stop.wait(RENEW_S):
            with suppress(OSError):  # the next attempt finds out whether the lease was taken meanwhile
                if not lease.renew():
                    on_lost()
                    return

    thread = threading.Thread(target=renew_until_stopped, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with suppress(OSError):
            lease.release()


@dataclass(frozen=True)
class LeaseNumbers:
    """The numbers of a lease that are in its folder.

    Attributes:
        number: the highest one, 0 for none.
        last_with_content: the highest one with content, which names the holder or says that the lease is free; 0 for none.
    """

    number: int = 0
    last_with_content: int = 0

    @classmethod
    def from_listing(cls, names: list[FileInfo]) -> LeaseNumbers:
        numbers = {int(entry.name): entry.bytes for entry in names if entry.name.isdecimal()}
        return cls(max(numbers, default=0), max((number for number, size in numbers.items() if size), default=0))


class Lease:
    """The view of one process on a lease.

    Attributes:
        folder: folder of the numbered files.
        clock: returns seconds.
        number: the last number that this process took, 0 while it does not hold the lease.
    """

    def __init__(self, folder: StorePlace, clock: Callable[[], float] = boot_clock) -> None:
        self.folder = folder
        self.clock = clock
        self.number = 0
        self._first = 0  # the number with content by which this process took the lease
        self._last_renewal = 0.0  # when the attempt to take the last number began, by the clock
        self._token = uuid.uuid4().hex

    def take(self) -> None:
        """Take the lease. Raises JobError while another process holds it, and OSError."""
        numbers = self._read_numbers()
        if self._is_held(numbers):
            self._watch(numbers)
        self._last_renewal = self.clock()
        if not self._create_number(numbers.number + 1, whoami() | {"token": self._token}):
            raise self._held_error()
        self.number = self._first = numbers.number + 1
        if not self._delete_others():
            raise self._held_error()
        _own_tokens.add(self._token)

    def renew(self) -> bool:
        """Take the next number and return whether this process still holds the lease. Raises OSError.

        Costs two operations, and a listing if the last renewal is so old that the lease may have been taken."""
        if not self.number:
            return False
        start = self.clock()
        try:
            self.folder.store.create(str(self._path(self.number + 1))).close()
        except FileExistsError:
            # An empty file does not tell whose it is, so claim() is of no use. The listing tells whether it is another
            # process's, or this one's from an earlier attempt whose reply was lost.
            if self._read_numbers() != LeaseNumbers(self.number + 1, self._first):
                self.number = 0
                return False
        self.number += 1
        is_late = self.clock() - self._last_renewal >= EXPIRES_S
        self._last_renewal = start
        if is_late:
            return self._delete_others()
        if self.number - 1 != self._first:
            self.folder.store.delete(str(self._path(self.number - 1)))
        return True

    def release(self) -> None:
        """Release the lease if this process still holds it and has not deleted its files.

        Raises OSError; the lease is then free at once for this process, and for others after it has expired."""
        _own_tokens.discard(self._token)
        if self.number and self._has_record() and self._create_number(self.number + 1, FREE):
            self.number += 1
            self._first = self.number
            self._delete_others()
            self.number = 0

    def _has_record(self) -> bool:
        """Return whether the file by which this process took the lease is still there. Raises OSError."""
        try:
            return parse_object(self._path(self._first).read_bytes()).get("token") == self._token
        except (FileNotFoundError, ValueError):
            return False

    def _delete_others(self) -> bool:
        """Return whether this process still has the highest number.

        If so, delete the lower numbers except the first that it took, which names it as the holder; otherwise delete
        its own."""
        numbers = [int(entry.name) for entry in entries(self.folder) if entry.name.isdecimal()]
        if max(numbers, default=0) > self.number:
            self.folder.store.delete(str(self._path(self.number)))
            self.number = 0
            return False
        for number in numbers:
            if number < self.number and number != self._first:
                self.folder.store.delete(str(self._path(number)))
        return True

    def _watch(self, numbers: LeaseNumbers) -> None:
        """Wait until the lease has expired. Raises JobError if it is renewed meanwhile."""
        logger.warning(
            f"{self.folder.parent} may still be in use by an earlier start; waiting {EXPIRES_S:.0f} s to see whether it is"
        )
        since = self.clock()
        while self.clock() - since < EXPIRES_S:
            time.sleep(LOOK_S)
            if self._read_numbers() != numbers:
                raise self._held_error()

    def _is_held(self, numbers: LeaseNumbers) -> bool:
        """Return False if the lease is free, True if that is unknown. Raises JobError if its holder lives."""
        if not numbers.last_with_content:
            return bool(numbers.number)
        try:
            owner = parse_object(self._path(numbers.last_with_content).read_bytes())
        except (FileNotFoundError, ValueError):
            return True
        if owner == FREE:  # a number above the release has no known holder
            return numbers.number > numbers.last_with_content
        is_own_host = {key: owner.get(key) for key in whoami()} == whoami()
        running = owner.get("token") in _own_tokens if is_own_host else is_running(owner)
        if running:
            raise self._held_error()
        return running is None

    def _read_numbers(self) -> LeaseNumbers:
        return LeaseNumbers.from_listing(entries(self.folder))

    def _create_number(self, number: int, content: dict[str, Any]) -> bool:
        """Create a number with content, and return whether this process was first to do so. Raises OSError."""
        record = json.dumps(content).encode()
        return claim(self.folder.store, str(self._path(number)), record) == record

    def _path(self, number: int) -> StorePlace:
        return self.folder / f"{number:06d}"

    def _held_error(self) -> JobError:
        return JobError(
            f"{self.folder.parent} is in use by a run that has not ended; wait for it, or choose another --output"
        )
