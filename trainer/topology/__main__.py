"""``python -m trainer.topology``: show the matchings, weights, spectrum and traffic of a topology."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.core import command_line
from pipeline.core.command_line import Parser
from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.program import execute
from trainer.exchange.topologies import GRAPHS
from trainer.models import MODELS
from trainer.topology.description import as_json, describe, screen
from trainer.topology.drawing import draw

INTERRUPTED = "run it again"
PROG = "python -m trainer.topology"
DESCRIPTION = (
    "Show the matchings of a topology, the weights of D-PSGD or MATCHA, their spectrum, and the bytes that are sent."
)
EPILOG = f"""\
topologies: {", ".join(GRAPHS)}
and files with the two workers of a link per line

examples: {PROG} ring --workers 8
          {PROG} graph0 --budget 0.5 --draw build/graph0.png"""
RESNET20 = 269_722  # parameters of resnet20 for CIFAR-10
CIFAR10 = ((3, 32, 32), 10)


def parser() -> Parser:
    """Return the parser of the command."""
    result = command_line.parser(PROG, DESCRIPTION, EPILOG)
    result.add_argument("topology", metavar="NAME", help="a topology, or the path of a file of links")
    result.add_argument(
        "--workers", type=int, metavar="INT", help="number of workers; graph0 and files of links have their own"
    )
    result.add_argument(
        "--budget", type=float, metavar="FLOAT", help="mean share of the matchings that MATCHA uses, up to 1"
    )
    result.add_argument(
        "--every",
        type=int,
        default=1,
        metavar="INT",
        help="exchange only in every INT-th round (default: %(default)s)",
    )
    # Both give the size of a message, so together they could contradict each other.
    size = result.add_mutually_exclusive_group()
    size.add_argument(
        "--parameters",
        type=int,
        default=RESNET20,
        metavar="INT",
        help="number of parameters of the model that workers send (default: %(default)s, as of resnet20)",
    )
    size.add_argument("--model", choices=list(MODELS), help="count the parameters of this model for CIFAR-10 instead")
    result.add_argument(
        "--draw", type=Path, metavar="FILE", help="draw graph, matchings and spectrum as PNG, SVG or PDF"
    )
    result.add_argument("--json", action="store_true", help="print a JSON object")
    return result


def count_parameters(model: str) -> int:
    """Return the number of trained parameters of a model with default flags, for CIFAR-10."""
    from trainer.models.base import ModelInput
    from trainer.models.build import build  # loads torch
    from trainer.models.flat_vector import FlatModel

    shape, classes = CIFAR10
    return FlatModel(build(MODELS[model](), ModelInput(shape, classes), seed=0).model).num_parameters


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError."""
    args = parser().parse_args(argv)
    require("trainer", "sharding topology")
    if args.draw and args.draw.is_dir():
        raise UsageError(f"--draw {args.draw} is a folder; give a file")
    parameters = count_parameters(args.model) if args.model else args.parameters
    description = describe(args.topology, args.workers, parameters, budget=args.budget, every=args.every)
    if args.draw:
        draw(args.draw, description)
    print(json.dumps(as_json(description), indent=1) if args.json else screen(description))
    return 0


if __name__ == "__main__":
    execute(main, interrupted=INTERRUPTED)
