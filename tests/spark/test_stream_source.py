"""Spark's file source and what a stream says about it agree; a stream keeps the limits of a batch job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from pipeline.core.errors import UnsuitableError
from pipeline.core.shardset.manifest import open_committed, read_committed
from pipeline.strategies.hash import Hash
from pipeline.stream.files import arrivals, stream_of_files
from pipeline.stream.generation import GenerationRun, IncomingBatch
from pipeline.stream.inbox import Inbox
from pipeline.stream.request import StreamRequest
from tests.spark.test_stream import files
from tests.support.places import STORE
from tests.support.stream_runs import RAW, STRATEGY, take
from tests.unit.test_quarantine import aside

__all__ = ["files"]  # a fixture


def drain(spark: SparkSession, inbox: Inbox, checkpoint: Path) -> list[IncomingBatch]:
    """The batches of what is there, read by Spark's own source."""
    batches: list[IncomingBatch] = []
    arrive = arrivals(inbox, f"file://{checkpoint}", None)

    def on_batch(frame: DataFrame, batch: int) -> None:
        batches.append(arrive(batch, frame, "", 0))

    query = stream_of_files(spark, inbox.uri, None).writeStream.foreachBatch(on_batch)
    query.option("checkpointLocation", f"file://{checkpoint}").trigger(availableNow=True).start().awaitTermination()
    return batches


NO_UTF8 = os.fsdecode(b"x\xff.bin")


@pytest.mark.parametrize("folder", [".", "label=3", "split=train/label=0"])
def test_the_source_takes_the_files_that_a_look_finds(spark: SparkSession, tmp_path: Path, folder: str) -> None:
    source = tmp_path / "in"
    names = (
        "a.bin",
        "b",
        "_c.bin",
        ".d.bin",
        "e.bin._COPYING_",
        "_metadata",
        "f.parquet",
        "sub/g.bin",
        "_sub/h.bin",
        NO_UTF8,
    )
    for path in [source / "top.bin", *(source / folder / name for name in names)]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1")
    inbox = Inbox(STORE, str(source), str(tmp_path / "set"))
    look = inbox.list_files()
    (batch,) = drain(spark, inbox, tmp_path / "checkpoint")
    assert {file.path for file in batch.files} == set(look.files)
    assert {Path(path).name for path in look.files} == {"a.bin", "b", "f.parquet", "top.bin"}
    left_out = {Path(entry.path).name for entry in look.left_out}
    assert left_out == {"_c.bin", ".d.bin", "e.bin._COPYING_", "_metadata", "sub", "_sub", NO_UTF8}
    "".join(look.warnings()).encode()  # can be printed


def test_a_changed_file_is_told_by_the_next_batch(spark: SparkSession, tmp_path: Path, files: list[Path]) -> None:
    checkpoint = tmp_path / "checkpoint"
    hidden = [file.rename(file.with_name(f".{file.name}")) for file in files[1:]]
    drain(spark, Inbox(STORE, str(tmp_path / "in"), str(tmp_path / "set")), checkpoint)
    with files[0].open("ab") as file:
        file.write(b"more")
    hidden[0].rename(files[1])
    (batch,) = drain(spark, Inbox(STORE, str(tmp_path / "in"), str(tmp_path / "set")), checkpoint)
    assert [file.path for file in batch.files] == [str(files[1])]
    (warning,) = [text for text in batch.warnings if "appended" in text]
    assert str(files[0]) in warning
    assert [line["source"] for line in aside(tmp_path / "set")] == [str(files[0])]


def test_a_set_whose_newest_time_lies_ahead_recovers(spark: SparkSession, tmp_path: Path, files: list[Path]) -> None:
    """As an earlier version has committed it."""
    output = str(tmp_path / "set")
    run = GenerationRun(
        spark.sparkContext, StreamRequest(output, 3, STRATEGY, read_options=RAW), STORE, output, "query"
    )
    given: list[int] = []
    for batch, time_ms in enumerate((10**15, 1000, 1000)):
        arrived = IncomingBatch("source", [STORE.info(str(files[batch]))], "digest", newest_ms=time_ms)

        def arrive(folder: str, newest_ms: int, arrived: IncomingBatch = arrived) -> IncomingBatch:
            given.append(newest_ms)
            return arrived

        run.commit_batch(batch, arrive)
    assert given == [0, 0, 1000]


@pytest.mark.parametrize(
    ("patch", "options", "words"),
    [
        (
            {},
            {"workers": 40, "window_rows": 100},
            "copies add .* to 150 rows; use fewer workers, fewer --functions, or",
        ),
        ({"MOST_BUCKETS": 3}, {}, "the rows are in more than 3 buckets"),
    ],
)
def test_a_batch_beyond_the_limits_of_a_batch_job_commits_nothing(
    spark: SparkSession,
    tmp_path: Path,
    files: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    patch: dict[str, int],
    options: dict[str, Any],
    words: str,
) -> None:
    for name, value in patch.items():
        monkeypatch.setattr(f"pipeline.strategies.hash.{name}", value)
    strategy = Hash(family="sign", functions=6)
    with pytest.raises(UnsuitableError, match=words):
        take(spark.sparkContext, tmp_path / "set", 0, files[:1], strategy=strategy, **options)
    assert read_committed(STORE, str(tmp_path / "set")) is None
    monkeypatch.undo()
    take(spark.sparkContext, tmp_path / "set", 0, files[:1], **options | {"window_rows": 0})
    assert open_committed(STORE, str(tmp_path / "set")).manifest.rows == 150
