"""The body that the jobs share: start Spark, shard, report, print."""

from __future__ import annotations

import argparse
import sys
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pyspark import SparkContext

from pipeline.errors import UsageError
from pipeline.quality.metrics import Quality
from pipeline.runs import flags as cli
from pipeline.runs.request import Request
from pipeline.runs.reshard import reshard
from pipeline.runs.shard import ShardingResult, shard
from pipeline.shardset.manifest import ShardSet
from pipeline.spark.progress import PhaseLog
from pipeline.spark.session import spark_context
from pipeline.storage.store import Store
from pipeline.strategies import Strategy

REPORT = "report.html"
MANY_COPIES = 0.01  # of the rows (SPEC 2.3): beyond, sparse groups change the set rather than complete the shards


def run_sharding(args: argparse.Namespace, strategy: Strategy) -> int:
    """Shard as asked, report, print the set. Returns the exit code."""
    return _run(args, lambda context, request, progress: shard(context, request, strategy, progress))


def run_resharding(args: argparse.Namespace) -> int:
    """Reshard as asked, report, print the set. Returns the exit code."""
    return _run(args, reshard)


def _run(args: argparse.Namespace, work: Callable[[SparkContext, Request, PhaseLog], ShardingResult]) -> int:
    request = cli.request_of(args)
    cli.preflight(request)
    with spark_context(debug=args.debug) as context:
        progress = PhaseLog(context, quiet=args.quiet)
        outcome = work(context, request, progress)
        shards = outcome.shards
        reported = shards.store.exists(f"{shards.uri}/{REPORT}") and not outcome.fresh
        if not args.no_report and not reported:
            with progress.phase("report"):
                reported = try_report(context, shards) is not None
    print(f"{shards.uri}: {'committed' if outcome.fresh else 'already committed, nothing to do'}")
    print(cli.describe(outcome))
    share = shards.manifest["copies"] / shards.manifest["rows"]
    if share > MANY_COPIES:
        print(f"warning: copies of sparse groups add {share:.1%} rows; try fewer --clusters", file=sys.stderr)
    if reported:
        print(f"  report    {shards.uri}/{REPORT}")
    return 0


def try_report(context: SparkContext, shards: ShardSet) -> Quality | None:
    """Write the report of a committed set. The commit stands whatever happens here, so failure is a warning."""
    try:
        return report(context, shards)
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        print(f"warning: the shards are committed, but their report failed: {line}", file=sys.stderr)
        return None


def report(context: SparkContext, shards: ShardSet) -> Quality:
    """Measure a committed set and write report.html and quality.json beside its manifest."""
    from pipeline.quality.report import write_report  # matplotlib takes a second to load

    if shards.manifest["image"]["dtype"] != "uint8":
        raise UsageError(f"{shards.uri} holds real-valued features, and quality is measured on images of bytes")
    return write_report(shards, partial(replace_below, shards.store, shards.uri), partial(run_in_few, context))


def replace_below(store: Store, uri: str, path: str, data: bytes) -> None:
    """Write a file whole or not at all, over an older one."""
    fresh = f"{uri}/_{path}-{uuid.uuid4().hex[:8]}"
    store.write_new(fresh, data)
    store.rename(fresh, f"{uri}/{path}", overwrite=True)


def run_in_few(context: SparkContext, fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """``run`` for many small items: as many tasks as cores."""
    slices = max(1, min(len(items), context.defaultParallelism))
    return context.parallelize(items, slices).map(fn).collect()
