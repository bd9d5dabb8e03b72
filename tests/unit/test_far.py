"""Tiny groups far from all other rows: found among any number of rows, and none in ordinary data."""

from collections.abc import Callable
from functools import reduce
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.clustering import far
from pipeline.clustering.fit import fit_in_process, rough_centres
from pipeline.clustering.lloyd import Fit, KMeansSettings, draw_sample, iterate, nearest, plus_plus
from pipeline.clustering.passes import Pass
from pipeline.core.arrays import Ints

pytestmark = pytest.mark.full  # seconds of arithmetic a test

Points = npt.NDArray[np.int32]
T = TypeVar("T")
SETTINGS = KMeansSettings(k=20, max_iter=1, tol=0, seed=0)
SIZES = (1, 2, 3, 5, 8, 8, 12, 12)


def ordinary(rows: int, p: int = 16, seed: int = 0, tails: float | None = None) -> Points:
    """Clusters of unequal size and width in a few of p directions more than in others; tails: degrees of freedom."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(0, 40_000, (12, p))
    noise = rng.normal(size=(rows, p)) if tails is None else rng.standard_t(tails, (rows, p))
    of = rng.choice(12, rows, p=rng.dirichlet(np.full(12, 3.0)))
    return np.asarray(centres[of] + noise * 6000 / np.sqrt(1 + np.arange(p)), np.int32)


def planted(points: Points, away: float, sizes: tuple[int, ...] = SIZES, seed: int = 1) -> list[Ints]:
    """Overwrite rows by groups that lie together, so far away from all; the rows of each."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(len(points))[: sum(sizes)]
    groups = np.split(chosen, np.cumsum(sizes)[:-1])
    for rows in groups:
        direction = rng.normal(size=points.shape[1])
        points[rows] = points.mean(axis=0) + away * direction / np.linalg.norm(direction)
        points[rows] += rng.integers(-500, 500, (len(rows), points.shape[1])).astype(np.int32)
    return groups


def own_clusters(points: Points, fitted: Fit, groups: list[Ints]) -> int:
    """How many of the groups are a cluster, with all of their rows and no other."""
    index = nearest(points, fitted.centres)[0]
    counts = np.bincount(index, minlength=len(fitted.centres))
    return sum(len(set(index[rows])) == 1 and counts[index[rows[0]]] == len(rows) for rows in groups)


@pytest.mark.parametrize("rows", [20_000, 120_000])
def test_every_far_group_is_a_cluster_whatever_the_number_of_rows(rows: int) -> None:
    """A sample of 4,096 of 300,000 rows holds none of most groups."""
    points = ordinary(rows)
    groups = planted(points, away=400_000)
    fitted = fit_in_process(np.arange(rows), points, KMeansSettings(k=40, max_iter=30, tol=1e-4, seed=0))
    assert own_clusters(points, fitted, groups) == len(groups)
    assert len(fitted.centres) == 40


def test_dense_groups_are_found_at_the_distance_of_others() -> None:
    """Groups no farther out than others are found where their rows lie together."""
    points = ordinary(300_000, tails=4)  # whose farthest rows lie alone
    groups = planted(points, away=150_000, sizes=(3, 8, 12))
    ids = np.arange(len(points))
    settings = KMeansSettings(k=30, max_iter=30, tol=1e-4, seed=0)
    rough = rough_centres(draw_sample(ids, points, SETTINGS), settings)
    distances = np.sort(nearest(points, rough)[1])[::-1]
    step = distances[far.rows_above_step(distances[:1000])]
    assert all(nearest(points[rows], rough)[1].max() < step for rows in groups), "they are above a step"
    assert own_clusters(points, fit_in_process(ids, points, settings), groups) == 3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tails", [None, 8.0])
