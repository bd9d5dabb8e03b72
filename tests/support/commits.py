"""What tests of commits share: a set to commit, a process killed at a chosen change of a file, and what a folder holds."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.npz import to_bytes
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.shardset.commit import Move, publish, refuse_unless
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet, missing_file, open_committed, read_committed
from pipeline.core.shardset.parts import ShardFile, Worker
from pipeline.core.storage.objects import ObjectFiles
from pipeline.core.storage.store import Store
from tests.support.kills import was_killed
from tests.support.places import STORE, files_below

CHANGES = ("create", "makedirs", "rename", "delete")
REQUESTS = ("put", "copy", "delete")  # of obstore: a rename takes two


@dataclass
class Watched:
    """Something of which some functions are looked up only after a step of a test's."""

    inner: Any
    names: tuple[str, ...]
    step: Callable[[], None]

    def __getattr__(self, name: str) -> Any:
        if name in self.names:
            self.step()
        return getattr(self.inner, name)


def watched(files: Any, step: Callable[[], None]) -> Any:
    """Files that take a step before every change: of a file, and in an object store of an object."""
    if not isinstance(files, ObjectFiles):
        return Watched(files, CHANGES, step)
    files = copy(files)
    files.api = Watched(files.api, REQUESTS, step)
    return files


@dataclass(frozen=True)
class FatalStore(Store):
    """Whose process is killed by SIGKILL just before change number ``countdown[0]``."""

    countdown: list[int] = field(default_factory=list)

    def files(self, uri: str) -> Any:
        return watched(super().files(uri), self.step)

    def step(self) -> None:
        self.countdown[0] -= 1
        if self.countdown[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def contents(name: str, workers: int) -> dict[str, bytes]:
    return {
        f"worker={w:03d}/part-{c:05d}.parquet": f"{name} {w} {c}".encode() * 50
        for w in range(workers)
        for c in range(2)
    } | {"_model/pca/arrays.npz": to_bytes(name=np.array(name))}


def manifest_of(name: str, files: dict[str, bytes], workers: int) -> Manifest:
    def entry(path: str) -> ShardFile:
        data = files[path]
        return ShardFile(path, 1, len(data), hashlib.sha256(data).hexdigest())

    return Manifest(
        strategy=name,
        num_workers=workers,
        workers=[
            Worker(index=w, files=[entry(p) for p in files if p.startswith(f"worker={w:03d}/")]) for w in range(workers)
        ],
        model=[p for p in files if p.startswith("_model")],
    )


def commit(store: Store, output: Path | str, name: str, workers: int, *, overwrite: bool = True) -> int:
    """Commit a set; the number of its version."""
    files = contents(name, workers)

    def supersedes(theirs: ShardSet) -> bool:
        refuse_unless(overwrite, theirs, "run")
        return True

    with Attempt(store, str(output), heartbeat_s=60) as attempt:
        before = read_committed(store, str(output))
        if before:  # as a job refuses before it works
            refuse_unless(overwrite, before, "run")
        moves = staged(attempt, files)
        made = publish(attempt, manifest_of(name, files, workers), moves, before=before, supersedes=supersedes)
    return made.manifest.version


def staged(attempt: Attempt, files: dict[str, bytes]) -> list[Move]:
    """Files as an attempt's tasks write them, and where they are to go."""
    moves = [(f"{attempt.folder}/task/{path}", path) for path in files]
    for place, path in moves:
        attempt.store.makedirs(place.rpartition("/")[0])
        attempt.store.write_new(place, files[path])
    return moves


def killed_at(output: Path | str, name: str, workers: int, step: int, older: bool = False) -> bool:
    """Commit in a forked process, over an older set of its own if asked, that is killed before file change number ``step``.

    Returns False where the whole commit takes no more than ``step`` changes, and was therefore never killed. Raises
    AssertionError where the process ended in any other way; its stack trace is on stderr."""

    def work() -> None:
        if older:
            commit(STORE, output, "old", workers + 1)
        commit(FatalStore(countdown=[step]), output, name, workers)

    return was_killed(work, step)


def whole(output: Path | str) -> str | None:
    """The set a reader finds, every byte of it checked; None for none."""
    found = read_committed(STORE, str(output))
    if found is None:
        return None
    assert missing_file(found) is None
    for file in found.files():
        assert hashlib.sha256(STORE.read(f"{output}/{file.path}")).hexdigest() == file.sha256
    return found.manifest.strategy


def files_of(output: Path | str) -> set[str]:
    """Those of the committed set."""
    found = open_committed(STORE, str(output))
    return found.paths() | {"manifest.json", f"_manifests/{found.manifest.version:06d}.json"}


def assert_nothing_else(output: Path | str) -> None:
    """Nothing lies beside the committed set but numbers that were taken to keep dead runs out."""
    strays = files_below(output) - files_of(output)
    assert {
        each for each in strays if not each.startswith("_manifests") or STORE.info(f"{output}/{each}").bytes
    } == set()
