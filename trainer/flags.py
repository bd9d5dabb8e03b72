"""The trainer's flags, derived from the fields of Config's parts and of Options."""

from __future__ import annotations

import argparse
from dataclasses import replace

from pipeline.core import command_line
from pipeline.core.command_line import Parser
from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.specs import AdvancedHelp, add_flags, add_member_flags, from_flags, member_from_flags, summaries
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import split_uri
from trainer.config import SEPARATOR, Config, Data, Optimiser, Processes, RunSpec
from trainer.exchange import EXCHANGES
from trainer.exchange.base import Exchange
from trainer.exchange.parameter_server import ParameterServer
from trainer.home.place import resolve_home
from trainer.models import MODELS, ModelSpec, OwnModel, model_from_json
from trainer.models.own import is_reference
from trainer.options import Options
from trainer.protocols import PROTOCOLS
from trainer.protocols.asp import ASP
from trainer.protocols.base import Protocol
from trainer.sampling import SAMPLERS
from trainer.sampling.shuffle import ShuffleSampler

PROG = "python -m trainer"
DESCRIPTION = "Train a model on a committed shard set, with worker, server and evaluator processes."
EPILOG = """\
example: python -m trainer --shards build/shards --model resnet20 \\
             --protocol asp --servers 2 --epochs 5 --output build/run
         python -m trainer --shards hdfs://namenode/shards --model resnet20 \\
             --epochs 5 --output hdfs://namenode/run --launcher spark --hosts 3

--shards is local (plain or file:), hdfs://host:port/path,
webhdfs://host:port/path or s3://bucket/path. A run begins with a worker per
shard. It writes metrics.jsonl, pushes.csv, checkpoints/, model.safetensors,
result.json and report.html. --launcher spark uses the master that
PYSPARK_SUBMIT_ARGS or spark-defaults.conf names, else the cores of this
machine. python -m trainer embed computes vectors of images for the sharding
jobs.

Exit codes: 0 done or already finished, 2 wrong usage, 3 broken shards, 1 other
errors and interruption (Ctrl-C, SIGTERM), which leaves a checkpoint: the same
command with --resume resumes the run."""
LENGTH = ("epochs", "steps")
BEFORE = ("resume", "overwrite")
WORKERS = ("workers",)  # in virtual time a setting of the virtual cluster
REAL = ("metrics_port", "metrics_file")  # not in virtual time
HOSTS = ("roles", "addresses", "token_file")


def build_parser(prog: str = PROG, description: str = DESCRIPTION, epilog: str = EPILOG) -> Parser:
    """Return the parser. New protocols, exchanges, models and parameters need no change here."""
    parser = command_line.parser(prog, description, epilog)
    parser.conf = "trainer"
    data = parser.add_argument_group("data", summaries(SAMPLERS))
    add_flags(data, Data, leave_out=("sampling",))
    data.add_argument(
        "--sampling",
        choices=list(SAMPLERS),
        default=ShuffleSampler.name,
        metavar="NAME",
        help=AdvancedHelp(
            f"{Data.meanings()['sampling']}; --sampling NAME --help shows its options (default: %(default)s)"
        ),
    )
    add_member_flags(data, SAMPLERS)
    parser.actions_by_flag()["--shards"].nargs = "+"
    model = parser.add_argument_group("model")
    model.add_argument(
        "--model",
        default="resnet20",
        metavar="NAME",
        help=f"{', '.join(MODELS)}, or your own as module:function, called as function(image_shape, num_classes), which"
        " returns a torch.nn.Module (default: %(default)s)",
    )
    add_member_flags(model, MODELS)  # flags of all models; _model_of refuses flags of models not chosen
    add_flags(parser.add_argument_group("optimiser"), Optimiser)
    protocol = parser.add_argument_group("protocol", summaries(PROTOCOLS))
    protocol.add_argument(
        "--protocol",
        choices=list(PROTOCOLS),
        default="asp",
        metavar="NAME",
        help="protocol of the run; --protocol NAME --help shows its options (default: %(default)s)",
    )
    add_member_flags(protocol, PROTOCOLS)
    exchange = parser.add_argument_group("exchange", summaries(EXCHANGES))
    exchange.add_argument(
        "--exchange",
        choices=list(EXCHANGES),
        default=ParameterServer.name,
        metavar="NAME",
        help=AdvancedHelp("exchange of the run (default: %(default)s)"),
    )
    add_member_flags(exchange, EXCHANGES)
    add_flags(parser.add_argument_group("processes"), Processes)
    hosts = "Run the same command on every host, with its own --roles and an --output that\nall hosts can reach."
    add_flags(parser.add_argument_group("hosts started by hand", hosts), Options, only=HOSTS)
    _add_run(parser)
    return parser


