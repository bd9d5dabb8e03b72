"""The allocations of an independent script (tests/support/allocation_vectors.py), by the trainer and by the pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from pipeline.assignment.groups import group_table
from pipeline.core.importance import importance, ranks
from pipeline.strategies.importance import owners
from tests.support.allocation_vectors import FILE, make_vectors
from trainer.data.repartition import PartitionSampler
from trainer.data.rows import Rows
from trainer.sampling.base import SetSizes
from trainer.sampling.loss_statistics import LossStatistics
from trainer.sampling.partition_plan import PartitionDraw, PartitionPhase, PartitionPlan
from trainer.sampling.repartition import RepartitionOptions

Losses = npt.NDArray[np.float32]  # [rows, epochs]

VECTORS: dict[str, Any] = json.loads(FILE.read_text())
every_case = pytest.mark.parametrize(
    "case", VECTORS["cases"], ids=lambda case: f"{case['heuristic']}-{case['measure']}-{case['workers']}"
)


def test_the_file_has_the_output_of_the_script() -> None:
    assert make_vectors() == VECTORS


@every_case
def test_shards_by_importance_are_those_of_the_paper(case: dict[str, Any]) -> None:
    """Rank and deal the rows as the sharding job does, from a ledger in random order."""
    for number, phase in enumerate(case["phases"]):
        losses = np.array(phase["losses"], np.float32)[:, 0 if number else case["ignored"] :]
        places, epochs = (column.ravel() for column in np.indices(losses.shape))
        order = np.random.default_rng(number).permutation(losses.size)
        values = importance(
            places[order],
            epochs[order] + 1,
            losses.ravel()[order],
            rows=len(losses),
            measure=case["measure"],
            num_epochs=losses.shape[1],
        )
        table = group_table(np.array([len(losses)]), case["workers"])
        assert owners(table, ranks(values), case["heuristic"]).tolist() == phase["owners"]


@every_case
def test_a_run_divides_its_rows_as_the_paper_does(case: dict[str, Any]) -> None:
    """Learn the losses of the warm-up and of an interval; each worker then draws the rows of its allocation."""
    warmup, interval = (np.array(phase["losses"], np.float32) for phase in case["phases"])
    rows = len(warmup)
    options = RepartitionOptions(
        repartition="importance",
        warmup_epochs=warmup.shape[1],
        ignore_epochs=case["ignored"],
        interval=interval.shape[1],
        importance=case["measure"],
        heuristic=case["heuristic"],
    )
    epochs = warmup.shape[1] + 3 * interval.shape[1]
    plan = PartitionPlan(options, rows, (1,) * case["workers"], 10_000, epochs=epochs, seed=0)
    statistics = LossStatistics(measure=case["measure"])
    table = np.zeros(statistics.length(SetSizes(rows, 1, 0)), np.float32)
    samplers = [PartitionSampler(rows_in_order(rows), plan, worker, statistics) for worker in range(case["workers"])]
    counted = (warmup[:, case["ignored"] :], interval)
    for number, (losses, phase) in enumerate(zip(counted, case["phases"], strict=True)):
        learn(table, statistics, number, losses)
        first = plan.first_steps[number]
        clocks = range(first, first + -(-rows // case["workers"]))
        for worker, sampler in enumerate(samplers):
            trained = {int(np.asarray(sampler.draw(clock, table).places)[0]) for clock in clocks}
            assert sorted(trained) == [row for row in range(rows) if phase["owners"][row] == worker]


def rows_in_order(count: int) -> Rows:
    return Rows(np.zeros((count, 1, 1, 1), np.uint8), np.zeros(count, np.int64), np.arange(count))


def learn(table: Losses, statistics: LossStatistics, number: int, losses: Losses) -> None:
    """Update the table by the losses of a phase, epoch by epoch, in mini-batches of different rows.

    number: of the phase, 0 for the warm-up."""
    for epoch, order in enumerate(random_orders(*losses.shape)):
        for numbers in np.array_split(order, 3):
            draw = PartitionDraw(numbers, np.full(len(numbers), epoch + 1))
            keys = statistics.row_keys(PartitionPhase(number, 0, is_dealt=False), draw, len(losses))
            hits = np.zeros(len(numbers), np.bool_)
            entries, values = statistics.targets(table, keys, losses[numbers, epoch], hits)
            table[entries] = values


def random_orders(rows: int, number: int) -> Iterator[npt.NDArray[np.int64]]:
    generator = np.random.default_rng(rows)
    for _ in range(number):
        yield generator.permutation(rows)
