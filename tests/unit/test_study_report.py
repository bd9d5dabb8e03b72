"""The report of a study: its files say the same, beside the published figures and other studies."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.support.made_up_study import (
    WAYS,
    Draw,
    ledger_of,
    made,
    made_steadier,
    make_plan,
    make_records,
    normal,
    said,
)
from tests.support.tiers import only
from trainer.gossip.weave import woven_step
from trainer.study.__main__ import find_plan, plan_names
from trainer.study.analysis.analyse import analyse
from trainer.study.analysis.batches import own_batches
from trainer.study.analysis.published import published_of
from trainer.study.analysis.published_comparisons import ACCURACIES, DIFFERENCES
from trainer.study.analysis.results import Analysis
from trainer.study.analysis.sides import PRIMARY
from trainer.study.plan.study_plan import StudyPlan
from trainer.study.report import figures
from trainer.study.report.tables import tables, to_csv, to_latex, to_markdown
from trainer.study.report.write import files_with_numbers, write_report
from trainer.study.run.folder import claim_folder
from trainer.study.run.ledger import Record, StudyLedger, read_beside


def report_of(plan: StudyPlan, root: Path, records: list[Record]) -> str:
    """The report that a study leaves in its folder."""
    claim_folder(plan, root)
    return write_report(plan, root, ledger_of(root, records))


@pytest.fixture(scope="module")
def steadier() -> Analysis:
    return made_steadier()


def test_every_file_says_the_same(steadier: Analysis) -> None:
    rows = list(csv.DictReader(io.StringIO(to_csv(steadier))))
    stored = json.loads(files_with_numbers(steadier)["results.json"])
    members = {member["name"]: member for member in stored["settings"][0]["members"]}
    for row in rows:
        summary = members[row["member"]]["summaries"][row["measure"]]
        assert float(row["mean"]) == summary["mean"]
        assert float(row["sd"]) == summary["sd"]
        comparison = members[row["member"]]["comparisons"][row["measure"]]
        assert (row["adjusted_spread_p"] == "") == (comparison is None)
        if comparison:
            # Virtual seconds do not vary, so that their ratio is unknown.
            assert (float(row["sd_ratio"]) if row["sd_ratio"] else None) == comparison["sd_ratio"]
            assert float(row["adjusted_spread_p"]) == comparison["adjusted_spread_p"]
            equal = comparison["adjusted_equivalence_p"]  # of accuracies: the margin is none of losses
            assert (row["adjusted_equivalence_p"] == "") == (equal is None) == ("accuracy" not in row["measure"])
    found = steadier.settings[0].members["stratified"]
    mean = f"{found.summaries[PRIMARY].mean:.4f}"
    assert mean in to_markdown(steadier)
    assert mean in to_latex(steadier)
    assert to_latex(steadier).count(r"\resizebox{\linewidth}") == to_latex(steadier).count(r"\end{tabular}}") > 3
    assert r"round\_robin" in to_latex(steadier)
    for table in tables(steadier):
        assert all(len(row) == len(table.header) for row in table.rows), table.caption


def ticks_in_view(axis: Any, low: float, high: float) -> list[tuple[float, str]]:
    """The places and texts of an axis' labelled ticks between two limits, after the figure was drawn."""
    ticks = [(tick.get_loc(), tick.label1.get_text()) for tick in axis.get_major_ticks() + axis.get_minor_ticks()]
    return [(place, text) for place, text in ticks if low <= place <= high and text]


@pytest.mark.parametrize("spread", [0.0004, 0.004, 0.04])
def test_ticks_of_a_study_s_figures_say_where_they_are(spread: float) -> None:
    """Percentages of 52.5 read 52, and an axis over less than a decade had one tick."""
    analysis = made(normal(dict.fromkeys(WAYS, spread)))
    for draw in (figures.learning, figures.deviations, figures.quality):
        figure = draw(analysis.settings[0])
        assert figure is not None
        figure.draw_without_rendering()
        for ax in figure.axes:
            found = ticks_in_view(ax.xaxis, *sorted(ax.get_xlim()))
            assert len(found) >= 2, (draw, found)
            vertical = ticks_in_view(ax.yaxis, *sorted(ax.get_ylim())) if draw is figures.learning else []
            for place, text in found + vertical:
                number = text.replace("\u2212", "-")
                value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
                assert value == pytest.approx(place, rel=1e-6, abs=1e-9), (draw, place, text)


def x_of(line: Any) -> list[float]:
    return [float(x) for x in line.get_xdata()]


