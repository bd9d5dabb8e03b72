"""Fixtures of training runs: shard sets and undisturbed runs that the whole session shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from tests.support.trainer_runs import End, Training, train_here
from tests.support.trainer_sets import make_sets

# Flags under which a BSP run ends with the same bits on any number of servers and hosts.
LOGISTIC = ("--model", "logistic", "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1, "--no-report")
WORKERS = (1, 2, 3, 4)


@pytest.fixture(scope="session")
def session_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all processes of pytest-xdist share, for what is made once a session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def made_once(folder: Path) -> Iterator[bool]:
    """Yield True to the first process that asks for a folder, which is to fill it; the others wait until it has."""
    with FileLock(f"{folder}.lock"):
        ready = folder / "ready"
        is_first = not ready.exists()
        yield is_first
        if is_first:
            ready.touch()


@pytest.fixture
def runs() -> Iterator[list[Training]]:
    """Runs that the test has started, which are ended whatever it does."""
    started: list[Training] = []
    yield started
    for run in started:
        run.end()


@pytest.fixture(scope="session")
def sets(session_folder: Path, request: pytest.FixtureRequest) -> dict[int, Path]:
    """Shard sets of the same 720 training and 200 evaluation images, by their number of workers."""
    folder = session_folder / "sets"
    with made_once(folder) as is_first:
        if is_first:
            make_sets(request.getfixturevalue("spark"), folder, *WORKERS)
    return {workers: folder / f"shards-{workers}" for workers in WORKERS}


@pytest.fixture(scope="session")
def shards(sets: dict[int, Path]) -> Path:
    """The shard set for three workers."""
    return sets[3]


@pytest.fixture(scope="session")
def undisturbed_end(
    shards: Path, session_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], End]:
    """Return where an undisturbed BSP run with the flags LOGISTIC ends after a number of steps."""

    def end_of(steps: int) -> End:
        folder = session_folder / f"end-{steps}"
        folder.mkdir(exist_ok=True)
        with made_once(folder) as is_first:
            if is_first:
                output = tmp_path_factory.mktemp("undisturbed") / "run"
                flags = ("--protocol", "bsp", "--servers", 2, "--steps", steps, "--quiet")
                run = train_here(shards, output, *LOGISTIC, *flags)
                np.save(folder / "vector.npy", run.vector())
                (folder / "model").write_text(run.model_digest())
        return End(np.load(folder / "vector.npy"), (folder / "model").read_text())

    return end_of
