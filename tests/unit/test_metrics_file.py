"""The file of a job's metrics, as node_exporter would read it: by the library's own parser."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.core.errors import DataError, UsageError
from pipeline.core.metrics_file import check_metrics_file
from pipeline.runs.metrics_file import JobRecord, recorded, strip_interval, write_metrics
from pipeline.runs.program import execute, exit_code_of

LABELS = {"output": "/shards/{ds}", "strategy": "stratified"}
MANIFEST = SimpleNamespace(
    rows=600, copies=2, num_workers=3, version=4, generations=[], input=SimpleNamespace(bytes=1000)
)
SHARDS: Any = SimpleNamespace(
    manifest=MANIFEST, hashed_files=lambda: [SimpleNamespace(bytes=size) for size in (30, 12)]
)


def metrics_of(path: Path, labels: Mapping[str, str] = LABELS) -> dict[str, float]:
    """The values by name, for phases with the phase; checks that all have the labels of the job."""
    values = {}
    for family in text_string_to_metric_families(path.read_text()):
        assert family.type == "gauge"
        for sample in family.samples:
            assert sample.labels.items() >= labels.items()
            name = sample.name.removeprefix("sharding_job_")
            values[f"{name} {sample.labels['phase']}" if "phase" in sample.labels else name] = sample.value
    return values


def test_a_set_and_its_phases(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    write_metrics(path, LABELS, JobRecord({"scan": 1.5, "write": 2.0}, SHARDS, fresh=True), 100.0, 104.5, 4.4)
    assert metrics_of(path) == {
        "exit_code": 0, "start_timestamp_seconds": 100, "end_timestamp_seconds": 104.5, "duration_seconds": 4.4,
        "last_success_timestamp_seconds": 104.5, "phase_seconds scan": 1.5, "phase_seconds write": 2, "committed": 1,
        "rows": 600, "copies": 2, "workers": 3, "written_bytes": 42, "input_bytes": 1000, "manifest_version": 4,
    }  # fmt: skip
    assert [each.name for each in tmp_path.iterdir()] == ["job.prom"]


def test_a_stream_writes_its_set_after_each_generation(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    grown = SimpleNamespace(
        generations=[SimpleNamespace(rows=400, seconds=3.0), SimpleNamespace(rows=200, seconds=2.0)]
    )
    manifest = SimpleNamespace(**vars(MANIFEST) | vars(grown) | {"absent": ()})
    shards: Any = SimpleNamespace(**vars(SHARDS) | {"manifest": manifest})
    running: dict[str, float] = {}

    def fail(write: Callable[[], None]) -> None:
        write()
        running.update(metrics_of(path))
        raise DataError("a broken file")

    with pytest.raises(DataError), recorded(path, LABELS, JobRecord({}, shards)) as write:
        fail(write)
    assert {name: running[name] for name in ("exit_code", "rows", "generations", "generation_rows")} == {
        "exit_code": 0, "rows": 600, "generations": 2, "generation_rows": 200,
    }  # fmt: skip
    ended = metrics_of(path)
    commit = "last_success_timestamp_seconds"
    assert (ended["exit_code"], ended["rows"], ended[commit]) == (3, 600, running[commit])


def test_a_failure_keeps_the_time_of_the_last_success(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    write_metrics(path, LABELS, JobRecord({}, SHARDS), 100.0, 104.0, 4.0)
    for start in (200.0, 300.0):
        write_metrics(path, LABELS, JobRecord({"scan": 1.0}, exit_code=3), start, start + 1, 1.0)
    found = metrics_of(path)
    assert (found["exit_code"], found["last_success_timestamp_seconds"]) == (3, 104)
    assert "rows" not in found


def test_a_file_of_another_program_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    path.write_text("{ no metrics")
    write_metrics(path, LABELS, JobRecord({}, exit_code=1), 1.0, 2.0, 1.0)
    assert "last_success_timestamp_seconds" not in metrics_of(path)


def test_a_duration_does_not_change_with_the_time_of_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.prom"
    with recorded(path, LABELS, JobRecord({})):
        monkeypatch.setattr(time, "time", lambda: 1000.0)  # the clock was years ahead
    values = metrics_of(path)
    assert 0 <= values["duration_seconds"] < 60
    assert values["end_timestamp_seconds"] == values["last_success_timestamp_seconds"] == 1000.0


def test_a_job_ends_as_it_does_without_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that has gone costs one warning, and hides neither a result nor an error."""
    gone = tmp_path / "gone" / "job.prom"
    with recorded(gone, LABELS, JobRecord({})):
        pass
    with pytest.raises(KeyError), recorded(gone, LABELS, JobRecord({})):
        raise KeyError("x")
    with recorded(None, LABELS, JobRecord({})):
        pass
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 2
    assert all(line.startswith(f"warning: --metrics-file {gone}: ") for line in err)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (MemoryError(), 1, "MemoryError"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (AssertionError(), 1, "AssertionError (--debug shows"),
        (KeyboardInterrupt(), 1, "interrupted; "),
        (UsageError("no input"), 2, "no input"),
        (RuntimeError("pipeline.core.errors.DataError: a broken file"), 3, "a broken file"),
    ],
)
def test_an_error_has_the_code_of_the_process(
    error: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise error

    with pytest.raises(SystemExit) as raised:
        execute(fail)
    assert exit_code_of(error) == raised.value.code == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("name", "words"), [("job.txt", "does not end in .prom"), ("no/job.prom", "is no folder")])
def test_a_place_that_is_not_read_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check_metrics_file(tmp_path / name)


def test_labels_do_not_grow_by_the_day() -> None:
    assert strip_interval("s3://lake/ds=2026-01-31/x", {"ds": "2026-01-31"}) == "s3://lake/ds={ds}/x"
    run = {"run_id": "scheduled__2026-01-31T00:00:00"}
    assert strip_interval("hdfs://n:8020/x/scheduled__2026-01-31T00_00_00", run) == "hdfs://n:8020/x/{run_id}"
    assert strip_interval("/lake7/x-7/7", {"run_id": "7"}) == "/lake7/x-7/{run_id}"
    assert strip_interval("s3://key:secret@lake/x", None) == "s3://***@lake/x"
    container = "abfss://raw@lake.dfs.core.windows.net/x"
    assert strip_interval(container, None) == container
