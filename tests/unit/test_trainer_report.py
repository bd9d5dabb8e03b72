"""What people see of a run: the report parsed as a browser would, the progress line, the curves for TensorBoard."""

from __future__ import annotations

import csv
import fcntl
import html
import io
import json
import math
import os
import re
import struct
import sys
import termios
from base64 import b64decode
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateNotFound

from pipeline.core import console, extras
from pipeline.core.errors import DataError, UsageError
from pipeline.core.reporting.plots import MANY, canvas, style
from tests.support.made_up_run import MadeUpRun, eventful_run
from tests.support.tiers import only
from tests.unit.test_report import HOSTILE, Page
from trainer.config import Config, Data, RunFacts, RunSpec
from trainer.lifecycle.ends import try_report
from trainer.plan import describe_plan, plan
from trainer.report import figures, history, page
from trainer.report.findings import describe_classes, describe_neighbourhoods
from trainer.report.page import write_report
from trainer.report.progress import ProgressLine, line
from trainer.report.settings import flags_in_words, plan_in_words
from trainer.report.tensorboard import TensorBoardWriter
from trainer.report.terminal import duration
from trainer.runlog.kinds.base import LogEvent
from trainer.runlog.kinds.evaluation import EvaluationEvent
from trainer.runlog.kinds.run import StartEvent, WarningEvent
from trainer.runlog.kinds.training import EpochEvent, TrainEvent
from trainer.runlog.read import read_events, surviving_events
from trainer.transport.status import RunStatus

STATUS = RunStatus(
    ready=True,
    finished=False,
    diverged=None,
    accepted=50,
    total=500,
    epochs=5.0,
    epoch=0.5,
    loss=1.25,
    accuracy=0.375,
    images_per_s=1234.4,
    staleness_mean=10.93,
    alive=11,
    num_workers=12,
)


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = eventful_run().save(tmp_path_factory.mktemp("eventful"))
    write_report(folder)
    return folder


def page_of(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


def rows_of(page: str) -> dict[str, list[str]]:
    """The texts of every table row's cells, by the first one."""
    rows = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]
    texts = [[html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in row] for row in rows]
    return {name: rest for name, *rest in texts}


# --- the report -------------------------------------------------------------------------------------------------------


def test_the_report_of_a_finished_run_has_every_section(eventful: Path) -> None:
    page = Page((eventful / "report.html").read_text(encoding="utf-8"))
    headings = ("Learning", "Staleness", "Speed", "Workers", "Incidents", "Settings", "Origin")
    assert [text for text in page.text.splitlines() if text in headings] == list(headings)
    assert "Training: resnet20 by ASP, 12 workers" in page.text
    assert "Finished at epoch 5.00" in page.text
    assert "Rollbacks: 1, which undid 216 updates" in page.text  # 12 workers x 30 steps x 0.6 epochs
    assert "worker 4 restarted" in page.text
    assert "3.00rolled back from version 1,296 to 1,080" in page.text  # where training went on
    assert "could not be pruned: Permission denied" in page.text
    assert "hdfs://name/shards" in page.text
    assert re.search(r"worker batches\s*12 x 10\s*drops\s*none", page.text)
    assert len(page.sources()) == 7


def test_the_report_opens_offline_and_runs_no_script(eventful: Path) -> None:
    page = Page((eventful / "report.html").read_text(encoding="utf-8"))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "iframe", "object", "a", "base"}
    for source, alt in zip(page.sources(), page.alts(), strict=True):
        kind, data = source.split(";base64,")
        assert kind == "data:image/svg+xml"
        assert ElementTree.fromstring(b64decode(data)).tag.endswith("svg")
        assert alt