def test_ordinary_data_start_from_the_sample_without_outliers(tails: float | None, seed: int) -> None:
    """Ordinary data give the start of the sample but for single rows that lie alone."""
    points = ordinary(100_000, seed=seed, tails=tails)
    ids = np.arange(len(points))
    rough = rough_centres(draw_sample(ids, points, SETTINGS), KMeansSettings(k=20, max_iter=1, tol=0, seed=0))
    found = far.find_far_groups(lambda look, merge: look(ids, points), len(points), rough, 10)
    distances = np.sort(nearest(points, rough)[1])[::-1]
    above = far.rows_above_step(distances[: len(points) // far.SHARE])
    assert len(found) <= min(above, 2)
    if tails is None:
        assert len(found) == 0


@pytest.mark.parametrize("tails", ["t3", "t5", "lognormal", "repeated"])
def test_outliers_take_no_centre_that_a_cluster_needs(tails: str) -> None:
    """Twenty clusters, twenty centres, and rows far out that lie alone, or four times each."""
    rng = np.random.default_rng(0)
    rows, p, k = 20_000, 50, 20
    centres, of = rng.normal(0, 30_000, (k, p)), rng.integers(0, k, rows)
    kinds = {"t3": 3.0, "t5": 5.0, "repeated": 3.0}
    noise = rng.standard_t(kinds[tails], (rows, p)) if tails in kinds else rng.normal(size=(rows, p))
    if tails == "lognormal":
        noise *= rng.lognormal(0, 0.8, (rows, 1))
    points = np.asarray(centres[of] + 1500 * noise, np.int32)
    if tails == "repeated":
        points = np.repeat(points[: rows // 4], 4, axis=0)
    ids, settings = np.arange(rows), KMeansSettings(k=k, max_iter=40, tol=1e-4, seed=0)
    plain = iterate(Pass(points, k), plus_plus(draw_sample(ids, points, settings).points, k, 0), settings, 0.0)
    assert fit_in_process(ids, points, settings).inertia <= 1.05 * plain.inertia


@pytest.mark.parametrize("parts", [2, 7, 64])
def test_the_groups_are_the_same_bits_for_any_partitioning(parts: int) -> None:
    points = ordinary(60_000)
    planted(points, away=400_000)
    planted(points, away=120_000, seed=2)
    ids = np.arange(len(points))
    rough = rough_centres(draw_sample(ids, points, SETTINGS), KMeansSettings(k=20, max_iter=1, tol=0, seed=0))

    def split(look: Callable[[Ints, Points], T], merge: Callable[[T, T], T]) -> T:
        pieces = np.array_split(np.random.default_rng(0).permutation(ids), parts)
        return reduce(merge, [look(rows, points[rows]) for rows in pieces])

    whole = far.find_far_groups(lambda look, merge: look(ids, points), len(points), rough, 15)
    assert len(whole) >= len(SIZES)
    assert np.array_equal(far.find_far_groups(split, len(points), rough, 15), whole)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=30))
def test_rows_above_the_last_step_are_told_by_brute_force(values: list[int]) -> None:
    distances = np.array(sorted(values, reverse=True), np.float64)
    steps = [i for i in range(len(values) - 1) if distances[i] > 0 and distances[i] >= far.GAP * distances[i + 1]]
    assert far.rows_above_step(distances) == (steps[-1] + 1 if steps else 0)


def test_rows_that_others_lie_around_are_no_group() -> None:
    """Three far rows lie together, and others on the whole way to them, so their cluster would have more rows."""
    points = ordinary(50_000)
    centre = points.mean(axis=0)
    points[:3] = centre + np.eye(16)[0] * 130_000
    ids = np.arange(len(points))
    rough = rough_centres(draw_sample(ids, points, SETTINGS), KMeansSettings(k=20, max_iter=10, tol=0, seed=0))
    away = points[0] - rough[nearest(points[:1], rough)[0][0]]
    assert len(far.find_far_groups(lambda look, merge: look(ids, points), len(points), rough, 10)) == 1
    points[3:70] = points[0] - np.linspace(0.1, 0.97, 67)[:, None] * away
    assert len(far.find_far_groups(lambda look, merge: look(ids, points), len(points), rough, 10)) == 0
