"""What a stream leaves out and puts aside: broken records, files that are gone, messages that were deleted."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from pipeline.core.errors import JobError
from pipeline.core.shardset.generations import generations
from pipeline.core.shardset.manifest import open_committed
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.arrivals import survey
from pipeline.input.dataset import serial
from pipeline.input.quarantine import lines_of
from pipeline.input.read_options import ReadOptions
from pipeline.stream import generation
from pipeline.stream.files import arrivals, stream_of_files
from pipeline.stream.generation import GenerationRun, IncomingBatch
from pipeline.stream.inbox import Inbox
from pipeline.stream.kafka import lost_messages
from pipeline.stream.request import StreamRequest
from pipeline.stream.topic import landed_name
from tests.conftest import write_binary
from tests.spark.test_stream import IMAGES, LABELS, files
from tests.support.places import STORE, put
from tests.support.stream_runs import RAW, SHAPE, STRATEGY, check_set, take
from tests.support.tiers import only
from tests.unit.test_quarantine import aside, images_with

__all__ = ["files"]  # a fixture
COMPACT_INTERVAL = "spark.sql.streaming.fileSource.log.compactInterval"


def test_broken_records_and_files_are_put_aside_with_their_reason(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    take(spark.sparkContext, tmp_path / "set", 0, files[:1])
    data = bytearray(files[1].read_bytes())
    for record, label in ((7, 77), (8, 10), (149, 255)):
        data[193 * record] = label
    files[1].write_bytes(bytes(data) + b"cut off")
    files[2].write_bytes(b"")
    gone = tmp_path / "in" / "gone.bin"
    gone.write_bytes(bytes(193))
    found = STORE.info(str(gone))
    gone.unlink()
    run = GenerationRun(
        spark.sparkContext,
        StreamRequest(str(tmp_path / "set"), 3, STRATEGY, read_options=RAW),
        STORE,
        str(tmp_path / "set"),
        "query",
    )
    infos = [STORE.info(str(files[1])), STORE.info(str(files[2])), found, STORE.info(str(files[3]))]
    done = run.commit_batch(1, lambda folder, newest_ms: IncomingBatch("source", infos, "digest"))
    assert done.fresh
    kept = [*range(150), *(row for row in range(150, 300) if row - 150 not in (7, 8, 149)), *range(450, 600)]
    check_set(tmp_path / "set", IMAGES[kept], LABELS[kept])
    entries = aside(tmp_path / "set")
    assert [(Path(entry["source"]).name, entry["record"]) for entry in entries] == [
        ("data_batch_2.bin", 150),
        ("gone.bin", None),
        ("data_batch_2.bin", 7),  # and 8
        ("data_batch_2.bin", 149),
    ]
    assert [entry["records"] for entry in entries] == [1, 0, 2, 1]
    reasons = "\n".join(entry["reason"] for entry in entries)
    for words in (
        "record, 150, has 7 of 193 bytes",
        "no longer existed",
        "offset 1351 (record 7): label 77 is not in 0..9",
    ):
        assert words in reasons
    assert generations(open_committed(STORE, str(tmp_path / "set")))[-1].quarantined == 5


def test_broken_rows_of_parquet_are_found_one_by_one(spark: SparkSession, tmp_path: Path) -> None:
    images: list[bytes | None] = [image.tobytes() for image in IMAGES[:100]]
    images[0], images[13], images[14], images[70] = b"\x89PNG broken", None, b"short", b"\x89PNG broken"
    labels: list[int | None] = LABELS[:100].astype(int).tolist()
    labels[99] = None
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"image": images, "label": labels}), path)
    take(spark.sparkContext, tmp_path / "set", 0, [path], read_options=ReadOptions(shape=SHAPE))
    kept = [row for row in range(100) if row not in (0, 13, 14, 70, 99)]
    check_set(tmp_path / "set", IMAGES[kept], LABELS[kept])
    assert [entry["record"] for entry in aside(tmp_path / "set")] == [0, 13, 14, 70, 99]
    assert " at 0x" not in json.dumps(aside(tmp_path / "set"))


def test_any_number_of_tasks_gives_the_same_lines_and_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch cut for any number of tasks gives the same lines and the same rows."""
    wrong = dict.fromkeys(range(100, 140), 99)
    files = [
        images_with(set(range(1, 300, 2)), wrong, 300, tmp_path / "0.parquet"),
        images_with({5}, wrong, 300, tmp_path / "1.parquet"),
    ]
    made = []
    for pieces in (1, 13):
        with monkeypatch.context() as patch:
            patch.setattr("pipeline.stream.batch.pass_pieces", lambda *_, pieces=pieces: pieces)
            output = tmp_path / f"{pieces}"
            done = take(spark.sparkContext, output, 0, files, read_options=ReadOptions(shape=SHAPE, num_classes=10))
        assert done.quarantined == 300 + 1 + 40
        kept = [row for row in range(300) if row != 5 and row not in wrong]
        shards = check_set(output, IMAGES[kept], LABELS[kept])
        made.append((aside(output), [file.sha256 for file in shards.files()]))
    assert made[0] == made[1]
    lines = [(Path(line["source"]).name, line["record"], line["records"]) for line in made[0][0]]
    assert lines == [("0.parquet", None, 300), ("1.parquet", 5, 1), ("1.parquet", 100, 40)]


