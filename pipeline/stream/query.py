"""The life of a stream: batches one after the other until it is drained, or somebody ends it.

Spark's checkpoint says which files, or offsets, are in a batch; the set says which batches are in it. Spark does again what
it has begun and not noted as done, and a batch that the set has is skipped: so each is in the set once, whenever the driver
dies."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from pipeline.core.shardset.generations import generations
from pipeline.spark.signals import passed_on
from pipeline.stream.buckets import BYTES
from pipeline.stream.generation import Arrived, GenerationRun, Outcome

POLL_S = 1
Arrive = Callable[[int, DataFrame, str, int], Arrived]


@dataclass
class Tally:
    """What a start has done. rows, quarantined: records; seconds: of its batches."""

    committed: int = 0
    skipped: int = 0
    rows: int = 0
    quarantined: int = 0
    seconds: float = 0.0
    last: Outcome | None = None


class AskedToEnd(Exception):
    """A batch that came after the stream was asked to end: Spark must not note it as done."""


@dataclass
class Running:
    """A query and what it shares with the thread that watches it. idle: held while a batch is at work; refused: whether a
    batch came after the end; say, warn: print a line, of progress or of rows that are not read."""

    run: GenerationRun
    arrive: Arrive
    say: Callable[[str], None]
    warn: Callable[[str], None]
    tally: Tally = field(default_factory=Tally)
    idle: threading.Lock = field(default_factory=threading.Lock)
    query: StreamingQuery | None = None
    known: threading.Event = field(default_factory=threading.Event)
    ended: bool = False
    refused: bool = False

    def on_batch(self, frame: DataFrame, batch: int) -> None:
        """For foreachBatch."""
        self.known.wait()
        with self.idle:
            if self.ended:
                self.refused = True
                raise AskedToEnd
            assert self.query
            run = GenerationRun(self.run.context, self.run.request, self.run.store, self.run.output, str(self.query.id))
            done = run.take(batch, lambda folder, newest_ms: self.arrive(batch, frame, folder, newest_ms))
            self._count(batch, done)

    def _count(self, batch: int, done: Outcome) -> None:
        tally = self.tally
        tally.last = done if done.shards else tally.last
        tally.rows, tally.quarantined = tally.rows + done.rows, tally.quarantined + done.quarantined
        tally.seconds += done.seconds
        for text in done.warnings:
            self.warn(f"warning: batch {batch}: {text}")
        if done.fresh and done.shards:
            tally.committed += 1
            self.say(line(batch, done))
        elif done.seconds:
            self.say(f"batch {batch}: no row to commit, {done.quarantined:,} put aside")
        else:
            tally.skipped += 1
            self.say(f"batch {batch}: committed already")


def line(batch: int, done: Outcome) -> str:
    """What a person sees of a generation."""
    assert done.shards
    manifest, last = done.shards.manifest, generations(done.shards)[-1]
    parts = [
        f"generation {last.number} (batch {batch}): {last.rows:,} rows in {done.seconds:.1f} s",
        f"{last.rows / done.seconds:,.0f} rows a second",
        f"{manifest['rows']:,} rows in {done.buckets:,} buckets of {BYTES} bytes of state each",
    ]
    parts += [f"{last.copies:,} copies of sparse buckets"] * last.closes
    parts += [f"{last.quarantined:,} put aside"] * bool(last.quarantined)
    return ", ".join(parts)


def start(running: Running, stream: DataFrame, checkpoint: str, trigger: dict[str, Any]) -> StreamingQuery:
    writer = stream.writeStream.foreachBatch(running.on_batch).option("checkpointLocation", checkpoint)
    query = writer.trigger(**trigger).start()
    running.query = query
    running.known.set()
    return query


def watch(running: Running, query: StreamingQuery) -> Tally:
    """Until the query has ended by itself, or somebody asks it to: then after the batch that is at work. Raises what a batch
    raised."""
    with asked_to_end() as asked, passed_on(running.run.context):
        while query.isActive:
            query.awaitTermination(POLL_S)
            if asked.is_set():
                running.say("asked to end: after the batch that is at work")
                with running.idle:
                    running.ended = True
                query.stop()  # not under the lock: it waits for a batch that may wait for that
                break
    error = query.exception()
    if error and not running.refused:
        raise error
    return running.tally


@contextmanager
def asked_to_end() -> Iterator[threading.Event]:
    """Set by SIGTERM or Ctrl-C, which do nothing else meanwhile."""
    asked = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        asked.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)
