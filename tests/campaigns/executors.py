"""Kill executors of a training run on a Spark cluster at random moments, and hold its end against an undisturbed run's.

``python -m tests.campaigns.executors --on yarn --kills 20``: jobs/train.py trains with BSP on a cluster of this
machine, with shards and run on HDFS. Which executor is killed and when is drawn from a seed, which is printed. The
run must end with the bits of one on a single host that nobody disturbs."""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession

from tests.clusters import Hdfs, Standalone, Yarn
from tests.clusters.cluster_training import Job, Task, hosts_in, job, make_task, training_processes, vector
from tests.clusters.servers import SparkCluster
from tests.support.trainer_runs import until

HOSTS = 3
PAUSE_S = 3.0, 45.0  # between two kills: from within a restart, which takes 10 to 20 s, to well after it
PATIENCE_S = 1200.0
CONF = {"spark.executor.instances": str(HOSTS), "spark.executor.maxNumFailures": "1000"}


def disturb(run: Job, cluster: SparkCluster, kills: int, draw: random.Random) -> int:
    """Kill so many executors, one after the other, while the run lasts; how many were."""
    began, done = time.monotonic(), 0
    while done < kills:
        time.sleep(draw.uniform(*PAUSE_S))
        if run.process.poll() is not None:
            break
        there = cluster.executors()
        if there:
            index = draw.randrange(len(there))
            cluster.kill_executor(index)
            done += 1
            print(f"{time.monotonic() - began:.1f} s: kill {done}, executor {index} of {len(there)}", flush=True)
    return done


def campaign(where: str, kills: int, steps: int, seed: int) -> None:
    """Raises AssertionError where the run does not end as it must, or before all kills."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-training-")))
        hdfs = stack.enter_context(Hdfs())
        cluster = stack.enter_context(Yarn(hdfs) if where == "yarn" else Standalone(workers=HOSTS))
        env = {"HADOOP_CONF_DIR": str(cluster.conf_dir)} if isinstance(cluster, Yarn) else {}
        master = cluster.master_url if isinstance(cluster, Standalone) else "yarn"
        task, output = made(hdfs, folder, steps), f"{hdfs.uri}/chaos/run"
        run = stack.enter_context(
            job(
                task,
                output,
                folder / "said",
                "--hosts",
                HOSTS,
                "--max-restarts",
                kills,
                master=master,
                conf=CONF,
                env=env,
            )
        )
        run.wait_for_checkpoint()
        done = disturb(run, cluster, kills, random.Random(seed))
        assert run.wait(PATIENCE_S) == 0, run.said()
        lost = len(hosts_in(run.said(), "was lost, and is started again on"))
        print(f"{done} executors killed; hosts were started again {lost} times", flush=True)
        assert done == kills, f"the run was over after {done} kills: give more --steps"
        np.testing.assert_array_equal(vector(output), task.vector)
        until(lambda: not training_processes(cluster), "every process ends")


def made(hdfs: Hdfs, folder: Path, steps: int) -> Task:
    spark: Any = SparkSession.builder.master("local[2]").getOrCreate()
    try:
        return make_task(spark, hdfs, folder / "made", "chaos", steps)
    finally:
        spark.stop()


def main(argv: list[str] | None = None) -> int:
    assert __doc__
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.executors", description=__doc__.split("\n\n")[0])
    parser.add_argument("--on", choices=("standalone", "yarn"), default="yarn", help="(default %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="of executors (default %(default)s)")
    parser.add_argument("--steps", type=int, default=20_000, help="of each worker (default %(default)s)")
    parser.add_argument("--seed", type=int, help="of the kills (default: the clock's)")
    args = parser.parse_args(argv)
    seed = args.seed if args.seed is not None else int(time.time())
    flags = f"--on {args.on} --kills {args.kills} --steps {args.steps} --seed {seed}"
    print(f"seed {seed}: python -m tests.campaigns.executors {flags}", flush=True)
    campaign(args.on, args.kills, args.steps, seed)
    print("the same bits as undisturbed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
