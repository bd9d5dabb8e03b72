"""What stands between writing and committing: shards that are not the scanned rows are refused, and nothing is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pyspark.sql import SparkSession

from pipeline.assignment.groups import GroupTable
from pipeline.core.arrays import Ints
from pipeline.core.errors import JobError
from pipeline.input.dataset import Block
from pipeline.input.read_options import ReadOptions
from pipeline.output.writer import WrittenChunk, WrittenFile
from pipeline.runs.api import shard_request
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.runs.steps import write
from pipeline.runs.steps.run import ShardingResult
from pipeline.spark.progress import PhaseLog
from pipeline.strategies import Context, FitResult, Strategy
from pipeline.strategies.base import OneGroup, row_counts
from pipeline.strategies.stratified import Stratified
from tests.conftest import make_rows, write_binary
from tests.unit.test_verification import RARE, RECORD_BYTES, ROWS

READ_OPTIONS = ReadOptions("cifar10-binary", (3, 8, 8))


@dataclass(frozen=True)
class Interrupted(Strategy):
    """Stratified, with rare classes copied to every worker, and something that happens between the scan and the write."""

    name: ClassVar[str] = "interrupted"
    meanwhile: Callable[[], object] = field(default=lambda: None)

    def fit(self, context: Context) -> FitResult:
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
    request = Request(str(source), str(output), workers, overwrite=overwrite, read_options=READ_OPTIONS)
    return shard(spark.sparkContext, request, Interrupted(meanwhile=meanwhile), PhaseLog(quiet=True))


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def replace_bytes(path: Path, offset: int, data: bytes) -> None:
    """Change a file's content in place, as another program would, and leave its size."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@dataclass(frozen=True)
class Faulty(OneGroup):
    """A grouping of a user's own that adds ``shift`` to groups and workers, and deals all rows to few workers."""

    shift: tuple[int, int] = (0, 0)
    neighbourhoods: bool = False

    def groups(self, block: Block) -> Ints:
        return super().groups(block) + self.shift[0]

    def workers(self, ids: Ints, groups: Ints, ranks: Ints, table: GroupTable) -> Ints:
        return ids % 2 + self.shift[1]


@dataclass(frozen=True)
class FaultyStrategy(Strategy):
    name: ClassVar[str] = "faulty"
    grouping: Faulty = field(default_factory=Faulty)

    def fit(self, context: Context) -> FitResult:
        return FitResult(self.grouping, row_counts(context))

    def params(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("grouping", "line"),
    [
        (Faulty((1, 0)), r"the grouping Faulty returned groups 1 to 1: groups\(\) must return int64 .* from 0 to 0"),
        (Faulty((0, 1)), r"the grouping Faulty returned workers 1 to 2: workers\(\) must return int64 .* from 0 to 1"),
        (Faulty((0, -1)), "the grouping Faulty returned workers -1 to 0"),
        (Faulty((0, 0), neighbourhoods=True), r"the strategy faulty deals \d+ rows to worker 0 and counts \d+: "),
    ],
)
def test_the_fault_of_an_own_strategy_names_it(
    spark: SparkSession, source: Path, tmp_path: Path, grouping: Faulty, line: str
) -> None:
    output = tmp_path / "out"
    workers = 3 if grouping.neighbourhoods else 2
    request = Request(str(source), str(output), workers, allow_empty=True, read_options=READ_OPTIONS)
    with pytest.raises(JobError, match=line) as caught:
        shard_request(
            request, FaultyStrategy(grouping=grouping), spark=spark, report=False, progress=PhaseLog(quiet=True)
        )
    assert "\n" not in str(caught.value)
    assert not output.exists()


def test_an_undisturbed_set_has_the_declared_copies(spark: SparkSession, source: Path, tmp_path: Path) -> None:
    manifest = sharded(spark, source, tmp_path / "out").shards.manifest.to_json()
    assert (manifest["rows"], manifest["copies"]) == (ROWS, 3 * 3)


@pytest.mark.parametrize("older", [False, True], ids=["first commit", "over an older set"])
def test_an_input_changed_between_scan_and_write_is_not_committed(
    spark: SparkSession, source: Path, tmp_path: Path, older: bool
) -> None:
    """An input that changes between scan and write is an error and nothing is committed."""
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


def test_rows_that_swap_between_scan_and_write_are_an_error(spark: SparkSession, source: Path, tmp_path: Path) -> None:
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
def test_files_with_wrong_row_counts_are_not_committed(
    spark: SparkSession,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[WrittenChunk], WrittenChunk],
) -> None:
    """The scan sees the rows that were written once. Only the files tell how often each of them was."""
    verify, seen = write.verify_chunks, list[WrittenFile]()

    def faulty(written: list[WrittenChunk], *expected: Any) -> None:
        seen.extend(file for chunk in written for file in chunk.files)
        verify([fault(written[0]), *written[1:]], *expected)

    monkeypatch.setattr(write, "verify_chunks", faulty)
    with pytest.raises(JobError, match=rf"rows with \d+ copies were written, not {ROWS} \+ 9; nothing was committed"):
        sharded(spark, source, tmp_path / "out")
    assert sum(file.rows for file in seen) == ROWS + 9
    assert not (tmp_path / "out").exists()
