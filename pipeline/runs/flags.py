"""The command line shared by all jobs: its flags, and the request made from them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.assignment.sizes import NAMES, named_ratios
from pipeline.assignment.speeds import measured_ratios
from pipeline.core import command_line, specs
from pipeline.core.argparse_internals import FlagGroup
from pipeline.core.command_line import Parser, image_shape, image_size
from pipeline.core.errors import UsageError
from pipeline.core.shardset.ratios import Ratios
from pipeline.core.specs import AdvancedHelp
from pipeline.core.storage.store import configured_store
from pipeline.core.storage.uri import is_hdfs
from pipeline.input.formats import FORMATS
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request
from pipeline.strategies import STRATEGIES, Strategy

SHARD = "Shard images by any strategy, on the running Spark or on a local Spark."
COMMON = ("seed",)  # parameters of every strategy, listed among the flags of the run
EPILOG = """\
Paths are local (plain or file:), hdfs://host:port/path,
webhdfs://host:port/path or s3://bucket/path.
The values of --ds and --run-id replace {ds} and {run_id} in paths. Exit codes:
0 done or already committed, 2 wrong usage, 3 broken input, 1 other errors; on
YARN in cluster mode, the cluster's own 0 or 1."""


def parser(prog: str, description: str | None) -> Parser:
    return command_line.parser(prog, description, EPILOG)


def add_input_flags(flags: argparse.ArgumentParser, *, evaluation: bool = True) -> None:
    """Add the group of flags that name and describe the input. evaluation: add --eval-input."""
    group = flags.add_argument_group("input")
    group.add_argument(
        "--input",
        required=True,
        metavar="URI",
        help="folder, file or glob pattern of labelled images, or a table of Spark as table:NAME, delta:URI or iceberg:NAME;"
        " in a folder with training and test files, the training files are read, and partition folders such as label=3"
        " give the labels",
    )
    if evaluation:
        group.add_argument("--eval-input", metavar="URI", help="evaluation images, which are committed to OUTPUT/_eval")
    group.add_argument(
        "--id-column",
        metavar="NAME",
        help=AdvancedHelp(
            "column of a table whose values, all different, give the order of the rows: whole numbers or text (default:"
            " the assignment's, else id)"
        ),
    )
    # Shown by --help-all alone: most inputs have no further columns.
    group.add_argument(
        "--keep-columns",
        metavar="A,B",
        help=AdvancedHelp("columns of the input that the shards keep beside image and label"),
    )
    # A flag of jobs alone: a stream always has a quarantine.
    group.add_argument(
        "--max-bad-records",
        metavar="N|P%",
        help=AdvancedHelp(
            "leave out at most so many broken records, or such a share, and list them in OUTPUT/_quarantine (default: a"
            " broken record ends the run)"
        ),
    )
    add_layout_flags(group)


def add_layout_flags(flags: FlagGroup) -> None:
    """Add the flags that describe rows, for files that do not contain their layout."""
    # Most files describe their layout, so --help shows only the format and --help-all the rest.
    flags.add_argument("--format", choices=sorted(FORMATS), help="format of the input (default: detected)")
    flags.add_argument(
        "--image-shape",
        type=image_shape,
        metavar="CxHxW",
        help=AdvancedHelp("shape of images in files that do not contain it (default: 3x32x32)"),
    )
    flags.add_argument(
        "--channels",
        type=int,
        metavar="INT",
        help=AdvancedHelp("convert images to 1 (grey) or 3 (RGB) channels (default: unchanged)"),
    )
    flags.add_argument(
        "--resize",
        type=image_size,
        metavar="HxW",
        help=AdvancedHelp("resize images to this height and width, by a bilinear filter (default: unchanged)"),
    )
    flags.add_argument(
        "--image-column",
        metavar="NAME",
        help=AdvancedHelp("column or array of the images (default: a usual name)"),
    )
    flags.add_argument(
        "--label-column",
        metavar="NAME",
        help=AdvancedHelp("column or array of the labels (default: a usual name)"),
    )
    flags.add_argument(
        "--unlabelled", action="store_true", help=AdvancedHelp("read rows without labels, or ignore their labels")
    )
    flags.add_argument(
        "--num-classes",
        type=int,
        metavar="INT",
        help=AdvancedHelp(
            "number of classes; labels are counted from 0 (default: from the format, or from the labels)"
        ),
    )


WORKERS = "number of shards, a shard per worker (default: the number of ratios, if given)"


