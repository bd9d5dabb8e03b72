"""The search of a study for the fraction of sync-switch, in made-up ledgers whose answer follows by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.made_up_study import ledger_of, make_plan, make_records, said
from trainer.study.__main__ import find_plan
from trainer.study.analysis.analyse import analyse
from trainer.study.analysis.fractions import fractions_of
from trainer.study.analysis.results import Analysis
from trainer.study.analysis.sides import PRIMARY
from trainer.study.plan.study_plan import Run, StudyPlan
from trainer.study.report.write import write_report
from trainer.study.run.folder import claim_folder
from trainer.study.run.ledger import Record

FRACTIONS = (0.125, 0.25, 0.5, 0.75)
SEEDS = 9
# The mean of the pairwise differences has a standard error of 0.001 * sqrt(6 / 8) / 3.
STEP = 0.001
FAR = -0.05  # five times the margin
BEFORE_HOLM = -0.00937  # 2.18 standard errors within the margin: p is 0.03, and twice that as the second of two
QUESTION = "fraction of sync-switch from which on the mean accuracy is equivalent with that of bsp within 1 points"


@pytest.fixture(autouse=True)
def fewer_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare the final accuracy alone, for speed: the search reads nothing else."""
    for module in ("analyse", "sides"):
        monkeypatch.setattr(f"trainer.study.analysis.{module}.MEASURES", (PRIMARY,))


def make_search(**changes: Any) -> StudyPlan:
    """Return a plan of four fractions, beside bsp and asp. changes: of the flags of fraction 0.5."""
    protocols: dict[str, Any] = {"bsp": {"protocol": "bsp"}, "asp": {"protocol": "asp"}}
    protocols |= {f"sync-{fraction}": {"exchange": "sync-switch", "fraction": fraction} for fraction in FRACTIONS}
    protocols["sync-0.5"] |= changes
    return make_plan(("random",), SEEDS, compare="protocol", baseline="bsp", margin=0.01, protocols=protocols)


def records_of(plan: StudyPlan, means: Mapping[float, float], diverged: float | None = None) -> list[Record]:
    """Return a ledger in which a run of a fraction takes this share of the time of bsp, and a hundredth more per seed.

    Args:
        plan: the plan.
        means: of the accuracy minus that of bsp, by fraction (default: 0); of asp it is FAR.
        diverged: the fraction whose run of seed 3 diverged.
    """

    def fraction_of(run: Run) -> float:
        kind, _, text = run.cell.protocol.partition("-")
        return float(text) if text else float(kind == "bsp")

    def accuracy(run: Run) -> float | None:
        fraction = fraction_of(run)
        base = 0.6 + 0.002 * (run.seed % 5)
        if fraction == diverged and run.seed == 3:
            return None
        return (
            base if fraction == 1 else base + means.get(fraction, 0.0 if fraction else FAR) + STEP * (run.seed % 3 - 1)
        )

    records = make_records(plan, accuracy)
    for record, run in zip(records, plan.runs(), strict=True):
        fraction = fraction_of(run)
        if record["failed"] is None:
            record["seconds"] = 100.0 if fraction == 1 else 100 * fraction + run.seed
    return records


def search(means: Mapping[float, float], diverged: float | None = None) -> Analysis:
    plan = make_search()
    return analyse(plan, records_of(plan, means, diverged))


def sentence(analysis: Analysis) -> str:
    """Return the only finding that speaks of fractions."""
    (line,) = [line for line in said(analysis).splitlines() if "fraction of sync-switch" in line]
    return line


def test_the_smallest_sufficient_fraction_is_named() -> None:
    """Take the ratio of seed 4, the median of seeds 0 to 8."""
    analysis = search({0.125: FAR})
    assert sentence(analysis) == (
        f"The smallest {QUESTION} is 0.25, with 0.29 of the training time of bsp (median over equal seeds). The time is of"
        " the seeds that chose the fraction, so other seeds may give another fraction and time."
    )
    stored = json.loads(json.dumps(analysis.to_json()))["settings"][0]["search"]
    assert stored == {
        "fractions": [0.125, 0.25, 0.5, 0.75], "equivalent": [0.25, 0.5, 0.75], "smallest": 0.25, "time_ratio": 0.29
    }  # fmt: skip


def test_a_study_without_a_sufficient_fraction_says_so() -> None:
    analysis = search(dict.fromkeys(FRACTIONS, FAR))
    assert sentence(analysis) == f"No {QUESTION} is shown, of 0.125, 0.25, 0.5 and 0.75."


def test_all_larger_fractions_must_be_equivalent() -> None:
    analysis = search({0.125: FAR, 0.5: FAR})
    assert sentence(analysis).startswith(
        f"The smallest {QUESTION} is 0.75, with 0.79 of the training time of bsp (median over equal seeds); 0.25 is"
        " equivalent, but a larger one is not shown to be."
    )
    assert sentence(search({0.75: FAR})) == (
        f"No {QUESTION} is shown, of 0.125, 0.25, 0.5 and 0.75; 0.125, 0.25 and 0.5 are equivalent, but a larger one is not"
        " shown to be."
    )


def test_equivalence_counts_after_the_adjustment() -> None:
    """Double the second largest p-value of the family, in which asp has the largest."""
    analysis = search({0.125: BEFORE_HOLM})
    comparison = analysis.settings[0].members["sync-0.125"].comparisons[PRIMARY]
    assert comparison is not None
    assert comparison.equivalence_p < 0.05 < comparison.adjusted_equivalence_p
    assert "is 0.25, with 0.29" in sentence(analysis)


def test_a_fraction_with_more_diverged_runs_is_not_sufficient() -> None:
    assert "is 0.75, with 0.79" in sentence(search({}, diverged=0.5))


def test_fractions_that_were_not_run_are_not_sufficient() -> None:
    plan = make_search()
    some = [record for record in records_of(plan, {}) if "/sync-0.5/" not in record["run"]]
    assert "is 0.75, with 0.79" in sentence(analyse(plan, some))


def test_members_that_differ_otherwise_are_no_search() -> None:
    plan = make_search(straggler=3)
    analysis = analyse(plan, records_of(plan, {}))
    assert "fraction of sync-switch" not in said(analysis)
    assert "search" not in analysis.to_json()["settings"][0]


@pytest.mark.parametrize(
    ("name", "fractions"),
    [("sync-switch", [0.0625, 0.125, 0.25, 0.5, 0.75]), ("sync-switch-quick", [0.125, 0.25, 0.5, 0.75]), ("quick", [])],
)
def test_shipped_plans_search_for_their_fractions(name: str, fractions: list[float]) -> None:
    plan = find_plan(name)
    cells = {cell.protocol: cell for cell in plan.cells()}
    assert list(fractions_of(plan, cells).values()) == fractions


@pytest.mark.usefixtures("undrawn")
def test_the_report_and_the_readme_name_the_fraction(tmp_path: Path) -> None:
    plan = make_search()
    claim_folder(plan, tmp_path)
    printed = write_report(plan, tmp_path, ledger_of(tmp_path, records_of(plan, {0.125: FAR})))
    for text in (printed, (tmp_path / "README.md").read_text(), (tmp_path / "report.html").read_text()):
        assert f"The smallest {QUESTION} is 0.25, with 0.29 of the training time of bsp" in text
