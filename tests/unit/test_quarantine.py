"""What a stream leaves out and puts aside: broken records, files that are gone, messages that were deleted."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import UsageError
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.manifest import open_committed
from pipeline.input.arrivals import (
    MOST_BROKEN,
    Arrivals,
    BadRecord,
    SkippedRows,
    merge_ranges,
    ranges_to_leave_out,
    survey,
)
from pipeline.input.dataset import RecordRange, serial
from pipeline.input.formats import DataFile
from pipeline.input.quarantine import VALUE, lines_of, path_of, write_quarantine
from pipeline.input.read_options import ReadOptions
from pipeline.runs.steps import commit as steps
from pipeline.stream.checkpoint import planned_files, planned_offsets
from pipeline.stream.kafka import lost_messages
from pipeline.stream.look import LookJob, scan_batch
from tests.spark.test_stream import IMAGES, LABELS, files
from tests.support.commits import commit
from tests.support.places import STORE, put
from tests.support.stream_runs import SHAPE
from tests.support.tiers import only

__all__ = ["files"]  # a fixture


def aside(output: Path) -> list[dict[str, Any]]:
    paths = sorted((output / "_quarantine").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def images_with(broken: set[int], labels: dict[int, int], rows: int, path: Path) -> Path:
    """A file of Parquet of the first rows: some images that cannot be decoded, some labels of one's own."""
    images = [b"\x89PNG broken" if row in broken else IMAGES[row].tobytes() for row in range(rows)]
    held = [labels.get(row, int(LABELS[row])) for row in range(rows)]
    pq.write_table(pa.table({"image": images, "label": held}), path)
    return path


def test_names_with_separators_of_lines_can_be_read_again(tmp_path: Path) -> None:
    path = path_of(str(tmp_path), 0)
    lines: list[dict[str, object]] = [
        {"source": "in/a\u2028b\x85c.bin", VALUE: "AAAA"},
        {"source": "in/d", VALUE: "BBBB"},
    ]
    write_quarantine(STORE, path, lines)
    write_quarantine(STORE, path, lines[:1])
    assert [json.loads(line) for line in Path(path).read_text().split("\n") if line] == lines


