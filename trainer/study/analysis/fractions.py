"""The search of a study for the fraction of sync-switch: the smallest one that suffices. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import NamedTuple

from trainer.exchange.sync_switch import SyncSwitch
from trainer.study.plan.cases import keys_of_cell
from trainer.study.plan.study_plan import Cell, StudyPlan


class FractionSearch(NamedTuple):
    """The fractions of sync-switch in a setting.

    Attributes:
        fractions: of all members but the baseline, ascending.
        equivalent: those whose mean is equivalent with the baseline's, ascending.
        smallest: the smallest one that is equivalent along with all larger ones; None if there is none.
        time_ratio: median over equal seeds of its training time over the baseline's; None without ``smallest``.
    """

    fractions: tuple[float, ...]
    equivalent: tuple[float, ...]
    smallest: float | None
    time_ratio: float | None


def fractions_of(plan: StudyPlan, cells: Mapping[str, Cell]) -> dict[str, float]:
    """Return the fractions of sync-switch by member, in ascending order.

    Empty unless there are at least two, in members that have nothing else that differs.

    plan: the plan of the study; cells: of a setting, by member."""
    fractions = {}
    others = []
    for name, cell in cells.items():
        keys = keys_of_cell(plan, cell)
        if name != plan.baseline and keys.get("exchange") == SyncSwitch.name:
            fractions[name] = float(keys.pop("fraction", SyncSwitch.fraction))
            others.append((plan.workers_of(cell), keys))
    if len(set(fractions.values())) < 2 or any(other != others[0] for other in others):
        return {}
    return dict(sorted(fractions.items(), key=lambda item: item[1]))


def smallest_sufficient(fractions: Mapping[str, float], equivalent: Collection[str]) -> str | None:
    """Return the member with the smallest fraction that is equivalent along with all larger ones; None if there is none.

    A fraction below one that is not shown to be equivalent does not count, because it may be equivalent by chance.

    Args:
        fractions: by member, in ascending order.
        equivalent: the members whose mean is equivalent with the baseline's.
    """
    sufficient = list(takewhile(lambda name: name in equivalent, reversed(list(fractions))))
    return sufficient[-1] if sufficient else None
