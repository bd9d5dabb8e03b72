"""The process that makes a batch of a study's shard sets, one after the other on one Spark. Its parent sends the tasks.

Exits with the job's exit code, and prints the error as its last line on standard output."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline.core.command_line import parse
from pipeline.core.errors import JobError
from pipeline.datasets.derive import Derivation, derive
from pipeline.runs.api import shard_request
from pipeline.runs.flags import read_request, shard_parser, strategy_of_flags
from pipeline.spark.progress import PhaseLog
from pipeline.spark.session import spark_context
from trainer.study.run.children import task_of_parent


def make(task: dict[str, Any]) -> None:
    """Derive the data set if the task requests it, then shard it. An existing output stays if it is the same."""
    if task["derive"]:
        request = task["derive"]
        derive(request["source"], Path(request["target"]), Derivation(**request["derivation"]), request["evaluation"])
    args = parse(shard_parser(), task["shard"])
    shard_request(read_request(args), strategy_of_flags(args), report=not args.no_report, progress=PhaseLog(quiet=True))


def main() -> int:
    try:
        tasks = task_of_parent()
        with spark_context():
            for task in tasks:
                make(task)
    except JobError as error:
        print(" ".join(str(error).split()))  # its parent reads the last line
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
