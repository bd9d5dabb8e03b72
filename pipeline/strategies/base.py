"""The interface of a strategy: it divides rows into groups, and deals the rows of each group to workers.

A strategy looks at the data once (``fit``) and returns a grouping: a small picklable object that returns the groups of
any block of rows, and the workers of rows by (id, group, rank in group). All other steps are the same for every
strategy: counting, exact ranks, broadcasting of sparse groups, writing, verifying, committing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from pipeline.assignment.bundles import BundleOrder
from pipeline.assignment.groups import GroupTable, SparseIf, Start, rows_by_worker
from pipeline.core.arrays import Ints
from pipeline.core.command_line import seed as seed_number
from pipeline.core.errors import UsageError
from pipeline.core.shardset.ratios import Ratios
from pipeline.core.specs import Spec, option
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Block, Dataset, Run
from pipeline.input.scan import Scan
from pipeline.spark.images import Images

SPARSE_HELP = (
    "neighbourhoods that are copied to every worker: those with at most (le) or fewer (lt) rows than there are workers, or"
    " none (never)"
)
START_HELP = (
    "first worker of a group: worker 0 as in the paper (zero), or the worker after the previous group's last (carry)"
)


@dataclass(frozen=True)
class Context:
    """The inputs and tools that ``fit`` may use.

    Attributes:
        images: the rows of the input as an RDD source.
        scan: counts and checks of the first pass over the rows.
        bounds: the id range [low, high) of each chunk.
        num_workers: number of shards.
        phase: phase(name) times and announces a step.
        report: report(text) prints progress inside a step.
        scratch: a folder for files that tasks keep until the run ends.
        ratios: the workers' shares in lowest terms; None: equal shares.
    """

    images: Images
    scan: Scan
    bounds: list[tuple[int, int]]
    num_workers: int
    phase: Callable[[str], AbstractContextManager[None]]
    report: Callable[[str], None]
    scratch: str
    ratios: Ratios | None = None


class Grouping:
    """A mapping of rows to groups and to workers. Pure and picklable.

    The default is one group, dealt round robin, or in ratios."""

    neighbourhoods = False  # True: the group is a neighbourhood, which is written as a column of the row
    permutes_ranks = False  # True: ``workers`` is overridden, and each worker still gets the counts of rows_by_worker
    reads_images = True  # False: ``groups`` needs no images, so an assignment without shards does not read them

    def groups(self, block: Block) -> Ints:
        """Return the group of each row, int64 [rows] in [0, number of groups)."""
        return np.zeros(len(block.ids), np.int64)

    def workers(self, ids: Ints, groups: Ints, ranks: Ints, table: GroupTable) -> Ints:
        """Return the owner of each row, int64 [rows] in [0, num_workers).

        Args:
            ids: int64 [rows].
            groups: the group of each row, int64 [rows].
            ranks: the rank of each row in its group, int64 [rows].
            table: sizes, first workers and sparsity of all groups.
        """
        return table.owners(groups, ranks)

    def rows_by_worker(self, table: GroupTable) -> Ints:
        """Return the rows per worker and neighbourhood for the manifest, int64 [workers, groups], copies included.

        A grouping that overrides ``workers`` must override this too."""
        return rows_by_worker(table)


class OneGroup(Grouping):
    reads_images = False


@dataclass(frozen=True)
class FitResult:
    """The result of a fit.

    Attributes:
        grouping: the mapping of rows to groups and workers.
        counts: rows by chunk and group, int64 [chunks, groups].
        start: the rule for the first worker of each group.
        sparse_if: the rule for sparse groups, whose rows all go to every worker.
        table: rows of each group by worker, int64 [groups, workers]; None: groups are dealt in equal shares, or ratios.
        params: parameters that the fit resolved (numbers of clusters, components, ...).
        models: fitted spark.ml models by name, which are saved with the shards.
    """

    grouping: Grouping
    counts: Ints
    start: Start = "zero"
    sparse_if: SparseIf = "never"
    params: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    table: Ints | None = None


@dataclass(frozen=True)
class Strategy(Spec, ABC):
    """A sharding strategy, whose fields are its parameters.

    Flags, TOML keys, manifest entries and identity follow from the fields. The class variables are guarantees for the
    default parameters; tests/spark/test_strategies.py checks them for every member of the registry."""

    looks_at_labels: ClassVar[bool] = False
    looks_at_pixels: ClassVar[bool] = False
    even_sizes: ClassVar[bool] = False  # the sizes of shards differ by at most one
    even_classes: ClassVar[bool] = False  # the counts of every class differ by at most one
    copies_rows: ClassVar[bool] = False  # some rows may go to every worker
    decides_sizes: ClassVar[bool] = False  # its own rule decides how many rows a worker gets, so ratios are refused
    reads_table: ClassVar[bool] = False  # it needs a table of its own beside the input
    source_flag: ClassVar[str] = "--embedding"  # the flag that names ``sources``
    bundle_order: ClassVar[BundleOrder] = "largest"  # the order in which --group-by places bundles
    seed: int = option(
        0,
        "seed of all random choices",
        least=0,
        most=(1 << 63) - 1,
        expected="a whole number from 0 to 2^63 - 1",
        parse=seed_number,
        recorded=False,
    )

    def uses_seed(self) -> bool:
        """True if the seed changes the shards."""
        return True

    @property
    def larger_groups(self) -> str:
        """The change of flags that makes larger groups; empty if the strategy copies no rows."""
        return ""

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that a fit imports and that load slowly. A job loads them while Spark starts."""
        return ()

    def identity(self) -> dict[str, Any]:
        """Return the parameters that two runs must share to make the same shards."""
        return self.params()

    @property
    def bundle_column(self) -> str | None:
        """The column whose values this strategy keeps together; None: --group-by says."""
        return None

    def sources(self) -> tuple[str, ...]:
        """Return the URIs of data that the strategy reads in addition to the input."""
        return ()

    def with_source_digest(self, store: Store, run: Run[Any, Any]) -> Self:
        """Return this strategy with a digest of its ``sources``, which is part of its identity.

        run(fn, items): maps a function over files. Raises DataError if the sources have changed since it was
        configured."""
        return self

    def check_without_labels(self) -> None:
        """Raise UsageError if this strategy cannot shard rows without labels."""
        if self.looks_at_labels:
            raise UsageError(f"{self.name} needs labels, which --unlabelled rows do not have; choose another strategy")

    def check_ratios(self, ratios: Sequence[int] | None) -> None:
        """Raise UsageError if this strategy cannot deal rows in these ratios; None: equal shares."""
        if ratios and self.decides_sizes:
            raise UsageError(f"{self.name} decides itself how many rows each worker gets: leave out --ratios")

    def check_input(self, dataset: Dataset) -> None:
        """Raise UsageError if this strategy cannot shard the rows of the input."""

    @abstractmethod
    def fit(self, context: Context) -> FitResult:
        """Look at the data and return the grouping."""

    def refit(self, context: Context, stored_groups: StoredGroups) -> FitResult:
        """Return the same grouping for another number of workers, from a committed set and without fitting again."""
        return self.fit(context)


@dataclass(frozen=True)
class StoredGroups:
    """The grouping that a committed set stores.

    counts: rows, int64 [chunks, neighbourhoods]. params: the parameters that its fit resolved."""

    counts: Ints
    params: dict[str, Any]

    def fit_result(self, start: Start, sparse_if: SparseIf = "never") -> FitResult:
        """Return the result of the fit that made the set. start, sparse_if: the strategy's rules, as in FitResult."""
        return FitResult(StoredNeighbourhoods(), self.counts, start, sparse_if, params=self.params)


class StoredNeighbourhoods(Grouping):
    """The grouping by the neighbourhood column of a committed set."""

    neighbourhoods = True
    reads_images = False

    def groups(self, block: Block) -> Ints:
        return block.neighbourhoods


def deals_counts(grouping: Grouping) -> bool:
    """True if each worker gets the counts of the table's groups, whichever rows these are."""
    return type(grouping).workers is Grouping.workers or grouping.permutes_ranks


def row_counts(context: Context) -> Ints:
    """Return the counts of all rows as one group, int64 [chunks, 1]."""
    return np.array([[high - low] for low, high in context.bounds], np.int64)
