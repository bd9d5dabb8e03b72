"""``python -m trainer embed``: a table of (id, embedding) of images, computed by an auto-encoder."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pipeline.core import command_line
from pipeline.core.command_line import Parser
from pipeline.core.extras import require
from pipeline.core.specs import add_flags, from_flags
from trainer.embed.options import Embedding

INTERRUPTED = "the same command goes on from the last checkpoint"
PROG = "python -m trainer embed"
EPILOG = """\
example: python -m trainer embed --input data/cifar10 --output build/embedding.parquet
         spark-submit jobs/submodular.py --input data/cifar10 --embedding build/embedding.parquet ...

The auto-encoder is that of RCD-SGD (He and Dube 2023, Table 1). Ids are those that the sharding jobs give the same rows.
A run that is killed goes on when the same command is given again. Exit codes: 0 done or already made, 2 usage, 3 broken
input, 1 anything else."""


def parser() -> Parser:
    made = command_line.parser(PROG, "Embed images by an auto-encoder into a table of (id, embedding).", EPILOG)
    sources = ("input", "shards")
    add_flags(
        made.add_argument_group("rows"), Embedding, only=(*sources, "format", "image_shape", "channels", "output")
    )
    fit = ("fit_rows", "epochs", "batch_size", "learning_rate", "weight_decay", "seed")
    add_flags(made.add_argument_group("auto-encoder"), Embedding, only=fit)
    run = made.add_argument_group("run")
    add_flags(run, Embedding, leave_out=(*sources, "format", "image_shape", "channels", "output", *fit))
    command_line.add_config_flag(run, "embed")
    run.add_argument("--debug", action="store_true", help="show stack traces")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError, DataError and JobError."""
    asked = from_flags(Embedding, command_line.parse(parser(), argv))
    require("trainer", "embed")
    from trainer.embed.run import embed  # loads torch

    made = embed(asked)
    state = "made" if made.fresh else "already made, nothing to do"
    if made.explained <= 0:
        print(
            "warning: the auto-encoder explains no more than the mean image does, so its vectors say little of the"
            " images; learn longer (--epochs) or from more rows (--fit-rows)",
            file=sys.stderr,
        )
    print(f"{made.uri}: {state}; {made.rows:,} rows of {made.length} numbers, {made.explained:.1%} of the variance")
    return 0


if __name__ == "__main__":
    command_line.execute(main, interrupted=INTERRUPTED)
