"""The ledger of a study: one JSON line per finished run, from which a killed study resumes."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.core.atomic import path_in_errors
from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import fits
from trainer.study.plan.study_plan import Cell, Run, StudyPlan
from trainer.study.run.predictions import unpack

Record = dict[str, Any]  # a line, as trainer.study.run.measure writes it
LEDGER = "ledger.jsonl"
KINDS: dict[str, type] = {"run": str, "seeds": dict, "data": dict, "shards": str, "sharding": dict, "environment": dict}
SIDES = ("train", "eval")
MADE = {"time", "command", "host"}  # keys of the origin of a run
COUNTS = 5  # numbers about the rows of a class in a shard: minimum, quartiles, maximum
TOTALS = ("seconds", "updates", "rejected", "restarts")
SCORES = (
    "best_accuracy", "best_epoch", "final_loss", "train_accuracy", "train_loss", "running_train_accuracy",
    "running_train_loss", "worst_class_accuracy", "worst_neighbourhood_accuracy", "sent_bytes",
)  # fmt: skip
# Keys that must be equal if a run was made twice; times and machines may differ.
PROMISED = ("seeds", "shards")
OUTCOME = (*PROMISED, "parameters", "failed", "final_accuracy")


class StudyLedger:
    """The lines of a study's folder.

    Only the process that holds the folder's lock may append, and passes ``owned``. It cuts off the incomplete last line
    of a killed process; other readers ignore that line."""

    def __init__(self, path: Path, *, owned: bool = False) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        if path.exists():
            self._read(owned)

    def __contains__(self, run: Run) -> bool:
        return str(run) in self.records

    def append(self, record: Record) -> None:
        """Append a run's line, flushed to disk. After a crash the line is either complete or ignored."""
        line = dumps(record)
        with path_in_errors(self.path), open(self.path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.records[record["run"]] = record

    def merge(self, other: StudyLedger, plan: StudyPlan, contents: Contents) -> int:
        """Add the lines of another host's ledger of this plan, and return the number of new ones.

        Raises UsageError for a run that the plan does not contain. Raises DataError if both have a run with different
        results, or if a new run was made of other data. Nothing is added after an error. Runs on real processes are
        never reproducible: only their seeds and shards must agree, and the existing line stays."""
        cells = {str(cell) for cell in plan.cells()}
        fresh = []
        for name, record in other.records.items():
            if name.rpartition("/")[0] not in cells:
                raise UsageError(f"{other.path} has the run {name}, which the plan has not; merge studies of one plan")
            own = self.records.get(name)
            if own is None:
                contents.add(record)
                fresh.append(record)
            elif key := _differing(own, record, PROMISED if plan.backend == "processes" else OUTCOME):
                raise DataError(
                    f"{other.path} and {self.path} have the run {name} with other {key}: {record.get(key)}"
                    f" ({_machine(record)}) and {own.get(key)} ({_machine(own)}); the hosts' data, software or processors"
                    " differ: have each host do seeds of its own"
                )
        # Every line is checked before the first one is written.
        for record in fresh:
            self.append(record)
        return len(fresh)

    def records_of_plan(self, plan: StudyPlan) -> list[Record]:
        """Return the finished runs of the plan, in its order. Seeds that the plan does not have are left out."""
        return [self.records[str(run)] for run in plan.runs() if run in self]

    def _read(self, owned: bool) -> None:
        """Read the file into ``records``.

        Raises DataError for a damaged line, and for a run that is there twice with different results.

        owned: whether an incomplete last line is cut off; otherwise it is ignored."""
        data = self.path.read_bytes()
        # A process that was killed while it appended leaves a line without its end.
        whole = data.rfind(b"\n") + 1
        if owned and whole < len(data):
            os.truncate(self.path, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                record = parse(line)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                raise DataError(f"{self.path}, line {number} is no line of a ledger; restore the file") from None
            before = self.records.get(record["run"])
            if before and _differing(before, record):
                raise DataError(f"{self.path}, line {number} has the run {record['run']} again, with another end")
            self.records[record["run"]] = record


class Contents:
    """The data and shards of a study's runs, by name: equal names must mean equal data.

    owner: owner(run) returns (rows, shards). rows names the order of the rows that are sharded, or the ready set; shards
    distinguishes the sets of one way of sharding by the seed, if they depend on it, and by the number of workers."""

    def __init__(self, records: Iterable[Record], owner: Callable[[Run], tuple[str, str]]) -> None:
        self.owner = owner
        self.first_values: dict[tuple[str, ...], tuple[str, str]] = {}
        for record in records:
            self.add(record)

    def add(self, record: Record) -> None:
        """Add a run. Raises DataError if its data or shards differ from earlier runs under the same name."""
        run = run_of(record)
        rows, shards = self.owner(run)
        dataset = run.cell.dataset
        # The fingerprint of the training images depends on the order of the rows.
        for kind, key, value in (
            ("evaluation images", ("eval", dataset), record["data"]["eval"]),
            ("training images", ("train", dataset, rows), record["data"]["train"]),
            ("shards", ("shards", dataset, run.cell.sharding, shards), record["shards"]),
        ):
            before, first = self.first_values.setdefault(key, (value, str(run)))
            if before != value:
                raise DataError(
                    f"{run} has other {kind} than {first} ({value} and {before}), but a study compares runs on the same"
                    f" data: rename the data set, or, if {dataset} or its shards have changed since, choose another --output"
                )


def read_beside(plan: StudyPlan, root: Path) -> list[Record]:
    """Return the plan's runs in the study beside a folder; empty if there is no such study."""
    path = root.parent / plan.beside / LEDGER
    return StudyLedger(path).records_of_plan(plan) if plan.beside and path.is_file() else []


def _differing(own: Record, other: Record, keys: Sequence[str] = OUTCOME) -> str | None:
    """Return the first key whose values differ, or None."""
    return next((key for key in keys if own.get(key) != other.get(key)), None)


def _machine(record: Record) -> str:
    about = record["environment"]
    return f"{about.get('processor', 'unknown processor')}, torch {about.get('torch', 'unknown')}"


def parse(line: bytes) -> Record:
    """Parse a line.

    Raises ValueError, KeyError, TypeError, AttributeError or RecursionError for a line that no run wrote."""
    record: Record = json.loads(line, parse_constant=_no_number)
    run_of(record)
    for key, kind in KINDS.items():
        if not isinstance(record[key], kind):
            raise TypeError(key)
    _check(all(isinstance(record["data"][side], str) for side in SIDES))
    seed = run_of(record).seed
    # A source of randomness that does not vary has seed 0, and one of a crossed design a smaller one than the run.
    _check(all(type(value) is int and 0 <= value <= seed for value in record["seeds"].values()))
    facts = dict(record["sharding"])
    boxes = [*facts.pop("shard_counts", []), facts.pop("class_counts", [0] * COUNTS)]
    _check(all(isinstance(box, list) and len(box) == COUNTS and _numbers(box) for box in boxes))
    _check(_numbers(value for value in facts.values() if value is not None))
    provenance = record.get("made")  # ledgers of earlier versions lack it
    _check(provenance is None or (fits(provenance, dict[str, str]) and provenance.keys() >= MADE))
    _check(_numbers([record["wall_s"]]) and (record["cpu_s"] is None or _numbers([record["cpu_s"]])))
    _check(_fits_images(record))
    accuracy = record["final_accuracy"]
    diverged = record["failed"] is not None
    if accuracy is None:  # real targets have no accuracy at all
        _check(record.get("best_accuracy") is None)
    else:
        _check(not diverged and _numbers([accuracy]) and 0 <= accuracy <= 1)
    if not diverged:
        _check(isinstance(record["parameters"], str))
        _check(_numbers([record[key] for key in TOTALS] + [record["staleness"]["mean"]]))
        _check(_numbers([value for key in SCORES if (value := record.get(key)) is not None]))
        _check(_is_curve(record["curve"]))
    return record


def _fits_images(record: Record) -> bool:
    """True if the values about single images, which ledgers of earlier versions lack, have the form that a run writes."""
    groups = record.get("neighbourhoods", {"rows": [], "accuracy": []})
    by_class = record.get("class_accuracy") or []
    scores = [*groups["accuracy"], *(value for value in by_class if value is not None)]
    if "predictions" in record:  # one per evaluation row, whose number is the first part of their fingerprint
        _check(str(len(unpack(record["predictions"]))) == record["data"]["eval"].partition("-")[0])
    return _numbers([*scores, *groups["rows"]]) and len(groups["rows"]) == len(groups["accuracy"])


def _is_curve(curve: Any) -> bool:
    """True for None, which stands for no evaluation, and for as many accuracies as epochs.

    An accuracy is None for real targets, and a loss that is no number is too. Raises KeyError or TypeError for other
    values."""
    if curve is None:
        return True
    epochs = curve["epoch"]
    # Ledgers of earlier versions lack all keys but the accuracy.
    scores = [curve["accuracy"], curve.get("train_loss", epochs)]
    costs = [curve.get(key, epochs) for key in ("seconds", "sent_bytes")]
    finite = [score for values in scores for score in values if score is not None]
    is_rectangular = {len(epochs)} == {len(values) for values in (*scores, *costs)}
    return is_rectangular and _numbers([*epochs, *finite, *(value for values in costs for value in values)])


def _numbers(values: Iterable[Any]) -> bool:
    """True if all values are finite numbers."""
    return all(
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        for value in values
    )


def _check(fits: bool) -> None:
    if not fits:
        raise ValueError


def _no_number(text: str) -> float:
    raise ValueError(text)


def dumps(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()


def run_of(record: Record) -> Run:
    """Return the run of a record."""
    cell, _, seed = record["run"].rpartition("/")
    return Run(Cell(*cell.split("/")), int(seed))


def environments(records: Iterable[Record]) -> list[tuple[dict[str, Any], int]]:
    """Return the distinct machines and versions of the runs, with the number of their runs."""
    counts = Counter(json.dumps(record["environment"], sort_keys=True) for record in records)
    return [(json.loads(text), runs) for text, runs in counts.items()]
