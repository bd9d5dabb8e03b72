"""How far a study is, and when it will end."""

from __future__ import annotations

from pathlib import Path

from tests.support.made_up_study import make_plan
from trainer.run_files import METRICS
from trainer.runlog.events import log_event
from trainer.study.run.progress import RunProgress, cost_class, duration, fraction_of_run, progress_line, remaining_s


def test_the_end_is_told_by_what_runs_of_a_kind_took() -> None:
    plan = make_plan(models={"cnn": {"model": "cnn"}, "big": {"model": "resnet20"}}, seeds=1)
    runs = list(plan.runs())
    assert {cost_class(run) for run in runs} == {"made-up/cnn", "made-up/big"}
    took = {"made-up/cnn": [10.0, 20.0], "made-up/big": [100.0]}
    assert remaining_s(runs, took, 2, {}) == (2 * 15 + 2 * 100) / 2
    assert remaining_s(runs, {"made-up/cnn": [10.0]}, 1, {}) == 40  # of the others nothing is known
    assert remaining_s(runs, {}, 1, {}) == 0
    assert [duration(s) for s in (7300, 119, 20)] == ["about 2 h 02 min", "about 2 min", "less than a minute"]


def test_running_runs_shorten_the_estimate_and_give_the_first_one() -> None:
    runs = list(make_plan(seeds=2).runs())
    half, begun = RunProgress(30, 0.5), RunProgress(3, 0.0)
    assert remaining_s(runs, {"made-up/cnn": [100.0]}, 1, {runs[0]: half}) == 350
    assert remaining_s(runs, {}, 2, {runs[0]: half, runs[1]: begun}) == (30 + 3 * 60) / 2
    assert remaining_s(runs, {}, 2, {runs[0]: begun}) == 0  # nobody knows


def test_the_part_of_a_run_that_is_done_is_that_of_its_last_start(tmp_path: Path) -> None:
    assert fraction_of_run(tmp_path) == 0
    log_event(tmp_path, "start", plan={"updates": 400}, resumed_from=None)
    assert fraction_of_run(tmp_path) == 0
    for version in (100, 300):
        measured = dict.fromkeys(("seconds", "epoch", "loss", "accuracy", "learning_rate", "images_per_s"), 0.0)
        log_event(tmp_path, "train", version=version, workers=[], **measured)
    assert fraction_of_run(tmp_path) == 0.75
    log_event(tmp_path, "rollback", from_version=300, to_version=100)
    assert fraction_of_run(tmp_path) == 0.25
    with open(tmp_path / METRICS, "a") as file:
        file.write('{"event": "train", "versi')  # what is being written
    assert fraction_of_run(tmp_path) == 0.25


def test_while_no_run_ends_it_is_said_how_far_they_are() -> None:
    def line(*parts: float, left: float = 0) -> str:
        return progress_line([RunProgress(60, part) for part in parts], left)

    assert line(0) == "1 run under way, 0% done"
    assert line(0.214, left=600) == "1 run under way, 21% done; about 10 min left"
    assert line(0.5, 0.2, 0.3, left=20) == "3 runs under way, 20% to 50% done; less than a minute left"
    assert line(0.212, 0.214) == "2 runs under way, 21% done"
