"""A job as an operator sees it: lines of JSON, metrics of Prometheus, events of OpenLineage; a success and a failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.conftest import make_rows, write_binary
from tests.support.application import Ended, run_job
from tests.unit.test_console import lines
from tests.unit.test_metrics_file import LABELS, metrics_of

DAY = "2026-01-31"


@pytest.fixture(scope="module")
def folder(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("operation")


@pytest.fixture(scope="module")
def events(folder: Path) -> Any:
    """Events of OpenLineage by job: START and the end. The jobs run once: a set, again, and broken rows."""
    labels, images = make_rows(600, pixels=192)
    write_binary(folder / "in", labels, images)
    labels[450] = 77
    write_binary(folder / "broken", labels, images)
    ended: dict[str, Ended] = {}
    metrics = {}
    received = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
        patch.setenv("OPENLINEAGE__TRANSPORT__APPEND", "true")
        patch.setenv("OPENLINEAGE_NAMESPACE", "tests")
        for name, source in (("first", "in"), ("again", "in"), ("broken", "broken")):
            file = folder / f"{name}.json"
            patch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", str(file))
            ended[name] = run_job(
                "stratified.py", "--input", folder / source, "--output", f"{folder}/{source}-set/{{ds}}", "--ds", DAY,
                "--format", "cifar10-binary", "--image-shape", "3x8x8", "--num-classes", 10, "--workers", 3, "--no-report",
                "--log-format", "json", "--metrics-file", folder / "job.prom",
            )  # fmt: skip
            metrics[name] = (folder / "job.prom").read_text()
            received[name] = [json.loads(line) for line in file.read_text().splitlines()]
    return ended, metrics, received


def test_every_line_of_a_job_is_json(events: Any, spark: SparkSession) -> None:
    ended, _, _ = events
    assert (ended["first"].code, ended["broken"].code) == (0, 3)
    progress = lines(ended["first"].err)
    assert {line["fields"]["application"] for line in progress} == {spark.sparkContext.applicationId}
    phases = [line["fields"]["phase"] for line in progress if "seconds" in line["fields"]]
    assert phases[:2] == ["discover", "scan"]
    assert phases[-1] == "commit"
    last = lines(ended["broken"].err)[-1]
    assert (last["level"], last["fields"]) == ("error", {"exit_code": 3})


def test_metrics_of_a_job(events: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daily runs of a job have the same labels; a failure keeps the time of the last success."""
    _, texts, _ = events
    found = {}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        output = f"{folder}/{'broken' if name == 'broken' else 'in'}-set/{{ds}}"
        monkeypatch.setitem(LABELS, "output", output)
        found[name] = metrics_of(tmp_path / name)
    manifest = json.loads((folder / "in-set" / DAY / "manifest.json").read_text())
    assert found["first"]["rows"] == manifest["rows"] == 600
    assert (found["first"]["workers"], found["first"]["committed"], found["again"]["committed"]) == (3, 1, 0)
    sizes = [file["bytes"] for worker in manifest["workers"] for file in worker["files"]]
    assert found["first"]["written_bytes"] > sum(sizes) > 0
    assert {f"phase_seconds {phase}" for phase in manifest["seconds"]} <= found["first"].keys()
    assert found["broken"]["exit_code"] == 3
    assert found["broken"]["last_success_timestamp_seconds"] == found["again"]["last_success_timestamp_seconds"]


def test_openlineage_events_of_a_job(events: Any, folder: Path) -> None:
    _, _, received = events
    assert [[event["eventType"] for event in received[name]] for name in ("first", "again", "broken")] == [
        ["START", "COMPLETE"], ["START", "COMPLETE"], ["START", "FAIL"],
    ]  # fmt: skip
    start, complete = received["first"]
    assert start["run"]["runId"] == complete["run"]["runId"] != received["again"][0]["run"]["runId"]
    job = ("tests", f"stratified to {folder}/in-set/{{ds}}")
    assert {(event["job"]["namespace"], event["job"]["name"]) for event in (start, complete, *received["again"])} == {
        job
    }
    manifest = json.loads((folder / "in-set" / DAY / "manifest.json").read_text())
    (source,), (output,) = complete["inputs"], complete["outputs"]
    assert (source["namespace"], source["name"]) == ("file", str(folder / "in"))
    assert source["inputFacets"]["inputStatistics"]["rowCount"] == 600
    assert (output["namespace"], output["name"]) == ("file", str(folder / "in-set" / DAY))
    assert output["outputFacets"]["outputStatistics"]["rowCount"] == 600
    assert output["facets"]["version"]["datasetVersion"] == f"1-{manifest['input']['fingerprint']}"
    names = [field["name"] for field in output["facets"]["schema"]["fields"]]
    assert names == ["id", "label", "image", "copy"]
    assert complete["run"]["facets"]["nominalTime"]["nominalStartTime"] == f"{DAY}T00:00:00Z"
    assert "label 77 is not in 0..9" in received["broken"][1]["run"]["facets"]["errorMessage"]["message"]


@pytest.mark.full
def test_openlineage_events_of_a_stream_and_of_a_comparison(
    events: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream tells of its set after each generation; a comparison has a run per strategy."""
    received = tmp_path / "events.json"
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__APPEND", "true")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", str(received))
    layout = ("--format", "cifar10-binary", "--image-shape", "3x8x8", "--num-classes", 10, "--workers", 2)
    stream = ("--source", folder / "in", "--output", tmp_path / "stream", "--trigger", "once", "--no-report", *layout)
    for job, flags in (
        ("hash_stream.py", stream),
        ("hash_stream.py", stream),
        (
            "compare.py",
            ("--input", folder / "in", "--output", tmp_path / "sets", "--strategies", "random,hash", *layout),
        ),
    ):
        ended = run_job(job, *flags, "--quiet")
        assert ended.code == 0, ended.err
    sent = [json.loads(line) for line in received.read_text().splitlines()]
    stream_name = f"stream to {tmp_path}/stream"
    sets = [f"{name} to {tmp_path}/sets/{name}" for name in ("random", "hash")]
    expected = [("START", stream_name), ("RUNNING", stream_name), ("COMPLETE", stream_name)]
    expected += [(kind, name) for name in (stream_name, *sets) for kind in ("START", "COMPLETE")]
    assert [(event["eventType"], event["job"]["name"]) for event in sent] == expected
    manifest = json.loads((tmp_path / "stream" / "manifest.json").read_text())
    for event in sent:
        (source,), (output,) = event["inputs"], event["outputs"]
        assert (source["namespace"], source["name"]) == ("file", str(folder / "in"))
        kind = event["job"]["facets"]["jobType"]["processingType"]
        assert kind == ("STREAMING" if event["job"]["name"] == stream_name else "BATCH")
        if event["eventType"] != "START":
            assert output["outputFacets"]["outputStatistics"]["rowCount"] == manifest["rows"] == 600
