"""Hash functions and their buckets as a spark.ml model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.ml import Model
from pyspark.ml.param.shared import HasInputCol, HasPredictionCol
from pyspark.sql import DataFrame

from pipeline.clustering.columns import matrix_to_int
from pipeline.clustering.hashes import Hashes
from pipeline.clustering.params import as_pixels, number_column
from pipeline.clustering.persistence import ArrayReadable, ArrayWritable
from pipeline.clustering.projection import Grid, check_grid
from pipeline.core.arrays import Ints


class HashModel(Model, HasInputCol, HasPredictionCol, ArrayReadable, ArrayWritable):
    """A model that maps rows to hash buckets.

    keys: int64 [buckets], ordered by bucket number. grid: the grid of features, None for pixels. ``transform`` appends
    the number of each row's bucket, or -1 if no row of the fit was in that bucket."""

    def __init__(self, hashes: Hashes, grid: Grid | None, keys: Ints) -> None:
        super().__init__()
        self._setDefault(inputCol="image", predictionCol="neighbourhood")
        self.hashes = hashes
        self.grid = grid
        self.keys = keys

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Add the column of the number of each row's bucket, or -1 for a bucket that the fit did not have."""
        hashes = self.hashes
        grid = self.grid
        name = self.getInputCol()
        # Keys are stored by bucket number, and searched in ascending order.
        order = np.argsort(self.keys)
        ascending = self.keys[order]

        def predict(values: npt.NDArray[Any]) -> Ints:
            """Return the bucket numbers of rows, int64 [rows], or -1 for unknown buckets."""
            if grid is None:
                keys = hashes.buckets(as_pixels(values, f"column {name}"))
            else:
                raw = values if values.dtype == np.uint8 else values.astype(np.float32).view(np.uint8)
                keys = hashes.buckets(grid(raw))
            numbers = np.full(len(keys), -1, np.int64)
            is_known = np.isin(keys, ascending)
            numbers[is_known] = order[np.searchsorted(ascending, keys[is_known])]
            return numbers

        column = number_column(dataset, name, "inputCol")
        return dataset.withColumn(self.getPredictionCol(), matrix_to_int(predict, column))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        grid = [] if self.grid is None else [self.grid.dimensions, self.grid.exponent]
        return {**self.hashes.arrays(), "keys": self.keys, "grid": np.array(grid, np.int64)}

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]]) -> HashModel:
        """Return the model of saved arrays: the arrays of ``Hashes``, the keys, and the grid as [dimensions, exponent]
        or empty.

        Raises ValueError if their types, shapes or values are invalid, and KeyError if keys or grid are missing."""
        rest = dict(arrays)
        keys = rest.pop("keys")
        grid = rest.pop("grid").tolist()
        if len(grid) not in (0, 2) or keys.ndim != 1 or keys.dtype != np.int64:
            raise ValueError(f"keys is {keys.dtype} of shape {keys.shape}, and grid has {len(grid)} numbers")
        if grid:
            check_grid(grid[1])
        return cls(Hashes.from_arrays(rest), Grid(*grid) if grid else None, keys)
