"""The formatting of numbers and names in the texts and tables of a study."""

from __future__ import annotations

import math

from trainer.study.analysis.results import Analysis, StudySetting
from trainer.study.analysis.sides import ComparisonSide
from trainer.study.analysis.statistics import Interval

POINTS = 100  # percentage points of an accuracy
QUALITIES = {"mmd_ratio": "MMD2", "chi_square": "chi-square of classes"}
QUALITIES_IN_FULL = QUALITIES | {"mmd_ratio": "MMD2 relative to a random split"}


def member_in_words(analysis: Analysis, setting: StudySetting, member: ComparisonSide) -> str:
    return f"{member.name}{where(analysis, setting)}"


def where(analysis: Analysis, setting: StudySetting) -> str:
    """Return a setting's name in parentheses, or nothing if there is only one setting."""
    return f" ({setting.name})" if len(analysis.settings) > 1 else ""


def list_in_words(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def runs_in_words(runs: int) -> str:
    return f"{runs} run{'s' if runs != 1 else ''}"


def hours(value: float) -> str:
    return f"{value:.1f} h" if value >= 1 else f"{60 * value:.0f} min"


def number(value: float) -> str:
    """Format a ratio with three significant digits."""
    if math.isnan(value):
        return "-"
    return "infinitely" if math.isinf(value) else f"{value:.3g}"


def interval(ends: Interval) -> str:
    return f"95 %: {number(ends.low)} to {number(ends.high)}"


def p_value(p: float) -> str:
    if math.isnan(p):
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
