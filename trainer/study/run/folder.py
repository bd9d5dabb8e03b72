"""The ownership of a study's folder: its plan.json holds the plan of the study, including every default."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pipeline.core.atomic import write_durably
from pipeline.core.errors import DataError, UsageError
from trainer.study.plan.cases import EXAMPLE_TABLE_FLAG, SHARDS_KEY, cell_settings, sources, strategy_of
from trainer.study.plan.study_plan import TABLES, StudyPlan

PLAN = "plan.json"
OLDER_WITHOUT = ("strategies", "simulations", "sources")  # parts that older plan.json files lack


def claim_folder(plan: StudyPlan, root: Path) -> None:
    """Make a folder the study of this plan, by writing plan.json.

    Raises UsageError if it belongs to another plan, or holds other files."""
    refuse_foreign(root)
    initial_tests = refuse_other_plan(plan, root).get("tests") if (root / PLAN).exists() else None
    root.mkdir(parents=True, exist_ok=True)
    # The choices for the statistical tests stay those of the first start, so that the report can name later changes.
    content = _identity(plan) | {"tests": initial_tests or plan.tests()}
    write_durably(root / PLAN, (json.dumps(content, indent=1) + "\n").encode())


def tests_begun(plan: StudyPlan, root: Path) -> dict[str, Any]:
    """Return the tests that were planned when a folder's study began. Raises UsageError for another plan's folder."""
    initial_tests: dict[str, Any] = refuse_other_plan(plan, root).get("tests") or plan.tests()
    return initial_tests


def refuse_foreign(root: Path) -> None:
    """Raise UsageError for a folder that is not a study's and holds other files."""
    if root.is_dir() and not (root / PLAN).exists() and any(map(_is_foreign, root.iterdir())):
        raise UsageError(f"{root} holds other files; choose a folder that is empty or does not exist")


def _is_foreign(entry: Path) -> bool:
    """True unless an entry is the lock, or a temporary file of a process that was killed in its first write."""
    return entry.name != ".lock" and not fnmatchcase(entry.name, f".{PLAN}.*.tmp")


def refuse_other_plan(plan: StudyPlan, root: Path) -> dict[str, Any]:
    """Return the content of a study's plan.json.

    Raises UsageError if it is neither this plan nor a part of it, DataError if the file is damaged."""
    path = root / PLAN
    expected = _identity(plan)
    try:
        stored: dict[str, Any] = json.loads(path.read_bytes())
        parts = {"plan": "", "training": ""}  # with the prefix of a difference in the message
        parts |= {part: part for part in OLDER_WITHOUT if part in stored}
        # A plan without crossed sets lacks the key, so that only a default shows that it was added.
        stored["plan"].setdefault("sets", 0)
        expected["plan"].setdefault("sets", 0)
        for flags in stored["training"].values():  # older versions wrote the absolute address
            flags.pop(EXAMPLE_TABLE_FLAG, None)
        _check_tests(stored.get("tests"))
        if "sources" in stored:  # a file that does not exist here cannot be compared
            stored["sources"] = {key: value for key, value in stored["sources"].items() if key in expected["sources"]}
        differences = (_difference(stored[part], expected[part], place) for part, place in parts.items())
        difference = next(filter(None, differences), None)
    except FileNotFoundError:
        raise UsageError(f"{root} holds no {PLAN}: it is no study's folder") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DataError(f"{path} is damaged; restore it, or choose another --output") from None
    if difference:
        raise UsageError(f"{root} is the study of another plan: {difference}; choose another folder")
    return stored


def _identity(plan: StudyPlan) -> dict[str, Any]:
    """Return the content that plan.json has for a plan, except for the tests.

    It has passed through JSON, so that it can be compared with the content of the file."""
    settings = {str(cell): cell_settings(plan, cell) for cell in plan.cells()}
    identity = {
        "plan": plan.identity(),
        "training": {cell: each.training for cell, each in settings.items()},
        "strategies": {
            name: strategy_of(plan, name).params() for name, keys in plan.shardings.items() if SHARDS_KEY not in keys
        },
        "simulations": {cell: each.simulation for cell, each in settings.items()},
        "sources": sources(plan),
    }
    as_json: dict[str, Any] = json.loads(json.dumps(identity))
    return as_json


def _check_tests(initial_tests: Any) -> None:
    """Raise ValueError for values that no study wrote. None is valid: older studies wrote no tests."""
    kinds: dict[str, Any] = {"baseline": str, "margin": (int, float), "seeds": int}
    if initial_tests is not None and not all(isinstance(value, kinds[key]) for key, value in initial_tests.items()):
        raise ValueError


def _difference(stored: Mapping[str, Any], expected: Mapping[str, Any], place: str = "") -> str | None:
    """Return the first difference between two plans in words, or None.

    Members that ``expected`` adds to ``stored`` do not count; keys that it adds to a table of flags do.

    place: the names of the tables above, joined by dots."""
    for key, value in stored.items():
        at = f"{place}.{key}" if place else key
        if key not in expected:
            return f"{at} is not in this one"
        if isinstance(value, dict) and isinstance(expected[key], dict):
            inner = _difference(value, expected[key], at)
            added = set(expected[key]) - set(value) if _is_table_of_flags(at) else set()
            if inner or added:
                return inner or f"{at} had no {sorted(added)[0]}"
        elif expected[key] != value:
            return f"{at} was {json.dumps(value)[:200]}, now {json.dumps(expected[key])[:200]}"
    return None


def _is_table_of_flags(place: str) -> bool:
    """True for tables whose keys must all agree, such as [training] and [models.NAME].

    [models] itself may get more members."""
    table, _, member = place.partition(".")
    return place in ("training", "virtual") or (table in TABLES and bool(member))
