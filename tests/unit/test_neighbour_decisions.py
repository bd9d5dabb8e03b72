"""The decisions of server 0 and of a worker among neighbours, without a network."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.gossip.rounds import EMPTY, Pool
from trainer.leader.horizon import MOST_AHEAD, Horizon
from trainer.leader.peer_members import PeerMembership, add_their_newcomers, source_of_newcomer
from trainer.leader.silence import PauseWatch
from trainer.worker.neighbour_models import NeighbourModels
from trainer.worker.received_pools import ReceivedPools

RING = {0: (1, 3), 1: (0, 2), 2: (1, 3), 3: (0, 2)}


@pytest.mark.parametrize(
    ("rounds_per_s", "expected"),
    [(500, 500), (10, 10), (0.5, 2), (1e6, MOST_AHEAD)],
    ids=["fast", "slow", "slower than the least", "faster than the most"],
)
def test_the_horizon_is_a_second_ahead(rounds_per_s: float, expected: int) -> None:
    horizon = Horizon(0)
    horizon.begin(7.0)
    for tenth in range(1, 41):
        horizon.move(int(rounds_per_s * tenth / 10), 10**9, 7.0 + tenth / 10)
    assert horizon.until == int(rounds_per_s * 4) + expected


def test_the_horizon_keeps_its_limit_and_never_moves_back() -> None:
    """In the first second, it is at most 2, 4 and 8 rounds ahead; the speed that is measured then is 55 rounds in 9 s."""
    horizon = Horizon(5)
    horizon.begin(0.0)
    reached = []
    for furthest, limit, now in ((5, 6, 0.1), (6, 100, 0.2), (60, 70, 0.3), (60, 70, 9.0), (60, 8, 9.1)):
        horizon.move(furthest, limit, now)
        reached.append(horizon.until)
    assert reached == [6, 10, 68, 68, 68]


def test_silence_does_not_count_after_a_pause() -> None:
    """Take a gap of more than 2 s between two ticks as a pause, with a timeout of 8 s."""
    pauses = PauseWatch()
    assert pauses.tick(1.0, 8.0)
    assert pauses.tick(2.9, 8.0)
    assert not pauses.tick(5.0, 8.0)
    counted = [now for now in range(6, 16) if pauses.tick(float(now), 8.0)]
    assert counted == [13, 14, 15]


def member(source: int | None, *, has_model: bool) -> PeerMembership:
    return PeerMembership(1, 1, 0, source, {}, 0.0, has_model)


def plan(links: Mapping[int, tuple[int, ...]]) -> Any:
    """Return a plan whose rounds from 3 on have links, as weighted edges."""
    edges = tuple((a, b, 0.5) for a, others in links.items() for b in others if a < b)
    return SimpleNamespace(edges=lambda round: edges if round >= 3 else ())


@pytest.mark.parametrize(
    ("with_model", "source"),
    [((0, 1, 2), 0), ((1, 2), 2), ((1,), 1), ((), None)],
    ids=["first neighbour", "other neighbour", "no neighbour", "nobody"],
)
def test_a_newcomer_gets_the_model_of_a_neighbour(with_model: tuple[int, ...], source: int | None) -> None:
    members = {worker: member(None, has_model=worker in with_model) for worker in range(3)}
    assert source_of_newcomer(members, plan(RING), 3, 0) == source


def test_newcomers_leave_with_the_source_of_their_model() -> None:
    members = {
        0: member(None, has_model=True),
        1: member(0, has_model=False),
        2: member(0, has_model=True),
        3: member(2, has_model=False),
    }
    assert add_their_newcomers(members, [0, 9]) == {0, 1}
    assert add_their_newcomers(members, [9]) == set()


def test_a_departed_neighbour_counts_up_to_its_gap() -> None:
    """Only every second round has a link; the models of rounds 2 and 4 are here, and the model of round 6 is not."""
    models = NeighbourModels()
    vectors = {round: np.full(2, round, np.float32) for round in (2, 4, 8)}
    for round, vector in vectors.items():
        models.put(11, round, vector)
    models.put(20, 3, vectors[8])
    models.let_go(5, 11, 1, lambda round: round % 2 == 0)
    models.retain({12}, 15)
    assert [models.session_with(5, None, round) for round in (2, 4, 6, 8)] == [11, 11, None, None]
    assert models.session_with(5, 20, 3) == 20, "a session after the view is not known yet"
    assert models.pop(11, 2) is vectors[2]
    models.retain({12}, 30)
    assert [models.session_with(5, 20, round) for round in (3, 4)] == [None, 11]


def test_examples_of_others_are_handed_over_once() -> None:
    pools = ReceivedPools()
    assert pools.hand_over(0) == Pool(0, 0, 0, EMPTY)
    assert pools.hand_over(1) is None
    pools.announce([(1, 4), (2, 8)])
    assert pools.missing(3) == 1
    assert (pools.is_ready(3), pools.is_ready(4)) == (True, False)
    first = Pool(1, 4, 4, EMPTY)
    assert pools.take(first)
    assert not pools.take(Pool(3, 12, 12, EMPTY))
    assert pools.missing(3) == 2
    assert (pools.hand_over(5), pools.hand_over(6)) == (first, None)
    pools.announce([(2, 8)])
    assert pools.missing(8) == 2
    assert not pools.is_ready(8)
