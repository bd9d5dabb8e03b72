"""Comparisons of exchanges and protocols in virtual time: who takes part, with which rates, and what is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, append_rows, rows_of, write_shards
from tests.support.virtual_runs import QUIET, TOY
from trainer import Options
from trainer.comparison.measurements import Measurements
from trainer.exchange import EXCHANGES
from trainer.protocols import PROTOCOLS
from trainer.protocols.ssp import SSP
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.read import evaluations, read_events
from trainer.runlog.run_record import read_record
from trainer.simulate import main
from trainer.simulation.comparison.compare import compare
from trainer.simulation.comparison.contenders import parse_contenders
from trainer.simulation.options import SimulationSettings
from trainer.simulation.profiles import parse_profile

FOUR = SimulationSettings(compute="quadratic", workers=4, rows=400)
CHEAP = ["--compute", "none", "--workers", "4", "--batch-size", "8", "--steps", "2", "--no-report", "--quiet"]
VECTOR = 4 * 64  # bytes of the toy's parameters


def by_label(runs: list[Measurements]) -> dict[str, Measurements]:
    return {run.label: run for run in runs}


def test_contenders_with_one_folder_are_refused(tmp_path: Path) -> None:
    contenders = parse_contenders("ssp:+3,ssp: 3")
    with pytest.raises(UsageError, match=r"ssp:\+3 and ssp: 3 have the same folder, .*/ssp--3; leave one of them out"):
        compare(make_config(tmp_path), FOUR, contenders, QUIET)


@pytest.mark.parametrize(
    ("text", "member"),
    [
        ("asp", {"name": "asp"}),
        ("ssp:3", {"name": "ssp", "staleness_bound": 3}),
        ("dssp:2:9", {"name": "dssp", "staleness_bound": 2, "staleness_upper_bound": 9}),
        ("dssp:staleness-upper-bound=9", {"name": "dssp", "staleness_bound": 3, "staleness_upper_bound": 9}),
        ("k-bsp:4:preempt", {"name": "k-bsp", "k": 4, "cancel": "preempt", "micro_batches": 4}),
        ("all-reduce", {"name": "all-reduce", "collective": "mesh"}),
        (
            "sync-switch:0.25:keep",
            {
                "name": "sync-switch",
                "fraction": 0.25,
                "straggler": None,
                "straggler_window": 20,
                "switch_momentum": "keep",
            },
        ),
        ("d-psgd:torus:2", EXCHANGES["d-psgd"](topology="torus", every=2).to_json()),  # type: ignore[call-arg]
        ("matcha:budget=0.25", EXCHANGES["matcha"](budget=0.25).to_json()),  # type: ignore[call-arg]
    ],
)
def test_a_contender_is_written_with_its_parameters(text: str, member: dict[str, object]) -> None:
    ((label, contender),) = parse_contenders(text).items()
    assert label == text
    found = contender.protocol if member["name"] in PROTOCOLS else contender.exchange
    assert found.to_json() == member


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("nope", "--compare must be asp, bsp"),
        ("asp:1", "asp takes no parameter"),
        ("ssp:x", "--compare ssp:x: 'x' is no whole number"),
        ("sync-switch:x", "--compare sync-switch:x: 'x' is no number"),
        ("sync-switch:2", "--fraction must be"),
        ("matcha:budget=0.5:budget=0.6", "matcha takes topology and every"),
        ("n-softsync:divide-by-staleness=false", "--compare n-softsync:.*=false: 'false' must be yes or no"),
        ("strategy-switch:often", "--alpha must be auto or a number"),
        ("ssp:-1", "--staleness-bound must be"),
        (" , ", "--compare names nothing: give a list such as"),
    ],
)
def test_a_contender_that_cannot_be_is_one_line(text: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        parse_contenders(text)


def test_the_groups_hold_every_protocol_and_exchange() -> None:
    every = parse_contenders("all")
    assert [*every] == [*PROTOCOLS, *(name for name in EXCHANGES if name != "parameter-server")]
    assert {**parse_contenders("protocols"), **parse_contenders("exchanges")} == every
    assert every["strategy-switch"].exchange.params()["alpha"] is None
    toy = parse_contenders("exchanges", evaluates=False)
    assert toy["strategy-switch:0.5"].exchange.params()["alpha"] == 0.5


def test_the_parameter_server_has_the_protocol_of_the_run() -> None:
    assert parse_contenders("parameter-server", SSP(2))["parameter-server"].protocol == SSP(2)


@pytest.mark.slow
def test_a_comparison_names_who_reaches_the_loss_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config("", tmp_path / "all", **TOY | {"steps": 100, "momentum": 0.0})
    machines = SimulationSettings(compute="quadratic", workers=4, rows=400, profile=parse_profile("one-slow:8"))
    contenders = parse_contenders("bsp,asp,k-bsp:3")
    runs = by_label(compare(config, machines, contenders, QUIET))
    assert (tmp_path / "all" / "comparison.png").stat().st_size > 10_000
    table = json.loads((tmp_path / "all" / "comparison.json").read_text())
    for label, run in runs.items():
        assert run.to_loss is not None
        below = run.seconds[run.loss <= table["loss"]]
        assert run.to_loss == below[0]
        assert (tmp_path / "all" / label.replace(":", "-") / "result.json").exists()
    assert runs["asp"].to_loss < runs["bsp"].to_loss  # type: ignore[operator]
    before = (tmp_path / "all" / "asp" / "result.json").stat().st_mtime_ns
    compare(config, machines, contenders, Options(quiet=True, report=False), loss=-1.0)
    assert (tmp_path / "all" / "asp" / "result.json").stat().st_mtime_ns == before, "a finished run is not repeated"
    printed = capsys.readouterr().out
    assert "k-bsp:3" in printed
    assert "s to loss -1" in printed


@pytest.mark.slow
def test_every_exchange_is_compared_on_one_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare with one slow worker: the waits for it, the bytes sent, and the distance between models."""
    argv = ["--compute", "quadratic", "--workers", "4", "--rows", "400", "--batch-size", "40", "--epochs", "4"]
    argv += ["--profile", "one-slow:4", "--no-report", "--quiet", "--output", str(tmp_path)]
    assert main([*argv, "--servers", "2", "--compare", "asp,exchanges"]) == 0
    table = json.loads((tmp_path / "comparison.json").read_text())
    runs = {run["label"]: run for run in table["runs"]}
    assert [*runs] == ["asp", "all-reduce", "d-psgd", "matcha", "sync-switch", "strategy-switch:0.5"]
    # 40 steps of 4 workers. All-reduce sends 2 * 3/4 of the model per step; a ring of 4 two models per worker and round.
    assert runs["asp"]["sent_bytes"] == 160 * 2 * VECTOR
    assert runs["all-reduce"]["sent_bytes"] == 160 * 1.5 * VECTOR
    assert runs["d-psgd"]["sent_bytes"] == 160 * 2 * VECTOR
    assert runs["sync-switch"]["sent_bytes"] == 160 * 2 * VECTOR
    assert runs["strategy-switch:0.5"]["sent_bytes"] == (80 * 1.5 + 80 * 2) * VECTOR
    assert 0 < runs["matcha"]["sent_bytes"] < runs["d-psgd"]["sent_bytes"]
    assert runs["asp"]["total_s"] < runs["sync-switch"]["total_s"] < runs["all-reduce"]["total_s"]
    assert runs["all-reduce"]["total_s"] == pytest.approx(16)
    assert {label for label, run in runs.items() if run["consensus"]} == {"d-psgd", "matcha"}
    assert all(run["to_loss"] is not None for run in runs.values())
    printed = capsys.readouterr().out
    assert "consensus" in printed
    assert "accuracy" not in printed, "the toy loss has none"


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_without_a_list_is_of_all(tmp_path: Path) -> None:
    assert main([*CHEAP, "--output", str(tmp_path), "--compare"]) == 0
    runs = json.loads((tmp_path / "comparison.json").read_text())["runs"]
    assert len(runs) == len(PROTOCOLS) + len(EXCHANGES) - 1


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("compared"), [rows_of(60, 2), rows_of(50, 3, 2000)], EVAL_ROWS)


