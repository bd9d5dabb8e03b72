"""The passes of workers through changes of their number: every row once, whatever was interrupted. Pure rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import UsageError
from tests.support.trainer_sets import rows_of, write_shards
from trainer.coordination.cohorts import CheckpointProgress, Cohort, CohortSize, begin_passes, next_cohort
from trainer.coordination.passes import WORD, Passes, RowSums, Whole
from trainer.data.deal import deal
from trainer.data.opening import open_shards
from trainer.data.places import dealt_places, even_places, own_places
from trainer.sampling.remainder import MOST_OPEN, PassRule, WorkerPasses, first_passes, later_passes, open_passes
from trainer.sampling.representative import RepresentativeSampler


@dataclass
class Drawn:
    """The rows that simulated workers have drawn.

    rows: by number of the pass, as the workers count their passes; a row may be drawn several times.
    whole: the passes that ``Passes`` has found complete."""

    rows: dict[int, Counter[int]]
    whole: list[Whole]


def hash_of(row: int) -> int:
    return (row + 1) * 0x9E3779B97F4A7C15 % WORD


def draw_steps(passes: WorkerPasses, batch: int, count: int, drawn: Drawn, sums: Passes) -> None:
    """Draw the first mini-batches of a worker, count their rows by pass, and report them as a worker does."""
    turn = passes.turn
    for begin in range(0, count * batch, batch):
        rows, ended, begun = passes.draw(begin, batch, passes.order)
        assert len(rows) == batch
        hashes = [hash_of(row) for row in rows.tolist()]
        sums.use(passes.worker, RowSums(sum(hashes), sum(hashes[len(hashes) - begun :]), ended))
        assert turn + ended == passes.progress(begin + batch)[0]
        # Rows before the last end may be of several passes.
        for place, row in enumerate(rows.tolist(), begin):
            number = passes.turn + passes.place(place)[0]
            drawn.rows.setdefault(number, Counter())[row] += 1
        turn += ended


@given(
    rows=st.integers(6, 60),
    groups=st.lists(
        st.tuples(st.integers(1, 6), st.integers(1, 9), st.lists(st.integers(0, 12), min_size=6, max_size=6)),
        min_size=2,
        max_size=4,
    ),
    seed=st.integers(0, 2**30),
    classes=st.integers(0, 5),
)
def test_every_pass_has_every_row_once(
    rows: int, groups: list[tuple[int, int, list[int]]], seed: int, classes: int
) -> None:
    """Check any workers, mini-batches and clocks of several cohorts, each of which draws until the next one begins.

    Passes that are too old for a change of workers lack the rows that they lacked then. With classes the sampler is
    ``representative``, without ``shuffle``."""
    labels = np.random.default_rng(seed).integers(0, max(1, classes), rows)
    rule = PassRule(seed, RepresentativeSampler(), labels) if classes else PassRule(seed)
    drawn = Drawn({}, [])
    passes: list[WorkerPasses] = []
    cohort = Cohort()
    state: dict[str, Any] = {}
    lacking: dict[int, int] = {}
    for number, (workers, batch, counts) in enumerate(groups):
        own = [np.arange(rows)[worker::workers] for worker in range(workers)]
        if number:
            _, before, steps = groups[number - 1]
            clocks = {each.worker: cohort.clock + count for each, count in zip(passes, steps, strict=False)}
            positions = [count * before for count in steps[: len(passes)]]
            begin, end, left_out = open_passes(passes, positions)
            assert end - begin <= MOST_OPEN
            slowest = min(each.progress(position)[0] for each, position in zip(passes, positions, strict=True))
            lacking |= {turn: rows - drawn.rows.get(turn, Counter()).total() for turn in range(slowest, begin)}
            assert left_out == sum(lacking[turn] for turn in range(slowest, begin))
            cohort = next_cohort(
                Cohort(len(passes), 1),
                size=CohortSize(workers, 1),
                progress=CheckpointProgress(number, number, clocks),
                turn=begin,
                left_out=left_out,
                steps_per_epoch=(1, 1),
            )
            passes = later_passes(passes, positions, own, number)
            sizes = [[len(part) for part in each.parts] for each in passes]
            assert all(max(column) - min(column) <= 1 for column in zip(*sizes, strict=True))
            state = begin_passes(state, cohort)
        else:
            passes = first_passes(own, rule)
        # The last cohort draws until all workers have ended a pass that nobody had begun before.
        last = number == len(groups) - 1
        most = max(len(each.parts) for each in passes) + 2
        sums = Passes(workers, state)
        for each, count in zip(passes, counts, strict=False):
            if last:
                size = sum(map(len, each.parts)) + (most - len(each.parts)) * len(each.own)
                count = -(-size // batch)
            draw_steps(each, batch, count, drawn, sums)
        drawn.whole += sums.take()
    complete = min(each.turn + max(len(each.parts) + 1, 1) for each in passes)
    everything = Counter(range(rows))
    for turn in range(complete):
        assert drawn.rows.get(turn, Counter()) <= everything, turn
        assert drawn.rows.get(turn, Counter()).total() == rows - lacking.get(turn, 0), turn
    # And the fingerprints say so: the passes follow each other, each with the sum of all rows.
    total = sum(map(hash_of, range(rows))) % WORD
    ends = [0]
    for whole in drawn.whole:
        assert whole.first == ends[-1] + 1
        is_true = whole.fingerprint == total * (whole.last - whole.first + 1) % WORD
        assert is_true == (not any(lacking.get(turn) for turn in range(whole.first - 1, whole.last)))
        ends.append(whole.last)
    # Workers that end several passes in a mini-batch may never end the same one.
    if all(len(each.own) >= groups[-1][1] for each in passes):
        assert ends[-1] >= complete


def test_dealt_places_are_those_of_deal(tmp_path: Path) -> None:
    parts = [rows_of(size, number, 100 * number) for number, size in enumerate((13, 9, 11))]
    shards = open_shards(str(write_shards(tmp_path, parts, None)))
    ids = np.concatenate([rows.ids for rows in deal(shards, 3)])
    for workers in range(1, 12):
        numbers = dealt_places(shards.shard_rows, workers)
        dealt = deal(shards, workers)
        assert all(np.array_equal(ids[own], rows.ids) for own, rows in zip(numbers, dealt, strict=True))


def test_parts_after_a_change_are_even(tmp_path: Path) -> None:
    """Sizes differ by at most one row. Equal shards are dealt as at the start, if they can be, or else shared by all."""
    for sizes in ((13, 9, 11), (12, 12, 12)):
        total = sum(sizes)
        parts = [rows_of(size, number, 100 * number) for number, size in enumerate(sizes)]
        shards = open_shards(str(write_shards(tmp_path / str(total), parts, None)))
        for workers in range(1, total + 1):
            own = even_places(shards.shard_rows, workers)
            assert np.array_equal(np.sort(np.concatenate(own)), np.arange(total))
            assert max(map(len, own)) - min(map(len, own)) <= 1
        with pytest.raises(UsageError, match=f"worker {total} would have no rows"):
            even_places(shards.shard_rows, total + 1)
    for workers in (1, 3, 6, 12):
        pairs = zip(even_places(shards.shard_rows, workers), dealt_places(shards.shard_rows, workers), strict=True)
        assert all(np.array_equal(*pair) for pair in pairs)
    assert [np.bincount(rows // 12).tolist() for rows in even_places(shards.shard_rows, 4)] == [[3, 3, 3]] * 4


def test_unchanged_workers_keep_their_rows(tmp_path: Path) -> None:
    """Also if a run in virtual time began with more workers than shards; a worker per shard has its shard."""
    parts = [rows_of(size, number, 100 * number) for number, size in enumerate((13, 9, 11))]
    shards = open_shards(str(write_shards(tmp_path, parts, None)))
    own = own_places(shards.shard_rows, 5, [])
    assert all(
        np.array_equal(*pair)
        for pair in zip(dealt_places(shards.shard_rows, 5), own_places(shards.shard_rows, 5, own), strict=True)
    )
    assert [len(rows) for rows in own_places(shards.shard_rows, 3, own)] == [13, 9, 11]
    assert sorted(map(len, own_places(shards.shard_rows, 4, own))) == [8, 8, 8, 9]


def is_level(labels: Any, part: Any) -> bool:
    """Return whether every class has its share of the first p rows of an order, rounded up or down, for every p."""
    drawn = labels[part]
    counts = np.cumsum(drawn[:, None] == np.unique(drawn), axis=0)
    shares = np.arange(1, len(drawn) + 1)[:, None] * counts[-1] / len(drawn)
    return bool((np.abs(counts - shares) < 1).all())


@given(rows=st.integers(8, 60), workers=st.integers(1, 6), clocks=st.lists(st.integers(0, 9), min_size=3, max_size=3))
def test_representative_orders_stay_level_after_a_change(rows: int, workers: int, clocks: list[int]) -> None:
    """Both what is left of a pass and later passes; each worker gets its share of what is left of each class."""
    labels = np.random.default_rng(rows).integers(0, 3, rows)
    rule = PassRule(7, RepresentativeSampler(), labels)
    passes = first_passes([np.arange(rows)[worker::3] for worker in range(3)], rule)
    later = later_passes(passes, [2 * clock for clock in clocks], np.array_split(np.arange(rows), workers), 1)
    for each in later:
        orders = [each.order(index) for index in range(len(each.parts) + 2)]
        assert all(is_level(labels, order) for order in orders if len(order))
    for parts in zip(*(each.parts for each in later), strict=True):
        counts = [np.bincount(labels[part], minlength=3) for part in parts]
        assert (np.ptp(counts, axis=0) <= 1).all()


@pytest.mark.parametrize("groups", [None, np.arange(40) % 3])
def test_a_part_of_a_pass_keeps_no_rows_of_others(groups: Any) -> None:
    rule = PassRule(3) if groups is None else PassRule(3, RepresentativeSampler(), groups)
    parts = rule.deal(np.arange(40), 4, 0, 0)
    assert [part.base for part in parts] == [None] * 4
