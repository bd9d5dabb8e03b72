"""Real runs of every protocol, computed again from their logs and held against virtual ones, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from tests.support.tiers import only
from tests.support.trainer_runs import Training, until
from tests.support.trainer_sets import make_sets
from trainer import Options, train
from trainer.checkpoints.read import newest, read_vector
from trainer.protocols import PROTOCOLS, Protocol
from trainer.run_files import CHECKPOINTS
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay

WORKERS, STEPS = 3, 12
COMMON: dict[str, Any] = {"batch_size": 24, "learning_rate": 0.02, "threads": 1, "device": "cpu", "steps": STEPS}
OWN: dict[str, dict[str, Any]] = {
    "k-bsp": {"k": 2, "cancel": "preempt"},
    "k-batch-bsp": {"k": 4, "cancel": "preempt"},
    "k-asp": {"k": 2},
    "k-batch-asp": {"k": 5},
    "n-softsync": {"softsync": 2},
    "downpour": {"push_every": 3},
}


KILLED = ("asp", "k-batch-asp")  # protocols of which a run with a kill is replayed


@pytest.mark.parametrize("protocol", only(["k-bsp"], [name for name in PROTOCOLS if name not in KILLED]))
def test_every_protocol_trains_on_processes_and_replays(shards: Path, tmp_path: Path, protocol: str) -> None:
    own = OWN.get(protocol, {})
    config = make_config(shards, tmp_path / "run", model="logistic", protocol=protocol, servers=2, **COMMON | own)
    done = train(config, Options(silent=True, report=False))
    assert done is not None
    assert_consistent(done.pushes(), config.protocol, STEPS)
    assert replay(done.output).is_equal


def assert_consistent(pushes: pd.DataFrame, protocol: Protocol, steps: int) -> None:
    """Check that every gradient is used once, in updates of the protocol's size, at the staleness that it has."""
    accepted = pushes[pushes["accepted"] == 1]
    used = [protocol.local_steps(clock) for clock in accepted["clock"]]
    assert sum(used) - used[-1] < WORKERS * steps <= sum(used)
    assert sum(used) == WORKERS * steps or protocol.most_local_steps() > 1
    assert not accepted.duplicated(["worker", "clock"]).any()
    assert (accepted["staleness"] == accepted["version"] - 1 - accepted["version_pulled"]).all()
    sizes = accepted.groupby("version").size().to_list()
    size = protocol.update_size(WORKERS)
    assert sizes[:-1] == [size] * (len(sizes) - 1)
    assert sizes[-1] <= size
    if protocol.synchronous:
        assert not accepted["staleness"].any()
    if protocol.name in ("k-bsp", "k-asp"):  # gradients of an update are of different workers
        assert not accepted.duplicated(["version", "worker"]).any()


def test_late_steps_are_given_up_and_counted_as_refused(shards: Path, tmp_path: Path) -> None:
    """One of three makes the update: the others stop between two of six micro-batches, having trained on nothing."""
    own = {"k": 1, "cancel": "preempt", "micro_batches": 6}
    values = COMMON | own | {"batch_size": 180, "steps": 6}
    done = train(
        make_config(shards, tmp_path / "run", model="cnn", protocol="k-bsp", **values),
        Options(silent=True, report=False),
    )
    assert done is not None
    pushes = done.pushes()
    refused = pushes[pushes["accepted"] == 0]
    given_up = refused[refused["examples"] == 0]
    assert len(given_up)
    assert (pushes["accepted"].sum(), done.rejected) == (WORKERS * 6, len(refused))
    assert replay(done.output).is_equal


@pytest.mark.parametrize("protocol", only([], KILLED))
def test_an_asynchronous_run_with_a_killed_worker_replays(shards: Path, tmp_path: Path, protocol: str) -> None:
    """The cnn has augmentation, dropout and BatchNorm, and two servers have a part each."""
    own = [f"--{key}={value}" for key, value in OWN.get(protocol, {}).items()]
    flags = (
        "--model",
        "cnn",
        "--protocol",
        protocol,
        "--servers",
        2,
        "--steps",
        60,
        *own,
        "--no-report",
        "--threads",
        1,
    )
    run = Training(shards, tmp_path / "run", *flags, "--batch-size", 24, "--learning-rate", 0.02)
    try:
        run.wait_for_updates(6)
        run.send("worker-1")
        until(lambda: run.events("restart"), "the worker is started again")
        assert run.wait() == 0, run.said()
    finally:
        run.end()
    assert run.result()["restarts"]["worker"] == 1
    assert_consistent(run.pushes(), PROTOCOLS[protocol](**OWN.get(protocol, {})), 60)
    again = replay(run.output)
    assert again.pushes == 180
    assert again.is_equal
    np.testing.assert_array_equal(again.replayed, run.vector())


@pytest.mark.parametrize("profile", only(["homogeneous"], ["homogeneous", "lognormal:0.8"]))
def test_bsp_in_virtual_time_has_the_bits_of_bsp_on_real_processes(shards: Path, tmp_path: Path, profile: str) -> None:
    vectors = []
    for name in ("real", "virtual"):
        config = make_config(shards, tmp_path / name, model="cnn", protocol="bsp", servers=2, **COMMON | {"steps": 4})
        if name == "real":
            train(config, Options(silent=True, report=False))
        else:
            done = simulate(
                config, SimulationSettings(profile=parse_profile(profile)), Options(silent=True, report=False)
            )
            assert done.final_accuracy is not None
        root = tmp_path / name / CHECKPOINTS
        vectors.append(read_vector(root, newest(root, verify=True) or 0))
    np.testing.assert_array_equal(vectors[0], vectors[1])


def test_a_run_is_resumed_on_its_set_when_that_was_made_again(spark: Any, tmp_path: Path) -> None:
    """The files have other names then, and the same rows; a set of other rows is another."""
    vectors = []

    def run(name: str, steps: int, *, resume: bool = False) -> None:
        values = COMMON | {"steps": steps, "recipe": "constant"}
        config = make_config(
            tmp_path / f"shards-{WORKERS}", tmp_path / name, model="logistic", protocol="bsp", **values
        )
        simulate(config, SimulationSettings(), Options(silent=True, report=False, resume=resume))
        root = tmp_path / name / CHECKPOINTS
        vectors.append(read_vector(root, newest(root, verify=True) or 0))

    shards = make_sets(spark, tmp_path, WORKERS)[WORKERS]
    run("whole", 8)
    run("parts", 4)
    files = {path.name for path in shards.glob("worker=*/*")}
    shutil.rmtree(shards)
    make_sets(spark, tmp_path, WORKERS)
    assert files.isdisjoint(path.name for path in shards.glob("worker=*/*"))
    run("parts", 8, resume=True)
    assert not np.array_equal(vectors[1], vectors[2])
    np.testing.assert_array_equal(vectors[0], vectors[2])
    shutil.rmtree(shards)
    make_sets(spark, tmp_path, WORKERS, seed=2)
    with pytest.raises(UsageError, match="shard digest"):
        run("parts", 12, resume=True)
