"""The placement of bundles against a plain search in Python, and the bounds that it promises."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pipeline.assignment.bundles import BundleCells, count_cells, merge_cells, place_bundles
from pipeline.assignment.groups import group_table, rows_by_worker
from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.hashing import keyed_hash
from pipeline.runs.request import Request, preflight
from pipeline.strategies.by_attribute import ByAttribute
from pipeline.strategies.stratified import Stratified

many = settings(max_examples=60, deadline=None)
ROWS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), min_size=1, max_size=300)  # (bundle, group)
WORKERS = st.integers(1, 7)


def cells_of(rows: list[tuple[int, int]]) -> BundleCells:
    bundles, groups = np.array(rows).T
    return count_cells(bundles.astype(np.uint64), groups)


def even(cells: BundleCells, workers: int) -> Ints:
    sizes = np.bincount(cells.groups, cells.rows).astype(np.int64)
    return rows_by_worker(group_table(sizes, workers, "carry")).T


def nearest_counts(rows: list[tuple[int, int]], targets: Ints, order: list[int]) -> dict[int, int]:
    """Each bundle's worker, by computing the sum of squared differences for every choice."""
    counts = np.zeros_like(targets)
    owners = {}
    for bundle in order:
        mine = Counter(group for each, group in rows if each == bundle)
        best = None
        for worker in range(targets.shape[1]):
            trial = counts.copy()
            for group, amount in mine.items():
                trial[group, worker] += amount
            lacks = int((counts - targets)[:, worker].sum())
            key = (int(((trial - targets) ** 2).sum()), lacks, worker)
            best = min(best or (key, trial), (key, trial), key=lambda pair: pair[0])
        assert best is not None
        owners[bundle], counts = best[0][2], best[1]
    return owners


@given(ROWS, st.integers(1, 4))
@many
def test_cells_are_counts_however_rows_are_divided(rows: list[tuple[int, int]], pieces: int) -> None:
    whole = cells_of(rows)
    parts = [cells_of(rows[at::pieces]) for at in range(pieces) if rows[at::pieces]]
    for found in (whole, merge_cells(parts)):
        counted = zip(found.keys.tolist(), found.groups.tolist(), found.rows.tolist(), strict=True)
        assert {(key, group): amount for key, group, amount in counted} == Counter(rows)
        assert np.array_equal(np.lexsort((found.groups, found.keys)), np.arange(len(found)))


@given(ROWS, WORKERS, st.integers(0, 3))
@many
def test_bundles_go_where_counts_are_nearest(rows: list[tuple[int, int]], workers: int, seed: int) -> None:
    cells = cells_of(rows)
    targets = np.random.default_rng(seed).multinomial(len(rows), np.full(workers, 1 / workers), cells.groups.max() + 1)
    placed = place_bundles(cells, targets, "largest", seed)
    sizes = dict(zip(placed.keys.tolist(), placed.sizes.tolist(), strict=True))
    owners = dict(zip(placed.keys.tolist(), placed.owners.tolist(), strict=True))
    assert sizes == Counter(bundle for bundle, _ in rows)
    # The order among bundles of one size is drawn: take it from the placement's own draws.
    order = [int(key) for key in placed.keys[np.lexsort((draws(placed.keys, seed), -placed.sizes))]]
    assert owners == nearest_counts(rows, targets, order)
    table = np.zeros_like(targets)
    for bundle, group in rows:
        table[group, owners[bundle]] += 1
    assert np.array_equal(placed.table, table)


def draws(keys: Any, seed: int) -> Any:
    return keyed_hash(keys.view(np.int64), seed)


@given(ROWS, WORKERS, st.sampled_from(["largest", "drawn"]), st.integers(0, 3))
@many
def test_sizes_differ_by_the_largest_bundle_at_most(
    rows: list[tuple[int, int]], workers: int, order: Any, seed: int
) -> None:
    cells = cells_of([(bundle, 0) for bundle, _ in rows])
    placed = place_bundles(cells, even(cells, workers), order, seed)
    assert np.ptp(placed.table.sum(axis=0)) <= placed.sizes.max() + 1  # targets differ by one
    uneven = np.array([[len(rows), *[0] * (workers - 1)]])
    placed = place_bundles(cells, uneven, order, seed)
    assert (placed.table[0] <= uneven[0] + placed.sizes.max()).all()


@given(ROWS, WORKERS, st.integers(0, 3))
@many
def test_class_counts_are_no_farther_than_by_chance(rows: list[tuple[int, int]], workers: int, seed: int) -> None:
    """The sum of squared differences is at most its mean over independent draws, (1 - 1/n) sum of squared cells."""
    cells = cells_of(rows * workers)  # groups that the workers divide without a remainder
    targets = even(cells, workers)
    placed = place_bundles(cells, targets, "largest", seed)
    assert ((placed.table - targets) ** 2).sum() <= (1 - 1 / workers) * (cells.rows**2).sum() + 1e-9


def test_bundles_of_one_row_are_dealt_like_rows() -> None:
    rows = [(bundle, bundle % 3) for bundle in range(100)]
    cells = cells_of(rows)
    placed = place_bundles(cells, even(cells, 4), "largest", 0)
    assert np.array_equal(placed.table, even(cells, 4))


def test_independent_bundles_follow_the_shares() -> None:
    """A chi-square test of 20,000 bundles at shares of 1:2:5; the seed alone decides."""
    cells = count_cells(np.arange(20_000).astype(np.uint64), np.zeros(20_000, np.int64))
    targets = np.array([[2500, 5000, 12_500]])
    placed = place_bundles(cells, targets, "independent", 3)
    assert stats.chisquare(placed.table[0], targets[0]).pvalue > 0.001
    assert np.array_equal(placed.owners, place_bundles(cells, targets, "independent", 3).owners)
    assert not np.array_equal(placed.owners, place_bundles(cells, targets, "independent", 4).owners)


@pytest.mark.parametrize(
    ("strategy", "column", "message"),
    [
        (ByAttribute(column="site"), "patient", "keeps rows together by --column site: leave out --group-by"),
        (Stratified(), "", "--group-by names no column; name one, or leave it out"),
        (ByAttribute(column=""), None, "--column names no column; name one, or leave it out"),
        (Stratified(), "image", "--group-by image: rows cannot be kept together by this column; name another one"),
    ],
)
def test_columns_that_cannot_bundle_are_one_line(strategy: Any, column: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        preflight(Request(input="i", output="o", num_workers=2, group_by=column), strategy)