@pytest.mark.parametrize(("end", "sources"), [("refused", ["old"]), ("undone", ["old"]), ("committed", ["new"])])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_failed_commit_leaves_the_list_of_the_set(
    earlier: bool, end: str, sources: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """earlier: whether the set in the output has a list."""
    output = str(tmp_path)
    commit(STORE, output, "old", 1)
    before = open_committed(STORE, output)
    if earlier:
        write_quarantine(STORE, path_of(output, 0), [{"source": "old"}])

    def fail(*_: object, **others: object) -> NoReturn:
        if end == "committed":
            commit(STORE, output, "new", 1)
        raise UsageError("another set") if end == "refused" else KeyboardInterrupt

    monkeypatch.setattr(steps, "describe_set", lambda *_: None)
    monkeypatch.setattr(steps, "publish", fail)
    run: Any = SimpleNamespace(store=STORE, request=SimpleNamespace(output=output))
    inputs = SimpleNamespace(bad_records=[BadRecord("new", 0, "no image")])
    written_set: Any = SimpleNamespace(inputs=inputs, moves=list)
    goal: Any = SimpleNamespace(before=before)
    attempt: Any = SimpleNamespace(id="" if end == "committed" else "another")  # every stamp ends with ""
    with pytest.raises((UsageError, KeyboardInterrupt)):
        steps.commit(run, goal, attempt, written_set, [])
    assert [line["source"] for line in aside(tmp_path)] == (sources if earlier or end == "committed" else [])


def end_of_job(
    output: str, rival: str, monkeypatch: pytest.MonkeyPatch, *, quarantined: int, meanwhile: list[str]
) -> None:
    """Commit a set of a job "this" with the bad record "bad", after or before a rival job.

    rival: id of the job whose set is the committed one in the end; quarantined: bad records of its input; meanwhile: sources
    of the list that the rival writes while "this" commits, if any."""
    input_entry = SimpleNamespace(quarantined=quarantined)
    committed = SimpleNamespace(manifest=SimpleNamespace(generation=f"v1-{rival}", input=input_entry))

    def publish(*_: object, **others: object) -> Any:
        if meanwhile:
            write_quarantine(STORE, path_of(output, 0), lines_of([BadRecord(each, 0, "") for each in meanwhile]))
        if rival != "this":
            raise UsageError("another set")
        return committed

    monkeypatch.setattr(steps, "describe_set", lambda *_: None)
    monkeypatch.setattr(steps, "publish", publish)
    monkeypatch.setattr(steps, "read_committed", lambda *_: committed)
    run: Any = SimpleNamespace(store=STORE, request=SimpleNamespace(output=output))
    written_set: Any = SimpleNamespace(inputs=SimpleNamespace(bad_records=[BadRecord("bad", 0, "")]), moves=list)
    goal: Any = SimpleNamespace(before=None)
    attempt: Any = SimpleNamespace(id="this")
    steps.commit(run, goal, attempt, written_set, [])


@pytest.mark.parametrize(
    ("earlier", "meanwhile", "expected"),
    [
        (["other"], [], ["other"]),
        ([], ["other"], ["other"]),
        ([], ["bad"], ["bad"]),
        (["old", "older"], ["bad"], ["bad"]),
        ([], [], []),
    ],
    ids=["earlier", "later", "the same", "the same after an old set", "none"],
)
def test_a_refused_job_leaves_the_list_of_another_set(
    earlier: list[str], meanwhile: list[str], expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """earlier, meanwhile: the list that the other job has written before or after the list of the refused one."""
    write_quarantine(STORE, path_of(str(tmp_path), 0), lines_of([BadRecord(each, 0, "") for each in earlier]))
    with pytest.raises(UsageError):
        end_of_job(str(tmp_path), "other", monkeypatch, quarantined=len(expected), meanwhile=meanwhile)
    assert [line["source"] for line in aside(tmp_path)] == expected


def test_a_committed_set_has_its_list_beside_another_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end_of_job(str(tmp_path), "this", monkeypatch, quarantined=1, meanwhile=["other"])
    assert [line["source"] for line in aside(tmp_path)] == ["bad"]


@pytest.mark.slow
@pytest.mark.parametrize("pieces", only([3], [1, 2, 3, 7, 40]))
def test_what_is_left_out_does_not_depend_on_the_number_of_tasks(tmp_path: Path, pieces: int) -> None:
    """Three files: of as many undecodable records as are left out one by one, of one more, and of no label in range."""
    spread = set(range(3, 3 + 2 * MOST_BROKEN, 2))
    files = [
        images_with(spread, {0: -7, 1: 10, 299: 11}, 300, tmp_path / "0.parquet"),
        images_with(spread | {299}, {0: 12, 50: 12}, 300, tmp_path / "1.parquet"),
        images_with(set(), dict.fromkeys(range(300), 13), 300, tmp_path / "2.parquet"),
    ]
    data, problems = survey(
        STORE, "in", [STORE.info(str(file)) for file in files], run=serial, first=50, read_options=ReadOptions(shape=SHAPE),
        expected=None,
    )  # fmt: skip
    assert data
    assert not problems
    bounds = [(50, 500), (500, 950)]  # a border of chunks in the second file
    found = scan_batch(LookJob(data, 10, None), bounds, pieces, serial).skipped_rows
    whole = "the image cannot be decoded"
    assert [(entry.first - 50, entry.end - 50) for entry in found] == [
        (0, 2),
        *[(row, row + 1) for row in sorted(spread)],
        (299, 300),
        (300, 600),
        (600, 900),
    ]
    assert found[0].reason == f"{files[0]}, row 0: label -7 is not in 0..9"
    assert all(whole in entry.reason for entry in found[1:-3])
    assert f"{files[1]}, row 3: {whole}" in found[-2].reason
    assert found[-2].reason.endswith("; more than 100 records cannot be decoded, so all of the file is left out")
    assert found[-1] == SkippedRows(650, 950, f"{files[2]}, row 0: label 13 is not in 0..9", decoded=True)
    again = data.leave_out((entry.first, entry.end) for entry in found)
    assert scan_batch(LookJob(again, 10, None), [(50, 50 + again.rows)], pieces, serial).skipped_rows == []


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(["good", "good", "label", "undecodable"]), min_size=36, max_size=36),
    cuts=st.sets(st.integers(1, 35)),
    most=st.integers(0, 3),
)
def test_ranges_that_tasks_find_merge_to_those_of_a_loop_over_files(
    lengths: list[int], kinds: list[str], cuts: set[int], most: int
) -> None:
    segments = tuple(RecordRange(DataFile(f"{at}", 0, 0, rows), 0, rows) for at, rows in enumerate(lengths))
    data = Arrivals(STORE, "in", "parquet", (), Layout(SHAPE), segments, 0)
    borders = sorted({0, sum(lengths), *(cut for cut in cuts if cut < sum(lengths))})
    found = [
        entry
        for low, high in pairwise(borders)
        for entry in merge_ranges(
            data,
            [SkippedRows(at, at + 1, f"{at}", kinds[at] == "label") for at in range(low, high) if kinds[at] != "good"],
        )
    ]
    expected: list[tuple[int, int, str]] = []
    for low, high in pairwise([0, *np.cumsum(lengths).tolist()]):
        broken = [row for row in range(low, high) if kinds[row] == "undecodable"]
        if len(broken) > most:
            expected.append((low, high, f"{broken[0]}"))
            continue
        for row in range(low, high):
            if kinds[row] == "label" and row > low and kinds[row - 1] == "label":
                expected[-1] = (expected[-1][0], row + 1, expected[-1][2])
            elif kinds[row] != "good":
                expected.append((row, row + 1, f"{row}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.input.arrivals.MOST_BROKEN", most)
        got = ranges_to_leave_out(data, found)
    assert [(entry.first, entry.end, entry.reason.partition(";")[0]) for entry in got] == expected


def test_the_bytes_of_messages_outlive_a_try_that_finds_them_gone(tmp_path: Path) -> None:
    path = path_of(str(tmp_path), 3, 0)
    messages: list[dict[str, object]] = [
        {"source": f"partition 0, offset {number}", "value": "AA=="} for number in range(3)
    ]
    write_quarantine(STORE, path, messages)
    write_quarantine(STORE, path, messages)
    assert aside(tmp_path) == messages
    write_quarantine(STORE, path, messages[2:])
    assert aside(tmp_path) == [messages[2], *messages[:2]]
    write_quarantine(STORE, path, [])
    assert len(aside(tmp_path)) == 3
    other = path_of(str(tmp_path), 4)
    write_quarantine(STORE, other, [{"source": "a file", "record": None}])
    write_quarantine(STORE, other, [])
    assert not Path(other).exists()


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    bad=st.sets(st.integers(0, 53)),
    joined=st.booleans(),
)
def test_rows_are_left_out_of_files_wherever_they_are(lengths: list[int], bad: set[int], joined: bool) -> None:
    """joined: neighbours as one range, over the ends of files too."""
    segments = tuple(RecordRange(DataFile(f"{at}", 0, 0, rows + 2), 1, rows + 1) for at, rows in enumerate(lengths))
    data = Arrivals(STORE, "in", "cifar10-binary", (), Layout(SHAPE), segments, 100)
    rows = sorted(row for row in bad if row < sum(lengths))
    ranges = [(100 + row, 101 + row) for row in rows]
    if joined:
        starts_at = [row for row in rows if row - 1 not in rows]
        ends = [row + 1 for row in rows if row + 1 not in rows]
        ranges = [(100 + low, 100 + high) for low, high in zip(starts_at, ends, strict=True)]
    every = [(segment.file.path, record) for segment in segments for record in range(segment.start, segment.stop)]
    left = data.leave_out(reversed(ranges)).segments
    kept = [(segment.file.path, record) for segment in left for record in range(segment.start, segment.stop)]
    assert kept == [place for row, place in enumerate(every) if row not in bad]


