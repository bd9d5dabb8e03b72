"""Remarks beside the comparisons: convergence, environments, evenness of shards, another study, and the paper."""

from __future__ import annotations

import math

from trainer.study.analysis.published import RUNS, PublishedTable, published_of
from trainer.study.analysis.qualities import FEWEST
from trainer.study.analysis.ratios import compare_ratios
from trainer.study.analysis.results import Analysis, StudySetting
from trainer.study.analysis.sides import PRIMARY, ComparisonSide
from trainer.study.analysis.statistics import LEVEL, f_interval
from trainer.study.analysis.twins import ALL, Twins
from trainer.study.report.table import ends_in_points
from trainer.study.report.words import (
    POINTS,
    QUALITIES,
    interval,
    list_in_words,
    member_in_words,
    number,
    p_value,
    runs_in_words,
    where,
)

MAKERS = {
    "code": "versions of this program",
    "torch": "torch",
    "numpy": "numpy",
    "python": "Python",
    "processor": "processors",
    "device": "devices",
}


def plateau_sentence(analysis: Analysis) -> str:
    """Return a sentence on whether the runs had levelled off: the baseline's gain between the last two evaluations.

    A large gain means that longer runs would give other results. Empty without learning curves."""
    clauses = []
    for setting in analysis.settings:
        baseline = setting.members.get(analysis.baseline)
        if baseline and baseline.curves and len(baseline.curves.epochs) > 1:
            before, last = baseline.curves.epochs[-2:]
            gain = f"{POINTS * baseline.curves.last_gain:+.2f} points"
            name = f"{analysis.baseline}{where(analysis, setting)}"
            clauses.append(f"from epoch {before:g} to {last:g} the mean of {name} moved by {gain}")
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def mixed_environments(analysis: Analysis) -> list[str]:
    """Return a warning if the runs come from different programs or machines, otherwise nothing.

    Runs with equal seeds may then differ for that reason alone."""
    lines = []
    for key, words in MAKERS.items():
        counts: dict[str, int] = {}
        for environment, runs in analysis.environments:
            value = str(environment.get(key, "unknown"))
            counts[value] = counts.get(value, 0) + runs
        if len(counts) > 1:
            each = [f"{value} ({runs_in_words(runs)})" for value, runs in counts.items()]
            lines.append(f"{words}: {list_in_words(each)}")
    return [f"The runs come from different environments: {'; '.join(lines)}."] if lines else []


def changed_tests(analysis: Analysis) -> list[str]:
    """Return warnings for a baseline or margin that changed after the study began."""
    now = {"baseline": analysis.baseline, "margin": analysis.margin}
    initial_tests = analysis.begun
    return [
        f"The {key} was {initial_tests[key]} at first and is {value} now: a test that is chosen after seeing results"
        " proves less."
        for key, value in now.items()
        if initial_tests.get(key, value) != value
    ]


def changed_seeds(analysis: Analysis) -> list[str]:
    """Return warnings if the seeds changed since the study began, or if the ledger holds runs that are not used."""
    sentences = []
    initial_seeds = analysis.begun.get("seeds", analysis.planned_seeds)
    if initial_seeds != analysis.planned_seeds:
        text = "tests prove less if seeds are added or left out after seeing results."
        sentences.append(f"This study began with {initial_seeds} seeds and has {analysis.planned_seeds} now: {text}")
    if analysis.left_out:
        runs = f"{analysis.left_out:,} {'runs' if analysis.left_out > 1 else 'run'}"
        sentences.append(f"Not included: {runs} of the ledger with other seeds or of skipped cells.")
    return sentences


def same_shards(analysis: Analysis, setting: StudySetting) -> list[str]:
    """Return a remark on the ways of sharding whose shards are the same for every seed.

    Empty if there are none, or if ways of sharding are not compared."""
    shards = {name: [record["shards"] for record in member.records] for name, member in setting.members.items()}
    same = [name for name, digests in shards.items() if len(digests) > 1 == len(set(digests))]
    if analysis.compared != "sharding" or not same:
        return []
    text = f"The shards of {list_in_words(same)}{where(analysis, setting)} are the same for every seed"
    return [f"{text}: only the other effects of a seed cause their spread."]


