"""``python -m trainer.simulate``: training in virtual time, the replay of a run, or a comparison of exchanges."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.core import command_line
from pipeline.core.command_line import Parser, as_typed
from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.program import execute
from pipeline.core.specs import AdvancedHelp, add_flags, descriptions, from_flags
from trainer.config import Config, Optimiser
from trainer.exchange.parameter_server import ParameterServer
from trainer.flags import build_parser, config_of, options_of
from trainer.home.place import place_of
from trainer.options import Options
from trainer.simulation.options import STEP_TIMES, SimulationSettings
from trainer.simulation.profiles import PROFILES

if TYPE_CHECKING:
    from trainer.runlog.result import Result

__all__ = ["SimulationSettings", "main", "simulate"]

INTERRUPTED = "the same command with --resume continues from the last checkpoint"

PROG = "python -m trainer.simulate"
DESCRIPTION = "Train in virtual time in a single process: simulate any number of workers with real gradients."
EPILOG = """\
examples: python -m trainer.simulate --shards build/shards --model cnn \\
              --protocol ssp --profile one-slow:4 --epochs 2 --batch-size 120 \\
              --learning-rate 0.01 --output build/virtual
          python -m trainer.simulate --compute quadratic --workers 1000 \\
              --batch-size 1000 --steps 50 --output build/toy \\
              --compare asp,ssp:3,all-reduce,d-psgd --profile lognormal:0.5

Options of the trainer are accepted, except for clusters and monitoring,
--follow and --collective torch. Options of processes, such as --threads of
evaluators and --same-host, have no effect. The run's folder and report have
the form of a real run, with virtual seconds."""


def simulate(config: Config, simulated: SimulationSettings, options: Options | None = None) -> Result:
    """Train in virtual time in this process, with the real coordinator, protocols, slices, sampler and models.

    Writes the run's folder as ``trainer.train`` does, with virtual seconds. The same arguments and number of threads
    give the same bits, whatever the load of the machine. A finished run is not simulated again. Simulations of real
    gradients in several threads of a program run after each other, because torch's generator belongs to the program.

    Raises UsageError, DataError (broken shards), and JobError for a run that diverged."""
    if config.data.follow:
        raise UsageError("--follow reads rows that arrive in real time, which a simulation does not have; leave it out")
    from trainer.simulation.run import run  # loads torch

    return run(config, simulated, options or Options())


def parser() -> Parser:
    """Return the parser of the trainer's flags and the flags of virtual time."""
    result = build_parser(PROG, DESCRIPTION, EPILOG)
    for action in set(result.actions_by_flag().values()):
        if action.dest in ("shards", "output"):  # a toy loss needs no shards, and a replay no folder
            action.required = False
            action.default = ""
        if action.dest == "output":
            action.help = "local folder of the run"
        if action.dest == "device":  # has no effect in virtual time
            action.help = AdvancedHelp(action.help)
    group = result.add_argument_group("virtual time")
    add_flags(group, SimulationSettings, leave_out=STEP_TIMES)
    profiles = descriptions({kind.form: kind.summary for kind in PROFILES.values()})
    add_flags(result.add_argument_group("step times", profiles), SimulationSettings, only=STEP_TIMES)
    group.add_argument(
        "--replay",
        metavar="URI",
        help="recompute the gradients of a real run in the order of its log, and compare the resulting parameters with"
        " those of the run; ignores all other options",
    )
    group.add_argument(
        "--compare",
        nargs="?",
        const="all",
        metavar="LIST",
        help="compare protocols and exchanges, such as asp,ssp:3,all-reduce,matcha, each in a folder of its own below"
        " --output; protocols, exchanges or all (without a list) stand for all of a kind",
    )
    group.add_argument(
        "--loss",
        type=float,
        metavar="FLOAT",
        help=AdvancedHelp("target loss of --compare (default: the lowest training loss that all of them reach)"),
    )
    group.add_argument(
        "--accuracy",
        type=command_line.share,
        metavar="SHARE",
        help=AdvancedHelp("target accuracy of --compare, from 0 to 1 (default: the highest that all of them reach)"),
    )
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError, DataError and JobError."""
    args = command_line.parse(parser(), argv)
    require("trainer", "training in virtual time")
    if args.replay:
        from trainer.simulation.replay import main as replay

        return replay(place_of(args.replay), quiet=args.quiet)
    if not args.output:
        raise UsageError(f"--output is required: the folder of the run; see {as_typed(PROG)} --help")
    config = config_of(args)
    simulated = from_flags(SimulationSettings, args)
    # Before the comparison, which may take long.
    for goal in ("loss", "accuracy"):
        _check_goal(goal, getattr(args, goal), args.compare)
    if args.compare is not None:
        return _compare(args, config, simulated)
    simulate(config, simulated, options_of(args))
    return 0


def _check_goal(name: str, value: float | None, compare: str | None) -> None:
    """Raise UsageError for a goal of --compare that is not finite, or that is given without --compare."""
    if value is None:
        return
    if compare is None:
        raise UsageError(f"--{name} {value:g} is the target {name} of --compare: give --compare LIST too")
    # Also refuses NaN.
    if not abs(value) < float("inf"):
        raise UsageError(f"--{name} must be a finite number, got {value}")


def _compare(args: argparse.Namespace, config: Config, simulated: SimulationSettings) -> int:
    """Compare the contenders of --compare, and return the exit code. Raises as ``main``."""
    from trainer.simulation.comparison.compare import compare
    from trainer.simulation.comparison.contenders import parse_contenders

    if config.exchange != ParameterServer():
        raise UsageError(f"--compare names the exchanges itself: leave out --exchange {config.exchange.name}")
    contenders = parse_contenders(args.compare, config.protocol, evaluates=simulated.compute == "real")
    if "protocol" in args.names_in_argv and ParameterServer.name not in contenders:
        raise UsageError(
            f"--compare names the protocols itself: leave out --protocol {config.protocol.name}, and write its values after"
            f" colons, as in ssp:9 (--protocol is for a contender {ParameterServer.name})"
        )
    # The optimiser as given: the configuration contains the defaults of --protocol already.
    optimiser = from_flags(Optimiser, args)
    goals = {"loss": args.loss, "accuracy": args.accuracy}
    compare(config, simulated, contenders, options_of(args), optimiser=optimiser, **goals)
    return 0


if __name__ == "__main__":
    execute(main, interrupted=INTERRUPTED)
