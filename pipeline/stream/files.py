"""Files that arrive in a folder, as a stream: Spark's own file source, asked for names alone; tasks read the files.

Spark's checkpoint knows which files were in which batch. Files have to appear whole (by a rename), as Spark's documentation
asks; one that HDFS's client is still copying (``._COPYING_``) is not taken."""

from __future__ import annotations

from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from pipeline.core.storage.files import FileInfo
from pipeline.input.files import COMPANIONS, PARTITION, is_evaluation
from pipeline.stream.arrivals import Broken, digest
from pipeline.stream.checkpoint import planned_files
from pipeline.stream.generation import Arrived
from pipeline.stream.inbox import Inbox, is_left_out, warnings_of
from pipeline.stream.lateness import ahead_of_clock, is_late, latest_believable_ms
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


def files_of(uri: str, found: list[FileInfo]) -> list[FileInfo]:
    """Those to take, in the order of arrival: by time, then path. Of training and test files, the training side."""
    above = len(uri)

    def holds_rows(file: FileInfo) -> bool:
        folders = file.path[above:].strip("/").split("/")[:-1]
        # Spark reads any folder in a partition folder, and a batch job refuses it.
        expected = all(PARTITION.fullmatch(folder) for folder in folders)
        return (
            expected and file.name not in COMPANIONS and not is_left_out(file) and not is_evaluation(file.path[above:])
        )

    return sorted(filter(holds_rows, found), key=lambda file: (file.modified_ms, file.path))


def arrive(
    inbox: Inbox, checkpoint: str, late_after_s: float | None, batch: int, frame: DataFrame, _: str, newest_ms: int
) -> Arrived:
    """The files of a batch, without those that are late. newest_ms: of the files before. Files that Spark had planned and
    that its frame does not have are among them: they are gone, or empty."""
    store = inbox.store
    # Before any file is read: whatever is written to one from here on is reported with a later batch.
    look = inbox.look()
    changes = inbox.changes(batch, look)
    planned = {file.path: file for file in planned_files(store, checkpoint, batch)}
    listed = [FileInfo(store.resolve(row.path), row.length, row.modified_ms, is_dir=False) for row in frame.collect()]
    # Spark lists all files of a batch once more for each whose name looks like a pattern.
    found = list((planned | {file.path: file for file in listed}).values())
    files = files_of(inbox.uri, found)
    rows = {file.path for file in files}
    late = [file for file in files if is_late(file.modified_ms, newest_ms, late_after_s)]
    reason = f"it is more than {late_after_s or 0:g} s older than the newest before it (--late-after)"
    ignored = [file for file in found if file.path not in rows]
    aside = [Broken(file.path, None, "it is no file of training rows", 0) for file in ignored]
    aside += [Broken(file.path, None, reason, 0) for file in late]
    aside += [Broken(change.now.path, None, change.describe(), 0) for change in changes]
    put_aside(store, path_of(inbox.output, batch, 0), lines_of(aside))
    inbox.note(batch, [*(look.files.get(file.path, file) for file in files), *(change.now for change in changes)])
    taken = [file for file in files if not is_late(file.modified_ms, newest_ms, late_after_s)]
    limit_ms = latest_believable_ms()
    newest = max((file.modified_ms for file in taken if file.modified_ms <= limit_ms), default=newest_ms)
    warnings = [*look.warnings(), *warnings_of(changes)]
    ahead = [file.path for file in taken if file.modified_ms > limit_ms]
    if ahead and late_after_s is not None:
        warnings.append(ahead_of_clock(f"{len(ahead):,} files, such as {ahead[-1]}, have times"))
    return Arrived(inbox.uri, taken, digest(files), len(late), newest, len(ignored), warnings=warnings)


def arrivals(inbox: Inbox, checkpoint: str, late_after_s: float | None) -> Any:
    """What makes a batch of a frame."""
    return partial(arrive, inbox, checkpoint, late_after_s)
