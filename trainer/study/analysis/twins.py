"""The same runs in another study, such as one on real processes: run for run, what differs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trainer.study.analysis.statistics import Comparison, compare
from trainer.study.run.ledger import Record, environments, run_of

ALL = "all"
Pair = tuple[Record, Record]  # here and there
Makers = list[tuple[dict[str, Any], int]]


class Both(NamedTuple):
    """A number of this study, and of the other one."""

    here: float
    there: float


@dataclass(frozen=True)
class Twins:
    """A member's runs in both studies, or, under ALL, the averages of all members' by seed, whose standard deviations are of
    no use: members share their seeds, and so their ups and downs, and only seeds are independent.

    found: of the final accuracy, with the other study for a baseline. same_seeds: of every pair; else only its images and
    shards are the same. made: what programs and machines ran the pairs here and there, each once."""

    setting: str
    member: str
    mean: Both
    sd: Both
    staleness: Both
    found: Comparison
    same_seeds: bool
    made: tuple[Makers, Makers]


def twins_of(
    setting: str, members: Mapping[str, Sequence[Record]], other: Mapping[str, Record], key: str, margin: float
) -> list[Twins]:
    """Of members with three runs at least that both studies have, of equal images and shards. other: by the run's name;
    key: of the measure, which both must have."""
    pairs = {
        name: [(mine, theirs) for mine in records if (theirs := _twin(mine, other)) and _known(key, mine, theirs)]
        for name, records in members.items()
    }
    by_seed: dict[int, list[Pair]] = {}
    for pair in (pair for some in pairs.values() for pair in some):
        by_seed.setdefault(run_of(pair[0]).seed, []).append(pair)
    found = [_twins(setting, name, [[pair] for pair in some], key, margin) for name, some in pairs.items()]
    if sum(map(bool, pairs.values())) > 1:
        found.append(_twins(setting, ALL, list(by_seed.values()), key, margin))
    return [twins for twins in found if twins]


def _twin(record: Record, other: Mapping[str, Record]) -> Record | None:
    theirs = other.get(record["run"])
    same = theirs and theirs["data"] == record["data"] and _shards(theirs) == _shards(record)
    return theirs if same else None


def _shards(record: Record) -> Record:
    """All that is known of a run's shards but the time that they took. Digests of older versions had names in them."""
    return {key: value for key, value in record["sharding"].items() if key != "seconds"}


def _known(key: str, *records: Record) -> bool:
    return all(record[key] is not None for record in records)


def _twins(setting: str, name: str, groups: Sequence[Sequence[Pair]], key: str, margin: float) -> Twins | None:
    """groups: the pairs whose averages are one value each."""
    here, there = ([float(np.mean([pair[side][key] for pair in group])) for group in groups] for side in (0, 1))
    found = compare(there, here, margin)
    if not found:
        return None
    pairs = [pair for group in groups for pair in group]
    mine, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    return Twins(
        setting=setting,
        member=name,
        mean=Both(float(np.mean(here)), float(np.mean(there))),
        sd=Both(math.nan, math.nan) if name == ALL else Both(*(float(np.std(x, ddof=1)) for x in (here, there))),
        staleness=Both(*(float(np.mean([r["staleness"]["mean"] for r in records])) for records in (mine, theirs))),
        found=found,
        same_seeds=all(one["seeds"] == other["seeds"] for one, other in pairs),
        made=(environments(mine), environments(theirs)),
    )
