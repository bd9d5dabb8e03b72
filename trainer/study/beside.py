"""The same runs in another study, such as one on real processes: seed for seed, what differs. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trainer.study.ledger import Record
from trainer.study.statistics import Comparison, compare

ALL = "all"


class Both(NamedTuple):
    """A number of this study, and of the other one."""

    here: float
    there: float


@dataclass(frozen=True)
class Twins:
    """A member's runs in both studies, or, under ALL, those of all members, whose standard deviations are of no use.

    found: of the final accuracy, with the other study for a baseline."""

    setting: str
    member: str
    mean: Both
    sd: Both
    staleness: Both
    found: Comparison


def twins_of(
    setting: str, members: Mapping[str, Sequence[Record]], other: Mapping[str, Record], key: str, margin: float
) -> list[Twins]:
    """Of members with three runs at least that both studies have, of equal images and shards. other: by the run's name;
    key: of the measure, which both must have."""
    pairs = {
        name: [(mine, theirs) for mine in records if (theirs := _twin(mine, other)) and _known(key, mine, theirs)]
        for name, records in members.items()
    }
    every = [pair for some in pairs.values() for pair in some]
    found = [_twins(setting, name, some, key, margin) for name, some in pairs.items()]
    whole = [twins for twins in found if twins]
    pooled = _twins(setting, ALL, every, key, margin) if len(pairs) > 1 else None
    return [*whole, pooled] if pooled else whole


def _twin(record: Record, other: Mapping[str, Record]) -> Record | None:
    theirs = other.get(record["run"])
    same = theirs and theirs["data"] == record["data"] and _shards(theirs) == _shards(record)
    return theirs if same else None


def _shards(record: Record) -> Record:
    """All that is known of a run's shards but the time that they took. Digests of older versions had names in them."""
    return {key: value for key, value in record["sharding"].items() if key != "seconds"}


def _known(key: str, *records: Record) -> bool:
    return all(record[key] is not None for record in records)


def _twins(setting: str, name: str, pairs: Sequence[tuple[Record, Record]], key: str, margin: float) -> Twins | None:
    mine, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    here, there = ([record[key] for record in records] for records in (mine, theirs))
    found = compare(there, here, margin)
    if not found:
        return None
    spread = Both(math.nan, math.nan) if name == ALL else Both(*(float(np.std(x, ddof=1)) for x in (here, there)))
    staleness = Both(*(float(np.mean([r["staleness"]["mean"] for r in records])) for records in (mine, theirs)))
    return Twins(setting, name, Both(float(np.mean(here)), float(np.mean(there))), spread, staleness, found)
