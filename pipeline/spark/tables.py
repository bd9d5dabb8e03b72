"""Tables and DataFrames of Spark as inputs: their rows are written once, as Parquet files in the order of an id column.

A table has no order of rows, and its rows cannot be read by position. The values of a column give the order instead, so
that ids do not depend on partitions. Images go through a shuffle only if the partitions are not in this order already."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyspark
from py4j.protocol import Py4JJavaError
from pyspark import TaskContext
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import BooleanType, DateType, NumericType, StringType, TimestampNTZType, TimestampType

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.shardset.attempt import make_task_folder
from pipeline.core.shardset.commit import move_files
from pipeline.core.shardset.schema import SPARK_METADATA
from pipeline.core.storage.store import Store
from pipeline.input.formats.tables.images import IMAGE_COLUMNS
from pipeline.input.read_options import ReadOptions

READERS = {
    "delta": "io.delta:delta-spark_{spark}_2.13:VERSION",
    "iceberg": "org.apache.iceberg:iceberg-spark-runtime-{spark}_2.13:VERSION",
}
# A reader that was compiled for another Spark ends with one of these.
MISFIT = re.compile(r"\b(?:NoSuchMethod|NoSuchField|NoClassDefFound|IncompatibleClassChange|AbstractMethod)Error: .*")
CATALOG = "spark.sql.catalogImplementation"
ID_COLUMN = "id"
ID_TYPES = ("tinyint", "smallint", "int", "bigint", "string")
GROUP_ROWS = 1000  # of a Parquet row group
GROUP_BYTES = 16 << 20
# Columns of these types are cheap to write, and --keep-columns or a strategy may name any of them.
PLAIN_TYPES = (NumericType, BooleanType, StringType, DateType, TimestampType, TimestampNTZType)


class PartitionFile(NamedTuple):
    """The file of a partition.

    Attributes:
        partition: number of the partition whose rows it holds.
        path: its path.
        rows: number of rows.
        least: id of its first row.
        most: id of its last row.
        problem: the reason why its rows have no order, or None.
    """

    partition: int
    path: str
    rows: int
    least: Any
    most: Any
    problem: str | None


def read_table(spark: SparkSession, uri: str) -> DataFrame:
    """Return the table of an address: table:NAME, delta:URI or iceberg:NAME.

    Raises UsageError if Spark lacks the reader or does not fit it, and DataError if there is no such table."""
    kind, _, name = uri.partition(":")
    try:
        return spark.table(name) if kind == "table" else spark.read.format(kind).load(name)
    except (PySparkException, Py4JJavaError) as error:
        text = str(error)
        # A catalog may hold tables of either reader.
        reader = kind if kind in READERS else next((name for name in READERS if name in text.lower()), None)
        if reader and "DATA_SOURCE_NOT_FOUND" in text:
            package = READERS[reader].format(spark=".".join(spark.version.split(".")[:2]))
            raise UsageError(
                f"{uri}: this Spark has no reader of {reader} tables; start it with --packages {package}, or an older"
                " Spark if there is no such package"
            ) from None
        _check_fit(uri, error)
        reason = _reason(text) or type(error).__name__
        in_memory = kind == "table" and spark.conf.get(CATALOG) != "hive" and "TABLE_OR_VIEW_NOT_FOUND" in text
        advice = f" (for Hive's tables, start Spark with --conf {CATALOG}=hive)" if in_memory else ""
        raise DataError(f"{uri} cannot be read: {reason}{advice}") from None


def _check_fit(name: str, error: Exception) -> None:
    """Raise UsageError if the reader of a table was made for another Spark."""
    if match := MISFIT.search(str(error)):
        raise UsageError(
            f"{name}: the reader of this table was made for another Spark than {pyspark.__version__}; start the one that"
            f" its package names ({match[0][:80]})"
        ) from error


def _reason(text: str) -> str:
    """Return the line of Spark's text of an error that tells the cause: the one that begins with the error's name.

    Otherwise the first line of Java's own exception, which follows a colon in the text of Py4J."""
    lines = text.splitlines() or [""]
    named = (line[match.start() :] for line in lines if (match := re.search(r"\[[A-Z_.]+\] ", line)))
    java = (line[2:].split(": ", 1)[-1] for line in lines if line.startswith(": "))
    return next(named, next(java, lines[0]))


