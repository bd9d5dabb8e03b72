"""The sides of comparisons: a member of a setting with its runs, its measures and its comparison with the baseline. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.core.arrays import Ints
from trainer.study.analysis import statistics
from trainer.study.analysis.batches import own_batches
from trainer.study.analysis.churn import Churn, churn_of
from trainer.study.analysis.components import Components, components_of
from trainer.study.analysis.curves import Curves, TimedAccuracy, curves_of, timed_accuracy
from trainer.study.analysis.statistics import Comparison, MeasureSummary, compare, summarise
from trainer.study.plan.cases import keys_of_cell
from trainer.study.plan.study_plan import StudyPlan
from trainer.study.run.ledger import Record, run_of
from trainer.study.run.predictions import unpack

PRIMARY = "final_accuracy"  # the measure of a study's main tests; every other measure is a family of its own
MEASURES = (
    "final_accuracy", "best_accuracy", "final_loss", "train_accuracy", "train_loss", "running_train_accuracy",
    "running_train_loss", "worst_class_accuracy", "worst_neighbourhood_accuracy", "seconds", "sent_bytes",
)  # fmt: skip
FACTS = ("mmd_ratio", "mean_ratio", "chi_square", "cramers_v", "copies", "sparse", "size_ratio", "seconds")


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
        accuracy_by_time: at the plan's times.
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
    accuracy_by_time: tuple[TimedAccuracy, ...]
    churn: Churn | None = None
    components: Components | None = None
    repeats: int = 0
    curve_adjusted_p: float = math.nan


def build_side(name: str, records: list[Record], baseline: list[Record] | None, plan: StudyPlan) -> ComparisonSide:
    """Return a member of a setting with its summaries, and its comparisons with the baseline over their common seeds.

    baseline: the baseline's records in this setting, None if there are none. The baseline is not compared with itself.
    """
    whole = finished_runs(records)
    # Runs of a crossed design share sets or seeds: with tests and intervals for independent runs, they would prove too much.
    is_crossed = plan.sets > 0
    against = finished_runs(baseline) if baseline is not None and name != plan.baseline and not is_crossed else {}
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
        accuracy_by_time=tuple(
            timed_accuracy(seconds, whole, against, independent=not is_crossed) for seconds in plan.times
        ),
        churn=None if is_crossed else churn_of(_predictions(whole), _predictions(against) if against else None),
        components=components_of(_finals(whole), {seed: record["shards"] for seed, record in whole.items()}, plan.sets),
        repeats=len(whole) - len({record["parameters"] for record in whole.values()}),
    )


def _own_batches(plan: StudyPlan, record: Record, curves: Curves | None) -> tuple[float, ...]:
    """Return the mini-batches of own rows per worker at the epochs of the curves of a cell. record: any of its runs."""
    rows = int(record["data"]["train"].partition("-")[0])
    return own_batches(curves.epochs, rows, keys_of_cell(plan, run_of(record).cell)) if curves else ()


def finished_runs(records: Sequence[Record]) -> dict[int, Record]:
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


def _mean(values: Sequence[float | None]) -> float:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else math.nan


def sharding_seconds(records: Sequence[Record]) -> list[float]:
    """Return the positive times of sharding, once per shard set: runs with equal shards share one, ready sets have none."""
    times = {record["shards"]: record["sharding"].get("seconds") for record in records}
    return [seconds for seconds in times.values() if seconds]
