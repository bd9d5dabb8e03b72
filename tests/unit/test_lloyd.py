"""Integer k-means against scikit-learn and plain numpy; independence of partitioning; degenerate inputs."""

from collections.abc import Callable
from functools import partial, reduce
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from pipeline.clustering import fit as fit_module
from pipeline.clustering import lloyd
from pipeline.clustering.fit import fit as fit_rows
from pipeline.clustering.fit import refine_centres, refinement_limit, refinement_sample
from pipeline.clustering.gram import Spectrum
from pipeline.clustering.kmeans import _bounds, content_ids
from pipeline.clustering.passes import Pass
from pipeline.clustering.points import Points as Block
from pipeline.clustering.points import fit_gathered
from pipeline.clustering.projection import Grid, grid_exponent, grid_points, quantise
from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError

Points = npt.NDArray[np.int32]
T = TypeVar("T")


def blobs(rows: int = 3000, p: int = 8, k: int = 6, seed: int = 0) -> tuple[Points, Ints]:
    rng = np.random.default_rng(seed)
    centres = rng.integers(-50_000, 50_000, (k, p))
    labels = rng.integers(0, k, rows)
    return (centres[labels] + rng.normal(0, 3000, (rows, p))).astype(np.int32), labels


def fit(points: Points, k: int, parts: int = 1, seed: int = 0, max_iter: int = 100) -> lloyd.Fit:
    """As the cluster does it: samples and sums by part, merged."""
    settings = lloyd.KMeansSettings(k, max_iter, 1e-4, seed)
    drawn = [lloyd.draw_sample(ids, points[ids], settings) for ids in np.array_split(np.arange(len(points)), parts)]

    def make_pass(count: int) -> Callable[[Ints], lloyd.Sums]:
        passes = [Pass(part, count) for part in np.array_split(points, parts)]
        return lambda centres: reduce(lloyd.merge, [one(centres) for one in passes])

    def rows(look: Callable[[Ints, Points], T], merge: Callable[[T, T], T]) -> T:
        return reduce(merge, [look(ids, points[ids]) for ids in np.array_split(np.arange(len(points)), parts)])

    def settle(centres: Ints, mean_variance: float) -> Ints:
        split = np.array_split(np.arange(len(points)), parts)
        of_parts = [refinement_sample(refinement_limit(len(points)), seed, ids, points[ids]) for ids in split]
        return refine_centres(np.concatenate(of_parts[::-1]), settings, centres, mean_variance)

    return fit_rows(make_pass, rows, reduce(partial(lloyd.merge_samples, k), drawn), settings, settle)


@pytest.mark.parametrize("k", [5, 200])  # few clusters are summed by a product, many in their order
def test_one_pass_equals_plain_numpy_also_when_it_remembers_the_last(k: int) -> None:
    points, _ = blobs()
    one = Pass(points, k)
    for seed in range(4):
        centres = points[np.random.default_rng(seed).integers(0, len(points), k)].astype(np.int64)
        distance = ((points[:, None].astype(np.int64) - centres) ** 2).sum(axis=2)
        index = distance.argmin(axis=1)
        found = one(centres)
        assert found.inertia == int(distance.min(axis=1).sum())
        assert found.counts.tolist() == np.bincount(index, minlength=k).tolist()
        expected = np.array([points[index == c].sum(axis=0, dtype=np.int64) for c in range(k)])
        assert np.array_equal(found.sums, expected)


