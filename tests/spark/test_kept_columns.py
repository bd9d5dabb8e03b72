"""Kept columns from the input through shards, spill files, resharding, materializing and Spark's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import pipeline
from pipeline.core.errors import DataError, UsageError
from pipeline.upkeep.contents import details
from pipeline.upkeep.verify import verify
from tests.support.sharding_runs import kept_table, parquet_with_columns
from tests.support.tiers import only

ROWS = 700
KEPT = ("site", "weight", "seen", "is_male", "born")
QUIET: dict[str, Any] = {"report": False, "quiet": True}
DATA: dict[str, Any] = {"image_shape": (3, 2, 2), **QUIET}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parquet_with_columns(tmp_path_factory.mktemp("src") / "p", ROWS)


def shard(spark: SparkSession, source: Path, output: Path, workers: int, **options: Any) -> Any:
    settings = {"strategy": "stratified", "keep_columns": KEPT, **DATA, **options}
    return pipeline.shard(spark, input=str(source), output=str(output), num_workers=workers, **settings).shards


def digests(shards: Any) -> list[str]:
    return [file.sha256 for file in shards.files()]


@pytest.mark.parametrize("workers", only([3], [3, 300]))  # 300: rows pass through files by ranges of workers
def test_shards_hold_the_values_of_the_input(spark: SparkSession, source: Path, tmp_path: Path, workers: int) -> None:
    direct = shard(spark, source, tmp_path / "direct", workers, allow_empty=True)
    rows = pa.concat_tables([pq.read_table(f"{direct.uri}/{file.path}") for file in direct.files()]).sort_by("id")
    assert rows.column("id").to_pylist() == list(range(ROWS))
    for name in KEPT:
        assert rows.column(name).to_pylist() == kept_table(source).column(name).to_pylist()
    assert not verify(direct, deep=True)
    assert ("kept columns", "site, weight, seen, is_male, born") in details(direct)


def test_all_ways_to_a_set_keep_its_columns(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    """Resharding, and materializing an assignment, write what the job itself writes."""
    three = shard(spark, source, tmp_path / "three", 3)
    four = shard(spark, source, tmp_path / "four", 4)
    moved = pipeline.reshard(spark, input=three.uri, output=str(tmp_path / "moved"), num_workers=4, **QUIET).shards
    assert digests(moved) == digests(four)
    assert moved.manifest.columns == four.manifest.columns
    alone = shard(spark, source, tmp_path / "alone", 4, assignment_only=True)
    output = str(tmp_path / "made")
    made = pipeline.materialize(spark, assignment=alone.uri, input=str(source), output=output, **DATA).shards
    assert digests(made) == digests(four)
    # The job itself has nothing to do there.
    assert shard(spark, source, tmp_path / "made", 4).manifest.generation == made.manifest.generation


def test_other_kept_columns_are_another_set(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    shard(spark, source, tmp_path / "o", 3)
    with pytest.raises(UsageError, match=r"kept columns \['site', .*'born'\], not \['age'\]"):
        shard(spark, source, tmp_path / "o", 3, keep_columns=["age"])
    with pytest.raises(UsageError, match=r"keep_columns is a list of names, got the text 'age'; write \['age'\]"):
        shard(spark, source, tmp_path / "o", 3, keep_columns="age")


def test_a_refused_evaluation_names_no_kept_columns(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    """Evaluation rows have none, so the columns are not what differs."""
    path = tmp_path / "eval.parquet"
    pq.write_table(pa.table({"image": [[[[0], [1]], [[2], [3]]]], "label": [0]}), path)
    with pytest.raises(DataError, match="holds 1x2x2 images, the input 3x2x2 images; they must match"):
        shard(spark, source, tmp_path / "o", 3, eval_input=str(path))


def test_spark_reads_kept_columns_with_their_types(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    shards = shard(spark, source, tmp_path / "o", 2)
    table = spark.read.option("pathGlobFilter", "*.parquet").parquet(shards.uri)
    assert {name: kind for name, kind in table.dtypes if name in KEPT} == {
        "site": "string", "weight": "double", "seen": "timestamp_ntz", "is_male": "boolean", "born": "date",
    }  # fmt: skip
    assert table.where("site is null").count() == sum(at % 7 == 3 for at in range(ROWS))


def test_a_column_that_spark_does_not_read_brings_a_warning(
    spark: SparkSession, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The set is made, as by earlier versions, and can be resharded."""
    (tmp_path / "in").mkdir()
    for file in source.glob("*.parquet"):
        table = pq.read_table(file)
        names = ["worker" if name == "site" else name for name in table.column_names]
        pq.write_table(table.rename_columns(names), tmp_path / "in" / file.name)
    options = {**DATA, "keep_columns": ["worker", "seen"], "strategy": "random", "num_workers": 3}
    made = pipeline.shard(spark, input=str(tmp_path / "in"), output=str(tmp_path / "a"), **options).shards
    (warning,) = [record.getMessage() for record in caplog.records if "kept column" in record.getMessage()]
    assert "Spark does not read the kept column worker in shards" in warning
    moved = pipeline.reshard(spark, input=made.uri, output=str(tmp_path / "b"), num_workers=2, report=False, quiet=True)
    assert [column.name for column in moved.shards.manifest.columns] == ["worker", "seen"]


def test_resharding_refuses_a_changed_kept_column(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    shards = shard(spark, source, tmp_path / "o", 1)
    (file,) = shards.files()
    path = Path(shards.uri, file.path)
    table = pq.read_table(path)
    weights = table.column("weight").combine_chunks()
    changed = pa.array([99.5, *weights.to_pylist()[1:]], pa.float64())
    table = table.set_column(table.schema.get_field_index("weight"), "weight", changed)
    pq.write_table(table, path, compression="none", use_dictionary=False)
    # Another size would be noticed first, by the listing of the files.
    manifest = Path(shards.uri, "manifest.json")
    for document in (manifest, *Path(shards.uri, "_manifests").iterdir()):
        document.write_text(document.read_text().replace(f'"bytes": {file.bytes}', f'"bytes": {path.stat().st_size}'))
    with pytest.raises(DataError, match=r"its kept columns \(\w+\) differ from its manifest's; the set is damaged"):
        pipeline.reshard(spark, input=shards.uri, output=str(tmp_path / "r"), num_workers=2, **QUIET)