def select_columns(
    data: DataFrame, name: str, ids: str, options: ReadOptions, vectors: Sequence[str] = ()
) -> DataFrame:
    """Return a table without the columns that no job can use. Raises UsageError if a needed column is missing.

    Args:
        data: the table.
        name: its name, for error lines.
        ids: the column that gives the order of the rows.
        options: how its rows are read.
        vectors: the columns of vectors that strategies use.
    """
    # The first usual name counts, as in files.
    usual = next((column for column in IMAGE_COLUMNS if column in data.columns), IMAGE_COLUMNS[0])
    image = options.image_column or usual
    needed = [ids, image, *filter(None, [options.label_column]), *options.columns, *vectors]
    flags = {ids: "--id-column", image: "--image-column"}
    for column in needed:
        if data.columns.count(column) != 1:
            number = "two columns" if column in data.columns else "no column"
            flag = f"; {flags[column]} names another one" if column in flags else ""
            raise UsageError(f"{name} has {number} {column}; its columns are {', '.join(data.columns)}{flag}")
    kind = dict(data.dtypes)[ids]
    if kind not in ID_TYPES:
        raise UsageError(f"{name}: the column {ids} is of {kind}; --id-column takes whole numbers or text")
    # Spark refuses to select one of two columns whose names differ by case alone.
    lower = [column.lower() for column in data.columns]
    fields = [
        field
        for field in data.schema
        if field.name in needed or (isinstance(field.dataType, PLAIN_TYPES) and lower.count(field.name.lower()) == 1)
    ]
    return data.select(*(_column(field.name) for field in fields))


def _column(name: str) -> Column:
    """Return the column of exactly this name, which may contain dots."""
    return F.col("`" + name.replace("`", "``") + "`")


def write_table(data: DataFrame, name: str, ids: str, store: Store, staging: str, folder: str) -> int:
    """Write the rows of a table as Parquet files whose names and rows have the order of the ids.

    Returns the number of rows. The driver receives a line per partition.

    Args:
        data: the table.
        name: its name, for error lines.
        ids: the column of ids, which are unique.
        store: reaches the folder.
        staging: the attempt's folder.
        folder: the folder of the files, below it.

    Raises:
        DataError: an id is null or occurs twice, or there are no rows.
        UsageError: the table's reader does not fit this Spark.
    """
    key = _column(ids)
    # A global sort sends all images through a shuffle, so partitions that are in order are sorted one by one.
    orders: list[Callable[[], DataFrame]] = [lambda: data.sort(key)]
    try:
        limits = _partition_limits(data, key)
    except Py4JJavaError as error:
        _check_fit(name, error)  # a reader may fail at its first query only
        raise
    if _is_ascending(limits):
        orders.insert(0, lambda: data.sortWithinPartitions(key))
    for order in orders:
        files = _write_partitions(order(), ids, store, staging)
        for file in files:
            if file.problem:
                raise DataError(f"{name}: {file.problem}; --id-column names a column that tells all rows apart")
        # Without the images, Spark may have cut the table into other partitions.
        if _is_ascending([(file.least, file.most) for file in files]):
            break
    else:
        raise JobError(f"{name} changed while it was read; run it again")
    if not files:
        raise DataError(f"{name} has no rows")
    targets = [f"{folder}/part-{number:06d}.parquet" for number in range(len(files))]
    move_files(store, [file.path for file in files], targets)
    return sum(file.rows for file in files)


