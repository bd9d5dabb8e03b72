"""Ratios of ratios, pooled ratios and components of variance, recomputed by simulation and by statsmodels."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm
from statsmodels.stats.meta_analysis import combine_effects

from tests.support.made_up_study import made, make_plan, make_records, normal, said
from trainer.study.analysis.analyse import analyse
from trainer.study.analysis.components import components_of, crossed_components
from trainer.study.analysis.ratios import StudyRatio, compare_ratios, pool
from trainer.study.analysis.statistics import adjust, sign_flip_p
from trainer.study.check import write_pooled
from trainer.study.report.findings import CROSSED
from trainer.study.report.pooled import pooled_figure, pooled_page
from trainer.study.report.tables import tables
from trainer.study.report.write import draw as draw_figures
from trainer.study.run.predictions import pack


def simulated_ratios(n: int, studies: int, seed: int) -> np.ndarray:
    """Ratios of the standard deviations of two samples of n equal normal values."""
    rng = np.random.default_rng([seed, n])
    first, second = rng.standard_normal((2, studies, n)).std(axis=2, ddof=1)
    return np.asarray(first / second)


def test_a_ratio_of_ratios_has_the_p_value_of_simulated_studies() -> None:
    null = np.log(simulated_ratios(5, 200_000, 1) / simulated_ratios(50, 200_000, 2))
    for ratio in (1.0, 2.0, 3.04):
        relative = compare_ratios(ratio, 5, 1.0, 50)
        assert relative.p == pytest.approx(np.mean(np.abs(null) >= math.log(ratio)), abs=0.004)
    low, high = np.exp(np.quantile(null, [0.025, 0.975]))
    assert compare_ratios(1.0, 5, 1.0, 50).interval == pytest.approx((low, high), rel=0.03)


def test_equal_ratios_do_not_differ_whichever_comes_first() -> None:
    one, other = compare_ratios(3.0, 5, 1.5, 19), compare_ratios(1.5, 19, 3.0, 5)
    assert one.p == pytest.approx(other.p, rel=1e-3)
    assert one.interval == pytest.approx([1 / end for end in reversed(other.interval)], rel=1e-3)
    assert compare_ratios(1.2, 9, 1.2, 9).p == pytest.approx(1)


def test_pooled_ratios_are_those_of_a_fixed_effect_meta_analysis() -> None:
    """The variance of a logarithm is simulated: it is not the formula of the code."""
    some = [StudyRatio("a", 0.9, 50), StudyRatio("b", 1.2, 19), StudyRatio("c", 0.72, 12)]
    variances = [np.var(np.log(simulated_ratios(each.n, 100_000, 3))) for each in some]
    combined = combine_effects(np.log([each.ratio for each in some]), np.array(variances), method_re="dl")
    frame = combined.summary_frame()
    pooled = pool(some)
    fixed = np.exp(frame.loc["fixed effect", ["eff", "ci_low", "ci_upp"]].to_numpy(float))
    assert (pooled.ratio, *pooled.interval) == pytest.approx(tuple(fixed), rel=0.01)
    assert pooled.heterogeneity_p == pytest.approx(combined.test_homogeneity().pvalue, abs=0.01)
    assert math.isnan(pool(some[:1]).heterogeneity_p)


def test_studies_are_pooled_by_way_of_sharding() -> None:
    first = made(normal({"random": 0.01, "stratified": 0.01}, seed=1), ways=("random", "stratified"))
    second = made(normal({"random": 0.01, "stratified": 0.01}, seed=2), seeds=9, ways=("random", "stratified"))
    other = made(normal({"random": 0.01, "stratified": 0.01}), ways=("random", "stratified"), baseline="stratified")
    text = pooled_page({"first": first, "second": second, "other": other})
    answer, row = [line for line in text.splitlines() if line.startswith("| stratified")]
    assert row.endswith("first (19), second (9) |")
    comparison = first.settings[0].members["stratified"].comparisons["final_accuracy"]
    assert comparison is not None
    cells = answer.split(" | ")
    assert cells[2].startswith(f"{100 * comparison.difference:+.2f} (")
    assert cells[3] == f"{row.split(' | ')[2]} ({row.split(' | ')[3]})"
    assert cells[4:] == ["+0.0", "mean undecided; spread: none shown; 19 pairs in first; 2 ratios |"]
    # Shards alone have another spread, and a single study is not pooled.
    alone = made(normal({"random": 0.01, "stratified": 0.01}), ways=("random", "stratified"), vary=["sharding"])
    assert pooled_page({"first": first, "alone": alone}).count("| stratified") == 0


def test_studies_that_differ_have_no_common_interval() -> None:
    ways = ("random", "stratified")
    steadier = made(normal({"random": 0.02, "stratified": 0.005}), ways=ways)
    wilder = made(normal({"random": 0.005, "stratified": 0.02}), ways=ways)
    text = pooled_page({"steadier": steadier, "wilder": wilder})
    answer, row = [line for line in text.splitlines() if line.startswith("| stratified")]
    assert row.split(" | ")[3:6] == ["-", "-", "< 0.001"]
    assert answer.split(" | ")[3] == "studies differ"


def x_of(line: Any) -> list[float]:
    return [float(x) for x in line.get_xdata()]


def test_pooled_ratios_are_drawn_below_those_of_the_studies() -> None:
    """Two studies, the pooled ratio and the published one, each with its interval; nothing of a single study."""
    ways = ("random", "stratified")
    first = made(normal({"random": 0.01, "stratified": 0.01}, seed=1), ways=ways)
    second = made(normal({"random": 0.01, "stratified": 0.01}, seed=2), seeds=9, ways=ways)
    figure = pooled_figure({"first": first, "second": second})
    assert figure is not None
    comparisons = [each.settings[0].members["stratified"].comparisons["final_accuracy"] for each in (first, second)]
    pooled = pool([StudyRatio("", c.sd_ratio, c.n) for c in comparisons if c])
    dots = [x[0] for line in figure.axes[0].lines if len(x := x_of(line)) == 1]
    assert dots == pytest.approx([*(c.sd_ratio for c in comparisons if c), pooled.ratio, 0.000863 / 0.000284])
    lines = [x for line in figure.axes[0].lines[1:] if len(x := x_of(line)) == 2]
    assert lines[2] == pytest.approx(list(pooled.interval))
    assert lines[3] == pytest.approx([0.981, 9.42], abs=0.005)
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["first (19)", "second (9)", "all", "published (5)"]
    assert pooled_figure({"first": first}) is None


def test_pooled_files_have_equal_bytes_for_equal_studies(tmp_path: Path) -> None:
    studies = {name: made(normal({"random": 0.01, "stratified": 0.01}), ways=("random", "stratified")) for name in "ab"}
    page = write_pooled(studies, tmp_path)
    assert page == {"pooled.md": (tmp_path / "pooled.md").read_text()}
    picture = (tmp_path / "pooled.svg").read_bytes()
    write_pooled(studies, tmp_path)
    assert (tmp_path / "pooled.svg").read_bytes() == picture
    write_pooled({"a": studies["a"]}, tmp_path)
    assert (tmp_path / "pooled.svg").read_text() == ""


def test_components_are_those_of_the_analysis_of_variance() -> None:
    """Against statsmodels' two-way analysis of variance."""
    rng = np.random.default_rng(5)
    table = rng.normal(0, 0.4, (6, 1)) + rng.normal(0, 0.2, (1, 8)) + rng.normal(0, 0.3, (6, 8))
    frame = pd.DataFrame([(s, o, table[s, o]) for s in range(6) for o in range(8)], columns=["s", "o", "y"])
    anova = anova_lm(ols("y ~ C(s) + C(o)", frame).fit())
    squares = anova["sum_sq"] / anova["df"]
    c = crossed_components(table)
    assert (c.sets, c.seeds) == (6, 8)
    assert c.set_p == pytest.approx(anova.loc["C(s)", "PR(>F)"])
    assert c.rest_sd**2 == pytest.approx(squares["Residual"])
    assert c.set_sd**2 == pytest.approx((squares["C(s)"] - squares["Residual"]) / 8)
    assert c.seed_sd**2 == pytest.approx((squares["C(o)"] - squares["Residual"]) / 6)


