"""Streams: batches become generations, whatever is in them, and give the same shards however they are run."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from pipeline.core.errors import UsageError
from pipeline.core.shardset.damage import all_damage
from pipeline.core.shardset.generations import generations
from pipeline.core.shardset.manifest import open_committed, read_committed
from pipeline.input.channels import to_channels
from pipeline.input.dataset import serial
from pipeline.input.read_options import ReadOptions
from pipeline.runs.report import report
from pipeline.strategies.hash import Hash
from pipeline.stream.buckets import Buckets, StreamState, count_generation, first_workers_of
from pipeline.stream.checkpoint import check_checkpoint
from pipeline.stream.files import stream_of_files
from pipeline.stream.generation import GenerationRun
from pipeline.stream.query import AskedToEnd, Running
from pipeline.stream.request import StreamRequest
from pipeline.upkeep.contents import details
from tests.clusters.cluster_runs import run_here
from tests.conftest import make_rows, write_binary
from tests.support.places import STORE, files_below
from tests.support.stream_runs import RAW, SHAPE, STRATEGY, check_set, rows_of, take
from tests.support.tiers import only

LABELS, IMAGES = make_rows(900, pixels=192)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """900 rows in six files."""
    folder = write_binary(tmp_path / "in", LABELS, IMAGES, files=6)
    return sorted(folder.iterdir())


# --- counters -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.integers(-3, 12), min_size=1, max_size=120),
    cuts=st.lists(st.integers(0, 120), max_size=6),
    chunk=st.integers(1, 20),
    workers=st.integers(1, 5),
    closing=st.lists(st.booleans(), min_size=7, max_size=7),
)
def test_counters_are_those_of_a_dictionary_that_sees_row_by_row(
    keys: list[int], cuts: list[int], chunk: int, workers: int, closing: list[bool]
) -> None:
    """Whatever the generations and the chunks are that the rows come in."""
    known, rows = Buckets.none(), [0, *sorted(cut for cut in cuts if cut < len(keys)), len(keys)]
    seen: dict[int, int] = defaultdict(int)
    first = dict(zip(keys, first_workers_of(np.array(keys), 5, workers).tolist(), strict=True))
    copied: dict[int, int] = defaultdict(int)
    for number, (low, high) in enumerate(pairwise(rows)):
        chunks = [np.array(keys[at : min(at + chunk, high)]) for at in range(low, high, chunk)]
        found = [np.unique(part, return_counts=True) for part in chunks]
        earlier = dict(seen)
        made = count_generation(known, found, seed=5, num_workers=workers, closes=closing[number])
        for part, buckets in zip(chunks, made.chunks, strict=True):
            assert buckets.keys.tolist() == sorted(set(part.tolist()))
            assert buckets.before.tolist() == [seen[key] for key in buckets.keys.tolist()]
            assert buckets.first.tolist() == [first[key] for key in buckets.keys.tolist()]
            for key in part.tolist():
                seen[key] += 1
        sparse = {key for key in seen if closing[number] and workers > 1 and 0 < seen[key] <= workers}
        assert made.old_copies == sum(earlier.get(key, 0) - copied[key] for key in sparse) * (workers - 1)
        assert made.new_copies == sum(seen[key] - earlier.get(key, 0) for key in sparse) * (workers - 1)
        copied |= {key: seen[key] for key in sparse}
        known = made.after
        assert dict(zip(known.keys.tolist(), known.counts.tolist(), strict=True)) == {
            k: n for k, n in seen.items() if n
        }
        assert known.copied.tolist() == [copied[key] for key in known.keys.tolist()]
        assert sorted(known.numbers.tolist()) == list(range(len(known)))


def test_a_bucket_keeps_its_number_when_others_come_up() -> None:
    first = Buckets.none().with_keys(np.array([4, 9]))
    second = first.with_keys(np.array([2, 9, 11]))
    assert second.keys.tolist() == [2, 4, 9, 11]
    assert second.numbers.tolist() == [2, 0, 1, 3]
    assert second.order_by_number(second.keys).tolist() == [4, 9, 2, 11]


def test_counters_come_back_from_their_file() -> None:
    held = StreamState(Buckets(*map(np.array, ([4, 5, 9], [2, 0, 1], [5, 6, 7], [0, 6, 3]))), np.array([7, 8, 9]))
    again = StreamState.from_bytes(held.to_bytes())
    assert again.sums.tolist() == [7, 8, 9]
    assert {name: array.tolist() for name, array in again.buckets.arrays().items()} == {
        name: array.tolist() for name, array in held.buckets.arrays().items()
    }


# --- generations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "window"), only([(3, 300)], [(1, 0), (3, 300), (4, 1), (3, 901)]))
def test_rows_are_dealt_bucket_by_bucket_in_the_order_of_arrival(
    spark: SparkSession, tmp_path: Path, files: list[Path], workers: int, window: int
) -> None:
    for batch, file in enumerate(files):
        take(spark.sparkContext, tmp_path / "set", batch, [file], workers, window_rows=window)
    shards = check_set(tmp_path / "set", IMAGES, LABELS)
    assert not all_damage(shards, serial)
    closed = [number for number, generation in enumerate(generations(shards)) if generation.closes]
    assert closed == {0: [], 300: [1, 3, 5], 1: [0, 1, 2, 3, 4, 5], 901: []}[window]
    assert bool(shards.manifest.copies) == (bool(closed) and workers > 1)
    assert shards.manifest.labels.num_classes == 10


def test_sparse_buckets_are_on_all_workers_after_their_window(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    """Every bucket that is sparse when its window closes is on all workers."""
    for batch, file in enumerate(files):
        take(spark.sparkContext, tmp_path / "set", batch, [file], 4, window_rows=450)
    shards = open_committed(STORE, str(tmp_path / "set"))
    rows, ends = rows_of(shards), [generation.total for generation in generations(shards) if generation.closes]
    assert ends == [450, 900]
    everywhere = {row["id"] for row in rows if row["copy"]}
    expected, begin = set(), 0
    for end in ends:
        of_bucket = defaultdict(list)
        for row in rows:
            if row["copy"] == 0 and row["id"] < end:
                of_bucket[row["neighbourhood"]].append(row["id"])
        expected |= {id for ids in of_bucket.values() if len(ids) <= 4 for id in ids if id >= begin}
        begin = end
    assert everywhere == expected != set()


@pytest.mark.full
def test_the_batches_that_rows_come_in_change_nothing_but_the_files(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    """Given the functions, which are fitted to the first batch."""
    take(spark.sparkContext, tmp_path / "fit", 0, files[:2])
    model = str(tmp_path / "fit")
    for name, cuts in (("one", [files]), ("two", [files[:1], files[1:]]), ("six", [[file] for file in files])):
        for batch, some in enumerate(cuts):
            take(spark.sparkContext, tmp_path / name, batch, some, window_rows=0, model=model)
    dealt = [
        {row["id"]: row["worker"] for row in rows_of(open_committed(STORE, str(tmp_path / name)))}
        for name in ("one", "two", "six")
    ]
    assert dealt[0] == dealt[1] == dealt[2]
    assert len(dealt[0]) == 900


@pytest.mark.full
def test_a_stream_that_was_not_disturbed_gives_the_same_bits_again(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    def digests(name: str) -> list[str]:
        for batch, file in enumerate(files):
            take(spark.sparkContext, tmp_path / name, batch, [file], window_rows=300)
        return [file.sha256 for file in open_committed(STORE, str(tmp_path / name)).hashed_files()]

    assert digests("one") == digests("two")


def test_a_batch_that_is_committed_is_not_looked_at_again(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    take(spark.sparkContext, tmp_path / "set", 0, files[:1])
    before = files_below(tmp_path / "set")
    done = take(spark.sparkContext, tmp_path / "set", 0, files[1:2])
    assert not done.fresh
    assert files_below(tmp_path / "set") == before


def test_a_file_of_the_far_future_hides_no_other(spark: SparkSession, tmp_path: Path) -> None:
    """A wrong clock, or an archive, may have given it its time."""
    folder = tmp_path / "in"
    folder.mkdir()
    names: list[str] = []

    def read() -> None:
        stream = stream_of_files(spark, f"file://{folder}", None).writeStream.trigger(availableNow=True)
        stream = stream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        stream = stream.foreachBatch(lambda batch, _: names.extend(Path(row.path).name for row in batch.collect()))
        stream.start().awaitTermination()

    (folder / "late.bin").write_bytes(b"1")
    os.utime(folder / "late.bin", (7.3e9, 7.3e9))
    read()
    (folder / "today.bin").write_bytes(b"2")
    read()
    assert names == ["late.bin", "today.bin"]


def test_parquet_arrives_too(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number, part in enumerate(np.array_split(np.arange(300), 3)):
        table = pa.table({"image": [IMAGES[row].tobytes() for row in part], "label": LABELS[part].astype(np.int64)})
        path = tmp_path / "in" / f"{number}.parquet"
        pq.write_table(table, path)
        take(spark.sparkContext, tmp_path / "set", number, [path], read_options=ReadOptions(shape=SHAPE))
    shards = check_set(tmp_path / "set", IMAGES[:300], LABELS[:300])
    assert shards.manifest.input.format == "parquet"


def test_a_stream_makes_its_images_grey(spark: SparkSession, tmp_path: Path, files: list[Path]) -> None:
    for batch, file in enumerate(files[:2]):
        take(spark.sparkContext, tmp_path / "set", batch, [file], read_options=replace(RAW, channels=1))
    check_set(tmp_path / "set", to_channels(IMAGES[:300].reshape(-1, 3, 8, 8), 1), LABELS[:300])
    assert (
        StreamRequest("o", 3, STRATEGY, read_options=ReadOptions(channels=1)).identity()
        != StreamRequest("o", 3, STRATEGY).identity()
    )


@pytest.mark.full
def test_rows_through_files_by_ranges_of_workers_are_dealt_alike(
    spark: SparkSession, tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for more workers than a task can hold row groups of."""
    monkeypatch.setattr("pipeline.spark.source.workers_per_task", lambda workers, size: 2)
    for batch, file in enumerate(files):
        take(spark.sparkContext, tmp_path / "set", batch, [file], 5, window_rows=400)
    shards = check_set(tmp_path / "set", IMAGES, LABELS)
    assert shards.manifest.copies


