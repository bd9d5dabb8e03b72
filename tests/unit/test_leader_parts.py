"""Parts of server 0's leader: examples that workers exchange, the rule of a stage, status, and news for the evaluator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import mark_evaluated, write_model, write_state
from trainer.coordination.budget import Budget
from trainer.coordination.coordinator import Coordinator
from trainer.coordination.orders import Record, StepMeasurements
from trainer.gossip.rounds import Examples, Pool
from trainer.home.folders import Folders
from trainer.leader.evaluator_news import EvaluatorNews
from trainer.leader.next_stage import SwitchWatch
from trainer.leader.server_gossip import ServerGossip
from trainer.leader.status import describe_loss, progress_status
from trainer.protocols import PROTOCOLS
from trainer.run_files import METRICS, NEWS
from trainer.runlog.journal import Journal
from trainer.runlog.read import iter_events

MEASURED = StepMeasurements(4, 0.5, 3, 0.1)


def coordinator_of(protocol: str, workers: int = 3, steps: int = 10) -> Coordinator:
    """Return a coordinator whose workers have joined with session 1 and compute their first step."""
    coordinator = Coordinator(PROTOCOLS[protocol](), Budget(workers, steps, 5), rate=lambda epoch: 0.1)
    for worker in range(workers):
        coordinator.join(0, worker, 1, 0.0)
    [(order, _)] = coordinator.advance(0.0)
    assert len(order.unblocked) == workers
    return coordinator


def examples_of(worker: int) -> Examples:
    ids = np.arange(2) + 10 * worker
    return Examples(ids, ids % 3, np.full((2, 1, 2, 2), worker, np.uint8))


class Pools:
    """Keeps the pools that a leader sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Pool]] = []

    def send(self, worker: int, session: int, pool: Pool) -> None:
        self.sent.append((worker, pool))


def events(log: Path) -> list[Any]:
    return [event for event in iter_events(log / METRICS) if event.kind in ("gossip", "pool", "warning", "given_up")]


@pytest.mark.parametrize(("protocol", "is_complete"), [("asp", True), ("bsp", False)])
def test_a_lost_worker_is_awaited_if_failures_change_no_bit(tmp_path: Path, protocol: str, is_complete: bool) -> None:
    coordinator = coordinator_of(protocol)
    gossip = ServerGossip(tmp_path, coordinator, Pools().send, None)
    coordinator.lose(2)
    gossip.complete_round()
    assert gossip.add(0, 1, 1, examples_of(0))
    assert not gossip.add(1, 2, 1, examples_of(1)), "the session is another one"
    gossip.complete_round()
    assert gossip.rounds.number == 0, "worker 1 takes part, too"
    assert gossip.add(1, 1, 1, examples_of(1))
    gossip.complete_round()
    assert gossip.rounds.number == is_complete
    assert [event.ids for event in events(tmp_path)] == [{"0": [0, 1], "1": [10, 11]}] * is_complete


def test_a_pool_is_sent_before_the_first_step_that_uses_it(tmp_path: Path) -> None:
    """A later generation knows the examples, sends them again, and logs the round as of its own version."""
    coordinator, pools = coordinator_of("asp", workers=2), Pools()
    gossip = ServerGossip(tmp_path, coordinator, pools.send, None)
    for worker in range(2):
        gossip.add(worker, 1, 1, examples_of(worker))
    gossip.complete_round()
    assert coordinator.push(0, 1, 1, 0, 1.0, MEASURED)
    for order, _ in coordinator.advance(1.0):
        gossip.send_pools(order)
    assert [(worker, pool.clock, pool.others().ids.tolist()) for worker, pool in pools.sent] == [(1, 1, [0, 1])]
    assert [event.kind for event in events(tmp_path)] == ["gossip", "pool"]
    later = ServerGossip(tmp_path, coordinator, pools.send, gossip)
    assert [(event.kind, event.version) for event in events(tmp_path)[2:]] == [("gossip", 2)]
    assert later.rounds.pool(0, 1, 1).examples.has_content
    assert not ServerGossip(tmp_path, coordinator, pools.send, None).rounds.pool(0, 1, 1).examples.has_content


def test_a_rule_or_a_last_evaluation_ends_a_stage(tmp_path: Path) -> None:
    state = RunState(4, 4, 48, 1, 0.5, 1, False, {0: 4}, 1.0, 1, 3, 0, "")
    folder, zeros = folder_of(tmp_path, 4), np.zeros(3, np.float32)
    write_model(folder, 4, zeros, zeros, 1)
    write_state(folder, state)
    watch = SwitchWatch(tmp_path, 5.0)
    assert not watch.is_decided(4, 10.0)
    mark_evaluated(tmp_path, state)
    assert not watch.is_decided(4, 14.0), "it looks every 5 seconds"
    assert not watch.is_decided(None, 15.0)
    assert watch.is_decided(4, 20.0)


def test_a_status_has_the_progress_of_the_run(tmp_path: Path) -> None:
    coordinator = coordinator_of("asp", workers=2)
    journal = Journal(tmp_path, coordinator, 1, 7.0)
    coordinator.push(0, 0, 1, 0, 1.0, MEASURED)
    assert list(coordinator.advance(1.0))
    status = progress_status(coordinator, journal, 8.5)
    assert (status.ready, status.finished, status.diverged) == (True, False, None)
    assert (status.version, status.accepted, status.total) == (1, 1, 20)
    assert (status.epoch, status.epochs, status.seconds, status.num_workers) == (0.1, 2.0, 8.5, 2)


def test_a_loss_before_any_update_has_another_cause() -> None:
    bad = StepMeasurements(4, float("nan"), 0, 0.1)
    first, later = (describe_loss(Record(3, 1, 5, pulled, 0, bad, False), "at version 3") for pulled in (0, 2))
    assert first.startswith("the loss of worker 1 is nan before any update: check the model's initial parameters")
    assert later == "the loss of worker 1 is nan at version 3; lower --learning-rate"


def test_the_evaluator_is_woken_for_a_remote_home_only(tmp_path: Path) -> None:
    for source, size in (("", 0), ("0", 2)):
        news = EvaluatorNews(Folders(tmp_path, tmp_path, source=source))
        for _ in range(2):
            news.wake()
        assert ((tmp_path / NEWS).stat().st_size if (tmp_path / NEWS).exists() else 0) == size


def test_lost_evaluations_are_warned_of_once(tmp_path: Path) -> None:
    news = EvaluatorNews(Folders.from_home(tmp_path))
    for versions in ((), (3, 4), (6,)):
        news.log_given_up(versions)
    kinds = [(event.kind, event.version) for event in events(tmp_path)]
    assert kinds == [("warning", None), ("given_up", 3), ("given_up", 4), ("given_up", 6)]
