"""One Spark session for all tests, small data sets in CIFAR's layouts, and the real CIFAR-10 where it is given."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from pyspark.sql import SparkSession

from pipeline.spark.session import PYTHON_WORKERS, spark_defaults
from pipeline.spark.shipping import PACKAGE
from tests.clusters import QUICK_START
from tests.clusters.settings import INTERPRETED

# How long an example takes says how busy the machine is.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")
os.environ["COLUMNS"] = "80"  # help texts are as wide as the terminal
EMPTY = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
pytest_plugins = [
    "tests.clusters.fixtures",
    "tests.clusters.cluster_runs",
    "tests.support.memory_folder",
    "tests.support.places",
    "tests.support.server_processes",
]
# The drivers of these tests live for seconds; .venv/env.sh names the log's settings and the class archive.
os.environ["SPARK_SUBMIT_OPTS"] = " ".join([os.environ.get("SPARK_SUBMIT_OPTS", ""), *QUICK_START])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Pause the garbage collector while modules are imported, and let it pass over them afterwards: none is ever deleted."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    defaults: dict[str, bool | float | int | str | None] = {**spark_defaults(), **INTERPRETED}
    builder = SparkSession.builder.config(map=defaults).master("local[2]")
    builder = builder.config("spark.executorEnv.PYTHONPATH", str(PACKAGE.parent))
    builder = builder.config("spark.python.daemon.module", PYTHON_WORKERS)
    session = builder.config("spark.sql.shuffle.partitions", "4").getOrCreate()
    yield session
    session.stop()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save an empty image for each figure: for tests of texts, as drawing is most of the time that a report takes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    def save_empty(_: object, target: Any, **options: Any) -> None:
        if hasattr(target, "write"):
            target.write(EMPTY)
        else:
            Path(target).write_bytes(EMPTY)

    monkeypatch.setattr(Figure, "savefig", save_empty)
    monkeypatch.setattr(FigureCanvasSVG, "print_svg", save_empty)


@pytest.fixture(scope="session")
def cifar10() -> Path:
    """The folder cifar-10-batches-bin of the real data."""
    folder = os.environ.get("CIFAR10_DIR")
    if not folder:
        pytest.skip("set CIFAR10_DIR to the real cifar-10-batches-bin to run this test")
    return Path(folder)


def make_rows(rows: int, classes: int = 10, seed: int = 0, pixels: int = 3072) -> tuple[np.ndarray, np.ndarray]:
    """Labels and images whose classes have sub-groups, in shuffled order."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    groups = rng.integers(0, 3, rows)
    centres = rng.integers(40, 216, (classes, 3, 1, 1)) + rng.integers(-30, 30, (classes, 3, 1, pixels))
    images = centres[labels, groups, 0] + rng.normal(0, 12, (rows, pixels))
    return labels.astype(np.uint8), np.clip(images, 0, 255).astype(np.uint8)


def write_binary(folder: Path, labels: np.ndarray, images: np.ndarray, files: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    records = np.concatenate([labels.reshape(len(labels), -1), images], axis=1)
    for number, part in enumerate(np.array_split(records, files), start=1):
        (folder / f"data_batch_{number}.bin").write_bytes(part.tobytes())
    return folder


def write_pickles(folder: Path, labels: np.ndarray, images: np.ndarray, files: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(np.array_split(np.arange(len(labels)), files), start=1):
        batch = {b"batch_label": b"x", b"labels": labels[rows].tolist(), b"data": images[rows]}
        (folder / f"data_batch_{number}").write_bytes(pickle.dumps(batch, protocol=2))
    return folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 rows of ten classes in CIFAR-10's binary layout, two files."""
    return write_binary(tmp_path_factory.mktemp("small") / "cifar", *make_rows(3000))
