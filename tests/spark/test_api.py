"""The public functions, as a notebook calls them on its own session."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import pipeline
import trainer
from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.runs.api import _errors_in_one_line
from pipeline.strategies.stratified import Stratified
from tests.conftest import make_rows, write_binary


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_binary(tmp_path_factory.mktemp("api") / "cifar", *make_rows(90, pixels=192))


def digests(result: pipeline.ShardingResult) -> list[str]:
    return [file.sha256 for file in result.shards.files()]


@pytest.mark.usefixtures("undrawn")
def test_a_session_shards_reshards_and_opens_what_it_committed(
    spark: SparkSession, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data: dict[str, Any] = {"input": str(source), "format": "cifar10-binary", "image_shape": (3, 8, 8), "quiet": True}
    first = pipeline.shard(spark, **data, output=str(tmp_path / "a"), strategy=Stratified(start="carry"), num_workers=4)
    assert (first.fresh, first.report) == (True, f"{tmp_path}/a/report.html")
    assert Path(str(first.report)).exists()
    again = pipeline.shard(**data, output=str(tmp_path / "a"), strategy=Stratified(start="carry"), num_workers=4)
    assert (again.fresh, digests(again)) == (False, digests(first))

    options: dict[str, Any] = {"num_workers": 3, "report": False, "quiet": True}
    moved = pipeline.reshard(spark, input=tmp_path / "a", output=str(tmp_path / "b"), **options)
    assert moved.report is None
    assert not (tmp_path / "b" / "report.html").exists()
    opened = pipeline.open_shards(str(tmp_path / "b"), spark)
    assert isinstance(opened, pipeline.ShardSet)
    assert opened.manifest == moved.shards.manifest == pipeline.open_shards(str(tmp_path / "b")).manifest
    assert opened.manifest.params["start"] == "carry"
    assert spark.range(3).count() == 3, "the session goes on"
    assert capsys.readouterr() == ("", "")


def test_a_name_is_the_strategy_with_its_defaults(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    data: dict[str, Any] = {"input": str(source), "format": "cifar10-binary", "image_shape": (3, 8, 8)}
    data |= {"num_workers": 2}
    quiet: dict[str, Any] = {"report": False, "quiet": True}
    named = pipeline.shard(spark, **data, output=str(tmp_path / "n"), strategy="stratified", **quiet)
    given = pipeline.shard(spark, **data, output=str(tmp_path / "g"), strategy=Stratified(), **quiet)
    assert digests(named) == digests(given)
    with pytest.raises(UsageError, match=r"must be round_robin, .* sorted or by_attribute, got 'stratify'"):
        pipeline.shard(spark, **data, output=str(tmp_path / "x"), strategy="stratify", **quiet)
    with pytest.raises(UsageError, match=r"must be round_robin, .* sorted or by_attribute, got None"):
        pipeline.shard(spark, **data, output=str(tmp_path / "x"), strategy=None, **quiet)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="--workers must be at least 1, got 0"):
        pipeline.shard(spark, **{**data, "num_workers": 0}, output=str(tmp_path / "x"), strategy="random", **quiet)
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        pipeline.open_shards(str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"input": pd.DataFrame({"id": [0]})}, "input must be a path or a DataFrame of Spark, got pandas."),
        (
            {"input": "/x", "eval_input": 3},
            "eval_input must be a path or a DataFrame of Spark, got builtins.int; see spark",
        ),
    ],
)
def test_an_input_that_is_no_table_of_spark_is_refused(values: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(line)}"):
        pipeline.shard(**values, output=str(tmp_path), strategy="random", num_workers=1)


def test_an_error_of_a_task_is_of_its_own_kind() -> None:
    text = "An exception was thrown from the Python worker\npipeline.core.errors.DataError: ids hold nulls\n"
    with pytest.raises(DataError, match=r"^ids hold nulls$"), _errors_in_one_line():
        raise PySparkException(text)
    with pytest.raises(JobError, match=r"^Py4JError: the JVM has ended"), _errors_in_one_line():
        raise Py4JError("the JVM has ended")


def test_an_error_after_an_interrupt_stays_one_of_py4j() -> None:
    """The end of a program takes it for the interrupt's."""
    error = Py4JError("the JVM has ended")
    error.__context__ = KeyboardInterrupt()
    with pytest.raises(Py4JError), _errors_in_one_line():
        raise error


def test_the_package_shows_its_public_names_and_no_others() -> None:
    assert {"shard", "reshard", "open_shards", "ShardSet", "ShardingResult", "__version__"} <= set(dir(pipeline))
    assert {"Config", "load", "torch_dataset", "train"} <= set(dir(trainer))
    with pytest.raises(AttributeError, match="has no attribute 'shards'"):
        pipeline.shards  # noqa: B018
