"""The comparison of runs with the same runs in another study, such as one on real processes. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trainer.study.analysis.statistics import Comparison, Interval, compare, correlation_interval
from trainer.study.run.ledger import Record, environments, run_of

ALL = "all"
Pair = tuple[Record, Record]  # of one run: in this study, in the other one
Makers = list[tuple[dict[str, Any], int]]


class Both(NamedTuple):
    """A number of this study, and the same number of the other one."""

    here: float
    there: float


@dataclass(frozen=True)
class Twins:
    """The runs of a member in both studies.

    Under the name ALL, the values are the averages of all members by seed. Members share their seeds and so their
    random variation, and only seeds are independent. The standard deviations of these averages are therefore omitted.

    Attributes:
        setting: its name.
        member: its name, or ALL.
        mean: mean final accuracy.
        sd: standard deviation of the final accuracy; NaN for ALL.
        staleness: mean staleness in updates.
        found: comparison of the final accuracy; the other study is the baseline.
        correlation_interval: 95 % interval of the correlation of ``found``. If the two studies have nothing in common but
            the shards, a correlation is an effect of the particular set.
        same_seeds: True if both runs of every pair have the same seeds; otherwise only their images and shards are the
            same.
        made: the programs and machines of the runs, here and there, each once.
    """

    setting: str
    member: str
    mean: Both
    sd: Both
    staleness: Both
    found: Comparison
    correlation_interval: Interval
    same_seeds: bool
    made: tuple[Makers, Makers]


def twins_of(
    setting: str, members: Mapping[str, Sequence[Record]], other: Mapping[str, Record], key: str, margin: float
) -> list[Twins]:
    """Compare members with at least three runs that both studies have, with equal images and shards.

    Args:
        setting: its name.
        members: records by member.
        other: records of the other study, by the run's name.
        key: the measure; runs without it are left out.
        margin: of equivalence.
    """
    pairs = {
        name: [
            (own, other_record)
            for own in records
            if (other_record := _twin(own, other)) and _known(key, own, other_record)
        ]
        for name, records in members.items()
    }
    # Members share their seeds, so their runs are independent only after averaging by seed.
    by_seed: dict[int, list[Pair]] = {}
    for pair in (pair for some in pairs.values() for pair in some):
        by_seed.setdefault(run_of(pair[0]).seed, []).append(pair)
    result = [_twins(setting, name, [[pair] for pair in some], key, margin) for name, some in pairs.items()]
    if sum(map(bool, pairs.values())) > 1:
        result.append(_twins(setting, ALL, list(by_seed.values()), key, margin))
    return [twins for twins in result if twins]


def _twin(record: Record, other: Mapping[str, Record]) -> Record | None:
    """Return the record of the same run in the other study; None if it has none with equal images and shards."""
    twin = other.get(record["run"])
    same = twin and twin["data"] == record["data"] and _shards(twin) == _shards(record)
    return twin if same else None


def _shards(record: Record) -> Record:
    """Return all facts about a run's shards except for the time that it took to make them.

    Digests are not compared, because older versions included names in them, nor counts by shard, which they lack."""
    return {key: value for key, value in record["sharding"].items() if key not in ("seconds", "shard_counts")}


def _known(key: str, *records: Record) -> bool:
    return all(record[key] is not None for record in records)


def _twins(setting: str, name: str, groups: Sequence[Sequence[Pair]], key: str, margin: float) -> Twins | None:
    """Compare this study's runs with the other's, as averages over groups; None for fewer than three groups.

    Args:
        setting: its name.
        name: of the member, or ALL.
        groups: each is averaged to one value per study. A member has one pair per group, ALL has all pairs of one seed.
        key: the measure.
        margin: of equivalence.
    """
    here_values = [float(np.mean([own[key] for own, _ in group])) for group in groups]
    there_values = [float(np.mean([other[key] for _, other in group])) for group in groups]
    # The other study, such as one on real processes, is the baseline by which this study is judged.
    comparison = compare(there_values, here_values, margin)
    if not comparison:
        return None
    pairs = [pair for group in groups for pair in group]
    here_records = [own for own, _ in pairs]
    there_records = [other for _, other in pairs]
    sd = Both(math.nan, math.nan)
    if name != ALL:
        sd = Both(float(np.std(here_values, ddof=1)), float(np.std(there_values, ddof=1)))
    return Twins(
        setting=setting,
        member=name,
        mean=Both(float(np.mean(here_values)), float(np.mean(there_values))),
        sd=sd,
        staleness=Both(_mean_staleness(here_records), _mean_staleness(there_records)),
        found=comparison,
        correlation_interval=correlation_interval(comparison.correlation, comparison.n),
        same_seeds=all(one["seeds"] == other["seeds"] for one, other in pairs),
        made=(environments(here_records), environments(there_records)),
    )


def _mean_staleness(records: Sequence[Record]) -> float:
    return float(np.mean([record["staleness"]["mean"] for record in records]))
