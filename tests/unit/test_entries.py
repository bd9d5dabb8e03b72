"""The manifest's entries of workers and of evaluation rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.core.shardset.parts import Input
from pipeline.output.entries import describe_eval, describe_workers
from pipeline.output.writer import WrittenChunk, WrittenFile


def chunk_of(worker: int, label_counts: list[int]) -> WrittenChunk:
    """A chunk with one file."""
    rows = sum(label_counts)
    file = WrittenFile("staged", "part", worker, rows, 0, 100, "0" * 64, np.array(label_counts))
    return WrittenChunk([file], rows, 0)


def test_every_histogram_has_a_count_per_class() -> None:
    """Count all classes for a worker without rows, and for evaluation rows that lack the last classes."""
    workers = describe_workers([chunk_of(1, [2, 0, 1])], 3, 3, True)
    assert [worker.label_histogram for worker in workers] == [[0, 0, 0], [2, 0, 1], [0, 0, 0]]
    source: Any = SimpleNamespace(dataset=SimpleNamespace(rows=3))
    assert describe_eval(source, [chunk_of(0, [1, 2])], Input(), 4).label_histogram == [1, 2, 0, 0]
