"""A comparison of strategies on one input: one committed set per strategy, then one table and one page."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from typing import Any

from pyspark import SparkContext

from pipeline.core import console
from pipeline.core.command_line import Parser, names_in_argv, parse
from pipeline.core.errors import DataError, UnsuitableError, UsageError
from pipeline.core.provenance import provenance
from pipeline.core.reporting.tables import table
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.specs import add_flags, find
from pipeline.runs import flags as cli
from pipeline.runs.agreement import agreement
from pipeline.runs.lineage import lineage_events
from pipeline.runs.metrics_file import JobRecord, job_metrics
from pipeline.runs.program import execute
from pipeline.runs.report import report
from pipeline.runs.request import preflight
from pipeline.runs.shard import shard
from pipeline.runs.tables import tables_as_files
from pipeline.spark.progress import PhaseLog
from pipeline.spark.session import spark_context
from pipeline.spark.store import open_store
from pipeline.strategies import STRATEGIES, Strategy
from pipeline.strategies.distribution_aware import PRESETS, DistributionAware
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
    ("total_variation", "class TV", "{:.3f}"),
    ("effective_classes", "classes", "{:.1f}"),
    ("neighbourhood_chi_square_per_dof", "nbhd chi2/dof", "{:.3f}"),
    ("cluster_chi_square_per_dof", "k-means chi2/dof", "{:.3f}"),
    ("adjusted_rand", "ARI", "{:.3f}"),
    ("mmd_ratio", "MMD2 ratio", "{:.2f}"),
    ("class_mmd_ratio", "class MMD2", "{:.2f}"),
    ("bytes", "bytes", "{:,}"),
)


def comparison_parser(prog: str, description: str | None) -> Parser:
    """Return the parser of jobs/compare.py: the flags of a sharding job and of all strategies."""
    flags = cli.sharding_parser(prog, description, assignment=False)
    group = flags.add_argument_group("strategies")
    group.add_argument(
        "--strategies",
        default=",".join(name for name, kind in STRATEGIES.items() if not (kind.decides_sizes or kind.reads_table)),
        metavar="LIST",
        # Skewed shards differ on purpose, have parameters of their own, and refuse the ratios of the others.
        # A strategy that reads a table needs its path.
        help="strategies to compare, each committed to OUTPUT/NAME (default: all that aim at even shards; name dirichlet,"
        " by_class, sorted or by_attribute to compare skewed ones)",
    )
    group.add_argument(
        "--variants",
        default="",
        metavar="LIST",
        help="further strategies with options of their own, each committed to OUTPUT/NAME, such as 'coarse=hash"
        " --functions 4; learned=submodular --embedding build/embeddings'",
    )
    # Submodular and hash have these parameters too, and argparse accepts each flag only once.
    shared = ("embedding", "fit_rows")
    add_flags(group, NeighbourhoodStrategy, only=shared)
    group = flags.add_argument_group("distribution_aware and class_cluster")
    add_flags(group, NeighbourhoodStrategy, leave_out=(*cli.COMMON, *shared))
    add_flags(
        flags.add_argument_group("submodular"), Submodular, only=("function", "block_rule", "similarity", "sigma_scope")
    )
    add_flags(flags.add_argument_group("hash"), Hash, only=("family", "functions", "width", "centroids"))
    return flags


def read_strategies(args: argparse.Namespace) -> dict[str, Strategy]:
    """Return the strategies of --strategies and --variants, by the name of their row and folder. Raises UsageError."""
    cli.fill_tables(args)
    strategies = {name: read_strategy(name, args) for name in args.strategies.split(",") if name}
    for text in split_variants(args.variants):
        try:
            name, strategy = read_variant(text, args)
        except UsageError as error:
            raise UsageError(f"--variants: {shlex.join(text)}: {error}") from None
        # The name is also the output folder, so a second strategy would replace the set of the first.
        if name in strategies:
            raise UsageError(f"--variants: {shlex.join(text)} has a name that is already used; choose another name")
        strategies[name] = strategy
    if not strategies:
        raise UsageError("--strategies is empty; name at least one strategy")
    return strategies


def split_variants(text: str) -> list[list[str]]:
    """Return the words of each variant, which ; separates, with quotes as in a shell. Raises UsageError."""
    words = shlex.shlex(text, posix=True, punctuation_chars=";")
    words.whitespace_split = True
    # shlex takes # for the start of a comment, but it may be part of a path.
    words.commenters = ""
    variants: list[list[str]] = [[]]
    try:
        for word in words:
            if word.strip(";"):
                variants[-1].append(word)
            else:
                variants.append([])
    except ValueError as error:
        raise UsageError(f"--variants: {error} in {text}") from None
    return [variant for variant in variants if variant]


def read_variant(words: Sequence[str], args: argparse.Namespace) -> tuple[str, Strategy]:
    """Return a variant's name and its strategy, whose own flags override the common ones. Raises UsageError."""
    match = re.fullmatch(r"(\w[\w-]{0,99})=(\w+)", words[0], re.ASCII)
    if not match:
        raise UsageError("it must be NAME=STRATEGY and options, such as coarse=hash --functions 4")
    name, strategy = match.groups()
    if name in STRATEGIES:
        raise UsageError(f"{name} is the name of a strategy; choose another name")
    flags = Parser(prog="compare.py", add_help=False)
    cli.add_seed_flag(flags)
    add_flags(flags, find(STRATEGIES, "the strategy", strategy), leave_out=cli.COMMON)
    variant_args = flags.parse_args(words[1:])
    # Only flags that are on the variant's command line override, not the parser's defaults.
    own = {name: getattr(variant_args, name) for name in names_in_argv(flags, words[1:])}
    common = dict(vars(args))
    # A preset only fills values that are None, and the common flags have defaults.
    if "preset" in own:
        common |= dict.fromkeys(PRESETS[own["preset"]])
    merged_args = argparse.Namespace(**common | own)
    cli.fill_tables(merged_args)
    return name, read_strategy(strategy, merged_args)


