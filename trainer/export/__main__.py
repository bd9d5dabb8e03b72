"""``sharding export``: a trained model, or a shard set, for other programs."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from pipeline.core import command_line
from pipeline.core.command_line import Parser
from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.program import execute
from pipeline.core.specs import descriptions
from trainer.export.formats import FORMATS, MODEL_FORMATS, SET_FORMATS

INTERRUPTED = "run the same command again"
EPILOG = f"""\
formats of models:
{textwrap.indent(descriptions(MODEL_FORMATS), "  ")}

formats of shard sets:
{textwrap.indent(descriptions(SET_FORMATS), "  ")}

examples: sharding export build/run --as torchscript --to build/model.pt
          sharding export build/shards --as webdataset --to build/tars

A graph takes raw images, as trainer.load does, and returns the outputs of the
network. The export of a set that was killed continues when it is started
again. Exit codes: 0 done, 2 wrong usage, 3 a missing or damaged model or set,
1 other errors."""


def parser() -> Parser:
    """Return the parser of the command."""
    result = command_line.parser(
        "sharding export", "Write the model of a run, or a shard set, for other programs.", EPILOG
    )
    result.add_argument(
        "source", metavar="RUN|SET", help="folder of a run, a model file or a shard set, local, hdfs:// or s3://"
    )
    result.add_argument("--as", dest="kind", required=True, choices=FORMATS, help="format, see below")
    # One flag for files and folders: the format says which of them is written.
    result.add_argument("--to", required=True, metavar="URI", help="file to write, or folder for safetensors and sets")
    result.add_argument("--best", action="store_true", help="use the model of the best evaluation, not the final model")
    result.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    command_line.add_log_format_flag(result)
    result.add_argument("--quiet", action="store_true", help="print no progress")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError, DataError and JobError."""
    args = command_line.parse(parser(), argv)
    require("trainer", "export")
    if args.kind in SET_FORMATS:
        from trainer.export.shards import export_set

        if args.best:
            raise UsageError(f"--best chooses a model, and --as {args.kind} writes a shard set; leave it out")
        place = export_set(args.source, args.to, args.kind, overwrite=args.overwrite, quiet=args.quiet)
    else:
        from trainer.export.write import export  # loads torch

        place = export(args.source, args.to, args.kind, best=args.best, overwrite=args.overwrite)
    print(f"{place}: written as {args.kind}")
    return 0


if __name__ == "__main__":
    execute(main, interrupted=INTERRUPTED)
