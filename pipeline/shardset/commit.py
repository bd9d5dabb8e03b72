"""Attempts and the commit: readers see the old set or the new one whole, whenever a driver dies.

Layout under OUTPUT:
  _attempts/ID/...        one run's work: a heartbeat, task output, the new manifest; invisible to readers
  _attempts/lock          held for the seconds of a commit, by the attempt that it names
  worker=NNN/*.parquet    moved here just before the commit; names carry the generation, so sets never share a file
  manifest.json           replaced by one atomic rename: the commit

A run killed before the rename leaves the old set as it was; after it, the new set is in force and at most some files of
the old one are left over. The next run removes what dead attempts left, and nothing of one whose heart still beats.
Readers go by the manifest. (A plain glob over worker=* may, during the seconds of a commit over an older set, see files
of both.) Limits: a driver that is frozen past the lease in the very middle of its commit, and then thawed, is checked
for before the rename but not fenced by the file system. A reader who holds an old manifest while its files are removed
misses a file, and reads the manifest again."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline.errors import JobError, UsageError
from pipeline.shardset.manifest import NAME, ShardSet, dumps, read_committed
from pipeline.storage.retries import STALL_S
from pipeline.storage.store import Store

ATTEMPTS = "_attempts"
# Longer than anything that a live driver waits for: a heartbeat may meet a dead DataNode too.
LEASE_S = 2 * STALL_S + 60
HEARTBEAT_S = 5.0
# What a sweep may delete; everything else under OUTPUT is somebody else's.
OWNED_FOLDER = re.compile(r"worker=\d+|_eval|_model")
OWNED = re.compile(
    r"(worker=\d+|_eval)/part-\d{5}-\w+\.parquet|_model/\w+/[\w-]+/(metadata/(part-00000|_SUCCESS)|arrays\.npz)"
)
DERIVED = ("report.html", "quality.json")  # made after a commit, from it; stale once another set is committed
DERIVED_PART = re.compile(r"_(report\.html|quality\.json)-[0-9a-f]{8}")
MOVERS = 8


def _whoami() -> dict[str, Any]:
    """A process by host, process-id namespace, process id and start: only then does 'no such process' mean dead, and
    a process of that number the same one."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    pid = os.getpid()
    return {"host": socket.gethostname(), "namespace": namespace, "pid": pid, "started": _status(pid)[1]}


def _is_running(owner: dict[str, Any]) -> bool | None:
    """Whether a process runs on this host; None where this host cannot tell."""
    here = _whoami()
    if (owner.get("host"), owner.get("namespace")) != (here["host"], here["namespace"]) or not here["namespace"]:
        return None
    try:
        pid = int(owner["pid"])
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, and there
    except (OSError, ValueError, KeyError, TypeError):
        return None
    state, started = _status(pid)
    # One that has ended may wait for its parent to notice, which a container's first process may never do.
    return state not in ("Z", "X") and owner.get("started") in (None, started)


