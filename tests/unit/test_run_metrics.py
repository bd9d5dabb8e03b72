"""The metrics of a run as Prometheus would scrape them: over HTTP, read by the library's own parser."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.core.errors import JobError, UsageError
from tests.support.configs import make_config
from trainer.api import served_metrics
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import write_model, write_state
from trainer.config import RunFacts
from trainer.home.folders import Folders
from trainer.home.work import WorkFolder
from trainer.launch.supervisor import LEADER, Supervisor
from trainer.options import Options
from trainer.report.metrics import RunMetrics, parse_endpoint, serve_metrics
from trainer.run_files import CHECKPOINTS
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.peers import ConsensusEvent
from trainer.runlog.kinds.run import RestartEvent, RollbackEvent, StageEvent, StartEvent
from trainer.runlog.kinds.training import TrainEvent
from trainer.transport.sockets import Secret
from trainer.transport.status import NOT_READY, RunStatus

FACTS = RunFacts(2, 100, 10, 4, "digest", None, (), classifies=True)
STATUS = RunStatus(ready=True, finished=False, diverged=None, total=40, epochs=2.0, alive=2, num_workers=2)
ENDPOINT = ("127.0.0.1", 0)
Samples = dict[tuple[str, ...], float]


def samples_of(text: str) -> Samples:
    """The values of a scrape by name and label values; checks that names and types are declared once."""
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation and family.type != "unknown" for family in families)
    return {
        (each.name, *(value for _, value in sorted(each.labels.items()))): each.value
        for family in families
        for each in family.samples
    }


def scrape(address: str) -> Samples:
    with urllib.request.urlopen(address, timeout=5) as reply:
        return samples_of(reply.read().decode())


def train_event(version: int, *images: int) -> TrainEvent:
    workers = [{"index": index, "clock": 1, "images": count, "step_s": 0.1} for index, count in enumerate(images)]
    values: dict[str, Any] = dict.fromkeys(("loss", "accuracy", "learning_rate", "images_per_s"))
    return TrainEvent(version=version, seconds=1.0, epoch=1.0, workers=workers, **values)


def name(text: str) -> str:
    return f"sharding_training_{text}"


@pytest.fixture
def served() -> Any:
    metrics = RunMetrics()
    with serve_metrics(metrics, ENDPOINT) as address:
        metrics.begin(make_config("shards", "s3://key:secret@lake/run", model="cnn", steps=20), FACTS)
        yield metrics, address


def test_a_scrape_has_the_status_and_counts(served: Any) -> None:
    metrics, address = served
    about = scrape(address)
    assert ("sharding_training_info", "parameter-server", "cnn", "s3://***@lake/run", "asp") in about
    assert (name("version"),) not in about, "nothing is measured yet"
    metrics.add(StartEvent())
    metrics.update(NOT_READY)
    metrics.update(replace(STATUS, version=7, accepted=8, staleness_mean=1.5, staleness_max=3, eval_loss=0.5))
    for event in (train_event(5, 16, 24), train_event(7, 8), EvaluationEvent(version=5, loss=0.5)):
        metrics.add(event)
    found = scrape(address)
    expected = {
        "version": 7, "pushes_total": 8, "updates_total": 7, "pushes_planned": 40, "images_total": 48,
        "sent_bytes_total": 8 * 14 * 4, "workers_present": 2, "workers": 2, "staleness_mean_updates": 1.5,
        "staleness_max_updates": 3, "evaluation_loss": 0.5, "evaluations_total": 1, "rollbacks_total": 0,
    }  # fmt: skip
    assert {key: found[name(key),] for key in expected} == expected
    assert (name("evaluation_accuracy_ratio"),) not in found, "a model with real targets has no accuracy"
    assert found[name("state"), "running"] == 1


def test_counters_never_fall_after_a_rollback(served: Any) -> None:
    """Work that is repeated counts again; the version says where the run is."""
    metrics, address = served
    metrics.add(StartEvent())
    for version in (10, 4, 6):
        metrics.update(replace(STATUS, version=version, accepted=version))
    metrics.add(RollbackEvent(version=10, from_version=10, to_version=4))
    metrics.add(RestartEvent(role="server", index=0, cause="killed by SIGKILL"))
    metrics.add(RestartEvent(role="one of a later release", index=0))
    found = scrape(address)
    assert (found[name("version"),], found[name("updates_total"),]) == (6, 12)
    restarts = {role: found[name("restarts_total"), role] for role in ("server", "worker", "other")}
    assert restarts == {"server": 1, "worker": 0, "other": 1}
    assert found[name("rollbacks_total"),] == 1


def test_a_resumed_run_counts_its_own_work_alone(served: Any) -> None:
    metrics, address = served
    metrics.add(StartEvent(resumed_from=100))
    metrics.update(replace(STATUS, version=101, accepted=202))
    metrics.update(replace(STATUS, version=103, accepted=206))
    metrics.add(ConsensusEvent(epoch=1.0, distance=0.0, sent_bytes=5000, replicas=2))
    metrics.add(ConsensusEvent(epoch=2.0, distance=0.0, sent_bytes=5100, replicas=2))
    found = scrape(address)
    assert (found[name("updates_total"),], found[name("pushes_total"),]) == (2, 4)
    assert found[name("sent_bytes_total"),] == 4 * 56 + 100


def test_a_cluster_adds_the_totals_of_each_start_of_its_leading_host(served: Any) -> None:
    """A host that is started again counts from 0; a report that is repeated counts once."""
    metrics, address = served
    leading = RunMetrics()
    leading.begin(make_config(), FACTS)
    leading.add(StartEvent())
    leading.add(train_event(3, 16, 24))
    leading.add(RestartEvent(role="worker", index=0))
    leading.update(replace(STATUS, version=3, accepted=6))
    for _ in range(2):
        metrics.show(replace(STATUS, version=3, accepted=6))
        metrics.add_totals(0, leading.totals())
    leading.add(EvaluationEvent(version=3, loss=0.5))
    metrics.add_totals(0, leading.totals())
    metrics.count_restart("host")
    metrics.add_totals(1, {"counts": {"images": 8, "rollbacks": 1}, "restarts": {"worker": 1}})
    found = scrape(address)
    expected = {"images": 48, "evaluations": 1, "rollbacks": 1, "updates": 3, "pushes": 6, "sent_bytes": 6 * 56}
    assert {key: found[name(f"{key}_total"),] for key in expected} == expected
    assert (found[name("restarts_total"), "worker"], found[name("restarts_total"), "host"]) == (2, 1)
    assert found[name("version"),] == 3


def test_the_bytes_of_a_push_are_those_of_the_stages_exchange() -> None:
    """In all-reduce each of four workers sends 6/4 of the parameters and buffers per step."""
    metrics = RunMetrics()
    metrics.begin(make_config(exchange="strategy-switch", alpha=0.5), replace(FACTS, num_workers=4))
    metrics.add(StartEvent())
    stage: dict[str, Any] = {"protocol": "bsp", "epoch": 0.0, "seconds": 0.0, "reason": "a test"}
    for version, exchange in enumerate(("all-reduce", "parameter-server"), 1):
        metrics.add(StageEvent(version=version, stage=version, exchange=exchange, **stage))
        metrics.update(replace(STATUS, version=version, accepted=4 * version))
    assert metrics.totals()["counts"]["sent_bytes"] == 4 * 1.5 * 56 + 4 * 56


@pytest.mark.parametrize(("stage", "vectors"), [(0, 1.5), (1, 1)])
def test_a_resume_sends_the_bytes_of_its_stage(stage: int, vectors: float, tmp_path: Path) -> None:
    """The log of the resumed run names no stage, because it had begun before."""
    config = make_config(output=tmp_path, exchange="strategy-switch", alpha=0.5, steps=20, batch_size=10)
    root = tmp_path / CHECKPOINTS
    state = RunState(2, 8, 48, 1, 0.5, None, False, dict.fromkeys(range(4), 2), 1.0, 1, 10, 4, "", stage=stage)
    write_model(folder_of(root, 2), 2, np.zeros(14, np.float32), np.zeros(10, np.float32), 1)
    write_state(folder_of(root, 2), state)
    metrics = RunMetrics()
    address = f"ipc://{tmp_path}/server"
    work = WorkFolder(Folders.from_home(tmp_path))
    secret = Secret("the token of this test")
    supervisor = Supervisor(
        config, replace(FACTS, num_workers=4), Options(silent=True), [address], secret, work, [LEADER], metrics=metrics
    )
    supervisor.close("ends")
    metrics.add(StartEvent(resumed_from=2))
    for version in (2, 3):
        metrics.update(replace(STATUS, version=version, accepted=4 * version))
    assert metrics.totals()["counts"]["sent_bytes"] == 4 * vectors * 56


def test_a_push_of_several_mini_batches_is_one_push() -> None:
    """The status counts the mini-batches of downpour's pushes."""
    metrics = RunMetrics()
    with serve_metrics(metrics, ENDPOINT) as address:
        metrics.begin(make_config(protocol="downpour", push_every=5), FACTS)
        metrics.add(StartEvent())
        metrics.update(replace(STATUS, version=4, accepted=20))
        found = scrape(address)
    assert (found[name("updates_total"),], found[name("pushes_total"),]) == (4, 4)
    assert found[name("sent_bytes_total"),] == 4 * 56


