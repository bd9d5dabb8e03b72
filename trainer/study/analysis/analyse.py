"""The analysis of a ledger: the comparisons, their seeds and their results as numbers. Pure.

A setting is everything that both sides of a comparison share; if ways of sharding are compared, it is a data set, a
model and a protocol. The members of a setting are the things that are compared. Diverged runs are counted, but excluded
from all means."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trainer.study.analysis import statistics
from trainer.study.analysis.fractions import FractionSearch, fractions_of, smallest_sufficient
from trainer.study.analysis.qualities import adjust_quality_p_values, quality_tests
from trainer.study.analysis.results import Analysis, StudySetting
from trainer.study.analysis.sides import MEASURES, PRIMARY, ComparisonSide, build_side, finished_runs
from trainer.study.analysis.statistics import LEVEL
from trainer.study.analysis.twins import Twins, twins_of
from trainer.study.plan.study_plan import Cell, StudyPlan
from trainer.study.run.ledger import Record, environments, run_of


def analyse(
    plan: StudyPlan,
    records: Sequence[Record],
    beside: Sequence[Record] = (),
    initial_tests: Mapping[str, Any] | None = None,
    left_out: int = 0,
) -> Analysis:
    """Compute everything that the report shows in numbers. Takes about a second for a thousand runs.

    Args:
        plan: the plan of the study.
        records: the runs in its ledger that the plan contains.
        beside: runs of another study, in which each run of this one is looked up by name for ``twins``.
        initial_tests: the baseline, the margin and the number of seeds at the start of the study; None for the plan's.
        left_out: number of runs in the ledger that the plan does not contain.
    """
    # Members without a run yet, and settings without such members, are left out.
    settings: dict[str, StudySetting] = {}
    cells_by_setting = _settings(plan)
    for name, cells in cells_by_setting.items():
        by_cell = {cell: [record for record in records if run_of(record).cell == cell] for cell in cells.values()}
        some = {member: by_cell[cell] for member, cell in cells.items() if by_cell[cell]}
        if some:
            dataset = next(iter(cells.values())).dataset
            members = {
                member: build_side(member, of_member, some.get(plan.baseline), plan)
                for member, of_member in some.items()
            }
            settings[name] = StudySetting(name, dataset, members)
    # Only now, because the adjustment needs the p-values of all settings.
    adjusted_settings = [
        replace(setting, search=_search(plan, setting, cells_by_setting[setting.name]))
        for setting in _adjust_p_values(list(settings.values()))
    ]
    comparisons = [c for s in adjusted_settings for m in s.members.values() if (c := m.comparisons.get(PRIMARY))]
    # The power of the tests is reported for the weakest one: the fewest pairs among those that show no difference.
    seeds = min((c.n for c in comparisons if not c.adjusted_spread_p < LEVEL), default=0)
    seeds = seeds or min((c.n for c in comparisons), default=0)
    return Analysis(
        title=plan.title,
        baseline=plan.baseline,
        margin=plan.margin,
        target=plan.target,
        target_loss=plan.target_loss,
        compared=plan.compare,
        settings=adjusted_settings,
        family=len(comparisons),
        seeds=seeds,
        smallest_ratio=statistics.smallest_ratio(seeds, LEVEL / max(1, len(comparisons))),
        qualities=adjust_quality_p_values(
            [
                test
                for setting in adjusted_settings
                if not plan.sets
                for test in quality_tests(setting.name, setting.members)
            ]
        ),
        runs=len(records),
        planned=sum(1 for _ in plan.runs()),
        planned_seeds=len(plan.seeds),
        left_out=left_out,
        run_hours=sum(record["cpu_s"] or record["wall_s"] for record in records) / 3600,
        environments=environments(records),
        beside=plan.beside,
        twins=[twins for setting in adjusted_settings for twins in _twins_of(plan, setting, beside)],
        begun=dict(initial_tests or plan.tests()),
        vary=tuple(sorted(plan.vary)),
        sets=plan.sets,
    )


def _settings(plan: StudyPlan) -> dict[str, dict[str, Cell]]:
    """Return the cells by the setting's name and the member's name, in the plan's order."""
    cells_by_setting: dict[str, dict[str, Cell]] = {}
    for cell in plan.cells():
        rest = [name for axis, name in zip(Cell._fields, cell, strict=True) if name and axis != plan.compare]
        cells_by_setting.setdefault(", ".join(rest), {})[getattr(cell, plan.compare)] = cell
    return cells_by_setting


