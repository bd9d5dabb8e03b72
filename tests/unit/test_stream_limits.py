"""A stream makes no more buckets and copies than a batch job may."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pipeline.core.errors import DataError, DivergenceError, JobError, UnsuitableError, UsageError
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet
from pipeline.input.arrivals import Arrivals
from pipeline.runs.program import cause
from pipeline.strategies import hash as hash_strategy
from pipeline.strategies.hash import Hash
from pipeline.stream.batch import StreamBatch
from pipeline.stream.buckets import Buckets, CounterUpdate
from pipeline.stream.request import StreamRequest


@pytest.mark.parametrize("kind", [DataError, UsageError, UnsuitableError, JobError, DivergenceError])
def test_an_error_of_a_batch_keeps_its_exit_code_through_spark(kind: type[JobError]) -> None:
    trace = (
        f"[STREAM_FAILED] Query terminated:\n  File x\npipeline.core.errors.{kind.__name__}: too many\n\tat org.apache"
    )
    assert cause(Exception(trace)) == ("too many", kind.exit_code)


def check(window: int, end: int, new: int, old: int = 0, copies_before: int = 0, buckets: int = 3) -> None:
    """Check the limits of a batch that adds copies of its own rows (new) and of earlier ones of its window (old)."""
    before = SimpleNamespace(manifest=Manifest(num_workers=1, workers=[], rows=end - 100, copies=copies_before))
    batch = StreamBatch(
        context=cast(Any, None),
        store=cast(Any, None),
        request=StreamRequest("/o", 200, Hash(family="sign", functions=6)),
        staging="/o/_attempt",
        before=cast(ShardSet, before),
        dataset=cast(Arrivals, SimpleNamespace(record_bytes=192)),
        phase=cast(Any, None),
    )
    after = Buckets.none().with_keys(np.arange(buckets))
    batch._check_limits(CounterUpdate(after, [], np.zeros(buckets, np.bool_), new, old), window, end, 1)


def test_copies_that_more_than_double_the_rows_are_refused() -> None:
    check(window=0, end=1000, new=600, old=400)
    with pytest.raises(
        UnsuitableError, match=r"copies add 1,001 to 1,000 rows; .* --window-rows 0, with another --output"
    ):
        check(window=0, end=1000, new=600, old=401)


def test_a_later_window_may_use_what_earlier_ones_left() -> None:
    check(window=900, end=1000, new=300, copies_before=700)
    with pytest.raises(UnsuitableError, match="copies add 1,001 to 1,000 rows"):
        check(window=900, end=1000, new=300, copies_before=701)


def test_a_set_over_the_limit_grows_by_windows_below_it() -> None:
    check(window=900, end=1000, new=100, copies_before=9000)


def test_more_buckets_than_can_be_dealt_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hash_strategy, "MOST_BUCKETS", 8)
    check(window=0, end=1000, new=0, buckets=8)
    with pytest.raises(UnsuitableError, match="the rows are in more than 8 buckets; use fewer --functions"):
        check(window=0, end=1000, new=0, buckets=9)
    monkeypatch.setattr(hash_strategy, "MOST_CELLS", 8)
    check(window=0, end=1000, new=0, buckets=8)
    with pytest.raises(UnsuitableError, match="the rows are in more than 4 buckets"):
        check(window=0, end=1000, new=0, old=1, buckets=8)  # whose rows are counted by one task more


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_rows_are_late_after_a_positive_finite_time(seconds: float) -> None:
    assert StreamRequest("/o", 200, Hash(), late_after_s=0.5).late_after_s == 0.5
    with pytest.raises(UsageError, match="--late-after must be a positive number of seconds, got"):
        StreamRequest("/o", 200, Hash(), late_after_s=seconds)
