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
            if member.diverged:
                said.append(_diverged(setting, member))
    return said


def _answer(analysis: Analysis) -> list[str]:
    """Whether any member spreads otherwise than the baseline, and whether any mean differs."""
    found = [(s, m, c) for s in analysis.settings for m in s.members.values() if (c := m.comparisons[PRIMARY])]
    if not found:
        return [
            f"Nothing can be said yet: comparisons need at least {FEW_SEEDS} seeds of {analysis.baseline} and another."
        ]
    steadier, wilder = [], []
    for setting, member, comparison in found:
        if comparison.adjusted_spread_p < LEVEL:
            (steadier if comparison.sd_ratio > 1 else wilder).append(_named(analysis, setting, member))
    lines = []
    if steadier:
        lines.append(
            f"Steadier than {analysis.baseline}: the final accuracy varies less from seed to seed with {_all(steadier)}."
        )
    if wilder:
        lines.append(f"Less steady than {analysis.baseline}: the final accuracy varies more with {_all(wilder)}.")
    rest = len(found) - len(steadier) - len(wilder)
    if rest:
        which = "any" if rest == len(found) else f"the other {rest}" if rest > 1 else "the other"
        lines.append(
            f"Spread: no difference could be shown between {analysis.baseline} and {which}{_visible(analysis)}."
        )
    return lines


def _visible(analysis: Analysis) -> str:
    if analysis.smallest_ratio is None:
        return f"; with {analysis.seeds} seeds no ratio of standard deviations could have been seen reliably"
    return f"; a ratio of standard deviations under {analysis.smallest_ratio:.1f} could not have been seen with {analysis.seeds} seeds"


def _basis(analysis: Analysis) -> str:
    done = "all" if analysis.runs == analysis.planned else f"{analysis.runs:,} of"
    return (
        f"This rests on {done} {analysis.planned:,} runs, {analysis.cpu_hours:.1f} hours of a core. P-values are adjusted over"
        f" {analysis.family} comparisons (Holm), spread and mean apart; that ratio would be found with a probability of 0.8."
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
    ratio = f"{analysis.baseline}'s standard deviation is {number(found.sd_ratio)} times as large ({interval(found.sd_ratio_bootstrap)})"
    if found.adjusted_spread_p < LEVEL:
        return f"{ratio}, p {p_value(found.adjusted_spread_p)}."
    return f"{ratio}: no difference could be shown."


def _mean_words(analysis: Analysis, found: Comparison) -> str:
    points = found.difference * POINTS
    ends = Interval(found.difference_interval.low * POINTS, found.difference_interval.high * POINTS)
    mean = f"The mean is {abs(points):.2f} points {'higher' if points >= 0 else 'lower'} ({ends.low:+.2f} to {ends.high:+.2f})"
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
