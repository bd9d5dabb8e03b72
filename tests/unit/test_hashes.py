"""Hash functions: integers, theory's rates of collision, and what does not change them."""

from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.spatial.distance import cdist
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits

from pipeline.clustering.hashes import WIDTH_ROWS, Family, Hashes, fit
from pipeline.clustering.projection import Grid, grid_exponent
from pipeline.core.errors import UsageError
from pipeline.core.npz import to_bytes
from pipeline.datasets.synthetic import SampleSpec, training_batches

LINEAR: tuple[Family, ...] = ("lsh", "sign", "dsh")
FAMILIES: tuple[Family, ...] = (*LINEAR, "kmeans")
Pixels = npt.NDArray[np.uint8]


def noise(rows: int, d: int, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (rows, d), dtype=np.uint8)


def points(rows: int, d: int, seed: int = 0) -> npt.NDArray[np.int32]:
    """Real-valued features on their grid."""
    features = np.random.default_rng(seed).standard_normal((rows, d)).astype(np.float32)
    grid = Grid(d, grid_exponent(np.abs(features).max(axis=0).astype(np.float64)))
    return grid(features.view(np.uint8))


def pairs_of(sample: Pixels, seed: int = 5) -> list[tuple[Pixels, Pixels]]:
    """Pairs from near to far: a row, and one that is mixed with another more and more."""
    draw = np.random.default_rng(seed)
    found = []
    for share in (0.02, 0.1, 0.25, 0.5, 0.75, 1.0):
        one, other = sample[draw.choice(len(sample), 2, replace=False)]
        found.append((one, np.rint((1 - share) * one + share * other.astype(float)).astype(np.uint8)))
    return found


def within(count: int, trials: int, p: float) -> bool:
    """Whether so many of the trials are within three standard deviations of the theory."""
    return abs(count - trials * p) <= 3 * math.sqrt(trials * p * (1 - p)) + 1e-9


def p_stable_rate(distance: float, width: float) -> float:
    """Datar et al. 2004, section 3.2: the integral of the density of |a . (p - q)| times (1 - t / w)."""

    def integrand(t: float) -> float:
        return 2 / (distance * math.sqrt(2 * math.pi)) * math.exp(-((t / distance) ** 2) / 2) * (1 - t / width)

    return float(quad(integrand, 0, width, points=[min(width, distance)], epsabs=1e-10)[0])


def test_lsh_functions_collide_at_the_rate_of_p_stable_hashing() -> None:
    """Single functions of lsh collide at the rate of p stable hashing."""
    sample, width = noise(60, 48), 600.0
    fitted = [fit(sample, "lsh", 64, seed, width=width) for seed in range(60)]
    for one, other in pairs_of(sample):
        distance = float(np.linalg.norm(one.astype(float) - other))
        same = sum(int(np.equal(*hashes.values(np.stack([one, other]))).sum()) for hashes in fitted)
        assert within(same, 64 * 60, p_stable_rate(distance, width)), distance


def test_sign_functions_collide_at_the_rate_of_the_angle() -> None:
    """Single functions of sign collide at the rate of the angle at the mean."""
    sample = noise(60, 48)
    mean = sample.mean(axis=0)
    fitted = [fit(sample, "sign", 64, seed) for seed in range(60)]
    for one, other in pairs_of(sample):
        left, right = one - mean, other - mean
        angle = math.acos(left @ right / (np.linalg.norm(left) * np.linalg.norm(right)))
        same = sum(int(np.equal(*hashes.values(np.stack([one, other]))).sum()) for hashes in fitted)
        assert within(same, 64 * 60, 1 - angle / math.pi), angle


@pytest.mark.slow
@pytest.mark.parametrize(("family", "functions"), [("lsh", 2), ("lsh", 5), ("sign", 2), ("sign", 5)])
def test_two_rows_share_a_bucket_of_m_functions_at_rate_p_to_m(family: Family, functions: int) -> None:
    """A bucket of m functions holds two rows with the rate p to the m."""
    sample, width, trials = noise(40, 24), 500.0, 1500
    one, other = pairs_of(sample)[2]
    if family == "lsh":
        p = p_stable_rate(float(np.linalg.norm(one.astype(float) - other)), width)
    else:
        left, right = one - sample.mean(axis=0), other - sample.mean(axis=0)
        p = 1 - math.acos(left @ right / (np.linalg.norm(left) * np.linalg.norm(right))) / math.pi
    rows = np.stack([one, other])
    same = sum(
        bool(np.equal(*fit(sample, family, functions, seed, width=width).buckets(rows))) for seed in range(trials)
    )
    assert within(same, trials, p**functions)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_near_images_collide_more_often_than_far_ones(family: Family) -> None:
    images = training_batches(SampleSpec(rows=2000, test_rows=0))[0].images.reshape(400, -1)
    draw = np.random.default_rng(0)
    noisy = [np.clip(images + draw.normal(0, sd, images.shape), 0, 255).astype(np.uint8) for sd in (0, 2, 6, 20)]
    rates = np.zeros(5)
    seeds = 1 if family == "kmeans" else 5  # a fit of k-means takes a second
    for seed in range(seeds):
        hashes = fit(images, family, 8, seed)
        ours = hashes.buckets(images)
        rates += [(hashes.buckets(other) == ours).mean() / seeds for other in (*noisy, images[draw.permutation(400)])]
    assert rates[0] == pytest.approx(1)
    # The sample's images surround a few patterns, so that noise hardly ever changes the nearest centroid.
    assert (np.diff(rates) < (0.001 if family == "kmeans" else -0.01)).all()
    assert rates[-1] < 0.2


