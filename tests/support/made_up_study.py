"""A study that never ran: a plan and the lines of its ledger, with accuracies that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.study.analysis.analyse import analyse
from trainer.study.analysis.results import Analysis
from trainer.study.plan.study_plan import SOURCES, Run, StudyPlan, plan_of
from trainer.study.report.findings import findings
from trainer.study.run.ledger import LEDGER, Record, StudyLedger

Draw = Callable[[Run], float | None]  # the final accuracy of a run; None where it diverged

WAYS = ("random", "stratified", "round_robin")


def make_plan(ways: Sequence[str] = ("random", "stratified"), seeds: int | list[int] = 5, **values: Any) -> StudyPlan:
    """A plan of strategies by name, on a generated set that is nowhere."""
    tables = {
        "datasets": {"made-up": {"input": "nowhere"}},
        "shardings": {name: {"strategy": name} for name in ways},
        "models": {"cnn": {"model": "cnn"}},
        "protocols": {"asp": {"protocol": "asp"}},
        "training": {"epochs": 3},
        "title": "A study that never ran",
    }
    return plan_of(tables | {"seeds": seeds} | values)


def make_records(plan: StudyPlan, accuracy: Draw, **changes: Any) -> list[Record]:
    """One line a run. The curve rises to its end; the shards of later seeds are less even."""
    return [make_record(plan, run, accuracy(run)) | changes for run in plan.runs()]


def make_record(plan: StudyPlan, run: Run, accuracy: float | None) -> Record:
    quality = 1.0 + 0.1 * (run.seed % 7)
    record: Record = {
        "run": str(run),
        "seeds": dict.fromkeys(SOURCES, run.seed),
        "failed": None if accuracy is not None else "the run diverged: its loss is no number",
        "data": {"train": "3000-aa", "eval": "1000-bb"},
        "shards": f"{run.cell.sharding}-{plan.seed_of('sharding', run) if plan.sets else run.seed}",
        "sharding": {
            "rows": 3000, "copies": 0, "sparse": 0, "sparse_rows": 0, "size_ratio": 1.0, "seconds": 1.0,
            "mmd_ratio": quality, "mean_ratio": quality, "chi_square": 99 * quality, "cramers_v": 0.03 * quality,
            "class_counts": [20.0, 24.0, 25.0, 26.0, 30.0],
            "shard_counts": [[20.0, 24.0, 25.0, 26.0, 28.0], [22.0, 24.0, 25.0, 26.0, 30.0]],
        },
        "wall_s": 2.0,
        "cpu_s": 1.8,
        "environment": {"python": "3.11", "torch": "2", "cores": 2},
    }  # fmt: skip
    if accuracy is None:
        names = ("final_accuracy", "best_accuracy", "best_epoch", "final_loss", "train_accuracy", "train_loss")
        return record | dict.fromkeys((*names, "running_train_loss", "curve", "parameters"))
    curve = [accuracy - 0.2, accuracy - 0.05, accuracy]
    return record | {
        "final_accuracy": accuracy, "best_accuracy": accuracy, "best_epoch": 3.0, "final_loss": 1 - accuracy,
        "train_accuracy": accuracy, "train_loss": 1 - accuracy, "running_train_loss": 1.1 - accuracy,
        "curve": {"epoch": [1, 2, 3], "accuracy": curve, "loss": [1, 1, 1]}, "parameters": f"{run.seed:016x}",
        "staleness": {"mean": 3.0, "max": 7}, "seconds": 15.0, "updates": 300, "examples": 9000, "rejected": 0,
        "restarts": 0,
    }  # fmt: skip


def ledger_of(folder: Path, records: Sequence[Record]) -> StudyLedger:
    """The ledger of a study's folder, with these lines and no others."""
    (folder / LEDGER).unlink(missing_ok=True)
    ledger = StudyLedger(folder / LEDGER)
    for record in records:
        ledger.append(record)
    return ledger


def normal(sds: dict[str, float], seed: int = 0, means: dict[str, float] | None = None) -> Draw:
    """Accuracies around 0.6, or ``means``, with a standard deviation for each way of sharding; equal for equal runs."""

    def draw(run: Run) -> float:
        name = run.cell.sharding
        key = [seed, run.seed, sum(name.encode())]
        return (means or {}).get(name, 0.6) + sds[name] * float(np.random.default_rng(key).standard_normal())

    return draw


def made(draw: Draw, seeds: int = 19, ways: tuple[str, ...] = WAYS, **values: object) -> Analysis:
    plan = make_plan(ways, seeds=seeds, **values)
    return analyse(plan, make_records(plan, draw))


def made_steadier() -> Analysis:
    """Stratified shards have a fifth of the spread, and round robin a lower mean."""
    return made(normal({"random": 0.02, "stratified": 0.004, "round_robin": 0.02}, means={"round_robin": 0.5}))


def said(analysis: Analysis) -> str:
    return "\n".join(finding.text for finding in findings(analysis))
