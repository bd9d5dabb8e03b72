"""Train a model on a committed shard set, with servers, workers and the evaluator in tasks of a Spark cluster."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from functools import partial

from pipeline.core import command_line
from trainer.__main__ import INTERRUPTED
from trainer.spark_job import main

if __name__ == "__main__":
    command_line.execute(partial(main, __doc__), interrupted=INTERRUPTED)
