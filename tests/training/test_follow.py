"""Training on a set that grows: more rows from the next pass on, and the same bits for the same generations."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from pipeline.core.errors import UsageError
from pipeline.core.shardset.generations import as_of, generations
from pipeline.core.storage.store import Store
from tests.conftest import make_rows, write_binary
from tests.support.configs import change, make_config
from tests.support.stream_runs import take
from tests.support.trainer_runs import Training, train_here
from trainer.config import Data
from trainer.context import RunContext
from trainer.data.follow import Following, Stretch
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.data.pinned import open_pinned
from trainer.data.rows import Rows
from trainer.data.sampling import FollowSampler, RowSampler
from trainer.data.shards import Shards
from trainer.home.place import StorePlace
from trainer.run_files import CONFIG, METRICS
from trainer.runlog.kinds.training import AppendedEvent
from trainer.runlog.read import iter_events
from trainer.runlog.run_record import RunRecord, SavedRun, saved_run
from trainer.sampling.orders import permutation
from trainer.worker.follow import GrowingRows, record, recorded

LABELS, IMAGES = make_rows(900, pixels=192)
FLAGS = ("--model", "logistic", "--protocol", "bsp", "--batch-size", "60", "--threads", "1", "--recipe", "constant")
WORKERS = 3


class Planned:
    """A source whose rows grow at the looks that are planned."""

    def __init__(self, growth: list[int]) -> None:
        self.growth, self.looks = growth, 0

    def next(self, now: Stretch, position: int, turn: int) -> Stretch | None:
        self.looks += 1
        more = self.growth[self.looks - 1] if self.looks <= len(self.growth) else 0
        return Stretch(position, turn, now.rows + more, now.generation + 1) if more else None

    def rows(self, generation: int) -> Rows:
        return Rows(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 7),
    growth=st.lists(st.integers(0, 3), max_size=12),
    batch=st.integers(1, 9),
    clocks=st.integers(1, 20),
    again=st.randoms(use_true_random=False),
)
def test_mini_batches_are_those_of_consecutive_passes(
    rows: int, growth: list[int], batch: int, clocks: int, again: object
) -> None:
    expected: list[int] = []
    size, turn = rows, 0
    while len(expected) < batch * clocks:
        expected += permutation(size, 5, 2, turn).tolist()
        turn += 1
        size += growth[turn - 1] if turn <= len(growth) else 0
    following = Following([Stretch(0, 0, rows, 0)], Planned(growth))

    def order(count: int, number: int) -> np.ndarray:
        return permutation(count, 5, 2, number)

    drawn = [following.chosen(batch, clock, order)[1].tolist() for clock in range(clocks)]
    assert [row for part in drawn for row in part] == expected[: batch * clocks]
    # Whoever has the stretches draws any of them again, in any order, and decides nothing anew.
    later = Following(list(following.stretches), Planned([]))
    mixed = list(range(clocks))
    again.shuffle(mixed)  # type: ignore[attr-defined]
    for clock in mixed:
        assert later.chosen(batch, clock, order)[1].tolist() == drawn[clock]
    assert later.stretches == following.stretches


@pytest.fixture(scope="module")
def growing(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A set of four generations: 150, 150, 300 and 300 rows, with copies from the third on."""
    root = tmp_path_factory.mktemp("growing")
    files = sorted(write_binary(root / "in", LABELS, IMAGES, files=6).iterdir())
    for batch, some in enumerate((files[:1], files[1:2], files[2:4], files[4:])):
        take(spark.sparkContext, root / "set", batch, some, WORKERS, window_rows=500)
    return root / "set"


def test_a_run_sees_the_set_as_of_its_generation(growing: Path) -> None:
    newest = open_shards(str(growing))
    assert (newest.rows, len(generations(newest))) == (900, 4)
    first = open_pinned(Data(shards=str(growing), generation=0))
    assert first.rows == 150
    assert sum(first.worker_rows(worker) for worker in range(WORKERS)) == 150
    assert sorted(np.concatenate([load_worker(first, worker).ids for worker in range(WORKERS)])) == list(range(150))
    with pytest.raises(UsageError, match=r"has generations 0\.\.3"):
        open_pinned(Data(shards=str(growing), generation=4))


