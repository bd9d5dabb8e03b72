"""Checks of what a strategy returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import JobError
from pipeline.core.shardset.parts import Worker
from pipeline.strategies.base import FitResult, OneGroup
from pipeline.strategies.checks import check_fit, check_numbers, check_shares

BOUNDS = [(0, 4), (4, 7)]


def test_a_sound_fit_passes() -> None:
    check_fit(FitResult(OneGroup(), np.array([[3, 1], [0, 3]]), params={"k": 2, "share": 0.5}), "own", BOUNDS)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[4, 3]], r"the strategy own returned counts int64 \[1, 2\]: they must be int64 \[2 chunks, groups\]"),
        ([4, 3], r"counts int64 \[2\]"),
        ([[4.0], [3.0]], r"counts float64 \[2, 1\]"),
        ([[8], [6]], "own counts other rows than there are: 8 of the 4 rows of chunk 0"),
        ([[5, -1], [0, 3]], "own counts other rows than there are$"),
    ],
)
def test_counts_of_other_rows_are_refused(counts: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        check_fit(FitResult(OneGroup(), np.array(counts)), "own", BOUNDS)


@pytest.mark.parametrize("value", [np.float32(1), np.arange(2), float("nan"), {1, 2}])
def test_parameters_that_are_no_json_are_refused(value: Any) -> None:
    """Before the rows are written, and not when the manifest is."""
    with pytest.raises(JobError, match=r"the strategy own returned parameters that the manifest cannot hold"):
        check_fit(FitResult(OneGroup(), np.array([[4], [3]]), params={"k": value}), "own", BOUNDS)


@pytest.mark.parametrize("values", [np.array([0, 2, 1]), np.array([2, 2, 2], np.uint8)])
def test_a_number_per_row_passes(values: Any) -> None:
    assert check_numbers(values, "workers", OneGroup(), 3, 3) is values


@pytest.mark.parametrize(
    ("values", "detail"),
    [
        (np.array([0, 1, 3]), "0 to 3"),
        (np.array([-1, 0, 0]), "-1 to 0"),
        (np.array([0, 1]), r"int64 \[2\]"),
        (np.array([0.0, 1, np.nan]), r"float64 \[3\]"),
        (np.zeros((3, 1), np.int64), r"int64 \[3, 1\]"),
        ([0, 1, 2], r"list \[3\]"),
        (None, r"NoneType \[\]"),
    ],
)
def test_other_values_name_the_grouping(values: Any, detail: str) -> None:
    line = rf"the grouping OneGroup returned workers {detail}: workers\(\) must return int64 \[3\] from 0 to 2$"
    with pytest.raises(JobError, match=line):
        check_numbers(values, "workers", OneGroup(), 3, 3)


def _workers(rows: Sequence[int]) -> list[Worker]:
    return [Worker(index=index, rows=count, files=[]) for index, count in enumerate(rows)]


def test_shares_that_were_not_counted_are_refused() -> None:
    histogram = np.array([[2, 1], [1, 3]])
    check_shares(_workers([3, 4]), histogram, "own")
    check_shares(_workers([9, 9]), None, "own")
    with pytest.raises(
        JobError, match=r"own deals 5 rows to worker 1 and counts 4: .* must override rows_by_worker\(\)"
    ):
        check_shares(_workers([3, 5]), histogram, "own")