def read_strategy(name: str, args: argparse.Namespace) -> Strategy:
    """Return a strategy with the flags that are among its parameters. Raises UsageError."""
    kind = find(STRATEGIES, "--strategies", name)
    own = {field.name for field in fields(kind)}
    return kind(**{key: value for key, value in vars(args).items() if key in own and value is not None})


def main(argv: Sequence[str]) -> None:
    """Shard an input by every strategy, and compare quality and seconds in a table and a report."""
    execute(lambda: run_comparison("python -m pipeline compare", main.__doc__, argv))


def run_comparison(prog: str, description: str | None, argv: Sequence[str] | None = None) -> int:
    """Shard the input by each strategy, write compare.json and compare.html, and return the exit code.

    A set that is committed already is measured as it is. A strategy that is unsuitable for the input is skipped; it is
    an error if that leaves none."""
    from pipeline.quality.report import comparison_row, render_comparison

    args = parse(comparison_parser(prog, description), argv)
    if "no_report" in args.names_in_argv:
        raise UsageError("the table of compare is of the measures of quality: leave out --no-report")
    strategies = read_strategies(args)
    request = cli.read_request(args)
    seconds: dict[str, float] = {}  # by strategy, as the phases of the comparison
    metrics = job_metrics(args.metrics_file, "compare", request.output, request.interval, JobRecord(seconds))
    preflight(request, *strategies.values())
    rows: list[dict[str, Any]] = []
    sets: dict[str, ShardSet] = {}
    with metrics, spark_context(debug=args.debug) as context, ExitStack() as stack:
        store = open_store(context)
        output = store.resolve(request.output)
        # The rows of a table are written once, for all strategies.
        tables = PhaseLog(context, quiet=args.quiet, title=f"compare to {output}")
        on_files = stack.enter_context(tables_as_files(context, request, tables, *strategies.values()))
        for name, strategy in strategies.items():
            place = f"{output}/{name}"
            progress = PhaseLog(context, quiet=args.quiet, title=f"{name} to {place}")
            if not args.quiet:
                print(f"-- {name}")
            try:
                # The events name the table, and not the files to which its rows were written.
                with lineage_events(context, store, name, replace(request, output=place)) as lineage:
                    shards = shard(context, replace(on_files, output=place), strategy, progress).shards
                    lineage.set_result(shards)
            except UnsuitableError as error:
                if not sets and name == list(strategies)[-1]:
                    raise
                console.say("sharding.compare", f"{name} is skipped: {error}", level="warning")
                continue
            check_same_rows(shards, next(iter(sets.values()), shards))
            with progress.phase("report"):
                row = comparison_row(shards.manifest, report(context, shards))
            seconds[name] = sum(shards.manifest.seconds.values())
            rows.append({**row, "name": name, "total_s": seconds[name]})
            sets[name] = shards
        # The neighbourhoods of the exact k-means are the reference for all sets.
        exact = (shards for shards in sets.values() if shards.manifest.strategy == DistributionAware.name)
        reference = next(exact, None)
        for row in rows:
            row |= agreement_row(context, sets[row["name"]], reference)
        store.replace(f"{output}/compare.json", json.dumps(rows, indent=1).encode())
        page = render_comparison(rows, {**provenance(), "master": str(context.master)})
        store.replace(f"{output}/compare.html", page.encode())
    print(comparison_table(rows))
    print(f"report: {output}/compare.html")
    return 0


def check_same_rows(shards: ShardSet, first: ShardSet) -> None:
    """Raise DataError if a set has other rows than the first one: the input changed between two strategies."""
    if shards.manifest.input.fingerprint != first.manifest.input.fingerprint:
        raise DataError(f"{shards.uri} and {first.uri} hold different rows: the input has changed; run it again")


def agreement_row(context: SparkContext, shards: ShardSet, reference: ShardSet | None) -> dict[str, float | None]:
    """Return the agreement of a set's groups and workers with the reference's neighbourhoods, None without a
    reference."""
    result = agreement(context, shards, reference) if reference else None
    return {
        "adjusted_rand": result.adjusted_rand if result else None,
        "cluster_chi_square_per_dof": result.chi_square_per_dof if result else None,
    }


def comparison_table(rows: list[dict[str, Any]]) -> str:
    """Return the comparison as aligned text, with a dash for figures that do not apply."""
    cells = [["-" if row[key] is None else form.format(row[key]) for key, _, form in COLUMNS] for row in rows]
    return table(cells, [title for _, title, _ in COLUMNS], right=range(1, len(COLUMNS)))
