"""A run that has learned nothing says so, with the next step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.configs import make_config
from trainer.evaluation.guessing import has_learned, nothing_learned
from trainer.options import Options
from trainer.runlog.result import Result
from trainer.simulate import SimulationSettings, simulate


@pytest.mark.parametrize(
    ("loss", "noise", "learned"),
    [(2.2, 0.01, True), (2.29, 0.01, False), (2.31, 0.01, False), (2.2, 0.1, False), (float("nan"), 0.0, False)],
)
def test_a_loss_must_be_below_that_of_guessing_by_more_than_its_noise(loss: float, noise: float, learned: bool) -> None:
    assert has_learned(loss, noise, guessing=2.303) is learned


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ({"model": "cnn", "learning_rate": 0.5}, "--learning-rate is 0.5: leave it out, and it is 0.01"),
        ({"model": "resnet20", "learning_rate": 0.1}, "--learning-rate is 0.1: leave it out, and it is 0.025"),
        ({"model": "cnn", "momentum_rule": "heavy-ball"}, "--momentum-rule is heavy-ball"),
        ({"model": "cnn", "protocol": "bsp"}, "give a lower --learning-rate than 0.02, or more epochs"),
    ],
)
def test_the_next_step_is_what_the_run_was_told_otherwise(values: Any, step: str) -> None:
    said = nothing_learned(make_config(**values), 2.31, 0.01, 2.303)
    assert said.startswith("nothing was learned: the loss on training rows is 2.310 (give or take 0.020)")
    assert step in said


def run(shards: Path, output: Path, **values: Any) -> Result:
    config = make_config(shards, output, protocol="bsp", batch_size=30, **({"epochs": 2} | values))
    return simulate(config, SimulationSettings(), Options())


def test_a_run_at_chance_says_so_in_terminal_report_and_result(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run(shards, tmp_path / "run", model="logistic", learning_rate=1e-9)
    said = capsys.readouterr()
    assert said.err.count("nothing was learned: the loss on training rows is 2.303") == 1
    assert "give a lower --learning-rate than 1e-09, or more epochs" in said.err
    assert "the loss is no lower than the loss of guessing" in said.out
    assert json.loads((tmp_path / "run/result.json").read_text())["learned"] is done.learned is False
    assert "Nothing was learned" in (tmp_path / "run/report.html").read_text()
    assert [event.kind for event in done.events()].count("warning") == 1


def test_a_run_that_learns_says_nothing_of_it(shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(shards, tmp_path / "run", model="logistic")
    assert done.learned is True
    assert "nothing was learned" not in capsys.readouterr().err
    assert "Nothing was learned" not in (tmp_path / "run/report.html").read_text()


def test_no_warning_comes_before_the_end_of_the_first_epoch(shards: Path, tmp_path: Path) -> None:
    for name, values in (
        ("short", {"model": "logistic", "learning_rate": 1e-9, "epochs": None, "steps": 3}),
        ("squares", {"model": "linear", "learning_rate": 1e-9}),
    ):
        done = run(shards, tmp_path / name, **values)
        assert "warning" not in {event.kind for event in done.events()}
