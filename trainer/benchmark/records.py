"""Measurements and their files.

A record is appended as soon as its run ends, so that an interrupted benchmark resumes after its last run."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.core.atomic import path_in_errors, write_durably
from pipeline.core.errors import UsageError
from trainer.benchmark.configurations import Configuration, System

RECORDS_FILE = "rows.jsonl"
JSON_FILE = "results.json"
CSV_FILE = "results.csv"

Key = tuple[Any, ...]


@dataclass(frozen=True)
class RunTimings:
    """The result of one run of one system. Times are in seconds, and a mini-batch is a global one.

    Attributes:
        mini_batches: number of global mini-batches.
        updates: of the model.
        examples: number of examples in all mini-batches.
        converged: True if the stop rule ended the run.
        seconds: from the first mini-batch to the end of the last; for MLlib the whole fit, with its jobs outside
            mini-batches.
        compute_s: per mini-batch.
        read_s: per mini-batch; None if rows are not drawn separately from computing.
        cpu: busy share of the cores of the driver's host; None in the record of a run on a cluster's executors.
        load_s: reading all rows into memory.
        start_s: everything before the first mini-batch: load_s and, for a server, the start of its processes.
        server_s: CPU time of the parameter server per push.
        driver_s: CPU time of Spark's driver per mini-batch, without tasks.
        step_s: a worker's step, part of compute_s; the rest is messages and waiting.
        weights: at the end, in MLlib's order.
    """

    mini_batches: int
    updates: int
    examples: int
    converged: bool
    seconds: float
    compute_s: float
    read_s: float | None
    cpu: float
    load_s: float
    start_s: float
    server_s: float | None = None
    driver_s: float | None = None
    step_s: float | None = None
    weights: tuple[float, ...] = ()


@dataclass(frozen=True)
class PlannedRun:
    """A repeat of a configuration on a system, as the benchmark plans it."""

    configuration: Configuration
    system: System
    repeat: int = 0

    @property
    def key(self) -> Key:
        return self.record().key

    def record(self, **result: Any) -> BenchmarkRecord:
        """Return the record of this run. result: further fields of BenchmarkRecord."""
        configuration = self.configuration
        return BenchmarkRecord(
            configuration.model,
            configuration.rows,
            configuration.batch,
            configuration.length,
            self.system,
            self.repeat,
            configuration.tasks,
            **result,
        )


@dataclass(frozen=True)
class BenchmarkRecord:
    """A run as the files store it.

    Attributes:
        model, rows, batch, tasks: of the configuration.
        length: requested mini-batches; None until convergence.
        system: that ran it.
        repeat: number of the repeat.
        error: the reason for a missing measurement.
        measurement: fields of RunTimings, without the weights.
        loss: the objective at the end of the run.
        gap: loss above the smallest possible one, which is known for the regressions.
    """

    model: str
    rows: int
    batch: int
    length: int | None
    system: System
    repeat: int
    tasks: int | None = None
    error: str = ""
    measurement: dict[str, Any] | None = None
    loss: float | None = None
    gap: float | None = None

    @property
    def key(self) -> Key:
        return self.model, self.rows, self.batch, self.length, self.system, self.repeat, self.tasks


def format_csv(records: Sequence[BenchmarkRecord]) -> str:
    """Return a header and one line per run."""
    names = [field.name for field in fields(RunTimings) if field.name != "weights"]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["model", "rows", "batch", "length", "system", "repeat", "tasks", "error", "loss", "gap", *names])
    for record in records:
        measured = record.measurement or {}
        results = (record.error, record.loss, record.gap)
        writer.writerow([*record.key, *results, *(measured.get(name) for name in names)])
    return text.getvalue()


def write_results(output: Path, results: Mapping[str, Any], records: Sequence[BenchmarkRecord]) -> dict[str, Any]:
    """Write results.csv and results.json, and return the content of the latter: ``results`` and the records."""
    everything = {**results, "records": [asdict(record) for record in records]}
    write_durably(output / JSON_FILE, json.dumps(everything, indent=1).encode())
    write_durably(output / CSV_FILE, format_csv(records).encode())
    return everything


def read_results(output: Path) -> dict[str, Any]:
    """Return the content of results.json; empty if there is none."""
    path = output / JSON_FILE
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return results


def append_record(output: Path, record: BenchmarkRecord) -> None:
    with path_in_errors(output / RECORDS_FILE), open(output / RECORDS_FILE, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def resume_records(output: Path, identity: Mapping[str, Any]) -> dict[Key, BenchmarkRecord]:
    """Return the measured runs of an earlier start. Failed runs are dropped, so that they run again.

    identity: must be the same in both starts; it is the first line of the file. Raises UsageError if OUTPUT holds
    records with another identity."""
    output.mkdir(parents=True, exist_ok=True)
    header = json.dumps(identity, sort_keys=True)
    path = output / RECORDS_FILE
    first, *lines = (path.read_text(encoding="utf-8") if path.exists() else "").splitlines() or [header]
    if first != header:
        raise UsageError(
            f"{path} holds rows of another configuration, machine or version; choose another --output, or --overwrite"
        )
    records = [record for line in lines if (record := _parse_record(line)) and not record.error]
    # Rewriting the file also drops a line that was cut off by a crash.
    complete_lines = [header, *(json.dumps(asdict(record)) for record in records)]
    write_durably(path, "".join(f"{line}\n" for line in complete_lines).encode())
    return {record.key: record for record in records}


def _parse_record(line: str) -> BenchmarkRecord | None:
    """Parse a line. Returns None for a line that was cut off."""
    with suppress(ValueError, TypeError):
        return BenchmarkRecord(**json.loads(line))
    return None


def delete_records(output: Path) -> None:
    """Delete the records and results of an earlier start."""
    for name in (RECORDS_FILE, JSON_FILE, CSV_FILE):
        (output / name).unlink(missing_ok=True)