def caveats(analysis: Analysis, setting: StudySetting, member: ComparisonSide) -> list[str]:
    """Return warnings about the runs of a member: those that diverged, learned nothing or repeated another run.

    member: one of the compared alternatives."""
    runs = len(member.records)
    about = member_in_words(analysis, setting, member)
    idle = sum(record.get("learned") is False for record in member.records)
    sentences = []
    if member.diverged:
        sentences.append(f"{about}: {member.diverged} of {runs} runs diverged, and no mean includes them.")
    if idle:
        sentences.append(f"{about}: {idle} of {runs} runs learned nothing: they ended no better than guessing.")
    if member.repeats:
        text = f"{member.repeats} of its runs ended bit-identical to another seed's run: the seeds do not change them,"
        sentences.append(f"{about}: {text} although tests count them as independent.")
    return sentences


def ended_runs(analysis: Analysis, setting: StudySetting) -> list[str]:
    """Return a remark on the runs that ended before one of the plan's times; empty if there are none."""
    members = setting.members.values()
    runs = [record for member in members for record in member.records if (record["curve"] or {}).get("seconds")]
    counts = {
        each.seconds: sum(record["seconds"] < each.seconds for record in runs)
        for member in members
        for each in member.accuracy_by_time
    }
    ends = [f"{count} of {len(runs)} runs by {seconds:g} s" for seconds, count in counts.items() if count]
    text = f"Accuracy by time of training{where(analysis, setting)}: a run that has ended keeps its final accuracy"
    return [f"{text} ({list_in_words(ends)})."] if ends else []


def skewed_values(analysis: Analysis, setting: StudySetting) -> list[str]:
    """Return remarks on comparisons of values that are too skewed to be normal, with p-values that do not assume it."""
    sentences = []
    for member in setting.members.values():
        c = member.comparisons[PRIMARY]
        if c and c.skewness_p < LEVEL:
            skewed = f"skewed ({c.skewness:+.1f}, p {p_value(c.skewness_p)})"
            about = f"{member_in_words(analysis, setting, member)}: the final accuracies are {skewed}"
            ps = f"spread p {p_value(c.flipped_spread_p)}, means p {p_value(c.flipped_difference_p)}, not adjusted"
            sentences.append(
                f"{about}; by exchanges of the accuracies, or of their distances from the medians, of a seed: {ps}."
            )
    return sentences


def evenness(analysis: Analysis, setting: StudySetting) -> list[str]:
    """Return sentences on whether runs with less even shards end further from the median of their strategy.

    A sentence per measure of shards, about runs of equal strategy. Empty unless ways of sharding are compared."""
    lines = []
    for test in analysis.qualities if analysis.compared == "sharding" else []:
        correlation = test.within
        if test.setting == setting.name and not math.isnan(correlation.rho):
            verb = "correlates" if correlation.adjusted_p < LEVEL else "is not shown to correlate"
            numbers = f"rank correlation within strategies {correlation.rho:+.2f}"
            numbers = f"{numbers}, {correlation.runs} runs of strategies whose shards differ"
            numbers = f"{numbers}, p {p_value(correlation.adjusted_p)}"
            text = f"{verb} with the distance of a run from the median of its strategy ({numbers})."
            lines.append(f"Unevenness of shards by {QUALITIES[test.quality]}{where(analysis, setting)} {text}")
    return lines


def twins(analysis: Analysis, setting: StudySetting) -> list[str]:
    """Return sentences that compare a setting's members with the same runs of another study, ``analysis.beside``.

    They also name differences of the environments. Empty if the plan names no other study."""
    other = analysis.beside
    of_setting = [twins for twins in analysis.twins if twins.setting == setting.name]
    if not other:
        return []
    if not of_setting:
        few = f"fewer than {FEWEST} runs with equal images and shards, or no such study"
        return [f"Cannot be compared with {other}{where(analysis, setting)}: {few}."]
    same = all(twins.same_seeds for twins in of_setting)
    runs = "the same seeds" if same else "runs with equal images and shards, but other seeds"
    lines = [
        f"Compared with {other}{where(analysis, setting)}, {runs}: {'; '.join(_twin(analysis, t) for t in of_setting)}."
    ]
    # Members without enough common runs are named, so that they are not taken for compared.
    if lone := [name for name in setting.members if name not in {twins.member for twins in of_setting}]:
        lines.append(f"Not compared with {other}, which has fewer than {FEWEST} matching runs: {list_in_words(lone)}.")
    if differing := [words for key, words in MAKERS.items() if any(_differ(twins, key) for twins in of_setting)]:
        lines.append(
            f"The environments of the two studies differ too, which may cause part of the difference:"
            f" {list_in_words(differing)}."
        )
    return lines


