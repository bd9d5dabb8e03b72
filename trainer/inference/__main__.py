"""``sharding predict``: a table of a trained model's predictions."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core import command_line
from pipeline.core.command_line import Parser
from pipeline.core.extras import require
from pipeline.core.program import execute
from pipeline.core.specs import add_flags, from_flags
from trainer.inference.options import PredictOptions
from trainer.tables.options import ROWS
from trainer.tables.threads import sleep_while_waiting

INTERRUPTED = "the same command continues with the next part of the table"
PROG = "python -m trainer predict"
EPILOG = """\
example: python -m trainer predict build/run --input data/cifar10 \\
             --output build/predictions.parquet

The table has the ids that the sharding jobs give to the same rows, the most
likely class of each (label) and the probability of every class. After an
interruption, the same command resumes. Exit codes: 0 done or already made,
2 wrong usage, 3 broken input, 1 other errors."""


def parser() -> Parser:
    """Return the parser, with the fields of PredictOptions as flags."""
    result = command_line.parser(PROG, "Predict the class of every image with the model of a run.", EPILOG)
    result.add_argument("run", metavar="RUN", help="folder of the run, or a model file")
    add_flags(result.add_argument_group("rows"), PredictOptions, only=ROWS)
    add_flags(result.add_argument_group("model"), PredictOptions, leave_out=(*ROWS, "run"))
    command_line.add_config_flag(result, "predict")
    command_line.add_log_format_flag(result)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. Raises UsageError, DataError and JobError."""
    prediction = from_flags(PredictOptions, command_line.parse(parser(), argv))
    require("trainer", "predict")
    sleep_while_waiting()
    from trainer.inference.predict import predict  # loads torch

    table = predict(prediction)
    state = "made" if table.fresh else "already made, nothing to do"
    print(f"{table.uri}: {state}; predictions of {table.rows:,} rows")
    return 0


if __name__ == "__main__":
    execute(main, interrupted=INTERRUPTED)