@pytest.mark.parametrize("family", LINEAR)
@pytest.mark.parametrize("make", [noise, points])
def test_values_are_those_of_whole_numbers_of_any_size(family: Family, make: Any) -> None:
    rows = make(50, 37)
    hashes = fit(rows, family, 6, 3)
    weights = hashes.weights.astype(np.int64).astype(object)
    assert np.array_equal(weights.astype(np.float64), hashes.weights)
    exact = (rows.astype(object) @ weights + hashes.offsets.astype(object)) // hashes.widths.astype(object)
    assert np.array_equal(hashes.values(rows), (exact - hashes.firsts.astype(object)).astype(np.int64))
    assert np.abs(rows.astype(object) @ weights).max() < 1 << 52
    assert (np.abs(rows).astype(object) @ np.abs(weights)).max() < 1 << 53  # so are all partial sums
    assert hashes.values(rows).min() >= 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [noise, points])
def test_buckets_do_not_depend_on_other_rows_or_threads(family: Family, make: Any) -> None:
    """The same buckets whatever is hashed together and by how many threads."""
    rows = make(300, 40)
    hashes = fit(rows, family, 8, 1)
    whole = hashes.buckets(rows)
    assert np.array_equal(
        whole, np.concatenate([hashes.buckets(rows[:1]), hashes.buckets(rows[1:77]), hashes.buckets(rows[77:])])
    )
    assert np.array_equal(whole[::-1], hashes.buckets(rows[::-1]))
    assert np.array_equal(whole, hashes.buckets(np.asfortranarray(rows)))
    for threads in (1, 2):
        with threadpool_limits(threads):
            assert np.array_equal(whole, hashes.buckets(rows))
            again = fit(rows, family, 8, 1)
        assert to_bytes(**again.arrays()) == to_bytes(**hashes.arrays())
    assert len(hashes.buckets(rows[:0])) == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [noise, points])
def test_the_order_of_the_sample_does_not_matter(family: Family, make: Any) -> None:
    rows = make(300, 40)
    shuffled = rows[np.random.default_rng(1).permutation(len(rows))]
    assert to_bytes(**fit(rows, family, 8, 1).arrays()) == to_bytes(**fit(shuffled, family, 8, 1).arrays())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_of_many_functions_are_those_of_few(family: Family) -> None:
    rows = noise(300, 40)
    few, many = (fit(rows, family, functions, 1).values(rows) for functions in (3, 9))
    assert np.array_equal(few, many[:, :3])


@pytest.mark.parametrize("family", ["lsh", "sign"])
def test_another_seed_draws_other_functions(family: Family) -> None:
    rows = noise(300, 40)
    assert not np.array_equal(fit(rows, family, 8, 1).values(rows), fit(rows, family, 8, 2).values(rows))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.integers(1, 64),
    st.floats(0.5, 5000),
    st.integers(0, 2**32),
    st.lists(st.lists(st.integers(0, 255), min_size=3, max_size=3), min_size=1, max_size=40),
)
def test_rows_share_a_key_if_and_only_if_all_functions_agree(
    family: Family, functions: int, width: float, seed: int, rows: list[list[int]]
) -> None:
    pixels = np.array(rows, np.uint8)
    hashes = fit(pixels, family, functions, seed, width=width)
    _, by_values = np.unique(hashes.values(pixels), axis=0, return_inverse=True)
    _, by_keys = np.unique(hashes.buckets(pixels), return_inverse=True)
    assert np.array_equal(by_values.ravel()[:, None] == by_values.ravel(), by_keys[:, None] == by_keys)


def test_keys_of_bits_are_numbers_with_these_bits() -> None:
    rows = noise(300, 40)
    hashes = fit(rows, "sign", 10, 1)
    assert np.array_equal(hashes.buckets(rows), hashes.values(rows) @ (1 << np.arange(10)))


