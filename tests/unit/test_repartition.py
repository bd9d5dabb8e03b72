"""Repartitioning: which rows a worker draws in each phase, and that a run keeps its bits when it resumes."""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections import Counter
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import UsageError
from pipeline.core.importance import Heuristic, Measure, blocks, importance, stripes
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from trainer import Result
from trainer.checkpoints.prune import WAITING, prune
from trainer.checkpoints.read import versions
from trainer.checkpoints.state import folder_of
from trainer.data.repartition import PartitionSampler
from trainer.data.rows import Rows
from trainer.sampling.base import LossTable, SetSizes
from trainer.sampling.loss_statistics import LossStatistics
from trainer.sampling.partition_plan import PartitionPlan
from trainer.sampling.partition_stream import PartitionStream
from trainer.sampling.remainder import MOST_OPEN
from trainer.sampling.repartition import RepartitionOptions
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay


def options_of(kind: Any = "importance", warmup: int = 3, interval: int = 2, ignored: int = 1, **about: Any) -> Any:
    if kind == "random":
        return RepartitionOptions(repartition="random")
    return RepartitionOptions(repartition=kind, warmup_epochs=warmup, interval=interval, ignore_epochs=ignored, **about)


@given(
    rows=st.integers(2, 60),
    batches=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    seed=st.integers(0, 3),
)
def test_a_random_deal_has_every_row_once_an_epoch(rows: int, batches: tuple[int, ...], seed: int) -> None:
    """In every epoch, and never in two mini-batches of a step, which would both update its entry of the table."""
    if rows < 2 * sum(batches):
        with pytest.raises(UsageError, match="needs a --batch-size of at most half of the"):
            PartitionPlan(options_of("random"), rows, batches, 10, epochs=5, seed=seed)
        return
    steps = 5 * rows // sum(batches) + 1
    plan = PartitionPlan(options_of("random"), rows, batches, steps, epochs=5, seed=seed)
    samplers = [PartitionSampler(rows_in_order(rows), plan, worker, None) for worker in range(len(batches))]
    drawn = [[np.asarray(sampler.draw(clock).places) for sampler in samplers] for clock in range(steps)]
    assert [len(part) for part in drawn[0]] == list(batches)
    assert all(len(np.unique(np.concatenate(step))) == sum(batches) for step in drawn)
    order = np.concatenate([part for step in drawn for part in step])
    epochs = [order[epoch * rows : (epoch + 1) * rows] for epoch in range(5)]
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs)
    if rows > 20:
        assert len({tuple(epoch) for epoch in epochs}) == 5


BATCHES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@settings(max_examples=40)
@given(
    rows=st.integers(32, 60),
    cohorts=st.lists(st.tuples(BATCHES, st.integers(0, 16)), min_size=2, max_size=4),
    seed=st.integers(0, 3),
)
def test_deals_are_one_sequence_for_all_workers(
    rows: int, cohorts: list[tuple[tuple[int, ...], int]], seed: int
) -> None:
    """Draw every row once an epoch by workers in step, and the next ones from any step on, and never twice in a step."""
    plan = plan_of(rows, cohorts[0][0], seed)
    drawn: list[np.ndarray] = []
    for (_, steps), (batches, _) in pairwise([*cohorts, cohorts[0]]):
        streams = streams_of(plan)
        end = plan.clock + steps
        for clock in range(plan.clock, end):
            drawn.append(np.concatenate([stream.draw(clock, None).numbers for stream in streams]))
        plan = plan.followed_by([end] * len(plan.batches), batches)
    assert all(len(np.unique(step)) == len(step) for step in drawn)
    order = np.concatenate([*drawn, np.empty(0, np.int64)])
    for begin in range(0, len(order), rows):
        epoch = order[begin : begin + rows]
        assert len(np.unique(epoch)) == len(epoch)


