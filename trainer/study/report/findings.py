"""The results of a study in words.

They never claim too much: a test that finds nothing does not prove that nothing is there."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from trainer.study.analysis.results import Analysis, StudySetting
from trainer.study.analysis.sides import PRIMARY, ComparisonSide
from trainer.study.analysis.statistics import LEVEL, Comparison
from trainer.study.report import remarks
from trainer.study.report.table import ends_in_points
from trainer.study.report.words import POINTS, hours, interval, list_in_words, member_in_words, number, p_value, where

Level = Literal["better", "worse", "plain"]
Part = Literal["answer", "caveat", "comparison", "note"]
FEW_SEEDS = 3
CROSSED = (
    "Nothing is compared, since runs of a crossed design share shard sets or seeds and are not independent; the tables have"
    " the components of variance."
)
NO_ACCURACY = "real targets have no accuracy; the tables compare their losses"


class StudyFinding(NamedTuple):
    """A sentence of the report. level: decides its colour. part: the section of the page that shows it."""

    level: Level
    text: str
    part: Part = "note"


def findings(analysis: Analysis) -> list[StudyFinding]:
    """Return the sentences of the report, most important first.

    The answer and its basis come first; then, setting by setting, every comparison of the final accuracy, with
    reservations about its runs, and further remarks."""
    result = [StudyFinding("plain", text, "answer") for text in _answer(analysis)]
    result += [StudyFinding("plain", text) for text in (_basis(analysis), *remarks.mixed_environments(analysis))]
    result += [StudyFinding("plain", text) for text in remarks.changed_seeds(analysis)]
    result += [StudyFinding("worse", text, "caveat") for text in remarks.changed_tests(analysis)]
    for setting in analysis.settings:
        for member in setting.members.values():
            comparison = member.comparisons[PRIMARY]
            if comparison:
                result.append(_about(analysis, setting, member, comparison))
            elif member.name != analysis.baseline and not analysis.sets:
                # Members without a comparison are listed with the reason, so that none is silently missing.
                few = f"fewer than {FEW_SEEDS} seeds in common with {analysis.baseline}"
                why = NO_ACCURACY if _has_no_accuracy(member) else few
                result.append(
                    StudyFinding(
                        "plain", f"{member_in_words(analysis, setting, member)}: not compared: {why}.", "comparison"
                    )
                )
            result += [StudyFinding("worse", text, "caveat") for text in remarks.caveats(analysis, setting, member)]
        more = (
            remarks.ended_runs, remarks.skewed_values, remarks.same_shards, remarks.evenness, remarks.twins,
            remarks.published_ratios,
        )  # fmt: skip
        result += [StudyFinding("plain", text) for about in more for text in about(analysis, setting)]
    return result


def _has_no_accuracy(member: ComparisonSide) -> bool:
    """True if the member has runs that ended with a model, but with real targets."""
    return PRIMARY not in member.summaries and member.diverged < len(member.records)


def _answer(analysis: Analysis) -> list[str]:
    """Return sentences that name the members by result.

    The spread differs from the baseline's, or no difference is shown; the mean differs, is equal or is undecided.
    Without accuracies or comparisons, return the reason instead."""
    base = analysis.baseline
    comparisons = [
        (member_in_words(analysis, s, m) + _count_note(m), c)
        for s in analysis.settings
        for m in s.members.values()
        if (c := m.comparisons[PRIMARY])
    ]
    lines = []
    if analysis.runs < analysis.planned:
        lines.append(f"Provisional: {analysis.runs:,} of {analysis.planned:,} runs are done.")
    members = [member for setting in analysis.settings for member in setting.members.values()]
    if members and all(map(_has_no_accuracy, members)):
        return [*lines, f"No final accuracies are compared: {NO_ACCURACY}."]
    if analysis.sets:
        of_sets = [_set_words(analysis, s, m) for s in analysis.settings for m in s.members.values()]
        return [*lines, *filter(None, of_sets), CROSSED]
    if not comparisons and not lines and all(list(s.members) == [base] for s in analysis.settings):
        return [f"The plan has no configuration to compare with {base}."]
    if not comparisons:
        return [*lines, f"No result yet: a comparison needs {FEW_SEEDS} seeds in common with {base}."]
    # A significant difference of spread is called steadier or less steady only if both ratios agree.
    directions = {
        side: [name for name, c in comparisons if c.adjusted_spread_p < LEVEL and c.steadier is side]
        for side in (True, False, None)
    }
    alike = [name for name, c in comparisons if not c.adjusted_spread_p < LEVEL]
    if steadier := directions[True]:
        lines.append(
            f"Steadier than {base}: the final accuracy varies less from seed to seed with {list_in_words(steadier)}."
        )
    if wilder := directions[False]:
        lines.append(
            f"Less steady than {base}: the final accuracy varies more from seed to seed with {list_in_words(wilder)}."
        )
    if undirected := directions[None]:
        lines.append(
            f"Spread differs from {base}, but not in one direction: {list_in_words(undirected)}. Most runs point one way,"
            " and a few outliers the other."
        )
    if alike:
        lines.append(f"Spread: no difference from {base} is shown for {list_in_words(alike)}. {_visible(analysis)}")
    means = [
        f"{name} ({POINTS * c.difference:+.2f} points)" for name, c in comparisons if c.adjusted_difference_p < LEVEL
    ]
    if means:
        lines.append(f"Mean differs from {base}: {list_in_words(means)}.")
    # Without a significant difference, the means may still be shown to be equivalent.
    rest = [(name, c.adjusted_equivalence_p < LEVEL) for name, c in comparisons if not c.adjusted_difference_p < LEVEL]
    margin = f"{analysis.margin * POINTS:g} points"
    if equal := [name for name, is_equal in rest if is_equal]:
        lines.append(f"Mean equal to {base} within {margin}: {list_in_words(equal)}.")
    if unknown := [name for name, is_equal in rest if not is_equal]:
        lines.append(
            f"Mean undecided: neither a difference from {base} nor equality within {margin} is shown for"
            f" {list_in_words(unknown)}."
        )
    return [*lines, *(_fraction_words(analysis, setting) for setting in analysis.settings if setting.search)]


def _fraction_words(analysis: Analysis, setting: StudySetting) -> str:
    """Return a sentence on the smallest fraction of sync-switch that suffices, and on the training time that it takes."""
    search = setting.search
    assert search, "the caller has checked"
    base = analysis.baseline
    question = (
        f"fraction of sync-switch{where(analysis, setting)} from which on the mean accuracy is equivalent with that of"
        f" {base} within {analysis.margin * POINTS:g} points"
    )
    # Otherwise a reader who finds them equivalent in the tables would wonder why they are not the answer.
    alone = [f"{fraction:g}" for fraction in search.equivalent if search.smallest is None or fraction < search.smallest]
    verb = "is" if len(alone) == 1 else "are"
    rest = f"; {list_in_words(alone)} {verb} equivalent, but a larger one is not shown to be" if alone else ""
    if search.smallest is None:
        return f"No {question} is shown, of {list_in_words([f'{fraction:g}' for fraction in search.fractions])}{rest}."
    time = f"with {search.time_ratio:.2f} of the training time of {base} (median over equal seeds)"
    return (
        f"The smallest {question} is {search.smallest:g}, {time}{rest}. The time is of the seeds that chose the fraction, so"
        " other seeds may give another fraction and time."
    )


def _set_words(analysis: Analysis, setting: StudySetting, member: ComparisonSide) -> str:
    """Return a sentence on the effect of the shard set in a crossed design; empty without components or a test."""
    c = member.components
    if c is None or math.isnan(c.set_p):
        return ""
    effect = "an effect" if c.adjusted_set_p < LEVEL else "no effect"
    ends = f"95 %: {ends_in_points(c.set_interval, '.3f')}"
    sizes = f"its standard deviation is {POINTS * c.set_sd:.3f} points ({ends}), the rest's {POINTS * c.rest_sd:.3f}"
    ps = f"p {p_value(c.set_p)}, adjusted {p_value(c.adjusted_set_p)}"
    test = f"F test between {c.sets} sets of {c.seeds} seeds each: {ps}"
    return f"{member_in_words(analysis, setting, member)}: {effect} of the shard set is shown; {sizes} ({test})."


def _count_note(member: ComparisonSide) -> str:
    """Return a note on the number of runs behind an answer, if some of them diverged."""
    runs = len(member.records)
    return f" (in the {runs - member.diverged} of {runs} runs that did not diverge)" if member.diverged else ""


def _visible(analysis: Analysis) -> str:
    """Return a sentence on the smallest ratio of standard deviations that this number of seeds detects."""
    if analysis.smallest_ratio is None:
        return f"{analysis.seeds} seeds detect no ratio of standard deviations reliably."
    return (
        f"{analysis.seeds} seeds detect a true ratio of standard deviations of {analysis.smallest_ratio:.2f} with"
        " probability 0.8; smaller ratios are missed more often."
    )


def _basis(analysis: Analysis) -> str:
    """Return how many runs the results are based on, the time that they took, and how p-values are adjusted."""
    proportion = "all" if analysis.runs == analysis.planned else f"{analysis.runs:,} of"
    number = f"{analysis.family} comparison{'s' if analysis.family != 1 else ''}"
    family = f"P-values are adjusted over {number} (Holm), separately for spread, means and equivalence"
    components = [m.components for s in analysis.settings for m in s.members.values() if m.components]
    tests = sum(not math.isnan(each.set_p) for each in components)
    sentences = [
        f"Based on {proportion} {analysis.planned:,} runs, {hours(analysis.run_hours)} of computing.",
        remarks.plateau_sentence(analysis),
        f"{family}. Intervals are not adjusted." * (analysis.family > 0),
        f"P-values of sets are adjusted over {tests} test{'s' if tests != 1 else ''} (Holm)." * (tests > 0),
    ]
    return " ".join(filter(None, sentences))


def _about(analysis: Analysis, setting: StudySetting, member: ComparisonSide, comparison: Comparison) -> StudyFinding:
    """Return the finding of one comparison with the baseline.

    Its level is "plain" without a significant difference, "better" if every difference is in favour of the member, and
    "worse" otherwise. If there is a difference, more diverged runs than the baseline's count against the member."""
    baseline = setting.members[analysis.baseline]
    # One entry per difference that is shown: True if it is in favour of the member.
    favours = [comparison.steadier] * (comparison.adjusted_spread_p < LEVEL and comparison.steadier is not None)
    favours += [comparison.difference > 0] * (comparison.adjusted_difference_p < LEVEL)
    if favours and member.diverged > baseline.diverged:
        favours.append(False)
    level: Level = "plain" if not favours else "better" if all(favours) else "worse"
    words = f"{_spread_words(analysis, comparison)} {_mean_words(analysis, comparison)}"
    text = f"{member_in_words(analysis, setting, member)}: {words}"
    return StudyFinding(level, text, "comparison")