def _twin(analysis: Analysis, twins: Twins) -> str:
    """Return a clause on the mean and standard deviation of one member, or of ALL, here and in the other study."""
    comparison = twins.found
    whose = "over all strategies, averaged by seed, the" if twins.member == ALL else f"the {twins.member}"
    side = "higher" if comparison.difference >= 0 else "lower"
    points = abs(POINTS * comparison.difference)
    pairs = f"{comparison.n} {'seeds' if twins.member == ALL else 'pairs'}"
    text = (
        f"{whose} mean is {points:.2f} points {side} here ({ends_in_points(comparison.difference_interval)}, {pairs})"
    )
    if not math.isnan(comparison.sd_ratio_bootstrap.low) and twins.member != ALL:
        ratio = f"{number(comparison.sd_ratio)} ({interval(comparison.sd_ratio_f)})"
        text += f", and the standard deviation in {analysis.beside} / here = {ratio}"
    return text


def _differ(twins: Twins, key: str) -> bool:
    """True if the makers of the runs differ in a property that both studies recorded. Older studies recorded fewer."""
    own_values, other_values = (
        {str(provenance[key]) for provenance, _ in side if key in provenance} for side in twins.made
    )
    return bool(own_values and other_values) and own_values != other_values


def published_ratios(analysis: Analysis, setting: StudySetting) -> list[str]:
    """Return a sentence with the paper's ratios of standard deviations, and a test of whether they differ from ours.

    Empty if the paper has no table of the data set, or if random sharding is not the baseline."""
    printed = published_of(setting.dataset)
    if not printed or (analysis.compared, analysis.baseline) != ("sharding", "random"):
        return []
    clauses = []
    for name, member in setting.members.items():
        published = printed.rows.get(name)
        ours = member.comparisons[PRIMARY]
        if published and ours and not math.isnan(ours.sd_ratio_f.low):
            ratio = printed.rows["random"].accuracy_sd / published.accuracy_sd
            # The paper gives no intervals; these follow from its number of runs.
            worth = f_interval(ratio, RUNS)
            low, high = ours.sd_ratio_f
            text = f"{number(ratio)} for {name} ({interval(worth)}), here {number(low)} to {number(high)}"
            relative = compare_ratios(ratio, RUNS, ours.sd_ratio, ours.n)
            text += f", {number(relative.value)} times ours ({interval(relative.interval)}, p {p_value(relative.p)})"
            clauses.append(text)
    about = (
        f"The paper's ratios of standard deviations, from {RUNS} runs per side of ResNet-56{where(analysis, setting)}"
    )
    sentences = (
        [f"{about}: {'; '.join(clauses)}. These p-values are not adjusted for several tests."] if clauses else []
    )
    return sentences + _published_training_ratios(analysis, setting, printed)


def _published_training_ratios(analysis: Analysis, setting: StudySetting, printed: PublishedTable) -> list[str]:
    """Return a sentence with the paper's ratios of training accuracy beside this study's; empty if either is unknown.

    The paper prints them for few numbers of clusters, so that ours may be of other ones."""
    base = printed.rows["random"].train_accuracy_sd
    published = [
        f"{number(base / row.train_accuracy_sd)} for {name} ({interval(f_interval(base / row.train_accuracy_sd, RUNS))})"
        for name, row in printed.rows.items()
        if name != "random" and not math.isnan(row.train_accuracy_sd)
    ]
    ours = [
        f"{number(comparison.sd_ratio)} for {name} ({interval(comparison.sd_ratio_f)})"
        for name, member in setting.members.items()
        if name in printed.rows and (comparison := member.comparisons["running_train_accuracy"])
    ]
    # One side alone would be no comparison.
    if not published or not ours:
        return []
    about = f"The paper's ratio of standard deviations of the training accuracy{where(analysis, setting)}"
    return [f"{about}, the largest that it prints: {'; '.join(published)}. Here: {'; '.join(ours)}."]
