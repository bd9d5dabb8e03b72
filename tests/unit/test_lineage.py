"""OpenLineage: names of data sets by the client's own naming helpers, and runs without a collector."""

from __future__ import annotations

import json
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import pytest
from openlineage.client.naming.dataset import ABFSS, GCS, HDFS, S3, Kafka, LocalFileSystem
from openlineage.client.transport import Transport

from pipeline.core import extras
from pipeline.core.storage.store import Store
from pipeline.runs import lineage
from pipeline.runs.lineage import dataset_name, lineage_events
from pipeline.runs.request import Request

CONTEXT: Any = SimpleNamespace(_jsc=SimpleNamespace(getConf=dict))


class FaultyEnd(Transport):
    """A transport that sends everything and cannot be closed."""

    def __init__(self, config: Any) -> None:
        pass

    def emit(self, event: Any) -> None:
        pass

    def close(self, timeout: float = -1) -> bool:
        raise OSError("the queue is gone")


@pytest.fixture(autouse=True)
def unconfigured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "_DEAD_TRANSPORTS", set())
    monkeypatch.setattr(lineage, "_SHOWN_WARNINGS", set())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("uri", "naming"),
    [
        ("/data/cifar", LocalFileSystem("/data/cifar")),
        ("hdfs://namenode:8020/raw/x", HDFS("namenode", "8020", "/raw/x")),
        ("s3://lake/raw/x", S3("lake", "raw/x")),
        ("s3://key:secret@lake/raw/x/", S3("lake", "raw/x")),
        ("s3://lake", S3("lake", "/")),
        ("gs://lake/raw/x", GCS("lake", "raw/x")),
        ("abfss://raw@lake.dfs.core.windows.net/x", ABFSS("raw", "lake", "x")),
        ("delta:s3://lake/raw/x", S3("lake", "raw/x")),
        ("kafka://broker:9092/images", Kafka("broker", "9092", "images")),
    ],
)
def test_data_sets_have_the_names_of_the_specification(uri: str, naming: Any) -> None:
    assert dataset_name(uri) == (naming.get_namespace(), naming.get_name())


def test_a_table_of_a_catalog_has_its_name() -> None:
    assert dataset_name("table:db.images") == ("spark", "db.images")


def run(tmp_path: Path) -> None:
    request = Request(str(tmp_path / "in"), str(tmp_path / "out"), 2)
    with lineage_events(CONTEXT, Store(), "stratified", request):
        pass


def test_a_topic_is_the_input_of_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "file")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__APPEND", "true")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__LOG_FILE_PATH", str(tmp_path / "events"))
    request = Request("kafka://broker:9092/images", str(tmp_path / "out"), 2)
    with lineage_events(CONTEXT, Store(), "stream", request, processing="STREAMING"):
        pass
    events = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [event["eventType"] for event in events] == ["START", "COMPLETE"]
    for event in events:
        assert [(each["namespace"], each["name"]) for each in event["inputs"]] == [("kafka://broker:9092", "images")]


def test_without_configuration_nothing_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("disabled", [False, True])
def test_a_configuration_without_the_client_is_one_warning(
    disabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two runs of a process print it once, or not at all if OpenLineage is disabled."""
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    monkeypatch.setenv("OPENLINEAGE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENLINEAGE_DISABLED", str(disabled))
    run(tmp_path)
    run(tmp_path)
    advice = "run pip install '.[lineage]' in the checkout of this project"
    needs = f"its configuration needs openlineage, which is not installed: {advice}"
    assert capfd.readouterr() == ("", "" if disabled else f"warning: no OpenLineage events: {needs}\n")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {
                "OPENLINEAGE__TRANSPORT__TYPE": "http",
                "OPENLINEAGE__TRANSPORT__URL": "http://127.0.0.1:9",
                "OPENLINEAGE__TRANSPORT__RETRY": '{"total": 0}',
            },
            "no OpenLineage events: START was not sent: ",
        ),
        (
            {"OPENLINEAGE__TRANSPORT__TYPE": f"{__name__}.FaultyEnd"},
            "OpenLineage events may be missing: OSError: the queue is gone",
        ),
        (
            {"OPENLINEAGE__TRANSPORT__TYPE": "no_such_transport"},
            "no OpenLineage events: its configuration is refused: ",
        ),
    ],
)
def test_a_collector_that_fails_is_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    variables: dict[str, str],
    words: str,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run(tmp_path)
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1), err
    assert err.startswith(f"warning: {words}")


class WithoutProgress(Transport):
    """A transport that loses RUNNING, and keeps the kinds of the events that it was given."""

    kinds: ClassVar[list[str]] = []

    def __init__(self, config: Any) -> None:
        pass

    def emit(self, event: Any) -> None:
        self.kinds.append(event.eventType.name)
        if event.eventType.name == "RUNNING":
            raise OSError("restarted")


def test_a_stream_ends_though_its_progress_was_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", f"{__name__}.WithoutProgress")
    request = Request(str(tmp_path / "in"), str(tmp_path / "out"), 2)
    with lineage_events(CONTEXT, Store(), "stream", request, processing="STREAMING") as events:
        events.send("RUNNING")
        events.send("RUNNING")
    assert WithoutProgress.kinds == ["START", "RUNNING", "COMPLETE"]
    assert capfd.readouterr().err.count("RUNNING was not sent: OSError: restarted") == 1


def test_a_collector_that_fails_costs_a_process_one_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The retries of a transport take most of a minute. A collector at another address gets events again."""
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "http")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__RETRY", '{"total": 0}')
    for port, warnings in ((9, 1), (9, 0), (11, 1)):
        monkeypatch.setenv("OPENLINEAGE__TRANSPORT__URL", f"http://127.0.0.1:{port}")
        run(tmp_path)
        assert capfd.readouterr().err.count("START was not sent: ") == warnings


def test_a_user_without_a_home_has_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate a container that runs as a number."""

    def unknown(_: int) -> NoReturn:
        raise KeyError

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert not lineage._may_be_configured({})
