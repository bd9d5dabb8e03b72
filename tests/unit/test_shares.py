"""Tables of skewed shards against their definitions, and the dealing of rows by a table."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pipeline.assignment.groups import group_table, rows_by_worker
from pipeline.assignment.shares import class_table, dirichlet_table, sorted_table
from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError

SIZES = st.lists(st.integers(0, 400), min_size=1, max_size=12).filter(any)
WORKERS = st.integers(1, 20)
many = settings(max_examples=100, deadline=None)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def assert_exact(table: Ints, sizes: list[int]) -> None:
    """Every row of every class has one worker."""
    assert table.min() >= 0
    assert table.sum(axis=1).tolist() == sizes


@given(SIZES, WORKERS, st.sampled_from([0.01, 0.3, 5.0, 1e4]), st.integers(0, 9), st.integers(0, 5))
@many
def test_dirichlet_counts_are_exact(sizes: list[int], workers: int, alpha: float, seed: int, least: int) -> None:
    least = min(least, sum(sizes) // workers)
    table = dirichlet_table(np.array(sizes), workers, alpha, rng(seed), least)
    assert_exact(table, sizes)
    assert table.sum(axis=0).min() >= least


def test_dirichlet_shares_have_the_moments_of_their_distribution() -> None:
    """Its marginals are Beta(alpha, (n-1) alpha): a Kolmogorov-Smirnov test on 2,000 classes, one worker of each."""
    classes, workers, alpha = 2000, 8, 0.5
    table = dirichlet_table(np.full(classes, 10**6), workers, alpha, rng(3), 1)
    shares = table[np.arange(classes), np.arange(classes) % workers] / 1e6
    assert stats.kstest(shares, stats.beta(alpha, (workers - 1) * alpha).cdf).pvalue > 0.01


def test_the_least_rows_change_the_shares_no_more_than_needed() -> None:
    sizes = np.full(10, 5000)
    free, held = (dirichlet_table(sizes, 12, 0.05, rng(1), least) for least in (1, 500))
    assert free.sum(axis=0).min() < 500 <= held.sum(axis=0).min() < 520
    assert dirichlet_table(sizes, 12, 0.05, rng(1), 50_000 // 12).sum(axis=0).min() == 50_000 // 12


def test_more_least_rows_than_there_are_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"^--min-rows 6 for each of 2 workers is more than the 11 rows of the input$"):
        dirichlet_table(np.array([11]), 2, 1.0, rng(), 6)


@given(SIZES, WORKERS, st.integers(1, 12), st.integers(0, 9))
@many
def test_every_worker_has_its_number_of_classes(sizes: list[int], workers: int, each: int, seed: int) -> None:
    present = sum(map(bool, sizes))
    if each > present or each * workers < present:
        with pytest.raises(UsageError, match=r"^--classes-per-worker \d+ (is more than|leaves classes without)"):
            class_table(np.array(sizes), workers, each, rng(seed))
        return
    table = class_table(np.array(sizes) * 100, workers, each, rng(seed))  # enough rows for every worker of a class
    assert_exact(table, [100 * size for size in sizes])
    assert ((table > 0).sum(axis=0) == each).all()
    holders = (table > 0).sum(axis=1)[np.array(sizes) > 0]
    assert np.ptp(holders) <= 1
    assert all(np.ptp(row[row > 0]) <= 1 for row in table if row.any())


@given(SIZES, WORKERS, st.sampled_from([0.0, 0.3, 0.5, 1.0]))
@many
def test_sorted_counts_are_those_of_sorted_rows(sizes: list[int], workers: int, strictness: float) -> None:
    table = sorted_table(np.array(sizes), workers, strictness)
    assert_exact(table, sizes)
    assert np.ptp(table.sum(axis=0)) <= (1 if strictness in (0.0, 1.0) else 2)
    if strictness == 0:
        assert (np.ptp(table, axis=1) <= 1).all()
    if strictness == 1:
        labels = np.repeat(np.arange(len(sizes)), sizes)
        cuts = [len(labels) * worker // workers for worker in range(1, workers)]
        pieces = [np.bincount(piece, minlength=len(sizes)) for piece in np.split(labels, cuts)]
        assert table.T.tolist() == np.array(pieces).tolist()


@given(SIZES, WORKERS, st.integers(0, 9))
@many
def test_a_table_deals_as_many_rows_as_it_says(sizes: list[int], workers: int, seed: int) -> None:
    """Rows in any order, in one block or in several."""
    counts = dirichlet_table(np.array(sizes), workers, 0.4, rng(seed), 0)
    table = group_table(np.array(sizes), workers, table=counts)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    ranks = np.concatenate([np.arange(size) for size in sizes])
    order = rng(seed).permutation(len(groups))
    owners = np.concatenate([table.owners(groups[part], ranks[part]) for part in np.array_split(order, 3)])
    found = np.zeros_like(counts)
    np.add.at(found, (groups[order], owners), 1)
    assert found.tolist() == counts.tolist()
    assert rows_by_worker(table).T.tolist() == counts.tolist()
