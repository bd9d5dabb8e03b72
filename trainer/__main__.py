"""``python -m trainer``: train a model on committed shards with worker, server and evaluator processes."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline import command_line
from trainer.api import train
from trainer.flags import config_of, flags, options_of

INTERRUPTED = "the same command with --resume goes on from the last checkpoint"


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code. Raises UsageError, DataError and JobError."""
    args = command_line.parse(flags(), argv)
    train(config_of(args), options_of(args))
    return 0


if __name__ == "__main__":
    command_line.execute(main, interrupted=INTERRUPTED)
