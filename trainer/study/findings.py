"""What a study's numbers say, in words that never say more: a test that found nothing is no proof that nothing is there."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from trainer.study.analysis import PRIMARY, Analysis, Member, Setting
from trainer.study.statistics import LEVEL, Comparison, Interval

Level = Literal["better", "worse", "plain"]
POINTS = 100  # percentage points of an accuracy
FEW_SEEDS = 3


class Finding(NamedTuple):
    """level: how the report colours it."""

    level: Level
    text: str


def findings(analysis: Analysis) -> list[Finding]:
    """The first lines of the report: the answer, what it rests on, then every comparison of the final accuracy."""
    said = [Finding("plain", text) for text in (*_answer(analysis), _basis(analysis))]
    for setting in analysis.settings:
        for member in setting.members.values():
            comparison = member.comparisons[PRIMARY]
            if comparison:
                said.append(_about(analysis, setting, member, comparison))
            elif member.name != analysis.baseline:
                few = f"not compared: fewer than {FEW_SEEDS} seeds that {analysis.baseline} has too."
                said.append(Finding("plain", f"{_named(analysis, setting, member)}: {few}"))
            if member.diverged:
                said.append(_diverged(setting, member))
            if member.repeats:
                said.append(_repeats(analysis, setting, member))
    return said


def _answer(analysis: Analysis) -> list[str]:
    """Which members spread otherwise than the baseline, which means differ, and of which nothing could be shown."""
    base = analysis.baseline
    found = [
        (_named(analysis, s, m), c)
        for s in analysis.settings
        for m in s.members.values()
        if (c := m.comparisons[PRIMARY])
    ]
    if not found:
        return [f"Nothing can be said yet: a comparison needs {FEW_SEEDS} seeds of {base} and of another."]
    steadier = [name for name, c in found if c.adjusted_spread_p < LEVEL and c.sd_ratio > 1]
    wilder = [name for name, c in found if c.adjusted_spread_p < LEVEL and c.sd_ratio <= 1]
    alike = [name for name, c in found if not c.adjusted_spread_p < LEVEL]
    lines = []
    if steadier:
        lines.append(f"Steadier than {base}: from seed to seed the final accuracy varies less with {_all(steadier)}.")
    if wilder:
        lines.append(f"Less steady than {base}: the final accuracy varies more with {_all(wilder)}.")
    if alike:
        lines.append(f"Spread: no difference from {base} could be shown for {_all(alike)}. {_visible(analysis)}")
    means = [f"{name} ({POINTS * c.difference:+.2f} points)" for name, c in found if c.adjusted_difference_p < LEVEL]
    if means:
        lines.append(f"Mean: other than {base}'s with {_all(means)}.")
    same = [name for name, c in found if not c.adjusted_difference_p < LEVEL]
    if same:
        lines.append(f"Mean: no difference from {base} could be shown for {_all(same)}.")
    return lines


def _visible(analysis: Analysis) -> str:
    """What would not have been shown either, had it been there."""
    if analysis.smallest_ratio is None:
        return f"With {analysis.seeds} seeds no ratio of standard deviations is shown reliably."
    return (
        f"With {analysis.seeds} seeds a true ratio of standard deviations of {analysis.smallest_ratio:.1f} is shown with a"
        " probability of 0.8, a smaller one is missed more often."
    )


def _basis(analysis: Analysis) -> str:
    done = "all" if analysis.runs == analysis.planned else f"{analysis.runs:,} of"
    return (
        f"This rests on {done} {analysis.planned:,} runs, {hours(analysis.run_hours)} of computing. P-values are adjusted"
        f" over {analysis.family} comparisons (Holm): those of spread, of means and of equivalence apart."
    )


def _about(analysis: Analysis, setting: Setting, member: Member, found: Comparison) -> Finding:
    """Coloured as better only where nothing is worse."""
    steadier, higher = found.sd_ratio > 1, found.difference > 0
    shown = [steadier] * (found.adjusted_spread_p < LEVEL) + [higher] * (found.adjusted_difference_p < LEVEL)
    level: Level = "plain" if not shown else "better" if all(shown) else "worse"
    text = f"{_named(analysis, setting, member)}: {_spread_words(analysis, found)} {_mean_words(analysis, found)}"
    return Finding(level, text)


def _spread_words(analysis: Analysis, found: Comparison) -> str:
    if math.isnan(found.sd_ratio):
        return f"neither it nor {analysis.baseline} varies from seed to seed."
    if math.isinf(found.sd_ratio):
        return f"it does not vary from seed to seed, {analysis.baseline} does."
    times = f"{number(found.sd_ratio)} times as large ({interval(found.sd_ratio_f)})"
    ratio = f"{analysis.baseline}'s standard deviation is {times}"
    if found.adjusted_spread_p < LEVEL:
        return f"{ratio}, p {p_value(found.adjusted_spread_p)}."
    return f"{ratio}: no difference could be shown."


def _mean_words(analysis: Analysis, found: Comparison) -> str:
    points = found.difference * POINTS
    ends = Interval(found.difference_interval.low * POINTS, found.difference_interval.high * POINTS)
    side = "higher" if points >= 0 else "lower"
    mean = f"The mean is {abs(points):.2f} points {side} ({ends.low:+.2f} to {ends.high:+.2f})"
    same = f"equal within {analysis.margin * POINTS:g} points (p {p_value(found.adjusted_equivalence_p)})"
    if found.adjusted_difference_p < LEVEL:
        but = f", and yet {same}" if found.adjusted_equivalence_p < LEVEL else ""
        return f"{mean}, p {p_value(found.adjusted_difference_p)}{but}."
    if found.adjusted_equivalence_p < LEVEL:
        return f"{mean}: {same}."
    return f"{mean}: no difference could be shown, nor that there is none."


def _diverged(setting: Setting, member: Member) -> Finding:
    runs = len(member.records)
    return Finding(
        "worse", f"{setting.name}, {member.name}: {member.diverged} of {runs} runs diverged, and are in no mean."
    )


def _repeats(analysis: Analysis, setting: Setting, member: Member) -> Finding:
    text = f"{member.repeats} of its runs ended with the bits of another: what the seeds change does not reach them,"
    return Finding("worse", f"{_named(analysis, setting, member)}: {text} and tests count them as if it did.")


def _named(analysis: Analysis, setting: Setting, member: Member) -> str:
    return member.name if len(analysis.settings) == 1 else f"{member.name} ({setting.name})"


def _all(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def hours(value: float) -> str:
    return f"{value:.1f} h" if value >= 1 else f"{60 * value:.0f} min"


def number(value: float) -> str:
    """A ratio in three digits."""
    if math.isnan(value):
        return "-"
    return "infinitely" if math.isinf(value) else f"{value:.3g}"


def interval(ends: Interval) -> str:
    return f"95 %: {number(ends.low)} to {number(ends.high)}"


def p_value(p: float) -> str:
    if math.isnan(p):
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