def test_a_run_is_pinned_to_its_own_or_the_newest_generation(growing: Path, tmp_path: Path) -> None:
    config = make_config(growing, tmp_path)
    context = RunContext.from_config(config).pinned(SavedRun())
    assert (context.config.data.generation, context.shards.rows) == (3, 900)
    earlier = RunContext.from_config(change(config, generation=1))
    (tmp_path / CONFIG).write_text(json.dumps(RunRecord.from_config(earlier.config, earlier.shards).to_json()))
    resumed = RunContext.from_config(config).pinned(saved_run(tmp_path))
    assert (resumed.config.data.generation, resumed.shards.rows) == (1, 300)
    anew = RunContext.from_config(config).pinned(saved_run(tmp_path, overwrite=True))
    assert anew.config == context.config


def labels_of(sampler: RowSampler, clocks: int) -> np.ndarray:
    """The labels of the first mini-batches."""
    draws = [sampler.draw(clock) for clock in range(clocks)]
    return np.concatenate([draw.rows.labels[draw.places] for draw in draws])


def test_a_worker_continues_with_the_appended_rows_and_no_others(growing: Path, tmp_path: Path) -> None:
    newest = open_shards(str(growing))
    first, second = as_of(newest, 0), as_of(newest, 2)
    rows = load_worker(first, 1)
    source = GrowingRows(tmp_path, tmp_path, 1, first, rows, targets=False, looks=True)
    sampler = FollowSampler(source.following(), 10, seed=3, worker=1)
    size = len(rows)
    labels = labels_of(sampler, 30)
    stretches = sampler.follow.stretches
    assert [stretch.generation for stretch in stretches] == [0, 3]
    assert stretches[1][:2] == (size, 1)
    whole = load_worker(newest, 1)
    assert stretches[1].rows == len(whole)
    grown = source.rows(3)
    for name in ("images_NCHW", "labels", "ids", "hashes"):
        assert np.array_equal(getattr(grown, name), getattr(whole, name)), name
    orders = [permutation(size, 3, 1, 0), *(permutation(len(whole), 3, 1, turn) for turn in (1, 2))]
    assert labels.tolist() == np.concatenate([whole.labels[order] for order in orders])[:300].tolist()
    # The copies of sparse buckets that a window has left behind are rows of the worker too.
    assert len(load_worker(second, 1)) > 600 // WORKERS


def test_what_was_decided_is_read_again_and_never_decided_anew(growing: Path, tmp_path: Path) -> None:
    newest = open_shards(str(growing))
    first = as_of(newest, 0)
    rows = load_worker(first, 0)
    planned = record(tmp_path, 0, Stretch(2 * len(rows), 2, as_of(newest, 1).worker_rows(0), 1))
    assert record(tmp_path, 0, planned._replace(generation=3)) == planned
    assert recorded(tmp_path, 0) == [planned]
    assert recorded(tmp_path, 1) == []
    source = GrowingRows(tmp_path, tmp_path, 0, first, rows, targets=False, looks=False)
    drawn = labels_of(FollowSampler(source.following(), 10, seed=3, worker=0), 20)
    size, grown = len(rows), load_worker(as_of(newest, 1), 0)
    orders = [permutation(size, 3, 0, 0), permutation(size, 3, 0, 1)]
    orders += [permutation(len(grown), 3, 0, turn) for turn in (2, 3)]
    assert drawn.tolist() == np.concatenate([grown.labels[order] for order in orders])[:200].tolist()
    # A start that finds more rows, and has not read the record of an earlier one, which it thus obeys and logs.
    late = GrowingRows(tmp_path, tmp_path, 0, first, rows, targets=False, looks=True)
    assert late.next(Stretch(0, 0, size, 0), planned.position, 2) == planned
    [event] = iter_events(tmp_path / METRICS)
    assert isinstance(event, AppendedEvent)
    assert (event.rows, event.set_generation) == (planned.rows, 1)


