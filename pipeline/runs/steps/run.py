"""The first step: open a run, and resolve its places once for all steps."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark import SparkContext

from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.storage.store import Store
from pipeline.runs.request import Request, check_output, resolve_places
from pipeline.spark.progress import PhaseLog
from pipeline.spark.store import open_store


@dataclass(frozen=True)
class ShardingRun:
    """The configuration with which a set is made.

    Attributes:
        context: runs the tasks.
        store: reaches the inputs and the output.
        request: configuration of the run, with resolved places.
        progress: times the phases.
    """

    context: SparkContext
    store: Store
    request: Request
    progress: PhaseLog


@dataclass(frozen=True)
class ShardingResult:
    """The result of a run.

    shards: the set; fresh: True if this run committed it; report: path of its report, or None."""

    shards: ShardSet
    fresh: bool
    report: str | None = None


def open_run(context: SparkContext, request: Request, progress: PhaseLog) -> ShardingRun:
    """Open the store and resolve the places of a request.

    Raises UsageError if no set can be written to its output, and DataError for a pattern that matches nothing."""
    store = open_store(context)
    absolute = resolve_places(store, request)
    check_output(store, absolute)
    return ShardingRun(context, store, absolute, progress)
