"""The analysis of a ledger: the comparisons, their seeds and their results as numbers. Pure.

A setting is everything that both sides of a comparison share; if ways of sharding are compared, it is a data set, a
model and a protocol. The members of a setting are the things that are compared. Diverged runs are counted, but excluded
from all means."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.arrays import Ints
from trainer.study.analysis import statistics
from trainer.study.analysis.batches import own_batches
from trainer.study.analysis.churn import Churn, churn_of
from trainer.study.analysis.components import Components, components_of
from trainer.study.analysis.fractions import FractionSearch, fractions_of, smallest_sufficient
from trainer.study.analysis.statistics import LEVEL, Comparison, Floats, MeasureSummary, compare, summarise
from trainer.study.analysis.twins import Twins, twins_of
from trainer.study.plan.cases import keys_of_cell
from trainer.study.plan.study_plan import Cell, StudyPlan
from trainer.study.run.ledger import Record, environments, run_of
from trainer.study.run.predictions import unpack

PRIMARY = "final_accuracy"  # the measure of a study's main tests; every other measure is a family of its own
MEASURES = (
    "final_accuracy", "best_accuracy", "final_loss", "train_accuracy", "train_loss", "running_train_accuracy",
    "running_train_loss", "worst_class_accuracy", "worst_neighbourhood_accuracy", "seconds", "sent_bytes",
)  # fmt: skip
QUALITIES = ("mmd_ratio", "chi_square")
FEWEST = 3  # runs of a member from which deviations from its mean are meaningful
FACTS = ("mmd_ratio", "mean_ratio", "chi_square", "cramers_v", "copies", "sparse", "size_ratio", "seconds")


@dataclass(frozen=True)
class Curves:
    """Evaluation accuracy over epochs, of several runs.

    epochs: at which runs were evaluated. accuracy: [seeds, epochs]. spread: standard deviation over seeds [epochs], 0
    for a single seed."""

    epochs: tuple[float, ...]
    accuracy: Floats

    @property
    def last_gain(self) -> float:
        """Return the gain of the mean accuracy from the last but one evaluation to the last; NaN for one evaluation."""
        return float((self.accuracy[:, -1] - self.accuracy[:, -2]).mean()) if len(self.epochs) > 1 else math.nan

    @property
    def spread(self) -> Floats:
        return np.asarray(self.accuracy.std(axis=0, ddof=1)) if len(self.accuracy) > 1 else np.zeros(len(self.epochs))


@dataclass(frozen=True)
class ComparisonSide:
    """A member of a setting with its runs, as a side of comparisons.

    Attributes:
        name: of the member.
        records: its runs.
        diverged: number of runs that diverged.
        summaries: by measure.
        comparisons: by measure; None for the baseline, and if there are too few common seeds.
        curves: of the runs that did not diverge; None if they were not evaluated at the same epochs.
        own_batches: mini-batches of own rows per worker, at the epochs of ``curves``; empty without curves.
        curve_ratio: spread over the whole curve, the baseline's over this member's.
        curve_p: p-value of curve_ratio, before Holm.
        quality: means of the known FACTS of its shards.
        staleness: mean over runs.
        seconds: mean training time of a run, virtual seconds in virtual time.
        wall_s: mean wall-clock time of a run.
        churn: share of images on which the models of two seeds disagree; None if the ledger has no predictions, and in a
            crossed design.
        components: of the variance of the final accuracy, in a crossed design; None in any other.
        repeats: runs that ended bit-identical to a run with another seed.
        curve_adjusted_p: p-value of curve_ratio, after Holm.
    """

    name: str
    records: list[Record] = field(repr=False)
    diverged: int
    summaries: dict[str, MeasureSummary]
    comparisons: dict[str, Comparison | None]
    curves: Curves | None = field(repr=False)
    own_batches: tuple[float, ...]
    curve_ratio: float
    curve_p: float
    quality: dict[str, float]
    staleness: float
    seconds: float
    wall_s: float
    churn: Churn | None = None
    components: Components | None = None
    repeats: int = 0  # runs that ended with the bits of another seed's
    curve_adjusted_p: float = math.nan


@dataclass(frozen=True)
class StudySetting:
    """The members of one setting.

    Attributes:
        name: the names of everything that they share.
        dataset: name of their data set.
        members: by name.
        search: of the fraction of sync-switch; None unless that is the difference between members.
    """

    name: str
    dataset: str
    members: dict[str, ComparisonSide]
    search: FractionSearch | None = None


class Correlation(NamedTuple):
    """Spearman's rank correlation.

    Attributes:
        runs: number of values.
        rho: the correlation, from -1 to 1.
        p: p-value of a tested correlation, NaN otherwise.
        adjusted_p: p after Holm's adjustment over all tested correlations.
    """

    runs: int
    rho: float
    p: float = math.nan
    adjusted_p: float = math.nan


@dataclass(frozen=True)
class QualityTest:
    """The correlation between a measure of shards and the distance of runs from their member's median final accuracy.

    ``over_all`` and ``without`` are only shown and not tested, because members differ in more than in evenness.

    Attributes:
        setting: its name.
        quality: the measure of shards.
        least_even: the member with the least even shards by this measure.
        over_all: over all runs of the setting; a single member with very uneven shards can dominate it.
        without: over the runs of all members except ``least_even``.
        within: of deviations from each member's means, so that differences between members do not count; over members
            with at least FEWEST runs whose shards differ in the measure.
    """

    setting: str
    quality: str
    least_even: str
    over_all: Correlation
    without: Correlation
    within: Correlation


@dataclass(frozen=True)
class Analysis:
    """All numbers of a report.

    Attributes:
        title: of the plan.
        baseline: the member with which the others are compared.
        margin: of equivalence, as a difference of accuracies.
        target: the accuracy to which times are measured; None for none.
        compared: the axis whose members are compared.
        settings: in the plan's order.
        family: number of tests in Holm's adjustment.
        seeds: the smallest number of pairs among the comparisons that show no difference of spread; among all
            comparisons if every one shows a difference.
        smallest_ratio: of standard deviations, that ``seeds`` pairs show with power 0.8 at the family's strictest
            level; None if no ratio up to 64 is.
        qualities: correlations between shards and results.
        runs: in the ledger.
        planned: runs of the plan.
        planned_seeds: seeds of the plan.
        left_out: runs in the ledger that the plan does not contain: other seeds, or skipped cells.
        run_hours: hours of a core in virtual time, otherwise wall-clock hours of the runs.
        environments: machines and versions, with the number of their runs.
        beside: name of the study with which equal runs are compared.
        twins: comparisons with the same runs in that study.
        begun: the baseline, the margin and the number of seeds at the start of the study.
        vary: the sources of randomness that differ between seeds, in alphabetical order.
        sets: of a crossed design, whose runs share sets or seeds, so that nothing is compared; 0 for any other design.
    """

    title: str
    baseline: str
    margin: float
    target: float | None
    compared: str
    settings: list[StudySetting]
    family: int
    seeds: int
    smallest_ratio: float | None
    qualities: list[QualityTest]
    runs: int
    planned: int
    planned_seeds: int
    left_out: int
    run_hours: float
    environments: list[tuple[dict[str, Any], int]]
    beside: str
    twins: list[Twins]
    begun: dict[str, Any]
    vary: tuple[str, ...]
    sets: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return every number of the report, rounded to six digits; null for values that could not be computed."""
        values: dict[str, Any] = _clean(asdict(replace(self, settings=[])))
        if self.target is None:
            del values["target"]
        if not self.sets:
            del values["sets"]
        for twins in values["twins"]:
            del twins["made"]  # not numbers, and the ledger has them
        values["settings"] = [
            {"name": setting.name, "members": [_member(m, self.target) for m in setting.members.values()]}
            | ({"search": _clean(setting.search._asdict())} if setting.search else {})
            for setting in self.settings
        ]
        return values


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
                member: _member_of(member, of_member, some.get(plan.baseline), plan)
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
        compared=plan.compare,
        settings=adjusted_settings,
        family=len(comparisons),
        seeds=seeds,
        smallest_ratio=statistics.smallest_ratio(seeds, LEVEL / max(1, len(comparisons))),
        qualities=_adjust_quality_p_values(
            [test for setting in adjusted_settings if not plan.sets for test in _quality_tests(setting)]
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


def _member_of(name: str, records: list[Record], baseline: list[Record] | None, plan: StudyPlan) -> ComparisonSide:
    """Return a member of a setting with its summaries, and its comparisons with the baseline over their common seeds.

    baseline: the baseline's records in this setting, None if there are none. The baseline is not compared with itself.
    """
    whole = _whole(records)
    # Runs of a crossed design share sets or seeds: with tests and intervals for independent runs, they would prove too much.
    is_crossed = plan.sets > 0
    against = _whole(baseline) if baseline is not None and name != plan.baseline and not is_crossed else {}
    # Tests are paired, so both sides need the seeds that ended with a model in both.
    common = [seed for seed in whole if seed in against]
    own_records = [whole[seed] for seed in common]
    baseline_records = [against[seed] for seed in common]
    curves = curves_of(list(whole.values()))
    curve_ratio = math.nan
    curve_p = math.nan
    # Curves can be compared only over the same epochs, and a t-test needs a few seeds.
    paired = curves_of(baseline_records), curves_of(own_records)
    if paired[0] and paired[1] and paired[0].epochs == paired[1].epochs and len(common) > 2:
        curve_ratio, curve_p = statistics.curve_spread(paired[0].accuracy, paired[1].accuracy)
    return ComparisonSide(
        name=name,
        records=records,
        diverged=len(records) - len(whole),
        summaries={
            key: summarise(values, independent=not is_crossed)
            for key in MEASURES
            if (values := _values(whole.values(), key))
        },
        comparisons={key: _compare_pairs(baseline_records, own_records, key, plan.margin) for key in MEASURES},
        curves=curves,
        own_batches=_own_batches(plan, records[0], curves),
        curve_ratio=curve_ratio,
        curve_p=curve_p,
        quality={key: _mean([record["sharding"].get(key) for record in records]) for key in FACTS},
        staleness=_mean([record["staleness"]["mean"] for record in whole.values()]),
        seconds=_mean([record["seconds"] for record in whole.values()]),
        wall_s=_mean([record["wall_s"] for record in records]),
        churn=None if is_crossed else churn_of(_predictions(whole), _predictions(against) if against else None),
        components=components_of(_finals(whole), {seed: record["shards"] for seed, record in whole.items()}, plan.sets),
        repeats=len(whole) - len({record["parameters"] for record in whole.values()}),
    )


def _own_batches(plan: StudyPlan, record: Record, curves: Curves | None) -> tuple[float, ...]:
    """Return the mini-batches of own rows per worker at the epochs of the curves of a cell. record: any of its runs."""
    rows = int(record["data"]["train"].partition("-")[0])
    return own_batches(curves.epochs, rows, keys_of_cell(plan, run_of(record).cell)) if curves else ()


def _whole(records: Sequence[Record]) -> dict[int, Record]:
    """Return the runs that ended with a model, by seed."""
    return {run_of(record).seed: record for record in records if record["failed"] is None}


def _finals(records: Mapping[int, Record]) -> dict[int, float]:
    return {seed: record[PRIMARY] for seed, record in records.items() if record[PRIMARY] is not None}


def _predictions(records: Mapping[int, Record]) -> dict[int, Ints]:
    """Return the predictions [N] of runs by seed. Ledgers of earlier versions have none."""
    packed = {seed: record["predictions"] for seed, record in records.items() if "predictions" in record}
    return {seed: unpack(text) for seed, text in packed.items()}


def _values(records: Any, key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]


def _compare_pairs(baseline: list[Record], records: list[Record], key: str, margin: float) -> Comparison | None:
    """Compare a measure over pairs of runs with equal seeds; pairs without it are left out. None for fewer than three.

    Args:
        baseline: the baseline's runs.
        records: the member's runs, in the same order of seeds.
        key: the measure.
        margin: of equivalence.
    """
    pairs = [(a[key], b[key]) for a, b in zip(baseline, records, strict=True) if None not in (a.get(key), b.get(key))]
    return compare([a for a, _ in pairs], [b for _, b in pairs], margin)


def curves_of(records: Sequence[Record]) -> Curves | None:
    """Return the curves of runs that were evaluated at the same epochs.

    None if their epochs differ, if no run was evaluated, and for real targets, which have no accuracy."""
    curves = [record["curve"] for record in records if record["curve"] and record["curve"]["epoch"]]
    if not curves or any(curve["epoch"] != curves[0]["epoch"] or None in curve["accuracy"] for curve in curves):
        return None
    return Curves(tuple(curves[0]["epoch"]), np.array([curve["accuracy"] for curve in curves], float))


def _adjust_p_values(settings: list[StudySetting]) -> list[StudySetting]:
    """Adjust the p-values of each measure over all comparisons of the study, in place.

    Spread, means, equivalence and whole curves are separate families."""
    members = [(setting, name) for setting in settings for name in setting.members]
    for key in MEASURES:
        having = [(s, n, c) for s, n in members if (c := s.members[n].comparisons[key])]
        spreads = statistics.adjust([c.spread_p for _, _, c in having])
        means = statistics.adjust([c.difference_p for _, _, c in having])
        equal = statistics.adjust([c.equivalence_p for _, _, c in having])
        for (setting, name, old), *ps in zip(having, spreads, means, equal, strict=True):
            new = replace(old, adjusted_spread_p=ps[0], adjusted_difference_p=ps[1], adjusted_equivalence_p=ps[2])
            setting.members[name].comparisons[key] = new
    # Churn and whole curves are families of their own.
    churning = [(s, n, churn) for s, n in members if (churn := s.members[n].churn) and not math.isnan(churn.p)]
    for (setting, name, churn), p in zip(churning, statistics.adjust([each.p for *_, each in churning]), strict=True):
        setting.members[name] = replace(setting.members[name], churn=replace(churn, adjusted_p=p))
    with_curves = [(s, n) for s, n in members if not math.isnan(s.members[n].curve_p)]
    for (setting, name), p in zip(
        with_curves, statistics.adjust([s.members[n].curve_p for s, n in with_curves]), strict=True
    ):
        setting.members[name] = replace(setting.members[name], curve_adjusted_p=p)
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
    before = _whole(baseline.records)
    after = _whole(member.records)
    return float(np.median([after[seed]["seconds"] / before[seed]["seconds"] for seed in after if seed in before]))


def _twins_of(plan: StudyPlan, setting: StudySetting, beside: Sequence[Record]) -> list[Twins]:
    members = {name: member.records for name, member in setting.members.items()}
    return twins_of(setting.name, members, {record["run"]: record for record in beside}, PRIMARY, plan.margin)


def _quality_tests(setting: StudySetting) -> list[QualityTest]:
    """Return a test per measure of shards: do runs with less even shards end further from their member's median?

    Members with fewer than FEWEST runs for which the measure is known are left out. Without any other member there is
    no test of the measure."""
    tests = []
    for quality in QUALITIES:
        pairs = {
            name: distances
            for name, m in setting.members.items()
            if len((distances := _evenness_and_distance(m, quality))[0]) >= FEWEST
        }
        if pairs:
            least_even = max(pairs, key=lambda name: float(pairs[name][0].mean()))
            others = [pair for name, pair in pairs.items() if name != least_even]
            over_all = _pooled_correlation(list(pairs.values()))
            without = _pooled_correlation(others)
            # Members whose shards are equally even in every run do not contribute to the correlation.
            varying = [pair for pair in pairs.values() if np.ptp(pair[0])]
            runs = sum(len(x) for x, _ in varying)
            within = Correlation(runs, *statistics.rank_correlation_within(varying))
            tests.append(QualityTest(setting.name, quality, least_even, over_all, without, within))
    return tests


def _evenness_and_distance(member: ComparisonSide, quality: str) -> tuple[Floats, Floats]:
    """Return the points of a correlation between shards and accuracy, as two arrays [runs].

    The first is a measure of each run's shards, the second the absolute difference between the run's final accuracy and
    the median over all runs of the member. Runs without a final accuracy or without the measure are left out.

    member: one row of a comparison, such as a strategy, with its runs; quality: the measure, one of QUALITIES."""
    pairs = [
        (record["sharding"][quality], record[PRIMARY])
        for record in member.records
        if record[PRIMARY] is not None and record["sharding"].get(quality) is not None
    ]
    x, accuracy = np.array(pairs).T if pairs else (np.zeros(0), np.zeros(0))
    return x, np.abs(accuracy - np.median(accuracy)) if pairs else accuracy


def _pooled_correlation(pairs: Sequence[tuple[Floats, Floats]]) -> Correlation:
    """Return the correlation over all runs of several members together, without a test."""
    x, y = (np.concatenate(side) for side in zip(*pairs, strict=True)) if pairs else (np.zeros(0), np.zeros(0))
    return Correlation(len(x), statistics.rank_correlation(x, y))


def _adjust_quality_p_values(tests: list[QualityTest]) -> list[QualityTest]:
    """Adjust the p-values over all settings and measures, in place."""
    testable = [at for at, test in enumerate(tests) if not math.isnan(test.within.p)]
    for at, p in zip(testable, statistics.adjust([tests[at].within.p for at in testable]), strict=True):
        tests[at] = replace(tests[at], within=tests[at].within._replace(adjusted_p=p))
    return tests


def times_to(target: float, records: Sequence[Record]) -> list[float]:
    """Return the training time, in seconds, of the first evaluation of each run with at least the target's accuracy.

    Runs that never reach it are left out, and so are runs of ledgers that have no times."""
    result = []
    for record in records:
        curve = record["curve"] or {}
        points = zip(curve.get("accuracy", ()), curve.get("seconds", ()), strict=False)
        reached = [seconds for accuracy, seconds in points if accuracy is not None and accuracy >= target]
        result += reached[:1]
    return result


def sharding_seconds(records: Sequence[Record]) -> list[float]:
    """Return the positive times of sharding, once per shard set: runs with equal shards share one, ready sets have none."""
    times = {record["shards"]: record["sharding"].get("seconds") for record in records}
    return [seconds for seconds in times.values() if seconds]


def _member(member: ComparisonSide, target: float | None) -> dict[str, Any]:
    """Return the numbers of a member as plain JSON, without its records, wall-clock time and time of sharding.

    Its p-values of equivalence are null for losses, because the margin is a difference of accuracies. target: as in
    Analysis."""
    values = asdict(replace(member, records=[], curves=None))
    values["components"] = member.components._asdict() if member.components else None
    if target is not None:
        values["seconds_to_target"] = times_to(target, member.records)
    for key, comparison in values["comparisons"].items():
        if comparison and "accuracy" not in key:  # the margin is a difference of accuracies
            comparison["equivalence_p"] = comparison["adjusted_equivalence_p"] = None
    del values["own_batches"]  # among the values of the curve
    del values["records"], values["curves"], values["wall_s"], values["quality"]["seconds"]  # times are not results
    if member.curves:
        epochs = member.curves.epochs
        accuracy = member.curves.accuracy
        values["curve"] = {"epoch": epochs, "mean": accuracy.mean(axis=0).tolist(), "sd": member.curves.spread.tolist()}
        values["curve"]["own_batches"] = member.own_batches
    cleaned: dict[str, Any] = _clean(values)
    return cleaned


def _mean(values: Sequence[float | None]) -> float:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else math.nan


def _clean(value: Any) -> Any:
    """Round to six digits, and replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _clean(inner) for key, inner in value.items()}
    return [_clean(inner) for inner in value] if isinstance(value, list | tuple) else value


def dumps(analysis: Analysis) -> str:
    return json.dumps(analysis.to_json(), indent=1) + "\n"
