"""A stream of messages of a Kafka topic, each of which contains one raw record.

Tasks write the messages of a partition, in order of offsets, into one file of the attempt; from there on they are
treated as rows of any file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.attempt import make_task_folder
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.arrivals import BadRecord
from pipeline.input.quarantine import VALUE, path_of, write_quarantine
from pipeline.stream.checkpoint import planned_offsets
from pipeline.stream.generation import IncomingBatch
from pipeline.stream.lateness import ahead_of_clock, is_late, latest_believable_ms
from pipeline.stream.request import StreamRequest
from pipeline.stream.topic import address, landed_name, record_bytes

COLUMNS = ("partition", "offset", "CAST(unix_millis(timestamp) AS BIGINT) AS time_ms", "value")
LANDED = "partition INT, first LONG, end LONG, newest_ms LONG, aside LONG, ahead LONG, bytes LONG, path STRING"


def stream_of_topic(
    spark: SparkSession, uri: str, most: int | None, allow_data_loss: bool, options: Mapping[str, str]
) -> DataFrame:
    """Return a streaming DataFrame with one row per message.

    Args:
        spark: the session.
        uri: kafka://HOST:PORT/TOPIC.
        most: messages per batch, or None.
        allow_data_loss: continue without messages that were deleted before they were read.
        options: properties of Kafka's consumer.

    Raises:
        UsageError: the uri is not of this form, or Spark's Kafka connector is missing.
    """
    servers, topic = address(uri)
    reader = spark.readStream.format("kafka").options(**{f"kafka.{key}": value for key, value in options.items()})
    reader = reader.option("kafka.bootstrap.servers", servers)
    reader = reader.option("subscribe", topic).option("startingOffsets", "earliest")
    reader = reader.option("failOnDataLoss", not allow_data_loss)
    if most:
        reader = reader.option("maxOffsetsPerTrigger", most)
    try:
        return reader.load().selectExpr(*COLUMNS)
    except AnalysisException as error:
        # Spark reports a missing connector only by an AnalysisException.
        if "kafka" not in str(error).lower():
            raise
        # There is none for Spark 4.3 yet, on which the one before runs.
        version = "4.2.0" if spark.version.startswith("4.3.") else spark.version
        raise UsageError(
            f"--source {uri} needs Spark's Kafka connector: spark-submit --packages"
            f" org.apache.spark:spark-sql-kafka-0-10_2.13:{version}"
        ) from None


def arrivals(store: Store, uri: str, request: StreamRequest, output: str, checkpoint: str | None) -> Any:
    """Return the function that turns Spark's frame of a batch into an IncomingBatch.

    Args:
        store: reaches the output.
        uri: the topic.
        request: configuration of the stream.
        output: folder of the set, resolved.
        checkpoint: Spark's checkpoint, to report lost messages, if --allow-data-loss is set; else None.
    """
    return partial(incoming_messages, store, uri, output, checkpoint, record_bytes(request), request.late_after_s)


def incoming_messages(
    store: Store,
    uri: str,
    output: str,
    checkpoint: str | None,
    size: int,
    late_after_s: float | None,
    batch: int,
    frame: DataFrame,
    folder: str,
    newest_ms: int,
) -> IncomingBatch:
    """Write the messages of a batch, one file per partition, and return them as a batch.

    Args:
        store: reaches the output.
        uri: the topic.
        output: folder of the set, resolved.
        checkpoint: Spark's checkpoint, to report lost messages, if --allow-data-loss is set; else None.
        size: bytes of a message.
        late_after_s: quarantine messages that are this much older than the newest before the batch, or None.
        batch: number of the batch.
        frame: the messages.
        folder: the attempt's folder.
        newest_ms: time of the newest message before the batch.
    """
    # One time limit for all tasks and their retries, so that a retry gives the same result.
    land = partial(_write_landed, store, output, batch, folder, size, late_after_s, newest_ms, latest_believable_ms())
    message_ranges = sorted(frame.mapInArrow(land, LANDED).collect(), key=lambda row: (row.partition, row.first))
    offsets = json.dumps([[row.partition, row.first, row.end] for row in message_ranges])
    files = [FileInfo(row.path, row.bytes, 0, is_dir=False) for row in message_ranges if row.bytes]
    newest = max([newest_ms, *(row.newest_ms for row in message_ranges)])
    source = hashlib.sha256(f"{uri} {offsets}".encode()).hexdigest()
    planned_offsets_by_partition = planned_offsets(store, checkpoint, batch) if checkpoint else {}
    lost_ranges = lost_messages(planned_offsets_by_partition, [(row.partition, row.first) for row in message_ranges])
    warnings = []
    if late_after_s is not None and any(row.ahead for row in message_ranges):
        partitions = ", ".join(str(number) for number in sorted({row.partition for row in message_ranges if row.ahead}))
        count = sum(row.ahead for row in message_ranges)
        warnings.append(ahead_of_clock(f"{count:,} messages of partitions {partitions} have times"))
    aside = sum(row.aside for row in message_ranges)
    return IncomingBatch(uri, files, source, aside, newest, lost_ranges=lost_ranges, warnings=warnings)


def lost_messages(planned: dict[int, tuple[int, int]], first_offsets: Iterable[tuple[int, int]]) -> list[BadRecord]:
    """Return the messages at the begin of a batch that the broker did not deliver, one range per partition.

    A broker deletes from the oldest message on. Offsets of deleted messages, of messages that a compaction removed, and
    of markers of transactions look alike.

    Args:
        planned: offsets start <= offset < end of each partition.
        first_offsets: partition and first offset of the messages that were read.
    """
    firsts: dict[int, int] = {}
    for number, first in first_offsets:
        firsts[number] = min(first, firsts.get(number, first))
    lost_ranges = []
    for number, (start, end) in sorted(planned.items()):
        # If no message of a partition was read, all of its planned offsets are lost.
        if start < (next_offset := min(firsts.get(number, end), end)):
            source = f"partition {number}, offsets {start} to {next_offset - 1}"
            reason = (
                "the topic did not deliver them: deleted, compacted, or markers of transactions (--allow-data-loss)"
            )
            lost_ranges.append(BadRecord(source, None, reason, next_offset - start))
    return lost_ranges


def error_with_next_step(error: Exception, uri: str, output: str) -> Exception:
    """Return the error to raise for a query's error: a DataError with the next step if messages were lost, else the
    same error.

    uri: the topic. output: folder of the set."""
    match = re.search(r"Some data may have been lost.*?Reason:\s*(.+)", str(error), re.DOTALL)
    if not match:
        return error
    reason = match[1].splitlines()[0].strip()
    return DataError(
        f"{uri}: messages were deleted before they were read ({reason}); {output} has those before them. Restart with"
        " --allow-data-loss to continue without them: the quarantine lists them"
    )


def _write_landed(
    store: Store,
    output: str,
    batch: int,
    folder: str,
    expected: int,
    late_after_s: float | None,
    newest_ms: int,
    limit_ms: int,
    messages: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """Write one partition of a topic in order of offsets: whole records into a file, all others into the quarantine.

    Yields one row with the columns LANDED, or nothing if the partition has no messages.

    Args:
        store: reaches the output.
        output: folder of the set.
        batch: number of the batch.
        folder: the attempt's folder.
        expected: bytes of a message.
        late_after_s: quarantine messages that are this many seconds older than ``newest_ms``, or None.
        newest_ms: time of the newest message before the batch.
        limit_ms: messages with a later time do not count as the newest.
        messages: record batches with the columns COLUMNS.
    """
    task = f"{folder}/{uuid.uuid4().hex}"
    path = ""
    size = 0
    newest = newest_ms
    partition = -1
    first = -1
    end = -1
    ahead = 0
    aside: list[dict[str, object]] = []
    file = None
    for message in messages:
        columns = [message.column(name) for name in ("partition", "offset", "time_ms", "value")]
        for number, offset, time_ms, value in zip(*(column.to_pylist() for column in columns), strict=True):
            partition = number
            first = offset if first < 0 else first
            end = offset + 1
            if reason := _message_problem(value, time_ms, expected, newest_ms, late_after_s):
                source = f"partition {number}, offset {offset}"
                data = None if value is None else base64.b64encode(value).decode()
                aside.append({"source": source, "record": None, "records": 1, "reason": reason, VALUE: data})
                continue
            # Created with the first good record: a partition without any leaves no file.
            if file is None:
                make_task_folder(store, task)
                path = f"{task}/{landed_name(number)}"
                file = store.create(path)
            file.write(value)
            size += len(value)
            # A time ahead of the clock must not make all later messages late.
            if time_ms > limit_ms:
                ahead += 1
            else:
                newest = max(newest, time_ms)
    if file is not None:
        file.close()
    # A task without messages yields no row.
    if partition >= 0:
        write_quarantine(store, path_of(output, batch, partition), aside)
        row = [partition, first, end, newest, len(aside), ahead, size, path]
        names = [part.split()[0] for part in LANDED.split(", ")]
        types = [pa.int32(), *[pa.int64()] * 6, pa.string()]
        yield pa.RecordBatch.from_arrays(
            [pa.array([value], kind) for value, kind in zip(row, types, strict=True)], names=names
        )


def _message_problem(
    value: bytes | None, time_ms: int, expected: int, newest_ms: int, late_after_s: float | None
) -> str | None:
    """Return the reason to quarantine a message, or None: another size than a record's, or too late.

    Args:
        value: its bytes, or None.
        time_ms: its time, in ms since 1970.
        expected: bytes of a record.
        newest_ms: time of the newest message before the batch.
        late_after_s: seconds behind ``newest_ms`` after which a message is late; None: never.
    """
    if value is None or len(value) != expected:
        return f"the message has {0 if value is None else len(value)} bytes, but a record has {expected}"
    if is_late(time_ms, newest_ms, late_after_s):
        return f"it is more than {late_after_s:g} s older than the newest before it (--late-after)"
    return None