def test_the_end_is_a_state_and_then_a_closed_port() -> None:
    metrics = RunMetrics()
    with serve_metrics(metrics, ENDPOINT) as address:
        metrics.end("finished")
        found = scrape(address)
        assert [key[1] for key, value in found.items() if key[0] == name("state") and value] == ["finished"]
    with pytest.raises(urllib.error.URLError):
        scrape(address)


def test_the_address_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output has the results of a run alone."""
    with served_metrics(Options(metrics_port=ENDPOINT)) as metrics:
        assert metrics
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"metrics: http://127.0.0.1:\d+/metrics\n", err)


def test_each_metric_in_the_file_of_a_run_has_its_output(tmp_path: Path) -> None:
    """The collector reads all files of a folder, so that all metrics need the label of their run."""
    path = tmp_path / "run.prom"

    def fail() -> None:
        with served_metrics(Options(metrics_file=path)) as metrics:
            assert metrics
            metrics.begin(make_config("shards", "hdfs://n/run"), FACTS)
            metrics.update(replace(STATUS, version=3, accepted=6))
            metrics.end("failed")
            assert not path.exists()
            raise JobError("as a run that fails")

    with pytest.raises(JobError):
        fail()
    families = list(text_string_to_metric_families(path.read_text()))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["output"] for sample in samples} == {"hdfs://n/run"}
    assert [sample.labels["state"] for sample in samples if sample.name == name("state") and sample.value] == ["failed"]
    assert [sample.value for sample in samples if sample.name == name("version")] == [3]


def test_a_start_that_begins_no_run_leaves_the_file_of_the_last(tmp_path: Path) -> None:
    path = tmp_path / "run.prom"
    path.write_text("earlier\n")
    with served_metrics(Options(metrics_file=path)):
        pass
    assert path.read_text() == "earlier\n"


@pytest.mark.parametrize(("place", "words"), [("run.txt", "does not end in .prom"), ("no/run.prom", "is no folder")])
def test_a_file_that_is_not_read_is_refused(tmp_path: Path, place: str, words: str) -> None:
    with pytest.raises(UsageError, match=words), served_metrics(Options(metrics_file=tmp_path / place)):
        pass


def test_a_file_that_cannot_be_written_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    with served_metrics(Options(metrics_file=tmp_path / "folder" / "run.prom")) as metrics:
        assert metrics
        metrics.begin(make_config(), FACTS)
        (tmp_path / "folder").rmdir()
    assert capsys.readouterr().err.startswith(f"warning: --metrics-file {tmp_path}/folder/run.prom: ")


def test_a_port_in_use_is_one_line() -> None:
    with (
        serve_metrics(RunMetrics(), ENDPOINT) as address,
        pytest.raises(UsageError, match=r"cannot be bound: .*; choose another port"),
        serve_metrics(RunMetrics(), ("127.0.0.1", int(address.split(":")[2].split("/")[0]))),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("9400", ("0.0.0.0", 9400)),
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("[::1]:9400", ("::1", 9400)),
        ("node-3:80", ("node-3", 80)),
    ],
)
def test_endpoints(text: str, endpoint: tuple[str, int]) -> None:
    assert parse_endpoint(text) == endpoint


@pytest.mark.parametrize("text", ["", "x", "65536", "-1", "host:", "::1:80"])
def test_a_text_that_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--metrics-port"):
        parse_endpoint(text)
