"""What was written is held against what was scanned, before anything is committed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.assignment.groups import group_table
from pipeline.errors import JobError
from pipeline.input.scan import WORD, Scan
from pipeline.output.writer import WrittenChunk, WrittenFile
from pipeline.runs.write import verify

# Ten rows, of which two make a sparse group that both workers get.
SCAN = Scan(10, np.array([[10]]), np.array([0]), fingerprint=(7 + WORD - 2) & WORD)
TABLE = group_table(np.array([2, 8]), 2, sparse_if="le")
COUNTS = np.array([6])
FILE = WrittenFile("staged", "path", 0, rows=6, copies=1, bytes=1, sha256="", label_counts=COUNTS)
WRITTEN = [
    WrittenChunk([FILE], rows=6, fingerprint=WORD - 2),
    WrittenChunk([replace(FILE, worker=1)], rows=4, fingerprint=7),
]


def test_rows_fingerprints_and_declared_copies_that_agree_pass() -> None:
    assert TABLE.copies == 2
    verify(WRITTEN, SCAN, TABLE)


@pytest.mark.parametrize("change", [{"rows": 5}, {"fingerprint": 8}])
def test_a_lost_or_altered_row_is_an_input_that_changed(change: dict[str, int]) -> None:
    with pytest.raises(JobError, match=r"the input changed while it was sharded: 10 rows .* nothing was committed"):
        verify([WRITTEN[0], replace(WRITTEN[1], **change)], SCAN, TABLE)


@pytest.mark.parametrize("change", [{"copies": 0}, {"rows": 7}])
def test_a_copy_that_is_missing_or_not_declared_is_refused(change: dict[str, int]) -> None:
    chunk = replace(WRITTEN[1], files=[replace(FILE, **change)])
    with pytest.raises(JobError, match=r"not 10 \+ 2; nothing was committed"):
        verify([WRITTEN[0], chunk], SCAN, TABLE)
