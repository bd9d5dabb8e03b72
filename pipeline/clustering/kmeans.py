"""BlockKMeans, a spark.ml Estimator whose centres are bit-identical for any partitioning.

See pipeline/clustering/lloyd.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark import RDD, StorageLevel, keyword_only
from pyspark.ml import Estimator, Model
from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import HasFeaturesCol, HasMaxIter, HasPredictionCol, HasSeed, HasTol
from pyspark.ml.util import DefaultParamsReadable, DefaultParamsWritable
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import IntegralType

from pipeline.clustering import lloyd
from pipeline.clustering.columns import matrix_to_int
from pipeline.clustering.fit import ONE_TASK_PRODUCTS, fit, refine_centres, refinement_limit, refinement_sample
from pipeline.clustering.params import column_type, not_negative, number_column, rows_as_matrix, whole_number
from pipeline.clustering.persistence import ArrayReadable, ArrayWritable
from pipeline.clustering.points import ONE_TASK_BYTES, Points, fit_gathered
from pipeline.clustering.projection import check_grid, grid_exponent, grid_points
from pipeline.clustering.reduction import tree_reduce
from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, UsageError
from pipeline.core.hashing import row_hashes
from pipeline.core.npz import check_arrays

FEATURES = "the features"
MOST_VALUE = 1e150  # of a feature, so that sums of squares are finite
T = TypeVar("T")


class _KMeansParams(HasFeaturesCol, HasPredictionCol, HasMaxIter, HasTol, HasSeed):
    k: Param[int] = Param(Params._dummy(), "k", "number of clusters", whole_number("k", lloyd.MOST_CLUSTERS))
    nInit: Param[int] = Param(Params._dummy(), "nInit", "number of starts, the best kept", whole_number("nInit"))
    idCol: Param[str] = Param(
        Params._dummy(),
        "idCol",
        "column of unique whole numbers; without it, rows are told apart by their features",
        TypeConverters.toString,
    )
    maxIter: Param[int] = Param(Params._dummy(), "maxIter", "most iterations", whole_number("maxIter"))
    tol: Param[float] = Param(Params._dummy(), "tol", "tolerance, as scikit-learn's", not_negative("tol"))

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            featuresCol="point", predictionCol="neighbourhood", idCol="id", k=20, maxIter=150, tol=1e-4, seed=0, nInit=1
        )

    def setFeaturesCol(self, value: str) -> Self:
        return self._set(featuresCol=value)

    def setPredictionCol(self, value: str) -> Self:
        return self._set(predictionCol=value)


class BlockKMeans(
    Estimator["BlockKMeansModel"], _KMeansParams, DefaultParamsReadable["BlockKMeans"], DefaultParamsWritable
):
    """K-means of a column of vectors, arrays of numbers or bytes, by exact integer Lloyd iterations.

    The iterations start from a seeded k-means++ on the 4,096 rows with the smallest id hashes, and from tiny groups far
    from all other rows (far.py), for which all rows are searched.

    All iterations run in one task while the points fit comfortably (256 MiB) and a pass is short (rows x features x k
    up to 2^32), else in one job per iteration over cached partitions, with bit-identical results. The driver only holds
    centres. Inertia equals scikit-learn's to a fraction of a percent. Costs 2 * rows * k * p flop per iteration."""

    @keyword_only
    def __init__(
        self,
        *,
        k: int = 20,
        maxIter: int = 150,
        tol: float = 1e-4,
        seed: int = 0,
        nInit: int = 1,
        featuresCol: str = "point",
        predictionCol: str = "neighbourhood",
        idCol: str = "id",
    ) -> None:
        super().__init__()
        self._set(**self._input_kwargs)  # type: ignore[attr-defined]

    def setK(self, value: int) -> Self:
        return self._set(k=value)

    def setNInit(self, value: int) -> Self:
        return self._set(nInit=value)

    def setIdCol(self, value: str) -> Self:
        return self._set(idCol=value)

    def setMaxIter(self, value: int) -> Self:
        return self._set(maxIter=value)

    def setTol(self, value: float) -> Self:
        return self._set(tol=value)

    def setSeed(self, value: int) -> Self:
        return self._set(seed=value)

    def _ids(self, dataset: DataFrame) -> Column | None:
        """Return the column of row ids; None if idCol is not set and its default column is missing or not integral."""
        name = self.getOrDefault(self.idCol)
        if name not in dataset.columns and not self.isSet(self.idCol):
            return None
        kind = column_type(dataset, name, "idCol")
        if not isinstance(kind, IntegralType):
            if not self.isSet(self.idCol):
                return None
            raise UsageError(f"idCol {name!r} holds {kind.simpleString()}, not whole numbers")
        return F.col(name)

    def _fit(self, dataset: DataFrame) -> BlockKMeansModel:
        """Return the model of the clusters of a table.

        A first pass over the values finds the grid, a second rounds them to integers on it. Rows without an id column
        get ids from their content. Raises DataError for an empty table, and for NaN or infinity."""
        ids = self._ids(dataset)
        by_content = ids is None
        values = number_column(dataset, self.getFeaturesCol(), "featuresCol").alias("v")
        table = dataset.select((F.lit(0) if ids is None else ids).cast("long").alias("id"), values)
        parts = table.mapInArrow(_bounds, "bounds array<double>, values long").collect()
        if not parts:
            raise DataError("cannot fit clusters to an empty table")
        # Integers on one grid make all sums exact, hence independent of partitioning.
        exponent = grid_exponent(merge_bounds([np.array(part.bounds) for part in parts]))

        def quantise_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            """Yield the id and the grid point of each row, as the bytes of int32 [features]."""
            for batch in batches:
                if len(batch):
                    grid = np.rint(rows_as_matrix(batch.column(1), FEATURES) * 2.0**exponent).astype(np.int32)
                    rows = pa.array([row.tobytes() for row in grid], pa.binary())
                    yield pa.RecordBatch.from_arrays([batch.column(0), rows], ["id", "p"])

        def block(rows: Iterable[Any]) -> Iterator[Points]:
            """Yield the rows of a partition as one block; nothing if it has no rows."""
            pairs = [(row.id, np.frombuffer(row.p, np.int32)) for row in rows]
            if pairs:
                points = np.stack([p for _, p in pairs])
                yield Points(content_ids(points) if by_content else np.array([i for i, _ in pairs]), points)

        points = table.mapInArrow(quantise_batches, "id long, p binary").rdd.mapPartitions(block)
        points.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            return self.fit_points(points, exponent, values=sum(part.values for part in parts))
        finally:
            points.unpersist()

    def fit_points(
        self,
        points: RDD[Points],
        exponent: int,
        *,
        values: int,
        report: Callable[[int, int], None] = lambda iteration, inertia: None,
    ) -> BlockKMeansModel:
        """Return the model of points that are already integers. The caller should persist ``points``.

        Args:
            points: blocks of points on the grid 2^-exponent.
            exponent: the grid's exponent.
            values: rows * features. If the points fit into one task and a pass is short, one task runs all iterations;
                otherwise each iteration is a Spark job.
            report: report(iteration, inertia) is called after each pass, with the inertia in units of the grid. Not
                called if one task runs all iterations.
        """
        settings = self.settings()
        # One task saves the overhead of a Spark job per iteration, as long as its memory and time suffice.
        if values * 4 <= ONE_TASK_BYTES and values * settings.k <= ONE_TASK_PRODUCTS:
            result = points.coalesce(1).mapPartitions(lambda parts: [fit_gathered(parts, settings)]).first()
        else:
            parts = points.map(lambda part: lloyd.draw_sample(part.ids, part.points, settings))
            sample = tree_reduce(parts, partial(lloyd.merge_samples, settings.k))

            def run_pass(centres: Ints) -> lloyd.Sums:
                """Return the sums of one Lloyd pass over all rows, by one Spark job."""
                return tree_reduce(points.map(lambda part: lloyd.one_pass(part.points, centres)), lloyd.merge)

            def rows(look: Callable[[Ints, Any], T], merge: Callable[[T, T], T]) -> T:
                """Apply ``look(ids, points)`` to every block and return its results, merged by ``merge``."""
                return tree_reduce(points.map(lambda part: look(part.ids, part.points)), merge)

            def refine(centres: Ints, mean_variance: float) -> Ints:
                """Return the centres after Lloyd iterations, in one task, on a sample of the rows."""
                limit = refinement_limit(sample.count)
                few = points.map(lambda part: refinement_sample(limit, settings.seed, part.ids, part.points))
                subset = few.coalesce(1, shuffle=True).mapPartitions(lambda parts: [np.concatenate(list(parts))])
                return subset.map(lambda rows: refine_centres(rows, settings, centres, mean_variance)).first()

            # The pass is the same for any k: each task takes k from the centres that it gets.
            result = fit(lambda k: run_pass, rows, sample, settings, refine, report)
        return self._copyValues(BlockKMeansModel(result, exponent))

    def settings(self) -> lloyd.KMeansSettings:
        return lloyd.KMeansSettings(
            self.getOrDefault(self.k),
            self.getMaxIter(),
            self.getTol(),
            self.getSeed(),
            self.getOrDefault(self.nInit),
        )