def test_the_answer_comes_first(steadier: Analysis) -> None:
    """The answers, then one table, then all else; every cell of the table is a number of results.csv."""
    page = to_markdown(steadier)
    steady, table, notes = (page.index(text) for text in ("Steadier than random", "## In short", "## Caveats"))
    assert steady < table < notes < page.index("Based on all")
    rows = {row[0]: row for row in tables(steadier)[0].rows}
    comparison = steadier.settings[0].members["stratified"].comparisons[PRIMARY]
    assert comparison is not None
    assert rows["stratified"][1].startswith(f"{100 * comparison.difference:+.2f} (")
    assert rows["stratified"][2].startswith(f"{comparison.sd_ratio:.3g} (")
    assert rows["stratified"][-1].endswith("; spread differs, p < 0.001; 19 pairs")
    assert rows["round_robin"][-1].startswith("mean differs, p < 0.001; ")
    assert rows["random"][-1] == "baseline"


def test_deviations_do_not_depend_on_the_means(steadier: Analysis) -> None:
    """round_robin ends ten points below the others, and has the width of random."""
    figure = figures.deviations(steadier.settings[0])
    assert figure is not None
    dots = [x for x in map(x_of, figure.axes[0].lines) if len(x) == 19]
    assert [abs(np.mean(x)) < 1e-9 for x in dots] == [True] * 3
    records = steadier.settings[0].members["round_robin"].records
    assert np.std(dots[2]) == pytest.approx(100 * np.std([record[PRIMARY] for record in records]))


def test_a_published_ratio_is_drawn_with_its_interval() -> None:
    plan = make_plan(("random", "stratified"), seeds=5, datasets={"cifar10-16x16": {"input": "nowhere"}})
    found = analyse(plan, make_records(plan, normal({"random": 0.01, "stratified": 0.01})))
    figure = figures.ratios(found.settings[0], "random")
    assert figure is not None
    assert pytest.approx([0.981, 9.42], abs=0.005) in [x_of(line) for line in figure.axes[0].lines]


def test_accuracy_is_drawn_accuracy_by_cost_and_bytes() -> None:
    plan = make_plan(("random", "stratified"), seeds=3)
    records = make_records(plan, normal({"random": 0.01, "stratified": 0.01}))
    assert figures.accuracy_by_cost(analyse(plan, records).settings[0]) is None  # of an older ledger
    for record in records:
        record["curve"] |= {"seconds": [1.0, 2.0, 3.0 + record["seeds"]["model"]], "sent_bytes": [1e6, 2e6, 3e6]}
    figure = figures.accuracy_by_cost(analyse(plan, records).settings[0])
    assert figure is not None
    assert [x_of(ax.lines[0]) for ax in figure.axes] == [[1, 2, 4], [1, 2, 3]]


def test_own_batches_are_those_of_the_woven_steps() -> None:
    """Steps counted one by one, with the first pool after a pass of 25 steps, or from the start."""
    keys = {"batch_size": 120, "gossip": 5, "gossip_every": 4}
    for first, more in ((25, {}), (0, {"gossip_signal": "start"})):
        for cycles in (0, 3, 10):
            steps = first + 5 * cycles
            own = sum(not woven_step(clock, first, 4).is_foreign for clock in range(steps))
            assert own_batches([steps / 25], 3000, keys | more) == pytest.approx((own,))
    assert own_batches([1, 2.5], 3000, {}) == (23, 57.5)  # of the default size, 128


def test_accuracy_is_drawn_over_own_batches_where_they_differ() -> None:
    """Check that 3 of 4 steps after the first pass are of own rows with gossip. Such ledgers need no times."""
    variants = {"none": {}, "ab": {"gossip": 5, "gossip_every": 3}}
    plan = make_plan(
        ("random",), seeds=3, compare="variant", variants=variants, training={"epochs": 3, "batch_size": 120}
    )
    found = analyse(plan, make_records(plan, normal({"random": 0.01})))
    figure = figures.accuracy_by_cost(found.settings[0])
    assert figure is not None
    assert [x_of(line) for line in figure.axes[0].lines] == [[25, 50, 75], [25, 43.75, 62.5]]
    stored = json.loads(files_with_numbers(found)["results.json"])["settings"][0]["members"]
    assert [member["curve"]["own_batches"] for member in stored] == [[25, 50, 75], [25, 43.75, 62.5]]


def test_losses_of_training_and_evaluation_rows_are_drawn() -> None:
    """The paper's figure 1. Runs without losses of training rows still have those of evaluation rows."""
    plan = make_plan(("random", "stratified"), seeds=3)
    records = make_records(plan, normal({"random": 0.01, "stratified": 0.01}))
    for record in records[::2]:
        record["curve"] |= {"train_loss": [3.0, 2.0, 1.5]}
    figure = figures.losses(analyse(plan, records).settings[0])
    assert figure is not None
    heights = [[np.asarray(line.get_ydata(), float).tolist() for line in ax.lines] for ax in figure.axes]
    assert heights[0].count([3, 2, 1.5]) == 3
    assert heights[0].count([1, 1, 1]) == heights[1].count([1, 1, 1]) == 3
    assert heights[1].count([3, 2, 1.5]) == 0


