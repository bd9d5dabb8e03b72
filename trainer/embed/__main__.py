"""``python -m trainer embed``: a table of (id, embedding) of images, computed by an auto-encoder."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core import command_line, console
from pipeline.core.command_line import Parser
from pipeline.core.extras import require
from pipeline.core.program import execute
from pipeline.core.specs import add_flags, from_flags
from trainer.embed.options import Embedding
from trainer.tables.options import ROWS
from trainer.tables.progress import LOGGER
from trainer.tables.threads import sleep_while_waiting

INTERRUPTED = "the same command continues from the last checkpoint"
PROG = "python -m trainer embed"
EPILOG = """\
example: python -m trainer embed --input data/cifar10 \\
             --output build/embedding.parquet
         python -m pipeline shard --strategy submodular --input data/cifar10 \\
             --embedding build/embedding.parquet ...

The auto-encoder follows RCD-SGD (He and Dube 2023, Table 1). The table has the
ids that the sharding jobs give to the same rows. After an interruption, the
same command resumes the run. Exit codes: 0 done or already made, 2 wrong usage,
3 broken input, 1 other errors."""


def parser() -> Parser:
    """Return the parser, with the fields of Embedding as flags."""
    result = command_line.parser(
        PROG, "Compute a vector of every image by an auto-encoder, and write a table of (id, embedding).", EPILOG
    )
    add_flags(result.add_argument_group("rows"), Embedding, only=ROWS)
    fit = ("fit_rows", "epochs", "batch_size", "learning_rate", "weight_decay", "seed")
    add_flags(result.add_argument_group("auto-encoder"), Embedding, only=fit)
    # This group takes all other fields, so that a new option needs no change here.
    run = result.add_argument_group("run")
    add_flags(run, Embedding, leave_out=(*ROWS, *fit))
    command_line.add_config_flag(run, "embed")
    command_line.add_log_format_flag(run)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError, DataError and JobError."""
    embedding = from_flags(Embedding, command_line.parse(parser(), argv))
    require("trainer", "embed")
    sleep_while_waiting()
    from trainer.embed.run import embed  # loads torch

    table = embed(embedding)
    state = "made" if table.fresh else "already made, nothing to do"
    if table.explained <= 0:
        console.say(
            LOGGER,
            "warning: the auto-encoder explains no more variance than the mean image, so its vectors carry little"
            " information; train longer (--epochs) or on more rows (--fit-rows)",
            level="warning",
        )
    print(f"{table.uri}: {state}; {table.rows:,} rows of {table.length} numbers, {table.explained:.1%} of the variance")
    return 0


if __name__ == "__main__":
    execute(main, interrupted=INTERRUPTED)