@given(st.integers(1, 9), st.integers(1, 4), st.sampled_from([3, 40, 2**22]), st.integers(0, 2**31))
@settings(max_examples=80, deadline=None)
def test_rows_skipped_by_their_bounds_keep_their_centre(k: int, p: int, reach: int, seed: int) -> None:
    """Small reaches make ties; centres drift, stand still and jump."""
    rng = np.random.default_rng(seed)
    points = rng.integers(-reach, reach + 1, (300, p)).astype(np.int32)
    centres = rng.integers(-reach, reach + 1, (k, p))
    repeated = Pass(points, k)
    for drift in rng.choice([0, 0, 1, 1, max(1, reach // 50), reach], 25):
        found, expected = repeated(centres), lloyd.one_pass(points, centres)
        assert found.inertia == expected.inertia
        assert np.array_equal(found.counts, expected.counts)
        assert np.array_equal(found.sums, expected.sums)
        centres = np.clip(centres + rng.integers(-drift, drift + 1, centres.shape), -reach, reach)


def test_most_rows_are_left_alone_once_centres_stand_nearly_still() -> None:
    points, _ = blobs()
    repeated = Pass(points, 6)
    centres = fit(points, 6).centres
    repeated(centres)
    assert len(repeated._relax_bounds(centres + 1)) < len(points) / 20


@pytest.mark.parametrize("parts", [2, 7, 64])
def test_centres_are_the_same_bits_for_any_partitioning(parts: int) -> None:
    points, _ = blobs()
    whole, split = fit(points, 9), fit(points, 9, parts)
    assert np.array_equal(whole.centres, split.centres)
    assert (whole.inertia, whole.iterations) == (split.inertia, split.iterations)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 5])
def test_many_rows_start_from_centres_refined_on_a_sample(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows start from where a sample settles which is near where they end."""
    points = (np.random.default_rng(8).normal(size=(30_000, 6)) * 30_000).astype(np.int32)
    monkeypatch.setattr(fit_module, "MANY_ROWS", 20_000)
    monkeypatch.setattr(fit_module, "REFINEMENT_ROWS", 8_000)
    found = fit(points, 12, parts)
    asked = lloyd.KMeansSettings(12, 100, 1e-4, 0)
    here = fit_module.fit_in_process(np.arange(len(points)), points, asked)
    assert np.array_equal(found.centres, here.centres)
    drawn = refinement_sample(refinement_limit(len(points)), 0, np.arange(len(points)), points)
    assert abs(len(drawn) - 8_000) < 400
    monkeypatch.setattr(fit_module, "ONE_TASK_PRODUCTS", 8_000 * 12 * 6 - 1)
    assert not np.array_equal(fit(points, 12, parts, max_iter=5).centres, found.centres)
    start = lloyd.plus_plus(lloyd.draw_sample(np.arange(len(points)), points, asked).points, 12, 0)
    rest = refine_centres(drawn, asked, start, 0.0)
    began, rested = (lloyd.one_pass(points, centres).inertia - found.inertia for centres in (start, rest))
    assert 0 < rested < began / 10


def test_clusters_match_scikit_learn() -> None:
    points, labels = blobs()
    found = fit(points, 6)
    reference = KMeans(6, n_init=5, random_state=0).fit(points.astype(float))
    assert found.inertia <= 1.05 * reference.inertia_
    index = lloyd.nearest(points, found.centres)[0]
    assert adjusted_rand_score(index, reference.labels_) > 0.98
    assert adjusted_rand_score(index, labels) > 0.98


def test_clusters_are_numbered_by_size_then_position() -> None:
    points, _ = blobs()
    found = fit(points, 6)
    assert found.sizes.tolist() == sorted(found.sizes, reverse=True)
    tied = np.repeat(np.array([[5, 0], [-5, 0], [0, 9]], np.int32) * 1000, 4, axis=0)
    assert fit(tied, 3).centres.tolist() == [[-5000, 0], [0, 9000], [5000, 0]]


@pytest.mark.parametrize(("rows", "k", "expected"), [(1, 1, 1), (5, 9, 5), (4, 4, 4)])
def test_more_clusters_than_points_leaves_one_each(rows: npt.NDArray[np.int32], k: int, expected: int) -> None:
    points = np.arange(rows * 2, dtype=np.int32).reshape(rows, 2) * 1000
    found = fit(points, k)
    assert len(found.centres) == expected
    assert found.inertia == 0


@pytest.mark.parametrize("values", [10, 100])
def test_repeated_rows_without_ids_have_as_many_clusters(values: int) -> None:
    """Without ids rows that repeat have as many clusters as with them."""
    rng = np.random.default_rng(0)
    points = rng.integers(-1000, 1000, (values, 3)).astype(np.int32)[rng.integers(0, values, 20_000)]
    settings = lloyd.KMeansSettings(5, 50, 1e-4, 1, 1)
    with_ids = fit_gathered([Block(np.arange(len(points)), points)], settings)
    parts = [Block(content_ids(part), part) for part in np.array_split(points[rng.permutation(len(points))], 7)]
    without = fit_gathered(parts, settings)
    assert len(without.sizes) == len(with_ids.sizes) == 5
    assert without.inertia < 1.5 * with_ids.inertia
    drawn = reduce(
        partial(lloyd.merge_samples, 5), (lloyd.draw_sample(part.ids, part.points, settings) for part in parts)
    )
    whole = lloyd.draw_sample(content_ids(points), points, settings)
    assert np.array_equal(drawn.keys, whole.keys)
    assert np.array_equal(drawn.points, whole.points)
    assert len(whole.keys) == len(np.unique(points, axis=0))


def test_identical_points_make_one_cluster() -> None:
    found = fit(np.full((50, 3), 7, np.int32), 4)
    assert found.centres.tolist() == [[7, 7, 7]]


def test_the_variance_of_mergeable_samples_is_exact() -> None:
    points, _ = blobs(rows=5000)
    drawing = lloyd.KMeansSettings(k=5, max_iter=1, tol=0, seed=3)
    parts = [lloyd.draw_sample(ids, points[ids], drawing) for ids in np.array_split(np.arange(5000), 3)]
    merged = lloyd.merge_samples(5, lloyd.merge_samples(5, parts[2], parts[0]), parts[1])
    whole = lloyd.draw_sample(np.arange(5000), points, drawing)
    assert np.array_equal(merged.points, whole.points)
    assert merged.sums == whole.sums
    assert whole.mean_variance == pytest.approx(points.var(axis=0).mean(), rel=1e-9)


@given(st.lists(st.integers(0, 2**53 - 1), min_size=1, max_size=300))
@settings(max_examples=50, deadline=None)
def test_sums_of_large_integers_lose_nothing(values: list[int]) -> None:
    assert lloyd.exact_sum(np.array(values, np.float64)) == sum(values)


@given(st.integers(1, 4000), st.integers(1, 40), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_projected_points_and_their_distances_stay_exact(pixels: int, k: int, whiten: bool, seed: int) -> None:
    """The grid's promise, by Python integers: products below 2^53, points in int32, distances below 2^52."""
    rng = np.random.default_rng(seed)
    k = min(k, pixels)
    rows = rng.normal(size=(k, pixels))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    variances = np.sort(10.0 ** rng.uniform(-6, 7, k))[::-1]
    projection = quantise(Spectrum(rows, variances, float(variances.sum())), whiten=whiten)
    weights = [[int(w) for w in column] for column in projection.weights.T]
    largest = [255 * sum(abs(w) for w in column) for column in weights]
    assert max(largest) < 2**53
    reach = [(value >> projection.shift) + 1 for value in largest]
    assert max(reach) < 2**31
    assert sum((2 * value) ** 2 for value in reach) < 2**53
    image = rng.integers(0, 256, (3, pixels)).astype(np.uint8)
    half = 1 << projection.shift >> 1
    exact = [
        [(sum(int(x) * w for x, w in zip(row, column, strict=True)) + half) >> projection.shift for column in weights]
        for row in image.tolist()
    ]
    assert projection(image).tolist() == exact


def test_an_all_zero_spread_has_a_grid() -> None:
    assert grid_exponent(np.zeros(3)) == 0


@pytest.mark.full
@pytest.mark.parametrize("distance", [1.0, 100.0, 1e9])
def test_far_rows_are_predicted_in_their_direction(distance: float) -> None:
    """The points of a fit are int32, but a model may see rows much farther out than those of its fit."""
    fit = np.array([[5.0, 0.0], [0.0, 5.0], [-5.0, 0.0]])
    exponent = grid_exponent(np.abs(fit).max(axis=0))
    points = grid_points(fit * distance, exponent)
    assert lloyd.nearest(points, grid_points(fit, exponent).astype(np.int64))[0].tolist() == [0, 1, 2]
    clipped = Grid(2, exponent)((fit * distance).astype(np.float32).view(np.uint8))
    assert np.sign(clipped).tolist() == np.sign(fit).tolist()
    with pytest.raises(DataError, match="NaN, infinity or too large a number; clean"):
        grid_points(np.array([[1.0, np.nan]]), exponent)


@pytest.mark.parametrize(
    ("batches", "line"),
    [
        ([[[1.0, 2.0]], [[1.0, 2.0, 3.0]]], "the features has rows of 2 and 3 values; sizes must be equal"),
        ([[[1.0, 1e151]]], r"a number beyond 1e\+150; scale the features"),
        ([[[1.0, float("inf")]]], "NaN or infinity; clean the features"),
    ],
)
def test_features_that_cannot_be_clustered_are_one_line(batches: list[list[list[float]]], line: str) -> None:
    tables = [pa.RecordBatch.from_arrays([pa.array([0]), pa.array(rows)], ["id", "v"]) for rows in batches]
    with pytest.raises(DataError, match=line):
        list(_bounds(tables))


def test_more_clusters_than_the_smallest_sample_has_rows() -> None:
    points, _ = blobs(rows=30_000)
    fitted = fit(points, 5000, parts=3, max_iter=2)
    assert len(fitted.centres) == 5000
    assert fitted.sizes.sum() == 30_000
    index, distance = lloyd.nearest(points, fitted.centres)
    assert np.bincount(index, minlength=5000).tolist() == fitted.sizes.tolist()
    assert fitted.inertia == int(distance.sum())
