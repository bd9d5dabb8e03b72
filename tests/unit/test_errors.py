"""The messages of errors."""

from __future__ import annotations

import pickle

from pipeline.core.errors import DataError


def test_a_message_that_quotes_long_data_stays_readable() -> None:
    error = DataError(f"/data/b.csv has no column id: got {'9' * 100_000}; give --columns")
    text = str(error)
    assert len(text) < 2000
    assert text.startswith("/data/b.csv has no column id: got 999")
    assert text.endswith("999; give --columns")
    assert str(pickle.loads(pickle.dumps(error))) == text