def test_each_function_of_dsh_halves_the_sample() -> None:
    """Each function of dsh halves the sample along a principal direction."""
    images = np.rint(np.random.default_rng(2).normal(128, 1, (501, 64)) * np.linspace(1, 0.2, 64)).astype(np.uint8)
    images = (images.astype(int) + np.random.default_rng(3).integers(-9, 9, (501, 64))).astype(np.uint8)
    values = fit(images, "dsh", 5, 0).values(images)
    assert values.sum(axis=0).tolist() == [250] * 5
    scores = PCA(5, svd_solver="full").fit_transform(images.astype(float))
    above = scores > np.median(scores, axis=0)
    agree = (values.astype(bool) == above).mean(axis=0)
    assert np.maximum(agree, 1 - agree).min() > 0.99


def test_dsh_of_fewer_rows_than_pixels_has_the_same_directions() -> None:
    """Dsh of images with more pixels than rows takes the same directions."""
    images = noise(40, 13_000)
    values = fit(images, "dsh", 4, 0).values(images)
    assert values.sum(axis=0).tolist() == [20] * 4
    scores = PCA(4, svd_solver="full").fit_transform(images.astype(float))
    agree = (values.astype(bool) == (scores > np.median(scores, axis=0))).mean(axis=0)
    assert np.maximum(agree, 1 - agree).min() > 0.9


def test_dsh_of_features_halves_them_too() -> None:
    rows = points(400, 30)
    assert fit(rows, "dsh", 6, 0).values(rows).sum(axis=0).tolist() == [200] * 6


@pytest.mark.parametrize("make", [noise, points])
def test_the_width_is_four_median_distances_of_neighbours(make: Any) -> None:
    """The width is four times the median distance of nearest neighbours."""
    rows = make(WIDTH_ROWS // 8, 20)
    distances = cdist(rows.astype(float), rows.astype(float))
    np.fill_diagonal(distances, np.inf)
    median = np.sort(distances.min(axis=1))[(len(rows) - 1) // 2]
    repeated = np.vstack([rows, rows])  # equal rows are no neighbours
    assert fit(rows, "lsh", 2, 0).width == pytest.approx(4 * median, rel=1e-12)
    assert fit(repeated, "lsh", 2, 0).width == pytest.approx(4 * median, rel=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 2, 50])
def test_equal_rows_are_in_one_bucket(family: Family, rows: int) -> None:
    for value in (0, 77, 255):
        images = np.full((rows, 48), value, np.uint8)
        assert len(np.unique(fit(images, family, 8, 0).buckets(images))) == 1
    still = np.full((rows, 5), -12, np.int32)
    assert len(np.unique(fit(still, family, 8, 0).buckets(still))) == 1


@pytest.mark.parametrize("make", [noise, points])
def test_a_function_of_kmeans_is_the_nearest_centroid(make: Any) -> None:
    """Against all distances in whole numbers, and scikit-learn's inertia; functions are fitted to other halves."""
    rows = make(200, 7)
    hashes = fit(rows, "kmeans", 3, 4, centroids=5)
    centroids = np.split((hashes.weights / -2).astype(np.int64).T.astype(object), 3)
    assert len({bytes(each.astype(np.int64)) for each in centroids}) == 3
    for function, centres in enumerate(centroids):
        squared = ((rows.astype(object)[:, None] - centres) ** 2).sum(axis=2)
        assert hashes.values(rows)[:, function].tolist() == squared.argmin(axis=1).tolist()
        best = KMeans(5, n_init=5, random_state=0).fit(rows.astype(float)).inertia_
        assert float(squared.min(axis=1).sum()) < 1.3 * best
    assert len(set(hashes.buckets(rows).tolist())) == len({tuple(row) for row in hashes.values(rows).tolist()})


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_functions_are_the_same_ones(family: Family) -> None:
    rows = noise(300, 40)
    hashes = fit(rows, family, 12, 1)
    with np.load(io.BytesIO(to_bytes(**hashes.arrays())), allow_pickle=False) as data:
        loaded = Hashes.from_arrays(dict(data))
    assert np.array_equal(loaded.buckets(rows), hashes.buckets(rows))
    assert (loaded.family, loaded.width, loaded.rows, loaded.functions) == (family, hashes.width, 300, 12)
    assert to_bytes(**loaded.arrays()) == to_bytes(**hashes.arrays())


def test_what_cannot_be_fitted_is_said_in_one_line() -> None:
    with pytest.raises(UsageError, match="--functions must be at least 1 and at most 64, got 65"):
        fit(noise(5, 5), "sign", 65, 0)
    with pytest.raises(UsageError, match="--functions must be at least 1"):
        fit(noise(5, 5), "sign", 0, 0)
    with pytest.raises(UsageError, match="--family dsh takes at most 12,288 features per row, got 13,000"):
        fit(points(5, 13_000), "dsh", 2, 0)