@pytest.mark.usefixtures("undrawn")
def test_the_time_to_an_accuracy_is_that_of_an_evaluation(shards: Path, tmp_path: Path) -> None:
    argv = ["--shards", str(shards), "--model", "logistic", "--batch-size", "22", "--epochs", "3", "--quiet"]
    argv += ["--no-report", "--compare", "asp,all-reduce,d-psgd", "--workers", "3", "--output", str(tmp_path)]
    assert main(argv) == 0
    table = json.loads((tmp_path / "comparison.json").read_text())
    evaluated = {
        run["label"]: evaluations(read_events(tmp_path / run["label"] / "metrics.jsonl")) for run in table["runs"]
    }
    assert table["accuracy"] == min(max(map(accuracy_of, events)) for events in evaluated.values())
    for run in table["runs"]:
        reached = [event for event in evaluated[run["label"]] if accuracy_of(event) >= table["accuracy"]]
        assert run["to_accuracy"] == reached[0].seconds
        assert run["final_accuracy"] == evaluated[run["label"]][-1].accuracy
    assert main([*argv, "--accuracy", "1"]) == 0
    table = json.loads((tmp_path / "comparison.json").read_text())
    assert [run["to_accuracy"] for run in table["runs"]] == [None] * 3


def accuracy_of(event: EvaluationEvent) -> float:
    return event.accuracy if event.accuracy is not None else np.nan


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("alone", [["--protocol", "bsp"], ["--exchange", "all-reduce"], ["--exchange", "d-psgd"]])
def test_a_contender_has_the_rate_that_it_has_alone(tmp_path: Path, alone: list[str]) -> None:
    """Or the one that was given, for all of them."""

    def optimisers(*argv: str) -> dict[str, dict[str, float]]:
        folder = tmp_path / "-".join(argv)
        assert main([*CHEAP, *argv, "--output", str(folder)]) == 0
        return {
            path.parent.name: json.loads(path.read_text())["config"]["optimiser"]
            for path in folder.glob("**/config.json")
        }

    compared = optimisers("--compare", f"asp,{alone[1]}")
    (own,) = optimisers(*alone).values()
    assert compared[alone[1]] == own != compared["asp"]
    rates = optimisers("--compare", f"asp,{alone[1]}", "--learning-rate", "0.5").values()
    assert [rate["learning_rate"] for rate in rates] == [0.5, 0.5]


