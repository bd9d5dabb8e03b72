"""A folder on every kind of store for tests that must hold on all of them, and what such tests share: a pytest plugin.

A test with the fixture ``place`` runs on a local disk, on HDFS and on S3. All but the first are slow. WebHDFS serves the
files of HDFS: the tests of its client are in tests/unit/test_storage.py."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.storage.store import Store
from tests.clusters.machine import ROOT
from trainer.home.place import StorePlace

STORE = Store()


def on_each(*kinds: str) -> list[Any]:
    """Return the kinds of stores as a fixture's parameters. All but the first are for the full tier."""
    return [kinds[0], *(pytest.param(kind, marks=pytest.mark.full) for kind in kinds[1:])]


def folder_on(kind: str, request: pytest.FixtureRequest) -> str:
    """Return a folder, which is not there yet, on a kind of store: file, hdfs, webhdfs or s3."""
    if kind == "webhdfs":
        root = request.getfixturevalue("hdfs").web_uri
    else:
        root = request.getfixturevalue("tmp_path") if kind == "file" else request.getfixturevalue(kind).uri
    return f"{root}/set-{uuid.uuid4().hex[:8]}"


@pytest.fixture(params=on_each("file", "hdfs", "s3"))
def place(request: pytest.FixtureRequest) -> str:
    """A folder on each kind of store, which is not there yet. A test may name some (``indirect``)."""
    return folder_on(request.param, request)


def put(path: str, data: bytes) -> None:
    """Write a file, whether it is there or not, with its folder."""
    STORE.makedirs(path.rpartition("/")[0])
    if STORE.exists(path):
        STORE.delete(path)
    STORE.write_new(path, data)


def put_after(path: str, data: bytes, time_ms: int) -> int:
    """Write a file whose time is later than that; its time. Files of one tick of a file system's clock have no order."""
    while True:
        put(path, data)
        if (written := STORE.info(path).modified_ms) > time_ms:
            return written
        time.sleep(0.002)


def files_below(folder: Path | str) -> set[str]:
    """Every file below a folder, by its path in it."""
    return {path.removeprefix(f"{folder}/") for path in STORE.walk(str(folder))}


def elsewhere(function: Any, *arguments: object) -> Any:
    """The result of a function of a test module in a process of its own, which has no client of a store yet: those that it
    forks may make theirs."""
    program = (
        "import importlib, json, sys\n"
        "module, name, arguments = json.loads(sys.argv[1])\n"
        "print(json.dumps(getattr(importlib.import_module(module), name)(*arguments)))"
    )
    module = sys.modules[function.__module__].__spec__
    assert module
    what = json.dumps(
        [module.name if module.name.startswith("tests.") else f"tests.{module.name}", function.__name__, arguments]
    )
    done = subprocess.run([sys.executable, "-c", program, what], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def home(place: str) -> StorePlace:
    """Where a run is kept."""
    return StorePlace(place, STORE)


@pytest.fixture
def near(tmp_path: Path) -> StorePlace:
    """One that is reached in no time; a local folder goes the ways of HDFS, but for the network."""
    return StorePlace(str(tmp_path / "home"), STORE)
