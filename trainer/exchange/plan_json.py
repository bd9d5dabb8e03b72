"""Plans of links as plain JSON: one host computes the plan of a run, and every checkpoint and every worker has it.

Other processors and libraries can find other probabilities and weights, and a file of links can change or be missing on
another host. Both ends of a link must use the same weight, and a resumed run the links of its beginning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trainer.exchange.mixing import FullMixing, MatchingCycle, RandomPairs, SampledMatchings, TopologyPlan

KIND = "kind"
KINDS: dict[str, type[FullMixing | SampledMatchings | MatchingCycle | RandomPairs]] = {
    "full": FullMixing,
    "matchings": SampledMatchings,
    "cycle": MatchingCycle,
    "pairs": RandomPairs,
}


def plan_to_json(plan: TopologyPlan) -> dict[str, Any]:
    """Return a plan as plain JSON."""
    kind, kind_class = next((name, each) for name, each in KINDS.items() if isinstance(plan, each))
    return {KIND: kind} | {field.name: getattr(plan, field.name) for field in fields(kind_class)}


def plan_from_json(values: Mapping[str, Any]) -> TopologyPlan:
    """Parse the result of ``plan_to_json``. Raises ValueError if it is malformed."""
    try:
        kind = KINDS[values[KIND]]
        # JSON has lists for tuples.
        plan: TopologyPlan = kind(**{name: _tuples(value) for name, value in values.items() if name != KIND})
    except (KeyError, TypeError):
        raise ValueError("it is not a plan of links") from None
    return plan


def linked_pairs(plan: TopologyPlan) -> set[tuple[int, int]]:
    """Return all pairs of workers that can have a link in some round."""
    return {(i, j) for i, j, _ in plan.shares()}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
