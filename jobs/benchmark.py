"""Compare the speed of Spark MLlib, the parameter server and two more systems on Spark, for linear and logistic regression
and a small perceptron, per mini-batch and until convergence."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.runs.program import execute
from trainer.benchmark.command import build_parser, run_benchmark


def main() -> int:
    return run_benchmark(build_parser(__doc__))


if __name__ == "__main__":
    execute(main)
