"""Shipped plans of published tables and figures: each has a small sibling that asks the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.exchange.strategy_switch import StrategySwitch
from trainer.study.__main__ import find_plan
from trainer.study.plan.cases import case_of
from trainer.study.plan.study_plan import Run

PUBLISHED = (
    "protocols", "stragglers", "sync-switch", "strategy-switch", "gossip", "gossip-sweep", "importance", "decentralised",
)  # fmt: skip
MOST_RUNS = 60  # of the cnn on 2,000 rows, some seconds each


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_comparison_has_a_quick_sibling(name: str) -> None:
    plan, quick = find_plan(name), find_plan(f"{name}-quick")
    assert (quick.compare, quick.baseline) == (plan.compare, plan.baseline)
    assert set(quick.members) <= set(plan.members)
    assert len(list(quick.runs())) <= min(MOST_RUNS, len(list(plan.runs())))
    assert {keys["input"] for keys in quick.datasets.values()} == {"build/sample"}


@pytest.mark.parametrize("name", ["strategy-switch", "strategy-switch-16x16", "strategy-switch-quick"])
def test_shares_of_a_strategy_switch_are_as_named(name: str) -> None:
    """On five equal workers, and on the nine of the thesis's other cluster."""
    plan = find_plan(name)
    shares = set()
    for cell in plan.cells():
        case = case_of(plan, Run(cell, 0), "s", Path("o"))
        if isinstance(case.config.exchange, StrategySwitch):
            alpha = case.config.exchange.alpha
            assert cell.protocol == ("auto" if alpha is None else f"alpha-{alpha:g}")
            shares.add(alpha)
        assert case.simulated is not None
        machines = (plan.workers_of(cell), case.simulated.to_json()["profile"])
        assert machines == {"c1": (5, "homogeneous"), "c2": (9, "mixed")}[cell.variant]
    assert None in shares
    assert len(shares) > 3


def test_a_sweep_of_gossip_is_as_named() -> None:
    plan = find_plan("gossip-sweep")
    for cell in plan.cells():
        options = case_of(plan, Run(cell, 0), "s", Path("o")).config.data
        assert cell.variant == (f"k{options.gossip}-every-{options.gossip_every}" if options.gossip else "none")
