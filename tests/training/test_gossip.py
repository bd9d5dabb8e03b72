"""The exchange of examples on real processes: beside virtual time, replayed, killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.configs import make_config
from tests.support.slow_model import SLOW
from tests.support.trainer_runs import Training, train_here
from tests.support.two_stages import AllReduceThenServers
from tests.support.virtual_runs import QUIET, final
from trainer.exchange import EXCHANGES
from trainer.home.place import place_of
from trainer.runlog.kinds.peers import GossipEvent, PoolEvent
from trainer.runlog.read import read_events, surviving_events
from trainer.runlog.result import read_result
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.replay import replay

COMMON = ("--model", "logistic", "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1, "--no-report", "--quiet")
GOSSIP = ("--gossip", 5, "--gossip-every", 2)


def virtual_end(shards: Path, output: Path, **values: Any) -> np.ndarray:
    """Return the parameters where the same run ends in virtual time, by default one of bsp."""
    common: dict[str, Any] = {"model": "logistic", "batch_size": 24, "learning_rate": 0.02, "threads": 1}
    config = make_config(shards, output, gossip=5, gossip_every=2, protocol="bsp", **common, **values)
    return final(simulate(config, SimulationSettings(), QUIET))


@pytest.mark.full
@pytest.mark.parametrize("protocol", [("--protocol", "bsp", "--servers", 2), ("--exchange", "all-reduce")])
def test_real_processes_have_the_bits_of_virtual_time(
    protocol: tuple[object, ...], shards: Path, tmp_path: Path
) -> None:
    """Resumed too: the ids of the pool are in the checkpoint, and the losses in the ledger."""
    own = (*protocol, "--selector", "ab", "--example-ledger", "--recipe", "constant")
    train_here(shards, tmp_path / "real", *COMMON, *GOSSIP, *own, "--steps", 47)
    real = train_here(shards, tmp_path / "real", *COMMON, *GOSSIP, *own, "--steps", 90, "--resume")
    values: dict[str, Any] = {"steps": 90, "selector": "ab", "recipe": "constant", "example_ledger": True}
    np.testing.assert_array_equal(real.vector(), virtual_end(shards, tmp_path / "virtual", **values))
    assert replay(tmp_path / "real").is_equal


@pytest.mark.full
def test_a_killed_run_has_the_bits_of_bsp(shards: Path, tmp_path: Path, runs: list[Training]) -> None:
    run = Training(shards, tmp_path / "run", *COMMON, *SLOW, *GOSSIP, "--exchange", "all-reduce", "--steps", 240)
    runs.append(run)
    for updates, victim in ((60, "worker-1"), (120, "server-0"), (180, "worker-2")):
        run.wait_for_updates(updates)
        run.send(victim)
    assert run.wait() == 0, run.said()
    np.testing.assert_array_equal(run.vector(), virtual_end(shards, tmp_path / "virtual", steps=240))


@pytest.mark.full
@pytest.mark.parametrize(
    ("protocol", "victim"), [(("--protocol", "asp"), "server-0"), (("--exchange", "d-psgd"), "worker-1")]
)
def test_a_killed_run_ends_and_is_replayed(
    protocol: tuple[object, ...], victim: str, shards: Path, tmp_path: Path, runs: list[Training]
) -> None:
    """Resumed too: its pools are read again by their ids. A pass of a worker is 12 steps."""
    own = (*SLOW, "--batch-size", 60, "--selector", "ab", *protocol, "--checkpoint-every-s", 0.5)
    settings = (*COMMON, *GOSSIP, *own)
    run = Training(shards, tmp_path / "run", *settings, "--steps", 200)
    runs.append(run)
    run.wait_for_updates(100)
    run.send(victim)
    assert run.wait() == 0, run.said()
    folder = tmp_path / "run"
    rounds_before = _rounds(folder)
    assert len(rounds_before) > 5
    train_here(shards, tmp_path / "run", *settings, "--steps", 280, "--resume")
    assert sum(read_result(tmp_path / "run").restarts.values()) > 0
    assert max(_rounds(folder)) > max(rounds_before), "rounds are counted on"
    assert replay(place_of(str(tmp_path / "run"))).is_equal


@pytest.mark.full
def test_neighbours_have_the_bits_of_virtual_time(shards: Path, tmp_path: Path) -> None:
    """Compare the parameters at the end of a run that was resumed, and replay it."""
    own = ("--exchange", "matcha", "--selector", "ab", "--example-ledger", "--recipe", "constant")
    train_here(shards, tmp_path / "real", *COMMON, *GOSSIP, *own, "--steps", 47)
    real = train_here(shards, tmp_path / "real", *COMMON, *GOSSIP, *own, "--steps", 90, "--resume")
    values: dict[str, Any] = {"steps": 90, "selector": "ab", "recipe": "constant", "example_ledger": True}
    virtual = virtual_end(shards, tmp_path / "virtual", exchange="matcha", **values)
    np.testing.assert_array_equal(real.vector(), virtual)
    assert replay(tmp_path / "real").is_equal


@pytest.mark.full
def test_a_switch_carries_the_pools_over(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare all-reduce and then bsp on servers, with the momentum kept, with bsp alone."""
    monkeypatch.setitem(EXCHANGES, AllReduceThenServers.name, AllReduceThenServers)
    stages = ("--exchange", AllReduceThenServers.name, "--switch-momentum", "keep", "--servers", 2)
    run = train_here(shards, tmp_path / "run", *COMMON, *GOSSIP, *stages, "--steps", 90)
    np.testing.assert_array_equal(run.vector(), virtual_end(shards, tmp_path / "virtual", steps=90))
    assert replay(tmp_path / "run").is_equal


def _rounds(path: Path) -> list[int]:
    events = surviving_events(read_events(path / "metrics.jsonl"))
    assert {event.worker for event in events if isinstance(event, PoolEvent)} >= {0, 1}
    return [event.round for event in events if isinstance(event, GossipEvent)]
