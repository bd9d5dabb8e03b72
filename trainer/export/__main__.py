"""``sharding export``: a trained model for other programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pipeline.core import command_line
from pipeline.core.command_line import Parser
from pipeline.core.extras import require
from pipeline.core.specs import AdvancedHelp, descriptions
from trainer.export.formats import FORMATS

INTERRUPTED = "run the same command again"
EPILOG = f"""\
formats:
{textwrap.indent(descriptions(FORMATS), "  ")}

example: sharding export build/run --as torchscript --to build/model.pt

A graph takes raw images, as trainer.load does, and returns the outputs of the
network. Exit codes: 0 done, 2 wrong usage, 3 a missing or damaged model,
1 other errors."""


def parser() -> Parser:
    """Return the parser of the command."""
    result = command_line.parser("sharding export", "Write the model of a run for other programs.", EPILOG)
    result.add_argument("run", metavar="RUN", help="folder of the run, or a model file, local, hdfs:// or s3://")
    result.add_argument("--as", dest="kind", required=True, choices=FORMATS, help="format, see below")
    result.add_argument("--to", required=True, metavar="URI", help="file to write, or folder for safetensors")
    result.add_argument("--best", action="store_true", help="use the model of the best evaluation, not the final model")
    result.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    result.add_argument("--debug", action="store_true", help=AdvancedHelp("show stack traces"))
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError, DataError and JobError."""
    args = command_line.parse(parser(), argv)
    require("trainer", "export")
    from trainer.export.write import export  # loads torch

    place = export(args.run, args.to, args.kind, best=args.best, overwrite=args.overwrite)
    print(f"{place}: written as {args.kind}")
    return 0


if __name__ == "__main__":
    command_line.execute(main, interrupted=INTERRUPTED)
