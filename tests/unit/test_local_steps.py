"""Downpour's pushes of several mini-batches: the worker's loop against torch's own, and the reports that join."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.configs import make_config
from trainer.coordination.local_steps import LocalCopy, LocalPlan
from trainer.coordination.orders import RowLosses, StepMeasurements, join_measurements
from trainer.coordination.passes import WORD, RowSums
from trainer.data.batches import Batches
from trainer.data.rows import Rows
from trainer.data.sampling import FixedSampler
from trainer.models.base import ModelInput
from trainer.models.build import NetworkAndTask, build
from trainer.models.cnn import CNN
from trainer.models.flat_vector import FlatModel
from trainer.protocols.downpour import Downpour
from trainer.sampling.base import Selection
from trainer.worker.clients.base import Turn, Vector
from trainer.worker.loop import train
from trainer.worker.step import Step, step_seed

RATE, STEPS, WORKERS = 0.125, 11, 3


def network() -> NetworkAndTask:
    return build(CNN(), ModelInput((3, 8, 8), 3, False, True), seed=0)


def batches() -> Batches:
    rng = np.random.default_rng(1)
    rows = Rows(rng.integers(0, 255, (24, 3, 8, 8), np.uint8), rng.integers(0, 3, 24), np.arange(24))

    def stream(clock: int) -> Selection:
        return Selection((np.arange(6) + 6 * clock) % 24)

    return Batches(FixedSampler(rows, stream), np.zeros(3, np.float32), seed=0, worker=0, augment=False)


class Recorder:
    """A client whose server answers every push with the start, and that keeps what is pushed."""

    def __init__(self, start: Vector) -> None:
        self.start = start
        self.pulled = np.zeros_like(start)
        self.pushed = np.zeros_like(start)
        self.pushes: list[Vector] = []
        self.reports: list[StepMeasurements] = []

    def join(self) -> Turn | None:
        self.pulled[:] = self.start
        return Turn(0, 0, 1)

    def exchange(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        self.pushes.append(self.pushed.copy())
        self.reports.append(report)
        self.pulled[:] = self.start
        following = turn.clock + Downpour().local_steps(turn.clock)
        return Turn(following, 0, 1) if following < STEPS else None

    def poll_cancelled(self, turn: Turn) -> bool:
        return False

    def give_up(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        raise AssertionError

    def close(self) -> None:
        pass


def test_a_push_is_what_torch_moves_a_model_by() -> None:
    """Parameters by the sum of the gradients on the way, BatchNorm's statistics by their changes."""
    torch.set_num_threads(1)
    config = make_config(model="cnn", protocol="downpour", weight_decay=0.0)
    start = FlatModel(network().model).read()
    client = Recorder(start.copy())
    step = Step(config, network(), client.pulled, client.pushed, torch.device("cpu"), WORKERS)
    made = batches()

    class Source:
        def get(self, clock: int) -> Any:
            return made.make(clock)

    def plan(clock: int) -> LocalPlan:
        return LocalPlan((RATE,) * Downpour().local_steps(clock), "changes")

    train(client, Source(), step, 0, 0, plan=plan)
    assert len(client.pushes) == 3
    for first, pushed in zip((0, 1, 6), client.pushes, strict=True):
        own = network()
        optimiser = torch.optim.SGD(own.model.parameters(), RATE)
        for clock in range(first, first + Downpour().local_steps(first)):
            images, labels = made.make(clock).tensors
            optimiser.zero_grad()
            own.model.train()
            torch.manual_seed(step_seed(0, 0, clock))  # of the dropout
            torch.nn.functional.cross_entropy(own.model(images), labels).backward()
            optimiser.step()
        moved = FlatModel(own.model).read() - start
        size = FlatModel(own.model).num_parameters
        np.testing.assert_allclose(-RATE * pushed[:size], moved[:size], rtol=1e-3, atol=2e-6)
        np.testing.assert_allclose(pushed[size:], moved[size:], rtol=1e-3, atol=2e-6)
    assert [report.examples for report in client.reports] == [6, 30, 30]


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=5))
def test_joined_reports_count_the_rows_of_all_steps(ends: list[list[bool]]) -> None:
    """ends: for each row of each mini-batch, whether a pass ends with it; the oracle is one long mini-batch."""
    rng = np.random.default_rng(0)
    hashes = [[int(value) for value in rng.integers(0, 2**63, len(batch))] for batch in ends]

    def row_sums(rows: list[int], are_ends: list[bool]) -> RowSums:
        last = max((place + 1 for place, is_end in enumerate(are_ends) if is_end), default=len(rows))
        return RowSums(sum(rows) % WORD, sum(rows[last:]) % WORD, sum(are_ends))

    reports = [
        StepMeasurements(
            len(rows),
            float(sum(rows) % 7),
            1,
            2.0,
            seen=row_sums(rows, are_ends),
            row_losses=RowLosses(np.array(rows), np.ones(len(rows), np.float32), np.zeros(len(rows), np.bool_)),
        )
        for rows, are_ends in zip(hashes, ends, strict=True)
    ]
    joined = join_measurements(reports)
    every = [value for rows in hashes for value in rows]
    assert joined.seen == row_sums(every, [is_end for batch in ends for is_end in batch])
    assert joined.row_losses is not None
    assert joined.row_losses.ids.tolist() == every
    assert (joined.examples, joined.correct, joined.seconds) == (len(every), len(ends), 2.0)
    assert joined.loss == pytest.approx(sum(report.loss * report.examples for report in reports) / len(every))


def test_downpour_has_no_momentum_and_a_rate_that_its_pushes_share() -> None:
    config = make_config(model="cnn", protocol="downpour")
    assert (config.learning_rate, config.coefficient) == (pytest.approx(0.01 / 0.05 / 5), 0.0)
    assert make_config(model="cnn", protocol="downpour", push_every=1).learning_rate == pytest.approx(0.2)
    assert make_config(model="cnn", protocol="downpour", momentum=0.5, learning_rate=0.1).coefficient == 0.5


def test_an_owned_entry_moves_on_the_copy_without_its_multiple() -> None:
    """Servers divide the changes of all workers by their number, and the copy must not move N times as far."""
    copy = LocalCopy(np.array([5.0, 1.0, 2.0, 3.0]), 1, "changes", (slice(2, 4), WORKERS))
    for losses in ([7.0, 3.0], [8.0, 4.0]):
        changes = WORKERS * (np.array(losses) - copy.values[2:])
        copy.add(np.concatenate([[1.0, 0.5], changes]), 0.25)
        assert copy.values[2:].tolist() == losses
    assert copy.total.tolist() == [2.0, 1.0, WORKERS * 6.0, WORKERS * 1.0]
    assert copy.values[:2].tolist() == [4.5, 2.0]
