"""The exchange of examples on real processes: beside virtual time, replayed, killed and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.configs import make_config
from tests.support.trainer_runs import Training, train_here
from tests.support.virtual_runs import QUIET, final
from trainer.home.place import place_of
from trainer.runlog.kinds import GossipEvent, PoolEvent
from trainer.runlog.read import read_events, surviving_events
from trainer.runlog.result import read_result
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.replay import replay

COMMON = ("--model", "logistic", "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1, "--no-report", "--quiet")
GOSSIP = ("--gossip", 5, "--gossip-every", 2, "--selector", "ab")


@pytest.fixture
def runs() -> Iterator[list[Training]]:
    """Runs that the test has started, which are ended whatever it does."""
    started: list[Training] = []
    yield started
    for run in started:
        run.end()


@pytest.mark.full
def test_real_processes_have_the_bits_of_virtual_time(shards: Path, tmp_path: Path) -> None:
    real = train_here(shards, tmp_path / "real", *COMMON, *GOSSIP, "--steps", 90, "--protocol", "bsp", "--servers", 2)
    values: dict[str, Any] = {"model": "logistic", "batch_size": 24, "learning_rate": 0.02, "threads": 1, "servers": 2}
    values |= {"gossip": 5, "gossip_every": 2, "selector": "ab", "steps": 90, "protocol": "bsp"}
    virtual = simulate(make_config(shards, tmp_path / "virtual", **values), SimulationSettings(), QUIET)
    np.testing.assert_array_equal(real.vector(), final(virtual))


@pytest.mark.full
@pytest.mark.parametrize(("protocol", "victim"), [("asp", "worker-1"), ("bsp", "server-0"), ("ssp", "worker-0")])
def test_a_killed_run_ends_and_is_replayed(
    protocol: str, victim: str, shards: Path, tmp_path: Path, runs: list[Training]
) -> None:
    """Interrupted and resumed too: its pools are read again by their ids."""
    settings = (*COMMON, *GOSSIP, "--protocol", protocol, "--checkpoint-every-s", 0.5, "--start-wait-s", 5)
    run = Training(shards, tmp_path / "run", *settings, "--steps", 600)
    runs.append(run)
    run.wait_for_updates(300)
    run.send(victim)
    assert run.wait() == 0, run.said()
    folder = tmp_path / "run"
    rounds_before = _rounds(folder)
    assert len(rounds_before) > 10
    longer = Training(shards, tmp_path / "run", *settings, "--steps", 800, "--resume")
    runs.append(longer)
    assert longer.wait() == 0, longer.said()
    assert read_result(tmp_path / "run").restarts
    assert max(_rounds(folder)) > max(rounds_before), "rounds are counted on"
    assert replay(place_of(str(tmp_path / "run"))).is_equal


def _rounds(path: Path) -> list[int]:
    events = surviving_events(read_events(path / "metrics.jsonl"))
    assert {event.worker for event in events if isinstance(event, PoolEvent)} >= {0, 1}
    return [event.round for event in events if isinstance(event, GossipEvent)]