def test_a_batch_of_nothing_but_broken_files_stops_nothing(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    (tmp_path / "rubbish.bin").write_bytes(b"rubbish")
    for batch in (0, 0):  # done again after a kill
        done = take(spark.sparkContext, tmp_path / "set", batch, [tmp_path / "rubbish.bin"])
        assert not done.fresh
        assert done.quarantined == 1
    assert len(aside(tmp_path / "set")) == 1
    assert take(spark.sparkContext, tmp_path / "set", 1, files).fresh
    check_set(tmp_path / "set", IMAGES, LABELS)


def test_a_repeated_batch_replaces_its_quarantine_file(spark: SparkSession, tmp_path: Path, files: list[Path]) -> None:
    """A file that was half there is whole by now. Messages may be gone from their topic: their bytes stay."""
    whole = files[0].read_bytes()
    files[0].write_bytes(b"rubbish")
    take(spark.sparkContext, tmp_path / "set", 1, files[:1])
    folder = tmp_path / "set" / "_quarantine"
    assert (folder / "batch-00000001.jsonl").exists()
    for name in (".batch-00000001.jsonl.0a1b2c3d.tmp", "batch-00000011.jsonl"):
        (folder / name).write_text("{}\n")
    files[0].write_bytes(whole)
    assert take(spark.sparkContext, tmp_path / "set", 1, files[:1]).fresh
    assert [path.name for path in folder.iterdir()] == ["batch-00000011.jsonl"]


@pytest.mark.parametrize("interval", only([10], [1, 10]))
def test_files_deleted_before_a_repeated_batch_are_quarantined(
    spark: SparkSession, tmp_path: Path, interval: int
) -> None:
    """Spark's frame leaves them out, and empty files too. interval: how often Spark writes its log of all files anew."""
    source, output, checkpoint = (str(tmp_path / name) for name in ("in", "set", "checkpoint"))
    files = sorted(write_binary(tmp_path / "in", LABELS, IMAGES, files=6).iterdir())
    names = [tmp_path / "in" / f"a b%20é#[{number}]{{1}}.bin" for number in range(6)]
    request = StreamRequest(output, 3, STRATEGY, read_options=RAW)

    def drain(dies_at: int | None = None) -> None:
        run = GenerationRun(spark.sparkContext, request, STORE, output, "query")

        def on_batch(frame: DataFrame, batch: int) -> None:
            assert batch != dies_at, "killed"
            arrive = arrivals(Inbox(STORE, source, output), f"file://{checkpoint}", None)
            run.commit_batch(batch, lambda folder, newest_ms: arrive(batch, frame, folder, newest_ms))

        spark.conf.set(COMPACT_INTERVAL, interval)
        query = stream_of_files(spark, source, 3).writeStream.foreachBatch(on_batch)
        try:
            query.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
        finally:
            spark.conf.unset(COMPACT_INTERVAL)  # other tests of the session continue checkpoints of submitted jobs

    def appear(numbers: Sequence[int], time: int) -> None:
        for number in numbers:
            names[number].write_bytes(files[number].read_bytes())
            os.utime(names[number], (time, time + number))

    for file in files:
        file.rename(tmp_path / file.name)
    files = [tmp_path / file.name for file in files]
    appear((0, 1), 1000)
    drain()
    appear((2, 3), 2000)
    (tmp_path / "in" / "empty.bin").touch()
    os.utime(tmp_path / "in" / "empty.bin", (2000, 2000))
    with pytest.raises(StreamingQueryException, match="killed"):
        drain(dies_at=1)
    names[2].unlink()
    appear((4, 5), 3000)
    drain()
    kept = [*range(300), *range(450, 900)]
    check_set(output, IMAGES[kept], LABELS[kept])
    gone = f"{names[2]} no longer existed when its batch began"
    assert [line["reason"] for line in aside(tmp_path / "set")] == [gone]
    assert open_committed(STORE, output).manifest.generations[-1].batch == 2


def test_a_file_of_another_layout_is_put_aside(spark: SparkSession, tmp_path: Path, files: list[Path]) -> None:
    table = pa.table({"image": [bytes(12)] * 4, "label": [1] * 4})
    schema = table.schema.set(0, pa.field("image", pa.binary(), metadata={"shape": "[3, 2, 2]"}))
    pq.write_table(table.cast(schema), tmp_path / "small.parquet")
    take(spark.sparkContext, tmp_path / "set", 0, [tmp_path / "small.parquet"], read_options=ReadOptions(shape=SHAPE))
    pq.write_table(pa.table({"image": [IMAGES[0].tobytes()], "label": [1]}), tmp_path / "large.parquet")
    take(spark.sparkContext, tmp_path / "set", 1, [tmp_path / "large.parquet"], read_options=ReadOptions(shape=SHAPE))
    (entry,) = aside(tmp_path / "set")
    assert "raw images of 3x2x2 have 12" in entry["reason"]


def test_the_first_batch_settles_the_classes_with_ready_functions_too(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    take(spark.sparkContext, tmp_path / "fitted", 0, files)
    path = tmp_path / "rows.parquet"
    labels = LABELS[:100].astype(np.int64) % 7
    pq.write_table(pa.table({"image": [image.tobytes() for image in IMAGES[:100]], "label": labels}), path)
    take(
        spark.sparkContext,
        tmp_path / "set",
        0,
        [path],
        read_options=ReadOptions(shape=SHAPE),
        model=str(tmp_path / "fitted"),
    )
    shards = check_set(tmp_path / "set", IMAGES[:100], labels)
    assert shards.manifest.labels.num_classes == 7
    assert all(len(worker.label_histogram) == 7 for worker in shards.manifest.workers)


def test_a_file_system_that_fails_puts_nothing_aside(
    spark: SparkSession, tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"image": [IMAGES[0].tobytes()] * 30, "label": [1] * 30}), path)

    def fails(self: Store, uri: str) -> Any:
        raise OSError(5, "Input/output error", uri)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "open", fails)
        with pytest.raises(OSError, match="Input/output error"):
            survey(
                STORE, "in", [STORE.info(str(path))], run=serial, first=0,
                read_options=ReadOptions("parquet", SHAPE), expected=None,
            )  # fmt: skip
    take(spark.sparkContext, tmp_path / "set", 0, [path], read_options=ReadOptions(shape=SHAPE))
    check_set(tmp_path / "set", np.repeat(IMAGES[:1], 30, axis=0), np.ones(30, int))


