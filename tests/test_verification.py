"""What stands between writing and committing: shards that are not the scanned rows are refused, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from pipeline.assignment.chunks import offsets_by_chunk
from pipeline.assignment.groups import group_table
from pipeline.assignment.kept import keep
from pipeline.errors import JobError
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.records import record_batch
from pipeline.input.scan import scan
from pipeline.output import writer
from pipeline.output.placement import Dealing
from pipeline.output.spill import SpillJob
from pipeline.output.writer import ChunkJob, WrittenChunk, WrittenFile
from pipeline.runs import shard as runs
from pipeline.runs import write
from pipeline.runs.request import Request
from pipeline.runs.shard import ShardingResult
from pipeline.spark.progress import PhaseLog
from pipeline.storage.store import Store
from pipeline.strategies import Context, Fitted, Strategy
from pipeline.strategies.base import OneGroup
from pipeline.strategies.stratified import Stratified
from tests.conftest import make_rows, write_binary

ROWS, RECORD_BYTES = 300, 193
# The three images of this class are its whole group, so each of four workers receives them.
RARE = 9


@dataclass(frozen=True)
class Interrupted(Strategy):
    """Stratified, with rare classes copied to every worker, and something that happens between the scan and the write."""

    name: ClassVar[str] = "interrupted"
    meanwhile: Callable[[], object] = field(default=lambda: None)

    def fit(self, context: Context) -> Fitted:
        self.meanwhile()
        return replace(Stratified().fit(context), sparse_if="le")

    def params(self) -> dict[str, Any]:
        return {}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    labels, images = make_rows(ROWS, classes=RARE, pixels=192)
    labels[[5, 150, 299]] = RARE
    return write_binary(tmp_path / "cifar", labels, images)


def sharded(
    spark: SparkSession,
    source: Path,
    output: Path,
    meanwhile: Callable[[], object] = lambda: None,
    workers: int = 4,
    overwrite: bool = False,
) -> ShardingResult:
    request = Request(str(source), str(output), workers, overwrite=overwrite, format="cifar10-binary", shape=(3, 8, 8))
    return runs.shard(spark.sparkContext, request, Interrupted(meanwhile=meanwhile), PhaseLog(quiet=True))


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replace_bytes(path: Path, offset: int, data: bytes) -> None:
    """Change a file's content in place, as another program would, and leave its size."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_an_undisturbed_set_has_the_declared_copies(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    manifest = sharded(spark, source, tmp_path / "out").shards.manifest
    assert (manifest["rows"], manifest["copies"]) == (ROWS, 3 * 3)


@pytest.mark.parametrize("older", [False, True], ids=["first commit", "over an older set"])
def test_an_input_that_changes_between_scan_and_write_is_an_error_and_nothing_is_committed(
    spark: SparkSession, source: Path, tmp_path: Path, older: bool
) -> None:
    output = tmp_path / "out"
    if older:
        sharded(spark, source, output, workers=2)
    before = files_below(output)
    image = 1 + 100  # a byte of the first image, past its label

    def change() -> None:
        old = (source / "data_batch_2.bin").read_bytes()[image]
        replace_bytes(source / "data_batch_2.bin", image, bytes([old ^ 1]))

    expected = rf"the input changed while it was sharded: {ROWS} rows \(\w+\) were scanned, {ROWS} \(\w+\) written"
    with pytest.raises(JobError, match=expected):
        sharded(spark, source, output, change, overwrite=True)
    assert files_below(output) == before
    assert older or not output.exists()


def test_two_rows_that_change_places_between_scan_and_write_are_an_error(
    spark: SparkSession, source: Path, tmp_path: Path
) -> None:
    """The same rows with other ids are another input."""
    batch = source / "data_batch_1.bin"
    labels = batch.read_bytes()[::RECORD_BYTES]
    twins = [row for row, label in enumerate(labels) if label == labels[0]][:2]

    def swap() -> None:
        data = batch.read_bytes()
        first, second = (data[row * RECORD_BYTES : (row + 1) * RECORD_BYTES] for row in twins)
        replace_bytes(batch, twins[0] * RECORD_BYTES, second)
        replace_bytes(batch, twins[1] * RECORD_BYTES, first)

    with pytest.raises(JobError, match="the input changed while it was sharded"):
        sharded(spark, source, tmp_path / "out", swap)
    assert not (tmp_path / "out").exists()


def without_a_file(chunk: WrittenChunk) -> WrittenChunk:
    return replace(chunk, files=chunk.files[1:])


def with_a_copy_too_many(chunk: WrittenChunk) -> WrittenChunk:
    first, *others = chunk.files
    return replace(chunk, files=[replace(first, copies=first.copies + 1), *others])