def test_the_interval_of_a_component_covers_it() -> None:
    """In 95 % of 600 simulated designs, for the ratio of the variances: the rest is known to be 1 there."""
    rng = np.random.default_rng(6)
    covered = []
    for _ in range(600):
        table = rng.normal(0, 0.5, (8, 1)) + rng.normal(0, 1, (1, 6)) + rng.normal(0, 1, (8, 6))
        c = crossed_components(table)
        covered.append(c.set_interval.low <= 0.5 * c.rest_sd <= c.set_interval.high)
    assert np.mean(covered) == pytest.approx(0.95, abs=0.03)


def test_only_complete_seeds_of_a_crossed_design_count() -> None:
    values = {seed: float(seed % 3) + 0.1 * (seed // 3) ** 2 for seed in range(11)}
    shards = {seed: f"random-{seed % 3}" for seed in range(11)}
    c = components_of(values, shards, 3)
    assert c is not None
    assert (c.sets, c.seeds) == (3, 3)
    assert components_of({0: 0.1, 1: 0.2}, shards, 2) is None
    plan = make_plan(seeds=12, sets=3)
    found = analyse(plan, make_records(plan, normal({"random": 0.01, "stratified": 0.01})))
    components = found.to_json()["settings"][0]["members"][0]["components"]
    assert (components["sets"], components["seeds"], len(components["set_interval"])) == (3, 4, 2)
    table = next(table for table in tables(found) if table.caption.startswith("Components"))
    assert [row[1] for row in table.rows] == ["3 x 4", "3 x 4"]


def test_a_crossed_report_is_recomputed_from_its_lines() -> None:
    """Means by set, and the F test between sets, by pandas and statsmodels from the lines of the ledger alone."""
    plan = make_plan(("random",), seeds=23, sets=4)
    rng = np.random.default_rng(8)
    set_effect, seed_effect = rng.normal(0, 0.02, 4), rng.normal(0, 0.01, 6)
    draw = normal({"random": 0.01})
    records = make_records(plan, lambda run: (draw(run) or 0) + set_effect[run.seed % 4] + seed_effect[run.seed // 4])
    numbers = [int(record["run"].rsplit("/", 1)[1]) for record in records]
    lines = pd.DataFrame({"y": [record["final_accuracy"] for record in records], "seed": numbers})
    lines = lines.assign(s=lines.seed % 4, o=lines.seed // 4).query("o < 5")  # set 3 has no seed 5
    anova = anova_lm(ols("y ~ C(s) + C(o)", lines).fit())
    means = lines.groupby("s").y.mean()
    found = analyse(plan, records)
    table = next(table for table in tables(found) if table.caption.startswith("Mean final accuracy by shard set"))
    expected = [(str(at), f"{mean:.4f} ({100 * (mean - means.mean()):+.2f})") for at, mean in means.items()]
    assert list(table.rows) == expected
    components = found.settings[0].members["random"].components
    assert components is not None
    assert components.set_p == pytest.approx(anova.loc["C(s)", "PR(>F)"])
    sentence = next(line for line in said(found).splitlines() if line.startswith("random: "))
    shown = "an effect" if components.set_p < 0.05 else "no effect"
    assert sentence.startswith(f"random: {shown} of the shard set is shown; its standard deviation is ")
    assert "(F test between 4 sets of 5 seeds each: p " in sentence
    assert components.adjusted_set_p == components.set_p, "a single test"


def test_runs_of_a_crossed_design_are_not_tested_as_independent() -> None:
    """The means and spreads of the two members differ widely, and only the components are tested."""
    ways = ("random", "distribution_aware")
    plan = make_plan(ways, seeds=12, sets=3)
    draw = normal({"random": 0.001, "distribution_aware": 0.02}, means={"random": 0.3})
    rng = np.random.default_rng(0)
    images = {"predictions": pack(rng.integers(0, 10, 50)), "class_accuracy": [0.5, 0.5]}
    analysis = analyse(plan, make_records(plan, draw, **images))
    assert (analysis.family, analysis.qualities, analysis.twins) == (0, [], [])
    for member in analysis.settings[0].members.values():
        assert not any(member.comparisons.values())
        assert (member.churn, math.isnan(member.curve_p)) == (None, True)
        assert member.components is not None
        assert member.components.adjusted_set_p >= member.components.set_p
        summary = member.summaries["final_accuracy"]
        assert math.isnan(summary.mean_interval.low)
        assert math.isnan(summary.sd_interval.low)
        assert summary.sd > 0
    tests = [member.components for member in analysis.settings[0].members.values()]
    assert [c.adjusted_set_p for c in tests if c] == adjust([c.set_p for c in tests if c])
    text = said(analysis)
    assert "P-values of sets are adjusted over 2 tests (Holm)." in text
    assert text.count(CROSSED) == 1
    assert "not compared:" not in text
    assert "steadier" not in text
    assert "spread" not in draw_figures(analysis.settings[0], analysis)


def test_equal_sets_have_no_components() -> None:
    """All sets equal, or two of three: their mean squares would be rounding."""
    values = {seed: 0.6 + 0.01 * (seed // 3) for seed in range(12)}
    assert components_of(values, dict.fromkeys(values, "stratified-0"), 3) is None
    assert components_of(values, {seed: f"random-{seed % 3 // 2}" for seed in values}, 3) is None


def test_values_that_only_rounding_changes_have_no_p_value() -> None:
    table = np.full((5, 7), 0.1) + np.arange(7) / 10 + np.arange(5)[:, None] / 1000
    c = crossed_components(table)
    assert (c.rest_sd, math.isnan(c.set_p), math.isnan(c.set_interval.low)) == (0.0, True, True)
    assert c.set_sd == pytest.approx(float((np.arange(5) / 1000).std(ddof=1)))
    assert crossed_components(np.full((5, 7), 0.1))[2] == 0.0


def test_signs_are_flipped_in_all_ways() -> None:
    """All 2^6 changes of signs, one by one."""
    values = np.array([0.5, 1.0, -0.2, 3.0, 0.1, 0.7])
    signs = np.array(np.meshgrid(*[[-1, 1]] * 6)).reshape(6, -1)
    as_much = np.abs(values @ signs) >= values.sum() - 1e-9
    assert sign_flip_p(values) == pytest.approx(as_much.mean())
    assert sign_flip_p(np.zeros(4)) == 1.0


def test_sign_flips_of_many_values_need_little_memory() -> None:
    """All changes at once would be 9,999 x 400 numbers of 8 bytes, 32 MB, several times over."""
    values = np.random.default_rng(9).standard_normal(400)
    tracemalloc.start()
    try:
        assert 0 < sign_flip_p(values) < 1
        assert tracemalloc.get_traced_memory()[1] < 16e6
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_sign_flips_keep_their_level_for_skewed_pairs() -> None:
    """Exponential values on both sides: in 5 % of the studies without a difference a test may find one."""
    rng = np.random.default_rng(7)
    differences = rng.exponential(size=(400, 9)) - rng.exponential(size=(400, 9))
    assert np.mean([sign_flip_p(row) < 0.05 for row in differences]) == pytest.approx(0.05, abs=0.035)
