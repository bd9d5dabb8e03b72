"""The assignment as a thing of its own: written, read by others, made into shards, and assigned in a notebook."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import pipeline
from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.manifest import open_committed
from pipeline.core.storage.store import Store
from pipeline.output import tabled
from pipeline.strategies import STRATEGIES
from pipeline.strategies.stratified import Stratified
from tests.conftest import make_rows, write_binary
from tests.support.application import run_job
from tests.support.sharding_runs import make, read
from tests.support.tiers import only
from trainer.data.opening import open_shards

SHAPE = (3, 8, 8)
ROWS = 2600
DATA: dict[str, Any] = {"format": "cifar10-binary", "image_shape": SHAPE}
QUIET: dict[str, Any] = {"report": False, "quiet": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    labels, images = make_rows(ROWS, seed=5, pixels=192)
    images[[17, 400, 2599]] = np.random.default_rng(5).integers(0, 2, (3, 192)) * 255  # a tiny neighbourhood
    return write_binary(tmp_path_factory.mktemp("src") / "cifar", labels, images, files=3)


def shard(spark: SparkSession, source: Path, output: Path, strategy: Any, workers: int, **options: Any) -> Any:
    return pipeline.shard(
        spark, input=str(source), output=str(output), strategy=strategy, num_workers=workers, **DATA, **QUIET, **options
    ).shards


def materialized(spark: SparkSession, source: Path, assignment: Path, output: Path, **options: Any) -> Any:
    return pipeline.materialize(
        spark, assignment=str(assignment), input=str(source), output=str(output), **DATA, **QUIET, **options
    ).shards


def contents(shards: Any) -> list[tuple[str, str]]:
    """Every file by its name without a stamp, and its digest."""
    return sorted((file.path.replace(shards.manifest.generation, "*"), file.sha256) for file in shards.hashed_files())


def lines_of(shards: Any) -> pd.DataFrame:
    parts = [pq.read_table(f"{shards.uri}/{file.path}").to_pandas() for file in shards.assignment_files()]
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize("name", only(["stratified", "submodular"], ["stratified", "submodular", "dirichlet"]))
def test_an_assignment_materializes_to_the_set_of_its_job(
    spark: SparkSession, source: Path, tmp_path: Path, name: str
) -> None:
    """An assignment made into shards is the set that its job would write."""
    ratios = None if STRATEGIES[name].decides_sizes else (3, 1, 2, 1, 1)
    direct = shard(spark, source, tmp_path / "direct", make(name, seed=3), 5, ratios=ratios)
    alone = shard(spark, source, tmp_path / "alone", make(name, seed=3), 5, ratios=ratios, assignment_only=True)
    made = materialized(spark, source, tmp_path / "alone", tmp_path / "made")
    assert contents(made) == contents(direct)
    assert [file.sha256 for file in alone.assignment_files()] == [file.sha256 for file in direct.assignment_files()]
    found = made.manifest.to_json()
    expected = direct.manifest.to_json()
    same = set(expected) - {"generation", "seconds", "made", "workers", "eval", "model", "assignment"}
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    for told in (made, alone):
        for ours, theirs in zip(told.manifest.workers, direct.manifest.workers, strict=True):
            assert replace(ours, files=[]) == replace(theirs, files=[])
    assert not list((tmp_path / "alone").glob("worker=*"))
    # the same configuration and rows: the job itself has nothing to do there any more
    again = shard(spark, source, tmp_path / "made", make(name, seed=3), 5, ratios=ratios)
    assert again.manifest.generation == made.manifest.generation
    # and its lines are what is in the shards
    rows = read(tmp_path / "direct", direct.manifest.to_json())
    rows["group"] = rows.get("neighbourhood", rows.label if STRATEGIES[name].looks_at_labels else 0)
    expected = rows.sort_values(["id", "copy"])[["id", "worker", "copy", "group"]].to_numpy()
    assert np.array_equal(lines_of(direct).to_numpy(), expected)


@pytest.mark.full
def test_of_three_hundred_workers_too(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    """More than a task has files open for: rows pass through files by ranges of workers."""
    direct = shard(spark, source, tmp_path / "direct", Stratified(start="carry"), 300)
    shard(spark, source, tmp_path / "alone", Stratified(start="carry"), 300, assignment_only=True)
    made = materialized(spark, source, tmp_path / "alone", tmp_path / "made")
    assert contents(made) == contents(direct)
    assert sorted(lines_of(direct).id) == list(range(ROWS))


def table_of(path: Path, seed: int = 0, copies: bool = True) -> pd.DataFrame:
    """Anybody's: in no order, some rows for two workers, in two files."""
    rng = np.random.default_rng(seed)
    table = pd.DataFrame({"id": np.arange(ROWS), "worker": rng.integers(0, 4, ROWS)})
    if copies:
        twice = table[:50].assign(worker=(table.worker[:50] + 1) % 4)
        table = pd.concat([table, twice])
    table = table.sample(frac=1, random_state=seed)
    path.mkdir()
    table[:1000].to_parquet(path / "a.parquet", index=False)
    table[1000:].to_parquet(path / "b.parquet", index=False)
    return table


