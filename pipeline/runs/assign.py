"""An assignment for notebooks: the worker of every row as a DataFrame; nothing is committed."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError, UsageError
from pipeline.core.specs import find
from pipeline.core.storage.objects import is_object
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import spark_path
from pipeline.input.dataset import Dataset
from pipeline.input.read_options import ReadOptions
from pipeline.output.assignment import SCHEMA, lines_of
from pipeline.output.writer import ChunkJob
from pipeline.runs.request import Request, input_path, resolve_places, with_bundles
from pipeline.runs.steps.bundle import check_bundles, place_rows
from pipeline.runs.steps.inputs import check_num_workers, discover_inputs
from pipeline.runs.steps.place import fitting_context
from pipeline.runs.steps.run import ShardingRun
from pipeline.spark.progress import PhaseLog
from pipeline.spark.session import spark_context
from pipeline.spark.source import scan_input
from pipeline.spark.store import open_store
from pipeline.strategies import STRATEGIES, Strategy

DDL = "id long, worker int, copy int, group int"


def assign(
    data: DataFrame | str,
    strategy: Strategy | str,
    num_workers: int,
    seed: int | None = None,
    *,
    ratios: Sequence[int] | None = None,
    format: str | None = None,
    image_shape: tuple[int, int, int] | None = None,
    num_classes: int | None = None,
    unlabelled: bool = False,
    channels: int | None = None,
    group_by: str | None = None,
    resize: tuple[int, int] | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    allow_empty: bool = False,
    scratch: str | None = None,
    quiet: bool = True,
) -> DataFrame:
    """Return the worker of every row: id long, worker, copy and group int, one line per row and per copy.

    The fit runs now; the lines are computed whenever the result is used.

    Args:
        data: a path as in ``shard``, where ids are the positions of rows, or a DataFrame with an integer column ``id``,
            a column of images, named ``image`` or by ``image_column``, and labels. The rows of a DataFrame are written to
            ``scratch`` once, in the order of its partitions, and dealt in that order; duplicate ids are kept.
        strategy: a spec, or the name of a strategy with default parameters.
        num_workers: n.
        seed: replaces the strategy's seed.
        ratios: shares of the workers; None: equal.
        format: format of the input; None: recognised.
        image_shape: (channels, height, width), if the files do not contain it.
        num_classes: labels must be in 0..num_classes-1.
        unlabelled: ignore labels.
        channels: 1 or 3, to convert images to grey or RGB.
        group_by: column whose values are kept together at one worker.
        resize: (height, width), to resize images.
        image_column: column or array of the images; None: a usual name.
        label_column: column or array of the labels; None: a usual name.
        allow_empty: allow more workers than rows.
        scratch: an empty folder that all executors reach, required on a cluster. The caller deletes it once the result
            is no longer used. None: a temporary folder that is deleted when Python exits.
        quiet: print no progress.

    Raises:
        UsageError: an argument is invalid.
        DataError: the input is broken.
    """
    spark = data.sparkSession if isinstance(data, DataFrame) else SparkSession.builder.getOrCreate()
    with spark_context(spark) as context:  # also ships the package to a cluster's executors
        store = open_store(context)
    spec = strategy if isinstance(strategy, Strategy) else find(STRATEGIES, "strategy", strategy)()
    spec = spec if seed is None else replace(spec, seed=seed)
    folder = _scratch(context, store, scratch)
    request = Request(
        input=_address(data, folder, image_column or "image"),
        output=folder,
        num_workers=num_workers,
        read_options=ReadOptions(
            format=format,
            shape=image_shape,
            num_classes=num_classes,
            unlabelled=unlabelled,
            channels=channels,
            resize=resize,
            image_column=image_column,
            label_column=label_column,
        ),
        allow_empty=allow_empty,
        ratios=ratios,
        group_by=group_by,
    )
    request = with_bundles(request, spec)
    spec.check_ratios(request.ratios)
    if unlabelled:
        spec.check_without_labels()
    progress = PhaseLog(context, quiet=quiet, title=f"{spec.name} assigned")
    run = ShardingRun(context, store, resolve_places(store, request), progress)
    with progress.phase("discover"):
        dataset = discover_inputs(run).dataset
    spec.check_input(dataset)
    check_bundles(request, dataset)
    check_num_workers(request, dataset)
    with progress.phase("scan"):
        source = scan_input(context, dataset, num_workers)
    fit_result = spec.fit(fitting_context(run, source, folder))
    placement = place_rows(run, source, fit_result, spec).placement
    job = ChunkJob(dataset, placement, source.bounds, folder, source.scan.num_classes)
    return _frame(spark, job, own_ids=isinstance(data, DataFrame))


def _scratch(context: SparkContext, store: Store, scratch: str | None) -> str:
    """Return an empty folder for this call. Raises UsageError."""
    if scratch is None:
        # A temporary folder of the driver does not exist on the machines of a cluster.
        if not str(context.master).startswith("local"):
            raise UsageError(f"scratch is needed on {context.master}: a folder that all executors reach")
        temporary_folder = tempfile.mkdtemp(prefix="assignment-")
        atexit.register(shutil.rmtree, temporary_folder, ignore_errors=True)
        return temporary_folder
    folder = store.resolve(scratch)
    if is_object(folder):
        raise UsageError(f"scratch {folder}: Spark writes rows there, which reaches no object store here; use hdfs://")
    # Spark refuses to write into folders that exist, and the caller deletes this one with everything in it.
    if store.list(folder):
        raise UsageError(f"scratch {folder} is not empty; name a folder of its own")
    store.makedirs(folder)
    return folder


def _address(data: DataFrame | str, folder: str, image_column: str) -> str:
    """Return the address of an input; the rows of a DataFrame are written to a folder first."""
    return _write_as_parquet(data, folder, image_column) if isinstance(data, DataFrame) else input_path(data, "data")


def _write_as_parquet(data: DataFrame, folder: str, image_column: str) -> str:
    """Write the rows of a DataFrame as Parquet, so that tasks can read them again. Raises UsageError."""
    if missing := [name for name in ("id", image_column) if name not in data.columns]:
        raise UsageError(f"the DataFrame has no column {missing[0]}; it has {', '.join(data.columns)}")
    if (kind := dict(data.dtypes)["id"]) not in ("bigint", "int", "smallint", "tinyint"):
        raise UsageError(f"the column id is of {kind}, not of whole numbers")
    path = f"{folder}/input"
    data.write.parquet(spark_path(path))
    return path


def _frame(spark: SparkSession, job: ChunkJob, *, own_ids: bool) -> DataFrame:
    """Return the DataFrame that places the rows of each chunk in one task when it is used.

    own_ids: take the ids from the DataFrame's column, not from the positions of rows."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the assignment lines of some chunks. batches: one column of chunk numbers, from ``spark.range``."""
        for batch in batches:
            for chunk in batch.column(0).to_pylist():
                for deliveries in job.place_blocks(chunk, images=job.placement.reads_images):
                    lines = lines_of(deliveries)
                    if own_ids:
                        ids = _ids(job.dataset, deliveries.block.ids)[deliveries.rows[deliveries.row_order]]
                        lines = lines.set_column(0, SCHEMA.field("id"), pa.array(ids, pa.int64()))
                    yield lines

    return spark.range(0, len(job.bounds), 1, len(job.bounds)).mapInArrow(read, DDL)


def _ids(dataset: Dataset, places: Ints) -> Ints:
    """Return a DataFrame's own ids of consecutive rows, from their positions."""
    parts = []
    for first, file in zip(dataset.firsts, dataset.files, strict=True):
        low = max(int(places[0]), first) - first
        high = min(int(places[-1]) + 1, first + file.rows) - first
        if low < high:
            parts.append(_id_column(dataset.store, file.path)[low:high])
    return np.concatenate(parts)


@lru_cache(maxsize=2)  # a task reads rows in order
def _id_column(store: Store, path: str) -> Ints:
    """Return the ids in a file that ``_write_as_parquet`` made, int64 [rows]. Raises DataError for nulls."""
    with store.open(path) as file:
        column = pq.read_table(file, columns=["id"]).column("id")
        if column.null_count:
            raise DataError("the DataFrame's column id holds nulls; give every row a whole number")
        ids: Ints = column.to_numpy().astype(np.int64)
    return ids