def _status(pid: int) -> tuple[str, str]:
    """A process's state, and when it started, in the kernel's ticks; empty where nobody tells."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


class Attempt:
    """One run's claim on an output. Use as a context manager: leaving it removes the attempt's folder."""

    def __init__(
        self, store: Store, output: str, *, lease_s: float = LEASE_S, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self.store, self.output = store, output
        self.lease_s, self.heartbeat_s = lease_s, heartbeat_s
        self.id = uuid.uuid4().hex[:12]
        self.folder = f"{output}/{ATTEMPTS}/{self.id}"
        self.lock = f"{output}/{ATTEMPTS}/lock"
        self._made_output = False
        self._stop = threading.Event()
        self._heartbeat = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    def __enter__(self) -> Attempt:
        self._made_output = not self.store.exists(self.output)
        try:
            self.store.makedirs(self.folder)
            self.store.write_new(f"{self.folder}/beat", json.dumps(_whoami()).encode())
            self._heartbeat.start()
            self.remove_abandoned()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._heartbeat.is_alive():
            self._heartbeat.join()
        with suppress(OSError):  # what cannot be removed now is the next run's to remove
            self.store.delete(self.folder)
        self.store.remove_empty(f"{self.output}/{ATTEMPTS}")
        if self._made_output:  # a run that failed leaves no empty folder behind
            self.store.remove_empty(self.output)

    def _send_heartbeat(self) -> None:
        fresh = f"{self.folder}/beat-{uuid.uuid4().hex[:8]}"
        self.store.write_new(fresh, json.dumps(_whoami()).encode())
        self.store.rename(fresh, f"{self.folder}/beat", overwrite=True)

    def _send_heartbeats(self) -> None:
        while not self._stop.wait(self.heartbeat_s):
            with suppress(OSError):  # a missed heartbeat is what the lease is for
                self._send_heartbeat()

    def alive(self, attempt_id: str) -> bool:
        """Whether another attempt may still be at work. Times are compared on the file system's clock alone."""
        heartbeat = f"{self.output}/{ATTEMPTS}/{attempt_id}/beat"
        try:
            seen = self.store.info(heartbeat).modified_ms
            owner = json.loads(self.store.read(heartbeat))
        except (FileNotFoundError, ValueError):
            return self._age_s(f"{self.output}/{ATTEMPTS}/{attempt_id}") < self.lease_s
        running = _is_running(owner)
        if running is not None:
            return running  # however long its heart has not been heard: a computation may hold it up
        self._send_heartbeat()
        now = self.store.info(f"{self.folder}/beat").modified_ms
        return (now - seen) / 1000 < self.lease_s

    def _age_s(self, path: str) -> float:
        try:
            seen = self.store.info(path).modified_ms
        except FileNotFoundError:
            return float("inf")
        self._send_heartbeat()
        return (self.store.info(f"{self.folder}/beat").modified_ms - seen) / 1000

    def remove_abandoned(self) -> list[str]:
        """Delete the folders of dead attempts; their ids."""
        gone = []
        for entry in self.store.list(f"{self.output}/{ATTEMPTS}"):
            if entry.is_dir and entry.name != self.id and not self.alive(entry.name):
                self.store.delete(entry.path)
                gone.append(entry.name)
        return gone

    @contextmanager
    def locked(self, *, wait_s: float | None = None) -> Iterator[None]:
        """Hold the commit lock; a dead attempt's lock is broken. Raises JobError when a live one keeps it too long: longer
        than the lease, where nothing else is said."""
        wait_s = self.lease_s + 60 if wait_s is None else wait_s
        deadline = time.monotonic() + wait_s
        while True:
            try:
                with self.store.create(self.lock) as file:
                    file.write(self.id.encode())
                break
            except FileExistsError:
                holder = self._holder()
                if holder == self.id:
                    break
                if holder is None:
                    continue
                if not self.alive(holder) if holder else self._is_ownerless():
                    self._break_lock(holder)
                elif time.monotonic() > deadline:
                    raise JobError(
                        f"{self.output}: attempt {holder} has held the commit lock for {wait_s:.0f} s; rerun later"
                    ) from None
                else:
                    time.sleep(0.2)
        try:
            yield
        finally:
            if self._holder() == self.id:
                self.store.delete(self.lock)

    def _break_lock(self, holder: str) -> None:
        """Move away the lock of a dead attempt. Another breaker may have been first, and somebody may hold a new one by now:
        that one is put back. Who has taken a third in between keeps it, and the second notices before it commits."""
        broken = f"{self.folder}/broken-{uuid.uuid4().hex[:8]}"
        try:
            self.store.rename(self.lock, broken)
        except FileNotFoundError:
            return  # another breaker's
        if self.store.read(broken).decode() != holder:
            with suppress(FileExistsError):
                self.store.rename(broken, self.lock)

    def _is_ownerless(self) -> bool:
        """Whether nobody can be about to write its id into the lock: its taker died while it took it."""
        if self._age_s(self.lock) > self.lease_s:
            return True
        others = {entry.name for entry in self.store.list(f"{self.output}/{ATTEMPTS}") if entry.is_dir} - {self.id}
        return not any(self.alive(other) for other in others)

    def _holder(self) -> str | None:
        """Who holds the lock: an id, an empty text while it is being written, None when nobody does."""
        try:
            return self.store.read(self.lock).decode()
        except FileNotFoundError:
            return None

    def publish(
        self,
        manifest: dict[str, Any],
        moves: list[tuple[str, str]],
        *,
        before: ShardSet | None,
        supersedes: Callable[[ShardSet], bool],
    ) -> ShardSet:
        """Move files (staged, path under OUTPUT) into place and commit the manifest over ``before``.

        Where another run has committed since ``before`` was read: its set is kept and returned when
        ``supersedes(theirs)`` is false, and replaced otherwise."""
        with self.locked():
            current = read_committed(self.store, self.output)
            changed = (current.manifest if current else None) != (before.manifest if before else None)
            if current and changed and not supersedes(current):
                return current
            for folder in sorted({path.rpartition("/")[0] for _, path in moves}):
                self.store.makedirs(f"{self.output}/{folder}")
            with ThreadPoolExecutor(MOVERS) as pool:
                list(pool.map(self._move, moves))
                list(
                    pool.map(self.store.sync_folder, {f"{self.output}/{path}".rpartition("/")[0] for _, path in moves})
                )
            staged = f"{self.folder}/{NAME}"
            self.store.write_new(staged, dumps(manifest))
            if self._holder() != self.id:
                raise JobError(f"{self.output}: this attempt lost the commit lock (was it frozen?); rerun")
            self.store.rename(staged, f"{self.output}/{NAME}", overwrite=True)
            self.store.sync_folder(self.output)
            committed = ShardSet(self.store, self.output, manifest)
            for name in DERIVED:
                self.store.delete(f"{self.output}/{name}")
            self.sweep(committed.paths())
            return committed

    def tidy(self) -> int:
        """Delete what runs that were killed have left beside the committed set, or where there is none and nobody else is
        at work; returns how many files."""
        with self.locked():
            committed = read_committed(self.store, self.output)
            if committed:
                return self.sweep(committed.paths())
            others = [entry.name for entry in self.store.list(f"{self.output}/{ATTEMPTS}") if entry.is_dir]
            return 0 if any(self.alive(name) for name in others if name != self.id) else self.sweep(set())

    def _move(self, move: tuple[str, str]) -> None:
        staged, path = move
        self.store.rename(staged, f"{self.output}/{path}", overwrite=True)

    def sweep(self, keep: set[str]) -> int:
        """Delete what ``unlisted`` finds; call under the lock. Returns how many files."""
        files, folders = unlisted(self.store, self.output, keep)
        for path in files:
            self.store.delete(path)
        for folder in folders:
            self.store.remove_empty(folder)
        return len(files)


