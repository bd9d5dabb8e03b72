"""``python -m trainer.benchmark``: the comparison of jobs/benchmark.py without spark-submit."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.runs.program import execute
from trainer.benchmark.command import build_parser, run_benchmark

PROG = "python -m trainer.benchmark"
INTERRUPTED = "run the same command again to resume"
DESCRIPTION = "Compare the speed of Spark MLlib, the parameter server and two more systems on Spark."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and leave with the exit code: errors of Spark tasks become one line, as in a job."""
    execute(lambda: run_benchmark(build_parser(DESCRIPTION, PROG), argv))


if __name__ == "__main__":
    main()
