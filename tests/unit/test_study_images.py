"""The values of single images: packed predictions, churn, and the worst class and neighbourhood."""

from __future__ import annotations

import math
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.support.made_up_study import make_plan, make_records, normal
from trainer.data.rows import Rows
from trainer.study.analysis.analyse import analyse
from trainer.study.analysis.churn import churn_of, compare_churn, disagreement, jackknife_interval
from trainer.study.report.tables import tables
from trainer.study.run.predictions import is_other_accuracy, neighbourhoods_of, pack, unpack, worst_neighbourhood


@given(st.lists(st.integers(0, 65535), max_size=300))
def test_packed_predictions_are_read_back(values: list[int]) -> None:
    assert unpack(pack(np.array(values, np.int64))).tolist() == values


def test_ten_thousand_predictions_take_less_than_ten_kilobytes() -> None:
    rng = np.random.default_rng(0)
    assert len(pack(rng.integers(0, 10, 10_000))) < 6_500
    assert len(pack(rng.integers(0, 100, 10_000))) < 11_500


@pytest.mark.parametrize("text", ["", "x", "é", pack(np.arange(9))[:-5], pack(np.arange(9)) + "a"])
def test_text_that_is_no_predictions_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no packed predictions|ASCII|incorrect data check"):
        unpack(text)


def made_predictions(seeds: int, images: int, share: float, seed: int = 0) -> dict[int, np.ndarray]:
    """Models that each change a share of the images of a common prediction."""
    rng = np.random.default_rng([seed, seeds])
    common = rng.integers(0, 10, images)
    changed = [np.where(rng.random(images) < share, rng.integers(0, 10, images), common) for _ in range(seeds)]
    return dict(enumerate(changed))


def brute_force_churn(models: dict[int, np.ndarray]) -> float:
    return float(np.mean([np.mean(a != b) for a, b in combinations(models.values(), 2)]))


def test_churn_is_the_mean_disagreement_of_all_pairs() -> None:
    models = made_predictions(5, 200, 0.3)
    churn = churn_of(models, None)
    assert churn is not None
    assert churn.share == pytest.approx(brute_force_churn(models))
    assert (churn.runs, math.isnan(churn.p)) == (5, True)
    assert churn_of({0: models[0]}, None) is None


def test_models_of_many_classes_disagree_alike() -> None:
    """Classes that are equal in their last byte differ."""
    models = [np.array([1, 2, 3, 4]), np.array([257, 2, 3, 260])]
    assert disagreement(models).tolist() == [[0, 0.5], [0.5, 0]]


def test_the_interval_of_churn_is_the_jackknife_one() -> None:
    models = made_predictions(6, 300, 0.2)
    whole = brute_force_churn(models)
    pseudo = [6 * whole - 5 * brute_force_churn({k: v for k, v in models.items() if k != out}) for out in models]
    expected = stats.ttest_1samp(pseudo, 0).confidence_interval(0.95)
    assert jackknife_interval(disagreement(list(models.values()))) == pytest.approx((expected.low, expected.high))


def test_the_test_of_churn_exchanges_the_models_of_a_seed() -> None:
    """All 2^5 exchanges, each with its churn computed anew from the images."""
    first, second = made_predictions(5, 60, 0.2), made_predictions(5, 60, 0.35, seed=1)
    difference, p = compare_churn(disagreement([*first.values(), *second.values()]))
    every = []
    for exchanges in product((False, True), repeat=5):
        sides = [(second[s], first[s]) if swap else (first[s], second[s]) for s, swap in enumerate(exchanges)]
        below, above = (dict(enumerate(side)) for side in zip(*sides, strict=True))
        every.append(brute_force_churn(above) - brute_force_churn(below))
    assert difference == pytest.approx(every[0])
    as_much = np.mean(np.abs(every) >= abs(every[0]) - 1e-12)
    assert p == pytest.approx(as_much)


def test_a_member_whose_models_change_more_is_found_at_equal_accuracy() -> None:
    plan = make_plan(seeds=12)
    records = make_records(plan, normal({"random": 0.01, "stratified": 0.01}))
    calm, restless = made_predictions(12, 400, 0.1), made_predictions(12, 400, 0.3)
    for record in records:
        way, seed = record["run"].split("/")[1], int(record["run"].rpartition("/")[2])
        record |= {"predictions": pack((restless if way == "stratified" else calm)[seed])}
        record |= {"class_accuracy": [0.5, 0.25, None]}
    analysis = analyse(plan, records)
    churn = analysis.settings[0].members["stratified"].churn
    assert churn is not None
    assert churn.difference == pytest.approx(brute_force_churn(restless) - brute_force_churn(calm))
    assert churn.adjusted_p < 0.01
    table = next(table for table in tables(analysis) if table.caption.startswith("Churn"))
    assert [row[0] for row in table.rows] == ["random", "stratified"]
    assert table.rows[1][-1] == "1: 0.2500"


@pytest.mark.parametrize(
    ("images", "logged", "mode", "expected"),
    [
        (10_000, 0.5, "clean", False),
        (10_000, 0.5021, "clean", True),
        (10_000, 0.4, "paper", False),  # of changed images, in training mode
        (100, 0.52, "clean", False),  # two images, which rounding may change
        (100, 0.53, "clean", True),
    ],
)
def test_other_images_show_in_the_accuracy(images: int, logged: float, mode: str, expected: bool) -> None:
    assert is_other_accuracy(np.arange(images) % 2 == 0, logged, mode) is expected


def test_even_with_many_neighbourhoods_one_is_the_worst() -> None:
    """None of 300 equal neighbourhoods has half a percent of the rows."""
    accuracy = np.linspace(0.5, 0.9, 300)
    assert worst_neighbourhood(np.full(300, 10), accuracy) == 0.5
    assert worst_neighbourhood(np.array([1] + [10] * 299), accuracy) == accuracy[1]


def test_a_tiny_neighbourhood_is_not_the_worst() -> None:
    assert worst_neighbourhood(np.array([500, 498, 2]), np.array([0.7, 0.6, 0.0])) == 0.6


def test_neighbourhoods_are_those_of_the_images_in_any_order(tmp_path: Path) -> None:
    """Three colours, which k-means cannot miss; the second set has the rows in another order, and reads the cache."""
    rng = np.random.default_rng(3)
    colours = rng.integers(0, 3, 60)
    images = np.clip(colours[:, None, None, None] * 100 + rng.integers(0, 9, (60, 3, 16, 16)), 0, 255).astype(np.uint8)
    rows = Rows(images, colours.astype(np.int64), np.arange(60))
    manifest = SimpleNamespace(evaluation=SimpleNamespace(input=SimpleNamespace(fingerprint="60-ab")))
    shards: Any = SimpleNamespace(num_classes=2, manifest=manifest)
    groups = neighbourhoods_of(rows, shards, tmp_path)
    assert groups is not None
    assert all(len(set(colours[groups == group])) == 1 for group in set(groups))
    order = rng.permutation(60)
    again = neighbourhoods_of(rows.select(order), shards, tmp_path)
    assert again is not None
    assert np.array_equal(again, groups[order])
    assert neighbourhoods_of(Rows(images.astype(np.float32), rows.labels, rows.ids), shards, tmp_path) is None
