"""The PCA of fewer images than pixels: the same components as by the pixels' covariance, and the same bits for any order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from sklearn.decomposition import PCA

from pipeline.clustering import dual, gram
from pipeline.clustering.pca import BlockPCA, limit_rows
from pipeline.core.errors import DataError, UsageError


def images_of(rows: int, pixels: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """A few directions with much variance, and noise."""
    rng = np.random.default_rng(seed)
    wide = rng.normal(size=(rows, 6)) * [50, 40, 30, 20, 10, 5] @ rng.normal(size=(6, pixels)) / 2
    return (wide + rng.normal(128, 4, (rows, pixels))).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    ("rows", "pixels", "components"), [(200, 1000, 6.0), (40, 9000, 0.9), (3, 50, 10.0), (90, 91, 4.0)]
)
def test_components_and_variances_are_scikit_learns(rows: int, pixels: int, components: float) -> None:
    images = images_of(rows, pixels)
    found, mean = dual.fit(images, components)
    number = len(found.variances)
    reference = PCA(number, svd_solver="full").fit(images.astype(float))
    np.testing.assert_allclose(mean, reference.mean_)
    np.testing.assert_allclose(found.variances, reference.explained_variance_, rtol=1e-9)
    cosines = np.abs((found.components * reference.components_).sum(axis=1))
    np.testing.assert_allclose(cosines, 1, atol=1e-9)
    assert found.total_variance == pytest.approx(images.astype(float).var(axis=0, ddof=1).sum(), rel=1e-12)
    if components < 1:
        assert found.variances.sum() >= components * found.total_variance > found.variances[:-1].sum()


def test_both_matrices_have_the_same_spectrum() -> None:
    images = images_of(150, 600)
    by_rows, _ = dual.fit(images, 5)
    by_pixels = gram.top_components(gram.covariance(gram.gram_of_blocks([images], 600)), 5)
    np.testing.assert_allclose(by_rows.components, by_pixels.components, atol=1e-9)
    np.testing.assert_allclose(by_rows.variances, by_pixels.variances, rtol=1e-12)


def test_the_order_of_the_rows_changes_no_bit() -> None:
    images = images_of(120, 5000)
    one, _ = dual.fit(images, 7)
    other, _ = dual.fit(images[np.random.default_rng(1).permutation(120)], 7)
    assert np.array_equal(one.components, other.components)
    assert np.array_equal(one.variances, other.variances)


@pytest.mark.parametrize("value", [0, 7, 255])
def test_equal_images_have_one_direction_without_variance(value: int) -> None:
    found, mean = dual.fit(np.full((9, 700), value, np.uint8), 5)
    assert found.variances.tolist() == [0]
    assert set(mean) == {value}


@pytest.mark.parametrize(
    ("asked", "rows", "expected"),
    [("auto", 100, 100), ("auto", 10**6, 2000), (3566, 10**6, 3566), ("all", 3000, 3000), (500, 10**6, 500)],
)
def test_large_images_are_fitted_to_no_more_than_one_task_holds(asked: int | str, rows: int, expected: int) -> None:
    assert gram.rows_to_fit(asked, rows, 3 * 224 * 224) == expected


@pytest.mark.parametrize("asked", ["all", 5000])
def test_more_large_images_are_refused(asked: int | str) -> None:
    with pytest.raises(UsageError, match=rf"at most 3,566 of them; leave out --fit-rows {asked}"):
        gram.rows_to_fit(asked, 10**5, 3 * 224 * 224)


def test_too_many_large_images_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of too many large images is refused before they are held."""
    monkeypatch.setattr(gram, "MOST_BYTES", 10 * 20_000)
    seen = 0

    def blocks() -> Iterator[np.ndarray[Any, Any]]:
        nonlocal seen
        for _ in range(1000):
            seen += 1
            yield np.zeros((2, 20_000), np.uint8)

    with pytest.raises(DataError, match="images of 20,000 values are fitted to at most 10 of them"):
        list(limit_rows(blocks(), 20_000))
    assert seen == 6
    with pytest.raises(UsageError, match="too large for a matrix of pixels x pixels"):
        BlockPCA().fit_partials(None, 20_000)  # type: ignore[arg-type]
