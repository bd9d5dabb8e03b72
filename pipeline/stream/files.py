"""Files that arrive in a folder, as a stream: Spark's own file source, asked for names alone; tasks read the files.

Spark's checkpoint knows which files were in which batch. Files have to appear whole (by a rename), as Spark's documentation
asks; one that HDFS's client is still copying (``._COPYING_``) is not taken."""

from __future__ import annotations

from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from pipeline.input.files import COMPANIONS, is_evaluation
from pipeline.storage.files import FileInfo
from pipeline.storage.store import Store
from pipeline.stream.arrivals import Broken, digest
from pipeline.stream.checkpoint import planned_files
from pipeline.stream.generation import Arrived
from pipeline.stream.quarantine import lines_of, path_of, put_aside

SCHEMA = "path STRING, modificationTime TIMESTAMP, length BIGINT, content BINARY"
NAMES = ("path", "CAST(unix_millis(modificationTime) AS BIGINT) AS modified_ms", "length")
FOR_EVER = "36500d"  # Spark would leave out, without a word, files that are a week older than the newest


def stream_of_files(spark: SparkSession, uri: str, most: int | None) -> DataFrame:
    """A row for each file. most: files a batch."""
    reader = spark.readStream.format("binaryFile").schema(SCHEMA).option("maxFileAge", FOR_EVER)
    if most:
        reader = reader.option("maxFilesPerTrigger", most)
    return reader.load(uri).selectExpr(*NAMES)


def files_of(store: Store, uri: str, found: list[FileInfo]) -> list[FileInfo]:
    """Those to take, in the order of arrival: by time, then path. Of training and test files, the training side."""
    above = len(uri)
    files = [
        file
        for file in found
        if file.name not in COMPANIONS and not file.name.endswith("._COPYING_") and not is_evaluation(file.path[above:])
    ]
    return sorted(files, key=lambda file: (file.modified_ms, file.path))


def arrive(
    store: Store,
    uri: str,
    output: str,
    checkpoint: str,
    late_after_s: float | None,
    batch: int,
    frame: DataFrame,
    _: str,
    newest_ms: int,
) -> Arrived:
    """The files of a batch, without those that are late. newest_ms: of the files before. Files that Spark had planned and
    that its frame does not have are among them: they are gone, or empty."""
    planned = {file.path: file for file in planned_files(store, checkpoint, batch)}
    listed = [FileInfo(store.resolve(row.path), row.length, row.modified_ms, is_dir=False) for row in frame.collect()]
    # Spark lists all files of a batch once more for each whose name looks like a pattern.
    found = list((planned | {file.path: file for file in listed}).values())
    files = files_of(store, uri, found)
    rows = {file.path for file in files}
    late = [file for file in files if is_late(file.modified_ms, newest_ms, late_after_s)]
    reason = f"it is more than {late_after_s or 0:g} s older than the newest before it (--late-after)"
    ignored = [file for file in found if file.path not in rows]
    aside = [Broken(file.path, None, "it is no file of training rows", 0) for file in ignored]
    aside += [Broken(file.path, None, reason, 0) for file in late]
    put_aside(store, path_of(output, batch, 0), lines_of(aside))
    taken = [file for file in files if not is_late(file.modified_ms, newest_ms, late_after_s)]
    newest = max((file.modified_ms for file in taken), default=newest_ms)
    return Arrived(uri, taken, digest(files), len(late), newest, len(ignored))


def is_late(time_ms: int, newest_ms: int, late_after_s: float | None) -> bool:
    return late_after_s is not None and time_ms < newest_ms - 1000 * late_after_s


def arrivals(store: Store, uri: str, output: str, checkpoint: str, late_after_s: float | None) -> Any:
    """What makes a batch of a frame."""
    return partial(arrive, store, uri, output, checkpoint, late_after_s)
