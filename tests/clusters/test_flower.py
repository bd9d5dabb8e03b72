"""Skewed shards beside those of Flower Datasets, in distribution, by fewer seeds than the benchmark."""

from __future__ import annotations

import pytest

from tests.benchmarks.flower import compare
from tests.clusters.environments import READERS


@pytest.mark.full
def test_skewed_shards_are_distributed_as_those_of_flower() -> None:
    rows = compare(str(READERS.make()), seeds=30)
    assert len(rows) == 8
    assert not [row for row in rows if not row[4]]
