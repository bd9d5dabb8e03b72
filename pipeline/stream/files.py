"""A stream of files that arrive in a folder: Spark's file source provides only the names, and tasks read the files.

Spark's checkpoint records which files each batch contained. Files must appear whole (by a rename), as Spark's
documentation requires; a file that HDFS's client is still copying (``._COPYING_``) is skipped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from pipeline.core.errors import UsageError
from pipeline.core.storage.files import FileInfo
from pipeline.input.arrivals import BadRecord, digest
from pipeline.input.files import COMPANIONS, PARTITION, is_evaluation
from pipeline.input.quarantine import lines_of, path_of, write_quarantine
from pipeline.stream.checkpoint import planned_files
from pipeline.stream.generation import IncomingBatch
from pipeline.stream.inbox import Inbox, is_left_out, warnings_of
from pipeline.stream.lateness import ahead_of_clock, is_late, latest_believable_ms

SCHEMA = "path STRING, modificationTime TIMESTAMP, length BIGINT, content BINARY"
NAMES = ("path", "CAST(unix_millis(modificationTime) AS BIGINT) AS modified_ms", "length")
# By default Spark silently drops files a week older than the newest, whose time may be that of a wrong clock.
FOR_EVER = "36500000d"


def stream_of_files(spark: SparkSession, uri: str, most: int | None) -> DataFrame:
    """Return a streaming DataFrame with one row per file. most: files per batch, or None."""
    reader = spark.readStream.format("binaryFile").schema(SCHEMA).option("maxFileAge", FOR_EVER)
    if most:
        reader = reader.option("maxFilesPerTrigger", most)
    return reader.load(uri).selectExpr(*NAMES)


def files_of(uri: str, entries: list[FileInfo]) -> list[FileInfo]:
    """Return the files to read, in order of arrival: by time, then path.

    If a folder has training and test files, only training files are returned.

    uri: the source folder. entries: the files that Spark lists or has planned for a batch."""
    above = len(uri)

    def holds_rows(file: FileInfo) -> bool:
        """True if a file lies in partition folders alone and is neither hidden, a companion nor an evaluation file."""
        folders = file.path[above:].strip("/").split("/")[:-1]
        # Spark reads any folder inside a partition folder; a batch job refuses it.
        expected = all(PARTITION.fullmatch(folder) for folder in folders)
        return (
            expected and file.name not in COMPANIONS and not is_left_out(file) and not is_evaluation(file.path[above:])
        )

    return sorted(filter(holds_rows, entries), key=lambda file: (file.modified_ms, file.path))


def check_below(uri: str, entries: Sequence[FileInfo], checkpoint: str) -> None:
    """Raise UsageError if a file of a batch does not lie in the source.

    An earlier start with another source may have ended before the set had its first rows, but after Spark planned them."""
    foreign = next((file.path for file in entries if not file.path.startswith(f"{uri.rstrip('/')}/")), None)
    if foreign:
        raise UsageError(
            f"--source {uri}: the checkpoint {checkpoint} has planned files of another source, such as {foreign}; give that"
            " --source, or another --checkpoint"
        )


def incoming_files(
    inbox: Inbox, checkpoint: str, late_after_s: float | None, batch: int, frame: DataFrame, _: str, newest_ms: int
) -> IncomingBatch:
    """Return the files of a batch, without late ones.

    Files that Spark planned but no longer lists are included, because they were deleted or are empty.

    Args:
        inbox: the source folder.
        checkpoint: Spark's checkpoint.
        late_after_s: quarantine files that are this much older than the newest before them, or None.
        batch: number of the batch.
        frame: the batch as Spark lists it.
        _: the attempt's folder, which a stream of files does not need.
        newest_ms: time of the newest file before the batch.
    """
    store = inbox.store
    # Listed before any file is read, so that a write during this batch shows as a change in a later one.
    look = inbox.list_files()
    changes = inbox.changes(batch, look)
    planned_by_path = {file.path: file for file in planned_files(store, checkpoint, batch)}
    listed_entries = [
        FileInfo(store.resolve(row.path), row.length, row.modified_ms, is_dir=False) for row in frame.collect()
    ]
    # Keyed by path: Spark lists a batch's files again for each name that looks like a pattern.
    entries = list((planned_by_path | {file.path: file for file in listed_entries}).values())
    check_below(inbox.uri, entries, checkpoint)
    files = files_of(inbox.uri, entries)
    rows = {file.path for file in files}
    late = [file for file in files if is_late(file.modified_ms, newest_ms, late_after_s)]
    reason = f"it is more than {late_after_s or 0:g} s older than the newest before it (--late-after)"
    ignored = [file for file in entries if file.path not in rows]
    # Ignored, late and changed files are recorded before the batch is committed.
    aside = [BadRecord(file.path, None, "it is no file of training rows", 0) for file in ignored]
    aside += [BadRecord(file.path, None, reason, 0) for file in late]
    aside += [BadRecord(change.now.path, None, change.describe(), 0) for change in changes]
    write_quarantine(store, path_of(inbox.output, batch, 0), lines_of(aside))
    inbox.record(batch, [*(look.files.get(file.path, file) for file in files), *(change.now for change in changes)])
    files_on_time = [file for file in files if not is_late(file.modified_ms, newest_ms, late_after_s)]
    limit_ms = latest_believable_ms()
    newest = max((file.modified_ms for file in files_on_time if file.modified_ms <= limit_ms), default=newest_ms)
    warnings = [*look.warnings(), *warnings_of(changes)]
    ahead = [file.path for file in files_on_time if file.modified_ms > limit_ms]
    if ahead and late_after_s is not None:
        warnings.append(ahead_of_clock(f"{len(ahead):,} files, such as {ahead[-1]}, have times"))
    return IncomingBatch(inbox.uri, files_on_time, digest(files), len(late), newest, len(ignored), warnings=warnings)


def arrivals(inbox: Inbox, checkpoint: str, late_after_s: float | None) -> Any:
    """Return the function that turns Spark's frame of a batch into an IncomingBatch."""
    return partial(incoming_files, inbox, checkpoint, late_after_s)
