"""Shipped plans of published tables and figures: each has a small sibling that asks the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.machine import ROOT
from trainer.config import Config
from trainer.exchange.strategy_switch import StrategySwitch
from trainer.study.__main__ import find_plan
from trainer.study.plan.cases import case_of
from trainer.study.plan.study_plan import Cell, Run, StudyPlan

PUBLISHED = (
    "protocols", "stragglers", "sync-switch", "strategy-switch", "gossip", "gossip-sweep", "importance", "decentralised",
)  # fmt: skip
# plans of a paper's size, and the small ones that have some of their members
SIBLINGS = {
    "decentralised-paper": "decentralised",
    "gossip-paper": "gossip-sweep",
    "sharding-coarse": "sharding-high-dose",
}
STUDY = ROOT / "trainer" / "study"
MOST_RUNS = 60  # of the cnn on 2,000 rows, some seconds each


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_comparison_has_a_quick_sibling(name: str) -> None:
    plan, quick = find_plan(name), find_plan(f"{name}-quick")
    assert (quick.compare, quick.baseline) == (plan.compare, plan.baseline)
    assert set(quick.members) <= set(plan.members)
    assert (bool(quick.times), bool(quick.target_loss)) == (bool(plan.times), bool(plan.target_loss))
    assert len(list(quick.runs())) <= min(MOST_RUNS, len(list(plan.runs())))
    assert {keys["input"] for keys in quick.datasets.values()} == {"build/sample"}


def test_the_manual_has_the_number_of_runs_of_each_plan() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([\d,]+) \|$", (STUDY / "README.md").read_text(), re.MULTILINE)
    numbers = {name: int(number.replace(",", "")) for name, number in rows}
    assert numbers == {name: len(list(find_plan(name).runs())) for name in numbers}
    assert len(numbers) > 30


def each_case(plan: StudyPlan) -> Iterator[tuple[Cell, Config]]:
    """Yield every cell of a plan with the configuration of its first run."""
    return ((cell, case_of(plan, Run(cell, 0), "s", Path("o")).config) for cell in plan.cells())


@pytest.mark.parametrize(("name", "smaller"), SIBLINGS.items())
def test_a_plan_of_the_size_of_a_paper_has_a_smaller_sibling(name: str, smaller: str) -> None:
    plan, sibling = find_plan(name), find_plan(smaller)
    assert (plan.compare, plan.baseline) == (sibling.compare, sibling.baseline)
    assert len({*plan.members} & {*sibling.members}) >= 3
    assert list(each_case(plan))


def test_published_ways_of_sharding_have_a_sibling_of_generated_sets() -> None:
    """Three sets of classes as in the paper, each with its number of clusters."""
    plan, quick = find_plan("paper-sharding"), find_plan("paper-sharding-quick")
    ways = [{cell.sharding for cell in quick.cells() if cell.dataset == name} for name in quick.datasets]
    assert ways == [{"random", "stratified", f"distribution_aware-k{clusters}"} for clusters in (20, 40, 200)]
    published = [
        {cell.sharding for cell in plan.cells() if cell.dataset == name}
        for name in ("cifar10", "cifar100-coarse", "cifar100-fine")
    ]
    assert all(few <= many for few, many in zip(ways, published, strict=True))
    assert len(list(quick.runs())) <= MOST_RUNS


def test_the_settings_of_importance_are_as_named() -> None:
    """Five tables of 36 settings; the baseline and the fixed deal of each network and data set."""
    plan = find_plan("importance-paper")
    settings = []
    for cell, config in each_case(plan):
        rule = config.data
        if rule.repartition == "importance":
            name = f"{rule.heuristic}-{rule.importance}-w{rule.warmup_epochs}-i{rule.interval}"
            assert (cell.variant, rule.ignore_epochs) == (name, 5)
            settings.append((cell.dataset, cell.model, cell.variant.rpartition("-w")[0]))
        else:
            assert (cell.variant, rule.repartition) in {("random", "random"), ("fixed", "fixed")}
    assert Counter(settings) == {
        ("cifar10", "resnet18", "stripes-variance"): 36,
        ("cifar10", "resnet18", "stripes-average"): 36,
        ("cifar10", "resnet18", "blocks-variance"): 36,
        ("cifar10", "resnet34", "stripes-variance"): 36,
        ("cifar100", "resnet34", "stripes-variance"): 36,
    }


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
        cluster, _, end = cell.variant.partition("-")
        assert machines == {"c1": (5, "homogeneous"), "c2": (9, "mixed")}[cluster]
        assert case.config.run.stop == (end or "global")
    assert None in shares
    assert len(shares) > 3


def test_a_sweep_of_gossip_is_as_named() -> None:
    for cell, config in each_case(find_plan("gossip-sweep")):
        options = config.data
        assert cell.variant == (f"k{options.gossip}-every-{options.gossip_every}" if options.gossip else "none")
