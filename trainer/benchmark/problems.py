"""The data sets: rows like HIGGS (28 features, two classes) and like YearPredictionMSD (90 features, a real target).

Generated rows have a planted model, so the smallest possible loss is known. The real files are read and standardised.
Both are stored twice: as labelled points in text, which MLlib's loader reads, and as Parquet, which the project's jobs
shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from pipeline.core.errors import DataError
from pipeline.core.storage.uri import spark_path
from pipeline.datasets.features import feature_batch
from pipeline.input.dataset import ranges
from pipeline.spark.store import open_store

BLOCK_ROWS = 8192  # rows generated at once, each block with its own seed
CORRELATION = 0.5  # of neighbouring features; the eigenvalues of their covariance are from 1/3 to 3
# purposes in seed sequences [seed, purpose, number]
ROWS = 0
WEIGHTS = 1
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Problem:
    """A learning problem, and the planted model behind its generated rows."""

    name: str  # also of the folder of its rows
    features: int  # d
    real: bool  # the target is a real number, not one of two classes
    norm: float  # Euclidean norm of the planted weights
    noise: float = 0.0  # standard deviation of the noise in a real target

    @property
    def flag(self) -> str:
        """Return the flag that gives the real file."""
        return f"--{self.name.split('-')[0]}"

    def plant_weights(self, seed: int) -> npt.NDArray[np.float64]:
        """Return the planted weights [d]."""
        direction = np.random.default_rng([seed, WEIGHTS, self.features]).standard_normal(self.features)
        planted: npt.NDArray[np.float64] = direction * (self.norm / np.linalg.norm(direction))
        return planted

    def draw(self, seed: int, block: int, rows: int) -> tuple[Floats, npt.NDArray[np.int32], Floats]:
        """Draw a block: features [rows, d] of zero mean and unit variance, classes [rows], real targets [rows].

        The planted weights give each row a score. Its class is 1 with the probability sigmoid(score); its target is the
        score with normal noise."""
        rng = np.random.default_rng([seed, ROWS, block])
        normal = rng.standard_normal((rows, self.features))
        for column in range(1, self.features):  # an autoregressive chain, which keeps unit variance
            normal[:, column] *= np.sqrt(1 - CORRELATION**2)
            normal[:, column] += CORRELATION * normal[:, column - 1]
        features = normal.astype(np.float32)
        score = features @ self.plant_weights(seed)
        classes = (rng.random(rows) < 1 / (1 + np.exp(-score))).astype(np.int32)
        return features, classes, (score + self.noise * rng.standard_normal(rows)).astype(np.float32)


HIGGS = Problem("higgs-like", 28, real=False, norm=2.0)
YEAR = Problem("year-like", 90, real=True, norm=0.5, noise=0.85)
PROBLEMS = {problem.name: problem for problem in (HIGGS, YEAR)}


def generate(spark: SparkSession, problem: Problem, rows: int, seed: int, pieces: int) -> DataFrame:
    """Return generated rows ``label, target, image``, which do not depend on the number of tasks.

    Args:
        spark: the session.
        problem: of the rows.
        rows: their number.
        seed: of the planted model and the rows.
        pieces: number of tasks.
    """
    blocks = -(-rows // BLOCK_ROWS)
    # Whole blocks, each with its own seed, make the rows independent of the number of tasks.
    spans = ranges(0, blocks, pieces)

    def draw(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for piece in batch.column(0).to_pylist():
                for block in range(*spans[piece]):
                    yield feature_batch(*problem.draw(seed, block, min(BLOCK_ROWS, rows - block * BLOCK_ROWS)))

    return _with_metadata(spark.range(0, len(spans), 1, len(spans)).mapInArrow(draw, SCHEMA), problem.features)


def check_exists(context: SparkContext, problem: Problem, uri: str) -> None:
    """Raise DataError if a real file does not exist."""
    store = open_store(context)
    if not store.exists(store.resolve(uri)):
        raise DataError(f"{uri} does not exist; check {problem.flag}")


def read_csv(spark: SparkSession, problem: Problem, uri: str) -> DataFrame:
    """Read a real file: its first column is the label (HIGGS) or the year (YearPredictionMSD), the others are features.

    Returns the columns label, target and image. Features and the target, which is the first column, are standardised to
    zero mean and unit variance; the label is the first column minus its minimum. Reads the file twice, and once more for
    each action on the result. Raises DataError for a file that does not exist, has another number of columns, or has
    fields that are not numbers."""
    check_exists(spark.sparkContext, problem, uri)
    table = spark.read.csv(spark_path(open_store(spark.sparkContext).resolve(uri)), inferSchema=False)
    if len(table.columns) != problem.features + 1:
        raise DataError(f"{uri} has {len(table.columns)} columns, not a label and {problem.features} features")
    table = table.select(*(F.col(name).try_cast("double").alias(f"c{at}") for at, name in enumerate(table.columns)))
    moments = table.select(
        *(f(F.col(name)) for name in table.columns for f in (F.mean, F.stddev_pop)), F.min("c0")
    ).first()
    # Fields that are no numbers became null, and would be left out of the moments silently.
    holes = table.select(*(F.count(F.when(F.col(c).isNull() | F.isnan(c), 1)) for c in table.columns)).first()
    assert moments, "an aggregate has a row"
    assert holes, "an aggregate has a row"
    for number, count in enumerate(holes, 1):
        if count:
            raise DataError(f"{uri}: column {number} holds {count} fields that are no numbers")
    if moments[0] is None:
        raise DataError(f"{uri}: no rows")
    # The bound keeps a constant column from a division by zero.
    mean = np.array(moments[:-1:2], float)
    deviation = np.maximum(np.array(moments[1:-1:2], float), 1e-12)
    first = float(moments[-1])

    def convert(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Standardise the columns. Column 0 gives the label, its distance from the least value, and the target."""
        for batch in batches:
            rows = np.column_stack([column.to_numpy() for column in batch.columns])
            scaled = ((rows - mean) / deviation).astype(np.float32)
            yield feature_batch(scaled[:, 1:], (rows[:, 0] - first).astype(np.int32), scaled[:, 0])

    return _with_metadata(table.mapInArrow(convert, SCHEMA), problem.features)


