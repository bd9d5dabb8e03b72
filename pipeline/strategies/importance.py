"""Importance-aware sharding: rows are ranked by their losses in a training run, and divided by rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np

from pipeline.assignment.chunks import pass_pieces, point_pieces
from pipeline.assignment.groups import GroupTable, group_table, rows_by_worker
from pipeline.assignment.kept import KeptGroups, KeptRange, write_groups
from pipeline.assignment.ranks import split_by_key
from pipeline.core.arrays import Floats, Ints
from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.importance import (
    HEURISTIC_HELP,
    IGNORE_HELP,
    MEASURE_HELP,
    Heuristic,
    Measure,
    importance,
    workers_of_blocks,
)
from pipeline.core.shardset.attempt import write_task_file
from pipeline.core.shardset.damage import content_digest
from pipeline.core.specs import option
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Run, ranges, results_or_error
from pipeline.input.embedding_table import FilePart
from pipeline.input.example_ledger import FLAG, Losses, LossLedger, open_ledger
from pipeline.strategies.base import Context, FitResult, OneGroup, Strategy, row_counts

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

LOSS_BYTES = 20  # id, epoch and loss in the shuffle

logger = logging.getLogger(__name__)


class LossPart(NamedTuple):
    """Some losses of rows. ids: int64 [L]. epochs: int64 [L]. losses: float32 [L]."""

    ids: Ints
    epochs: Ints
    losses: Losses


class SortedRows(NamedTuple):
    """Some rows by descending importance, ties by id. values: float64 [rows], the importance, negated. ids: int64
    [rows]."""

    values: Floats
    ids: Ints


@dataclass(frozen=True)
class RankedFile:
    """A file with the ids of consecutive ranks, int64, in their order. rows: number of ids."""

    path: str
    rows: int


@dataclass(frozen=True)
class OwnedById(OneGroup):
    """The grouping that reads the owner of a row from the files that the fit wrote."""

    owned: KeptGroups

    def workers(self, ids: Ints, groups: Ints, ranks: Ints, table: GroupTable) -> Ints:
        return self.owned(ids)


def owners(table: GroupTable, ranks: Ints, heuristic: Heuristic) -> Ints:
    """Return the workers of rows, int64 [rows], by their ranks.

    Args:
        table: the deal of all rows as one group, in equal shares or in ratios.
        ranks: ranks of the rows by descending importance, int64 [rows].
        heuristic: stripes deals the ranks in turn, blocks gives consecutive ranks to a worker.
    """
    if heuristic == "blocks":
        return workers_of_blocks(ranks, rows_by_worker(table)[:, 0])
    return table.owners(np.zeros_like(ranks), ranks)


@dataclass(frozen=True)
class Importance(Strategy):
    """A strategy that ranks rows by the losses that a training run had on them, and divides them by rank.

    With stripes, every worker gets the same distribution of importance; with blocks, worker 0 gets the most important
    rows. See ``pipeline/core/importance.py``. Losses go through one shuffle, 20 bytes each, and rows through two, of 16
    and 12 bytes; images are not read. The driver gets one number per task and epoch, and about N^2 of N sorting tasks.

    ledger_digest: a digest of the contents of the ledger, None before it was read. It replaces the path of the ledger
    in the identity of the run."""

    name: ClassVar[str] = "importance"
    summary: ClassVar[str] = "rows ranked by their losses in a training run, dealt in turn or in blocks"
    even_sizes: ClassVar[bool] = True
    reads_table: ClassVar[bool] = True
    source_flag: ClassVar[str] = FLAG
    example_ledger: str | None = option(
        None,
        "losses of the rows by epoch: the folder examples of a run that was trained with --example-ledger",
        metavar="URI",
    )
    measure: Measure = option("average", MEASURE_HELP)
    heuristic: Heuristic = option("stripes", HEURISTIC_HELP)
    ignore_epochs: int = option(5, IGNORE_HELP, metavar="EPOCHS", least=0)
    ledger_digest: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.example_ledger:
            raise UsageError(
                f"importance needs {FLAG} URI: train with {FLAG}, and name the folder examples of that run"
            )

    def uses_seed(self) -> bool:
        return False

    def sources(self) -> tuple[str, ...]:
        return (str(self.example_ledger),)

    def with_source_digest(self, store: Store, run: Run[Any, Any]) -> Self:
        """Return a copy with the digest of the ledger. Reads the ledger once.

        Raises DataError if the digest differs from the digest that the set was made with."""
        ledger = open_ledger(store, str(self.example_ledger))
        digest = content_digest(store, ledger.paths, run)
        if self.ledger_digest not in (None, digest):
            raise DataError(
                f"{ledger.uri} holds other losses ({digest}) than the set was made with ({self.ledger_digest}); restore"
                " them, or shard the input again"
            )
        return replace(self, example_ledger=ledger.uri, ledger_digest=digest)

    def params(self) -> dict[str, Any]:
        values = super().params()
        return values | {"ledger_digest": self.ledger_digest} if self.ledger_digest else values

    def identity(self) -> dict[str, Any]:
        """Return the parameters that identify the run: a ledger counts by its digest, not by its path."""
        values = self.params()
        if self.ledger_digest:
            del values["example_ledger"]
        return values

    def fit(self, context: Context) -> FitResult:
        """Return the owner of each row: gather the losses of each row, rank the rows, and divide the ranks."""
        dataset = context.images.dataset
        ledger = open_ledger(dataset.store, str(self.example_ledger))
        with context.phase("losses"):
            counts = count_losses(context.images.context, ledger, self.ignore_epochs)
            context.report(f"{sum(counts.values()):,} losses of {len(counts)} epochs from {min(counts)} on")
        if warning := ledger.warning(context.scan.fingerprint):
            logger.warning(f"warning: {warning}")
        # All rows are one group, whose deal gives the shares of the workers.
        table = group_table(np.array([dataset.rows]), context.num_workers, ratios=context.ratios)
        with context.phase("importance"):
            task = RankingTask(
                ledger=ledger,
                rows=dataset.rows,
                cores=context.images.context.defaultParallelism,
                scratch=context.scratch,
                measure=self.measure,
                ignored=self.ignore_epochs,
                num_epochs=len(counts),
                num_losses=sum(counts.values()),
            )
            owned = owners_by_rank(context.images.context, task, partial(owners, table, heuristic=self.heuristic))
            context.report(f"{dataset.rows:,} rows ranked by {self.measure}, divided by {self.heuristic}")
        return FitResult(OwnedById(owned), row_counts(context), params={"epochs_used": len(counts)})


def count_losses(context: SparkContext, ledger: LossLedger, ignored: int) -> dict[int, int]:
    """Return the number of losses of each epoch after the ignored ones. Reads one column of the ledger.

    Raises DataError if there are none."""

    def count(part: FilePart) -> dict[int, int] | str:
        try:
            return ledger.epochs(part, ignored)
        except JobError as error:
            return str(error)  # raised by results_or_error

    totals: dict[int, int] = {}
    results = context.parallelize(ledger.parts, ledger.tasks(context.defaultParallelism)).map(count).collect()
    for counts in results_or_error(results):
        for epoch, losses in counts.items():
            totals[epoch] = totals.get(epoch, 0) + losses
    if not totals:
        raise DataError(
            f"{ledger.uri} has no losses of epochs after {ignored}; train for more epochs, or lower --ignore-epochs"
        )
    return totals


@dataclass(frozen=True)
class RankingTask:
    """The tasks that rank rows by importance. Picklable, O(files).

    Attributes:
        ledger: the losses.
        rows: number of rows.
        cores: tasks that run at the same time.
        scratch: folder for files that tasks keep until the run ends.
        measure: average or variance.
        ignored: number of first epochs that are ignored.
        num_epochs: number of epochs after them that have losses.
        num_losses: number of losses in these epochs.
    """

    ledger: LossLedger
    rows: int
    cores: int
    scratch: str
    measure: Measure
    ignored: int
    num_epochs: int
    num_losses: int

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """Return the id ranges of tasks that hold ``size`` bytes together."""
        tasks = point_pieces(pass_pieces(self.rows, max(1, size // self.rows), self.cores), size)
        return ranges(0, self.rows, min(tasks, self.rows))

    def losses_by_piece(self, starts: Ints, part: FilePart) -> Iterator[tuple[int, LossPart | str]]:
        """Yield the losses of a part of a file by piece, or an error text. starts: first id of each piece, int64."""
        try:
            for ids, epochs, losses in self.ledger.read(part, self.ignored):
                if len(beyond := np.flatnonzero(ids >= self.rows)):
                    raise DataError(f"{part.path}: id {ids[beyond[0]]} is not one of the rows 0..{self.rows - 1}")
                for piece, places in split_by_key(np.searchsorted(starts, ids, side="right") - 1):
                    yield piece, LossPart(ids[places], epochs[places], losses[places])
        except JobError as error:
            yield 0, str(error)

    def sort_piece(
        self, pieces: list[tuple[int, int]], piece: int, parts: Iterable[tuple[int, LossPart | str]]
    ) -> Iterator[SortedRows | str]:
        """Yield the rows of a piece by importance, or an error text.

        Args:
            pieces: the id ranges [low, high) of all pieces.
            piece: the number of this piece.
            parts: losses and error texts of this piece, in any order.
        """
        low, high = pieces[piece]
        loss_parts: list[LossPart] = [LossPart(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32))]
        for _, part in parts:
            if isinstance(part, str):
                yield part
                return
            loss_parts.append(part)
        # The ignored epochs were left out when the ledger was read.
        values = importance(
            np.concatenate([part.ids for part in loss_parts]) - low,
            np.concatenate([part.epochs for part in loss_parts]),
            np.concatenate([part.losses for part in loss_parts]),
            rows=high - low,
            measure=self.measure,
            num_epochs=self.num_epochs,
        )
        if len(missing := np.flatnonzero(np.isnan(values))):
            more = f", nor have {len(missing) - 1:,} others up to row {high - 1}" if len(missing) > 1 else ""
            after = f" after epoch {self.ignored}" if self.ignored else ""
            yield (
                f"{self.ledger.uri}: row {low + missing[0]} has no loss{after}{more}; train for more epochs, on every row of"
                " the input"
            )
            return
        order = np.argsort(-values, kind="stable")
        yield SortedRows(-values[order], low + order)

    def write_ids(self, parts: Iterable[tuple[int, SortedRows]]) -> Iterator[RankedFile]:
        """Write the ids of consecutive ranks in their order, and yield the file."""
        rows = [part for _, part in parts]
        ids = np.concatenate([np.empty(0, np.int64), *(part.ids for part in rows)])
        values = np.concatenate([np.empty(0), *(part.values for part in rows)])
        data = ids[np.lexsort((ids, values))].astype("<i8").tobytes()
        yield RankedFile(write_task_file(self.ledger.store, self.scratch, data), len(ids))

    def read_ids(self, file: RankedFile) -> Ints:
        return np.frombuffer(self.ledger.store.read(file.path), "<i8").astype(np.int64)


def quantiles(rows: SortedRows, number: int) -> SortedRows:
    """Return ``number`` rows at equal distances, or all if there are fewer."""
    places = np.unique(np.arange(number) * len(rows.ids) // number)
    return SortedRows(rows.values[places], rows.ids[places])


def splitters(samples: list[SortedRows], number: int) -> SortedRows:
    """Return the rows that separate ``number`` ranges of about equal size. samples: quantiles of equal pieces."""
    values = np.concatenate([sample.values for sample in samples])
    ids = np.concatenate([sample.ids for sample in samples])
    order = np.lexsort((ids, values))[np.arange(1, number) * len(ids) // number]
    return SortedRows(values[order], ids[order])


def split(rows: SortedRows, at: SortedRows) -> Iterator[tuple[int, SortedRows]]:
    """Yield (range, rows) for the rows before, between and after the splitters."""
    cuts = [0]
    for value, id in zip(at.values, at.ids, strict=True):
        first, end = np.searchsorted(rows.values, [value, np.nextafter(value, np.inf)])
        cuts.append(int(first + np.searchsorted(rows.ids[first:end], id)))
    cuts.append(len(rows.ids))
    for number, (low, high) in enumerate(pairwise(cuts)):
        if low < high:
            yield number, SortedRows(rows.values[low:high], rows.ids[low:high])


def owners_by_rank(context: SparkContext, task: RankingTask, owners_of: partial[Ints]) -> KeptGroups:
    """Rank all rows and return the owner of each, stored by id. owners_of: function from ranks to workers.

    Raises DataError if a row has no loss, or the ledger has a row that the input lacks."""
    from pyspark import StorageLevel  # not at the top: flags of strategies are read without Spark

    pieces = task.pieces(LOSS_BYTES * task.num_losses)
    starts = np.array([low for low, _ in pieces], np.int64)
    parts = context.parallelize(task.ledger.parts, task.ledger.tasks(task.cores))
    sorted_pieces: RDD[SortedRows | str] = (
        parts.flatMap(partial(task.losses_by_piece, starts))
        .partitionBy(len(pieces), int)
        .mapPartitionsWithIndex(partial(task.sort_piece, pieces))
        .persist(StorageLevel.MEMORY_AND_DISK)
    )
    # Each task sorts its rows, and sends few of them; these divide all rows into ranges of about equal size.
    try:
        number = len(task.pieces(16 * task.rows))
        samples = sorted_pieces.map(lambda rows: rows if isinstance(rows, str) else quantiles(rows, number)).collect()
        at = splitters(results_or_error(samples), number)
        # A second shuffle brings the rows of a range into one task, so that the ranges are sorted one after the other.
        files = (
            sorted_pieces.flatMap(lambda rows: [] if isinstance(rows, str) else split(rows, at))
            .partitionBy(number, int)
            .mapPartitions(task.write_ids)
            .collect()
        )
    finally:
        sorted_pieces.unpersist()
    return store_owners(context, task, files, owners_of)


def store_owners(
    context: SparkContext, task: RankingTask, files: list[RankedFile], owners_of: partial[Ints]
) -> KeptGroups:
    """Write the owners of ranked rows by id, and return their files.

    Args:
        context: the running Spark.
        task: reads the files.
        files: the ids of all ranks, in order.
        owners_of: function from ranks to workers.
    """
    pieces = task.pieces(12 * task.rows)
    starts = np.array([low for low, _ in pieces], np.int64)
    # The number of rows in the files before gives the rank of the first row of a file.
    firsts = list(accumulate((file.rows for file in files), initial=0))

    def owners_by_piece(place: int) -> Iterator[tuple[int, tuple[Ints, Ints]]]:
        ids = task.read_ids(files[place])
        workers = owners_of(firsts[place] + np.arange(len(ids)))
        for piece, places in split_by_key(np.searchsorted(starts, ids, side="right") - 1):
            yield piece, (ids[places], workers[places])

    def write(piece: int, parts: Iterable[tuple[int, tuple[Ints, Ints]]]) -> Iterator[KeptRange]:
        low, high = pieces[piece]
        result = np.empty(high - low, np.int32)
        for _, (ids, workers) in parts:
            result[ids - low] = workers
        yield write_groups(task.ledger.store, task.scratch, low, result)

    kept_ranges = (
        context.parallelize(range(len(files)), max(1, len(files)))
        .flatMap(owners_by_piece)
        .partitionBy(len(pieces), int)
        .mapPartitionsWithIndex(write)
        .collect()
    )
    return KeptGroups(task.ledger.store, tuple(sorted(kept_ranges, key=lambda each: each.low)))