def unlisted(store: Store, output: str, keep: set[str]) -> tuple[list[str], list[str]]:
    """Files of this program's making in a set's folders that are not to be kept, and the folders, deepest first, which may
    be empty without them. keep: paths under OUTPUT. Links are not followed."""
    files: list[str] = []
    folders: list[str] = []

    def look(folder: str, relative: str) -> None:
        for entry in store.list(folder):
            path = f"{relative}/{entry.name}"
            if entry.is_dir and not entry.is_link:
                look(entry.path, path)
            elif path not in keep and OWNED.fullmatch(path):
                files.append(entry.path)
        folders.append(folder)

    for entry in store.list(output):
        if entry.is_dir and not entry.is_link and OWNED_FOLDER.fullmatch(entry.name):
            look(entry.path, entry.name)
        elif DERIVED_PART.fullmatch(entry.name):
            files.append(entry.path)
    return files, folders


def has_leftovers(store: Store, committed: ShardSet) -> bool:
    """Whether runs that were killed have left anything beside a committed set. One listing of each of its folders."""
    there = store.exists(f"{committed.uri}/{ATTEMPTS}")
    return there or bool(unlisted(store, committed.uri, committed.paths())[0])


def seems_alive(store: Store, output: str, attempt_id: str) -> bool:
    """Whether an attempt may be at work, for somebody who only looks: by this machine's clock, and nothing is written."""
    folder = f"{output}/{ATTEMPTS}/{attempt_id}"
    try:
        beat = f"{folder}/beat"
        owner, seen = json.loads(store.read(beat)), store.info(beat).modified_ms
    except (FileNotFoundError, ValueError):
        owner, seen = {}, store.info(folder).modified_ms
    running = _is_running(owner)
    return time.time() - seen / 1000 < LEASE_S if running is None else running


def refuse_unless(overwrite: bool, committed: ShardSet, difference: str) -> None:
    """Raise UsageError where a set of another configuration stands in the way."""
    if not overwrite:
        held = f"{committed.manifest['strategy']} for {committed.num_workers} workers"
        raise UsageError(
            f"{committed.uri} already holds a committed set ({held}) of another {difference}; pass --overwrite to replace it"
        )