SCHEMA = "label int, target float, image binary"


def _with_metadata(table: DataFrame, features: int) -> DataFrame:
    return table.withMetadata("image", {"shape": f"[{features}, 1, 1]", "dtype": "float32", "layout": "CHW"})


def write_problem(table: DataFrame, problem: Problem, folder: str) -> None:
    """Write FOLDER/parquet for the jobs and FOLDER/points for MLlib's loader."""
    table.write.mode("overwrite").parquet(spark_path(f"{folder}/parquet"))
    rows = table.sparkSession.read.parquet(spark_path(f"{folder}/parquet")).select(
        "target" if problem.real else "label", "image"
    )
    text: Callable[[Iterable[Any]], Iterator[Any]] = partial(_format_points, problem.features)
    rows.mapInArrow(text, "value string").write.mode("overwrite").text(spark_path(f"{folder}/points"))


def _format_points(features: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Format rows as ``(label,[x1,x2,...])`` for LabeledPoint.parse.

    Numbers have the shortest decimals that give the same float32."""
    for batch in batches:
        if not len(batch):
            continue
        image = batch.column(1)
        values = np.frombuffer(b"".join(image.to_pylist()), np.float32)
        # Whole columns are formatted by Arrow, since a Python loop over rows would be slow.
        offsets = pa.array(np.arange(len(batch) + 1, dtype=np.int32) * features)
        numbers = pa.ListArray.from_arrays(offsets, pc.cast(pa.array(values), pa.string()))
        label = pc.cast(batch.column(0), pa.string())
        lines = pc.binary_join_element_wise("(", label, ",[", pc.binary_join(numbers, ","), "])", "")
        yield pa.RecordBatch.from_arrays([lines], names=["value"])
