"""The metrics of a job for Prometheus: a file for the textfile collector of its node_exporter (--metrics-file).

A batch job is too short to be scraped. The collector reads the newest file of the job until the next one replaces it.
A stream replaces its file after each generation."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core import console
from pipeline.core.errors import JobError
from pipeline.core.metrics_file import check_metrics_file
from pipeline.core.provenance import CREDENTIALS, HIDDEN
from pipeline.core.shardset.generations import generations
from pipeline.runs.program import exit_code_of

if TYPE_CHECKING:
    from pipeline.core.shardset.manifest import ShardSet

PREFIX = "sharding_job"
SUCCESS = f"{PREFIX}_last_success_timestamp_seconds"


@dataclass
class JobRecord:
    """The outcome of a job, for its metrics.

    Attributes:
        seconds: by phase; the dictionary that the job fills.
        shards: the committed set, None before.
        fresh: whether this job committed it.
        exit_code: exit code of the job.
    """

    seconds: dict[str, float]
    shards: ShardSet | None = None
    fresh: bool = False
    exit_code: int = 0


def strip_interval(uri: str, interval: Mapping[str, str] | None) -> str:
    """Return an address in which the interval of a batch run is replaced by its name, such as ``{ds}``.

    Without that, a daily job would add new labels to the metrics every day."""
    for name, value in (interval or {}).items():
        # Paths of HDFS have the value without colons. A value inside a longer number or word is not replaced.
        forms = "|".join(re.escape(form) for form in (value, value.replace(":", "_")))
        uri = re.sub(rf"(?<![\w-])(?:{forms})(?![\w-])", f"{{{name}}}", uri)
    return CREDENTIALS.sub(f"{HIDDEN}@", uri)


def job_metrics(
    path: Path | None, name: str, output: str, interval: Mapping[str, str] | None, record: JobRecord
) -> AbstractContextManager[Callable[[], None]]:
    """Check the file, and return ``recorded`` for a job. Raises UsageError.

    Args:
        path: the file; None: write nothing.
        name: what the job does, such as the name of its strategy.
        output: its output.
        interval: the interval of a batch run, or None.
        record: the outcome, which the job fills.
    """
    if path:
        check_metrics_file(path)
    return recorded(path, {"output": strip_interval(output, interval), "strategy": name}, record)


@contextmanager
def recorded(path: Path | None, labels: dict[str, str], record: JobRecord) -> Iterator[Callable[[], None]]:
    """Write the metrics of the job in the ``with`` block, whether it ends with an error or not.

    Yields a function that writes them meanwhile. A file that cannot be written is only a warning, because the set may
    be committed already.

    Args:
        path: the file; None: write nothing.
        labels: identity of the job, the same for each of its runs.
        record: the outcome, which the block fills, except for the exit code of an error.
    """
    start = time.time()
    begin = time.monotonic()  # a duration must not change with the time of day

    def write() -> None:
        if path is None:
            return
        try:
            write_metrics(path, labels, record, start, time.time(), time.monotonic() - begin)
        except (OSError, ValueError, JobError) as error:
            console.say("sharding.metrics", f"warning: --metrics-file {path}: {error}", level="warning")

    try:
        yield write
    # The file of a job that was interrupted has the exit code, too.
    except BaseException as error:
        record.exit_code = exit_code_of(error)
        raise
    finally:
        write()


def write_metrics(
    path: Path, labels: dict[str, str], record: JobRecord, start: float, end: float, duration: float
) -> None:
    """Replace the file of a job's metrics, atomically. Raises OSError.

    start, end: seconds since 1970; duration: seconds."""
    from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

    registry = CollectorRegistry()

    def add(name: str, text: str, value: float) -> None:
        gauge = Gauge(f"{PREFIX}_{name}", text, list(labels), registry=registry)
        gauge.labels(*labels.values()).set(value)

    add("exit_code", "Exit code of the last run: 0, 2 for usage, 3 for broken input, 1 for others.", record.exit_code)
    add("start_timestamp_seconds", "Start of the last run.", start)
    add("end_timestamp_seconds", "End of the last run.", end)
    add("duration_seconds", "Duration of the last run.", duration)
    phases = Gauge(
        f"{PREFIX}_phase_seconds", "Duration of a phase of the last run.", [*labels, "phase"], registry=registry
    )
    for phase, seconds in record.seconds.items():
        phases.labels(*labels.values(), phase).set(seconds)
    # A run that failed has no set; its file keeps the time of the last success, by which an alert can judge.
    success = end if record.exit_code == 0 else last_success(path)
    if success is not None:
        add("last_success_timestamp_seconds", "End of the last run that succeeded.", success)
    if record.shards is not None:
        manifest = record.shards.manifest
        add("committed", "1 if the last run committed a set, 0 if there was nothing to do.", int(record.fresh))
        add("rows", "Distinct rows of the set.", manifest.rows)
        add("copies", "Copies of rows beside them.", manifest.copies)
        add("workers", "Shards of the set.", manifest.num_workers)
        add("written_bytes", "Size of the set's files.", sum(file.bytes for file in record.shards.hashed_files()))
        add("input_bytes", "Size of the input's files.", manifest.input.bytes)
        add("manifest_version", "Number under which the set was committed.", manifest.version)
        if grown := generations(record.shards):
            add("generations", "Generations of a set that grows.", len(grown))
            add("generation_rows", "Rows of its last generation.", grown[-1].rows)
            add("generation_seconds", "Duration of its last generation.", grown[-1].seconds)
    write_to_textfile(str(path), registry)


def last_success(path: Path) -> float | None:
    """Return the time of the last success in an earlier file of the job, or None."""
    from prometheus_client.parser import text_string_to_metric_families

    with suppress(OSError, ValueError):
        families: Any = text_string_to_metric_families(path.read_text(encoding="utf-8"))
        return next((each.value for family in families for each in family.samples if each.name == SUCCESS), None)
    return None
