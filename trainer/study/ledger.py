"""The ledger of a study: one JSON line a finished run, appended whole, so that a killed study goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import DataError, UsageError
from trainer.study.plan import Cell, Run, StudyPlan

Record = dict[str, Any]  # a line: what trainer.study.measure writes
LEDGER = "ledger.jsonl"
# Two hosts, or two tries, of one run agree on these; times and machines may differ.
OUTCOME = ("seeds", "shards", "parameters", "failed", "final_accuracy")


class Ledger:
    """The lines of a study's folder. Only one process writes at a time (the folder is locked)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        if path.exists():
            self._read()

    def __contains__(self, run: Run) -> bool:
        return str(run) in self.records

    def append(self, record: Record) -> None:
        """Add a run's line: after a crash it is there whole, or not. Raises DataError for other data than before."""
        self._check_data(record)
        line = dumps(record)
        with open(self.path, "ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.records[record["run"]] = record

    def merge(self, other: Ledger, plan: StudyPlan) -> int:
        """Take the lines of another host's ledger of this plan; returns how many were new.

        Raises UsageError for a run that the plan does not have, DataError where both have a run and it ended otherwise."""
        cells = {str(cell) for cell in plan.cells()}
        fresh = []
        for name, record in other.records.items():
            if name.rpartition("/")[0] not in cells:
                raise UsageError(f"{other.path} has the run {name}, which the plan has not; merge studies of one plan")
            mine = self.records.get(name)
            if mine is None:
                self._check_data(record)
                fresh.append(record)
            elif differing := next((key for key in OUTCOME if mine.get(key) != record.get(key)), None):
                raise DataError(
                    f"{other.path} and {self.path} have the run {name} with other {differing}:"
                    f" {record.get(differing)} and {mine.get(differing)}; the hosts' data or software differ"
                )
        for record in fresh:
            self.append(record)
        return len(fresh)

    def of_plan(self, plan: StudyPlan) -> list[Record]:
        """The plan's runs that are done, in the plan's order; seeds beyond the plan's are left out."""
        return [self.records[str(run)] for run in plan.runs() if run in self]

    def _read(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):  # a killed process's last line
            os.truncate(self.path, whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            try:
                record = json.loads(line)
                run_of(record)
            except (ValueError, KeyError, TypeError, AttributeError):
                raise DataError(f"{self.path}, line {number} is no line of a ledger; restore the file") from None
            self.records[record["run"]] = record

    def _check_data(self, record: Record) -> None:
        """Raises DataError where a cell's runs would be of different data."""
        run = run_of(record)
        for other in self.records.values():
            before = run_of(other)
            if before.cell.dataset != run.cell.dataset:
                continue
            same = ["eval"] + ["train"] * (before.cell.sharding == run.cell.sharding)
            for side in same:
                if other["data"][side] != record["data"][side]:
                    raise DataError(
                        f"{run} is of other {side} images than {before} ({record['data'][side]} and"
                        f" {other['data'][side]}): the data set {run.cell.dataset} has changed since"
                    )


def dumps(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n").encode()


def run_of(record: Record) -> Run:
    """The run that a line is of."""
    cell, _, seed = record["run"].rpartition("/")
    return Run(Cell(*cell.split("/")), int(seed))


def environments(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The machines and versions that a study ran on, each once."""
    seen = {json.dumps(record["environment"], sort_keys=True): record["environment"] for record in records}
    return list(seen.values())