# --- readers of other sets read this one ----------------------------------------------------------------------------------


@pytest.mark.full
def test_the_report_and_resharding_take_a_set_of_generations(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    import pipeline

    for batch, file in enumerate(files):
        take(spark.sparkContext, tmp_path / "set", batch, [file], window_rows=400)
    shards = open_committed(STORE, str(tmp_path / "set"))
    found = report(spark.sparkContext, shards)
    assert found.rows == 900
    page = (tmp_path / "set" / "report.html").read_text()
    assert "32 bytes" in page
    assert "Generations" in page
    dealt = pipeline.reshard(
        spark, input=str(tmp_path / "set"), output=str(tmp_path / "two"), num_workers=2, report=False
    )
    assert {path.split("/")[2] for path in dealt.shards.manifest.model or ()} == {"hashes"}
    rows = [row for row in rows_of(dealt.shards) if row["copy"] == 0]
    assert sorted(row["id"] for row in rows) == list(range(900))
    # Files of the usual size, which is how a set of many generations is compacted.
    assert len(dealt.shards.files()) == 2


# --- what is refused ------------------------------------------------------------------------------------------------------


def test_another_stream_and_a_set_without_stream_are_refused(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    """A stream of another configuration or a set of no stream is refused."""
    take(spark.sparkContext, tmp_path / "set", 0, files[:1])
    others: list[tuple[str, dict[str, Any]]] = [
        ("num_workers 3, not 4", {"workers": 4}),
        ("functions 6, not 5", {"strategy": Hash(family="sign", functions=5)}),
        ("window_rows 50000, not 7", {"window_rows": 7}),
    ]
    for difference, other in others:
        with pytest.raises(UsageError, match=rf"of another configuration \({difference}\); repeat"):
            take(spark.sparkContext, tmp_path / "set", 1, files[1:2], **other)
    stream = open_committed(STORE, str(tmp_path / "set"))
    assert "window_rows 50000, late_after_s null" in dict(details(stream))["stream"]
    with pytest.raises(UsageError, match="was streamed from source: rows of /elsewhere would be in it again"):
        take(spark.sparkContext, tmp_path / "set", 1, files[1:2], source="/elsewhere")
    run_here(spark, tmp_path / "in", tmp_path / "batch", 3)
    with pytest.raises(UsageError, match="no stream has made"):
        take(spark.sparkContext, tmp_path / "batch", 0, files[:1])


def test_a_set_names_the_functions_of_its_model(spark: SparkSession, tmp_path: Path, files: list[Path]) -> None:
    """Whatever functions were asked for. Those of images of another size are refused."""
    take(spark.sparkContext, tmp_path / "model", 0, files[:1])
    model = str(tmp_path / "model")
    take(spark.sparkContext, tmp_path / "set", 0, files[:1], model=model, strategy=Hash(family="lsh", functions=3))
    own, theirs = (open_committed(STORE, str(tmp_path / name)).manifest.params for name in ("set", "model"))
    assert (own["family"], own["functions"]) == (theirs["family"], theirs["functions"]) == ("sign", STRATEGY.functions)
    write_binary(tmp_path / "small", *make_rows(20, pixels=48))
    options = ReadOptions("cifar10-binary", (3, 4, 4))
    with pytest.raises(UsageError, match="has functions of 192 numbers per image, and the images have 48"):
        take(
            spark.sparkContext, tmp_path / "o", 0, [*(tmp_path / "small").iterdir()], model=model, read_options=options
        )


def checkpoint_at(folder: Path, planned: int, done: int, query: str = "query") -> str:
    """As Spark leaves it, with the checksums that lie beside."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metadata").write_text(json.dumps({"id": query}))
    for name, last in (("offsets", planned), ("commits", done)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for batch in range(last + 1):
            (folder / name / f"{batch}").touch()
            (folder / name / f".{batch}.crc").touch()
    return f"file://{folder}"


def test_a_checkpoint_ahead_of_or_behind_the_set_is_refused(
    spark: SparkSession, tmp_path: Path, files: list[Path]
) -> None:
    """A checkpoint that is ahead of the set or behind it is refused."""
    output = str(tmp_path / "set")
    (tmp_path / "rubbish.bin").write_bytes(b"rubbish")

    def check(planned: int, done: int) -> None:
        place = checkpoint_at(tmp_path / f"{planned}-{done}", planned, done)
        check_checkpoint(STORE, place, read_committed(STORE, output), output)

    check(-1, -1)
    check(0, -1)  # killed in its first batch
    with pytest.raises(UsageError, match=r"lacks batch 0, which its checkpoint .* records as done"):
        check(0, 0)
    take(spark.sparkContext, output, 0, files[:1])
    take(spark.sparkContext, output, 1, [tmp_path / "rubbish.bin"])
    take(spark.sparkContext, output, 2, [])
    for planned, done in ((0, -1), (0, 0), (1, 0), (2, 2), (3, 2)):
        check(planned, done)
    with pytest.raises(UsageError, match="lacks batch 3"):
        check(4, 3)
    take(spark.sparkContext, output, 4, files[1:2])
    with pytest.raises(UsageError, match=r"has batch 4, but its checkpoint .* ends at batch 3"):
        check(3, 3)
    for place in (checkpoint_at(tmp_path / "other", 4, 4, "another"), str(tmp_path / "deleted")):
        with pytest.raises(UsageError, match="was written with another checkpoint"):
            check_checkpoint(STORE, place, read_committed(STORE, output), output)


def test_a_batch_that_comes_after_the_end_is_not_noted_as_done(spark: SparkSession, tmp_path: Path) -> None:
    request = StreamRequest(str(tmp_path / "set"), 3, STRATEGY)
    run = GenerationRun(spark.sparkContext, request, STORE, str(tmp_path / "set"), "")
    running = Running(run, lambda *_: pytest.fail("no batch is taken"), print, print, is_asked_to_end=True)
    running.query_is_set.set()
    with pytest.raises(AskedToEnd):
        running.on_batch(spark.range(1), 0)
    assert running.has_refused_batch
    assert not (tmp_path / "set").exists()
