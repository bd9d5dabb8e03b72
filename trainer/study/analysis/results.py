"""The results of an analysis, and their JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainer.study.analysis.curves import times_to
from trainer.study.analysis.fractions import FractionSearch
from trainer.study.analysis.qualities import QualityTest
from trainer.study.analysis.sides import ComparisonSide
from trainer.study.analysis.twins import Twins


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


@dataclass(frozen=True)
class Analysis:
    """All numbers of a report.

    Attributes:
        title: of the plan.
        baseline: the member with which the others are compared.
        margin: of equivalence, as a difference of accuracies.
        target: the accuracy to which times are measured; None for none.
        target_loss: the training loss, likewise.
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
    target_loss: float | None
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
        for key in ("target", "target_loss", "sets"):
            if not values[key]:  # a plan without it
                del values[key]
        for twins in values["twins"]:
            del twins["made"]  # not numbers, and the ledger has them
        values["settings"] = [
            {"name": setting.name, "members": [_side_to_json(m, self) for m in setting.members.values()]}
            | ({"search": _clean(setting.search._asdict())} if setting.search else {})
            for setting in self.settings
        ]
        return values


def _side_to_json(member: ComparisonSide, analysis: Analysis) -> dict[str, Any]:
    """Return the numbers of a member as plain JSON, without its records, wall-clock time and time of sharding.

    Its p-values of equivalence are null for losses, because the margin is a difference of accuracies."""
    values = asdict(replace(member, records=[], curves=None))
    values["components"] = member.components._asdict() if member.components else None
    if analysis.target is not None:
        values["seconds_to_target"] = times_to("accuracy", analysis.target, member.records)
    if analysis.target_loss is not None:
        values["seconds_to_target_loss"] = times_to("train_loss", analysis.target_loss, member.records)
    if not member.accuracy_by_time:  # a plan without times
        del values["accuracy_by_time"]
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


def _clean(value: Any) -> Any:
    """Round to six digits, and replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _clean(inner) for key, inner in value.items()}
    return [_clean(inner) for inner in value] if isinstance(value, list | tuple) else value


def dumps(analysis: Analysis) -> str:
    return json.dumps(analysis.to_json(), indent=1) + "\n"
