"""The claim of one run on an output: a folder that readers ignore, and a heartbeat that shows that the run is alive.

  OUTPUT/_attempts/ID/beat   the owner of the claim; rewritten every few seconds
  OUTPUT/_attempts/ID/...    task output and other files that are not committed yet

The heartbeat only decides which files may be deleted. A live run that others consider dead loses its work and reports it;
the correctness of a commit never depends on heartbeats."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.core.errors import JobError, UsageError
from pipeline.core.json_values import parse_object
from pipeline.core.storage.objects import is_object
from pipeline.core.storage.retries import STALL_S
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import is_remote

ATTEMPTS = "_attempts"
# Longer than any wait of a live driver, whose heartbeat may have to wait for a dead DataNode too.
LEASE_S = 2 * STALL_S + 60
HEARTBEAT_S = 5.0
CLAIM_TRIES = 10  # of making a folder that others may remove while it is empty
CLAIM_PAUSE_S = 0.02  # the longest before the second try; it grows with every try
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # drawn anew whenever a machine starts


def whoami() -> dict[str, Any]:
    """Return the identity of this process: boot of the machine, PID namespace, PID and start time.

    All four are needed to conclude from "no such process" that a run is dead. Host names are not unique, because
    machines made from one image share them, and the first PID namespace has the same number on every machine."""
    boot = namespace = ""
    with suppress(OSError):
        boot = BOOT_ID.read_text(encoding="utf-8").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    pid = os.getpid()
    return {
        "host": socket.gethostname(), "boot": boot, "namespace": namespace, "pid": pid, "started": _status(pid)[1],
    }  # fmt: skip


def is_running(owner: dict[str, Any]) -> bool | None:
    """Return whether a process is running, or None if that cannot be told, as of another machine or namespace.

    Heartbeats of older versions contain no boot id; the caller then uses the age of the heartbeat."""
    this_process = whoami()
    if any(not this_process.get(key) or owner.get(key) != this_process[key] for key in ("boot", "namespace")):
        return None
    is_foreign = False
    try:
        pid = int(owner["pid"])
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        is_foreign = True  # the process exists, and belongs to another user
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    state, started = _status(pid)
    if is_foreign and not started:
        return None  # /proc hides other users' processes here, so this may be a later one with the same number
    # A zombie waits for its parent to reap it, which the first process of a container may never do.
    return state not in ("Z", "X") and owner.get("started") in (None, started)


def _status(pid: int) -> tuple[str, str]:
    """Return the state of a process and its start time in clock ticks, or empty strings if /proc has neither."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


def make_task_folder(store: Store, path: str) -> None:
    """Make the folder of a task inside its attempt.

    Raises JobError if the attempt no longer exists. A task can outlive a killed driver, and must not recreate a deleted
    folder."""
    try:
        store.makedir(path)
    except FileNotFoundError:
        attempt = path.rpartition("/")[0]
        output = attempt.partition(f"/{ATTEMPTS}/")[0]
        # On a machine that does not mount the output, the whole output is missing, not only this attempt.
        if output != attempt and not is_remote(path) and not store.exists(output):
            raise JobError(
                f"{output} does not exist on {socket.gethostname()}: a local --output has to be a folder that all machines"
                " of the cluster mount (or the run has ended meanwhile)"
            ) from None
        raise JobError(
            f"{attempt} no longer exists: the run has ended, or another run considered it dead and deleted it; run it again"
        ) from None


def write_task_file(store: Store, folder: str, data: bytes) -> str:
    """Write a new file in a folder inside an attempt, which other tasks may read, and return its path.

    The name is unique, so that repeated and speculative tasks do not collide. Raises JobError like ``make_task_folder``."""
    path = f"{folder}/{uuid.uuid4().hex}"
    make_task_folder(store, folder)
    store.write_new(path, data)
    return path