@settings(max_examples=40)
@given(
    rows=st.integers(32, 60),
    cohorts=st.lists(st.tuples(BATCHES, st.lists(st.integers(0, 16), min_size=4, max_size=4)), min_size=2, max_size=4),
    seed=st.integers(0, 3),
)
def test_other_workers_complete_the_deals_of_any_clocks(
    rows: int, cohorts: list[tuple[tuple[int, ...], list[int]]], seed: int
) -> None:
    """End each worker at a step of its own: only epochs that are too old for a change of workers lack rows.

    The last workers complete an epoch that nobody has begun before."""
    plan = plan_of(rows, cohorts[0][0], seed)
    drawn: dict[int, Counter[int]] = {}
    left_out = 0
    for (_, counts), (batches, _) in pairwise(cohorts):
        ends = [plan.clock + count for count in counts[: len(plan.batches)]]
        count_rows(plan, ends, drawn)
        later = plan.followed_by(ends, batches)
        assert len(later.turns) <= MOST_OPEN
        left_out += later.left_out
        plan = later
        lacking = sum(rows - drawn.get(epoch, Counter()).total() for epoch in range(plan.turns.start))
        assert lacking == left_out
    end = plan.turns.stop + 1
    steps = -(-plan.begin(end) // plan.batch)
    count_rows(plan, [plan.clock + steps] * len(plan.batches), drawn)
    assert all(max(counter.values()) == 1 for counter in drawn.values())
    assert all(drawn[epoch].total() == rows for epoch in range(plan.turns.start, end))


def test_a_step_with_rows_that_were_left_repeats_none() -> None:
    """Leave 12 rows of worker 0; the third step of the next workers has two of them, and three of the next epoch."""
    for seed in range(40):
        plan = plan_of(32, (4, 4), seed).followed_by([1, 4], (2, 3))
        assert [plan.count(turn) for turn in plan.turns] == [12]
        streams = streams_of(plan)
        for clock in range(4, 12):
            step = np.concatenate([stream.draw(clock, None).numbers for stream in streams])
            assert len(np.unique(step)) == 5


def plan_of(rows: int, batches: tuple[int, ...], seed: int) -> PartitionPlan:
    return PartitionPlan(options_of("random"), rows, batches, 10, epochs=5, seed=seed)


def streams_of(plan: PartitionPlan) -> list[PartitionStream]:
    return [PartitionStream(plan, worker) for worker in range(len(plan.batches))]


def count_rows(plan: PartitionPlan, ends: list[int], drawn: dict[int, Counter[int]]) -> None:
    """Count the rows of workers up to their last clocks by epoch.

    A position in the rows of all workers belongs to what is left of an interrupted epoch, one after the other, and then to
    whole epochs."""
    bounds = list(accumulate(map(plan.count, plan.turns)))
    for worker, (stream, end) in enumerate(zip(streams_of(plan), ends, strict=True)):
        for clock in range(plan.clock, end):
            first = (clock - plan.clock) * plan.batch + sum(plan.batches[:worker])
            for position, row in enumerate(stream.draw(clock, None).numbers.tolist(), first):
                index = bisect_right(bounds, position)
                if index == len(bounds):
                    index += (position - (bounds[-1] if bounds else 0)) // plan.rows
                drawn.setdefault(plan.turns.start + index, Counter())[row] += 1


@pytest.mark.parametrize(("warmup", "interval"), [(10, 10), (10, 30), (40, 30), (10, 1), (60, 10), (30, 8), (15, 15)])
@pytest.mark.parametrize("batch", [128, 1024])
def test_the_number_of_intervals_is_that_of_the_paper(warmup: int, interval: int, batch: int) -> None:
    """floor((E - W) / I) for its settings: E = 100 epochs of 50,000 rows, which the mini-batch does not divide."""
    options = options_of(warmup=warmup, interval=interval, ignored=5)
    steps = 100 * (50_000 // batch)
    plan = PartitionPlan(options, 50_000, (batch // 4,) * 4, steps, epochs=100, seed=0)
    planned = (100 - warmup) // interval
    # The steps of 100 epochs are 1.7 % fewer than those of 100 passes, or three passes of one epoch each.
    assert planned - 3 * (interval == 1) <= plan.intervals <= planned
    assert plan.phase(steps - 1).number == plan.intervals
    # Step by step: a phase ends with the step that completes its epochs, or its passes over the rows of each worker.
    starts: list[int] = []
    drawn = 0
    for clock in range(steps):
        passes = interval if starts else warmup
        if drawn >= passes * 50_000 and len(starts) < planned:
            starts.append(clock)
            drawn = 0
        drawn += batch
    assert plan.first_steps == tuple(starts)


@pytest.mark.parametrize("kind", ["fixed", "random"])
def test_options_of_intervals_are_refused_without_intervals(kind: Any) -> None:
    with pytest.raises(UsageError, match=f"--interval is for --repartition importance, not {kind}: leave it out"):
        RepartitionOptions(repartition=kind, interval=3)


def test_a_run_that_ends_in_its_warm_up_is_refused() -> None:
    with pytest.raises(UsageError, match="--warmup-epochs 10 take all 39 steps of the run"):
        PartitionPlan(options_of(warmup=10, ignored=5), 500, (64, 64), 39, epochs=10, seed=0)


def rows_in_order(count: int) -> Rows:
    return Rows(np.zeros((count, 1, 1, 1), np.uint8), np.zeros(count, np.int64), np.arange(count))


def loss_of(row: int, visit: int) -> float:
    """Return a loss that differs by row and visit, whose mean and variance over visits rank rows differently."""
    return float(np.float32((row * 37 % 101) / 8 + (visit % 3) * (row * 53 % 89) / 16))


@pytest.mark.parametrize("measure", ["average", "variance"])
@pytest.mark.parametrize("heuristic", ["stripes", "blocks"])
@pytest.mark.parametrize(("rows", "interval"), [(101, 2), (96, 1)])
def test_phases_follow_the_rule(measure: Measure, heuristic: Heuristic, rows: int, interval: int) -> None:
    """Intervals divide the rows by the losses of the phase before, in a table that workers merge as servers do."""
    options = options_of(interval=interval, importance=measure, heuristic=heuristic)
    batches = (8, 8, 8)
    plan = PartitionPlan(options, rows, batches, 60, epochs=60 * 24 / rows, seed=5)
    statistics = LossStatistics(measure)
    samplers = [PartitionSampler(rows_in_order(rows), plan, worker, statistics) for worker in range(3)]
    table: LossTable = np.zeros(statistics.length(SetSizes(rows, 1, 0)), np.float32)
    visits: Counter[int] = Counter()
    drawn: list[tuple[int, int, int, float]] = []  # clock, worker, row, loss
    for clock in range(60):
        changes = []
        for worker, sampler in enumerate(samplers):
            draw = sampler.draw(clock, table)
            assert draw.keys is not None
            losses = []
            for row in np.asarray(draw.places).tolist():
                losses.append(loss_of(row, visits[row]))
                visits[row] += 1
                drawn.append((clock, worker, row, losses[-1]))
            array = np.array(losses, np.float32)
            changes.append(statistics.updated(table, draw.keys, array, array > 0, 3) - table)
        table = (table + np.sum(changes, axis=0) / np.float32(3)).astype(np.float32)
    history = pd.DataFrame(drawn, columns=["clock", "worker", "row", "loss"])
    # By the definition: the first visits of a phase count, in the warm-up after the ignored epoch.
    first = -(-3 * rows // 24)
    length = -(-interval * -(-rows // 3) // 8)
    number = (60 - first) // length
    starts = [0, *(first + length * place for place in range(number)), 60]
    for place in range(1, number + 1):
        now = history[(history.clock >= starts[place]) & (history.clock < starts[place + 1])]
        before = history[(history.clock >= starts[place - 1]) & (history.clock < starts[place])].copy()
        before["epoch"] = before.groupby("row").cumcount() + 1
        ignored, last = (1, 3) if place == 1 else (0, interval)
        counted = before[(before.epoch > ignored) & (before.epoch <= last)]
        values = importance(
            *(counted[name].to_numpy() for name in ("row", "epoch", "loss")),
            rows=rows,
            measure=measure,
            num_epochs=last - ignored,
        )
        expected = {"stripes": stripes, "blocks": blocks}[heuristic](values, 3)
        owners = now.groupby("row").worker.agg(["min", "max"])
        assert owners.index.tolist() == list(range(rows)), "every row has a worker"
        assert (owners["min"] == owners["max"]).all()
        gaps = np.diff(np.sort(values))
        assert gaps[gaps > 0].min() > 1e-4, "float32 ranks these rows as float64 does"
        assert owners["min"].tolist() == expected.tolist()
        counts = now.groupby("row").clock.count()
        assert (counts >= interval).all()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"exchange": "d-psgd"}, "which --exchange d-psgd lacks: give --exchange parameter-server or all-reduce, or"),
        ({"sampling": "balanced"}, "draws passes over all rows of a set: leave out --sampling balanced"),
        ({"follow": True}, "draws passes over all rows of a set: leave out --follow"),
        (
            {"warmup_epochs": 5, "ignore_epochs": 5},
            "--ignore-epochs 5 leaves no losses of --warmup-epochs 5: give fewer",
        ),
    ],
)
def test_options_that_exclude_a_repartition(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as raised:
        make_config(**{"protocol": "bsp", "repartition": "importance", **values})
    assert line in str(raised.value)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workers = [rows_of(20, seed=worker, first_id=20 * worker) for worker in range(3)]
    return write_shards(tmp_path_factory.mktemp("set") / "shards", workers, EVAL_ROWS)


def run(shards: Path, output: Path, options: Any = QUIET, **values: Any) -> Result:
    settings: dict[str, Any] = {
        "protocol": "bsp", "batch_size": 12, "steps": 30, "model": "logistic", "example_ledger": True,
    }  # fmt: skip
    if "repartition" not in values:
        settings |= {"repartition": "importance", "warmup_epochs": 2, "ignore_epochs": 0, "interval": 1}
    return simulate(make_config(shards, output, **(settings | values)), SimulationSettings(), options)


@pytest.mark.parametrize(
    "values", [{}, {"exchange": "all-reduce", "importance": "variance"}, {"repartition": "random"}]
)
def test_a_repartitioned_run_resumes_with_its_bits(
    values: dict[str, Any], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint of each phase; a replay has the same bits."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    whole = run(shards, tmp_path / "whole", **values)
    assert replay(whole.output).is_equal
    expected = final(whole).tobytes()
    versions_of_run = versions(tmp_path / "whole" / "checkpoints")
    for middle in versions_of_run[1:-1:2]:
        shutil.copytree(tmp_path / "whole", tmp_path / str(middle))
        (tmp_path / str(middle) / "result.json").unlink()
        for later in versions_of_run:
            if later > middle:
                shutil.rmtree(folder_of(tmp_path / str(middle) / "checkpoints", later))
        resumed = run(shards, tmp_path / str(middle), RESUME, **values)
        assert final(resumed).tobytes() == expected, middle


@pytest.mark.parametrize(
    "values",
    [
        {"protocol": "asp", "stop": "local"},
        {"protocol": "ssp", "stop": "local", "servers": 2},
        {"protocol": "downpour", "stop": "local", "push_every": 29},
        {"exchange": "d-psgd"},
        {"exchange": "sync-switch"},
    ],
    ids=lambda values: values.get("protocol", values.get("exchange")),
)
def test_random_deals_need_no_common_steps(values: dict[str, Any], shards: Path, tmp_path: Path) -> None:
    """Each worker changes over at its own clock. 30 steps of 12 rows are 6 epochs of 60 rows."""
    settings: dict[str, Any] = {"repartition": "random", "model": "logistic", "batch_size": 12, "steps": 30}
    settings |= {"example_ledger": True} | values
    machines = SimulationSettings(profile=parse_profile("one-slow:3"))
    done = simulate(make_config(shards, tmp_path / "run", **settings), machines, QUIET)
    ledger = pd.concat(pd.read_parquet(path) for path in sorted((tmp_path / "run" / "examples").glob("*.parquet")))
    counts = np.bincount(ledger.id.to_numpy(), minlength=60)
    if "stop" in values or values["exchange"] == "d-psgd":
        assert set(counts) == {6}
    else:  # fast workers make more of the steps
        assert counts.sum() == 360
        assert counts.min() >= 3
    assert replay(done.output).is_equal


def test_the_ledger_says_how_the_rows_were_divided(shards: Path, tmp_path: Path) -> None:
    """Every row once per epoch of the warm-up; then as often as other rows, up to a pass."""
    run(shards, tmp_path / "run")
    ledger = pd.concat(pd.read_parquet(path) for path in sorted((tmp_path / "run" / "examples").glob("*.parquet")))
    ids = ledger.id.to_numpy()
    assert sorted(ids[:60]) == sorted(ids[60:120]) == list(range(60))
    assert np.ptp(np.bincount(ids)) <= 2


def test_a_run_that_has_no_rows_or_another_length_is_refused(shards: Path, tmp_path: Path) -> None:
    """The last interval lasts until the end, so that another length would change the rows of steps that were made."""
    toy = SimulationSettings(compute="quadratic", workers=3, rows=60)
    config = make_config("", tmp_path / "toy", protocol="bsp", repartition="random")
    with pytest.raises(UsageError, match=r"^--repartition random divides rows, --compute quadratic has none"):
        simulate(config, toy, QUIET)
    with pytest.raises(UsageError, match="needs a --batch-size of at most half of the 60 rows, got 33"):
        run(shards, tmp_path / "large", batch_size=33)
    run(shards, tmp_path / "run")
    with pytest.raises(UsageError, match="--steps"):
        run(shards, tmp_path / "run", RESUME, steps=40)
    assert run(shards, tmp_path / "deals", repartition="random").output
    run(shards, tmp_path / "deals", RESUME, repartition="random", steps=40)