def test_planned_messages_before_the_first_one_are_lost(
    tmp_path: Path,
) -> None:
    """As Spark notes offsets: those it began with after a byte of zero, then those at the end of each batch."""
    for name, text in {
        "sources/0/0": '\0v1\n{"rows":{"0":3,"1":0}}',
        "offsets/0": 'v1\n{"batchWatermarkMs":0}\n{"rows":{"0":9,"1":4}}',
        "offsets/1": 'v1\n{"batchWatermarkMs":0}\n{"rows":{"0":9,"1":8,"2":5}}',
        "offsets/2": "v1\n-",
    }.items():
        put(f"{tmp_path}/{name}", text.encode())
    place = f"file://{tmp_path}"
    assert planned_offsets(STORE, place, 0) == {0: (3, 9), 1: (0, 4)}
    planned = planned_offsets(STORE, place, 1)
    assert planned == {0: (9, 9), 1: (4, 8), 2: (0, 5)}
    assert planned_offsets(STORE, place, 2) == planned_offsets(STORE, place, 7) == {}
    assert planned_files(STORE, place, 0) == []
    lost = [(entry.source, entry.records) for entry in lost_messages(planned, [(1, 6), (1, 4), (2, 2)])]
    assert lost == [("partition 2, offsets 0 to 1", 2)]
    assert [(entry.source, entry.records) for entry in lost_messages(planned, [(2, 0)])] == [
        ("partition 1, offsets 4 to 7", 4)
    ]
    assert lost_messages({}, [(0, 5)]) == []
