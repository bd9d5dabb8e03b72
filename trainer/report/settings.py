"""The settings of a run in words, for its report."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any, NamedTuple

from pipeline.core.reporting.page import plain
from pipeline.core.specs import Spec
from trainer.config import Data, Optimiser, Processes, RunSpec
from trainer.coordination.cohorts import Cohorts
from trainer.exchange import EXCHANGES
from trainer.models import MODELS
from trainer.plan import RunPlan, describe_plan
from trainer.protocols import PROTOCOLS
from trainer.sampling import SAMPLERS

PARTS: Mapping[str, type[Spec]] = {"data": Data, "run": RunSpec, "optimiser": Optimiser, "processes": Processes}
REGISTRIES: Mapping[str, Mapping[str, type[Spec]]] = {
    "model": MODELS,
    "protocol": PROTOCOLS,
    "exchange": EXCHANGES,
    "sampler": SAMPLERS,
}


class FlagRow(NamedTuple):
    """A flag with its value and its help."""

    flag: str
    value: str
    meaning: str


def plan_in_words(plan: Mapping[str, Any] | None) -> dict[str, str]:
    """Return a logged plan as names and sentences; empty for a plan that another version wrote or that is damaged."""
    try:
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in (plan or {}).items()
        }
        return dict(describe_plan(RunPlan(**values)))
    except (TypeError, ValueError, ArithmeticError):
        return {}


def compact(value: object) -> object:
    """Return a list, such as one number per worker, as short text in which equal neighbours are counted."""
    if not isinstance(value, list):
        return value
    runs = [(entry, len(list(equal))) for entry, equal in groupby(value)]
    return ", ".join(f"{count} x {plain(entry)}" if count > 1 else plain(entry) for entry, count in runs) or "none"


def flags_in_words(config: Mapping[str, Mapping[str, Any]], simulated: Mapping[str, Any]) -> list[FlagRow]:
    """Return every flag of a logged configuration that has a value, then the settings of the virtual cluster."""
    rows: list[FlagRow] = []
    for part, values in config.items():
        if part == "cohorts":
            rows += _workers_in_words(values)
            continue
        kind = PARTS.get(part) or REGISTRIES.get(part, {}).get(str(values.get("name")))
        # A log of another version may name members and fields that this one lacks.
        meanings = kind.meanings() if kind else {}
        for key, value in values.items():
            # The name of the sampler is among the flags of the data already.
            if value is None or (part, key) == ("sampler", "name"):
                continue
            if key == "name":
                rows.append(FlagRow(_flag(part), plain(value), getattr(kind, "summary", "") or f"name of the {part}"))
            else:
                rows.append(FlagRow(_flag(key), str(plain(compact(value))), meanings.get(key, "")))
    virtual = "of the virtual cluster"
    flags = {row.flag for row in rows}  # the cohorts say more about --workers
    return rows + [
        FlagRow(_flag(key), plain(value), virtual)
        for key, value in simulated.items()
        if value is not None and _flag(key) not in flags
    ]


def _workers_in_words(cohorts: Mapping[str, Any]) -> list[FlagRow]:
    """Return the workers of a logged run that has changed them, with the version from which each number counts.

    Empty for a log of another version."""
    try:
        first, *later = Cohorts.from_json(cohorts).entries
    except ValueError:
        return []
    texts = [f"{first.workers} with --batch-size {first.batch_size}"]
    texts += [f"from version {each.version} on {each.workers} with --batch-size {each.batch_size}" for each in later]
    return [FlagRow("--workers", "; ".join(texts), "number of workers, which --resume has changed")]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
