"""Blocks by submodular functions: against brute force, on any processor's arithmetic, and through the job."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from sklearn.metrics.pairwise import cosine_similarity

from pipeline.assignment.blocks import (
    FUNCTIONS,
    FunctionName,
)
from pipeline.core.shardset.ratios import largest_remainder
from pipeline.input.dataset import ranges
from pipeline.runs.request import Request
from pipeline.runs.reshard import reshard
from pipeline.spark.images import Images
from pipeline.strategies import submodular
from pipeline.strategies.submodular import Submodular
from tests.conftest import make_rows, write_binary
from tests.support.application import run_job
from tests.support.sharding_runs import QUIET, digests, run, shas, vectors_in_parquet


@pytest.mark.full
def test_classes_in_parts_are_the_same_bits_however_the_work_is_cut(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, images = make_rows(1500, classes=3, seed=8, pixels=192)
    source = write_binary(tmp_path / "in", labels, images, files=3)
    strategy = Submodular(embedding="pca:8", part_rows=100)
    sets = []
    most = iter([2000, 4])  # tasks, of 15 parts
    for pieces in (1, 5):
        monkeypatch.setattr(Images, "pieces", lambda self, n=pieces: ranges(0, self.dataset.rows, n)[::-1])
        monkeypatch.setattr(submodular, "MOST_TASKS", next(most))
        sets.append(run(spark, source, tmp_path / str(pieces), strategy, 4, ratios=(4, 2, 1, 1)))
    assert digests(sets[0]) == digests(sets[1])
    table = np.array([worker["label_histogram"] for worker in sets[0]["workers"]]).T
    expected = largest_remainder(np.bincount(labels), (4, 2, 1, 1), carry=True)
    assert np.array_equal(table, expected)
    run(spark, source, tmp_path / "even", strategy, 3)
    request = Request(str(tmp_path / "even"), str(tmp_path / "again"), 4, ratios=(4, 2, 1, 1))
    assert shas(reshard(spark.sparkContext, request, QUIET).shards.manifest.to_json()) == shas(sets[0])


def owners_in(output: Path) -> np.ndarray[Any, Any]:
    """By id."""
    manifest = json.loads((output / "manifest.json").read_text())
    parts = [pq.read_table(output / file["path"]).to_pandas() for file in manifest["assignment"]["files"]]
    return np.asarray(pd.concat(parts).sort_values("id")["worker"])


def gaussian(vectors: np.ndarray[Any, Any], sigma: float | None = None) -> np.ndarray[Any, Any]:
    """Similarities in float64, pair by pair. sigma: by default the mean distance of these vectors."""
    distances = np.linalg.norm(vectors[:, None] - vectors[None], axis=2)
    similar: np.ndarray[Any, Any] = np.exp(-(distances**2) / (2 * (sigma or distances.mean()) ** 2))
    return similar


def by_floats(similar: np.ndarray[Any, Any], capacities: list[int], name: FunctionName) -> Iterator[tuple[int, int]]:
    """Algorithm 1 on float64 similarities."""
    blocks: list[list[int]] = [[] for _ in capacities]

    def value(block: list[int]) -> float:
        rest = [v for v in range(len(similar)) if v not in block]
        if name == "graph-cut":
            return float(similar[np.ix_(rest, block)].sum())
        return float(similar[:, block].max(axis=1).sum()) if block else 0.0

    free = list(range(len(similar)))
    while free:
        worker = min((w for w, c in enumerate(capacities) if len(blocks[w]) < c), key=lambda w: (value(blocks[w]), w))
        point = max(free, key=lambda i: value([*blocks[worker], i]))
        blocks[worker].append(point)
        free.remove(point)
        yield worker, point


@pytest.mark.parametrize(
    ("name", "similarity"),
    [
        *((name, []) for name in FUNCTIONS),
        ("graph-cut", ["--similarity", "cosine"]),
        ("graph-cut", ["--sigma-scope", "all"]),
    ],
)
def test_the_job_places_the_rows_of_every_class_as_plain_floats_do(
    spark: SparkSession, tmp_path: Path, name: Any, similarity: list[str]
) -> None:
    rng = np.random.default_rng(11)
    vectors, labels = rng.normal(size=(75, 6)).astype(np.float32), rng.choice([0, 2, 5], 75, p=[0.5, 0.3, 0.2])
    source = vectors_in_parquet(tmp_path / "in", vectors, labels)
    flags = ["--input", source, "--output", tmp_path / "out", "--image-shape", "3x2x2", "--ratios", "3:2:1"]
    flags += ["--embedding", "v", "--function", name, "--block-rule", "paper", "--start", "zero", "--assignment-only"]
    flags += similarity
    everyone = np.linalg.norm(vectors[:, None] - vectors[None], axis=2).mean()
    done = run_job("submodular.py", *flags)
    assert done.code == 0, done.err
    assert "3 tasks, the largest first: " in done.err
    expected = np.full(75, -1)
    for label in (0, 2, 5):
        rows = np.flatnonzero(labels == label)
        capacities = largest_remainder(np.array([len(rows)]), (3, 2, 1))[0].tolist()
        if "cosine" in similarity:
            similar = (1 + cosine_similarity(vectors[rows].astype(np.float64))) / 2
        else:
            similar = gaussian(vectors[rows], everyone if similarity else None)
        for worker, point in by_floats(similar, capacities, name):
            expected[rows[point]] = worker
    assert owners_in(tmp_path / "out").tolist() == expected.tolist()


def test_what_cannot_be_done_is_one_line(spark: SparkSession, tmp_path: Path) -> None:
    labels, images = make_rows(60, classes=2, pixels=192)
    source = write_binary(tmp_path / "in", labels, images)
    flags = ["--input", source, "--output", tmp_path / "out", "--workers", 2, "--image-shape", "3x8x8", "--quiet"]
    flags += ["--format", "cifar10-binary"]
    for more, line in (
        (
            ["--task-memory-gb", "0.01"],
            "for which a task needs 0.03 GB, more than --task-memory-gb 0.01: use",
        ),
        (["--embedding", "pca:0"], "--embedding must be pca:C, C components or a share"),
        (["--embedding", "v"], "--embedding v is a column of Parquet, and"),
        (["--function", "cut"], "graph-cut"),
        (["--task-memory-gb", "0"], "--task-memory-gb must be a positive number, got 0"),
    ):
        done = run_job("submodular.py", *flags, *more)
        assert (done.code, line in done.err) == (2, True), done.err
        assert "Traceback" not in done.err
        assert not (tmp_path / "out").exists()


def test_a_set_of_a_column_cannot_be_dealt_again_without_it(spark: SparkSession, tmp_path: Path) -> None:
    vectors = np.random.default_rng(1).normal(size=(40, 3))
    source = vectors_in_parquet(tmp_path / "in", vectors, np.arange(40) % 2)
    flags = ["--workers", 2, "--image-shape", "3x2x2", "--no-report", "--quiet"]
    done = run_job("submodular.py", "--input", source, "--output", tmp_path / "out", "--embedding", "v", *flags)
    assert done.code == 0, done.err
    done = run_job("reshard.py", "--input", tmp_path / "out", "--output", tmp_path / "re", "--workers", 3, "--quiet")
    assert done.code == 2
    assert "--embedding v" in done.err
    assert len(done.err.strip().splitlines()) == 1