def content_ids(points: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return an id of every row from its content, int64 [rows]. Equal rows share an id and are interchangeable."""
    none = np.zeros(len(points), np.int64)
    return row_hashes(none, none, None, None, np.ascontiguousarray(points).view(np.uint8)).view(np.int64)


def merge_bounds(bounds: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Return the largest absolute value of each feature over several parts of a table, at least one.

    Raises DataError if the parts have different numbers of features."""
    sizes = {len(each) for each in bounds}
    if len(sizes) > 1:
        raise DataError(f"{FEATURES} has rows of {min(sizes)} and {max(sizes)} values; sizes must be equal")
    largest: npt.NDArray[np.float64] = np.max(bounds, axis=0)
    return largest


def _bounds(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield one row per partition: the largest absolute value of each feature, and the number of values."""
    bounds = []
    values = 0
    for batch in batches:
        if len(batch):
            features = rows_as_matrix(batch.column(1), FEATURES).astype(np.float64)
            bounds.append(np.abs(features).max(axis=0))
            values += features.size
    if bounds:
        # NaN and infinity survive the maxima, so one check per partition finds them in any row.
        largest = merge_bounds(bounds)
        if not np.isfinite(largest).all():
            raise DataError("a point holds NaN or infinity; clean the features before clustering")
        if largest.max() > MOST_VALUE:
            raise DataError(f"a point holds a number beyond {MOST_VALUE:g}; scale the features before clustering")
        arrays = [pa.array([largest.tolist()]), pa.array([values], pa.int64())]
        yield pa.RecordBatch.from_arrays(arrays, ["bounds", "values"])


class BlockKMeansModel(Model, _KMeansParams, ArrayReadable, ArrayWritable):
    """A fitted k-means model.

    fit: its centres, int64 [k, p], are on the grid 2^-exponent. exponent: the grid's exponent."""

    def __init__(self, fit: lloyd.Fit, exponent: int) -> None:
        super().__init__()
        self.fitted = fit
        self.exponent = exponent

    def clusterCenters(self) -> list[npt.NDArray[np.float64]]:
        """Return the centres in the units of the features, like spark.ml's model."""
        return list(self.fitted.centres * 2.0**-self.exponent)

    @property
    def trainingCost(self) -> float:
        """The sum of squared distances, in squared units of the features."""
        return math.ldexp(self.fitted.inertia, -2 * self.exponent)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Add the column of the number of each row's nearest centre; numbers run by cluster size, the largest first."""
        centres = self.fitted.centres
        exponent = self.exponent

        def predict(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
            return lloyd.nearest(grid_points(values, exponent), centres)[0]

        features = number_column(dataset, self.getFeaturesCol(), "featuresCol")
        return dataset.withColumn(self.getPredictionCol(), matrix_to_int(predict, features))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that are saved.

        * centres: int64 [k, p] on the grid, in the order of cluster sizes, the largest first.
        * sizes: rows of each cluster, int64 [k].
        * inertia: a decimal number as text, because it may exceed 64 bits.
        * grid: [exponent of the grid, number of iterations]."""
        inertia = np.array(str(self.fitted.inertia))
        return {
            "centres": self.fitted.centres,
            "sizes": self.fitted.sizes,
            "inertia": inertia,
            "grid": np.array([self.exponent, self.fitted.iterations]),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]]) -> BlockKMeansModel:
        """Return the model of saved arrays (see ``arrays``). Raises ValueError if names, types, shapes or values are
        invalid."""
        check_arrays(arrays, centres="i8 k p", sizes="i8 k", inertia="U", grid="i8 2")
        exponent, iterations = (int(value) for value in arrays["grid"])
        check_grid(exponent)
        if not len(arrays["centres"]):
            raise ValueError("it has no centres")
        fit = lloyd.Fit(arrays["centres"], arrays["sizes"], int(str(arrays["inertia"])), iterations)
        return cls(fit, exponent)