def test_anybody_s_table_becomes_a_set(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    table = table_of(tmp_path / "table")
    made = materialized(spark, source, tmp_path / "table", tmp_path / "made")
    assert (made.num_workers, made.manifest.copies, made.manifest.strategy) == (4, 50, "assigned")
    rows = read(tmp_path / "made", made.manifest.to_json())
    assert sorted(zip(rows.id, rows.worker, strict=True)) == sorted(zip(table.id, table.worker, strict=True))
    assert rows[rows["copy"] == 0].id.is_unique
    owner = rows[rows["copy"] == 0].sort_values("id").worker.to_numpy()
    assert (owner == table.groupby("id").worker.min().to_numpy()).all(), "of two workers the first is the owner"
    assert not pipeline.materialize(
        spark, assignment=str(tmp_path / "table"), input=str(source), output=str(tmp_path / "made"), **DATA, **QUIET
    ).fresh
    again = materialized(spark, source, tmp_path / "made", tmp_path / "again")
    assert contents(again) == contents(made)
    lines = materialized(spark, source, tmp_path / "made" / "_assignment", tmp_path / "lines")
    assert [file.sha256 for file in lines.files()] == [file.sha256 for file in made.files()]
    with pytest.raises(DataError, match=r"was made from a table of workers; make another with sharding materialize"):
        pipeline.reshard(spark, input=str(tmp_path / "made"), output=str(tmp_path / "r"), num_workers=2, **QUIET)
    with pytest.raises(UsageError, match="1 of 5 workers would get no rows"):
        materialized(spark, source, tmp_path / "table", tmp_path / "five", num_workers=5)


def test_a_csv_by_the_command_line(source: Path, tmp_path: Path) -> None:
    table = pd.DataFrame({"worker": np.arange(ROWS) % 3, "id": np.arange(ROWS)[::-1], "note": "x"})
    table.to_csv(tmp_path / "table.csv", index=False)
    flags = ("--input", source, "--format", "cifar10-binary", "--image-shape", "3x8x8", "--no-report")
    done = run_job(
        "materialize.py", "--assignment", tmp_path / "table.csv", "--output", tmp_path / "made", *flags, "--quiet"
    )
    assert done.code == 0, done.err
    made = open_committed(Store(), str(tmp_path / "made"))
    rows = read(tmp_path / "made", made.manifest.to_json())
    assert (rows.worker == (ROWS - 1 - rows.id) % 3).all()


def with_line(table: pd.DataFrame, **values: Any) -> pd.DataFrame:
    return pd.concat([table, pd.DataFrame([values])])


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t[(t.id != 7) & (t.id != 9)], "row 7 has no worker, nor have 1 others"),
        (lambda t: with_line(t, id=8, worker=2), "row 8 is twice for worker 2"),
        (lambda t: with_line(t, id=ROWS, worker=0), f"id {ROWS} is not one of the rows 0..{ROWS - 1}"),
        (lambda t: with_line(t, id=-1, worker=0), "id -1 is not in 0.."),
        (lambda t: t.assign(group=1 << 40), r"group 1099511627776 is not in 0..2147483647"),
        (lambda t: with_line(t, id=8, worker=2, copy=1), "the table has a copy for row 8 and none for others|nulls"),
        (lambda t: t.assign(worker=t.worker.replace(2, 3)), "is for worker 3, but workers are 0..2"),
        (lambda t: t.assign(worker=t.worker + 0.5), "column worker holds double, not whole numbers"),
        (lambda t: t.assign(worker=t.worker.astype("Int64").replace(2, None)), "column worker holds nulls"),
        (lambda t: t.rename(columns={"worker": "w"}), "has no column worker; a table of workers has id and worker"),
        (lambda t: t.assign(copy=1), "the copies of row 0 are not numbered 0, 1, 2"),
    ],
)
def test_a_table_that_does_not_fit_is_one_line_and_leaves_nothing(
    spark: SparkSession, source: Path, tmp_path: Path, change: Any, line: str
) -> None:
    change(pd.DataFrame({"id": np.arange(ROWS), "worker": np.arange(ROWS) % 3})).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=line):
        materialized(spark, source, tmp_path / "t.parquet", tmp_path / "made", num_workers=3)
    assert not (tmp_path / "made").exists()