def followed(output: Path) -> dict[str, dict[str, int]]:
    return {path.name: json.loads(path.read_text()) for path in sorted((output / "followed").iterdir())}


def test_a_following_run_adds_generations_and_repeats_its_bits(growing: Path, tmp_path: Path) -> None:
    start = (*FLAGS, "--generation", "0", "--follow")
    one = train_here(growing, tmp_path / "one", *start, "--steps", "30")
    events = one.events("appended")
    assert sorted(event["worker"] for event in events) == list(range(WORKERS))
    first = open_pinned(Data(shards=str(growing), generation=0))
    for event in events:
        assert (event["set_generation"], event["turn"]) == (3, 1)
        assert event["position"] == first.worker_rows(event["worker"])
    two = train_here(growing, tmp_path / "two", *start, "--steps", "30")
    assert np.array_equal(one.vector(), two.vector())
    alone = train_here(growing, tmp_path / "alone", *FLAGS, "--generation", "0", "--steps", "30")
    assert not np.array_equal(one.vector(), alone.vector())
    assert alone.result()["passes"]["true"] > 0


@pytest.mark.full
def test_a_run_that_follows_is_resumed_to_the_same_bits(growing: Path, tmp_path: Path) -> None:
    start = (*FLAGS, "--generation", "0", "--follow")
    whole = train_here(growing, tmp_path / "whole", *start, "--steps", "30")
    train_here(growing, tmp_path / "parts", *start, "--steps", "11")
    # Its own generation is in its folder, whatever has been appended since.
    parts = train_here(growing, tmp_path / "parts", *FLAGS, "--follow", "--steps", "30", "--resume")
    assert np.array_equal(whole.vector(), parts.vector())
    assert followed(tmp_path / "whole") == followed(tmp_path / "parts")


@pytest.mark.full
def test_killed_workers_draw_what_they_drew_before(growing: Path, tmp_path: Path) -> None:
    start = (*FLAGS, "--generation", "0", "--follow", "--steps", "200")
    whole = train_here(growing, tmp_path / "whole", *start)
    killed = Training(growing, tmp_path / "killed", *start)
    for worker in (0, 2):
        killed.wait_for_updates(20 + 40 * worker)
        killed.send(f"worker-{worker}")
    assert killed.wait() == 0, killed.said()
    assert len(killed.events("restart")) == 2
    assert np.array_equal(whole.vector(), killed.vector())


class Shaky(Store):
    """Every other operation of a kind fails as a lost connection does."""

    calls: ClassVar[Counter[str]] = Counter()

    def _shake(self, kind: str) -> None:
        self.calls[kind] += 1
        if self.calls[kind] % 2:
            raise ConnectionResetError("connection reset")

    def read(self, uri: str) -> bytes:
        self._shake("read")
        return super().read(uri)

    def put_new(self, uri: str, data: bytes) -> None:
        self._shake("put_new")
        super().put_new(uri, data)


def test_a_connection_that_is_lost_meanwhile_ends_nothing(
    growing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda seconds: None)
    found = open_shards(str(growing))
    first = as_of(Shards(Shaky(), found.uri, found.manifest), 0)
    home = StorePlace(str(tmp_path), Shaky())
    source = GrowingRows(home, tmp_path, 1, first, load_worker(first, 1), targets=False, looks=True)
    grown = source.next(source.following().stretches[-1], 40, 1)
    assert grown == Stretch(40, 1, found.worker_rows(1), 3)
    assert recorded(tmp_path, 1) == [grown]
    assert Shaky.calls.total() >= 4


def test_what_cannot_be_followed_is_refused(growing: Path, tmp_path: Path, spark: SparkSession) -> None:
    with pytest.raises(UsageError, match="--sampling bernoulli"):
        Data(shards="x", follow=True, sampling="bernoulli")