@pytest.mark.usefixtures("undrawn")
def test_without_gradients_no_loss_is_compared(tmp_path: Path) -> None:
    config = make_config("", tmp_path / "all", **TOY)
    machines = SimulationSettings(compute="none", workers=4, rows=400)
    runs = compare(config, machines, parse_contenders("asp,bsp"), QUIET)
    assert [(len(run.loss), run.to_loss, run.final_loss) for run in runs] == [(0, None, None)] * 2
    assert json.loads((tmp_path / "all" / "comparison.json").read_text())["loss"] is None


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--exchange", "all-reduce", "--compare", "asp"], "leave out --exchange all-reduce"),
        (["--protocol", "ssp", "--staleness-bound", "9", "--compare", "asp,ssp"], "leave out --protocol ssp"),
        (["--compare", "asp,strategy-switch"], "--alpha auto reads the loss of evaluations, --compute none has none"),
        (["--compare", "asp,d-psgd:graph0"], "graph0"),
        (["--compare", "asp,k-bsp:9"], "--k 9 exceeds the number of workers"),
        (["--compare", "asp", "--accuracy", "80"], "--accuracy: must be a share more than 0 .* got 80"),
        (["--accuracy", "0.5"], "--accuracy 0.5 is the target accuracy of --compare"),
        (
            ["--compare", "asp", "--accuracy", "nan"],
            "--accuracy: must be a share more than 0 and at most 1, such as 0.9, got nan",
        ),
    ],
)
def test_a_comparison_that_cannot_be_leaves_nothing(tmp_path: Path, flags: list[str], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        main([*CHEAP, "--output", str(tmp_path / "all"), *flags])
    assert not (tmp_path / "all").exists()


def test_a_comparison_changes_the_workers_of_all_or_of_none(tmp_path: Path) -> None:
    config = make_config("", tmp_path / "all", **TOY | {"steps": 5, "momentum": 0.0})
    machines = SimulationSettings(compute="quadratic", workers=4, rows=400)
    contenders = parse_contenders("bsp,d-psgd:torus")
    compare(config, machines, contenders, QUIET)
    before = (tmp_path / "all" / "bsp" / "config.json").read_bytes()
    longer = replace(config, run=replace(config.run, steps=9))
    with pytest.raises(UsageError, match="topology torus needs rows and columns of 2 or more workers"):
        compare(longer, replace(machines, workers=2), contenders, replace(QUIET, resume=True))
    assert (tmp_path / "all" / "bsp" / "config.json").read_bytes() == before


@pytest.mark.usefixtures("undrawn")
def test_contenders_have_the_same_rows_of_a_set_that_grows(tmp_path: Path) -> None:
    """Add a contender after the set has grown: it has the rows of the one that is finished, which is not trained again."""
    shards = write_shards(tmp_path / "set", [rows_of(30, 2), rows_of(30, 3, 100)], EVAL_ROWS)
    append_rows(shards, [rows_of(5, 4, 500), rows_of(5, 5, 600)])
    config = make_config(str(shards), tmp_path / "all", model="logistic", batch_size=20, epochs=1)
    compare(config, SimulationSettings(), parse_contenders("asp"), QUIET)
    before = (tmp_path / "all" / "asp" / "result.json").read_bytes()
    append_rows(shards, [rows_of(7, 6, 700), rows_of(7, 7, 800)])
    compare(config, SimulationSettings(), parse_contenders("bsp,asp"), QUIET)
    assert (tmp_path / "all" / "asp" / "result.json").read_bytes() == before
    records = [read_record(tmp_path / "all" / label) for label in ("asp", "bsp")]
    assert [record.rows for record in records] == [70, 70]
    assert records[0].config.data.generation == records[1].config.data.generation
