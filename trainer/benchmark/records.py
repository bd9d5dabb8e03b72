"""What is measured, and the files that hold it: a record is appended as soon as its run ends, so an interrupted benchmark
goes on where it stopped."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.core.atomic import naming, write_durably
from pipeline.core.errors import UsageError
from trainer.benchmark.configurations import Configuration, System

RECORDS_FILE, JSON_FILE, CSV_FILE = "rows.jsonl", "results.json", "results.csv"

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Measurement:
    """What one run of one system came to. Times are in seconds; a mini-batch is a global one."""

    mini_batches: int
    updates: int  # of the model
    examples: int
    converged: bool
    seconds: float  # from the first mini-batch to the end of the last
    compute_s: float  # of one mini-batch
    read_s: float | None  # of one mini-batch; None where rows are not drawn apart from computing
    cpu: float  # share of all cores that was busy
    load_s: float  # reading all rows into memory
    start_s: float  # that and, of a server, all else before the first mini-batch
    server_s: float | None = None  # CPU of the parameter server for one push
    driver_s: float | None = None  # CPU of Spark's driver for one mini-batch, without tasks
    step_s: float | None = None  # of compute_s, a worker's step; the rest are messages and waiting
    weights: tuple[float, ...] = ()  # at the end, in MLlib's order


@dataclass(frozen=True)
class PlannedRun:
    """One configuration in one system, once."""

    configuration: Configuration
    system: System
    repeat: int = 0

    @property
    def key(self) -> Key:
        return self.record().key

    def record(self, **result: Any) -> RunRecord:
        """This run with its result: fields of RunRecord."""
        given = self.configuration
        return RunRecord(
            given.model, given.rows, given.batch, given.length, self.system, self.repeat, given.tasks, **result
        )


@dataclass(frozen=True)
class RunRecord:
    """One run as the files hold it."""

    model: str
    rows: int
    batch: int
    length: int | None  # mini-batches that were asked for; None: until convergence
    system: System
    repeat: int
    tasks: int | None = None
    error: str = ""  # why there is no measurement
    measurement: dict[str, Any] | None = None  # fields of Measurement, without the weights
    loss: float | None = None  # the objective where the run ended
    gap: float | None = None  # how far that is above the least possible, which is known of the regressions

    @property
    def key(self) -> Key:
        return self.model, self.rows, self.batch, self.length, self.system, self.repeat, self.tasks


def format_csv(records: Sequence[RunRecord]) -> str:
    """One line a run, after a header."""
    names = [field.name for field in fields(Measurement) if field.name != "weights"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["model", "rows", "batch", "length", "system", "repeat", "tasks", "error", "loss", "gap", *names])
    for record in records:
        measured = record.measurement or {}
        results = (record.error, record.loss, record.gap)
        writer.writerow([*record.key, *results, *(measured.get(name) for name in names)])
    return text.getvalue()


def write_results(output: Path, results: Mapping[str, Any], records: Sequence[RunRecord]) -> dict[str, Any]:
    """Write results.csv and results.json; returns what the latter holds, ``results`` and the records."""
    everything = {**results, "records": [asdict(record) for record in records]}
    write_durably(output / JSON_FILE, json.dumps(everything, indent=1).encode())
    write_durably(output / CSV_FILE, format_csv(records).encode())
    return everything


def read_results(output: Path) -> dict[str, Any]:
    """What results.json holds; empty where there is none."""
    path = output / JSON_FILE
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def append_record(output: Path, record: RunRecord) -> None:
    with naming(output / RECORDS_FILE), open(output / RECORDS_FILE, "a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def resume_records(output: Path, identity: Mapping[str, Any]) -> dict[Key, RunRecord]:
    """The measured runs of an earlier start; failed ones run again.

    identity: what both starts must share; the first line of the file holds it. Raises UsageError where OUTPUT holds
    records of another."""
    output.mkdir(parents=True, exist_ok=True)
    header = json.dumps(identity, sort_keys=True)
    path = output / RECORDS_FILE
    first, *lines = path.read_text().splitlines() if path.exists() else [header]
    if first != header:
        raise UsageError(
            f"{path} holds rows of another configuration, machine or version; choose another --output, or --overwrite"
        )
    records = [record for line in lines if (record := _parse_record(line)) and not record.error]
    kept = [header, *(json.dumps(asdict(record)) for record in records)]
    write_durably(path, "".join(f"{line}\n" for line in kept).encode())
    return {record.key: record for record in records}


def _parse_record(line: str) -> RunRecord | None:
    """None for a line that was cut off."""
    with suppress(ValueError, TypeError):
        return RunRecord(**json.loads(line))
    return None


def delete_records(output: Path) -> None:
    """Remove the records and results of an earlier start."""
    for name in (RECORDS_FILE, JSON_FILE, CSV_FILE):
        (output / name).unlink(missing_ok=True)