def add_output_flags(
    flags: argparse.ArgumentParser,
    *,
    output: str = "folder of the shard set",
    workers: str = WORKERS,
    ratios: bool = True,
    rescan: bool = True,
) -> None:
    """Add the group of flags about the output.

    Args:
        flags: the parser.
        output: help text of --output.
        workers: help text of --workers.
        ratios: add --ratios and --ratios-from.
        rescan: add --rescan.
    """
    group = flags.add_argument_group("output")
    group.add_argument("--output", required=True, metavar="URI", help=output)
    group.add_argument("--workers", type=int, metavar="INT", help=workers)
    if ratios:
        # Both flags set the shares of the workers, so only one may be given.
        either = group.add_mutually_exclusive_group()
        either.add_argument(
            "--ratios",
            metavar="INT:INT:...",
            help=f"unequal shares of the workers, such as 4:2:1:1, or by name with --workers: {NAMES}",
        )
        either.add_argument(
            "--ratios-from",
            metavar="URI",
            help=AdvancedHelp(
                "folder of a training run whose measured speeds are the shares of the workers, instead of --ratios"
            ),
        )
    if ratios and rescan:  # jobs that place the rows of an input
        group.add_argument(
            "--group-by",
            metavar="COLUMN",
            help=AdvancedHelp("column of the input, such as a patient: rows with the same value go to the same worker"),
        )
    group.add_argument("--overwrite", action="store_true", help="replace a committed set of another configuration")
    if rescan:
        group.add_argument(
            "--rescan",
            action="store_true",
            help=AdvancedHelp("read the input again even if names, sizes and times of its files have not changed"),
        )
    group.add_argument("--allow-empty", action="store_true", help=AdvancedHelp("allow workers without rows"))
    group.add_argument(
        "--no-report", action="store_true", help=AdvancedHelp("skip report.html and the measures of quality")
    )


def add_run_flags(flags: Parser, *, seed: bool = True) -> None:
    """Add the group of flags about the run: batch interval, config file, output on the console.

    seed: add --seed too."""
    group = flags.add_argument_group("run")
    if seed:
        add_seed_flag(group)
    interval = group.add_mutually_exclusive_group()
    interval.add_argument("--ds", metavar="DATE", help=AdvancedHelp("data interval of a batch run, such as 2026-01-31"))
    interval.add_argument("--run-id", metavar="ID", help=AdvancedHelp("identifier of a batch run, instead of --ds"))
    command_line.add_config_flag(group, str(flags.conf))
    # The extra is needed only if the flag is given.
    group.add_argument(
        "--metrics-file",
        type=Path,
        metavar="FILE.prom",
        help=AdvancedHelp(
            "write metrics of the run for the textfile collector of Prometheus's node_exporter (needs the extra metrics)"
        ),
    )
    command_line.add_log_format_flag(group)
    group.add_argument("--quiet", action="store_true", help="print only results")


def add_seed_flag(flags: FlagGroup) -> None:
    flags.add_argument(
        "--seed",
        type=command_line.seed,
        default=0,
        metavar="INT",
        help="seed of all random choices (default: %(default)s)",
    )


def sharding_parser(
    prog: str,
    description: str | None,
    strategy: type[Strategy] | None = None,
    *,
    assignment: bool = True,
    writes_shards: bool = True,
) -> Parser:
    """Return the flags of a job that shards raw images.

    Args:
        prog: name of the command.
        description: text of its help.
        strategy: its flags are added; None: the job has no fixed strategy.
        assignment: offer --assignment-only.
        writes_shards: offer --eval-input; --output is the folder of shards, else of an assignment.
    """
    flags = parser(prog, description)
    add_input_flags(flags, evaluation=writes_shards)
    add_output_flags(flags, output=f"folder of the {'shard set' if writes_shards else 'assignment'}")
    if assignment:
        flags.add_argument(
            "--assignment-only",
            action="store_true",
            help=AdvancedHelp(
                "write only the assignment of rows to workers, from which sharding materialize writes the shards"
            ),
        )
    add_run_flags(flags)
    if strategy:
        # COMMON is left out because add_run_flags has added it.
        specs.add_flags(flags.add_argument_group("strategy"), strategy, leave_out=COMMON)
    return flags


def add_strategy_flags(flags: argparse.ArgumentParser, members: Mapping[str, type[Strategy]], **about: Any) -> None:
    """Add --strategy, which chooses one of the members, and a flag per parameter of any member.

    about: further arguments of ``add_argument`` for --strategy, such as its default."""
    group = flags.add_argument_group("strategy", specs.summaries(members))
    help = "strategy of the run; --strategy NAME --help shows its options"
    if "default" in about:
        help += " (default: %(default)s)"
    group.add_argument("--strategy", choices=members, metavar="NAME", help=help, **about)
    specs.add_member_flags(group, members, leave_out=COMMON)


def shard_parser() -> Parser:
    """Return the flags of ``python -m pipeline shard``."""
    flags = sharding_parser("python -m pipeline shard", SHARD)
    add_strategy_flags(flags, STRATEGIES, required=True)
    return flags


