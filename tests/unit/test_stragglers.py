"""The rule by which a straggler ends synchronous training: a table of step times, and what a checkpoint keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from trainer.coordination.orders import StepMeasurements
from trainer.coordination.stragglers import Straggler, StragglerRule, StragglerWatch, find_straggler, reason_of
from trainer.stages import build_stages

WORKERS, ROWS = 4, 400


@pytest.mark.parametrize(
    ("step_s", "factor", "found"),
    [
        ([[1], [1], [1]], 1.5, None),
        ([[1], [4], [1]], 3, Straggler(1, 4)),
        ([[1], [3], [1]], 3, Straggler(1, 3)),
        ([[0.1], [0.3], [0.1]], 3, Straggler(1, 0.3 / 0.1)),  # 3 * 0.1 > 0.3
        ([[1], [2.9], [1]], 3, None),
        ([[1], [4], [5], [1], [1]], 3, Straggler(2, 5)),
        ([[1], [4], [4], [1], [1]], 3, Straggler(1, 4)),
        ([[1, 1, 90], [1, 1, 1], [1, 1, 1]], 3, None),  # a single long step
        ([[1, 9, 9], [1, 1, 1], [1, 1, 1]], 3, Straggler(0, 9)),
        ([[2, 8], [1, 1], [1, 1]], 3, Straggler(0, 5)),  # the median of two times is their mean
        ([[1], [4]], 3, Straggler(1, 4)),  # the faster of two workers is ordinary
        ([[1], [1], [4], [4]], 3, Straggler(2, 4)),
        ([[1], [4], [4], [4], [4]], 3, None),  # a fast worker makes no stragglers of the others
        ([[1]], 1.5, None),
        ([[0], [1], [0]], 2, None),  # clocks that are too coarse
    ],
)
def test_a_straggler_is_slower_than_the_median_worker(
    step_s: list[list[float]], factor: float, found: Straggler | None
) -> None:
    assert find_straggler(step_s, factor) == found


def step(watch: StragglerWatch, *seconds: float) -> bool:
    """Note an update with a gradient of every worker, the last worker first, and look."""
    gradients = [(worker, StepMeasurements(1, 0.0, 0, time_s)) for worker, time_s in enumerate(seconds)]
    watch.add(reversed(gradients))
    return watch.look()


def test_a_watch_needs_a_window_of_steps_and_forgets_older() -> None:
    watch = StragglerWatch(StragglerRule(3, 3), 2, {})
    assert [step(watch, 1, slow) for slow in (9, 9, 1, 1, 1, 9)] == [False, False, True, False, False, False]
    assert step(watch, 1, 9)
    assert watch.state["step_s"] == [[1, 1, 1], [1, 9, 9]]


def test_a_watch_reads_the_times_as_the_log_has_them() -> None:
    watch = StragglerWatch(StragglerRule(4, 1), 2, {})
    assert step(watch, 0.1, 0.3999999999)
    assert watch.state["step_s"] == [[0.1], [0.4]]


def test_a_checkpoint_keeps_the_times_and_the_straggler() -> None:
    state: dict[str, Any] = {}
    step(StragglerWatch(StragglerRule(3, 2), 2, state), 1, 4.1)
    assert reason_of(state, 2) is None
    resumed = StragglerWatch(StragglerRule(3, 2), 2, json.loads(json.dumps(state)))
    assert step(resumed, 1, 4.1)
    kept = json.loads(json.dumps(resumed.state))
    assert reason_of(kept, 2) == "worker 1 was a straggler: 4.1 times the median over 2 steps"
    assert reason_of(kept, 1) == "worker 1 was a straggler: 4.1 times the median over the last step"


def test_without_a_rule_a_checkpoint_keeps_nothing() -> None:
    watch = StragglerWatch(None, 2, {})
    assert not step(watch, 1, 100)
    assert watch.state == {}


def test_only_the_first_stage_has_the_rule() -> None:
    stages = build_stages(make_config(exchange="sync-switch", straggler=2.5, steps=20), WORKERS, ROWS)
    assert [stage.straggler_rule for stage in stages] == [StragglerRule(2.5, 20), None]
    stages = build_stages(make_config(exchange="sync-switch", steps=20), WORKERS, ROWS)
    assert [stage.straggler_rule for stage in stages] == [None, None]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"straggler": 1.0}, "--straggler must be more than 1, got 1.0"),
        ({"straggler": 2.0, "straggler_window": 0}, "--straggler-window must be at least 1, got 0"),
    ],
)
def test_a_rule_that_cannot_be_is_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_config(exchange="sync-switch", **values)
    assert str(refused.value) == line
