"""A view of a data set with a column of vectors in place of its images: float32 rows that are clustered unchanged."""

from __future__ import annotations

from dataclasses import replace

import pyarrow.parquet as pq

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.schema import broken_is_data_error
from pipeline.input.dataset import Dataset
from pipeline.input.formats.tables.vectors import vectors_of


def vector_view(dataset: Dataset, column: str) -> Dataset:
    """Return the same rows, with the vectors of a Parquet column as images. Opens the first file.

    Raises UsageError if there is no such column or it does not hold vectors, DataError for a broken file."""
    table = f"a table of embeddings is named by a path, such as ./{column}"
    if dataset.format != "parquet":
        raise UsageError(
            f"--embedding {column} is a column of Parquet, and {dataset.uri} holds {dataset.format} files; {table}"
        )
    path = dataset.files[0].path
    with broken_is_data_error(path):
        file = pq.ParquetFile(dataset.store.open(path))
        if column not in file.schema_arrow.names:
            raise UsageError(
                f"--embedding {column} is no column of {path}; its columns are {', '.join(file.schema_arrow.names)};"
                f" {table}"
            )
        # The length of the first vector is the expected length of all.
        first = next(file.iter_batches(1, columns=[column])).column(0)
    length = vectors_of(first, None, path, 0).shape[1] // 4
    if not length:
        raise DataError(f"{path}, row 0: {column} is an empty vector")
    layout = replace(dataset.layout, shape=(length, 1, 1), dtype="float32", column=column, attributes=())
    return replace(dataset, layout=layout, files=tuple(replace(file, decode_rows=0) for file in dataset.files))
