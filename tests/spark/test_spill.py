"""Very many workers: rows that pass through files by ranges of workers end in the same bytes as those one task writes."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from pipeline.assignment import chunks
from pipeline.assignment.chunks import chunk_bounds, piece_bounds, row_group_rows, workers_at_once
from pipeline.core.shardset.manifest import open_committed
from pipeline.input import committed
from pipeline.input.committed import committed_dataset
from pipeline.input.read_options import ReadOptions
from pipeline.output import spill
from pipeline.runs.request import Request
from pipeline.runs.reshard import reshard
from pipeline.spark import source as scanning
from tests.conftest import make_rows, write_binary
from tests.support.places import STORE
from tests.support.sharding_runs import QUIET, assert_promises, digests, make, read, run
from tests.support.tiers import only

ROWS = 2600


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of which three are isolated, so that there are copies."""
    labels, images = make_rows(ROWS, seed=5, pixels=192)
    images[[17, 400, ROWS - 1]] = np.random.default_rng(5).integers(0, 2, (3, 192)) * 255
    return write_binary(tmp_path_factory.mktemp("src") / "cifar", labels, images, files=3)


def cut(monkeypatch: pytest.MonkeyPatch, parts: int, pieces: int) -> None:
    """As a larger input would be."""
    bounds = list(pairwise(ROWS * at // parts for at in range(parts + 1)))
    finer = [pair for low, high in bounds for pair in pairwise(np.linspace(low, high, pieces + 1).astype(int).tolist())]
    monkeypatch.setattr(scanning, "chunk_bounds", lambda *_: bounds)
    monkeypatch.setattr(scanning, "piece_bounds", lambda *_: finer)


CUTS = [("distribution_aware", 1, 5, 7), ("stratified", 3, 2, 16), ("stratified", 2, 1, 1)]


@pytest.mark.parametrize(("name", "parts", "pieces", "width"), only(CUTS[1:2], CUTS))
def test_the_files_are_those_that_one_task_a_part_writes(
    spark: SparkSession,
    source: Path,
    tmp_path: Path,
    name: str,
    parts: int,
    pieces: int,
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut(monkeypatch, parts, pieces)
    at_once = run(spark, source, tmp_path / "at-once", make(name), 20)
    monkeypatch.setattr(chunks, "OPEN_FILES", width)
    through_files = run(spark, source, tmp_path / "through", make(name), 20)
    assert digests(through_files) == digests(at_once)
    assert (through_files["copies"] > 0) == (name == "distribution_aware")
    assert through_files["chunks"] == at_once["chunks"]
    assert len(through_files["chunks"]) == parts
    assert {path.name for path in (tmp_path / "through").iterdir()} == {
        p.name for p in (tmp_path / "at-once").iterdir()
    }


@pytest.mark.full
def test_three_hundred_workers_and_back(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    assert workers_at_once(192) < 300
    manifest = run(spark, source, tmp_path / "many", make("stratified", start="carry"), 300)
    rows = read(tmp_path / "many", manifest)
    assert sorted(rows.id) == list(range(ROWS))
    assert_promises("stratified", manifest)
    direct = run(spark, source, tmp_path / "direct", make("stratified", start="carry"), 5)
    back = reshard(spark.sparkContext, Request(str(tmp_path / "many"), str(tmp_path / "back"), 5), QUIET)
    assert digests(back.shards.manifest.to_json()) == digests(direct)


@pytest.mark.full
@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_many_workers_have_the_same_files_on_hdfs(
    spark: SparkSession, source: Path, tmp_path: Path, place: str
) -> None:
    here, there = (run(spark, source, output, make("stratified", start="carry"), 300) for output in (tmp_path, place))
    assert digests(there) == digests(here)


def test_many_workers_are_read_with_few_open_files(
    spark: SparkSession, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that opened a file of each of 1,100 workers met the usual limit of 1,024."""
    run(spark, source, tmp_path / "many", make("stratified"), 40)
    dataset = committed_dataset(open_committed(STORE, str(tmp_path / "many")))
    monkeypatch.setattr(committed, "WINDOW_ROWS", 10)

    def open_files() -> int:
        names = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
        return sum(name.startswith(f"{tmp_path}/many/worker=") for name in names)

    def look() -> tuple[list[int], int]:
        counts, ids = [], []
        for block in dataset.read(0, ROWS):
            counts.append(open_files())
            ids += block.ids.tolist()
        return ids, max(counts)

    assert look() == (list(range(ROWS)), 40)
    monkeypatch.setattr(committed, "MOST_OPEN", 4)
    assert look() == (list(range(ROWS)), 4)


@pytest.mark.full
def test_windows_do_not_change_what_is_written(
    spark: SparkSession, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process: a window of one block after another."""
    from tests.unit.test_verification import job_of

    job: Any = job_of(scanned_dataset(source), tmp_path / "staged", workers=9)
    files = {}
    for window in (1, 100_000, 1 << 30):
        monkeypatch.setattr(spill, "WINDOW_BYTES", window)
        spilling = spill.SpillJob(job, 4, [(0, ROWS)])
        left = [spilling.spill(0, f"spill-{window}")]
        assert left[0].ranges == {0, 1, 2}
        made = [spilling.gather(left, *task, f"gather-{window}-{task[1]}") for task in spilling.tasks()]
        files[window] = [(file.path, file.rows, file.sha256) for chunk in made for file in chunk.files]
        assert sum(chunk.rows for chunk in made) == ROWS
    assert len(files[1]) == 9
    assert files[1] == files[100_000] == files[1 << 30]
    whole = job.write(0, "whole")
    assert [(file.path, file.rows, file.sha256) for file in whole.files] == files[1]


def scanned_dataset(source: Path) -> Any:
    from pipeline.core.storage.store import Store
    from pipeline.input.dataset import discover, serial

    return discover(Store(), str(source), run=serial, read_options=ReadOptions("cifar10-binary", (3, 8, 8)))


@given(st.integers(1, 10**8), st.integers(1, 20_000), st.integers(1, 20_000))
def test_pieces_suffice_for_every_core_and_spare_the_namenode(rows: int, workers: int, record_bytes: int) -> None:
    parts = chunk_bounds(rows, workers, record_bytes)
    pieces = piece_bounds(parts, record_bytes)
    assert [pieces[0][0], pieces[-1][1]] == [0, rows]
    assert all(left[1] == right[0] for left, right in pairwise(pieces))
    assert {low for low, _ in parts} <= {low for low, _ in pieces}
    assert len(pieces) <= len(parts) + max(256, 2 * rows * record_bytes / 2**30)
    if rows >= 320_000:
        assert len(pieces) >= 16


@given(st.integers(1, 10**7))
def test_a_task_holds_full_row_groups_of_all_its_workers(record_bytes: int) -> None:
    at_once = workers_at_once(record_bytes)
    assert 1 <= at_once <= chunks.OPEN_FILES
    rows = row_group_rows(at_once, record_bytes)
    assert rows == 1000 or rows * record_bytes >= min(record_bytes, chunks.ROW_GROUP_BYTES - record_bytes)
    assert 2 * at_once * min(rows, 1000) * record_bytes <= max(chunks.BUFFER_BYTES, 2 * record_bytes)
