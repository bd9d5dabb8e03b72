"""Training on a real Ray cluster of three nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import UsageError
from tests.clusters import ROOT
from tests.clusters.environments import DEMO
from tests.clusters.users_jobs import MODEL, assert_trained, upload_sample, users_only
from tests.support.application import Ended, run_job
from tests.support.commands import assert_names_extra
from tests.support.configs import make_config
from tests.support.trainer_runs import RunFolder, train_here, until
from tests.support.trainer_sets import make_sets
from trainer import train
from trainer.checkpoints.read import whole
from trainer.cluster.ray import RayLauncher
from trainer.exchange import EXCHANGES
from trainer.options import Options

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]  # its nodes start beside tests that compute

RUN: dict[str, Any] = {
    "model": "logistic", "protocol": "bsp", "batch_size": 24, "learning_rate": 0.02, "steps": 900, "servers": 2,
    "threads": 1, "checkpoint_every_s": 0.5,
}  # fmt: skip
FLAGS = tuple(part for key, value in RUN.items() for part in (f"--{key.replace('_', '-')}", value))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of one CPU each, beside one without any, where the programs of these tests run."""
    import ray
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(3):
            found.add_node(num_cpus=1)
        ray.init(address=found.address, log_to_driver=False)
        yield found
        ray.shutdown()
        found.shutdown()


@pytest.fixture(scope="module")
def shards(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images for three workers."""
    return make_sets(spark, tmp_path_factory.mktemp("ray"), 3)[3]


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Where the run of these tests ends on a single host."""
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    return train_here(shards, output, *FLAGS, "--no-report", "--quiet").vector()


def test_a_run_on_ray_keeps_its_bits_when_a_node_is_killed(
    cluster: Any, shards: Path, undisturbed: np.ndarray, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    config, results = make_config(shards, output, **RUN), []

    def run() -> None:
        results.append(train(config, Options(silent=True, report=False), launcher=RayLauncher(), hosts=3))

    thread = threading.Thread(target=run)
    thread.start()
    until(lambda: any(whole(output / "checkpoints")), "a checkpoint of an update is there")
    cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    cluster.add_node(num_cpus=1)
    thread.join(600)
    assert [result.cause for result in results if result] == ["finished"]
    np.testing.assert_array_equal(RunFolder(output).vector(), undisturbed)


def test_a_cluster_that_is_too_small_is_told_of(cluster: Any, shards: Path, tmp_path: Path) -> None:
    config = make_config(shards, tmp_path / "run", **RUN)
    with pytest.raises(UsageError, match="--hosts 3 with --host-cores 9 takes 27 CPUs, and the Ray cluster has"):
        train(config, Options(silent=True), launcher=RayLauncher(cores=9), hosts=3)
    assert not (tmp_path / "run").exists()


@pytest.mark.timeout(1800)  # five runs, and the environment may have to be made: 13 minutes on a busy machine
def test_default_flags_on_ray(cluster: Any, spark: Any, tmp_path: Path) -> None:
    """An exchange of every client trains: the default one as a program, the others in this process, which has loaded Ray.

    One of them has no evaluation rows, because its shards are named one by one.

    In the demo environment, which lacks Ray, one line names the extra."""
    sample = upload_sample(str(tmp_path))
    shards = tmp_path / "shards"
    inputs = ("--input", sample, "--eval-input", sample, "--output", shards, "--workers", 2)
    assert run_job("stratified.py", *users_only(inputs)).code == 0
    flags = users_only(("--launcher", "ray", "--hosts", 2, *MODEL))
    command = ["-m", "trainer", *map(str, ("--shards", shards, "--output", tmp_path / "run", *flags))]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert_trained(str(tmp_path / "run"), with_evaluation=True)
    exchanges = {exchange.client: name for name, exchange in EXCHANGES.items() if name != next(iter(EXCHANGES))}
    for exchange in exchanges.values():
        places = ("--shards", *(shards / f"worker={worker:03d}" for worker in range(2))) if exchange == "matcha" else ()
        train_here(shards, tmp_path / exchange, *users_only((*flags, "--exchange", exchange, *places)))
        assert_trained(str(tmp_path / exchange), with_evaluation=not places)
    refusal = DEMO.run("python", *command, cwd=ROOT)
    assert_names_extra(Ended(refusal.returncode, refusal.stdout, refusal.stderr), "ray")