def test_rows_of_classes_are_drawn_for_each_shard_of_three_runs() -> None:
    plan = make_plan(("random", "stratified"), seeds=4)
    records = make_records(plan, normal({"random": 0.01, "stratified": 0.01}))
    del records[0]["sharding"]["shard_counts"]  # of an earlier version
    setting = analyse(plan, records).settings[0]
    figure = figures.shard_counts(setting, "random")
    assert figure is not None
    assert [ax.get_title() for ax in figure.axes] == ["random, seed 1", "random, seed 2", "random, seed 3"]
    boxes = records[2]["sharding"]["shard_counts"]
    for ax in figure.axes:
        caps = [line.get_ydata()[0] for line in ax.lines if len({*line.get_ydata()}) == 1]  # type: ignore[index,misc]
        assert {box[2] for box in boxes} | {box[0] for box in boxes} | {box[4] for box in boxes} <= {*caps}
    for record in records:
        record["sharding"].pop("shard_counts", None)
    assert figures.shard_counts(analyse(plan, records).settings[0], "random") is None


def test_times_of_sharding_are_drawn_once_a_set() -> None:
    plan = make_plan(("random", "stratified"), seeds=4)
    records = make_records(plan, normal({"random": 0.01, "stratified": 0.01}))
    for record in records:
        record["sharding"]["seconds"] = 5.0 if "random" in record["run"] else 70.0
        record["shards"] = record["shards"] if "random" in record["run"] else "same"
    records[0]["sharding"]["seconds"] = 500.0  # made beside other work
    found = analyse(plan, records)
    figure = figures.sharding_times(found.settings[0])
    assert figure is not None
    assert [x_of(line) for line in figure.axes[0].lines] == [[500, 5, 5, 5], [5], [70], [70]]
    assert [row[-2] for row in tables(found)[0].rows] == ["5", "70"]


def test_the_published_figures_stand_beside_ours() -> None:
    plan = make_plan(("random", "stratified"), seeds=5, datasets={"cifar10-16x16": {"input": "nowhere"}})
    found = analyse(plan, make_records(plan, normal({"random": 0.01, "stratified": 0.01})))
    table = next(table for table in tables(found) if "Table II, CIFAR-10" in table.caption)
    rows = {row[0]: row[1:] for row in table.rows}
    ratio = found.settings[0].members["stratified"].comparisons[PRIMARY]
    assert ratio is not None
    assert rows["stratified"][3] == f"{ratio.sd_ratio:.3g}"
    assert rows["stratified"][-5:] == ("0.935396", "0.000284", "3.04", "0.981 to 9.42", "0.4441 (0.0054)")
    assert rows["distribution_aware-k30"][:6] == ("-",) * 6
    low, high = ratio.sd_ratio_f
    assert (
        "The paper's ratios of standard deviations, from 5 runs per side of ResNet-56: 3.04 for stratified"
        f" (95 %: 0.981 to 9.42), here {low:.3g} to {high:.3g}, {0.000863 / 0.000284 / ratio.sd_ratio:.3g} times ours (95 %:"
        in said(found)
    )
    assert "). These p-values are not adjusted for several tests." in said(found)


def test_published_comparisons_stand_beside_ours() -> None:
    """Compare asp on #C2 alone: the thesis has no accuracy of asp on #C1. It takes half of the time of all-reduce here."""
    plan = make_plan(
        ("random",),
        compare="protocol",
        datasets={"cifar10-16x16": {"input": "nowhere"}},
        protocols={"all-reduce": {"exchange": "all-reduce"}, "asp": {"protocol": "asp"}},
        variants={"c1": {"workers": 5}, "c2": {"workers": 9}},
    )
    records = make_records(plan, lambda run: 0.6 + 0.01 * run.seed - 0.02 * (run.cell.protocol == "asp"))
    for record in records:
        record["seconds"] = 5.0 if "/asp/" in record["run"] else 10.0
    (table,) = (
        each for each in tables(analyse(plan, records)) if each.caption.startswith("Beside published comparisons")
    )
    assert table.caption.endswith("random, cnn, c2")
    source = "Provatas's thesis, chapter 4, 3 runs"
    assert list(table.rows) == [("asp", "-2.00 (-2.00 to -2.00)", "-0.90", "2", "2.48", source)]