def _spread_words(analysis: Analysis, comparison: Comparison) -> str:
    """Return a clause on the standard deviation of the baseline over the member's, with its interval.

    If the difference is significant, the clause has its p-value; if a few extreme runs decide its direction, a warning.
    """
    if math.isnan(comparison.sd_ratio):
        return f"neither it nor {analysis.baseline} varies from seed to seed."
    if math.isinf(comparison.sd_ratio):
        return f"it does not vary from seed to seed, while {analysis.baseline} does."
    times = f"{number(comparison.sd_ratio)} ({interval(comparison.sd_ratio_f)})"
    ratio = f"standard deviation of {analysis.baseline} / its own = {times}"
    if comparison.adjusted_spread_p < LEVEL:
        p = f"p {p_value(comparison.adjusted_spread_p)}"
        # The test compares mean distances from the median, which a few extreme runs affect less than the sd.
        if comparison.steadier is None:
            distance = f"the ratio of mean distances from the median {number(comparison.distance_ratio)}"
            return f"{ratio}, {distance}: a few runs decide, {p}."
        return f"{ratio}, {p}."
    return f"{ratio}: no difference is shown."


def _mean_words(analysis: Analysis, comparison: Comparison) -> str:
    """Return a sentence on the difference of the means in percentage points, with its 95 % interval.

    It says whether a difference is shown, equality within the margin, both, or neither ("undecided")."""
    points = comparison.difference * POINTS
    side = "higher" if points >= 0 else "lower"
    mean = f"Mean {abs(points):.2f} points {side} ({ends_in_points(comparison.difference_interval)})"
    equality = (
        f"90 %: {ends_in_points(comparison.equivalence_interval)}, p {p_value(comparison.adjusted_equivalence_p)}"
    )
    same = f"equal within {analysis.margin * POINTS:g} points ({equality})"
    if comparison.adjusted_difference_p < LEVEL:
        but = f", but {same}" if comparison.adjusted_equivalence_p < LEVEL else ""
        return f"{mean}, p {p_value(comparison.adjusted_difference_p)}{but}."
    hint = ""
    # Before the adjustment there was a difference, which a reader should know of.
    if comparison.difference_p < LEVEL:
        adjusted = p_value(comparison.adjusted_difference_p)
        hint = (
            f" A hint of a difference: p {p_value(comparison.difference_p)} before Holm's adjustment, {adjusted} after."
        )
    if comparison.adjusted_equivalence_p < LEVEL:
        return f"{mean}: {same}.{hint}"
    return f"{mean}: undecided.{hint}"
