"""The exact block Gram against 64-bit integers and scikit-learn, at the edges of float32's exact range too."""

import json
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg.blas import ssyrk
from sklearn.decomposition import PCA
from threadpoolctl import threadpool_limits

from pipeline.clustering import gram


def _dense(found: gram.Gram) -> np.ndarray:
    d = len(found.total)
    full = np.zeros((d, d), np.int64)
    full[np.triu_indices(d)] = found.packed
    return full + np.triu(full, 1).T


@pytest.mark.parametrize("rows", [1, 1023, 2048, 5000])
@pytest.mark.parametrize("fill", ["noise", "black", "white", "spikes"])
def test_block_gram_equals_the_integer_gram_bit_for_bit(rows: int, fill: str) -> None:
    """black and white pixels are +-128 and 127 after the shift: the largest products there are."""
    rng = np.random.default_rng(rows)
    images = {
        "noise": rng.integers(0, 256, (rows, 48)),
        "black": np.zeros((rows, 48)),
        "white": np.full((rows, 48), 255),
        "spikes": np.where(rng.random((rows, 48)) < 0.5, 0, 255),
    }[fill].astype(np.uint8)
    found = gram.gram_of_blocks([images[: rows // 3], images[rows // 3 :]], 48)
    shifted = images.astype(np.int64) - 128
    assert np.array_equal(_dense(found), shifted.T @ shifted)
    assert np.array_equal(found.total, shifted.sum(axis=0))
    assert found.count == rows


@pytest.mark.parametrize("cut", [1, 700, 1024])
def test_a_sum_one_above_the_bound_is_exact(cut: int) -> None:
    """Add 1 to 2^24, the sum of the squares of 1,024 black pixels."""
    images = np.zeros((1025, 4), np.uint8)
    images[1024] = 129
    for blocks in ([images], [images[:cut], images[cut:]]):
        assert gram.gram_of_blocks(blocks, 4).packed.tolist() == [2**24 + 1] * 10


@given(st.lists(st.integers(0, 400), min_size=0, max_size=5), st.permutations(range(6)))
@settings(max_examples=25, deadline=None)
def test_merging_parts_in_any_order_gives_the_same_bits(cuts: list[int], order: list[int]) -> None:
    images = np.random.default_rng(1).integers(0, 256, (400, 30)).astype(np.uint8)
    parts = np.split(images, sorted(cuts))
    locals_ = [gram.gram_of_blocks([part], 30) for part in parts]
    shuffled = [locals_[at] for at in order if at < len(locals_)]
    total = shuffled[0]
    for part in shuffled[1:]:
        total = gram.merge(total, part)
    assert np.array_equal(_dense(total), _dense(gram.gram_of_blocks([images], 30)))


def test_rows_that_come_one_by_one_are_multiplied_together(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(6).integers(0, 256, (5000, 30)).astype(np.uint8)
    products, whole = [], gram.gram_of_blocks([images], 30)

    def count(*args: Any, **more: Any) -> Any:
        products.append(args[1].shape[1])
        return ssyrk(*args, **more)

    monkeypatch.setattr("scipy.linalg.blas.ssyrk", count)
    found = gram.gram_of_blocks([images[low : low + 3] for low in range(0, 5000, 3)], 30)
    assert np.array_equal(found.packed, whole.packed)
    assert sum(products) == 5000
    assert len(products) < 20


def test_blas_threads_do_not_change_a_bit() -> None:
    images = np.random.default_rng(2).integers(0, 256, (3000, 300)).astype(np.uint8)
    spectra = []
    for threads in (1, 2):
        with threadpool_limits(threads, "blas"):
            spectra.append(gram.top_components(gram.covariance(gram.gram_of_blocks([images], 300)), 20))
    assert np.array_equal(spectra[0].components, spectra[1].components)
    assert np.array_equal(spectra[0].variances, spectra[1].variances)


def test_the_covariance_is_numpys_and_its_upper_triangle_is_enough() -> None:
    images = np.random.default_rng(4).integers(0, 256, (500, 90)).astype(np.uint8)
    expected = np.cov(images.astype(np.float64), rowvar=False)
    found = gram.covariance(gram.gram_of_blocks([images], 90))
    np.testing.assert_allclose(found, np.triu(expected), atol=1e-9)
    for components in (5, 40):  # by Lanczos, and whole
        below = np.tril(np.full((90, 90), 1e9), -1)
        one, other = gram.top_components(found, components), gram.top_components(np.triu(expected) + below, components)
        np.testing.assert_allclose(one.variances, np.linalg.eigvalsh(expected)[::-1][:components], rtol=1e-9)
        np.testing.assert_allclose(one.components, other.components, atol=1e-6)


def test_a_heartbeat_goes_on_while_all_eigenvectors_are_computed() -> None:
    beats, ended = [0], threading.Event()

    def beat() -> None:
        while not ended.wait(0.002):
            beats[0] += 1

    basis = np.random.default_rng(5).normal(size=(700, 700))
    thread = threading.Thread(target=beat)
    thread.start()
    gram.top_components(np.triu(basis @ basis.T), 400)
    ended.set()
    thread.join()
    assert beats[0] > 10


@pytest.mark.parametrize("components", [5, 20, 0.8])
def test_components_span_what_scikit_learn_finds(components: float) -> None:
    rng = np.random.default_rng(3)
    factors = rng.normal(size=(2000, 120)) * (0.9 ** np.arange(120)) * 60
    mixing = np.linalg.qr(rng.normal(size=(120, 120)))[0]
    images = np.clip(factors @ mixing + 128, 0, 255).astype(np.uint8)
    found = gram.top_components(gram.covariance(gram.gram_of_blocks([images], 120)), components)
    reference = PCA(components, svd_solver="covariance_eigh").fit(images.astype(np.float64))
    assert len(found.variances) == reference.n_components_
    np.testing.assert_allclose(found.variances, reference.explained_variance_, rtol=1e-8)
    cosines = np.linalg.svd(found.components @ reference.components_.T, compute_uv=False)
    np.testing.assert_allclose(cosines, 1.0, atol=1e-6)
    assert (found.components[np.arange(len(cosines)), np.abs(found.components).argmax(axis=1)] > 0).all()


def test_directions_without_variance_are_left_out() -> None:
    images = np.random.default_rng(4).integers(0, 256, (500, 3)).astype(np.uint8).repeat(20, axis=1)
    assert len(gram.top_components(gram.covariance(gram.gram_of_blocks([images], 60)), 50).variances) == 3
    flat = np.full((10, 60), 7, np.uint8)
    assert len(gram.top_components(gram.covariance(gram.gram_of_blocks([flat], 60)), 5).variances) == 1


THREADS = """
import json, sys
import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits
from pipeline.clustering import gram
early = "scipy" in sys.modules
def noted(*args):
    limits = threadpool_limits(*args)
    threads = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
    print(json.dumps([early, threads]))
    return limits
gram.threadpool_limits = noted
gram.top_components(np.diag(np.arange(1.0, 101)), 3)
"""


@pytest.mark.slow
def test_each_blas_that_loads_with_the_solver_has_one_thread() -> None:
    """numpy's and scipy's: the components would depend on the number of threads."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    loaded_early, threads = json.loads(done.stdout)
    assert not loaded_early
    assert threads == [1, 1]
