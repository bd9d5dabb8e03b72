"""Shards by an example ledger: as the rule of the core divides the rows, however the ledger and the work are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.importance import blocks, importance, stripes
from pipeline.core.ledger_origin import with_origin
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request, preflight
from pipeline.runs.shard import shard
from pipeline.strategies import importance as strategy
from pipeline.strategies.importance import Importance
from tests.support.sharding_runs import QUIET, read, vectors_in_parquet

ROWS = 700


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vectors = np.random.default_rng(4).normal(size=(ROWS, 3))
    return vectors_in_parquet(tmp_path_factory.mktemp("src") / "in", vectors, np.arange(ROWS) % 3)


def losses_of(rows: int = ROWS, seed: int = 0) -> pa.Table:
    """Return losses of each row in epochs 1 to 8, of which many are equal, in random order."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(8 * rows)
    ids = order // 8
    epochs = (order % 8 + 1).astype(np.int32)
    return pa.table({"id": ids, "epoch": epochs, "loss": (rng.integers(0, 4, 8 * rows) / 8).astype(np.float32)})


def write(table: pa.Table, folder: Path, files: int = 1) -> str:
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(table)), files)):
        pq.write_table(table.take(pa.array(rows)), folder / f"{number:03d}.parquet", row_group_size=90)
    return str(folder)


def sharded(spark: SparkSession, source: Path, output: Path, workers: int = 4, **about: Any) -> Any:
    request = Request(str(source), str(output), workers, read_options=ReadOptions(shape=(3, 2, 2)))
    return shard(spark.sparkContext, request, Importance(**about), QUIET)


@pytest.mark.parametrize(
    ("heuristic", "measure", "pieces"),
    [("stripes", "average", 1), ("blocks", "variance", 5)],
)
def test_shards_are_those_of_the_rule(
    spark: SparkSession,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    heuristic: Any,
    measure: Any,
    pieces: int,
) -> None:
    table = losses_of()
    monkeypatch.setattr(strategy, "point_pieces", lambda *_: pieces)
    ledger = write(table, tmp_path / "ledger", files=3)
    made = sharded(spark, source, tmp_path / "o", example_ledger=ledger, heuristic=heuristic, measure=measure)
    used = table.filter(pc.field("epoch") > 5)
    columns = [used.column(name).to_numpy() for name in ("id", "epoch", "loss")]
    values = importance(*columns, rows=ROWS, measure=measure, num_epochs=3)
    assert len(np.unique(values)) < ROWS / 10, "there are ties"
    expected = {"stripes": stripes, "blocks": blocks}[heuristic](values, 4)
    manifest = made.shards.manifest
    rows = read(tmp_path / "o", manifest.to_json()).sort_values("id")
    assert rows.worker.tolist() == expected.tolist()
    assert manifest.params["epochs_used"] == 3


def test_a_set_is_found_again_by_the_content_of_its_ledger(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    first = write(losses_of(), tmp_path / "a")
    moved = write(losses_of(), tmp_path / "b")
    other = write(losses_of(seed=1), tmp_path / "c")
    assert sharded(spark, source, tmp_path / "o", example_ledger=first).fresh
    assert not sharded(spark, source, tmp_path / "o", example_ledger=moved).fresh
    with pytest.raises(JobError, match="another configuration or input"):
        sharded(spark, source, tmp_path / "o", example_ledger=other)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_ledger_of_other_rows_is_used_with_a_warning(
    spark: SparkSession, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_same: bool
) -> None:
    """Name in the ledger the rows of this set, or rows of which one differs."""
    plain = sharded(spark, source, tmp_path / "plain", example_ledger=write(losses_of(), tmp_path / "a"))
    fingerprint = int(plain.shards.manifest.input.fingerprint.rpartition("-")[2], 16) + (not is_same)
    table = losses_of()
    ledger = write(table.cast(with_origin(table.schema, fingerprint)), tmp_path / "b")
    caplog.clear()
    sharded(spark, source, tmp_path / "o", example_ledger=ledger)
    told = [text for text in caplog.messages if text.startswith(f"warning: --example-ledger {ledger} is of rows with")]
    assert len(told) == (not is_same)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda table: table.filter(pa.array(table.column("id").to_numpy() != 40)),
            "row 40 has no loss after epoch 5; ",
        ),
        (lambda table: losses_of(ROWS + 1), "id 700 is not one of the rows 0..699"),
        (
            lambda table: table.filter(pa.array(table.column("epoch").to_numpy() < 6)),
            "has no losses of epochs after 5; train for more epochs, or lower --ignore-epochs",
        ),
        (
            lambda table: table.drop_columns(["loss"]),
            "has no column loss; an example ledger has id, epoch and loss, got",
        ),
        (
            lambda table: table.set_column(2, "loss", pa.array(np.full(len(table), np.nan, np.float32))),
            "is nan, not a finite number; use the ledger of a run that did not diverge",
        ),
    ],
    ids=["missing", "unknown", "ignored", "column", "diverged"],
)
def test_an_unusable_ledger_is_one_line(
    spark: SparkSession, source: Path, tmp_path: Path, change: Any, message: str
) -> None:
    ledger = write(change(losses_of()), tmp_path / "ledger")
    with pytest.raises(DataError) as raised:
        sharded(spark, source, tmp_path / "o", example_ledger=ledger)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "o").exists()


def test_the_ledger_is_checked_before_spark_starts(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^importance needs --example-ledger URI: "):
        Importance()
    with pytest.raises(DataError, match=r"/none does not exist; check --example-ledger$"):
        preflight(Request(str(source), str(tmp_path / "o"), 2), Importance(example_ledger=f"{tmp_path}/none"))
