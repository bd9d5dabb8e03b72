"""BlockPCA, a spark.ml Estimator on image bytes, exact and independent of partitioning.

See pipeline/clustering/gram.py."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import RDD, SparkContext, keyword_only
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasInputCol, HasOutputCol
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from pyspark.sql import DataFrame

from pipeline.clustering import dual, gram
from pipeline.clustering.columns import matrix_to_vector
from pipeline.clustering.params import as_pixels, number_column, rows_as_matrix
from pipeline.clustering.persistence import ArrayReadable, ArrayWritable
from pipeline.clustering.projection import Projection, check_grid, quantise
from pipeline.clustering.reduction import tree_reduce
from pipeline.core.errors import DataError, UsageError
from pipeline.core.npz import check_arrays, to_bytes
from pipeline.core.sizes import bytes_in_words
from pipeline.spark.jvm import jvm_of

HEAP_COPIES = 7  # of a task's result in the heap of a local Spark: 6.1 times its size did not suffice, 6.5 did


def _components(value: Any) -> float:
    number = TypeConverters.toFloat(value)
    if not gram.is_component_number(number):
        raise UsageError(f"components must be a whole number or a share in (0, 1), got {number}")
    return number


class _PCAParams(HasInputCol, HasOutputCol):
    components: Param[float] = Param(
        Params._dummy(), "components", "number of components (>= 1) or share of variance (< 1)", _components
    )
    whiten: Param[bool] = Param(
        Params._dummy(), "whiten", "divide each component by its deviation", TypeConverters.toBoolean
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(inputCol="image", outputCol="point", components=50.0, whiten=False)

    def setInputCol(self, value: str) -> Self:
        return self._set(inputCol=value)

    def setOutputCol(self, value: str) -> Self:
        return self._set(outputCol=value)


def image_blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the first column of Arrow batches as uint8 [rows, pixels]; bytes without a copy."""
    for batch in batches:
        if len(batch):
            place = f"column {batch.schema.names[0]}"
            yield as_pixels(rows_as_matrix(batch.column(0), place), place)


