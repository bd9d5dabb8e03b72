"""What tests of strategies share: runs of a strategy, the rows of a set and the digests of its files."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.strategies import STRATEGIES

QUIET = PhaseLog(quiet=True)
SHAPE = (3, 8, 8)
ROWS_OF_SUITES = 2600  # rows of the inputs of the suites over all strategies
# Small fits for strategies that fit; the others take what they have.
OPTIONS: dict[str, dict[str, Any]] = {
    "distribution_aware": {"clusters": 40, "components": 20, "whiten": True},
    "class_cluster": {"clusters": 30, "components": 10},
    "submodular": {"embedding": "pca:10"},
}


_ledgers = tempfile.TemporaryDirectory()  # deleted when the process ends


@cache
def ledger_of(rows: int) -> str:
    """Write an example ledger of two used epochs in random order, with many equal losses, and return its folder."""
    folder = Path(_ledgers.name) / str(rows)
    folder.mkdir()
    rng = np.random.default_rng(rows)
    for number, part in enumerate(np.array_split(rng.permutation(np.tile(np.arange(rows), 3)), 2)):
        epochs = rng.choice([1, 6, 7], len(part)).astype(np.int32)
        losses = rng.integers(0, 8, len(part)).astype(np.float32)
        columns = {"id": part, "epoch": epochs, "loss": losses, "correct": losses < 1}
        pq.write_table(pa.table(columns), folder / f"{number}.parquet", row_group_size=500)
    every = {"id": np.arange(rows), "epoch": np.full(rows, 7, np.int32), "loss": np.ones(rows, np.float32)}
    pq.write_table(pa.table(every), folder / "2.parquet")
    return str(folder)


def make(name: str, **extra: Any) -> Any:
    if name == "importance":
        extra.setdefault("example_ledger", ledger_of(ROWS_OF_SUITES))
    return STRATEGIES[name](**{**OPTIONS.get(name, {}), **extra})


def run(spark: SparkSession, source: Path, output: Path | str, strategy: Any, workers: int, **options: Any) -> Any:
    request = Request(
        input=str(source),
        output=str(output),
        num_workers=workers,
        read_options=ReadOptions("cifar10-binary", SHAPE),
        **options,
    )
    outcome = shard(spark.sparkContext, request, strategy, QUIET)
    return outcome.shards.manifest.to_json()


def read(output: Path, manifest: Any) -> pd.DataFrame:
    """All rows of a set with their worker, read by pyarrow through the manifest."""
    parts = []
    for worker in manifest["workers"]:
        for file in worker["files"]:
            part = pq.read_table(output / file["path"]).to_pandas()
            part["worker"] = worker["index"]
            parts.append(part)
    return pd.concat(parts, ignore_index=True)


def digests(manifest: Any) -> list[Any]:
    """Of every file, by its name without the stamp of its version."""
    stamp = manifest["generation"]
    return [[(f["path"].replace(stamp, "*"), f["sha256"]) for f in worker["files"]] for worker in manifest["workers"]]


def shas(manifest: Any) -> list[list[str]]:
    return [[file["sha256"] for file in worker["files"]] for worker in manifest["workers"]]


def assert_promises(name: str, manifest: Any) -> None:
    """What a strategy's class says of its shards."""
    kind = STRATEGIES[name]
    table = np.array([worker["label_histogram"] for worker in manifest["workers"]])
    if kind.even_sizes:
        assert np.ptp(table.sum(axis=1)) <= 1
    if kind.even_classes:
        assert (np.ptp(table, axis=0) <= 1).all()
    if not kind.copies_rows:
        assert manifest["copies"] == 0


def vectors_in_parquet(folder: Path, vectors: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Path:
    """Write labelled rows whose column v holds a vector, and return the folder."""
    folder.mkdir()
    columns = {
        "image": pa.array([bytes(12)] * len(vectors), pa.binary()),
        "label": pa.array(labels, pa.int32()),
        "v": pa.array(list(vectors.astype(np.float32)), pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=70)
    return folder


def parquet_with_columns(folder: Path, rows: int, *, files: int = 2, groups: int = 40) -> Path:
    """Write labelled images of 2x2 with further columns, some with nulls, and return the folder.

    Rows of one patient, of which there are ``groups`` of uneven sizes, are scattered over the files."""
    folder.mkdir()
    rng = np.random.default_rng(rows)
    labels = rng.integers(0, 5, rows)
    seconds = np.datetime64("2026-01-01T00:00:00", "s") + rng.integers(0, 10**6, rows)
    columns = {
        "image": pa.array([bytes(row) for row in rng.integers(0, 256, (rows, 12), np.uint8)], pa.binary()),
        "label": pa.array(labels, pa.int32()),
        "site": pa.array([None if at % 7 == 3 else f"site {at % 11}" for at in range(rows)]).dictionary_encode(),
        "age": pa.array(rng.integers(0, 100, rows), pa.uint8()),
        "weight": pa.array(rng.normal(70, 9, rows), pa.float32(), mask=rng.random(rows) < 0.1),
        "is_male": pa.array(rng.integers(0, 2, rows).astype(bool)),
        "born": pa.array(seconds.astype("datetime64[D]")),
        "seen": pa.array(seconds),
        "patient": pa.array([f"p{number}" for number in np.minimum(rng.zipf(1.4, rows), groups)]),
        "v": pa.array(list(rng.normal(size=(rows, 3)).astype(np.float32)), pa.list_(pa.float32(), 3)),
    }
    table = pa.table(columns)
    for number, part in enumerate(np.array_split(np.arange(rows), files)):
        pq.write_table(table.take(pa.array(part)), folder / f"part-{number}.parquet", row_group_size=170)
    return folder


def kept_table(folder: Path) -> pa.Table:
    """The rows of all files of a folder in the order of ids."""
    return pa.concat_tables([pq.read_table(file) for file in sorted(folder.glob("*.parquet"))])