def test_a_batch_without_any_message_left_is_quarantined(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    """A batch of which all messages are lost is told of and the next is taken."""
    output = str(tmp_path / "set")
    run = GenerationRun(
        spark.sparkContext, StreamRequest(output, 3, STRATEGY, read_options=RAW), STORE, output, "query"
    )
    lost = lost_messages({1: (40, 100)}, [])
    done = run.commit_batch(0, lambda folder, newest_ms: IncomingBatch("source", [], "digest", lost_ranges=lost))
    assert (done.shards, done.quarantined) == (None, 60)
    (line,) = aside(tmp_path / "set")
    assert line == lines_of(lost)[0]
    assert take(spark.sparkContext, output, 1, files).fresh


def test_a_quarantine_line_has_a_bounded_size(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line of the quarantine holds no more bytes than those of some messages."""
    monkeypatch.setattr(generation, "LINE_RECORDS", 2)
    rows = [bytes([200 if 2 <= row < 7 else 1]) + IMAGES[row].tobytes() for row in range(9)]
    request = StreamRequest(str(tmp_path / "set"), 3, STRATEGY, read_options=replace(RAW, num_classes=10))

    def landed(folder: str, newest_ms: int) -> IncomingBatch:
        path = f"{folder}/task/{landed_name(7)}"
        put(path, b"".join(rows))
        return IncomingBatch("kafka://one:9092/rows", [STORE.info(path)], "digest")

    done = GenerationRun(spark.sparkContext, request, STORE, request.output, "query").commit_batch(0, landed)
    assert (done.rows, done.quarantined) == (4, 5)
    lines = aside(tmp_path / "set")
    assert [line["records"] for line in lines] == [2, 2, 1]
    assert b"".join(base64.b64decode(line["value"]) for line in lines) == b"".join(rows[2:7])


def test_messages_that_land_and_are_broken_keep_their_bytes(spark: SparkSession, tmp_path: Path) -> None:
    data = bytearray(
        b"".join(bytes([label]) + image.tobytes() for label, image in zip(LABELS[:9], IMAGES, strict=False))
    )
    data[193 * 4] = 200
    output = str(tmp_path / "set")
    run = GenerationRun(
        spark.sparkContext,
        StreamRequest(output, 3, STRATEGY, read_options=replace(RAW, num_classes=10)),
        STORE,
        output,
        "query",
    )

    def landed(folder: str, newest_ms: int) -> IncomingBatch:
        path = f"{folder}/task/{landed_name(7)}"
        put(path, bytes(data))
        return IncomingBatch("kafka://one:9092/rows", [STORE.info(path)], "digest")

    assert run.commit_batch(0, landed).fresh
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    check_set(output, IMAGES[kept], LABELS[kept])
    (entry,) = aside(tmp_path / "set")
    assert entry["source"] == "partition 7"
    assert base64.b64decode(entry["value"]) == bytes(data[193 * 4 : 193 * 5])
    assert "label 200 is not in 0..9" in entry["reason"]

    def gone(folder: str, newest_ms: int) -> IncomingBatch:
        """Of a driver that was frozen, and taken for dead; its topic's servers have moved meanwhile."""
        return IncomingBatch("kafka://two:9092/rows", [FileInfo(f"{folder}/gone", 193, 0, is_dir=False)], "digest")

    with pytest.raises(JobError, match="another run considered this one dead and deleted its files"):
        run.commit_batch(1, gone)