class Attempt:
    """The claim of one run on an output. A context manager, which removes the attempt's folder at its end.

    lease_s: age in seconds of the last heartbeat from which a run on another machine counts as dead. heartbeat_s:
    seconds between two heartbeats. sweeps: whether to delete the folders of dead attempts at the start."""

    def __init__(
        self,
        store: Store,
        output: str,
        *,
        lease_s: float = LEASE_S,
        heartbeat_s: float = HEARTBEAT_S,
        sweeps: bool = True,
    ) -> None:
        self.store = store
        self.output = output
        self.lease_s = lease_s
        self.heartbeat_s = heartbeat_s
        self.sweeps = sweeps
        self.id = uuid.uuid4().hex[:12]
        self.folder = f"{output}/{ATTEMPTS}/{self.id}"
        self._made_output = self._finished = False
        self._stop = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    def __enter__(self) -> Attempt:
        self._made_output = not self.store.exists(self.output)
        try:
            self._claim()
            self._check_commits_can_be()
            self._heartbeat.start()
            if self.sweeps:
                self.remove_abandoned()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _claim(self) -> None:
        """Make the attempt's folder and its first heartbeat.

        Other runs that end may remove the folder while it is still empty, so this is tried several times. Raises
        FileNotFoundError after the last."""
        if not is_remote(self.output) and os.path.islink(self.output) and not os.path.exists(self.output):
            raise UsageError(
                f"--output {self.output} is a symbolic link to {os.readlink(self.output)}, which does not exist; create it,"
                " or choose another folder"
            )
        refuse_link(self.output)
        for tried in range(CLAIM_TRIES):
            # Runs that began together would otherwise be in each other's way again.
            time.sleep(random.uniform(0, CLAIM_PAUSE_S) * tried)
            with suppress(
                FileNotFoundError
            ):  # another run has found the folder, or one above it, empty, and removed it
                self.store.makedirs(self.folder)
                return self.store.write_new(f"{self.folder}/beat", json.dumps(whoami()).encode())
        raise FileNotFoundError(f"{self.folder} was removed {CLAIM_TRIES} times while this run made it")

    def _check_commits_can_be(self) -> None:
        """Raise UsageError, before any work, if a local file system has no put-if-absent.

        An object store is tested before its first conditional put, and HDFS always supports it."""
        if is_remote(self.output):
            return
        probe = f"{self.folder}/probe"
        self.store.write_new(probe, b"")
        try:
            # A commit is a rename that must fail if the target exists, so try such a rename inside the attempt.
            self.store.rename(probe, f"{probe}-2")
        except OSError as error:
            # Other errors, such as a full disk, have nothing to do with support and keep their own message.
            if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP):
                raise
            raise UsageError(
                f"{self.output}: this file system has no hard links and no rename that refuses to overwrite"
                f" ({error.strerror}), so two runs could overwrite each other's commit; choose another --output"
            ) from None
        finally:
            self.store.delete(probe)
            self.store.delete(f"{probe}-2")

    def __exit__(self, *_: object) -> None:
        """Stop the heartbeat and remove the attempt's folder, and the output folder if this attempt made it and it is
        empty."""
        self._stop.set()
        if self._heartbeat.is_alive():
            self._heartbeat.join()
        with suppress(OSError):  # the next run removes the files that are left
            self.store.delete(self.folder)
        self.store.remove_empty(f"{self.output}/{ATTEMPTS}")
        if self._made_output:  # a run that failed leaves no empty folder behind
            self.store.remove_empty(self.output)

    def _send_heartbeat(self) -> None:
        """Replace the heartbeat file by a new one, which appears complete, as other runs may read it at any time."""
        fresh = f"{self.folder}/beat-{uuid.uuid4().hex[:8]}"
        self.store.write_new(fresh, json.dumps(whoami() | {"finished": self._finished}).encode())
        self.store.rename(fresh, f"{self.folder}/beat", overwrite=True)

    def _send_heartbeats(self) -> None:
        """Send a heartbeat every ``heartbeat_s`` seconds until the attempt ends; runs in its own thread."""
        while not self._stop.wait(self.heartbeat_s):
            with suppress(OSError):  # the lease allows for missed heartbeats
                self._send_heartbeat()

    def alive(self, attempt_id: str) -> bool:
        """Return whether another attempt may still be running.

        A process of this machine is looked up by its PID. A run of another machine counts as alive while its last
        heartbeat is younger than ``lease_s``, and an attempt without a readable heartbeat while its folder is. Only
        modification times of the store are compared, never the clocks of two machines."""
        heartbeat = f"{self.output}/{ATTEMPTS}/{attempt_id}/beat"
        try:
            beat_ms = self.store.info(heartbeat).modified_ms
            owner = parse_object(self.store.read(heartbeat))
        except (FileNotFoundError, ValueError):
            folder = f"{self.output}/{ATTEMPTS}/{attempt_id}"
            return not _half_removed(self.store, folder) and self._age_s(folder) < self.lease_s
        running = is_running(owner)
        if running is not None:
            return running  # regardless of the heartbeat's age, because a long computation can delay it
        self._send_heartbeat()
        now = self.store.info(f"{self.folder}/beat").modified_ms
        return (now - beat_ms) / 1000 < self.lease_s

    def finish(self) -> None:
        """Mark this attempt as committed, so that a run that replaces its set may delete its files."""
        self._finished = True
        self._stop.set()  # a heartbeat that the thread is writing would not contain the mark
        if self._heartbeat.is_alive():
            self._heartbeat.join()
        with suppress(FileNotFoundError):  # another run considered this one dead, and deleted its folder
            self._send_heartbeat()

    def may_commit(self, attempt_id: str) -> bool:
        """Return whether an attempt may be about to commit: it is alive, has a heartbeat and has not committed yet."""
        try:
            owner = parse_object(self.store.read(f"{self.output}/{ATTEMPTS}/{attempt_id}/beat"))
        except (FileNotFoundError, ValueError):
            return False
        return not owner.get("finished") and self.alive(attempt_id)

    def _age_s(self, path: str) -> float:
        """Return the age of a file or folder in seconds by the store's clock, or infinity if it does not exist.

        The store's clock can differ from this machine's. This attempt therefore writes a heartbeat, whose modification
        time is the store's present time."""
        try:
            modified_ms = self.store.info(path).modified_ms
        except FileNotFoundError:
            return float("inf")
        self._send_heartbeat()
        return (self.store.info(f"{self.folder}/beat").modified_ms - modified_ms) / 1000

    def remove_abandoned(self) -> list[str]:
        """Delete the folders of dead attempts, and stray files beside them; return the deleted names."""
        removed_ids = []
        for entry in self.store.list(f"{self.output}/{ATTEMPTS}"):
            if entry.name == self.id:
                continue
            if entry.is_dir and self.alive(entry.name):
                # Without a heartbeat it counts as alive for a while; if its folder is empty, nothing is lost.
                self.store.remove_empty(entry.path)
            else:
                self.store.delete(entry.path)
                removed_ids.append(entry.name)
        return removed_ids


