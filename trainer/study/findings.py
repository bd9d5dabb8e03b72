"""What a study's numbers say, in words that never say more: a test that found nothing is no proof that nothing is there."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from trainer.study.analysis import PRIMARY, Analysis, Member, Setting
from trainer.study.statistics import LEVEL, Comparison, Interval

Level = Literal["better", "worse", "plain"]
POINTS = 100  # percentage points of an accuracy
FEW_SEEDS = 3
COMPARED = {"sharding": "way of sharding", "protocol": "protocol", "model": "model"}


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
            if member.diverged:
                said.append(_diverged(setting, member))
    return said


def _answer(analysis: Analysis) -> list[str]:
    """Whether any member spreads otherwise than the baseline, and whether any mean differs."""
    base = analysis.baseline
    found = [(s, m, c) for s in analysis.settings for m in s.members.values() if (c := m.comparisons[PRIMARY])]
    if not found:
        return [f"Nothing can be said yet: a comparison needs {FEW_SEEDS} seeds of {base} and of another."]
    spread = [(_named(analysis, s, m), c) for s, m, c in found if c.adjusted_spread_p < LEVEL]
    steadier = [name for name, comparison in spread if comparison.sd_ratio > 1]
    wilder = [name for name, comparison in spread if comparison.sd_ratio <= 1]
    lines = []
    if steadier:
        lines.append(f"Steadier than {base}: from seed to seed the final accuracy varies less with {_all(steadier)}.")
    if wilder:
        lines.append(f"Less steady than {base}: the final accuracy varies more with {_all(wilder)}.")
    if len(spread) < len(found):
        rest = "the rest" if spread else f"any other {COMPARED[analysis.compared]}"
        lines.append(f"Spread: no difference between {base} and {rest} could be shown{_visible(analysis)}.")
    means = [(_named(analysis, s, m), c) for s, m, c in found if c.adjusted_difference_p < LEVEL]
    if means:
        listed = [f"{name} ({POINTS * c.difference:+.2f} points)" for name, c in means]
        lines.append(f"Mean: other than {base}'s with {_all(listed)}.")
    if len(means) < len(found):
        rest = "the rest" if means else f"any other {COMPARED[analysis.compared]}"
        lines.append(f"Mean: no difference between {base} and {rest} could be shown.")
    return lines


def _visible(analysis: Analysis) -> str:
    """What could not have been seen."""
    with_seeds = f"with {analysis.seeds} seeds"
    if analysis.smallest_ratio is None:
        return f"; {with_seeds} no ratio of standard deviations could have been seen reliably"
    return f"; {with_seeds} a ratio of standard deviations under {analysis.smallest_ratio:.1f} could not have been seen"


def _basis(analysis: Analysis) -> str:
    done = "all" if analysis.runs == analysis.planned else f"{analysis.runs:,} of"
    seen = "; such a ratio would be found with a probability of 0.8" if analysis.smallest_ratio else ""
    return (
        f"This rests on {done} {analysis.planned:,} runs, {hours(analysis.cpu_hours)} of a core. P-values are adjusted"
        f" over {analysis.family} comparisons (Holm), spread and mean apart{seen}."
    )


def _about(analysis: Analysis, setting: Setting, member: Member, found: Comparison) -> Finding:
    spread = found.adjusted_spread_p < LEVEL
    different = found.adjusted_difference_p < LEVEL
    level: Level = "plain"
    if spread:
        level = "better" if found.sd_ratio > 1 else "worse"
    elif different:
        level = "better" if found.difference > 0 else "worse"
    text = f"{_named(analysis, setting, member)}: {_spread_words(analysis, found)} {_mean_words(analysis, found)}"
    return Finding(level, text)


def _spread_words(analysis: Analysis, found: Comparison) -> str:
    times = f"{number(found.sd_ratio)} times as large ({interval(found.sd_ratio_bootstrap)})"
    ratio = f"{analysis.baseline}'s standard deviation is {times}"
    if found.adjusted_spread_p < LEVEL:
        return f"{ratio}, p {p_value(found.adjusted_spread_p)}."
    return f"{ratio}: no difference could be shown."


def _mean_words(analysis: Analysis, found: Comparison) -> str:
    points = found.difference * POINTS
    ends = Interval(found.difference_interval.low * POINTS, found.difference_interval.high * POINTS)
    side = "higher" if points >= 0 else "lower"
    mean = f"The mean is {abs(points):.2f} points {side} ({ends.low:+.2f} to {ends.high:+.2f})"
    same = f"equal within {analysis.margin * POINTS:g} points (p {p_value(found.equivalence_p)})"
    if found.adjusted_difference_p < LEVEL:
        but = f", and yet {same}" if found.equivalence_p < LEVEL else ""
        return f"{mean}, p {p_value(found.adjusted_difference_p)}{but}."
    if found.equivalence_p < LEVEL:
        return f"{mean}: {same}."
    return f"{mean}: no difference could be shown, nor that there is none."


def _diverged(setting: Setting, member: Member) -> Finding:
    runs = len(member.records)
    return Finding(
        "worse", f"{setting.name}, {member.name}: {member.diverged} of {runs} runs diverged, and are in no mean."
    )


def _named(analysis: Analysis, setting: Setting, member: Member) -> str:
    return member.name if len(analysis.settings) == 1 else f"{member.name} ({setting.name})"


def _all(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def hours(value: float) -> str:
    return f"{value:.1f} hours" if value >= 1 else f"{60 * value:.0f} minutes"


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
