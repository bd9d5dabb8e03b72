"""What stands between writing and committing: shards that are not the scanned rows are refused, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.assignment.chunks import offsets_by_chunk
from pipeline.assignment.groups import group_table
from pipeline.assignment.kept import write_groups
from pipeline.core.errors import JobError
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.decoded import decoder_versions
from pipeline.input.read_options import ReadOptions
from pipeline.input.records import record_batch
from pipeline.input.scan import scan
from pipeline.output import spill, writer
from pipeline.output.placement import Dealing
from pipeline.output.spill import SpillJob
from pipeline.output.writer import ChunkJob
from pipeline.runs.steps import write
from pipeline.strategies.base import OneGroup
from tests.conftest import make_rows, write_binary

ROWS, RECORD_BYTES = 300, 193
# The three images of this class are its whole group, so each of four workers receives them.
RARE = 9


@pytest.fixture
def source(tmp_path: Path) -> Path:
    labels, images = make_rows(ROWS, classes=RARE, pixels=192)
    labels[[5, 150, 299]] = RARE
    return write_binary(tmp_path / "cifar", labels, images)


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


def test_a_chunk_without_rows_is_written_and_assigned(source: Path, tmp_path: Path) -> None:
    dataset = discover(Store(), str(source), run=serial, read_options=ReadOptions("cifar10-binary", (3, 8, 8)))
    job = replace(job_of(dataset, tmp_path / "staged"), bounds=[(0, 0)])
    assert (job.write(0, "written").files, job.write(0, "again").rows) == ([], 0)
    assigned = job.assign(0, "assigned")
    assert (assigned.file.rows, assigned.tally.rows.tolist()) == (0, [0, 0, 0])
    assert assigned.tally.label_counts.shape == (3, 10)


@pytest.mark.parametrize("kind", ["image", "label", "id", "none"])
def test_what_goes_into_the_files_is_verified_and_not_what_was_read(
    kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = discover(Store(), str(source), run=serial, read_options=ReadOptions("cifar10-binary", (3, 8, 8)))
    job = job_of(dataset, tmp_path / "staged")
    scanned = scan(dataset, job.bounds, 1, serial)
    if kind != "none":
        monkeypatch.setattr(writer, "record_batch", altered(kind))
    written = [job.write(0, "task")]
    if kind == "none":
        write.verify_chunks(written, scanned, 0)
    else:
        with pytest.raises(JobError, match="the input changed while it was sharded"):
            write.verify_chunks(written, scanned, 0)


@pytest.mark.parametrize("spills", [False, True])
@pytest.mark.parametrize("other", [None, "Pillow 1, numpy 2"])
def test_changed_rows_name_the_versions_of_other_hosts(
    other: str | None, spills: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An executor with another Pillow decodes the same JPEG to other pixels, though the input is as it was."""
    dataset = discover(Store(), str(source), run=serial, read_options=ReadOptions("cifar10-binary", (3, 8, 8)))
    job = job_of(dataset, tmp_path / "staged")
    scanned = scan(dataset, job.bounds, 1, serial)
    monkeypatch.setattr(writer, "record_batch", altered("image"))
    monkeypatch.setattr(spill, "record_batch", altered("image"))
    if other:
        for module in (writer, spill):
            monkeypatch.setattr(module, "decoder_versions", lambda: other)
    if spills:
        spilling = spill.SpillJob(job, 3, job.bounds)
        written = [spilling.gather([spilling.spill(0, "one")], 0, 0, "two")]
    else:
        written = [job.write(0, "task")]
    with pytest.raises(JobError) as caught:
        write.verify_chunks(written, scanned, 0)
    words = (
        f"the driver has {decoder_versions()}, executors have {' and '.join(sorted({decoder_versions(), str(other)}))};"
    )
    assert (words in str(caught.value)) == bool(other)
    assert str(caught.value).endswith("rerun on a settled input")


@pytest.mark.parametrize("what", ["groups", "shards", "spilled rows"])
def test_a_task_that_outlives_its_attempt_brings_nothing_back(source: Path, tmp_path: Path, what: str) -> None:
    """Executors go on for a while when their driver was killed; another run may have tidied up in the meantime."""
    dataset = discover(Store(), str(source), run=serial, read_options=ReadOptions("cifar10-binary", (3, 8, 8)))
    job = job_of(dataset, tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    tasks: dict[str, Callable[[], object]] = {
        "groups": lambda: write_groups(dataset.store, f"{job.staging}/groups", 0, np.zeros(9, np.int32)),
        "shards": lambda: job.write(0, "task"),
        "spilled rows": lambda: SpillJob(job, 2, job.bounds).spill(0, "task"),
    }
    with pytest.raises(
        JobError, match=f"{tmp_path}/gone no longer exists: the run has ended, or another run considered it dead"
    ):
        tasks[what]()
    assert not (tmp_path / "gone").exists()


def test_a_try_that_fails_leaves_no_file(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = discover(Store(), str(source), run=serial, read_options=ReadOptions("cifar10-binary", (3, 8, 8)))

    def fail(*_: Any, **__: Any) -> pa.RecordBatch:
        (tmp_path / "staged" / "seen").write_text("it had begun")
        raise JobError("no more")

    job = job_of(dataset, tmp_path / "staged")
    job.write(0, "whole")
    monkeypatch.setattr(writer, "record_batch", fail)
    with pytest.raises(JobError, match="no more"):
        write._one_try(job, job.write, 0)
    assert {path.name for path in (tmp_path / "staged").iterdir()} == {"whole", "seen"}
