"""Test the parts of a run among neighbours in virtual time: its queue, its newcomers and its exchange of examples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.support.configs import make_config
from trainer.context import RunContext
from trainer.coordination.orders import StepMeasurements
from trainer.coordination.peer_progress import PeerProgress, RoundBudget
from trainer.gossip.schedule import DELAY
from trainer.home.folders import Folders
from trainer.simulation.compute import NoCompute
from trainer.simulation.peers.events import PeerEventKind
from trainer.simulation.peers.examples import PeerExamples
from trainer.simulation.peers.newcomers import Newcomer, Newcomers
from trainer.simulation.peers.queue import PeerQueue


def test_a_death_voids_the_events_and_messages_of_a_worker() -> None:
    queue = PeerQueue(2)
    queue.put(3.0, -1, PeerEventKind.RECOVER)
    queue.put(2.0, 1, PeerEventKind.ARRIVE, sender=0)
    queue.put(1.0, 0, PeerEventKind.FINISH)
    queue.put(2.0, 1, PeerEventKind.FINISH)
    queue.end_life(0)
    queue.put(4.0, 0, PeerEventKind.BEGIN)
    events = [queue.pop() for _ in range(len(queue))]
    assert [event.time for event in events] == [1.0, 2.0, 2.0, 3.0, 4.0]
    assert [queue.is_void(event) for event in events] == [True, False, True, False, False]


def test_a_newcomer_gets_the_model_of_a_source() -> None:
    newcomers = Newcomers({3: Newcomer(5, {1}), 4: Newcomer(5, set()), 6: Newcomer(7, {0})})
    assert newcomers.note_model(0, 5, np.zeros(1, np.float32)) == [4]
    assert newcomers.note_model(1, 5, np.ones(1, np.float32)) == [3, 4]


def test_a_newcomer_without_sources_gets_the_first_model() -> None:
    newcomers = Newcomers({3: Newcomer(5, {1, 2}), 4: Newcomer(5, {1}), 6: Newcomer(7, {1})})
    assert newcomers.note_model(0, 5, np.zeros(1, np.float32)) == []
    assert newcomers.lose(1) == [4]
    assert newcomers.lose(4) == []
    assert newcomers.lose(2) == [3]
    assert (newcomers[3].spare, newcomers[3].spare_from, newcomers[6].spare) == (np.zeros(1), 0, None)


def test_a_worker_waits_for_examples_that_are_not_known(tmp_path: Path) -> None:
    config = make_config(gossip=3, exchange="d-psgd")
    progress = PeerProgress(RoundBudget(2, 100, 10), lambda epoch: 0.1, lambda worker, round: None)
    compute = NoCompute(RunContext.from_config(config, tmp_path), 2)
    examples = PeerExamples(config, Folders.from_home(tmp_path), compute, progress)
    for worker in range(2):
        progress.begin(worker)
    assert [examples.hold_back(0, round) for round in (DELAY, DELAY + 1)] == [False, True]
    for worker in range(2):
        progress.finish(worker, StepMeasurements(1, 0.0, 0, 0.1))
    assert progress.complete_round()
    assert (examples.count(), examples.count()) == ([0], [])