def strategy_of_flags(args: argparse.Namespace) -> Strategy:
    """Return the strategy that the flags name, with its parameters. Raises UsageError."""
    return specs.member_from_flags(STRATEGIES, "--strategy", args)


def read_request(args: argparse.Namespace) -> Request:
    """Return the request that the flags describe, with {ds} and {run_id} filled in. Raises UsageError."""
    interval = read_interval(args)
    output = fill_in(args.output, args)
    source = fill_in(args.input, args)
    ratios = _ratios(args)
    num_workers = args.workers
    if num_workers is None:
        # sharding materialize takes the number of workers from its assignment.
        if ratios is None and not hasattr(args, "assignment"):
            raise UsageError("--workers N is required: the number of shards (or --ratios, a number per worker)")
        num_workers = len(ratios) if ratios else 1
    # Jobs have different subsets of the flags.
    eval_input = getattr(args, "eval_input", None)
    return Request(
        input=source,
        output=output,
        num_workers=num_workers,
        eval_input=None if eval_input is None else fill_in(eval_input, args),
        read_options=layout_options(args),
        overwrite=args.overwrite,
        allow_empty=args.allow_empty,
        interval=interval,
        ratios=ratios,
        assignment_only=getattr(args, "assignment_only", False),
        group_by=getattr(args, "group_by", None),
        rescan=getattr(args, "rescan", False),
        max_bad_records=getattr(args, "max_bad_records", None),
        id_column=getattr(args, "id_column", None),
    )


def layout_options(args: argparse.Namespace) -> ReadOptions:
    """Return the values of the flags that describe rows, for a job that has them. Raises UsageError."""
    if "image_shape" not in args:
        return ReadOptions()
    # Of these flags, only jobs have --keep-columns.
    columns = getattr(args, "keep_columns", None)
    return ReadOptions(
        format=args.format,
        shape=args.image_shape,
        num_classes=args.num_classes,
        unlabelled=args.unlabelled,
        channels=args.channels,
        columns=() if columns is None else tuple(columns.split(",")),
        resize=args.resize,
        image_column=args.image_column,
        label_column=args.label_column,
    )


def read_interval(args: argparse.Namespace) -> dict[str, str]:
    """Return the data interval of a batch run by its flag; empty without one. Raises UsageError."""
    if args.ds and not re.fullmatch(r"\d{4}-\d{2}-\d{2}([T_-][\w:+.-]*)?", args.ds):
        raise UsageError(f"--ds {args.ds!r} is not a date like 2026-01-31")
    # It becomes a part of paths.
    if args.run_id and (not re.fullmatch(r"[\w:+.-]+", args.run_id) or ".." in args.run_id):
        raise UsageError(f"--run-id {args.run_id!r} may contain only letters, digits and _ : + . -")
    return {key: getattr(args, key) for key in ("ds", "run_id") if getattr(args, key)}


def fill_in(uri: str, args: argparse.Namespace) -> str:
    """Return a path with {ds} and {run_id} filled in. Raises UsageError if they are missing."""
    interval = read_interval(args)
    for key in re.findall(r"\{(ds|run_id)\}", uri):
        if key not in interval:
            raise UsageError(f"{uri} contains {{{key}}}, but --{key.replace('_', '-')} is not given")
        # HDFS forbids colons in names, and Airflow's run ids have them. The manifest stores the id unchanged.
        value = interval[key].replace(":", "_") if is_hdfs(uri) else interval[key]
        uri = uri.replace(f"{{{key}}}", value)
    return uri


def fill_tables(args: argparse.Namespace) -> None:
    """Apply ``fill_in`` to --embedding, which may be the path of a table, and to --example-ledger."""
    for name in ("embedding", "example_ledger"):
        if getattr(args, name, None):
            setattr(args, name, fill_in(getattr(args, name), args))


def _ratios(args: argparse.Namespace) -> Ratios | None:
    """Return the ratios from the flags, or from the measurements of a training run. Raises UsageError."""
    ratios = getattr(args, "ratios", None)
    run = getattr(args, "ratios_from", None)
    if ratios is not None and run is not None:  # argparse does not check flags set in a TOML file
        raise UsageError(f"--ratios {ratios} and --ratios-from {run} exclude each other; leave one of them out")
    if run is None:
        if ratios is None:
            return None
        if args.workers is None and ratios[:1].isalpha():
            raise UsageError(f"--ratios {ratios} needs --workers N: a name does not say how many workers there are")
        return named_ratios(ratios, args.workers or 1, getattr(args, "seed", 0))
    measured = measured_ratios(run, configured_store())
    if args.workers not in (None, len(measured)):
        raise UsageError(
            f"--ratios-from {run} has speeds of {len(measured)} workers, but --workers is {args.workers}; leave it out"
        )
    return measured