def test_published_accuracies_stand_beside_ours() -> None:
    """RCD-SGD has random shards with an exchange in every round only."""
    plan = make_plan(
        ("random", "submodular"),
        datasets={"cifar10-16x16": {"input": "nowhere"}},
        protocols={"d-psgd": {"exchange": "d-psgd"}, "d-psgd-every-2": {"exchange": "d-psgd", "every": 2}},
    )
    records = make_records(plan, lambda run: 0.5 + 0.01 * (run.seed % 2) + 0.1 * (run.cell.sharding == "submodular"))
    beside = [each for each in tables(analyse(plan, records)) if each.caption.startswith("Beside published accuracies")]
    mean = 50 + sum(seed % 2 for seed in plan.seeds) / len(plan.seeds)
    assert [table.caption.partition(": ")[2] for table in beside] == [
        "cifar10-16x16, cnn, d-psgd",
        "cifar10-16x16, cnn, d-psgd-every-2",
    ]
    source = "RCD-SGD, table 2, 10 runs, ResNet-50"
    assert [list(table.rows) for table in beside] == [
        [("random", f"{mean:.2f}", "92.5", source)],
        [("submodular", f"{mean + 10:.2f}", "93.7", source)],
    ]


def test_published_comparisons_name_members_of_shipped_plans() -> None:
    shipped = [find_plan(name) for name in plan_names()]
    for each in DIFFERENCES:
        plans = [plan for plan in shipped if (plan.compare, plan.baseline) == (each.compare, each.baseline)]
        assert any(each.member in plan.members for plan in plans), each
        settings = {name for plan in plans for name in (*plan.shardings, *plan.models, *plan.variants)}
        assert not each.setting or each.setting in settings, each
    for accuracy in ACCURACIES:
        cells = [cell for plan in shipped for cell in plan.cells() if {*accuracy.names} <= {*cell}]
        assert any(cell.dataset.startswith(accuracy.dataset) for cell in cells), accuracy


@pytest.mark.parametrize(
    ("dataset", "name", "sds"),
    [
        ("cifar10-16x16", "distribution_aware-k30", (0.001086, 0.000128)),
        ("cifar100-fine", "distribution_aware-k50", (0.007855, 0.000764)),
    ],
)
def test_published_training_figures_stand_beside_ours(dataset: str, name: str, sds: tuple[float, float]) -> None:
    """The paper's "up to eight times" is about them. Ours are recomputed from the lines, and the interval by scipy."""
    plan = make_plan(("random", name), seeds=9, datasets={dataset: {"input": "nowhere"}})
    records = make_records(plan, normal({"random": 0.01, name: 0.01}))
    for record in records:
        record["running_train_accuracy"] = 0.9 * record[PRIMARY]
    found = analyse(plan, records)
    table = next(table for table in tables(found) if "as they were trained" in table.caption)
    row = dict(zip(table.header, next(row for row in table.rows if row[0] == name), strict=True))
    values = [[r["running_train_accuracy"] for r in records if way in r["run"]] for way in ("random", name)]
    ours = np.std(values[0], ddof=1) / np.std(values[1], ddof=1)
    theirs = sds[0] / sds[1]
    low, high = (theirs / math.sqrt(stats.f.ppf(share, 4, 4)) for share in (0.975, 0.025))
    assert row["sd of random / sd"] == f"{ours:.3g}"
    assert (row["published sd of random / sd"], row["published 95 % (F)"]) == (
        f"{theirs:.3g}",
        f"{low:.3g} to {high:.3g}",
    )
    assert row["published ratio / ours (95 %)"].startswith(f"{theirs / ours:.3g} (")
    assert f"the largest that it prints: {theirs:.3g} for {name} (95 %: {low:.3g} to {high:.3g}). Here: " in said(found)
    assert "as they were trained" not in to_markdown(analyse(plan, make_records(plan, normal({"random": 1, name: 1}))))


def test_sparse_neighbourhoods_have_a_mean_size() -> None:
    name = "distribution_aware-k30"
    plan = make_plan(("random", name), seeds=4, datasets={"cifar10": {"input": "nowhere"}})
    records = make_records(plan, normal({"random": 0.01, name: 0.01}))
    for at, record in enumerate(records):
        record["sharding"] |= {"sparse": 2 + at % 2, "sparse_rows": 5 + at % 2}
    table = next(table for table in tables(analyse(plan, records)) if table.caption.startswith("Sparse"))
    assert table.rows[0][1:] == ("3.0 (3 to 3)", "2.0", "6, 6, 4")


def test_the_accuracy_of_each_run_is_beside_its_sparse_groups() -> None:
    """Show a run that diverged, and a seed that only one way of sharding has."""
    names = ("distribution_aware-k30", "distribution_aware-k20")
    plan = make_plan(("random", *names), seeds=3, datasets={"cifar10": {"input": "nowhere"}})
    records = make_records(
        plan, lambda run: None if run.cell.sharding == names[0] and run.seed == 1 else 0.9 + run.seed / 100
    )
    records = [record for record in records if record["run"].split("/")[1] != names[1] or record["seeds"]["model"] != 2]
    for record in records:
        record["sharding"]["sparse"] = 5 + record["seeds"]["model"]
    table = next(table for table in tables(analyse(plan, records)) if table.caption.startswith("Accuracy of each run"))
    assert table.header == ("seed", *names)
    assert table.rows == [
        ("0", "5: 0.9000", "5: 0.9000"),
        ("1", "6: -", "6: 0.9100"),
        ("2", "7: 0.9200", "-"),
    ]


