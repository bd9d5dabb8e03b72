"""What a strategy is: a way to put rows into groups, and a way to deal the rows of a group to workers.

A strategy looks at the data once (``fit``) and returns a grouping: a small picklable object that tells, for any block of
rows, their groups, and for (id, group, rank in group), their workers. Everything else is the same for all strategies:
counting, exact ranks, broadcasting of sparse groups, writing, verifying, committing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

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

SPARSE_HELP = "a neighbourhood of at most (le) or fewer than (lt) N rows goes to every worker, or none does (never)"
START_HELP = "first worker of a group: 0 as in the paper, or where the group before left off"


@dataclass(frozen=True)
class Context:
    """What ``fit`` may use. phase(name): times and announces a step; report(text): progress inside it. scratch: a folder for
    what tasks keep until the run ends. ratios: of the workers' shares, in lowest terms; None: equal ones."""

    images: Images
    scan: Scan
    bounds: list[tuple[int, int]]
    num_workers: int
    phase: Callable[[str], AbstractContextManager[None]]
    report: Callable[[str], None]
    scratch: str
    ratios: Ratios | None = None


class Grouping:
    """Rows to groups to workers. Pure and picklable; the default is one group, dealt round robin, or in ratios."""

    neighbourhoods = False  # whether the group is a neighbourhood, written beside the row
    reads_images = True  # whether ``groups`` looks at images; where not, an assignment alone is made without them

    def groups(self, block: Block) -> Ints:
        """int64 [rows] in [0, number of groups)."""
        return np.zeros(len(block.ids), np.int64)

    def workers(self, ids: Ints, groups: Ints, ranks: Ints, table: GroupTable) -> Ints:
        """The owner of each row, int64 [rows] in [0, num_workers)."""
        return table.owners(groups, ranks)

    def rows_by_worker(self, table: GroupTable) -> Ints:
        """int64 [workers, groups], copies included; of neighbourhoods, that the manifest may tell. One that deals them in
        another way counts in another way."""
        return rows_by_worker(table)


class OneGroup(Grouping):
    reads_images = False


@dataclass(frozen=True)
class Fitted:
    """counts int64 [chunks, groups]. params: what the fit resolved (numbers of clusters, components, ...).
    models: fitted spark.ml models by name, saved with the shards."""

    grouping: Grouping
    counts: Ints
    start: Start = "zero"
    sparse_if: SparseIf = "never"
    params: dict[str, Any] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Strategy(Spec, ABC):
    """The fields are the strategy's own parameters: flags, TOML keys, manifest entries and identity follow from them.

    The class variables are promises for the default parameters; tests/test_strategies.py holds every member of the
    registry to them."""

    looks_at_labels: ClassVar[bool] = False
    looks_at_pixels: ClassVar[bool] = False
    even_sizes: ClassVar[bool] = False  # the sizes of shards differ by at most one
    even_classes: ClassVar[bool] = False  # so do their counts of every class
    copies_rows: ClassVar[bool] = False  # some rows may go to every worker
    seed: int = option(0, "seed of everything random", metavar="S", parse=seed_number, recorded=False)

    def draws(self) -> bool:
        """Whether the seed changes the shards."""
        return True

    def identity(self) -> dict[str, Any]:
        """What of the parameters makes two runs the same."""
        return self.params()

    def sources(self) -> tuple[str, ...]:
        """What it reads beside the input, by URI."""
        return ()

    def prepared(self, store: Store, run: Run[Any, Any]) -> Self:
        """With what its ``sources`` hold, which decides its identity. run(fn, items): how to map over files.

        Raises DataError where they hold something else than when it was configured."""
        return self

    def check_without_labels(self) -> None:
        """Raises UsageError where rows without labels cannot be sharded so."""
        if self.looks_at_labels:
            raise UsageError(f"{self.name} looks at labels, which --unlabelled rows have not; choose another strategy")

    def check_input(self, dataset: Dataset) -> None:
        """Raises UsageError for rows that cannot be sharded so."""

    @abstractmethod
    def fit(self, context: Context) -> Fitted:
        """Look at the data and decide the grouping."""

    def refit(self, context: Context, stored: StoredGroups) -> Fitted:
        """The same grouping out of a committed set, without fitting again; for another number of workers."""
        return self.fit(context)


@dataclass(frozen=True)
class StoredGroups:
    """What a committed set tells of its own grouping. counts int64 [chunks, neighbourhoods]; params: what its fit
    resolved."""

    counts: Ints
    params: dict[str, Any]


class StoredNeighbourhoods(Grouping):
    """The neighbourhoods as they stand in a committed set."""

    neighbourhoods = True
    reads_images = False

    def groups(self, block: Block) -> Ints:
        assert block.columns.neighbourhoods is not None, "the committed set has no neighbourhoods"
        return block.columns.neighbourhoods.astype(np.int64)


def row_counts(context: Context) -> Ints:
    """All rows as one group, by chunk."""
    return np.array([[high - low] for low, high in context.bounds], np.int64)
