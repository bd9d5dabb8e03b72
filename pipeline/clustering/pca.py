"""BlockPCA: a spark.ml Estimator on image bytes, exact and independent of partitioning. See pipeline/gram.py."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import RDD, keyword_only
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasInputCol, HasOutputCol
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from pyspark.sql import DataFrame

from pipeline.clustering import gram
from pipeline.clustering.columns import matrix_to_vector
from pipeline.clustering.persistence import ArrayReadable, ArrayWritable
from pipeline.clustering.projection import Projection, quantise, to_bytes
from pipeline.clustering.reduction import reduced
from pipeline.errors import DataError, UsageError


class _PCAParams(HasInputCol, HasOutputCol):
    components: Param[float] = Param(
        Params._dummy(),
        "components",
        "number of components (>= 1) or share of variance (< 1)",
        TypeConverters.toFloat,
    )
    whiten: Param[bool] = Param(
        Params._dummy(), "whiten", "divide each component by its deviation", TypeConverters.toBoolean
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(inputCol="image", outputCol="point", components=50.0, whiten=False)


def image_blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[npt.NDArray[np.uint8]]:
    """The first column of Arrow batches, binary of one length, as uint8 [rows, pixels] without a copy."""
    for batch in batches:
        column = batch.column(0)
        if not len(column):
            continue
        if column.null_count:
            raise DataError("an image is null; drop or repair such rows before fitting")
        offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: len(column) + 1]
        sizes = np.diff(offsets)
        if (sizes != sizes[0]).any():
            raise DataError(f"images of {sizes.min()} and {sizes.max()} bytes in one column; sizes must be equal")
        pixels = np.frombuffer(column.buffers()[2], np.uint8, count=int(sizes.sum()), offset=int(offsets[0]))
        yield pixels.reshape(len(column), -1)


class BlockPCA(Estimator["BlockPCAModel"], _PCAParams, DefaultParamsReadable["BlockPCA"], DefaultParamsWritable):
    """Principal components of images (a binary column of planar uint8 pixels, all of one size).

    Agrees with scikit-learn's ``covariance_eigh`` on the subspace; the same bits whatever the partitioning. Cost:
    rows * d^2 flop on the executors, one d x d eigenproblem for the leading vectors on the driver, 12 d^2 bytes of
    state a task. Raises UsageError above 12,288 pixels."""

    @keyword_only
    def __init__(
        self,
        *,
        components: float = 50.0,
        whiten: bool = False,
        inputCol: str = "image",
        outputCol: str = "point",
    ) -> None:
        super().__init__()
        self._set(**self._input_kwargs)  # type: ignore[attr-defined]

    def _fit(self, dataset: DataFrame) -> BlockPCAModel:
        column = dataset.select(self.getInputCol())
        first = column.first()
        if first is None:
            raise DataError("cannot fit components to an empty table")
        pixels = len(first[0])

        def partial(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            part = gram.local(image_blocks(batches), pixels)
            data = to_bytes(count=np.array(part.count), total=part.total, packed=part.packed)
            yield pa.RecordBatch.from_arrays([pa.array([data], pa.large_binary())], ["part"])

        parts = min(column.rdd.getNumPartitions(), column.sparkSession.sparkContext.defaultParallelism)
        table = column.coalesce(parts).mapInArrow(partial, "part binary")
        return self.fit_partials(table.rdd.map(lambda row: _loaded(row.part)), pixels)

    def fit_blocks(self, blocks: RDD[npt.NDArray[np.uint8]], pixels: int) -> BlockPCAModel:
        """Fit uint8 [rows, pixels] blocks, where there is no table to go through."""
        gram.check_pixels(pixels)
        return self.fit_partials(blocks.mapPartitions(lambda part: [gram.local(part, pixels)]), pixels)

    def fit_partials(self, partials: RDD[gram.Gram], pixels: int) -> BlockPCAModel:
        """The driver receives one merged sum, d^2 * 4 bytes, however many rows and tasks there are."""
        gram.check_pixels(pixels)
        wanted = self.getOrDefault(self.components)
        if wanted <= 0 or (wanted > 1 and wanted != int(wanted)):
            raise UsageError(f"components must be a whole number or a share in (0, 1), got {wanted}")
        total = reduced(partials, gram.merge)
        spectrum = gram.top_components(gram.covariance(total), wanted)
        projection = quantise(spectrum, whiten=self.getOrDefault(self.whiten))
        mean = total.total / total.count + gram.SHIFT
        return self._copyValues(BlockPCAModel(projection, spectrum, mean, total.count))


def _loaded(data: bytes) -> gram.Gram:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return gram.Gram(int(arrays["count"]), arrays["total"], arrays["packed"])


class BlockPCAModel(Model, _PCAParams, ArrayReadable, ArrayWritable):
    """components float64 [k, d], variances float64 [k] (descending), mean float64 [d], the integer projection, and rows:
    how many were fitted to, 0 where nobody has counted them.

    ``transform`` appends a vector: the projection of the raw pixels, not centred (as spark.ml's PCA), rounded to the
    grid of ``projection``."""

    def __init__(
        self, projection: Projection, spectrum: gram.Spectrum, mean: npt.NDArray[np.float64], rows: int = 0
    ) -> None:
        super().__init__()
        self.projection = projection
        self.spectrum = spectrum
        self.mean = mean
        self.rows = rows

    @property
    def explained_variance_ratio(self) -> npt.NDArray[np.float64]:
        return self.spectrum.variances / (self.spectrum.total_variance or 1.0)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        projection = self.projection

        unit = 2.0**-projection.exponent
        vector = matrix_to_vector(lambda images: projection(images) * unit, dataset[self.getInputCol()])
        return dataset.withColumn(self.getOutputCol(), vector)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {
            "weights": self.projection.weights,
            "grid": np.array([self.projection.shift, self.projection.exponent]),
            "components": self.spectrum.components,
            "variances": self.spectrum.variances,
            "total_variance": np.array(self.spectrum.total_variance),
            "mean": self.mean,
            "rows": np.array(self.rows),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]]) -> BlockPCAModel:
        shift, exponent = (int(value) for value in arrays["grid"])
        spectrum = gram.Spectrum(arrays["components"], arrays["variances"], float(arrays["total_variance"]))
        rows = int(arrays["rows"]) if "rows" in arrays else 0
        return cls(Projection(arrays["weights"], shift, exponent), spectrum, arrays["mean"], rows)