def test_the_headline_is_what_counting_the_surviving_pushes_gives(eventful: Path) -> None:
    with open(eventful / "pushes.csv", newline="") as file:
        rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    rows = [row for row in rows if row["generation"] == 2 or row["version"] <= 1080]
    staleness = [row["staleness"] for row in rows]
    table = rows_of((eventful / "report.html").read_text(encoding="utf-8"))
    assert table["updates"][0] == f"{len(rows):,}" == "1,800"
    assert table["staleness, mean"][0] == f"{sum(staleness) / len(rows):.3g}"
    assert table["staleness, most"][0] == f"{max(staleness):.0f}"
    assert table["restarts"] == ["2", "1 worker, 1 server, 0 evaluator"]
    assert table["rollbacks"][0] == "1"
    assert table["final accuracy"][0] == f"{100 * (0.1 + 0.8 * (1 - np.exp(-3))):.2f}%"
    mine = [row for row in rows if row["worker"] == 7]
    accepted, rejected, images, _, mean, most, loss, restarts = table["7"]
    assert (accepted, rejected, images, restarts) == (f"{len(mine)}", "0", f"{10 * len(mine)}", "0")
    assert (mean, most) == (
        f"{np.mean([r['staleness'] for r in mine]):.2f}",
        f"{max(r['staleness'] for r in mine):.0f}",
    )
    assert loss == f"{np.mean([row['loss'] for row in mine]):.4f}"
    assert table["4"][-1] == "1"


def test_a_run_that_has_only_begun_is_reported(tmp_path: Path) -> None:
    page = page_of(MadeUpRun().save(tmp_path))
    assert "Unfinished" in page.text
    assert "No checkpoint has been evaluated" in page.text
    assert page.sources() == []
    assert "resnet20 by ASP, 12 workers" in page.text


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("num_workers", "pictures"), only([(1, 4)], [(1, 4), (2, 7), (100, 7)]))
def test_any_number_of_workers_is_reported(tmp_path: Path, num_workers: int, pictures: int) -> None:
    run = MadeUpRun(num_workers=num_workers, slow={}, epochs=2)
    run.train(1)
    run.end_epoch()
    page = page_of(run.save(tmp_path))
    assert len(page.sources()) == pictures
    assert ("Table of 100 workers" in page.text) == (num_workers == 100)
    assert sum(len(source) for source in page.sources()) < 2_000_000


def test_a_run_without_evaluations_shows_how_training_went(tmp_path: Path) -> None:
    run = MadeUpRun(num_workers=1, epochs=2)
    run.train(1)
    run.end_epoch(evaluate=False)
    page = page_of(run.save(tmp_path))
    assert "No checkpoint has been evaluated" in page.text
    assert "Loss and accuracy over epochs" in page.alts()
    assert "no evaluation yet" in page.text


def test_a_run_without_accuracies_has_no_empty_panel_for_them(tmp_path: Path) -> None:
    run = MadeUpRun(num_workers=1, epochs=2)
    run.train(1)
    for event in run.events:
        if "accuracy" in event:
            event["accuracy"] = None
    page = page_of(run.save(tmp_path))
    drawn = dict(zip(page.alts(), page.sources(), strict=True))
    assert "Loss over epochs" in drawn
    picture = b64decode(drawn["Loss over seconds"].split(",")[1]).decode()
    assert "training time in seconds" in picture
    assert "accuracy" not in picture


@pytest.mark.usefixtures("undrawn")
def test_a_cut_log_without_pushes_is_reported(tmp_path: Path) -> None:
    run = eventful_run(epochs=2)
    run.rows = []
    folder = run.save(tmp_path)
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole[:-40])
    page = page_of(folder)
    assert "Unfinished" in page.text  # the torn line was the end event
    assert "Learning" in page.text
    assert "seconds per step" not in page.text


@pytest.mark.usefixtures("undrawn")
def test_a_second_of_refused_gradients_alone_loses_no_loss(tmp_path: Path) -> None:
    run = eventful_run(epochs=2)
    trains = [event for event in run.events if event["event"] == "train"]
    trains[3] |= dict.fromkeys(("loss", "accuracy", "staleness_mean", "staleness_max"))
    assert "not a finite number" not in page_of(run.save(tmp_path)).text


