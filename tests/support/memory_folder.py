"""A folder in memory for the files of a run of the tests: on a disk, half of the time of a short training run is fsync."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

MEMORY = Path("/dev/shm")
NEEDED_BYTES = 8 << 30  # a run of the full tier leaves less than 2 GB there


def new_folder() -> Path | None:
    """Return a path for the files of this process, to be made; None where there is too little memory.

    Folders of processes that have ended, whose tests failed, are deleted."""
    if (
        not MEMORY.is_dir()
        or min(psutil.disk_usage(str(MEMORY)).free, psutil.virtual_memory().available) < NEEDED_BYTES
    ):
        return None
    parent = MEMORY / f"sharding-tests-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    for each in parent.iterdir():
        if not psutil.pid_exists(int(each.name)):
            shutil.rmtree(each, ignore_errors=True)
    return parent / str(os.getpid())


FOLDER = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Have pytest make its temporary folders in memory, unless --basetemp is given.

    The processes of xdist get folders below that of the process which starts them."""
    folder = None if config.option.basetemp or hasattr(config, "workerinput") else new_folder()
    if folder:
        config.option.basetemp = str(folder)
        config.stash[FOLDER] = folder


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Delete the folder after a run without failures."""
    folder = session.config.stash.get(FOLDER, None)
    if folder and not exitstatus:
        shutil.rmtree(folder, ignore_errors=True)
