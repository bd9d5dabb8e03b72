"""``sharding COMMAND``: the commands of ``python -m pipeline``, and ``train``, from wherever the package is installed.

Neither Spark nor torch is imported before the command is known. Exit codes are those of the commands.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

from pipeline import __main__ as pipeline_commands
from pipeline import command_line
from pipeline.errors import UsageError

COMMANDS = {
    **{name: summary for name, (_, summary) in pipeline_commands.COMMANDS.items()},
    "train": "train a model on committed shards with worker, server and evaluator processes",
}
TRAINER_NEEDS = ("torch", "zmq", "safetensors")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code; every foreseen error is one line on stderr."""
    args = _parser().parse_args(argv)
    if args.command == "train":
        _train(args.rest)
    return pipeline_commands.main([args.command, *args.rest])


def _parser() -> argparse.ArgumentParser:
    lines = [f"  {name:<12}{summary}" for name, summary in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="sharding",
        usage="%(prog)s COMMAND [OPTION ...]",
        description="commands:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sharding {version('sharding')}")
    parser.add_argument(
        "command", choices=COMMANDS, metavar="COMMAND", help="one of the above; COMMAND -h lists options"
    )
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _train(argv: Sequence[str]) -> None:
    """Train, and leave with the exit code."""
    from trainer.__main__ import INTERRUPTED
    from trainer.__main__ import main as train

    def checked() -> int:
        for module in TRAINER_NEEDS:
            if find_spec(module) is None:
                raise UsageError(f"training needs {module}, which is not installed: pip install 'sharding[trainer]'")
        return train(argv)

    command_line.execute(checked, interrupted=INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
