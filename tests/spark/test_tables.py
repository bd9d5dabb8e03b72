"""Tables and DataFrames as inputs: the same set as from their rows in a Parquet file, whatever their partitions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as F

import pipeline
from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.shardset.manifest import require_rows
from pipeline.spark import tables
from pipeline.strategies.class_cluster import ClassCluster
from pipeline.upkeep.verify import verify
from tests.conftest import make_rows
from tests.support.application import run_job
from tests.support.tiers import only

ROWS = 300
SHAPE = (3, 4, 4)
QUIET: dict[str, Any] = {"report": False, "quiet": True}
OPTIONS: dict[str, Any] = {"num_workers": 3, "strategy": "stratified", "image_shape": SHAPE, **QUIET}
ORDERED = {"id_column": "key", "keep_columns": ["site", "seen"]}


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    """Rows in the order of their keys, which have gaps."""
    labels, images = make_rows(ROWS, pixels=48)
    return pd.DataFrame(
        {
            "key": np.arange(ROWS) * 7 - 100,
            "image": [image.tobytes() for image in images],
            "label": labels.astype(np.int32),
            "site": [f"s{number % 5}" if number % 11 else None for number in range(ROWS)],
            "seen": pd.date_range("2026-01-01", periods=ROWS, freq="h", tz="UTC", unit="us"),
            "v": [list(vector) for vector in np.random.default_rng(1).normal(size=(ROWS, 4))],
        }
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, rows: pd.DataFrame) -> Path:
    folder = tmp_path_factory.mktemp("files")
    pq.write_table(pa.Table.from_pandas(rows[:200], preserve_index=False), folder / "a.parquet")
    pq.write_table(pa.Table.from_pandas(rows[200:], preserve_index=False), folder / "b.parquet")
    return folder


@pytest.fixture(scope="module")
def frame(spark: SparkSession, files: Path) -> DataFrame:
    return spark.read.parquet(str(files))


@pytest.fixture
def table(spark: SparkSession, frame: DataFrame, tmp_path: Path) -> Iterator[str]:
    """A saved table in the catalog of the session, in files without an order."""
    frame.repartition(5).write.option("path", str(tmp_path / "saved")).saveAsTable("images")
    yield "images"
    spark.sql("DROP TABLE images")


def digests_in(folder: Path) -> list[str]:
    return [file.sha256 for file in pipeline.open_shards(str(folder)).files()]


def digests(result: pipeline.ShardingResult) -> list[str]:
    return digests_in(Path(result.shards.uri))


def shard(source: Any, output: Path, **options: Any) -> pipeline.ShardingResult:
    return pipeline.shard(input=source, output=str(output), **{**OPTIONS, **options})


def leftovers(output: Path) -> list[str]:
    return [path.name for path in output.glob("_attempts/*")] if output.exists() else []


@pytest.fixture(scope="module")
def expected(spark: SparkSession, files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The digests of the set from the files, whose order is the order of the keys."""
    return digests(shard(str(files), tmp_path_factory.mktemp("expected"), keep_columns=ORDERED["keep_columns"]))


@pytest.mark.parametrize("partitions", only(["hashed"], ["ordered", 4, "hashed"]))
def test_partitions_do_not_change_the_set(
    spark: SparkSession, frame: DataFrame, tmp_path: Path, expected: list[str], partitions: str | int
) -> None:
    """Partitions in order, without an order, and by the hash of a column, so that some are empty."""
    data = frame
    if partitions == "hashed":
        data = frame.repartition(13, "site")
    elif partitions != "ordered":
        data = frame.orderBy(F.rand(3)).repartition(int(partitions))
    result = shard(data, tmp_path / "set", **ORDERED)
    assert digests(result) == expected
    assert result.shards.manifest.input.uri == "dataframe:input"
    assert not verify(result.shards, deep=True)
    assert not leftovers(tmp_path / "set")
    again = shard(data, tmp_path / "set", **ORDERED)
    assert (again.fresh, digests(again)) == (False, expected)
    assert not leftovers(tmp_path / "set")