def _add_run(parser: Parser) -> None:
    """Add the flags of the run's output, length and start."""
    group = parser.add_argument_group("run")
    add_flags(group, RunSpec, leave_out=LENGTH)
    add_flags(group.add_mutually_exclusive_group(), RunSpec, only=LENGTH)
    add_flags(group.add_mutually_exclusive_group(), Options, only=BEFORE)
    add_flags(group, Options, leave_out=(*BEFORE, *HOSTS, *WORKERS, *REAL))
    command_line.add_config_flag(group, "trainer")
    command_line.add_log_format_flag(group)


def config_of(args: argparse.Namespace) -> Config:
    """Return the configuration of a command line. Raises UsageError.

    Its paths are absolute, so that they mean the same in every process."""
    # One set in most runs. Several paths share its place, so that a configuration stays flat.
    uris = args.shards.split(SEPARATOR) if isinstance(args.shards, str) else args.shards
    args.shards = SEPARATOR.join(map(_absolute, uris))
    data = from_flags(Data, args)
    run = from_flags(RunSpec, args)
    exchange = member_from_flags(EXCHANGES, "--exchange", args)
    protocol = member_from_flags(PROTOCOLS, "--protocol", args)
    if exchange.protocol or exchange.stages():
        # Here, because the configuration cannot tell a protocol that was given from the default.
        # The default in a file is no contradiction: a copy of conf/trainer.toml has it.
        of_one_file = "exchange" not in args.names_in_argv and args.protocol not in (ASP.name, exchange.protocol)
        if "protocol" in args.names_in_argv or of_one_file:
            has = "protocols of its own" if exchange.stages() else "no protocols"
            raise UsageError(f"--exchange {exchange.name} has {has}: leave out --protocol {args.protocol}")
        protocol = ASP()  # an exchange on the command line overrides the protocol of a file
    _check_partners(args, exchange, protocol)
    # Here, because the configuration fills in the default of the model.
    if is_reference(args.optimiser) and "momentum" in args.names_in_argv:
        raise UsageError(
            f"--momentum {args.momentum:g} is not passed to --optimiser {args.optimiser}: leave it out, and set it in the"
            " function"
        )
    return Config(
        data=data,
        run=replace(run, output=resolve_home(run.output)),
        model=_model_of(args),
        optimiser=from_flags(Optimiser, args),
        protocol=protocol,
        exchange=exchange,
        processes=from_flags(Processes, args),
        sampler=member_from_flags(SAMPLERS, "--sampling", args).with_absolute_table(_absolute),
    )


def _check_partners(args: argparse.Namespace, exchange: Exchange, protocol: Protocol) -> None:
    """Raise UsageError for a flag that has no effect without another one. A file of defaults may have it."""
    for name, is_used, partner in (
        ("switch_window", exchange.switches_by_rule, "--alpha auto"),
        ("switch_threshold", exchange.switches_by_rule, "--alpha auto"),
        ("holdout_share", exchange.held_out_share > 0, "--switch-on holdout"),
        ("straggler_window", getattr(exchange, "straggler", None) is not None, "--straggler FACTOR"),
        ("micro_batches", protocol.parts_of_a_step() > 1, "--cancel preempt"),
    ):
        if name in args.names_in_argv and not is_used:
            flag = f"--{name.replace('_', '-')} {getattr(args, name):g}"
            raise UsageError(f"{flag} has no effect without {partner}: give it too, or leave {flag.split()[0]} out")


def _absolute(uri: str) -> str:
    """Return a local path as an absolute one, which means the same in every process; other addresses are unchanged."""
    return Store().resolve(uri) if uri and split_uri(uri)[0] in ("", "file") else uri


def _model_of(args: argparse.Namespace) -> ModelSpec:
    """Return the model of a command line. Raises UsageError for the options of another model."""
    if args.model in MODELS:
        return member_from_flags(MODELS, "--model", args)
    own = model_from_json({"name": args.model})
    member_from_flags({**MODELS, args.model: OwnModel}, "--model", args)  # refuses the options of other models
    return own


def options_of(args: argparse.Namespace) -> Options:
    """Return the options of a command line. Raises UsageError, before the run's folder exists, for a missing extra."""
    if args.tensorboard:
        require("tensorboard", "--tensorboard")
    if getattr(args, "metrics_port", None):
        require("metrics", "--metrics-port")
    return replace(from_flags(Options, args), batch_size_given="batch_size" in args.names_given)
