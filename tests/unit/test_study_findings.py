"""What a study's findings say of made-up ledgers whose truth is known."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from tests.support.made_up_study import WAYS, made, made_steadier, make_plan, make_records, normal, said
from trainer.study.analysis.analyse import analyse
from trainer.study.analysis.results import Analysis
from trainer.study.analysis.sides import PRIMARY
from trainer.study.analysis.statistics import PERMUTATIONS, adjust, power, smallest_ratio
from trainer.study.plan.study_plan import Run
from trainer.study.report.findings import findings
from trainer.study.report.tables import to_markdown


@pytest.fixture(scope="module")
def alike() -> Analysis:
    return made(normal(dict.fromkeys(WAYS, 0.01)))


@pytest.fixture(scope="module")
def steadier() -> Analysis:
    return made_steadier()


def test_where_nothing_differs_nothing_is_said_to(alike: Analysis) -> None:
    text = said(alike)
    assert "Spread: no difference from random is shown for stratified and round_robin." in text
    smallest = smallest_ratio(19, 0.05 / 2)
    assert smallest is not None
    assert f"19 seeds detect a true ratio of standard deviations of {smallest:.2f} with probability 0.8" in text
    assert not re.search("Steadier|Less steady|Mean differs", text)
    assert "Mean undecided: neither a difference from random nor equality within 0.5 points is shown for" in text
    assert text.count("no difference is shown") >= 2
    assert "Provisional" not in text


def test_a_planted_difference_is_found_and_named(steadier: Analysis) -> None:
    text = said(steadier)
    assert "Steadier than random: the final accuracy varies less from seed to seed with stratified." in text
    assert re.search(r"Mean differs from random: round_robin \(-\d+\.\d\d points\)\.", text)
    levels = {finding.text.partition(":")[0]: finding.level for finding in findings(steadier)}
    assert (levels["stratified"], levels["round_robin"]) == ("better", "worse")


def test_a_steadier_but_much_lower_member_is_not_better() -> None:
    draw = normal({"random": 0.02, "stratified": 0.004}, means={"stratified": 0.4})
    found = made(draw, ways=("random", "stratified"))
    levels = {finding.text.partition(":")[0]: finding.level for finding in findings(found)}
    assert "Steadier than random" in said(found)
    assert levels["stratified"] == "worse"


def test_members_that_were_not_compared_are_named_and_in_no_answer() -> None:
    plan = make_plan(WAYS, seeds=6)
    records = make_records(plan, normal(dict.fromkeys(WAYS, 0.01)))
    some = [record for record in records if "round_robin" not in record["run"] or record["run"].endswith(("/0", "/1"))]
    text = said(analyse(plan, some))
    assert "no difference from random is shown for stratified." in text
    assert "round_robin: not compared: fewer than 3 seeds in common with random." in text


def test_runs_that_are_copies_of_each_other_are_told() -> None:
    plan = make_plan(WAYS, seeds=6)
    records = make_records(plan, normal(dict.fromkeys(WAYS, 0.01)))
    for record in records:
        if "round_robin" in record["run"]:
            record["parameters"] = "same"
    text = said(analyse(plan, records))
    assert "round_robin: 5 of its runs ended bit-identical to another" in text
    assert "stratified: 5 of its runs" not in text


def test_equal_numbers_are_said_and_not_divided() -> None:
    constant = made(lambda run: 0.1 + 0.2 if run.cell.sharding == "random" else 0.4)
    text = said(constant)
    assert "stratified: neither it nor random varies from seed to seed." in text
    assert "infinitely" not in text
    assert "p < 0.001" not in text
    still = made(lambda run: 0.5 + 0.01 * run.seed if run.cell.sharding == "random" else 0.4)
    assert "stratified: it does not vary from seed to seed, while random does." in said(still)


def test_equivalence_is_adjusted_over_the_family_too() -> None:
    found = made(normal(dict.fromkeys(WAYS, 0.01)), margin=0.01)
    comparisons = [c for m in found.settings[0].members.values() if (c := m.comparisons[PRIMARY])]
    assert [c.adjusted_equivalence_p for c in comparisons] == pytest.approx(
        adjust([c.equivalence_p for c in comparisons])
    )
    assert any(c.adjusted_equivalence_p > c.equivalence_p for c in comparisons)


def test_a_member_that_varies_more_is_less_steady() -> None:
    text = said(made(normal({"random": 0.004, "stratified": 0.02, "round_robin": 0.004})))
    assert "Less steady than random: the final accuracy varies more from seed to seed with stratified." in text


def test_means_that_are_equal_within_the_margin_are_said_to_be() -> None:
    text = said(made(normal(dict.fromkeys(WAYS, 0.001)), margin=0.01))
    assert "Mean equal to random within 1 points: stratified and round_robin." in text
    assert len(re.findall(r"equal within 1 points \(90 %: [+-]0\.\d\d to [+-]0\.\d\d, p < 0\.001\)", text)) == 2


def test_a_difference_before_the_adjustment_is_a_hint() -> None:
    """Means differ by 2.4 standard errors: p is 0.03 of one comparison, and 0.06 of two."""
    wave = np.resize([-1.0, 1.0], 19)
    step = wave / np.sqrt(((wave - wave.mean()) ** 2).mean() / 18)

    def draw(run: Run) -> float:
        shift = {"random": 0.0, "stratified": 2.4, "round_robin": 0.1}[run.cell.sharding]
        return 0.6 + 0.001 * (run.seed % 5) + 0.001 * (shift + (step[run.seed] if shift else 0.0))

    text = said(made(draw))
    assert re.search(
        r"stratified: .* A hint of a difference: p 0\.0[2-4]\d before Holm's adjustment, 0\.0[5-8]\d after", text
    )
    assert text.count("A hint of a difference") == 1


def test_two_seeds_say_nothing() -> None:
    text = said(made(normal(dict.fromkeys(WAYS, 0.01)), seeds=2))
    assert text.startswith("No result yet: a comparison needs 3 seeds in common with random.")


def test_a_plan_of_one_configuration_compares_nothing() -> None:
    text = said(made(normal({"random": 0.01}), ways=("random",)))
    assert text.startswith("The plan has no configuration to compare with random.")


def test_a_study_in_progress_says_how_far_it_is() -> None:
    plan = make_plan(WAYS, seeds=10)
    records = make_records(plan, normal(dict.fromkeys(WAYS, 0.01)))[:17]
    found = analyse(plan, records)
    assert said(found).startswith("Provisional: 17 of 30 runs are done.")
    assert "Based on 17 of 30 runs" in said(found)
    assert {m.name: m.summaries[PRIMARY].n for m in found.settings[0].members.values()} == {
        "random": 6,
        "stratified": 6,
        "round_robin": 5,
    }
    assert found.seeds == 5  # pairs of the member that has the fewest


def test_runs_that_diverged_are_counted_and_in_no_mean() -> None:
    draw = normal(dict.fromkeys(WAYS, 0.01))

    def some_diverge(run: Run) -> float | None:
        return None if run.cell.sharding == "stratified" and run.seed in (2, 5) else draw(run)

    found = made(some_diverge)
    member = found.settings[0].members["stratified"]
    comparison = member.comparisons[PRIMARY]
    assert comparison is not None
    assert (member.diverged, member.summaries[PRIMARY].n, comparison.n) == (2, 17, 17)
    assert "stratified: 2 of 19 runs diverged, and no mean includes them." in said(found)


def test_a_diverging_member_is_not_better() -> None:
    draw = normal({"random": 0.02, "stratified": 0.002, "round_robin": 0.02})
    found = made(lambda run: None if run.cell.sharding == "stratified" and run.seed < 9 else draw(run))
    assert (
        "Steadier than random: the final accuracy varies less from seed to seed with stratified (in the 10 of 19 runs that"
        " did not diverge)." in said(found)
    )
    levels = {finding.text.partition(":")[0]: finding.level for finding in findings(found)}
    assert levels["stratified"] == "worse"
    assert found.seeds == 19  # pairs of the comparison that showed nothing


def test_runs_that_learned_nothing_are_told() -> None:
    plan = make_plan(WAYS, seeds=6)
    records = make_records(plan, normal(dict.fromkeys(WAYS, 0.01)))
    for record in records:
        record["learned"] = record["run"] != "made-up/stratified/cnn/asp/3"
    text = said(analyse(plan, records))
    assert "stratified: 1 of 6 runs learned nothing" in text
    assert text.count("learned nothing") == 1


def test_runs_of_other_programs_or_machines_are_counted() -> None:
    plan = make_plan(WAYS, seeds=6)
    records = make_records(plan, normal(dict.fromkeys(WAYS, 0.01)))
    assert "different environments" not in said(analyse(plan, records))
    for record in records[:4]:
        record["environment"] = record["environment"] | {"code": "abc", "torch": "3"}
    found = analyse(plan, records)
    assert (
        "The runs come from different environments: versions of this program: abc (4 runs) and unknown (14 runs); torch: 3"
        " (4 runs) and 2 (14 runs)." in said(found)
    )
    page = to_markdown(found)
    assert "- python 3.11, torch 2, cores 2 (14 runs)" in page or "- cores 2, python 3.11, torch 2 (14 runs)" in page


def test_differences_are_of_equal_seeds() -> None:
    """A difference that a common seed hides from unpaired tests: each pair differs by the same."""

    def draw(run: Run) -> float:
        base = 0.6 + 0.05 * float(np.random.default_rng(run.seed).standard_normal())
        return base + (0.002 + 1e-4 * (run.seed % 3) if run.cell.sharding == "stratified" else 0)

    comparison = made(draw, ways=("random", "stratified")).settings[0].members["stratified"].comparisons[PRIMARY]
    assert comparison is not None
    assert comparison.difference_p < 1e-10
    assert comparison.correlation > 0.99


def test_p_values_are_adjusted_over_the_whole_study() -> None:
    plan = make_plan(WAYS, seeds=9, models={"a": {"model": "cnn"}, "b": {"model": "resnet20"}})
    found = analyse(plan, make_records(plan, normal({"random": 0.02, "stratified": 0.005, "round_robin": 0.02})))
    comparisons = [c for s in found.settings for m in s.members.values() if (c := m.comparisons[PRIMARY])]
    assert found.family == len(comparisons) == 4
    assert [c.adjusted_spread_p for c in comparisons] == pytest.approx(adjust([c.spread_p for c in comparisons]))


def test_protocols_are_compared_as_ways_of_sharding_are() -> None:
    plan = make_plan(
        ("random", "stratified"),
        seeds=9,
        compare="protocol",
        baseline="bsp",
        protocols={"asp": {"protocol": "asp"}, "bsp": {"protocol": "bsp"}},
    )
    draw = normal(dict.fromkeys(WAYS, 0.01))
    found = analyse(plan, make_records(plan, lambda run: draw(run) or 0))
    assert [setting.name for setting in found.settings] == ["made-up, random, cnn", "made-up, stratified, cnn"]
    assert list(found.settings[0].members) == ["asp", "bsp"]
    assert "no difference from bsp is shown for asp (made-up, random, cnn) and asp (made-up, stratified, cnn)" in said(
        found
    )


@pytest.mark.full
def test_the_power_predicts_how_many_studies_find_a_ratio() -> None:
    """From the ledger to the words."""
    seeds, studies, found = 7, 200, 0
    for study in range(studies):
        draw = normal({"random": 0.03, "stratified": 0.01}, seed=study)
        found += "Steadier than random" in said(made(draw, seeds, ("random", "stratified")))
    assert found / studies == pytest.approx(power(seeds, 3.0), abs=4 * math.sqrt(0.25 / studies))


@pytest.mark.full
def test_of_many_studies_without_a_difference_few_report_one() -> None:
    """From the ledger to the words: what is said of spread, and of means, is wrong in a twentieth of the studies at most."""
    studies, wrong = 120, {"teadier than|Less steady": 0, "Mean differs": 0}
    for study in range(studies):
        text = said(made(normal(dict.fromkeys(WAYS, 0.01), seed=study), seeds=7))
        for words in wrong:
            wrong[words] += bool(re.search(words, text))
    assert all(0 < times <= studies * 0.05 + 4 * math.sqrt(studies * 0.05 * 0.95) for times in wrong.values())


def test_evenness_that_goes_with_spread_is_seen() -> None:
    """Seeds with less even shards end farther from the median."""
    signs = {seed: (-1) ** (seed // 7) for seed in range(28)}
    found = made(lambda run: 0.6 + 0.01 * (run.seed % 7) * signs[run.seed], seeds=28, ways=("random", "stratified"))
    test = next(test for test in found.qualities if test.quality == "mmd_ratio")
    assert test.within.rho > 0.8
    assert test.within.p == pytest.approx(1 / (1 + PERMUTATIONS))
    assert test.within.runs == 56
    assert test.within.adjusted_p == pytest.approx(adjust([t.within.p for t in found.qualities])[0])
    assert "Unevenness of shards by MMD2 correlates with the distance of a run from the median of its strategy" in said(
        found
    )


def test_differences_between_members_predict_no_spread() -> None:
    """Two ways of three are two clusters of points, whatever is left out."""
    plan = make_plan(WAYS, seeds=28)
    records = make_records(plan, normal({"random": 0.02, "stratified": 0.004, "round_robin": 0.1}))
    shift = {"random": 2.0, "stratified": 0.0, "round_robin": 300.0}
    for record in records:
        added = shift[record["run"].split("/")[1]]
        record["sharding"] = record["sharding"] | {"mmd_ratio": added + record["sharding"]["mmd_ratio"]}
    found = analyse(plan, records)
    test = next(test for test in found.qualities if test.quality == "mmd_ratio")
    assert test.without.rho > 0.4
    assert "Unevenness of shards by MMD2 is not shown to correlate with" in said(found)


def test_a_member_of_equal_shards_says_nothing_about_evenness() -> None:
    """The mean of equal numbers differs from them by rounding."""
    plan = make_plan(WAYS, seeds=28)
    records = make_records(plan, normal(dict.fromkeys(WAYS, 0.01)))
    for record in records:
        if "stratified" in record["run"]:
            record["sharding"] = record["sharding"] | {"mmd_ratio": 0.814292}
    test = next(test for test in analyse(plan, records).qualities if test.quality == "mmd_ratio")
    assert (test.over_all.runs, test.within.runs) == (84, 56)


def test_one_very_uneven_member_predicts_no_spread() -> None:
    plan = make_plan(WAYS, seeds=28)
    records = make_records(plan, normal({"random": 0.01, "stratified": 0.01, "round_robin": 0.1}))
    for record in records:
        if "round_robin" in record["run"]:
            record["sharding"] = record["sharding"] | {"mmd_ratio": 300 + record["sharding"]["mmd_ratio"]}
    found = analyse(plan, records)
    test = next(test for test in found.qualities if test.quality == "mmd_ratio")
    assert test.over_all.rho > 0.3
    assert (test.least_even, test.without.runs) == ("round_robin", 56)
    assert abs(test.without.rho) < 0.3
    assert "Unevenness of shards by MMD2 is not shown to correlate with" in said(found)


def test_skewed_values_are_tested_by_permutations() -> None:
    """Exponential accuracies, of which one side has three times the spread."""
    rng = np.random.default_rng(4)
    drops = {"random": 0.03 * rng.exponential(size=19), "stratified": 0.01 * rng.exponential(size=19)}
    skewed = made(lambda run: 0.7 - drops[run.cell.sharding][run.seed], seeds=19, ways=("random", "stratified"))
    comparison = skewed.settings[0].members["stratified"].comparisons["final_accuracy"]
    assert comparison is not None
    spread, means = (f"{p:.3f}" for p in (comparison.flipped_spread_p, comparison.flipped_difference_p))
    assert f"the final accuracies are skewed ({comparison.skewness:+.1f}, p " in said(skewed)
    assert f"spread p {spread}, means p {means}, not adjusted." in said(skewed)
    even = made(lambda run: 0.7 + 0.01 * (run.seed % 5), seeds=20, ways=("random", "stratified"))
    assert "are skewed" not in said(even)


@pytest.mark.slow
def test_one_distant_run_decides_nothing_about_spread() -> None:
    """The test is of mean distances from the median, and the standard deviation is what that one makes it."""
    rng = np.random.default_rng(3)
    drawn = {"random": rng.normal(0, 0.004, 50), "stratified": rng.normal(0, 0.0008, 50)}
    drawn["stratified"][0] -= 0.035
    found = made(lambda run: 0.6 + drawn[run.cell.sharding][run.seed], seeds=50, ways=("random", "stratified"))
    comparison = found.settings[0].members["stratified"].comparisons["final_accuracy"]
    assert comparison is not None
    assert comparison.sd_ratio < 1 < comparison.distance_ratio
    assert comparison.adjusted_spread_p < 0.05
    assert "Spread differs from random, but not in one direction: stratified." in said(found)
    assert "teady" not in said(found)
    about = [finding for finding in findings(found) if finding.part == "comparison"]
    (finding,) = [finding for finding in about if finding.text.startswith("stratified: ")]
    assert "a few runs decide" in finding.text
    assert finding.level == ("worse" if comparison.adjusted_difference_p < 0.05 else "plain")


def test_the_curve_is_compared_over_all_epochs(steadier: Analysis) -> None:
    members = steadier.settings[0].members
    assert members["stratified"].curve_ratio > 2
    assert members["stratified"].curve_adjusted_p < 0.01
    assert math.isnan(members["random"].curve_p)
    assert "From epoch 2 to 3 the mean of random moved by +5.00 points." in said(steadier)