@pytest.mark.parametrize(("dataset", "times"), [("cifar10-16x16", 1), ("cifar100-coarse", 0)])
def test_sparse_neighbourhoods_are_published_of_one_data_set(dataset: str, times: int) -> None:
    name = "distribution_aware-k30"
    plan = make_plan(("random", name), seeds=5, datasets={dataset: {"input": "nowhere"}})
    found = analyse(plan, make_records(plan, normal({"random": 0.01, name: 0.01})))
    assert sum("Sparse neighbourhoods" in table.caption for table in tables(found)) == times


@pytest.mark.parametrize(
    ("dataset", "title"),
    [
        ("cifar10", "Table II,"),
        ("cifar10-16x16", "Table II,"),
        ("cifar100-coarse", "Table IV,"),
        ("cifar100-fine", "Table V,"),
        ("cifar100-fine-16x16", "Table V,"),
        ("cifar100", None),
        ("cifar10k", None),
    ],
)
def test_each_data_set_has_its_own_published_table(dataset: str, title: str | None) -> None:
    found = published_of(dataset)
    assert found.title.startswith(title) if found and title else found is title, dataset


def test_the_same_runs_of_another_study_stand_beside_ours(tmp_path: Path) -> None:
    """Seeds of one study that the other has not, and runs of other shards, are in no pair."""
    draw = normal(dict.fromkeys(WAYS, 0.01))
    plan = make_plan(WAYS, seeds=9, beside="there")
    theirs = [record | {"staleness": {"mean": 8.0, "max": 9}} for record in make_records(plan, draw)]
    there = StudyLedger(tmp_path / "there" / "ledger.jsonl")
    there.path.parent.mkdir()
    for record in theirs:
        del record["sharding"]["shard_counts"]  # as in the lines of earlier versions
        uneven = record["sharding"] | {"mmd_ratio": 7.0, "seconds": 9.0}
        changed = {"sharding": uneven} if record["run"] == "made-up/stratified/cnn/asp/0" else {}
        there.append(record | changed)
    ours = make_records(make_plan(WAYS, seeds=11), lambda run: 0.003 + (draw(run) or 0))
    found = analyse(make_plan(WAYS, seeds=11, beside="there"), ours, read_beside(plan, tmp_path / "here"))
    assert [(twins.member, twins.found.n) for twins in found.twins] == [
        ("random", 9),
        ("stratified", 8),
        ("round_robin", 9),
        ("all", 9),
    ]
    for twins in found.twins:
        assert twins.found.difference == pytest.approx(0.003)
        assert twins.found.sd_ratio == pytest.approx(1) or twins.member == "all"
        assert twins.mean.here - twins.mean.there == pytest.approx(0.003)
        assert twins.staleness == (3.0, 8.0)
    text = said(found)
    assert (
        "Compared with there, the same seeds: the random mean is 0.30 points higher here (+0.30 to +0.30, 9 pairs), and"
        in text
    )
    assert (
        "over all strategies, averaged by seed, the mean is 0.30 points higher here (+0.30 to +0.30, 9 seeds)" in text
    )
    assert "environments of the two studies" not in text
    table = next(table for table in tables(found) if table.caption.startswith("The same runs in there"))
    assert [row[:2] for row in table.rows] == [
        ("random", "9"),
        ("stratified", "8"),
        ("round_robin", "9"),
        ("all", "9"),
    ]
    assert all(len(row) == len(table.header) for row in table.rows)


@pytest.mark.full
def test_a_study_that_stands_beside_none_says_so(tmp_path: Path) -> None:
    plan = make_plan(WAYS, seeds=4, beside="nowhere")
    text = report_of(plan, tmp_path, make_records(plan, normal(dict.fromkeys(WAYS, 0.01))))
    assert "Cannot be compared with nowhere: fewer than 3 runs with equal images and shards, or no such study." in text
    plain = report_of(
        make_plan(WAYS, seeds=4), tmp_path / "alone", make_records(plan, normal(dict.fromkeys(WAYS, 0.01)))
    )
    assert "Cannot be compared" not in plain


def test_members_ups_and_downs_of_one_seed_are_no_independent_pairs() -> None:
    """Three seeds of two ways that go up and down together say as much as three seeds of one."""
    off = {0: -0.01, 1: 0.004, 2: 0.005}
    plan = make_plan(seeds=3, beside="there")
    ours = make_records(plan, lambda run: 0.6 + off[run.seed])
    found = analyse(plan, ours, make_records(plan, lambda run: 0.6))
    one, _, together = found.twins
    assert (together.member, together.found.n) == ("all", 3)
    assert together.found.difference_interval == pytest.approx(one.found.difference_interval)