def _partition_limits(data: DataFrame, key: Column) -> list[tuple[Any, Any]]:
    """Return the least and the greatest id of every partition with rows, in the order of partitions."""
    limits = data.select(F.spark_partition_id().alias("partition"), key.alias("key")).groupBy("partition")
    rows = limits.agg(F.min("key").alias("least"), F.max("key").alias("most")).collect()
    return [(row.least, row.most) for row in sorted(rows, key=lambda row: row.partition)]


def _is_ascending(limits: Sequence[tuple[Any, Any]]) -> bool:
    """True if every range of ids ends before the next begins. None is the limit of a range of nulls."""
    if any(None in both for both in limits):
        return False
    return all(before[1] < after[0] for before, after in pairwise(limits))


def _write_partitions(data: DataFrame, ids: str, store: Store, staging: str) -> list[PartitionFile]:
    """Write one file per partition with rows, and return them in the order of partitions."""
    metadata = {SPARK_METADATA: data.schema.json().encode()}  # may declare the shape of the images
    names = data.columns

    def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Write the rows of a partition and yield the entry of its file, if it has rows."""
        folder = f"{staging}/{uuid.uuid4().hex}"  # each try of a task has its own
        path = f"{folder}/part.parquet"
        writer: pq.ParquetWriter | None = None
        problem = None
        rows = 0
        least = most = None
        with ExitStack() as stack:
            for batch in batches:
                if not len(batch) or problem:
                    continue
                values = batch.column(names.index(ids))
                problem = _problem(values, ids, most)
                if problem is None:
                    part = pa.Table.from_batches([batch]).rename_columns(names).replace_schema_metadata(metadata)
                    if writer is None:
                        least = values[:1]
                        make_task_folder(store, folder)
                        sink = stack.enter_context(store.create(path))
                        writer = pq.ParquetWriter(sink, part.schema, compression="none", use_dictionary=False)
                    writer.write_table(part, max(1, min(GROUP_ROWS, GROUP_BYTES * len(part) // max(1, part.nbytes))))
                    rows += len(part)
                    most = values[-1:]
            if writer is not None:
                writer.close()
        task = TaskContext.get()
        if task and (rows or problem):
            nothing = pa.nulls(1, values.type)
            columns = {
                "partition": pa.array([task.partitionId()], pa.int32()),
                "path": pa.array([path]),
                "rows": pa.array([rows], pa.int64()),
                "least": nothing if least is None else least,
                "most": nothing if most is None else most,
                "problem": pa.array([problem], pa.string()),
            }
            yield pa.RecordBatch.from_pydict(columns)

    kind = dict(data.dtypes)[ids]
    ddl = f"partition int, path string, rows long, least {kind}, most {kind}, problem string"
    # mapInArrow refuses names with dots, so columns travel under plain names.
    plain = data.toDF(*(f"c{number}" for number in range(len(names))))
    return sorted(PartitionFile(*row) for row in plain.mapInArrow(write, ddl).collect())


def _problem(values: pa.Array, ids: str, before: pa.Array | None) -> str | None:
    """Return the reason why sorted ids do not order their rows, or None. before: the id of the row before them."""
    if values.null_count:
        return f"{ids} is null in a row"
    joined = values if before is None else pa.concat_arrays([before, values])
    repeated = joined[1:].filter(pc.equal(joined[1:], joined[:-1]))
    return f"{ids} {str(repeated[0])[:80]!r} occurs twice" if len(repeated) else None


def row_id(store: Store, path: str, ids: str, row: int) -> Any:
    """Return the id of a row of a file that ``write_table`` wrote. Raises LookupError if the file has fewer rows."""
    with store.open(path) as file:
        for batch in pq.ParquetFile(file).iter_batches(columns=[ids]):
            if row < len(batch):
                return batch.column(0)[row].as_py()
            row -= len(batch)
    raise LookupError(f"{path} has no row {row}")