def _adjust_p_values(settings: list[StudySetting]) -> list[StudySetting]:
    """Adjust the p-values of each measure over all comparisons of the study, in place.

    Spread, means, equivalence, churn, whole curves and crossed sets are separate families."""
    members = [(setting, name) for setting in settings for name in setting.members]
    for key in MEASURES:
        having = [(s, n, c) for s, n in members if (c := s.members[n].comparisons[key])]
        spreads = statistics.adjust([c.spread_p for _, _, c in having])
        means = statistics.adjust([c.difference_p for _, _, c in having])
        equal = statistics.adjust([c.equivalence_p for _, _, c in having])
        for (setting, name, old), *ps in zip(having, spreads, means, equal, strict=True):
            new = replace(old, adjusted_spread_p=ps[0], adjusted_difference_p=ps[1], adjusted_equivalence_p=ps[2])
            setting.members[name].comparisons[key] = new
    # Churn, whole curves and the effects of crossed sets are families of their own.
    churning = [(s, n, churn) for s, n in members if (churn := s.members[n].churn) and not math.isnan(churn.p)]
    for (setting, name, churn), p in zip(churning, statistics.adjust([each.p for *_, each in churning]), strict=True):
        setting.members[name] = replace(setting.members[name], churn=replace(churn, adjusted_p=p))
    with_curves = [(s, n) for s, n in members if not math.isnan(s.members[n].curve_p)]
    for (setting, name), p in zip(
        with_curves, statistics.adjust([s.members[n].curve_p for s, n in with_curves]), strict=True
    ):
        setting.members[name] = replace(setting.members[name], curve_adjusted_p=p)
    crossed = [(s, n, parts) for s, n in members if (parts := s.members[n].components) and not math.isnan(parts.set_p)]
    for (setting, name, parts), p in zip(crossed, statistics.adjust([each.set_p for *_, each in crossed]), strict=True):
        setting.members[name] = replace(setting.members[name], components=parts._replace(adjusted_set_p=p))
    return settings


def _search(plan: StudyPlan, setting: StudySetting, cells: Mapping[str, Cell]) -> FractionSearch | None:
    """Return the search for the fraction of sync-switch in a setting whose p-values are adjusted; None for no such search.

    A member of which more runs diverged than of the baseline is not equivalent with it.

    cells: of the setting, by member; those without a run yet are among the fractions, too."""
    fractions = fractions_of(plan, cells)
    baseline = setting.members.get(plan.baseline)
    if not fractions or baseline is None or plan.sets:
        return None
    comparisons = {
        name: setting.members[name].comparisons[PRIMARY]
        for name in fractions
        if name in setting.members and setting.members[name].diverged <= baseline.diverged
    }
    # A mean that differs significantly may be equivalent all the same: then the difference is small.
    equivalent = [name for name, c in comparisons.items() if c and c.adjusted_equivalence_p < LEVEL]
    smallest = smallest_sufficient(fractions, equivalent)
    return FractionSearch(
        fractions=tuple(fractions.values()),
        equivalent=tuple(fractions[name] for name in equivalent),
        smallest=None if smallest is None else fractions[smallest],
        time_ratio=None if smallest is None else _time_ratio(baseline, setting.members[smallest]),
    )


def _time_ratio(baseline: ComparisonSide, member: ComparisonSide) -> float:
    """Return the median over equal seeds of a member's training time over the baseline's."""
    before = finished_runs(baseline.records)
    after = finished_runs(member.records)
    return float(np.median([after[seed]["seconds"] / before[seed]["seconds"] for seed in after if seed in before]))


def _twins_of(plan: StudyPlan, setting: StudySetting, beside: Sequence[Record]) -> list[Twins]:
    members = {name: member.records for name, member in setting.members.items()}
    return twins_of(setting.name, members, {record["run"]: record for record in beside}, PRIMARY, plan.margin)
