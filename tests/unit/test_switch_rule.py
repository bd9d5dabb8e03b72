"""The rule of Strategy-Switch against the vectors of its specification, and its properties."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.coordination.switch_rule import has_relative_change, mean_change, switches_now

FALLING = (0.500, 0.450, 0.420, 0.415, 0.413, 0.412)
FLAT = (0.4000, 0.3998, 0.3997, 0.3996, 0.3995, 0.3994)
LOSSES = st.lists(st.floats(0.01, 10), min_size=1, max_size=12)


def switch_epoch(losses: Sequence[float], epochs: float, window: int = 5, threshold: float = 1.0) -> int | None:
    """The epoch after which a run switches, whose losses become known one by one."""
    ends = range(1, len(losses) + 1)
    return next((k for k in ends if switches_now(losses[:k], epochs, window, threshold)), None)


@pytest.mark.parametrize(("losses", "percent"), [(FALLING, 3.716240), (FLAT, 0.030018), ((0.7,) * 6, 0.0)])
def test_the_mean_change_of_the_published_losses(losses: tuple[float, ...], percent: float) -> None:
    assert round(mean_change(losses), 6) == percent


@pytest.mark.parametrize(
    ("losses", "epoch"),
    [
        (FALLING, None),
        (FLAT, 6),
        ((0.7,) * 20, 6),
        ((0.7,) * 5, None),
        ((1.0, 0.9, 0.8, *FLAT), 9),
        ((0.7,) * 3 + (math.nan,) + (0.7,) * 5, None),
        ((0.7,) * 3 + (math.nan,) + (0.7,) * 6, 10),
        ((0.7,) * 5 + (0.0,), None),
        ((0.7,) * 5 + (-0.7,), None),
        ((math.inf,) * 8, None),
    ],
)
def test_the_epoch_after_which_a_run_switches(losses: tuple[float, ...], epoch: int | None) -> None:
    assert switch_epoch(losses, 100) == epoch


def test_a_change_of_the_threshold_itself_is_no_switch() -> None:
    losses = (1.0, 2.0)  # 100 %, without rounding
    assert switch_epoch(losses, 100, window=1, threshold=100) is None
    assert switch_epoch(losses, 100, window=1, threshold=101) == 2


def test_no_run_switches_after_its_last_epoch() -> None:
    assert switch_epoch(FLAT, 7) == 6
    assert switch_epoch(FLAT, 6.5) == 6
    assert switch_epoch(FLAT, 6) is None
    assert switch_epoch((0.7,) * 9, 6) is None


def test_a_tenfold_drop_of_the_rate_delays_the_switch() -> None:
    """The loss falls once by far more than before, which stays in the window for five epochs."""
    losses = (*(0.5 - 0.01 * k for k in range(5)), *(0.4,) * 10)
    assert [round(mean_change(losses[:k]), 2) for k in range(6, 12)] == [4.26, 3.86, 3.45, 3.03, 2.61, 0.0]
    assert switch_epoch(losses, 100) == 11


@given(LOSSES, st.floats(0.125, 8))
def test_the_unit_of_the_loss_does_not_matter(losses: list[float], factor: float) -> None:
    scaled = [loss * factor for loss in losses]
    assert mean_change(scaled, 3) == pytest.approx(mean_change(losses, 3), rel=1e-9)


def test_losses_without_a_relative_change_are_named() -> None:
    assert has_relative_change(FLAT)
    assert not has_relative_change((*FLAT, math.nan))
    assert not has_relative_change((0.0,))
