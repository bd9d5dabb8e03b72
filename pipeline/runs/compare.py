"""Every strategy on one input: each committed to a folder of its own, then one table and one page."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from pyspark import SparkContext

from pipeline.command_line import Parser, parse
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
from pipeline.specs import add_flags
from pipeline.strategies import STRATEGIES, Strategy
from pipeline.strategies.distribution_aware import DistributionAware
from pipeline.strategies.hash import Hash
from pipeline.strategies.neighbourhoods import NeighbourhoodStrategy
from pipeline.strategies.submodular import Submodular

COLUMNS = (
    ("name", "strategy", "{}"),
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


def comparison_parser(prog: str, description: str | None) -> Parser:
    flags = cli.sharding_parser(prog, description, assignment=False)
    group = flags.add_argument_group("strategies")
    group.add_argument(
        "--strategies",
        default=",".join(STRATEGIES),
        metavar="A,B,...",
        help="which ones, each committed to OUTPUT/NAME (default %(default)s)",
    )
    group.add_argument(
        "--variants",
        default="",
        metavar="'NAME=A --FLAG V ...; ...'",
        help="further ones, each committed to OUTPUT/NAME: a strategy with flags of its own over those of all, such as"
        " 'learned=submodular --embedding build/embeddings; coarse=hash --functions 4'",
    )
    add_flags(group, NeighbourhoodStrategy, leave_out=cli.COMMON)
    add_flags(group, Submodular, only=("function", "block_rule"))
    add_flags(group, Hash, only=("family", "functions", "width"))
    return flags


def read_strategies(flags: Parser, argv: Sequence[str], args: argparse.Namespace) -> dict[str, Strategy]:
    """Those of --strategies and of --variants, by the name of their row and folder. args: of argv. Raises UsageError."""
    found = {name: read_strategy("--strategies", name, args) for name in args.strategies.split(",") if name}
    for text in filter(None, map(str.strip, args.variants.split(";"))):
        variant = re.fullmatch(r"([\w-]+)=(\w+)(\s.*)?", text, re.ASCII)
        if not variant:
            raise UsageError(
                f"--variants: {text!r} is not NAME=STRATEGY and its flags, such as coarse=hash --functions 4"
            )
        name, strategy, own = variant.groups(default="")
        if name in found:
            raise UsageError(f"--variants: {text!r} has the name of another row; choose a name of its own")
        found[name] = read_variant(flags, argv, args, strategy, own)
    if not found:
        raise UsageError("--strategies names none")
    return found


def read_variant(flags: Parser, argv: Sequence[str], args: argparse.Namespace, name: str, own: str) -> Strategy:
    """A strategy with flags of its own behind those of all. Raises UsageError, for a flag that is none of it too."""
    flag = f"--variants: {name}{own}"
    try:
        told = read_flags(flags, [*argv, *shlex.split(own)])
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    strategy = read_strategy("--variants", name, told)
    params = {field.name for field in fields(strategy)}
    for key in sorted(vars(args).keys() - params - {"given"}):
        if getattr(told, key) != getattr(args, key):
            raise UsageError(
                f"{flag}: --{key.replace('_', '-')} is no parameter of {name}; give it for all, or not at all"
            )
    return strategy


def read_strategy(flag: str, name: str, args: argparse.Namespace) -> Strategy:
    """With those of the flags that are parameters of its own. Raises UsageError."""
    if name not in STRATEGIES:
        raise UsageError(f"{flag}: {name!r} is not one of {', '.join(STRATEGIES)}")
    kind = STRATEGIES[name]
    own = {field.name for field in fields(kind)}
    return kind(**{key: value for key, value in vars(args).items() if key in own and value is not None})


def read_flags(flags: Parser, argv: Sequence[str]) -> argparse.Namespace:
    args = parse(flags, argv)
    cli.fill_embedding(args)
    return args


def run_comparison(prog: str, description: str | None) -> int:
    """Returns the exit code. A set that is committed already is measured as it stands."""
    from pipeline.quality.report import comparison_row, render_comparison

    flags, argv = comparison_parser(prog, description), sys.argv[1:]
    args = read_flags(flags, argv)
    strategies = read_strategies(flags, argv, args)
    request = cli.read_request(args)
    preflight(request, *strategies.values())
    rows: list[dict[str, Any]] = []
    made: dict[str, ShardSet] = {}
    with spark_context(debug=args.debug) as context:
        store = open_store(context)
        output = store.resolve(request.output)
        for name, strategy in strategies.items():
            progress = PhaseLog(context, quiet=args.quiet, title=f"{name} to {output}/{name}")
            if not args.quiet:
                print(f"-- {name}")
            try:
                shards = shard(context, replace(request, output=f"{output}/{name}"), strategy, progress).shards
            except UnsuitableError as error:
                if not made and name == list(strategies)[-1]:
                    raise
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            with progress.phase("report"):
                row = comparison_row(shards.manifest, report(context, shards))
            rows.append({**row, "name": name, "total_s": sum(shards.manifest["seconds"].values())})
            made[name] = shards
        for row in rows:
            row |= agreement_row(context, made[row["name"]], made.get(DistributionAware.name))
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