@contextmanager
def try_claim(store: Store, output: str) -> Iterator[Attempt]:
    """Claim an output to test whether a run could, and leave no trace, not even of folders above it.

    Raises OSError if the output cannot be written, UsageError if its file system allows no commits."""
    missing = _missing_folders(store, output)
    try:
        with Attempt(store, output, sweeps=False) as attempt:
            yield attempt
    finally:
        for folder in missing:
            store.remove_empty(folder)


def refuse_link(output: str) -> None:
    """Raise UsageError if a local output's folder of attempts is a symbolic link.

    Entries of dead attempts are deleted, and a link would lead to a folder elsewhere."""
    folder = f"{output}/{ATTEMPTS}"
    if not is_remote(output) and os.path.islink(folder):
        raise UsageError(
            f"{folder} is a symbolic link to {os.readlink(folder)}, whose files would be deleted: remove it"
        )


def _missing_folders(store: Store, path: str) -> list[str]:
    """Return the folders that would have to be made for ``path``, innermost first. Object stores have no folders."""
    missing: list[str] = []
    while not is_object(path) and path.rpartition("/")[2] and not store.exists(path):
        missing.append(path)
        path = path.rpartition("/")[0]
    return missing


def _half_removed(store: Store, folder: str) -> bool:
    """Return whether the removal of an attempt was interrupted: a live run always has its heartbeat file."""
    return bool(store.list(folder)) and not store.exists(f"{folder}/beat")


def seems_alive(store: Store, output: str, attempt_id: str) -> bool:
    """Return whether an attempt may be running, without writing anything.

    As this writes no heartbeat of its own, the age of the attempt's last heartbeat is taken by the clock of this
    machine."""
    folder = f"{output}/{ATTEMPTS}/{attempt_id}"
    try:
        beat_ms = store.info(folder).modified_ms
        owner = {}
        with suppress(FileNotFoundError, ValueError):
            # A run makes its folder before its first heartbeat: until then, the age of the folder decides.
            owner = parse_object(store.read(f"{folder}/beat"))
            beat_ms = store.info(f"{folder}/beat").modified_ms
    except FileNotFoundError:
        return False
    if not owner and _half_removed(store, folder):
        return False
    running = is_running(owner)
    return time.time() - beat_ms / 1000 < LEASE_S if running is None else running