def test_an_assignment_of_other_rows_or_a_damaged_one_is_refused(
    spark: SparkSession, source: Path, tmp_path: Path
) -> None:
    alone = shard(spark, source, tmp_path / "alone", "random", 4, assignment_only=True)
    other = write_binary(tmp_path / "other", *make_rows(ROWS, seed=6, pixels=192))
    with pytest.raises(DataError, match=r"assigns other rows \(2600-\w+\) than .*other has"):
        materialized(spark, other, tmp_path / "alone", tmp_path / "made")
    with pytest.raises(
        UsageError, match=r"assigns 4 workers, not 5; sharding reshard changes the number of workers of a set"
    ):
        materialized(spark, source, tmp_path / "alone", tmp_path / "made", num_workers=5)
    path = tmp_path / "alone" / alone.assignment_files()[0].path
    table = pq.read_table(path)
    pq.write_table(table.set_column(1, "worker", pa.array(np.zeros(len(table), np.int32))), path)
    with pytest.raises(DataError, match=r"bytes, not|has other content than was committed"):
        materialized(spark, source, tmp_path / "alone", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_worker_beyond_the_rows_is_told_by_its_number(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    table = pd.DataFrame({"id": np.arange(ROWS), "worker": np.arange(ROWS) % 3})
    table.loc[7, "worker"] = 1 << 20
    table.to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=rf"t.parquet names worker {1 << 20}, and there are {ROWS} rows"):
        materialized(spark, source, tmp_path / "t.parquet", tmp_path / "made")
    pd.DataFrame({"id": np.arange(ROWS), "worker": 1 + np.arange(ROWS) % 3}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"names workers 1 to 3 and no worker 0; number them from 0"):
        materialized(spark, source, tmp_path / "t.parquet", tmp_path / "made")
    with pytest.raises(DataError, match=r"nowhere does not exist; check --assignment"):
        materialized(spark, source, tmp_path / "nowhere", tmp_path / "made")


def test_files_with_copies_and_files_without_are_told_apart(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    table = pd.DataFrame({"id": np.arange(ROWS), "worker": np.arange(ROWS) % 3})
    (tmp_path / "t").mkdir()
    table[:100].assign(copy=0).to_parquet(tmp_path / "t" / "a.parquet")
    table[100:].to_parquet(tmp_path / "t" / "b.parquet")
    with pytest.raises(DataError, match="the table has a copy for row 0 and none for others"):
        materialized(spark, source, tmp_path / "t", tmp_path / "made")


@pytest.mark.full
def test_an_older_set_is_current_and_gets_its_assignment_later(
    spark: SparkSession, source: Path, tmp_path: Path
) -> None:
    """A set of an older version is current and gets its assignment when it is made again."""
    first = shard(spark, source, tmp_path / "old", "random", 3)
    for path in [tmp_path / "old" / "manifest.json", *(tmp_path / "old" / "_manifests").iterdir()]:
        manifest = json.loads(path.read_text())
        path.write_text(
            json.dumps({k: v for k, v in manifest.items() if k not in ("assignment", "assignment_only", "ratios")})
        )
    arguments: dict[str, Any] = {"input": str(source), "output": str(tmp_path / "old"), "strategy": "random", **DATA}
    assert not pipeline.shard(spark, **arguments, num_workers=3, quiet=True).fresh
    with pytest.raises(
        DataError, match="made by an older version, without its assignment; make it again with --overwrite"
    ):
        materialized(spark, source, tmp_path / "old", tmp_path / "made")
    again = pipeline.shard(spark, **arguments, num_workers=3, overwrite=True, **QUIET)
    assert again.fresh
    assert contents(again.shards) == contents(first)


def test_evaluation_rows_are_for_the_job_that_writes_shards(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no evaluation rows; give --eval-input to sharding materialize"):
        shard(spark, source, tmp_path / "a", "random", 3, assignment_only=True, eval_input=str(tmp_path))


def test_an_assignment_whose_model_is_gone_is_damaged(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    alone = shard(spark, source, tmp_path / "alone", make("distribution_aware"), 4, assignment_only=True)
    next((tmp_path / "alone").glob("_model/*/pca/arrays.npz")).unlink()
    assert alone.manifest.model
    with pytest.raises(DataError, match=r"arrays.npz is missing; the set is damaged"):
        materialized(spark, source, tmp_path / "alone", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_an_assignment_alone_is_no_set_to_train_on(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    shard(spark, source, tmp_path / "alone", "random", 4, assignment_only=True)
    line = r"holds an assignment without shards; write them with sharding materialize --assignment"
    with pytest.raises(DataError, match=line):
        open_shards(str(tmp_path / "alone"))
    with pytest.raises(DataError, match=line):
        pipeline.reshard(spark, input=str(tmp_path / "alone"), output=str(tmp_path / "r"), num_workers=2, **QUIET)
    with pytest.raises(UsageError, match="already holds a committed set"):
        shard(spark, source, tmp_path / "alone", "random", 4)


def test_copies_are_numbered_by_worker_where_a_table_does_not_say() -> None:
    lines = np.array([[1, 0, 0, 1, 0], [2, 3, 1, 0, 0], [-1] * 5, [-1] * 5])
    settled, problem = tabled.check_lines([lines], 0, 2, 4)
    assert problem is None
    assert settled[:3].tolist() == [[0, 0, 0, 1, 1], [0, 1, 3, 0, 2], [0, 1, 2, 0, 1]]


@pytest.mark.parametrize("name", only(["stratified"], ["stratified", "distribution_aware"]))
def test_a_notebook_assigns_a_path_as_a_job_does(spark: SparkSession, source: Path, tmp_path: Path, name: str) -> None:
    direct = shard(spark, source, tmp_path / "direct", make(name, seed=3), 5)
    assigned = pipeline.assign(str(source), make(name), 5, seed=3, **DATA)
    assert assigned.dtypes == [("id", "bigint"), ("worker", "int"), ("copy", "int"), ("group", "int")]
    found: Any = assigned.toPandas()
    found = found.sort_values(["id", "copy"], ignore_index=True)
    pd.testing.assert_frame_equal(found, lines_of(direct), check_dtype=False)


@pytest.mark.full
def test_a_notebook_assigns_a_data_frame_by_its_own_ids(spark: SparkSession, tmp_path: Path) -> None:
    labels, images = make_rows(600, seed=2, pixels=192)
    rows = [(1000 + 3 * i, int(labels[i]), bytearray(images[i].tobytes())) for i in range(600)]
    frame = spark.createDataFrame(rows, "id long, label int, image binary").repartition(3)
    assigned = pipeline.assign(frame, "stratified", 7, image_shape=SHAPE, ratios=[1, 1, 1, 1, 1, 1, 2])
    found: Any = assigned.toPandas()
    assert sorted(found.id) == [1000 + 3 * i for i in range(600)]
    joined: Any = assigned.join(frame, "id").groupBy("label", "worker").agg(F.count("*").alias("n")).toPandas()
    counts = joined.pivot_table(index="label", columns="worker", values="n", fill_value=0).to_numpy()
    share = np.bincount(labels)[:, None] * np.array([1, 1, 1, 1, 1, 1, 2]) / 8
    assert (np.abs(counts - share) < 1).all()
    assert (found.group.to_numpy() == found.id.map(dict(zip(1000 + 3 * np.arange(600), labels, strict=True)))).all()
    with pytest.raises(UsageError, match="the DataFrame has no column pixels; it has id, label, image"):
        pipeline.assign(frame, "random", 2, image_column="pixels")
    renamed = frame.withColumnRenamed("image", "pixels")
    with_name = pipeline.assign(renamed, "random", 2, image_shape=SHAPE, image_column="pixels")
    without = pipeline.assign(frame, "random", 2, image_shape=SHAPE)
    tables: list[Any] = [each.toPandas() for each in (with_name, without)]
    pd.testing.assert_frame_equal(*(table.sort_values("id", ignore_index=True) for table in tables))
    with pytest.raises(UsageError, match="the DataFrame has no column id; it has label, image"):
        pipeline.assign(frame.drop("id"), "random", 2)
    with pytest.raises(UsageError, match="--workers 3 is more than the 2 rows; use fewer workers, or --allow-empty"):
        pipeline.assign(frame.limit(2), "round_robin", 3, image_shape=SHAPE)
    assert pipeline.assign(frame.limit(2), "round_robin", 3, image_shape=SHAPE, allow_empty=True).count() == 2
    with pytest.raises(UsageError, match="the column id is of string"):
        pipeline.assign(frame.withColumn("id", F.col("id").cast("string")), "random", 2)
    nulls = frame.withColumn("id", F.when(F.col("id") > 1200, F.col("id")))
    with pytest.raises(PySparkException, match="the DataFrame's column id holds nulls"):
        pipeline.assign(nulls, "random", 2, image_shape=SHAPE).count()
    with pytest.raises(UsageError, match="which reaches no object store here; use hdfs://"):
        pipeline.assign(frame, "random", 2, scratch="s3://bucket/scratch")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(UsageError, match="is not empty; name a folder of its own"):
        pipeline.assign(frame, "random", 2, scratch=str(tmp_path / "full"))


@pytest.mark.full
def test_the_report_of_a_set_in_ratios_tells_them(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "input": str(source),
        "strategy": "stratified",
        "num_workers": 3,
        "quiet": True,
        **DATA,
    }
    for name, ratios in (("uneven", (4, 2, 1)), ("even", None)):
        done = pipeline.shard(spark, output=str(tmp_path / name), ratios=ratios, **arguments)
        assert done.report
        page = Path(done.report).read_text()
        assert ("in the ratios 4:2:1" in page) is (name == "uneven")
        assert ("Spread of each class over the workers" in page) is (name == "even")
        assert ("A flat box means an even spread" in page) is (name == "even"), "its band is that of equal shares"