def test_only_partitions_without_order_are_shuffled(
    frame: DataFrame, tmp_path: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key = F.col("key")
    assert not tables._is_ascending(tables._partition_limits(frame.repartition(4), key))
    ordered = frame.repartitionByRange(4, "key").localCheckpoint()
    monkeypatch.setattr(type(frame), "sort", lambda *_: pytest.fail("the images are shuffled"))
    assert digests(shard(ordered, tmp_path / "set", **ORDERED))[: len(expected)] == expected


def test_a_table_is_the_set_of_its_rows(
    spark: SparkSession, table: str, frame: DataFrame, tmp_path: Path, expected: list[str]
) -> None:
    """A saved table and a temporary view with evaluation rows; an assignment of the table becomes the same shards."""
    frame.where("key < 300").createOrReplaceTempView("held_out")
    result = shard(f"table:{table}", tmp_path / "set", eval_input="table:held_out", **ORDERED)
    assert digests(result)[: len(expected)] == expected
    manifest = result.shards.manifest
    assert manifest.input.uri == "table:images"
    assert manifest.evaluation is not None
    assert (manifest.evaluation.input.uri, manifest.evaluation.input.rows) == ("table:held_out", 58)
    assert manifest.input.id_column == manifest.evaluation.input.id_column == "key"
    alone = shard(f"table:{table}", tmp_path / "alone", assignment_only=True, **ORDERED)
    with pytest.raises(DataError, match=r"materialize --assignment \S+ --input table:images --output"):
        require_rows(alone.shards)
    made = pipeline.materialize(  # in the order of the assignment's column
        assignment=alone.shards.uri, input="table:images", output=f"{tmp_path}/made", image_shape=SHAPE, **QUIET
    )
    assert digests(made) == expected
    assert made.shards.manifest.input.id_column == "key"
    with pytest.raises(
        UsageError, match=r"^--id-column v: \S+/alone assigns the rows of table:images in the order of key;"
    ):
        pipeline.materialize(assignment=alone.shards.uri, input="table:images", id_column="v", output="none", **QUIET)


def test_ids_may_be_text_and_labels_names(frame: DataFrame, tmp_path: Path) -> None:
    """Texts are ordered by their bytes; the columns have names of their own."""
    named = frame.select(
        F.format_string("k%05d-é", F.col("key") + 100).alias("name.of"),
        F.col("image").alias("picture"),
        F.concat(F.lit("class "), "label").alias("kind"),
    )
    columns = {"image_column": "picture", "label_column": "kind"}
    named.orderBy("`name.of`").coalesce(1).write.parquet(str(tmp_path / "files"))
    wanted = shard(str(tmp_path / "files"), tmp_path / "wanted", **columns)
    result = shard(named.repartition(7), tmp_path / "set", id_column="name.of", **columns)
    assert digests(result) == digests(wanted)
    assert result.shards.manifest.labels.class_names[:2] == ["class 0", "class 1"]


def test_a_committed_set_is_a_table(spark: SparkSession, files: Path, tmp_path: Path) -> None:
    """A DataFrame declares the shape of its images; the vectors of a strategy are a column of it."""
    options = {"strategy": ClassCluster(clusters=5, embedding="v"), "id_column": "key"}
    data = spark.read.parquet(str(files)).withMetadata("image", {"shape": "[3, 4, 4]", "layout": "CHW"})
    first = pipeline.shard(input=data.repartition(3), output=str(tmp_path / "a"), num_workers=2, **{**options, **QUIET})
    direct = shard(str(files), tmp_path / "b", **{**options, "num_workers": 2, "id_column": None})
    assert digests(first) == digests(direct)
    rows = spark.read.option("pathGlobFilter", "*.parquet").parquet(first.shards.uri)
    again = pipeline.shard(input=rows, output=str(tmp_path / "c"), num_workers=2, strategy="random", **QUIET)
    assert again.shards.manifest.rows == ROWS
    assert again.shards.manifest.image.shape == list(SHAPE)


@pytest.mark.parametrize(
    ("change", "options", "line"),
    [
        (
            lambda data: data,
            {},
            r"dataframe:input has no column id; its columns are key, .*; --id-column names another one",
        ),
        (
            lambda data: data,
            {"id_column": "site"},
            r"dataframe:input: site is null in a row; --id-column names a column",
        ),
        (lambda data: data.fillna("x"), {"id_column": "site"}, r"dataframe:input: site 's0' occurs twice; --id-column"),
        (
            lambda data: data,
            {"id_column": "v"},
            r"the column v is of array<double>; --id-column takes whole numbers or",
        ),
        (lambda data: data.drop("image"), ORDERED, r"has no column image; .*; --image-column names another one"),
        (lambda data: data, {"id_column": "key", "keep_columns": ["age"]}, r"has no column age; its columns are key,"),
        (lambda data: data.limit(0), ORDERED, r"dataframe:input has no rows"),
        (
            lambda data: data,
            {**ORDERED, "format": "parquet"},
            r"--format parquet: dataframe:input is a table; leave it out",
        ),
        (
            lambda data: data,
            {**ORDERED, "max_bad_records": "3"},
            r"--max-bad-records leaves out records of files; filter",
        ),
        (lambda data: "table:none", ORDERED, r"table:none cannot be read: \[TABLE_OR_VIEW_NOT_FOUND\]"),
        (lambda data: "table:a b", ORDERED, r"table:a b cannot be read: \[PARSE_SYNTAX_ERROR\]"),
        (
            lambda data: "dataframe:input2",
            ORDERED,
            r"dataframe:input2 names a DataFrame, which only pipeline.shard\(\)",
        ),
        (
            lambda data: "delta:/nowhere",
            ORDERED,
            r"delta:/nowhere: .* --packages io\.delta:delta-spark_4\.\d_2\.13:VERSION",
        ),
        (
            lambda data: "iceberg:a.b",
            ORDERED,
            r"--packages org\.apache\.iceberg:iceberg-spark-runtime-4\.\d_2\.13:VERSION",
        ),
    ],
)
def test_a_table_without_what_it_needs_is_one_line(
    frame: DataFrame, tmp_path: Path, change: Any, options: dict[str, Any], line: str
) -> None:
    with pytest.raises((UsageError, DataError), match=line) as error:
        shard(change(frame), tmp_path / "set", **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "set").exists()


def test_a_catalog_names_the_reader_that_a_table_needs(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AnalysisException("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: delta. Make sure")

    monkeypatch.setattr(type(spark), "table", fail)
    with pytest.raises(UsageError, match=r"^table:lake\.a: this Spark has no reader of delta tables; start it with"):
        tables.read_table(spark, "table:lake.a")


@pytest.mark.parametrize("at", ["load", "query"])
def test_a_reader_for_another_spark_is_one_line(
    spark: SparkSession, frame: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Iceberg's reader fails when it opens the table, Delta's at the first query."""

    def fail(*_: object) -> None:
        jvm = spark.sparkContext._jvm
        assert jvm is not None
        raise Py4JJavaError("An error occurred", jvm.java.lang.NoSuchMethodError("'void a.B()'"))

    monkeypatch.setattr(DataFrameReader, "load", fail if at == "load" else lambda *_: frame)
    monkeypatch.setattr(tables, "_partition_limits", fail)
    line = (
        r"^delta:/d: the reader of this table was made for another Spark than \d\.\d\.\d; start the one that its package"
        r" names \(NoSuchMethodError: 'void a\.B\(\)'\)$"
    )
    with pytest.raises(UsageError, match=line):
        shard("delta:/d", tmp_path / "set", **ORDERED)


def test_the_reason_is_the_line_that_tells_the_cause() -> None:
    text = (
        "An error occurred while calling o57.load.\n: java.io.IOException: No FileSystem for scheme s3\n\tat x.y([z])"
    )
    assert tables._reason(text) == "No FileSystem for scheme s3"
    assert tables._reason("x\n: y.Z: [A.B_C] the cause") == "[A.B_C] the cause"
    assert tables._reason("") == ""


def test_columns_that_spark_cannot_tell_apart_are_left_out(
    frame: DataFrame, tmp_path: Path, expected: list[str]
) -> None:
    one = frame.select("*", F.lit(1).alias("created"))
    data = one.join(
        frame.select(F.col("key").alias("other"), F.lit(2).alias("created")), F.col("key") == F.col("other")
    )
    assert digests(shard(data, tmp_path / "set", **ORDERED)) == expected


def test_an_id_column_is_for_tables_only(files: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="--id-column key orders the rows of a table, and the input is none; leave it out"
    ):
        shard(str(files), tmp_path / "set", id_column="key")


def test_a_broken_row_is_named_by_its_id(frame: DataFrame, tmp_path: Path) -> None:
    broken = frame.withColumn("image", F.when(F.col("key") == 600, F.lit(None)).otherwise(F.col("image")))
    with pytest.raises(DataError, match=r"^dataframe:input, key 600: the image is null"):
        shard(broken.repartition(3), tmp_path / "set", **ORDERED)
    assert not (tmp_path / "set").exists()


def test_a_partition_that_moves_is_noticed(
    spark: SparkSession, frame: DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: list[str]
) -> None:
    """Partitions that seem in order, and are not when they are written: the rows are sorted after all."""
    monkeypatch.setattr(tables, "_partition_limits", lambda data, key: [])
    assert digests(shard(frame.repartition(4), tmp_path / "set", **ORDERED)) == expected
    monkeypatch.setattr(tables, "_is_ascending", lambda limits: False)
    with pytest.raises(JobError, match="dataframe:input changed while it was read; run it again"):
        shard(frame, tmp_path / "other", **ORDERED)


@pytest.mark.usefixtures("undrawn")
def test_the_jobs_take_tables(spark: SparkSession, frame: DataFrame, tmp_path: Path, expected: list[str]) -> None:
    """A job and a comparison, whose strategies share the files of the table; no reader and no id are usage errors."""
    frame.repartition(3).createOrReplaceTempView("pictures")
    layout = ("--image-shape", "3x4x4", "--workers", 3)
    given = ("--input", "table:pictures", "--id-column", "key", *layout)
    result = run_job("stratified.py", *given, "--output", tmp_path / "set", "--keep-columns", "site,seen")
    assert (result.code, digests_in(tmp_path / "set")) == (0, expected), result.err
    assert "table:pictures" in result.out
    result = run_job("compare.py", *given, "--output", tmp_path / "compared", "--strategies", "random,stratified")
    assert result.code == 0, result.err
    assert result.err.count("] tables ") == 1
    assert not leftovers(tmp_path / "compared")
    assert pipeline.open_shards(f"{tmp_path}/compared/random").manifest.input.uri == "table:pictures"
    for address, line in (("delta:/d", "start it with --packages io.delta"), ("table:pictures", "has no column id")):
        result = run_job("stratified.py", "--input", address, *layout, "--output", tmp_path / "none")
        # Before the error there is only the line that names the application.
        about, error = result.err.splitlines()
        assert (result.code, "application local-" in about, line in error) == (2, True, True), result.err
