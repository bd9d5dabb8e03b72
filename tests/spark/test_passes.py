"""What a run says of the rows that it trained, against counting them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.configs import make_config
from tests.support.draws import shuffled
from tests.support.tiers import only
from tests.support.trainer_sets import make_sets
from trainer.coordination.budget import Budget
from trainer.coordination.coordinator import Coordinator
from trainer.coordination.orders import StepMeasurements
from trainer.coordination.passes import WORD, Passes, RowSums
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.data.rows import Rows
from trainer.data.sampling import FixedSampler
from trainer.options import Options
from trainer.protocols.asp import ASP
from trainer.runlog.kinds.training import PassEvent
from trainer.sampling.orders import indices
from trainer.simulate import SimulationSettings, simulate


def sampler_of(rows: int, batch: int, worker: int) -> FixedSampler:
    rng = np.random.default_rng(worker)
    images = np.zeros((rows, 1, 2, 2), np.uint8)
    hashes = rng.integers(1, WORD, rows, np.uint64)
    held = Rows(images, np.zeros(rows, np.int64), np.arange(rows), hashes)
    return shuffled(held, batch, seed=3, worker=worker)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=4),
    order=st.lists(st.integers(0, 3), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_a_pass_is_whole_when_every_worker_has_ended_it(sizes: list[tuple[int, int]], order: list[int]) -> None:
    """Workers come in any order, with shards larger and smaller than their mini-batches."""
    samplers = [sampler_of(rows, batch, worker) for worker, (rows, batch) in enumerate(sizes)]
    passes, clocks = Passes(len(samplers), {}), [0] * len(samplers)
    drawn: list[list[int]] = [[] for _ in samplers]  # the rows that each has trained, one after the other
    ends: list[set[int]] = [
        set() for _ in samplers
    ]  # the passes that end in a mini-batch, the last of it where several do
    found = []
    for worker in (choice % len(samplers) for choice in order):
        rows, batch = sizes[worker]
        seen = samplers[worker].draw(clocks[worker]).seen()
        assert seen
        drawn[worker] += indices(rows, batch, clocks[worker], 3, worker).tolist()
        if len(drawn[worker]) // rows > (len(drawn[worker]) - batch) // rows:
            ends[worker].add(len(drawn[worker]) // rows)
        clocks[worker] += 1
        passes.use(worker, seen)
        found += passes.take()
    assert [whole.last for whole in found] == sorted(set.intersection(*ends))
    at = 0
    for whole in found:
        assert whole.first == at + 1
        expected = 0
        for sampler, mine, (rows, _) in zip(samplers, drawn, sizes, strict=True):
            part = mine[at * rows : whole.last * rows]
            assert Counter(part) == dict.fromkeys(range(rows), whole.last - at)
            expected += sum(int(sampler.rows.hashes[row]) for row in part)
        assert whole.fingerprint == expected % WORD
        at = whole.last


@pytest.fixture(scope="module")
def sets(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sets(spark, tmp_path_factory.mktemp("sets"), 3)[3]


def test_the_rows_of_all_workers_have_the_fingerprint_of_the_manifest(sets: Path) -> None:
    shards = open_shards(str(sets))
    sums = [int(load_worker(shards, worker).hashes.sum()) for worker in range(3)]
    assert sum(sums) % WORD == shards.fingerprint


def run(shards: Path, output: Path, protocol: str, **values: Any) -> Any:
    config = make_config(shards, output, model="logistic", protocol=protocol, batch_size=30, epochs=5, **values)
    return simulate(config, SimulationSettings(), Options(silent=True))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("protocol", only(["asp"], ["bsp", "asp", "ssp", "n-softsync"]))
def test_every_row_is_trained_once_a_pass(sets: Path, tmp_path: Path, protocol: str) -> None:
    done = run(sets, tmp_path / "run", protocol)
    expected = f"{open_shards(str(sets)).fingerprint:016x}"
    assert done.passes == {"whole": 4, "true": 4, "fingerprint": expected, "expected": expected}
    events = [event for event in done.events() if isinstance(event, PassEvent)]
    assert [(event.first, event.fingerprint) for event in events] == [(1 + at, expected) for at in range(4)]
    assert (
        "in each of the 4 passes that all workers completed, every row was trained exactly once"
        in (tmp_path / "run/report.html").read_text()
    )


@pytest.mark.usefixtures("undrawn")
def test_rows_of_refused_gradients_are_missed_and_the_run_says_so(sets: Path, tmp_path: Path) -> None:
    done = run(sets, tmp_path / "run", "k-bsp", k=2)
    assert done.rejected
    assert done.passes["whole"] > done.passes["true"]
    assert "not every row was trained once" in (tmp_path / "run/report.html").read_text()


@pytest.mark.usefixtures("undrawn")
def test_rows_that_bernoulli_sampling_draws_make_no_passes(sets: Path, tmp_path: Path) -> None:
    assert run(sets, tmp_path / "run", "bsp", sampling="bernoulli").passes["whole"] == 0


def test_passes_in_a_late_checkpoint_are_those_of_its_version() -> None:
    budget = Budget(1, steps=6, steps_per_epoch=2)
    coordinator = Coordinator(ASP(), budget, rate=lambda _: 1.0)
    budget.position.memory["seen"] = []
    coordinator.join(0, 0, 1, 0.0)
    taken, frozen = [], []
    for clock in range(6):
        list(coordinator.advance(0.0))
        budget.position.memory["seen"].append(clock)
        coordinator.push(0, 0, 1, clock, 0.0, StepMeasurements(1, 0.0, 0, 0.1, seen=RowSums(5, 0, 1)))
        for _, snapshot in coordinator.advance(0.0):
            if snapshot:
                taken.append(snapshot)
                frozen.append(json.dumps(asdict(snapshot)))
    assert len(taken) >= 3
    assert [json.dumps(asdict(snapshot)) for snapshot in taken] == frozen
    assert len(set(frozen)) == len(frozen)