def test_equal_sets_of_two_studies_are_correlated() -> None:
    """Half of the spread is the set's in both studies: the table has the correlation, and the interval of scipy."""
    rng = np.random.default_rng(3)
    of_set, of_run = rng.normal(0, 0.01, 15), rng.normal(0, 0.01, (2, 15))
    plan = make_plan(("random", "stratified"), seeds=15, beside="there")
    here, there = (
        make_records(plan, partial(lambda study, run: 0.6 + of_set[run.seed] + of_run[study, run.seed], study))
        for study in (0, 1)
    )
    table = next(
        table for table in tables(analyse(plan, here, there)) if table.caption.startswith("The same runs in there")
    )
    row = dict(zip(table.header, table.rows[0], strict=True))
    theirs = stats.pearsonr(of_set + of_run[0], of_set + of_run[1])
    low, high = theirs.confidence_interval()
    assert row["correlation (95 %)"] == f"{theirs.statistic:.2f} ({low:.2f} to {high:.2f})"


def test_what_else_differs_from_a_study_beside_is_told() -> None:
    """Of the other study one way has other shards, and all runs other seeds of the model, and another processor."""
    draw = normal(dict.fromkeys(WAYS, 0.01))
    plan = make_plan(WAYS, seeds=5, beside="there")
    theirs = make_records(plan, draw)
    for record in theirs:
        record["environment"] = record["environment"] | {"processor": "another", "device": "cuda"}
        record["seeds"] = record["seeds"] | {"model": 99}
        if "/stratified/" in record["run"]:
            record["sharding"] = record["sharding"] | {"mmd_ratio": 7.0}
    ours = make_records(plan, draw)
    for record in ours:
        record["environment"] = record["environment"] | {"processor": "one"}  # and of devices it knows nothing
    found = analyse(plan, ours, theirs)
    assert [twins.member for twins in found.twins] == ["random", "round_robin", "all"]
    text = said(found)
    assert "Compared with there, runs with equal images and shards, but other seeds: the random mean is" in text
    assert "Not compared with there, which has fewer than 3 matching runs: stratified." in text
    assert "The environments of the two studies differ too, which may cause part of the difference: processors." in text
    only = analyse(
        make_plan(("random", "stratified"), seeds=5, beside="there"), make_records(make_plan(seeds=5), draw), theirs
    )
    assert [twins.member for twins in only.twins] == ["random"], "all together would be the same runs again"


def test_ways_whose_shards_no_seed_changes_are_named() -> None:
    plan = make_plan(WAYS, seeds=4)
    records = make_records(plan, normal(dict.fromkeys(WAYS, 0.01)))
    assert "are the same for every seed" not in said(analyse(plan, records))
    for record in records:
        record["shards"] = record["shards"] if "/random/" in record["run"] else record["run"].rpartition("/")[0]
    assert "The shards of stratified and round_robin are the same for every seed:" in said(analyse(plan, records))


@pytest.mark.full
def test_left_out_seeds_and_changed_seed_counts_are_reported(tmp_path: Path) -> None:
    """Runs of seeds that were left out and other numbers of seeds are told."""
    draw = normal(dict.fromkeys(WAYS, 0.01))
    whole, part = make_plan(WAYS, seeds=6), make_plan(WAYS, seeds=4)
    claim_folder(whole, tmp_path)
    ledger = ledger_of(tmp_path, make_records(whole, draw))
    assert "began with" not in write_report(whole, tmp_path, ledger)
    text = write_report(part, tmp_path, ledger)
    assert "This study began with 6 seeds and has 4 now: tests prove less if seeds are added or left out" in text
    assert "Not included: 6 runs of the ledger with other seeds or of skipped cells." in text


@pytest.mark.full
def test_a_report_opens_offline_and_says_the_same_again(tmp_path: Path) -> None:
    plan = make_plan(WAYS, seeds=5)
    records = make_records(plan, normal(dict.fromkeys(WAYS, 0.01)))
    text = report_of(plan, tmp_path, records)
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") == 10
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert f"report: {tmp_path / 'report.html'}" in text
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    report_of(plan, tmp_path, records)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(lambda run: None, id="all diverged"),
        pytest.param(lambda run: 0.5, id="all alike"),
        pytest.param(lambda run: 0.5 if run.cell.sharding == "random" else 0.6, id="no spread, two means"),
    ],
)
@pytest.mark.parametrize("seeds", only([4], [1, 4]))
def test_a_report_of_odd_ledgers_is_still_one(draw: Draw, seeds: int, tmp_path: Path) -> None:
    plan = make_plan(WAYS, seeds=seeds)
    assert "report:" in report_of(plan, tmp_path, make_records(plan, draw))
    json.loads((tmp_path / "results.json").read_text())


