"""Rows divided by losses under asynchronous protocols, checked by an oracle that reads the log and the example ledger."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from tests.support.divisions import DividedRun, assert_divided_by_losses, assert_divided_over_others, drawn_rows
from tests.support.tiers import only
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from trainer import Result
from trainer.checkpoints.prune import WAITING, prune
from trainer.checkpoints.read import versions
from trainer.checkpoints.state import folder_of
from trainer.config import RunFacts
from trainer.protocols import PROTOCOLS
from trainer.rules import build_barriers, local_plan
from trainer.runlog.run_record import read_record
from trainer.sampling.partition_plan import PartitionPlan
from trainer.sampling.partition_stream import PartitionStream, plan_barriers
from trainer.sampling.repartition import RepartitionOptions
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.failures import Failure
from trainer.simulation.profiles import parse_profile
from trainer.simulation.replay import replay

# 60 rows and mini-batches of 9: passes begin within steps. Warm-up, two intervals, steps 0, 20 and 34 to 47.
ABOUT = DividedRun(rows=60, workers=3, batch=9, steps=48, warmup_epochs=3, ignore_epochs=1, interval=2)
OWN: dict[str, dict[str, Any]] = {
    "ssp": {"staleness_bound": 2},
    "k-asp": {"k": 2},
    "k-batch-asp": {"k": 4},
    "n-softsync": {"softsync": 1},
    "downpour": {"push_every": 4},
}
REFUSED = {"k-bsp", "k-batch-bsp"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workers = [rows_of(20, seed=worker, first_id=20 * worker) for worker in range(3)]
    return write_shards(tmp_path_factory.mktemp("set") / "shards", workers, EVAL_ROWS)


def run(
    shards: Path,
    output: Path,
    profile: str = "one-slow:4",
    failures: tuple[Failure, ...] = (),
    options: Any = QUIET,
    about: DividedRun = ABOUT,
    workers: int | None = None,
    **values: Any,
) -> Result:
    """Train in virtual time, with steps of 0.1 s."""
    own: dict[str, Any] = {"model": "logistic", "example_ledger": True} | about.flags
    own |= OWN.get(values.get("protocol", ""), {})
    machines = SimulationSettings(workers=workers, profile=parse_profile(profile), failures=failures)
    return simulate(make_config(shards, output, **own | values), machines, options)


@pytest.mark.parametrize(
    ("protocol", "profile"),
    only(
        [("asp", "one-slow:4"), ("ssp", "lognormal:1")],
        itertools.product([name for name in PROTOCOLS if name not in REFUSED], ["one-slow:4", "lognormal:1"]),
    ),
)
def test_rows_are_divided_by_the_losses_before(protocol: str, profile: str, shards: Path, tmp_path: Path) -> None:
    """Under each protocol, at uneven speeds: fast workers wait for all losses where an interval begins."""
    about = ABOUT._replace(importance="variance") if profile == "one-slow:4" else ABOUT._replace(heuristic="blocks")
    done = run(shards, tmp_path / "run", profile, about=about, protocol=protocol)
    assert_divided_by_losses(tmp_path / "run", about)
    assert replay(done.output).is_equal


@pytest.mark.full
@pytest.mark.parametrize(
    "values",
    [
        {"servers": 2},
        {"stop": "local"},
        {"exchange": "sync-switch", "fraction": 0.6},
        {"exchange": "strategy-switch", "alpha": 0.5},
    ],
    ids=str,
)
def test_servers_stages_and_ends_divide_alike(values: dict[str, Any], shards: Path, tmp_path: Path) -> None:
    """A switch in the middle of an interval keeps the losses of the stage before."""
    done = run(shards, tmp_path / "run", **values)
    assert_divided_by_losses(tmp_path / "run", ABOUT)
    assert replay(done.output).is_equal


@pytest.mark.parametrize("protocol", only(["ssp"], ["asp", "ssp", "dssp", "k-asp", "n-softsync", "downpour"]))
def test_a_death_at_any_time_changes_no_rule(protocol: str, shards: Path, tmp_path: Path) -> None:
    """Lose each worker in turn, in the warm-up, at barriers and in intervals; then roll the servers back."""
    times = np.arange(0.15, 15, 1.3).tolist()
    deaths = [Failure(place % 3, at_s, 0.4 + 0.9 * (place % 2)) for place, at_s in enumerate(times)]
    done = run(shards, tmp_path / "run", "lognormal:1", (*deaths, Failure(None, 6.05, 0.7)), protocol=protocol)
    assert_divided_by_losses(tmp_path / "run", ABOUT)
    assert replay(done.output).is_equal


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["asp", "ssp"])
@pytest.mark.parametrize("worker", range(3))
def test_a_death_at_each_time_alone(protocol: str, worker: int, shards: Path, tmp_path: Path) -> None:
    for number, at_s in enumerate(np.arange(0.05 + 0.7 * worker, 18, 4.4).tolist()):
        run(shards, tmp_path / str(number), "one-slow:4", (Failure(worker, at_s, 3.0),), protocol=protocol)
        assert_divided_by_losses(tmp_path / str(number), ABOUT)


@pytest.mark.parametrize(
    ("protocol", "step"), only([("asp", 8)], [("asp", 8), ("asp", 2), ("ssp", 4), ("k-asp", 9), ("downpour", 9)])
)
def test_a_run_resumes_from_any_checkpoint(
    protocol: str, step: int, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also between an interval's first workers and its last; the resumed run and its replay follow the same rule."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    values: dict[str, Any] = {"protocol": protocol, "checkpoint_every_s": 0.9}
    run(shards, tmp_path / "whole", **values)
    every = versions(tmp_path / "whole" / "checkpoints")
    assert len(every) > 10
    for middle in every[1:-1:step]:
        folder = tmp_path / str(middle)
        shutil.copytree(tmp_path / "whole", folder)
        (folder / "result.json").unlink()
        for later in every:
            if later > middle:
                shutil.rmtree(folder_of(folder / "checkpoints", later))
        resumed = run(shards, folder, options=RESUME, **values)
        assert_divided_by_losses(folder, ABOUT)
        assert replay(resumed.output).is_equal


@pytest.mark.parametrize(
    ("clock", "importance"), only([(24, "variance")], [(24, "variance"), (12, "average"), (30, "average")])
)
def test_other_workers_divide_by_the_same_losses(
    clock: int, importance: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Change workers in step, in an interval or in the warm-up; the same number of workers keeps the bits."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    about = ABOUT._replace(importance=importance)
    end = final(run(shards, tmp_path / "run", about=about, protocol="bsp")).tobytes()
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    for folder in (tmp_path / "run", tmp_path / "same"):
        cut_at(folder, clock)
    later = about._replace(workers=5, batch=10)
    done = run(shards, tmp_path / "run", options=RESUME, about=later, protocol="bsp", workers=5)
    assert_divided_over_others(tmp_path / "run", about, later, clock)
    assert replay(done.output).is_equal
    same = run(shards, tmp_path / "same", options=RESUME, about=about, protocol="bsp", workers=3)
    assert final(same).tobytes() == end


def cut_at(folder: Path, version: int) -> None:
    """Leave of a run what a kill leaves after the checkpoint of a version."""
    (folder / "result.json").unlink()
    found = versions(folder / "checkpoints")
    assert version in found
    for later in found:
        if later > version:
            shutil.rmtree(folder_of(folder / "checkpoints", later))


@pytest.mark.parametrize(
    ("protocol", "place"), only([], [("asp", 0.6), ("ssp", 0.3), ("downpour", 0.9), ("n-softsync", 0.6)])
)
def test_asynchronous_workers_are_followed_by_others(
    protocol: str, place: float, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill workers at steps of their own, twice: a replay has the bits, and the last interval has one worker per row."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    about = ABOUT._replace(steps=60)
    values: dict[str, Any] = {"protocol": protocol, "checkpoint_every_s": 0.3}
    run(shards, tmp_path / "run", "lognormal:1", about=about, **values)
    found = versions(tmp_path / "run" / "checkpoints")
    cut_at(tmp_path / "run", found[int(place * len(found) / 2)])
    run(shards, tmp_path / "run", "lognormal:1", options=RESUME, about=about._replace(batch=10), workers=5, **values)
    cut_at(tmp_path / "run", versions(tmp_path / "run" / "checkpoints")[-8])
    about = about._replace(batch=8)
    done = run(shards, tmp_path / "run", "lognormal:1", options=RESUME, about=about, workers=2, **values)
    config = read_record(tmp_path / "run").config
    assert [each.workers for each in config.cohorts.entries] == [3, 5, 2]
    plan = config.partition_plan(60, 3)
    last = drawn_rows(tmp_path / "run", 4)
    owners = last[last["clock"] >= plan.first_steps[-1]].groupby("row")["worker"].agg(["min", "max"])
    assert (owners["min"] == owners["max"]).all()
    assert replay(done.output).is_equal


@pytest.mark.parametrize("protocol", sorted(REFUSED))
def test_protocols_that_refuse_gradients_are_refused(protocol: str) -> None:
    line = f"--repartition importance needs the losses of all mini-batches, of which --protocol {protocol} refuses some"
    with pytest.raises(UsageError) as raised:
        make_config(protocol=protocol, repartition="importance")
    assert str(raised.value) == f"{line}: give another --protocol, or --repartition random"


def facts_of(rows: int = 60, workers: int = 3) -> RunFacts:
    return RunFacts(workers, rows, 10, 0)


def barriers_of(protocol: str, **values: Any) -> tuple[int, ...]:
    own = OWN.get(protocol, {})
    return build_barriers(make_config(protocol=protocol, **ABOUT.flags | own | values), facts_of()).clocks


def test_barriers_are_where_losses_must_be_in_order() -> None:
    """Epochs of 6 2/3 steps: only counted epochs, intervals, and passes if workers lack their own gradients."""
    assert barriers_of("asp") == barriers_of("ssp") == (13, 14, 20, 34)
    assert barriers_of("k-batch-asp") == barriers_of("n-softsync") == (13, 14, 20, 26, 27, 34)
    assert barriers_of("asp", ignore_epochs=0) == (6, 7, 13, 14, 20, 34)
    assert barriers_of("asp", ignore_epochs=2) == (20, 34)
    assert barriers_of("bsp") == ()
    random = make_config(protocol="asp", repartition="random", steps=48)
    assert build_barriers(random, facts_of()).clocks == ()


@given(
    rows=st.integers(12, 50),
    batches=st.lists(st.integers(1, 4), min_size=2, max_size=3).map(tuple),
    warmup=st.integers(1, 4),
    ignored=st.integers(0, 2),
    interval=st.integers(1, 3),
    reads=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_barrier_is_between_two_losses_of_a_row(
    rows: int, batches: tuple[int, ...], warmup: int, ignored: int, interval: int, reads: bool
) -> None:
    """Find a barrier between any two that count, unless one worker has both and reads its own writes."""
    options = RepartitionOptions(
        repartition="importance", warmup_epochs=warmup + ignored, interval=interval, ignore_epochs=ignored
    )
    per_epoch = rows // sum(batches)
    epochs = warmup + ignored + 3 * interval + 1
    assume(rows >= 2 * sum(batches))
    plan = PartitionPlan(options, rows, batches, epochs * per_epoch, epochs, seed=3)
    barriers = plan_barriers(plan, reads_own_writes=reads).clocks
    streams = [PartitionStream(plan, worker) for worker in range(len(batches))]
    losses = np.random.default_rng(rows).random(rows)
    visits: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    for clock, (worker, stream) in itertools.product(range(plan.first_steps[-1]), enumerate(streams)):
        number = plan.phase(clock).number
        for row, ordinal in zip(*stream.draw(clock, losses), strict=True):
            if ordinal:
                visits[number, int(row)].append((clock, worker, int(ordinal)))
    assert set(plan.first_steps) <= set(barriers)
    assert len(visits) == rows * plan.intervals, "every row has losses in every phase"
    for each in visits.values():
        assert [ordinal for _, _, ordinal in each] == list(range(1, len(each) + 1))
        for (clock, worker, _), (later, other, _) in itertools.pairwise(each):
            needs_none = worker == other and (reads or clock == later)
            assert needs_none or any(clock < barrier <= later for barrier in barriers)


@given(
    rows=st.integers(24, 60),
    cohorts=st.lists(
        st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), st.floats(0, 1), st.integers(0, 99)),
        min_size=2,
        max_size=4,
    ),
    ignored=st.integers(0, 1),
    interval=st.integers(1, 3),
    reads=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_every_row_has_all_losses_whoever_draws_it(
    rows: int, cohorts: list[tuple[tuple[int, ...], float, int]], ignored: int, interval: int, reads: bool
) -> None:
    """Change workers anywhere, each at a step of its own between two barriers: no loss is lacking or out of order."""
    options = RepartitionOptions(
        repartition="importance", warmup_epochs=2 + ignored, interval=interval, ignore_epochs=ignored
    )
    epochs = 2 + ignored + 3 * interval + 1
    per_epoch = rows // sum(cohorts[0][0])
    plan = PartitionPlan(options, rows, cohorts[0][0], 2 * epochs * per_epoch, epochs, seed=3)
    visits: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    barriers: list[int] = []
    ends = np.empty(0, np.int64)
    for number, (batches, share, seed) in enumerate(cohorts):
        if number:
            plan = plan.followed_by(ends.tolist(), batches, steps=plan.clock + 2 * epochs * rows)
        last = plan.first_steps[-1]
        own = plan_barriers(plan, reads_own_writes=reads).clocks
        barriers += own
        # The first step that no worker is beyond, and the barrier that all have reached.
        ends = np.full(len(batches), last)
        if number < len(cohorts) - 1:
            clock = plan.clock + int(share * (last - plan.clock))
            reached = max([plan.clock, *(each for each in own if each <= clock)])
            following = min([last, *(each for each in own if each > clock)])
            ends = np.random.default_rng(seed).integers(reached, max(reached, following), len(batches), endpoint=True)
        for worker, end in enumerate(ends.tolist()):
            stream = PartitionStream(plan, worker)
            for clock in range(plan.clock, end):
                phase = plan.phase(clock).number
                losses = np.random.default_rng([rows, phase]).random(rows)
                for row, ordinal in zip(*stream.draw(clock, losses), strict=True):
                    if ordinal:
                        visits[phase, int(row)].append((clock, worker + 100 * number, int(ordinal)))
        assert plan.left_out == 0 or not plan.start
    for phase in range(plan.phases[-1].number):
        for row in range(rows):
            each = sorted(visits[phase, row])
            assert [ordinal for _, _, ordinal in each] == list(range(1, (interval if phase else 2) + 1)), (phase, row)
            for (clock, worker, _), (later, other, _) in itertools.pairwise(each):
                needs_none = worker // 100 != other // 100 or (worker == other and (reads or clock == later))
                assert needs_none or any(clock < barrier <= later for barrier in barriers)


def ends_before_barriers(plan: PartitionPlan, share: float, seed: int, *, reads: bool) -> list[int]:
    """Return clocks at which workers may all end in the warm-up, each anywhere between two barriers."""
    clocks = plan_barriers(plan, reads_own_writes=reads).clocks
    clock = plan.clock + int(share * (plan.dealt_until - plan.clock))
    reached = max([plan.clock, *(each for each in clocks if each <= clock)])
    following = min([plan.dealt_until, *(each for each in clocks if each > clock)])
    slow, fast = sorted((reached, max(reached, following)))
    ends: list[int] = np.random.default_rng(seed).integers(slow, fast, len(plan.batches), endpoint=True).tolist()
    return ends


@given(
    rows=st.integers(24, 60),
    cohorts=st.lists(
        st.tuples(st.integers(1, 4), st.floats(0.01, 1), st.floats(0, 1), st.integers(0, 999)), min_size=2, max_size=4
    ),
    warmup=st.integers(1, 4),
    ignored=st.integers(0, 3),
    reads=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_warm_up_has_every_row_once_an_epoch(
    rows: int, cohorts: list[tuple[int, float, float, int]], warmup: int, ignored: int, reads: bool
) -> None:
    """Change workers anywhere, and mini-batches up to half of the rows: a step has different rows, and none is left out.

    Only rows that fill the last step of an epoch which other workers complete are drawn again; their losses do not count."""
    ignored = min(ignored, warmup - 1)
    options = RepartitionOptions(repartition="importance", warmup_epochs=warmup, interval=1, ignore_epochs=ignored)
    epochs = warmup + 3
    drawn: dict[int, Counter[int]] = defaultdict(Counter)
    steps: dict[int, list[int]] = defaultdict(list)
    plan: PartitionPlan | None = None
    ends: list[int] = []
    for number, (workers, size, share, seed) in enumerate(cohorts):
        batches = (max(1, int(size * rows / 2 / workers)),) * workers
        if plan is None:
            plan = PartitionPlan(options, rows, batches, 9 * epochs * rows, epochs, seed=3)
        else:
            plan = plan.followed_by(ends, batches, steps=plan.clock + 9 * epochs * rows)
        if plan.start:
            break  # all workers have reached the first interval
        assert plan.left_out == 0
        is_last = number == len(cohorts) - 1
        ends = [plan.dealt_until] * workers if is_last else ends_before_barriers(plan, share, seed, reads=reads)
        for worker, end in enumerate(ends):
            stream = PartitionStream(plan, worker)
            for clock in range(plan.clock, end):
                row_numbers, ordinals = stream.draw(clock, None)
                first = (clock - plan.clock) * plan.batch + sum(batches[:worker])
                turns, inside = plan.place(first + np.arange(len(row_numbers)))
                steps[clock] += row_numbers.tolist()
                for row, turn, place, ordinal in zip(row_numbers, turns, inside, ordinals, strict=True):
                    counts = place < plan.count(int(turn))
                    assert ordinal == (turn - ignored + 1 if counts and ignored <= turn < warmup else 0)
                    drawn[int(turn)][int(row)] += bool(counts)
    assert all(len(set(step)) == len(step) for step in steps.values())
    for epoch in range(warmup):
        assert drawn[epoch] == Counter(range(rows))


def test_no_push_of_downpour_crosses_a_barrier() -> None:
    config = make_config(protocol="downpour", **ABOUT.flags | OWN["downpour"])
    ends = [0]
    while ends[-1] < 48:
        ends.append(ends[-1] + len(local_plan(config, facts_of(), ends[-1]).rates))
    assert set(ends) == {0, 1, 5, 9, 13, 14, 17, 20, 21, 25, 29, 33, 34, 37, 41, 45, 49}
