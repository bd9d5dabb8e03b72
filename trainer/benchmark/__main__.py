"""``sharding benchmark``: what jobs/benchmark.py does, on a local Spark."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.core.command_line import parse
from pipeline.runs import flags as cli
from trainer.benchmark.command import build_parser, run_benchmark

INTERRUPTED = "run the same command again to resume"
DESCRIPTION = "Compare the speed of Spark MLlib, the parameter server and two more systems on Spark."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and leave with the exit code: errors of Spark tasks become one line, as in a job."""
    cli.execute(lambda: run_benchmark(parse(build_parser(DESCRIPTION, "sharding benchmark"), argv)))


if __name__ == "__main__":
    main()