@pytest.mark.usefixtures("undrawn")
def test_a_plan_with_a_target_has_the_times_to_it(tmp_path: Path) -> None:
    """Seed 1 never reaches it, and seed 2 reaches it one evaluation later; older ledgers have no times."""
    plan = make_plan(("random", "stratified"), seeds=3, target=0.5)
    records = make_records(plan, lambda run: {1: 0.4, 2: 0.52}.get(run.seed, 0.6))
    for record in records:
        if "/random/" in record["run"]:
            record["curve"]["seconds"] = [10.0, 20.0, 30.0]
    report_of(plan, tmp_path, records)
    times = {
        member["name"]: member["seconds_to_target"]
        for member in json.loads((tmp_path / "results.json").read_text())["settings"][0]["members"]
    }
    assert times == {"random": [20.0, 30.0], "stratified": []}
    (table,) = (table for table in tables(analyse(plan, records)) if "evaluation accuracy of 0.5" in table.caption)
    assert table.rows == [("random", "2 of 3", "25.0", "20.0", "30.0"), ("stratified", "0 of 3", "-", "-", "-")]
    without = analyse(make_plan(("random", "stratified"), seeds=3), records)
    assert "target" not in json.dumps(without.to_json())
    assert not [table for table in tables(without) if "evaluation accuracy of" in table.caption]


@pytest.mark.usefixtures("undrawn")
def test_a_plan_with_a_target_loss_has_the_times_to_it(tmp_path: Path) -> None:
    """Report seed 1, which never reaches it, seed 2, which lacks a loss, and a ledger without losses."""
    plan = make_plan(("random", "stratified"), seeds=3, target_loss=0.5)
    records = make_records(plan, lambda run: 0.6)
    losses = ([0.9, 0.5, 0.6], [0.9, 0.8, 0.51], [0.9, None, 0.1])
    for record, loss in zip((r for r in records if "/random/" in r["run"]), losses, strict=True):
        record["curve"] |= {"seconds": [10.0, 20.0, 30.0], "train_loss": loss}
    report_of(plan, tmp_path, records)
    members = json.loads((tmp_path / "results.json").read_text())["settings"][0]["members"]
    assert [member["seconds_to_target_loss"] for member in members] == [[20.0, 30.0], []]
    (table,) = (table for table in tables(analyse(plan, records)) if "Training time to" in table.caption)
    assert table.caption.startswith("Training time to a training loss of 0.5: ")
    assert table.rows == [("random", "2 of 3", "25.0", "20.0", "30.0"), ("stratified", "0 of 3", "-", "-", "-")]


def timed_records(plan: StudyPlan) -> list[Record]:
    """Return runs of three seeds, all of which end at 0.6, 0.7 and 0.8; those of stratified have 0.01, 0.02 and 0.06 more.

    They are evaluated after 10, 20 and 30 s, with 0.2 and 0.05 less before the end; seed 2 of random after twice that."""
    gains = (0.01, 0.02, 0.06)
    records = make_records(plan, lambda run: 0.6 + 0.1 * run.seed + gains[run.seed] * (run.cell.sharding != "random"))
    for record in records:
        record["curve"]["seconds"] = [20.0, 40.0, 60.0] if "random/cnn/asp/2" in record["run"] else [10.0, 20.0, 30.0]
        record["seconds"] = record["curve"]["seconds"][-1]
    return records


@pytest.mark.usefixtures("undrawn")
def test_accuracies_by_time_are_those_computed_by_hand(tmp_path: Path) -> None:
    """Compare with random's 0.4, 0.5 at 10 s, before seed 2 is evaluated, 0.55, 0.65, 0.6 at 20 s, 0.6, 0.7, 0.75 at 45 s.

    The interval of differences is their mean plus and minus 4.3027 standard deviations over the root of 3."""
    plan = make_plan(("random", "stratified"), seeds=3, times=[5, 10, 20, 45])
    records = timed_records(plan)
    text = report_of(plan, tmp_path, records)
    result = analyse(plan, records)
    values, differences = (table for table in tables(result) if table.caption.startswith("Accuracy by time"))
    assert values.header == differences.header == ("sharding", "5 s", "10 s", "20 s", "45 s")
    assert values.rows == [
        ("random", "-", "0.4500 (0.0707), 2 of 3 runs", "0.6000 (0.05)", "0.6833 (0.0764)"),
        ("stratified", "-", "0.5300 (0.125)", "0.6800 (0.125)", "0.7300 (0.125)"),
    ]
    # Differences of 1, 2 and 21 points at 20 s, and of 1, 2 and 11 at 45 s; two pairs at 10 s are too few.
    assert differences.rows == [("stratified", "-", "-", "+8.00 (-19.99 to +35.99)", "+4.67 (-9.01 to +18.35)")]
    assert "a run that has ended keeps its final accuracy (5 of 6 runs by 45 s)." in text
    stored = json.loads((tmp_path / "results.json").read_text())["settings"][0]["members"][1]["accuracy_by_time"]
    assert [point["seconds"] for point in stored] == [5, 10, 20, 45]
    assert [point["summary"] and point["summary"]["mean"] for point in stored] == [None, 0.53, 0.68, 0.73]
    assert [point["difference"] and point["difference"]["mean"] for point in stored] == [None, None, 0.08, 0.0466667]


