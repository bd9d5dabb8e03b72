"""The main loop of a stream: batches in sequence until the source is drained or a signal ends it.

Spark's checkpoint records which files or offsets belong to a batch; the set records which batches it contains. Spark
repeats a batch that it began and did not note as done, and a batch that is already in the set is skipped. Each batch is
therefore in the set once, whenever the driver dies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from pipeline.core import console
from pipeline.core.shardset.generations import generations
from pipeline.core.shardset.manifest import ShardSet
from pipeline.spark.signals import forward_sigterm
from pipeline.stream.buckets import BYTES
from pipeline.stream.generation import GenerationRun, IncomingBatch, Outcome

POLL_S = 1
Arrive = Callable[[int, DataFrame, str, int], IncomingBatch]


@dataclass
class StreamTotals:
    """The totals of one start of a stream.

    Attributes:
        committed: batches committed.
        rows: records committed.
        quarantined: records quarantined.
        seconds: duration of all batches.
        last: result of the last batch after which a set exists.
    """

    committed: int = 0
    rows: int = 0
    quarantined: int = 0
    seconds: float = 0.0
    last: Outcome | None = None


class AskedToEnd(Exception):
    """The error of a batch that starts after the stream was asked to end, so that Spark does not note it as done."""


@dataclass
class Running:
    """A query and the state that it shares with the thread that watches it.

    Attributes:
        run: configuration of the commits.
        arrive: arrive(batch, frame, folder, newest_ms) returns the contents of a batch.
        say: prints a line of progress.
        warn: prints a line about rows that are not read.
        on_commit: called with the set after each batch that was added to it.
        tally: totals so far.
        idle: lock that a batch holds while it runs.
        query: the running query.
        query_is_set: set once ``query`` is.
        is_asked_to_end: True once the stream was asked to end.
        has_refused_batch: True if a batch started after that.
    """

    run: GenerationRun
    arrive: Arrive
    say: Callable[[str], None]
    warn: Callable[[str], None]
    on_commit: Callable[[ShardSet], None] = lambda shards: None
    tally: StreamTotals = field(default_factory=StreamTotals)
    idle: threading.Lock = field(default_factory=threading.Lock)
    query: StreamingQuery | None = None
    query_is_set: threading.Event = field(default_factory=threading.Event)
    is_asked_to_end: bool = False
    has_refused_batch: bool = False

    def on_batch(self, frame: DataFrame, batch: int) -> None:
        """Commit one batch; the callback of foreachBatch."""
        self.query_is_set.wait()
        with self.idle:
            if self.is_asked_to_end:
                self.has_refused_batch = True
                raise AskedToEnd
            assert self.query
            run = replace(self.run, query=str(self.query.id))
            outcome = run.commit_batch(batch, lambda folder, newest_ms: self.arrive(batch, frame, folder, newest_ms))
            self._count(batch, outcome)

    def _count(self, batch: int, outcome: Outcome) -> None:
        """Add the result of a batch to the totals and print its line."""
        tally = self.tally
        tally.last = outcome if outcome.shards else tally.last
        tally.rows += outcome.rows
        tally.quarantined += outcome.quarantined
        tally.seconds += outcome.seconds
        for text in outcome.warnings:
            self.warn(f"warning: batch {batch}: {text}")
        if outcome.fresh and outcome.shards:
            tally.committed += 1
            self.say(generation_line(batch, outcome))
            self.on_commit(outcome.shards)
        elif outcome.seconds:
            self.say(f"batch {batch}: no rows to commit, {outcome.quarantined:,} quarantined")
        else:
            # A batch that took no time was committed before a restart, after which Spark has delivered it again.
            self.say(f"batch {batch}: committed already")


def generation_line(batch: int, outcome: Outcome) -> str:
    """Return the line that is printed for a generation."""
    assert outcome.shards
    manifest = outcome.shards.manifest
    last = generations(outcome.shards)[-1]
    parts = [
        f"generation {len(manifest.generations) - 1} (batch {batch}): {last.rows:,} rows in {outcome.seconds:.1f} s",
        f"{last.rows / outcome.seconds:,.0f} rows per second",
        f"{manifest.rows:,} rows in {outcome.buckets:,} buckets of {BYTES} bytes of state each",
    ]
    parts += [f"{last.copies:,} copies of sparse buckets"] * last.closes
    parts += [f"{last.quarantined:,} quarantined"] * bool(last.quarantined)
    return ", ".join(parts)


def start(running: Running, stream: DataFrame, checkpoint: str, trigger: dict[str, Any]) -> StreamingQuery:
    """Start the query and let its batches run, which wait until ``running`` knows the query."""
    writer = stream.writeStream.foreachBatch(running.on_batch).option("checkpointLocation", checkpoint)
    query = writer.trigger(**trigger).start()
    running.query = query
    running.query_is_set.set()
    return query


def watch(running: Running, query: StreamingQuery) -> StreamTotals:
    """Wait until the query ends by itself, or stop it after the current batch once a signal asks for it.

    Raises the error of a failed batch."""
    with stop_signals() as stop_requested, forward_sigterm(running.run.context):
        while query.isActive:
            query.awaitTermination(POLL_S)
            if stop_requested.is_set():
                running.say("stopping after the current batch")
                with running.idle:
                    running.is_asked_to_end = True
                query.stop()  # without the lock: stop waits for a batch, which may wait for the lock
                break
    error = query.exception()
    if error and not running.has_refused_batch:
        raise error
    return running.tally


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Yield an event that is set by SIGTERM or Ctrl-C, which have no other effect meanwhile."""
    stop_requested = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        stop_requested.set()

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop_requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(text: str) -> None:
    console.say("sharding.stream", text, text=f"{console.wall_clock()} {text}")
