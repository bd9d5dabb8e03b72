"""Train a model on a committed shard set, with servers, workers and the evaluator in tasks of a Spark cluster."""

import sys
from pathlib import Path

if Path(__file__).resolve().parent.name == "jobs":  # not a copy that Spark made in a folder that others may write to
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.core.program import execute
from trainer.__main__ import INTERRUPTED, parser
from trainer.__main__ import main as train
from trainer.cluster.hosts import SPARK

EPILOG = """\
example: spark-submit --master spark://HOST:7077 --conf spark.task.cpus=4 \\
             jobs/train.py --shards hdfs://namenode/shards \\
             --output hdfs://namenode/run --hosts 3 --servers 3 \\
             --model resnet20 --epochs 20

Each host is a Spark task, with the cores of spark.task.cpus and the GPUs of
spark.task.resource.gpu.amount, which its workers share. Exit codes: 0 done or
already finished, 2 wrong usage, 3 broken shards, 1 other errors and
interruption, which leaves a checkpoint: the same command with --resume resumes
the run."""


def main() -> int:
    return train(flags=parser("train.py", __doc__, EPILOG, launcher=SPARK))


if __name__ == "__main__":
    execute(main, interrupted=INTERRUPTED)