@pytest.mark.slow
@pytest.mark.parametrize("bad", only([None], [None, float("inf")]))
def test_a_loss_that_is_no_number_is_named_and_the_rest_is_drawn(tmp_path: Path, bad: float | None) -> None:
    run = eventful_run(epochs=2)
    trains = [event for event in run.events if event["event"] == "train"]
    trains[len(trains) // 2 - 1]["loss"] = 1e5  # on its way out
    for event in trains[len(trains) // 2 :]:
        event["loss"] = bad
    for event in run.events:
        if event["event"] == "eval":
            event["loss"] = event["train_loss"] = bad
    page = page_of(run.save(tmp_path))
    first = trains[len(trains) // 2]
    assert f"not a finite number from epoch {first['epoch']:.2f} (version {first['version']:,})" in page.text
    drawn = dict(zip(page.alts(), page.sources(), strict=True))
    curves = b64decode(drawn["Loss and accuracy over seconds"].split(",")[1]).decode()
    assert "loss (log scale)" in curves
    assert "10,000" in curves
    assert "mathdefault" not in curves


@pytest.mark.usefixtures("undrawn")
def test_workers_may_have_no_pushes_or_rejected_ones(tmp_path: Path) -> None:
    run = MadeUpRun(num_workers=3, epochs=1)
    run.train(0.8, idle=(1,))
    run.rows += [f"1,{run.version},2,{30 + late},50,9,10,nan,0,{run.seconds:.3f},0" for late in range(5)]
    table = rows_of(write_report(run.save(tmp_path)).read_text(encoding="utf-8"))
    assert table["rejected gradients"][0] == "5"
    assert table["1"] == ["0", "0", "-", "-", "-", "-", "-", "0"]
    assert table["2"][1] == "5"


@pytest.mark.usefixtures("undrawn")
def test_synchronous_updates_have_no_staleness_to_draw(tmp_path: Path) -> None:
    run = MadeUpRun(num_workers=4, epochs=1, changes={"protocol": "bsp"})
    run.train(1)
    run.rows = [re.sub(r"^(\d+),(\d+),(\d+),(\d+),\d+,\d+,", r"\1,\2,\3,\4,0,0,", row) for row in run.rows]
    page = page_of(run.save(tmp_path))
    assert "Every gradient was applied to the version that it was computed from" in page.text
    assert not any("Staleness" in alt for alt in page.alts())


@pytest.mark.slow
def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    run = eventful_run(epochs=2)
    for event in run.events:
        if event["event"] == "start":
            event["config"]["model"]["name"] = HOSTILE
            event["plan"][HOSTILE] = event["versions"][HOSTILE] = HOSTILE
        elif event["event"] in ("restart", "warning"):
            event["cause" if event["event"] == "restart" else "message"] = HOSTILE
    page = page_of(run.save(tmp_path))
    assert "script" not in {tag for tag, _ in page.tags}
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert all(source.startswith("data:image/") for source in page.sources())
    assert page.text.count(HOSTILE) >= 8


def test_a_plan_is_shown_in_words_if_this_version_wrote_it() -> None:
    planned = plan(Config(Data("shards"), RunSpec("out", epochs=2)), RunFacts(3, 600, 1000, 0), cores=4)
    words = plan_in_words(json.loads(json.dumps(asdict(planned))))
    assert words["run"].startswith("2 epochs, ")
    assert words == dict(describe_plan(planned))
    assert plan_in_words({"model": "cnn"}) == plan_in_words(None) == {}


def test_every_setting_has_its_flag_and_meaning() -> None:
    config = Config(Data("shards"), RunSpec("out", epochs=2)).to_json()
    rows = {row.flag: row for row in flags_in_words(config, {"profile": "constant"})}
    assert rows["--batch-size"].value == "128"
    assert all(row.meaning for row in rows.values())
    assert flags_in_words({"model": {"name": "unknown", "odd": 1}}, {})[1] == ("--odd", "1", "")


@pytest.mark.full
def test_a_report_is_replaced_whole_and_repeats_its_bytes(tmp_path: Path) -> None:
    run = MadeUpRun(num_workers=2, epochs=1)
    run.train(0.5)
    folder = run.save(tmp_path)
    first = write_report(folder).read_bytes()
    (folder / "report.html").write_bytes(b"old" * len(first))
    assert write_report(folder).read_bytes() == first
    assert sorted(path.name for path in folder.iterdir()) == ["metrics.jsonl", "pushes.csv", "report.html"]


def test_a_run_that_ends_during_its_report_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = MadeUpRun(num_workers=2, epochs=1)
    run.train(0.5)
    folder = run.save(tmp_path)
    last_kinds: list[str] = []

    def draw(events: list[LogEvent], pushes: pd.DataFrame) -> str:
        if not last_kinds:  # the run ends, and writes its own report
            run.finish()
            run.save(tmp_path)
            (folder / "result.json").write_text("{}")
            (folder / "report.html").write_text("end")
        last_kinds.append(events[-1].kind)
        return last_kinds[-1]

    monkeypatch.setattr("trainer.report.page.render", draw)
    assert write_report(folder).read_text() == "end"
    assert last_kinds == ["train", "end"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_report_that_fails_is_a_warning(
    eventful: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A template that is not found is an OSError, which as an error of the run would count as a lost host."""

    def missing(*_: str) -> None:
        raise TemplateNotFound("report.html")

    monkeypatch.setattr("trainer.report.page.template", missing)
    assert try_report(eventful) is None
    [line] = caplog.messages
    assert re.fullmatch(r"warning: the run has ended .*its report failed: report\.html; the same command .*", line)


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl contains no run") as refusal:
        write_report(tmp_path)
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


# --- the arrays behind it ---------------------------------------------------------------------------------------------


def ticks_of(counts: list[list[int]], names: list[str]) -> list[list[str]]:
    """Return the labels of the grid's columns and rows."""
    with style():
        figure = figures.confusion(np.array(counts), names)
        figure.draw_without_rendering()
    axes = figure.axes[0]
    return [[tick.get_text() for tick in axis.get_ticklabels()] for axis in (axes.xaxis, axes.yaxis)]


def test_letters_that_the_font_lacks_bring_no_warning(recwarn: pytest.WarningsRecorder) -> None:
    """Names of runs and folders may have any."""
    with style():
        figure, (ax,) = canvas(1.0)
        ax.set_title("run \u732b")
        figure.draw_without_rendering()
    assert not recwarn.list


def test_the_final_classes_are_shown_by_their_names() -> None:
    counts = [[3, 1], [0, 4]]
    summary: dict[str, Any] = {
        "class_accuracy": [0.75, 1.0],
        "weakest_accuracy": 0.75,
        "class_names": ["cat", "a $1 dog"],
    }
    assert "least for cat (75.00%), most for a $1 dog (100.00%)" in describe_classes(summary)
    assert "least for 0 (75.00%), most for 1 (100.00%)" in describe_classes(summary | {"class_names": []})
    assert ticks_of(counts, ["cat", "a $1 dog"]) == [["cat", "a $1 dog"]] * 2
    assert ticks_of(counts, ["cat"])[0] == ticks_of(counts, [])[0], "numbers, because a class has no name"


def test_the_weakest_neighbourhoods_are_named_with_their_rows() -> None:
    summary: dict[str, Any] = {
        "neighbourhood_accuracy": [0.75, None, 0.5],
        "neighbourhood_rows": [4, 0, 1200],
        "weakest_neighbourhoods_accuracy": 0.5,
    }
    assert describe_neighbourhoods(summary) == (
        "Accuracy on the weakest tenth of the neighbourhoods: 50.00%, lowest in neighbourhood 2 (50.00% of 1,200 rows)."
    )
    assert describe_neighbourhoods(dict.fromkeys(summary)) == "", "a set without a model"
    of_few = {"neighbourhood_accuracy": [0.75, 0.0, 0.5], "neighbourhood_rows": [10, 1, 9]}
    assert "lowest in neighbourhood 0 (75.00% of 10 rows)" in describe_neighbourhoods(summary | of_few)
    none_has_ten = {"neighbourhood_accuracy": [0.75, 0.0, 0.5], "neighbourhood_rows": [9, 1, 9]}
    assert "lowest in neighbourhood 1 (0.00% of 1 row)" in describe_neighbourhoods(summary | none_has_ten)


@pytest.mark.usefixtures("undrawn")
def test_weak_classes_and_neighbourhoods_are_in_a_table(tmp_path: Path) -> None:
    run = MadeUpRun(num_workers=2, epochs=1)
    run.train(1)
    counts = {"class_rows": [40, 0, 4], "class_correct": [30, 0, 1], "class_names": ["cat", "dog", "<b>"]}
    counts |= {"neighbourhood_rows": [50] * 22, "neighbourhood_correct": list(range(50, 28, -1))}
    evaluation = {"event": "eval", "version": run.version, "epoch": 1.0, "seconds": run.seconds, "accuracy": 0.5}
    run.events.append(evaluation | counts | {"loss": 1.0})
    text = write_report(run.save(tmp_path)).read_text(encoding="utf-8")
    table = rows_of(text)
    assert list(table).index("<b>") < list(table).index("cat")
    assert (table["<b>"], table["cat"]) == (["4", "25.00%"], ["40", "75.00%"])
    assert "dog" not in table
    assert (table["21"], table["2"]) == (["50", "58.00%"], ["50", "96.00%"])
    assert "2 neighbourhoods of higher accuracy are left out." in text
    assert "classes of higher accuracy" not in text


@pytest.mark.usefixtures("undrawn")
def test_mixtures_own_models_and_many_incidents_have_sections(tmp_path: Path) -> None:
    """Render the sections that only some runs have; the second shares come after the end, so nothing is drawn by them."""
    run = MadeUpRun(num_workers=2, epochs=2)
    start = run.events[0]
    start["plan"] |= asdict(plan(Config(Data("shards"), RunSpec("out", epochs=2)), RunFacts(2, 600, 1000, 0), cores=4))
    start["plan"] |= {"worker_batches": [10, 10]}
    start["config"]["data"] |= {"shards": "one\nother", "mix": "0.75,0.25;9000:0.5,0.5"}
    run.train(2)
    for epoch in (1, 2):
        run.log("consensus", epoch=epoch, seconds=run.seconds, distance=0.5, sent_bytes=3_000_000, replicas=2)
    for _ in range(MANY + 1):
        run.log("warning", message="a disk is slow")
    counts = {
        "class_rows": [4, 4],
        "class_correct": [3, 4],
        "confusion": [[3, 1], [0, 4]],
        "class_names": ["cat", "dog"],
    }
    evaluation = {"event": "eval", "version": run.version, "epoch": 2.0, "seconds": run.seconds, "accuracy": 0.875}
    run.events.append(evaluation | counts | {"loss": 1.0})
    run.finish()
    text = write_report(run.save(tmp_path)).read_text(encoding="utf-8")
    page = Page(text)
    assert rows_of(text)["one"] == ["9,000", "50.00%", "0", "-"]
    assert "75.00%" in page.text
    assert "Distance of the models" in page.text
    assert "are 0.5 from their mean" in page.text
    assert f"Table of {MANY + 1} incidents" in page.text
    assert "2 epochs, " in page.text, "the plan in words"
    assert any(alt.startswith("Share of the rows of each class") for alt in page.alts())
    assert any(alt.startswith("Distance of the models") for alt in page.alts())


@pytest.mark.parametrize("axis", ["seconds", "epoch"])
def test_no_curve_runs_backwards_after_a_rollback(eventful: Path, axis: str) -> None:
    live = surviving_events(read_events(eventful / "metrics.jsonl"))
    drawn = history.curves(live, axis, "loss")
    assert [curve.name for curve in drawn] == list(figures.CURVE_LOOKS)
    for curve in drawn:
        assert (np.diff(curve.x) > 0).all()
    assert [len(curve.x) for curve in drawn[1:]] == [5, 5, 5]


def test_a_rollback_is_marked_where_training_went_on(eventful: Path) -> None:
    happened = history.incidents(surviving_events(read_events(eventful / "metrics.jsonl")))
    assert [mark.kind for mark in history.marks(happened, "epoch")] == ["restart", "restart", "rollback"]
    assert [mark.x for mark in history.marks(happened, "epoch")] == pytest.approx([1.4, 3.0, 3.0], abs=0.05)


def test_clocks_stand_still_while_a_worker_is_away() -> None:
    logged = [
        [{"index": 0, "clock": 3}, {"index": 2, "clock": 1}],
        [{"index": 0, "clock": 5}],
        [{"index": 2, "clock": 2}, {"index": 1, "clock": 1}],
    ]
    trains: Any = [SimpleNamespace(workers=workers) for workers in logged]
    assert history.clock_table(trains, 3, [3, 3, 3]).tolist() == [[3, 0, 1], [5, 0, 1], [5, 1, 2]]


def test_each_start_is_told_with_its_own_host() -> None:
    first = StartEvent(time=1767225600.0, made={"host": "alpha"})
    second = StartEvent(time=1767312000.0, made={"host": "beta"}, resumed_from=7)
    begun = "Started 2026-01-01 00:00 UTC on host alpha."
    assert page.start_sentences([first]) == begun
    assert page.start_sentences([first, second]) == f"{begun} Resumed 2026-01-02 00:00 UTC on host beta."


def test_workers_that_a_resume_changes_lead_over_nobody() -> None:
    """Begin with two workers, add a third one, go on with the first two, and add it again."""
    nothing: Any = {
        "version": 1,
        "loss": None,
        "accuracy": None,
        "epoch": 1.0,
        "learning_rate": None,
        "images_per_s": None,
    }
    live: list[Any] = []
    for workers, parts in (
        (2, [[3, 4], [6, 8]]),
        (3, [[7, 9], [8, 10, 8]]),
        (2, [[12, 14]]),
        (3, [[13, 15], [14, 16, 14]]),
    ):
        live.append(StartEvent(plan={"num_workers": workers}))
        for clocks in parts:
            entries = [{"index": index, "clock": clock} for index, clock in enumerate(clocks)]
            live.append(TrainEvent(seconds=1.0, workers=entries, **nothing))
    trains = history.select_kind(live, TrainEvent)
    present = history.present_workers(live, 3)
    table = history.clock_table(trains, 3, [present[id(event)] for event in trains])
    nan = math.nan
    expected = [[3, 4, nan], [6, 8, nan], [7, 9, nan], [8, 10, 8], [12, 14, nan], [13, 15, nan], [14, 16, 14]]
    np.testing.assert_array_equal(table, expected)
    lines = figures.clocks(np.arange(7, dtype=np.float64), table, 2, []).axes[1].lines
    assert max(float(np.nanmax(line.get_ydata())) for line in lines) == 2, "no lead over a worker that is not there"


pushes_of_workers = st.lists(
    st.tuples(st.integers(0, 4), st.floats(0, 1e4), st.integers(1, 64), st.integers(0, 50)), max_size=200
)


def frame(rows: list[tuple[int, float, int, int]]) -> pd.DataFrame:
    kinds = {"worker": "int64", "seconds": "float64", "examples": "int64", "staleness": "int64"}
    return pd.DataFrame(rows, columns=list(kinds)).astype(kinds)


@settings(deadline=None, max_examples=50)
@given(pushes_of_workers)
def test_throughput_over_time_adds_up_to_every_workers_images(rows: list[tuple[int, float, int, int]]) -> None:
    edges, images_per_s = history.throughput_table(frame(rows), 5)
    if images_per_s.size == 0:
        assert len(rows) < 5 * history.STEPS_A_BIN
        return
    images = [sum(examples for worker, _, examples, _ in rows if worker == w) for w in range(5)]
    np.testing.assert_allclose(images_per_s @ np.diff(edges), images)


@settings(deadline=None, max_examples=50)
@given(pushes_of_workers)
def test_the_spread_of_staleness_is_numpys_of_each_worker_alone(rows: list[tuple[int, float, int, int]]) -> None:
    spread = history.staleness_spread(frame(rows), 5)
    by_worker = defaultdict(list)
    for worker, *_, staleness in rows:
        by_worker[worker].append(staleness)
    assert spread.shape == (5, 5)
    for worker in range(5):
        if by_worker[worker]:
            np.testing.assert_allclose(spread[worker], np.quantile(by_worker[worker], figures.SPREAD))
        else:
            assert np.isnan(spread[worker]).all()


@given(st.integers(0, 5000), st.integers(2, 700))
def test_points_are_left_out_evenly_and_never_at_the_ends(count: int, limit: int) -> None:
    chosen = figures.evenly(count, limit)
    assert len(chosen) == min(count, limit)
    if count > 1:
        assert (chosen[0], chosen[-1]) == (0, count - 1)
        steps = np.diff(chosen)
        assert steps.min() >= 1
        assert steps.max() - steps.min() <= 1


@given(st.dictionaries(st.integers(0, 3000), st.integers(1, 10_000), min_size=1, max_size=30))
def test_the_histogram_leaves_out_no_update_without_counting_it(counts: dict[int, int]) -> None:
    histogram = np.bincount(list(counts), weights=list(counts.values())).astype(np.int64)
    edges, bars, beyond = figures.cut_tail(histogram)
    assert len(bars) <= figures.BARS
    assert len(set(np.diff(edges).tolist())) == 1
    for low, high, bar in zip(edges, edges[1:], bars, strict=False):
        assert bar == sum(count for staleness, count in counts.items() if low <= staleness < high)
    assert beyond == sum(count for staleness, count in counts.items() if staleness >= edges[-1])
    assert beyond <= 0.005 * sum(counts.values())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 00 s"),
        (3599.6, "1 h 00 min"),
        (90061, "25 h 01 min"),
    ],
)
def test_durations_read_as_people_say_them(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


# --- the progress line ------------------------------------------------------------------------------------------------


def test_the_line_tells_what_is_known_and_dashes_what_is_not() -> None:
    assert line(STATUS) == (
        "epoch 0.50 of 5  loss 1.2500  accuracy 37.5%  1,234 images/s  staleness 10.9  workers 11/12"
    )
    assert "evaluation 61.0%" in line(replace(STATUS, eval_accuracy=0.61))
    assert "evaluation 61.0% after epoch 2" in line(replace(STATUS, eval_accuracy=0.61, eval_epoch=2.0))
    assert "evaluation loss 0.2500" in line(replace(STATUS, accuracy=None, eval_loss=0.25))
    nothing: dict[str, Any] = {"accepted": 0, "epoch": 0.0, "loss": None, "accuracy": None, "images_per_s": None}
    text = line(replace(STATUS, **nothing, staleness_mean=float("nan")))
    assert text == "epoch 0.00 of 5  loss -  accuracy -  - images/s  staleness -  workers 11/12"


def test_a_log_gets_a_line_every_ten_seconds_and_the_last_state() -> None:
    log, clock = io.StringIO(), [0.0]
    progress = ProgressLine(file=log, now=lambda: clock[0])
    for second in range(25):
        clock[0] = float(second)
        progress.update(replace(STATUS, epoch=second / 100))
    progress.message("worker 3 restarted")
    progress.close()
    progress.close()
    times = [
        re.findall(r"^[\dTZ:-]{20} \[ *([\d.]+) s\] (?:epoch ([\d.]+)|worker)", text)
        for text in log.getvalue().splitlines()
    ]
    assert times == [[("0.0", "0.00")], [("10.0", "0.10")], [("20.0", "0.20")], [("24.0", "")], [("24.0", "0.24")]]


def test_quiet_says_nothing() -> None:
    log = io.StringIO()
    progress = ProgressLine(quiet=True, file=log)
    progress.update(STATUS)
    progress.message("worker 3 restarted")
    progress.close()
    assert log.getvalue() == ""


class Stream:
    """A standard error that can only write, as one that a program redirects to its log."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass


class Console(Stream):
    """A terminal without a size, as that of a development environment."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [None, Stream(), Console()])
def test_any_object_may_stand_for_standard_error(stream: Stream | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    progress = ProgressLine()
    progress.update(STATUS)
    progress.message("worker 3 restarted")
    progress.close()
    assert stream is None or "worker 3 restarted" in stream.text


def all_of(master: int) -> str:
    """What was written to the other end of a terminal, which is closed by now."""
    chunks = []
    try:
        while chunk := os.read(master, 1 << 16):
            chunks.append(chunk)
    except OSError:  # EIO: this is how a terminal ends
        pass
    os.close(master)
    return b"".join(chunks).decode()


@pytest.mark.parametrize(("rows", "columns"), [(24, 160), (0, 0)])  # some terminals do not know their size
def test_a_terminal_gets_one_line_that_is_rewritten(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with open(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        progress = ProgressLine()
        for accepted in (50, 400, 100):  # the last after a rollback
            progress.update(replace(STATUS, accepted=accepted, epoch=accepted / 100))
        progress.message("worker 3 restarted")
        progress.update(replace(STATUS, accepted=450, epoch=4.5))
        progress.close()
    text = all_of(master)
    assert text.split("\n")[0].split("\r")[-2:] == ["worker 3 restarted", ""]
    assert text.count("\n") == 2  # the message's, and the one that leaves the last state standing
    for share in ("10%", "80%", "20%", "90%"):
        assert re.search(rf"\r *{share}", text)
    assert "epoch 4.50 of 5" in text.split("\n")[-2]


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def curves_read_back(output: Path) -> dict[str, list[tuple[int, float]]]:
    """Every curve as TensorBoard itself reads it."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = accumulators.EventAccumulator(str(output / "tensorboard"), {"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(point.step, point.value) for point in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]
    }


def test_progress_as_json_has_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal gets lines too, for it may be a collector's. Values that are not measured yet are left out."""
    log = io.StringIO()
    monkeypatch.setattr(log, "isatty", lambda: True)
    console.choose_format(console.JSON)
    try:
        progress = ProgressLine(file=log, now=lambda: 0.0)
        progress.update(replace(STATUS, version=7, eval_accuracy=None))
        progress.message("worker 3 restarted")
        progress.close()
    finally:
        console.choose_format(console.TEXT)
    first, second = map(json.loads, log.getvalue().splitlines())
    assert (first["logger"], first["fields"]["version"]) == ("sharding.training", 7)
    assert "eval_accuracy" not in first["fields"]
    assert second["message"] == "worker 3 restarted"


def test_tensorboard_reads_the_surviving_points(eventful: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    events = read_events(eventful / "metrics.jsonl")
    writer = TensorBoardWriter(tmp_path)
    for event in events:
        writer.add(event)
    writer.close()
    read = curves_read_back(tmp_path)
    live = surviving_events(events)
    for kind, key, tag in (
        ("train", "loss", "train/loss"),
        ("train", "staleness_max", "staleness/max"),
        ("epoch", "accuracy", "train/epoch_accuracy"),
        ("eval", "accuracy", "evaluation/accuracy"),
        ("eval", "train_loss", "evaluation/train_loss"),
    ):
        points = [(event.version, getattr(event, key)) for event in live if event.kind == kind]
        assert [step for step, _ in read[tag]] == [version for version, _ in points]
        np.testing.assert_allclose([value for _, value in read[tag]], [value for _, value in points], rtol=1e-6)


def test_tensorboard_goes_on_where_a_run_is_resumed(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for resumed_from, versions in ((None, (10, 20, 30)), (20, (25, 40))):
        writer = TensorBoardWriter(tmp_path)
        writer.add(StartEvent(time=1.0, resumed_from=resumed_from))
        for version in versions:
            writer.add(EpochEvent(time=1.0, version=version, loss=1.0, accuracy=version / 100))
        writer.close()
    points = curves_read_back(tmp_path)["train/epoch_accuracy"]
    assert points == [(version, pytest.approx(version / 100)) for version in (10, 20, 25, 40)]


def test_tensorboard_skips_what_was_not_measured(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    writer = TensorBoardWriter(tmp_path)
    writer.add(EvaluationEvent(time=1.0, version=7, loss=None, accuracy=0.5))
    writer.add(WarningEvent(time=1.0, message="x"))
    writer.close()
    assert curves_read_back(tmp_path) == {"evaluation/accuracy": [(7, 0.5)]}


def test_a_missing_tensorboard_names_the_command_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(extras.EXTRAS, "tensorboard", ("no_such_module",))
    line = "--tensorboard needs no_such_module, which is not installed: run pip install '.[tensorboard]'"
    with pytest.raises(UsageError, match=re.escape(line)):
        TensorBoardWriter(tmp_path)
    assert list(tmp_path.iterdir()) == []
