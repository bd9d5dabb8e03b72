"""Shards by a table of (id, embedding): the same as by a column of the same vectors, however the table is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.input.embedding_table import is_table, sort_vectors

Vectors = npt.NDArray[np.float32]


def write_table(folder: Path, ids: npt.NDArray[Any], vectors: Vectors, files: int = 1, group: int = 70) -> str:
    folder.mkdir()
    for number, rows in enumerate(np.array_split(np.arange(len(ids)), files)):
        columns = {"id": pa.array(ids[rows]), "embedding": pa.array(list(vectors[rows]), pa.list_(pa.float32()))}
        pq.write_table(pa.table(columns), folder / f"{files - number:03d}.parquet", row_group_size=group)
    return str(folder)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("v", False), ("pca:64", False), (None, False), ("./v", True), ("s3://b/v", True), ("hdfs:/v", True)],
)
def test_a_path_is_a_table_and_a_name_a_column(text: str | None, expected: bool) -> None:
    assert is_table(text) is expected


@given(st.lists(st.integers(0, 9), max_size=14), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_rows_come_in_order_if_each_is_there_once(ids: list[int], cuts: int) -> None:
    values = np.array(ids, np.int64)
    parts = [(part, part[:, None].astype(np.float32)) for part in np.array_split(values, cuts)]
    found, problem = sort_vectors(parts, 0, 10, 1)
    if sorted(ids) == list(range(10)):
        assert problem is None
        assert found.ravel().tolist() == list(range(10))
    else:
        missing, twice = [i for i in range(10) if i not in ids], [i for i in range(10) if ids.count(i) > 1]
        row = missing[0] if missing else twice[0]
        assert problem
        assert problem.startswith(f"row {row} has ")