def with_a_file_twice(chunk: WrittenChunk) -> WrittenChunk:
    return replace(chunk, files=[*chunk.files, chunk.files[0]])


@pytest.mark.parametrize("fault", [without_a_file, with_a_copy_too_many, with_a_file_twice])
def test_files_that_do_not_add_up_to_the_rows_and_their_copies_are_an_error_and_nothing_is_committed(
    spark: SparkSession,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[WrittenChunk], WrittenChunk],
) -> None:
    """The scan sees the rows that were written once. Only the files tell how often each of them was."""
    verify, seen = write.verify, list[WrittenFile]()

    def faulty(written: list[WrittenChunk], *expected: Any) -> None:
        seen.extend(file for chunk in written for file in chunk.files)
        verify([fault(written[0]), *written[1:]], *expected)

    monkeypatch.setattr(runs, "verify", faulty)
    with pytest.raises(JobError, match=rf"rows with \d+ copies were written, not {ROWS} \+ 9; nothing was committed"):
        sharded(spark, source, tmp_path / "out")
    assert sum(file.rows for file in seen) == ROWS + 9
    assert not (tmp_path / "out").exists()


def job_of(dataset: Dataset, staging: Path, workers: int = 3) -> ChunkJob:
    """All rows round robin, in one chunk. staging: the folder of an attempt, which is there."""
    staging.mkdir()
    table, bounds = group_table(np.array([dataset.rows]), workers), [(0, dataset.rows)]
    offsets = offsets_by_chunk(np.array([[dataset.rows]]))
    return ChunkJob(dataset, Dealing(OneGroup(), table, offsets), bounds, str(staging), 10)


def altered(kind: str) -> Callable[..., pa.RecordBatch]:
    """``record_batch`` with one wrong value, as a fault between the reader and Parquet would give."""

    def make(schema: pa.Schema, *args: Any, **extra: Any) -> pa.RecordBatch:
        batch = record_batch(schema, *args, **extra)
        at = schema.get_field_index(kind)
        values = batch.column(at).to_pylist()
        values[0] = bytes([values[0][0] ^ 1]) + values[0][1:] if kind == "image" else values[0] ^ 1
        return batch.set_column(at, schema.field(at), pa.array(values, schema.field(at).type))

    return make


@pytest.mark.parametrize("kind", ["image", "label", "id", "none"])
def test_what_goes_into_the_files_is_verified_and_not_what_was_read(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = discover(Store(), str(source), run=serial, format="cifar10-binary", shape=(3, 8, 8))
    job = job_of(dataset, tmp_path / "staged")
    scanned = scan(dataset, job.bounds, 1, serial)
    if kind != "none":
        monkeypatch.setattr(writer, "record_batch", altered(kind))
    written = [job.write(0, "task")]
    if kind == "none":
        write.verify(written, scanned, 0)
    else:
        with pytest.raises(JobError, match="the input changed while it was sharded"):
            write.verify(written, scanned, 0)


@pytest.mark.parametrize("what", ["groups", "shards", "spilled rows"])
def test_a_task_that_outlives_its_attempt_brings_nothing_back(source: Path, tmp_path: Path, what: str) -> None:
    """Executors go on for a while when their driver was killed; another run may have tidied up in the meantime."""
    dataset = discover(Store(), str(source), run=serial, format="cifar10-binary", shape=(3, 8, 8))
    job = job_of(dataset, tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    tasks: dict[str, Callable[[], object]] = {
        "groups": lambda: keep(dataset.store, f"{job.staging}/groups", 0, np.zeros(9, np.int32)),
        "shards": lambda: job.write(0, "task"),
        "spilled rows": lambda: SpillJob(job, 2, job.bounds).spill(0, "task"),
    }
    with pytest.raises(JobError, match=f"{tmp_path}/gone is gone: the run has ended, or another one took it for dead"):
        tasks[what]()
    assert not (tmp_path / "gone").exists()


def test_a_try_that_fails_leaves_no_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = discover(Store(), str(source), run=serial, format="cifar10-binary", shape=(3, 8, 8))

    def fail(*_: Any, **__: Any) -> pa.RecordBatch:
        (tmp_path / "staged" / "seen").write_text("it had begun")
        raise JobError("no more")

    job = job_of(dataset, tmp_path / "staged")
    job.write(0, "whole")
    monkeypatch.setattr(writer, "record_batch", fail)
    with pytest.raises(JobError, match="no more"):
        write._one_try(job, job.write, 0)
    assert {path.name for path in (tmp_path / "staged").iterdir()} == {"whole", "seen"}
