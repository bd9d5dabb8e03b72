"""Every strategy on one input: each committed to a folder of its own, then one table and one page."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from typing import Any

from pyspark import SparkContext

from pipeline.errors import UnsuitableError, UsageError
from pipeline.reporting.tables import table
from pipeline.runs import flags as cli
from pipeline.runs.agreement import agreement
from pipeline.runs.report import replace_below, report
from pipeline.runs.request import preflight
from pipeline.runs.shard import shard
from pipeline.shardset.manifest import ShardSet
from pipeline.spark.progress import PhaseLog
from pipeline.spark.session import spark_context
from pipeline.spark.store import open_store
from pipeline.strategies import STRATEGIES, Strategy
from pipeline.strategies.distribution_aware import DistributionAware

COLUMNS = (
    ("strategy", "strategy", "{}"),
    ("total_s", "seconds", "{:.1f}"),
    ("min_rows", "min rows", "{:,}"),
    ("max_rows", "max rows", "{:,}"),
    ("copies", "copies", "{:,}"),
    ("class_chi_square_per_dof", "class chi2/dof", "{:.3f}"),
    ("neighbourhood_chi_square_per_dof", "nbhd chi2/dof", "{:.3f}"),
    ("cluster_chi_square_per_dof", "k-means chi2/dof", "{:.3f}"),
    ("adjusted_rand", "ARI", "{:.3f}"),
    ("mmd_ratio", "MMD2 ratio", "{:.2f}"),
    ("bytes", "bytes", "{:,}"),
)


def read_strategies(args: argparse.Namespace) -> list[Strategy]:
    """The strategies of --strategies, each with those of the flags that are fields of its own. Raises UsageError."""
    result = []
    for name in filter(None, args.strategies.split(",")):
        if name not in STRATEGIES:
            raise UsageError(f"--strategies: {name!r} is not one of {', '.join(STRATEGIES)}")
        kind = STRATEGIES[name]
        own = {field.name for field in fields(kind)}
        result.append(kind(**{key: value for key, value in vars(args).items() if key in own and value is not None}))
    if not result:
        raise UsageError("--strategies names none")
    return result


def run_comparison(args: argparse.Namespace) -> int:
    """Returns the exit code. A set that is committed already is measured as it stands."""
    from pipeline.quality.report import comparison_row, render_comparison

    cli.fill_embedding(args)
    strategies = read_strategies(args)
    request = cli.read_request(args)
    preflight(request, *strategies)
    rows: list[dict[str, Any]] = []
    made: dict[str, ShardSet] = {}
    with spark_context(debug=args.debug) as context:
        store = open_store(context)
        output = store.resolve(request.output)
        for strategy in strategies:
            progress = PhaseLog(context, quiet=args.quiet, title=f"{strategy.name} to {output}/{strategy.name}")
            if not args.quiet:
                print(f"-- {strategy.name}")
            try:
                shards = shard(context, replace(request, output=f"{output}/{strategy.name}"), strategy, progress).shards
            except UnsuitableError as error:
                if not made and strategy is strategies[-1]:
                    raise
                print(f"{strategy.name} is left out: {error}", file=sys.stderr)
                continue
            with progress.phase("report"):
                row = comparison_row(shards.manifest, report(context, shards))
            rows.append({**row, "total_s": sum(shards.manifest["seconds"].values())})
            made[strategy.name] = shards
        for row in rows:
            row |= agreement_row(context, made[row["strategy"]], made.get(DistributionAware.name))
        replace_below(store, output, "compare.json", json.dumps(rows, indent=1).encode())
        replace_below(store, output, "compare.html", render_comparison(rows).encode())
    print(comparison_table(rows))
    print(f"report: {output}/compare.html")
    return 0


def agreement_row(context: SparkContext, shards: ShardSet, reference: ShardSet | None) -> dict[str, float | None]:
    """How the groups, and the workers, of a set agree with the neighbourhoods of the exact k-means, where there are such."""
    found = agreement(context, shards, reference) if reference else None
    return {
        "adjusted_rand": found.adjusted_rand if found else None,
        "cluster_chi_square_per_dof": found.chi_square_per_dof if found else None,
    }


def comparison_table(rows: list[dict[str, Any]]) -> str:
    """The comparison as aligned text; a dash where a figure does not apply."""
    cells = [["-" if row[key] is None else form.format(row[key]) for key, _, form in COLUMNS] for row in rows]
    return table(cells, [title for _, title, _ in COLUMNS], right=range(1, len(COLUMNS)))