def test_accuracies_by_time_of_odd_ledgers_are_left_out() -> None:
    """Report ledgers without times, diverged runs, real targets and a crossed design, whose runs are not compared."""
    plan = make_plan(seeds=3, times=[10, 20])
    by_time = "Accuracy by time of training, mean (sd)"
    older = analyse(plan, make_records(plan, lambda run: 0.6))
    (table,) = (table for table in tables(older) if table.caption.startswith("Accuracy by time"))
    assert table.rows == [("random", "-", "-"), ("stratified", "-", "-")]
    assert "by time" not in said(older)
    diverged = analyse(plan, make_records(plan, lambda run: None))
    assert [t.rows for t in tables(diverged) if t.caption.startswith(by_time)] == [table.rows]
    real = timed_records(plan)
    for record in real:
        record["final_accuracy"] = record["best_accuracy"] = None
        record["curve"] |= {"accuracy": [None] * 3}
    assert [t.rows for t in tables(analyse(plan, real)) if t.caption.startswith(by_time)] == [table.rows]
    crossed = replace(plan, sets=3, times=(30.0,))
    (table,) = (t for t in tables(analyse(crossed, timed_records(crossed))) if t.caption.startswith("Accuracy by time"))
    assert table.rows[1] == ("stratified", "0.7300 (0.125)")
    without = analyse(make_plan(seeds=3), timed_records(plan))
    assert "by_time" not in json.dumps(without.to_json())
    assert not [t for t in tables(without) if t.caption.startswith("Accuracy by time")]


def test_a_report_of_real_targets_compares_losses(tmp_path: Path) -> None:
    plan = make_plan(seeds=6)
    records = make_records(plan, normal({"random": 0.01, "stratified": 0.01}))
    for record in records:
        record |= dict.fromkeys(("final_accuracy", "best_accuracy", "train_accuracy"))
        record["curve"] = record["curve"] | {"accuracy": [None] * 3}
    assert "real targets have no accuracy" in report_of(plan, tmp_path, records)
    member = analyse(plan, records).settings[0].members["stratified"]
    assert (member.diverged, member.comparisons[PRIMARY]) == (0, None)
    assert member.comparisons["final_loss"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("mmd_ratio", [1.5, None])
def test_shards_without_classes_have_no_figures_of_them(tmp_path: Path, mmd_ratio: float | None) -> None:
    """Report shards of one class or of real targets, and a single shard, which has no distance either."""
    plan = make_plan(seeds=6)
    records = make_records(plan, normal({"random": 0.01, "stratified": 0.01}))
    for record in records:
        record["sharding"] |= {"mmd_ratio": mmd_ratio, "mean_ratio": mmd_ratio}
        for name in ("chi_square", "cramers_v", "class_counts", "shard_counts"):
            del record["sharding"][name]
    report_of(plan, tmp_path, records)
    analysis = analyse(plan, records)
    (table,) = (table for table in tables(analysis) if table.caption.startswith("Evenness of the shards"))
    assert table.rows[0][1:4] == ("-" if mmd_ratio is None else "1.5", "-", "-")
    (setting,) = analysis.settings
    assert (figures.class_counts(setting), figures.shard_counts(setting, "random")) == (None, None)
    assert (figures.quality(setting) is None) == (mmd_ratio is None)


def test_a_report_of_no_run_says_so(tmp_path: Path) -> None:
    text = report_of(make_plan(WAYS), tmp_path, [])
    assert "No result yet" in text
    assert "adjusted over" not in text


@pytest.mark.usefixtures("undrawn")
def test_the_origin_of_a_study_is_that_of_its_runs(tmp_path: Path) -> None:
    plan = make_plan(WAYS, seeds=3)
    records = make_records(plan, normal(dict.fromkeys(WAYS, 0.01)))
    report_of(plan, tmp_path / "older", records)
    assert "not recorded" in (tmp_path / "older" / "report.html").read_text()
    for day, record in enumerate(records):
        made = {"time": f"2026-01-{10 + day} 00:00:00 UTC", "command": f"sharding study {day}", "host": f"h{day % 2}"}
        record["made"] = made
    report_of(plan, tmp_path / "newer", records)
    page = (tmp_path / "newer" / "report.html").read_text()
    for text in ("2026-01-10 to 2026-01-18", "h0, h1", "<code>sharding study 8</code>", "3 seeds of 3 combinations"):
        assert text in page
