"""The trainer's flags, and the Config and Options that they fill."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from pipeline import command_line
from pipeline.command_line import Parser
from pipeline.storage.store import Store
from pipeline.storage.uri import split_uri
from trainer.config import Config
from trainer.coordination.schedules import RECIPES
from trainer.options import Options, parse_addresses, parse_roles
from trainer.protocols import PROTOCOLS
from trainer.runlog.run_folder import resolve_output

PROG = "python -m trainer"
DESCRIPTION = "Train a model on committed shards with worker, server and evaluator processes."
EPILOG = """\
example: python -m trainer --shards build/shards --model resnet20 --protocol asp --servers 2 --epochs 5 --output build/run

--shards is local (plain or file:), hdfs://host:port/path or webhdfs://host:port/path; it decides on the number of
workers. --output is a local folder: metrics.jsonl, pushes.csv, checkpoints/, model.safetensors, result.json and
report.html. Exit codes: 0 done or already finished, 2 usage, 3 broken shards, 1 anything else, an interruption
(Ctrl-C, SIGTERM) included: it leaves a checkpoint, and the same command with --resume goes on."""


def flags() -> Parser:
    """A flag for every field of Config and of Options, by its name; Config holds the built-in defaults."""
    parser = command_line.parser(PROG, DESCRIPTION, EPILOG)
    _add_data(parser)
    _add_model(parser)
    _add_optimiser(parser)
    _add_protocol(parser)
    _add_processes(parser)
    _add_hosts(parser)
    _add_run(parser)
    parser.set_defaults(**{field.name: field.default for field in fields(Config) if not _is_required(field.name)})
    return parser


def _is_required(name: str) -> bool:
    return name in ("shards", "output")


def _add_data(parser: Parser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument("--shards", required=True, metavar="URI", help="folder of a committed shard set")
    group.add_argument(
        "--batch-size",
        type=int,
        metavar="B",
        help="global mini-batch: N workers draw B/N examples each a step (default %(default)s)",
    )
    group.add_argument(
        "--worker-batch",
        choices=["floor", "exact"],
        help="where N does not divide B: floor drops the rest, exact gives the first workers one more"
        " (default %(default)s)",
    )
    group.add_argument(
        "--sampling",
        choices=["shuffle", "bernoulli"],
        help="shuffle: passes over a worker's rows, each in a new order; bernoulli: every row is in a mini-batch with"
        " probability B/rows, and updates are means over examples, as in MLlib (default %(default)s)",
    )
    group.add_argument(
        "--augment", action=argparse.BooleanOptionalAction, help="random crops and flips while training (default: on)"
    )


def _add_model(parser: Parser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="NAME",
        help="resnet20, resnet32, resnet56, cnn, logistic, linear, perceptron, or your own as module:function with"
        " function(image_shape, num_classes) -> torch.nn.Module (default %(default)s)",
    )
    group.add_argument(
        "--norm",
        choices=["batch", "group"],
        help="normalisation layers: group has no running statistics, which helps where shards are skewed"
        " (default %(default)s)",
    )
    group.add_argument(
        "--shortcut",
        choices=["pad", "conv"],
        help="of a ResNet's blocks that change size: zeros, or a 1x1 convolution (default %(default)s)",
    )
    group.add_argument(
        "--intercept",
        action=argparse.BooleanOptionalAction,
        help="of linear and logistic, beside the weights (default: on)",
    )
    group.add_argument(
        "--batch-norm",
        choices=["ema", "last", "recalibrate"],
        help="BatchNorm's running statistics: averaged over workers, the last worker's, or taken anew from training"
        " rows before each evaluation (default %(default)s)",
    )


def _add_optimiser(parser: Parser) -> None:
    group = parser.add_argument_group("optimiser")
    group.add_argument(
        "--learning-rate",
        type=float,
        metavar="A",
        help="rate of a single process: bsp applies A to the mean of N gradients, asp and ssp A/N to each"
        " (default %(default)s)",
    )
    group.add_argument("--momentum", type=float, metavar="M", help="of SGD, on the servers (default %(default)s)")
    group.add_argument(
        "--weight-decay", type=float, metavar="W", help="L2 factor, part of the loss (default %(default)s)"
    )
    drops = [f"{name} {' and '.join(map(str, epochs))}" for name, epochs in sorted(RECIPES.items()) if epochs]
    group.add_argument(
        "--recipe",
        choices=sorted(RECIPES),
        help=f"epochs at which the rate falls to a tenth: {', '.join(drops)}; constant: never; inverse-sqrt: A / sqrt(t)"
        " in mini-batch t (default %(default)s)",
    )
    group.add_argument(
        "--tolerance",
        type=float,
        metavar="TOL",
        help="end before --epochs or --steps, as soon as a global mini-batch moves the parameters by less than TOL times"
        " the greater of their norm and 1; needs --servers 1 (default %(default)g: never)",
    )


def _add_protocol(parser: Parser) -> None:
    group = parser.add_argument_group("protocol")
    group.add_argument(
        "--protocol",
        choices=sorted(PROTOCOLS),
        help="asp: every gradient is applied as it comes; bsp: one update takes a gradient of every worker; ssp: like"
        " asp, but nobody runs far ahead (default %(default)s)",
    )
    group.add_argument(
        "--staleness-bound",
        type=int,
        metavar="S",
        help="ssp: steps that a worker may be ahead of the slowest; 0 is a barrier (default %(default)s)",
    )
    group.add_argument(
        "--stop",
        choices=["global", "local"],
        help="end when all workers together have done their steps, or each after its own (default %(default)s)",
    )


def _add_processes(parser: Parser) -> None:
    group = parser.add_argument_group("processes")
    group.add_argument("--servers", type=int, metavar="S", help="parameter servers (default %(default)s)")
    group.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], help="where workers compute; auto: on GPUs where there are any"
    )
    group.add_argument(
        "--threads", type=int, metavar="T", help="of each worker's computation (default 0: cores / workers)"
    )
    group.add_argument(
        "--same-host",
        choices=["memory", "socket"],
        help="how gradients reach a server on the same host (default %(default)s)",
    )
    group.add_argument(
        "--start-wait-s",
        type=float,
        metavar="SECONDS",
        help="start without a worker that keeps the others waiting for so long; bsp needs all (default %(default)g)",
    )
    group.add_argument(
        "--heartbeat-timeout-s",
        type=float,
        metavar="SECONDS",
        help="a process without a sign of life for so long is started again (default %(default)g)",
    )
    group.add_argument(
        "--max-restarts",
        type=int,
        metavar="R",
        help="give up when one process fails more often than this in a row (default %(default)s)",
    )


def _add_hosts(parser: Parser) -> None:
    group = parser.add_argument_group(
        "several hosts", "the same command on each, with its own --roles and an --output that all of them mount"
    )
    group.add_argument(
        "--roles",
        type=parse_roles,
        metavar="LIST",
        help="what runs here, such as server:0,worker:0-5,evaluator (default: everything)",
    )
    group.add_argument(
        "--addresses",
        type=parse_addresses,
        default=(),
        metavar="LIST",
        help="where each server listens, such as tcp://hostA:7000,tcp://hostB:7000 (default: this host only)",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="PATH",
        help="a secret that the hosts share: admits processes, and encrypts what crosses the network",
    )


def _add_run(parser: Parser) -> None:
    group = parser.add_argument_group("run")
    group.add_argument("--output", required=True, metavar="DIR", help="folder of the run")
    length = group.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, metavar="E", help="passes of all workers together over the examples")
    length.add_argument("--steps", type=int, metavar="K", help="mini-batches of each worker, instead of --epochs")
    group.add_argument(
        "--seed",
        type=command_line.seed,
        metavar="S",
        help="of initial parameters, order of examples, augmentation and dropout (default %(default)s)",
    )
    before = group.add_mutually_exclusive_group()
    before.add_argument("--resume", action="store_true", help="go on with the run in DIR, also to a larger --epochs")
    before.add_argument("--overwrite", action="store_true", help="delete the run in DIR and start anew")
    group.add_argument(
        "--checkpoint-every-s",
        type=float,
        metavar="SECONDS",
        help="between checkpoints (default %(default)g)",
    )
    group.add_argument(
        "--epoch-checkpoints",
        action=argparse.BooleanOptionalAction,
        help="write a checkpoint at the end of every epoch too, which is then evaluated (default: on)",
    )
    group.add_argument("--tensorboard", action="store_true", help="write DIR/tensorboard too (extra: tensorboard)")
    group.add_argument("--no-report", action="store_true", help="skip report.html")
    group.add_argument("--config", type=Path, metavar="TOML", help="defaults file (default: conf/trainer.toml)")
    group.add_argument("--quiet", action="store_true", help="print the end and errors only")
    group.add_argument("--debug", action="store_true", help="show stack traces")


def config_of(args: argparse.Namespace) -> Config:
    """Its paths are absolute, so that it means the same in every process. Raises UsageError."""
    given = {field.name: getattr(args, field.name) for field in fields(Config)}
    is_local = split_uri(args.shards)[0] in ("", "file")
    shards = Store().resolve(args.shards) if is_local else args.shards
    return Config(**given | {"shards": shards, "output": str(resolve_output(args.output))})


def options_of(args: argparse.Namespace) -> Options:
    given = {field.name: getattr(args, field.name) for field in fields(Options) if field.name != "report"}
    return Options(**given, report=not args.no_report)