class BlockPCA(Estimator["BlockPCAModel"], _PCAParams, DefaultParamsReadable["BlockPCA"], DefaultParamsWritable):
    """Principal components of images.

    The input column holds bytes, or vectors or arrays of whole numbers in 0..255, all of one length. The subspace
    agrees with scikit-learn's ``covariance_eigh``, and is bit-identical for any partitioning.

    Costs rows * d^2 flop on the executors, one d x d eigenproblem for the leading vectors on the driver, and 12 d^2
    bytes of state per task. Images of more than 12,288 pixels are all held by one task, at most 512 MiB of them: fit
    these to a sample."""

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

    def setComponents(self, value: float) -> Self:
        return self._set(components=value)

    def setWhiten(self, value: bool) -> Self:
        return self._set(whiten=value)

    def _fit(self, dataset: DataFrame) -> BlockPCAModel:
        """Return the model of a column of images.

        Tasks send sums of d x d products; very large images are fitted in one task instead. Raises DataError for an
        empty column or a null in its first row."""
        column = dataset.select(number_column(dataset, self.getInputCol(), "inputCol").alias(self.getInputCol()))
        first = column.first()
        if first is None:
            raise DataError("cannot fit components to an empty table")
        if first[0] is None:
            raise DataError(f"column {self.getInputCol()} has a null; drop or repair such rows before fitting")
        pixels = len(first[0])
        if pixels > gram.MAX_PIXELS:
            return self._fit_in_one_task(column, pixels)

        def partial(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            """Yield the sums of a partition as one row of bytes."""
            part = gram.gram_of_blocks(image_blocks(batches), pixels)
            data = to_bytes(count=np.array(part.count), total=part.total, packed=part.packed)
            yield pa.RecordBatch.from_arrays([pa.array([data], pa.large_binary())], ["part"])

        # Every task returns a matrix of d^2 numbers, so more tasks than cores only add merges.
        parts = min(column.rdd.getNumPartitions(), column.sparkSession.sparkContext.defaultParallelism)
        table = column.coalesce(parts).mapInArrow(partial, "part binary")
        return self.fit_partials(table.rdd.map(lambda row: _gram_from_bytes(row.part)), pixels)

    def _fit_in_one_task(self, column: DataFrame, pixels: int) -> BlockPCAModel:
        """Return the model of images for which a d x d matrix is too large: one task holds all of them (dual.py)."""
        components = self.getOrDefault(self.components)

        def fit(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            data = to_bytes(**_fit_in_memory(limit_rows(image_blocks(batches), pixels), components))
            yield pa.RecordBatch.from_arrays([pa.array([data], pa.large_binary())], ["fitted"])

        row = column.repartition(1).mapInArrow(fit, "fitted binary").first()
        assert row is not None
        with np.load(io.BytesIO(row.fitted), allow_pickle=False) as arrays:
            return self._from_dual(dict(arrays))

    def fit_blocks(self, blocks: RDD[npt.NDArray[np.uint8]], pixels: int, rows: int | None = None) -> BlockPCAModel:
        """Return the model of images in blocks, uint8 [rows, pixels], without a table.

        Args:
            blocks: the images.
            pixels: numbers per image.
            rows: the approximate number of rows, if known. If it is less than the pixels, one task can use a smaller
                matrix.

        Raises UsageError if the heap of the driver cannot pass on the components.
        """
        if rows is not None and gram.rows_are_fewer(rows, pixels):
            components = self.getOrDefault(self.components)
            check_heap(blocks.context, components, rows, pixels)
            fits = blocks.coalesce(1, shuffle=True).mapPartitions(lambda part: [_fit_in_memory(part, components)])
            return self._from_dual(fits.first())
        return self.fit_partials(blocks.mapPartitions(lambda part: [gram.gram_of_blocks(part, pixels)]), pixels)

    def fit_partials(self, partials: RDD[gram.Gram], pixels: int) -> BlockPCAModel:
        """Return the model of sums, one per part of the rows. The driver receives their total, d^2 * 4 bytes.

        Raises UsageError for images that are too large for a matrix of pixels x pixels."""
        if pixels > gram.MAX_PIXELS:
            raise UsageError(
                f"images of {pixels:,} values are too large for a matrix of pixels x pixels; pass the number of rows to"
                " fit_blocks"
            )
        components = self.getOrDefault(self.components)
        total = tree_reduce(partials, gram.merge)
        spectrum = gram.top_components(gram.covariance(total), components)
        projection = quantise(spectrum, whiten=self.getOrDefault(self.whiten))
        mean = total.total / total.count + gram.SHIFT
        return self._copyValues(BlockPCAModel(projection, spectrum, mean, total.count))

    def _from_dual(self, arrays: dict[str, npt.NDArray[Any]]) -> BlockPCAModel:
        """Return the model of the arrays of ``_fit_in_memory``."""
        spectrum = gram.Spectrum(arrays["components"], arrays["variances"], float(arrays["total_variance"]))
        projection = quantise(spectrum, whiten=self.getOrDefault(self.whiten))
        return self._copyValues(BlockPCAModel(projection, spectrum, arrays["mean"], int(arrays["rows"])))


def check_heap(context: SparkContext, components: float, rows: int, pixels: int) -> None:
    """Raise UsageError if the components that one task computes would fill the heap of the driver's JVM.

    A share of the variance is not checked, as the number of components is then unknown.

    Args:
        context: of the driver.
        components: number of components (>= 1), or share of the variance (< 1).
        rows: rows of the fit, which bound the number of components.
        pixels: numbers per image.
    """
    heap = int(jvm_of(context).java.lang.Runtime.getRuntime().maxMemory())
    size = int(min(components, rows)) * pixels * 8
    if size * HEAP_COPIES > heap:
        raise UsageError(
            f"{min(components, rows):g} components of {pixels:,} pixels are {bytes_in_words(size)}, too much for the"
            f" driver's heap of {bytes_in_words(heap)}; give fewer --components, a larger spark.driver.memory, or --resize"
        )


def limit_rows(blocks: Iterable[npt.NDArray[np.uint8]], pixels: int) -> Iterator[npt.NDArray[np.uint8]]:
    """Yield the same blocks. Raises DataError before there are more images than one task should hold."""
    rows = 0
    most = gram.rows_at_most(pixels)
    for block in blocks:
        rows += len(block)
        if rows > most:
            raise DataError(
                f"images of {pixels:,} values are fitted to at most {most:,} of them, and there are more; fit to a sample"
            )
        yield block


def _fit_in_memory(blocks: Iterable[npt.NDArray[np.uint8]], components: float) -> dict[str, npt.NDArray[Any]]:
    """Fit the PCA in one task by the matrix of rows x rows, and return its arrays by name, for ``_from_dual``.

    For few rows that matrix is smaller than the one of pixels x pixels (see dual.py).

    Args:
        blocks: uint8 [rows, pixels] each; all are held in memory.
        components: number of components (>= 1), or share of the variance (< 1).
    """
    images = np.concatenate(list(blocks))
    spectrum, mean = dual.fit(images, components)
    return {
        "components": spectrum.components,
        "variances": spectrum.variances,
        "total_variance": np.array(spectrum.total_variance),
        "mean": mean,
        "rows": np.array(len(images)),
    }


def _gram_from_bytes(data: bytes) -> gram.Gram:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return gram.Gram(int(arrays["count"]), arrays["total"], arrays["packed"])


class BlockPCAModel(Model, _PCAParams, ArrayReadable, ArrayWritable):
    """Fitted principal components and their projection to integers.

    ``transform`` appends a vector: the projection of the raw pixels, not centred (like spark.ml's PCA), rounded to the
    grid of ``projection``.

    Attributes:
        projection: the integer projection.
        spectrum: components float64 [k, d] and variances float64 [k], descending.
        mean: float64 [d].
        rows: the number of rows of the fit, 0 if unknown.
    """

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
        """Add the column of projected vectors, in units of the pixels."""
        projection = self.projection

        unit = 2.0**-projection.exponent
        name = self.getInputCol()

        def project(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return projection(as_pixels(values, f"column {name}")) * unit

        vector = matrix_to_vector(project, number_column(dataset, name, "inputCol"))
        return dataset.withColumn(self.getOutputCol(), vector)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that are saved. grid: [shift, exponent] of the projection; the others are named as
        attributes."""
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
        """Return the model of saved arrays (see ``arrays``). Raises ValueError if types, shapes or values are
        invalid."""
        arrays = {"rows": np.array(0)} | arrays  # older models have no rows
        check_arrays(
            arrays,
            weights="f8 d k",
            grid="i8 2",
            components="f8 k d",
            variances="f8 k",
            total_variance="f8",
            mean="f8 d",
            rows="i8",
        )
        shift, exponent = (int(value) for value in arrays["grid"])
        check_grid(exponent, shift)
        spectrum = gram.Spectrum(arrays["components"], arrays["variances"], float(arrays["total_variance"]))
        return cls(Projection(arrays["weights"], shift, exponent), spectrum, arrays["mean"], int(arrays["rows"]))
