"""K-means inside each class as one spark.ml model: three files for any number of classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from pyspark.ml import Model
from pyspark.ml.functions import vector_to_array
from pyspark.ml.param.shared import HasFeaturesCol, HasLabelCol, HasPredictionCol
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from pipeline.clustering.columns import matrix_to_int
from pipeline.clustering.lloyd import Fit, nearest_of_class
from pipeline.clustering.persistence import ArrayReadable, ArrayWritable
from pipeline.clustering.projection import check_grid, grid_points
from pipeline.core.arrays import Ints
from pipeline.core.npz import check_arrays
from pipeline.core.shardset.layout import MAX_CLASSES


class KMeansByClassModel(Model, HasFeaturesCol, HasLabelCol, HasPredictionCol, ArrayReadable, ArrayWritable):
    """A model of one k-means per class.

    fits: the fits of classes that have rows. Clusters are numbered class by class, as in the strategy class_cluster.
    ``transform`` needs a column of points and a column of labels."""

    def __init__(self, fits: dict[int, Fit], classes: int, exponent: int) -> None:
        super().__init__()
        self._setDefault(featuresCol="point", labelCol="label", predictionCol="neighbourhood")
        self.fits = fits
        self.classes = classes
        self.exponent = exponent

    def centres(self) -> tuple[Ints, ...]:
        """Return the centres of each class, int64 [clusters, p], on the grid 2^-exponent.

        Classes without rows have none."""
        none = np.zeros((0, next(iter(self.fits.values())).centres.shape[1]), np.int64)
        return tuple(self.fits[label].centres if label in self.fits else none for label in range(self.classes))

    def _transform(self, dataset: DataFrame) -> DataFrame:
        """Add the column of the number of each row's nearest centre among the centres of its class."""
        centres = self.centres()
        exponent = self.exponent

        def predict(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
            # Column 0 is the label, because a pandas UDF here takes one column.
            return nearest_of_class(values[:, 0].astype(np.int64), grid_points(values[:, 1:], exponent), centres)

        label = F.array(F.col(self.getLabelCol()).cast("double"))
        both = F.concat(label, vector_to_array(F.col(self.getFeaturesCol())))
        return dataset.withColumn(self.getPredictionCol(), matrix_to_int(predict, both))

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that are saved. They concatenate the fits of the c classes that have rows.

        * centres: int64 [k, p] on the grid, where k is the number of clusters of all classes.
        * sizes: rows of each cluster, int64 [k].
        * labels: the classes, in the order in which their clusters are concatenated, [c].
        * clusters: the number of clusters of each of these classes, [c].
        * inertias: the inertia of each as a decimal number in text, because it may exceed 64 bits, [c].
        * iterations: the number of iterations of each, [c].
        * grid: [exponent of the grid, number of all classes, with or without rows]."""
        fits = list(self.fits.values())
        return {
            "centres": np.vstack([fit.centres for fit in fits]),
            "sizes": np.concatenate([fit.sizes for fit in fits]),
            "labels": np.array(list(self.fits)),
            "clusters": np.array([len(fit.centres) for fit in fits]),
            "inertias": np.array([str(fit.inertia) for fit in fits]),
            "iterations": np.array([fit.iterations for fit in fits]),
            "grid": np.array([self.exponent, self.classes]),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, npt.NDArray[Any]]) -> KMeansByClassModel:
        """Return the model of saved arrays (see ``arrays``): the concatenated clusters are cut into one fit per class.

        Raises ValueError if names, types, shapes or values of the arrays are invalid."""
        by_class = dict.fromkeys(("labels", "clusters", "iterations"), "i8 c") | {"inertias": "U c"}
        check_arrays(arrays, centres="i8 k p", sizes="i8 k", grid="i8 2", **by_class)
        # The file may be damaged: check everything that later code relies on.
        exponent, classes = (int(value) for value in arrays["grid"])
        check_grid(exponent)
        if (arrays["clusters"] < 1).any() or arrays["clusters"].sum() != len(arrays["centres"]):
            raise ValueError("its clusters are not as many as its centres")
        if not all(0 <= label < classes <= MAX_CLASSES for label in arrays["labels"].tolist()):
            raise ValueError(f"its labels are not within 0..{classes - 1}")
        cuts = np.cumsum(arrays["clusters"])[:-1]
        parts = zip(
            arrays["labels"],
            np.split(arrays["centres"], cuts),
            np.split(arrays["sizes"], cuts),
            arrays["inertias"],
            arrays["iterations"],
            strict=True,
        )
        fits = {
            int(label): Fit(centres, sizes, int(str(sum_)), int(turns)) for label, centres, sizes, sum_, turns in parts
        }
        return cls(fits, classes, exponent)
