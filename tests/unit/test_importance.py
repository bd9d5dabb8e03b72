"""Importance of rows and their division by it: against plain Python, and the invariants of the two divisions."""

from __future__ import annotations

import statistics
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.assignment.groups import group_table
from pipeline.core.errors import UsageError
from pipeline.core.importance import Heuristic, Measure, blocks, importance, ranks, stripes
from pipeline.core.storage.store import Store
from pipeline.input.example_ledger import open_ledger
from pipeline.strategies.importance import owners

Losses = list[tuple[int, int, float]]  # row, epoch, loss
# Multiples of 1/8 up to 8: their sums are exact, so that equal values are ties for both sides.
eighths = st.integers(0, 64).map(lambda number: number / 8)
some_losses = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8), eighths), max_size=60)
values_of_rows = st.lists(eighths, min_size=1, max_size=60)


def by_definition(losses: Losses, rows: int, measure: Measure, ignored: int) -> list[float | None]:
    """Return the importance of each row in plain Python: the mean of an epoch, then the mean or variance of epochs."""
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row, epoch, loss in losses:
        if epoch > ignored:
            cells[row, epoch].append(loss)
    epochs = {epoch for _, epoch in cells}
    result: list[float | None] = []
    for row in range(rows):
        means = [statistics.fmean(cells[row, epoch]) for epoch in sorted(epochs) if (row, epoch) in cells]
        if not means:
            result.append(None)
        elif measure == "average" or len(epochs) == 1:
            result.append(statistics.fmean(means))
        else:
            result.append(statistics.variance(means) if len(means) > 1 else 0.0)
    return result


def divided_by_definition(values: list[float], workers: int, heuristic: Heuristic) -> list[list[int]]:
    """Return the rows of each worker in plain Python: a sorted list is dealt in turn, or cut."""
    order = sorted(range(len(values)), key=lambda row: (-values[row], row))
    if heuristic == "stripes":
        return [order[worker::workers] for worker in range(workers)]
    parts: list[list[int]] = []
    for worker in range(workers):
        # The first workers get the rows that equal pieces leave over.
        size = len(values) // workers + (worker < len(values) % workers)
        parts.append([order.pop(0) for _ in range(size)])
    return parts


def compute(
    losses: Losses, rows: int, measure: Measure, ignored: int = 0, num_epochs: int | None = None
) -> np.ndarray[Any, Any]:
    """Return the importance without the ignored first epochs. num_epochs: those of the losses by default."""
    used = [loss for loss in losses if loss[1] > ignored]
    places, epochs, values = (np.array([loss[column] for loss in used]) for column in range(3))
    return importance(
        places.astype(np.int64),
        epochs.astype(np.int64),
        values.astype(np.float32),
        rows=rows,
        measure=measure,
        num_epochs=len(np.unique(epochs)) if num_epochs is None else num_epochs,
    )


@pytest.mark.parametrize(
    ("divide", "expected"),
    [(stripes, [{0, 4}, {1, 5}, {2, 6}, {3, 7}]), (blocks, [{0, 1}, {2, 3}, {4, 5}, {6, 7}])],
)
def test_the_figure_of_the_paper(divide: Any, expected: list[set[int]]) -> None:
    """Eight examples of falling importance over four workers."""
    workers = divide(np.arange(8, 0, -1).astype(np.float64), 4)
    assert [set(np.flatnonzero(workers == worker)) for worker in range(4)] == expected


@given(losses=some_losses, measure=st.sampled_from(["average", "variance"]), ignored=st.integers(0, 8), data=st.data())
def test_importance_is_the_mean_or_variance_of_epochs(
    losses: Losses, measure: Measure, ignored: int, data: st.DataObject
) -> None:
    """The result has the same bits in any order, and in pieces of rows with the number of epochs."""
    expected = by_definition(losses, 10, measure, ignored)
    values = compute(losses, 10, measure, ignored)
    assert values.tolist() == pytest.approx([np.nan if value is None else value for value in expected], nan_ok=True)
    shuffled = data.draw(st.permutations(losses))
    assert compute(shuffled, 10, measure, ignored).tobytes() == values.tobytes()
    num_epochs = len({epoch for _, epoch, _ in losses if epoch > ignored})
    pieces = [
        compute(
            [(row - low, epoch, loss) for row, epoch, loss in losses if low <= row < low + 5],
            5,
            measure,
            ignored,
            num_epochs,
        )
        for low in (0, 5)
    ]
    assert np.concatenate(pieces).tobytes() == values.tobytes()


def test_the_variance_of_one_epoch_is_its_loss() -> None:
    """The authors' code does the same, so that an interval of one epoch ranks by average loss."""
    losses = [(0, 1, 9.0), (1, 1, 9.0), (0, 6, 1.0), (1, 6, 2.0)]
    assert compute(losses, 2, "variance", ignored=5).tolist() == [1.0, 2.0]
    assert compute(losses, 2, "variance").tolist() == [32.0, 24.5]


@given(values=values_of_rows, workers=st.integers(1, 9), heuristic=st.sampled_from(["stripes", "blocks"]))
def test_every_row_has_one_worker(values: list[float], workers: int, heuristic: Heuristic) -> None:
    """The division is that of the definition; sizes differ by at most one. The pipeline's dealing is the same."""
    divide = {"stripes": stripes, "blocks": blocks}[heuristic]
    result = divide(np.array(values), workers)
    expected = divided_by_definition(values, workers, heuristic)
    assert [np.flatnonzero(result == worker).tolist() for worker in range(workers)] == [
        sorted(part) for part in expected
    ]
    assert np.ptp(np.bincount(result, minlength=workers)) <= 1
    table = group_table(np.array([len(values)]), workers)
    assert owners(table, ranks(np.array(values)), heuristic).tolist() == result.tolist()


@given(values=values_of_rows, workers=st.integers(1, 9))
def test_stripes_have_the_same_distribution(values: list[float], workers: int) -> None:
    """The Kolmogorov-Smirnov distance of two workers is at most n/N, plus the effect of ties and unequal sizes."""
    result = stripes(np.array(values), workers)
    counts = np.array(
        [[np.sum(np.array(values)[result == worker] >= value) for value in values] for worker in range(workers)]
    )
    assert np.ptp(counts, axis=0).max() <= 1
    if len(set(values)) == 1:
        assert result.tolist() == [row % workers for row in range(len(values))]


@given(values=values_of_rows, workers=st.integers(1, 9))
def test_blocks_are_ordered(values: list[float], workers: int) -> None:
    """No row of a worker is more important than a row of a worker before it."""
    parts = [np.array(values)[blocks(np.array(values), workers) == worker] for worker in range(workers)]
    filled = [part for part in parts if len(part)]
    assert all(before.min() >= after.max() for before, after in pairwise(filled))


@pytest.mark.parametrize("heuristic", ["stripes", "blocks"])
def test_unequal_workers_get_their_shares(heuristic: Heuristic) -> None:
    table = group_table(np.array([103]), 3, ratios=(3, 1, 2))
    result = owners(table, np.arange(103), heuristic)
    assert (np.abs(np.bincount(result) - 103 * np.array([3, 1, 2]) / 6) < 1).all()
    assert (np.diff(result) >= 0).all() == (heuristic == "blocks")


def test_the_folder_of_a_run_is_refused_with_its_ledger(tmp_path: Path) -> None:
    (tmp_path / "examples").mkdir()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=rf"is the folder of a run; give {tmp_path}/examples"):
        open_ledger(Store(), str(tmp_path))
