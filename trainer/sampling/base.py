"""The interface of samplers: parameters as a spec, and the stream of a worker's selections.

A selection is a pure function of (seed, worker, clock), and of nothing that a process keeps. A resumed or restarted worker
therefore needs no state but its clock, and workers of a run never share random numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, option

GroupBy = Literal["class", "neighbourhood"]


@dataclass(frozen=True)
class Population:
    """The rows of a worker, as a sampler sees them. Raises ValueError without rows.

    Attributes:
        labels: int64 [N], or targets in float32.
        neighbourhoods: int [N], numbers of the groups of similar rows; None if the set has none.
        values: float64 [N], of the sampler's table; None if it has none.
        batch_size: rows per mini-batch of this worker.
        share: probability of a row if every row is drawn independently: B / rows of the set.
        epoch_steps: mini-batches per worker and epoch.
        seed: of the run.
        worker: number of the worker.
        numbers: int64 [N], numbers of the rows among the rows of all workers; None for samplers without a loss table.
    """

    labels: npt.NDArray[np.int64 | np.float32]
    neighbourhoods: npt.NDArray[np.integer] | None
    values: npt.NDArray[np.float64] | None
    batch_size: int
    share: float
    epoch_steps: int
    seed: int
    worker: int
    numbers: Ints | None = None

    def __post_init__(self) -> None:
        if not len(self) or self.batch_size < 1:
            raise ValueError(f"no mini-batches of {self.batch_size} out of {len(self)} rows")

    def __len__(self) -> int:
        return len(self.labels)

    def groups(self, by: GroupBy) -> Ints:
        """Return the group of each row, int64 [N]: groups that have rows are numbered from 0 in order."""
        numbers = self.labels if by == "class" else self.neighbourhoods
        assert numbers is not None, "checked before the run"
        groups: Ints = np.unique(numbers, return_inverse=True)[1].astype(np.int64)
        return groups


class Selection(NamedTuple):
    """The rows of one mini-batch.

    Attributes:
        places: their positions in the population, int64 [B].
        passes: ends of passes in the mini-batch; None if the sampler does not make passes over all rows.
        next_pass_rows: number of places after the last of these ends, which belong to the next pass.
        weights: factors of the rows' losses, float32 [B]; None for the factor 1.
    """

    places: Ints
    passes: int | None = None
    next_pass_rows: int = 0
    weights: npt.NDArray[np.float32] | None = None


# The selection at a clock. Clocks may come in any order, and from any one thread.
SelectionStream: TypeAlias = Callable[[int], Selection]
LossTable: TypeAlias = npt.NDArray[np.float32]
# The selection at a clock, by the loss table of the parameters with which the gradient will be computed.
TableStream: TypeAlias = Callable[[int, LossTable], Selection]


@dataclass(frozen=True)
class Sampler(Spec):
    """The base class of samplers, with one file per sampler.

    Attributes:
        fixed_size: whether every mini-batch has the same number of rows. Otherwise an update is the mean over examples.
        column: column of the table that has a value for each row; "" for samplers without a table.
        makes_passes: whether a worker draws each of its rows once per pass.
    """

    fixed_size: ClassVar[bool] = True
    column: ClassVar[str] = ""
    makes_passes: ClassVar[bool] = False

    @abstractmethod
    def stream(self, population: Population) -> SelectionStream:
        """Return the selections of a worker. Raises UsageError for rows that the sampler cannot draw from."""

    @property
    def grouping(self) -> GroupBy | None:
        """The groups of rows that the sampler needs, or None."""
        return getattr(self, "sampling_groups", None)

    @property
    def table_uri(self) -> str:
        """The address of the table with values of rows, or ""."""
        return getattr(self, "example_table", "")

    def with_absolute_table(self, absolute: Callable[[str], str]) -> Self:
        """Return the sampler with the address of its table made absolute."""
        # Only some samplers have the field, which their types do not say here.
        changed = {"example_table": absolute(self.table_uri)} if self.table_uri else {}
        return replace(self, **changed)

    def check(self, *, has_classes: bool, has_neighbourhoods: bool) -> None:
        """Raise UsageError if the rows of a set lack the groups that the sampler needs.

        has_classes: whether they have classes rather than real targets; has_neighbourhoods: whether the job of the set
        found any."""
        if self.grouping == "class" and not has_classes:
            raise UsageError(
                f"--sampling {self.name} needs classes, and the rows of --shards have none: give --sampling shuffle"
            )
        if self.grouping == "neighbourhood" and not has_neighbourhoods:
            raise UsageError(
                "--sampling-groups neighbourhood: the shard set has none; make it with sharding shard"
                " --strategy distribution_aware, or give --sampling-groups class"
            )


class SetSizes(NamedTuple):
    """The sizes of a shard set that loss tables depend on.

    Attributes:
        rows: rows of all workers, copies included.
        classes: number of classes.
        neighbourhoods: number of neighbourhoods, 0 if there are none.
        portions: portions of the evaluation rows with entries of their own.
    """

    rows: int
    classes: int
    neighbourhoods: int
    portions: int = 1


@dataclass(frozen=True)
class TableSampler(Sampler):
    """The base class of samplers that read a loss table: numbers that all workers of a run learn together.

    The table is a part of the flat vector, behind the parameters, and is pulled, pushed, merged and checkpointed like the
    running statistics of BatchNorm. A selection is a function of (seed, worker, clock, table), so that a resumed run or a
    replay draws the same mini-batches, under every protocol and exchange. A mini-batch cannot be made ahead.

    Attributes:
        first_value: the value of an entry before its first update.
        has_owners: whether only one worker updates an entry. Its updates are then whole ones. Otherwise the n workers
            together move an entry like one process if each draws rows of it, and more slowly if few do.
        has_row_entries: whether there is one entry per row, in the order in which the run began to deal the rows, which the
            worker of the row updates. Then an entry can follow its row to another worker.
    """

    first_value: ClassVar[float]
    has_owners: ClassVar[bool] = False
    has_row_entries: ClassVar[bool] = False

    @property
    def validates(self) -> bool:
        """True if the table has losses of evaluation rows, measured once per epoch, instead of training rows."""
        return False

    @property
    def pushes_multiples(self) -> bool:
        """True if workers push changes as multiples, because servers divide them by the number of workers."""
        return self.has_owners or self.validates

    def stream(self, population: Population) -> SelectionStream:
        raise AssertionError("it reads a table")

    @abstractmethod
    def table_stream(self, population: Population) -> TableStream:
        """Return the selections of a worker."""

    @abstractmethod
    def length(self, sizes: SetSizes) -> int:
        """Return the number of entries of the table."""

    @abstractmethod
    def keys(self, population: Population) -> Ints:
        """Return the entry of each row in the table, int64 [N]."""

    @abstractmethod
    def targets(
        self, table: LossTable, keys: Ints, losses: LossTable, hits: npt.NDArray[np.bool_]
    ) -> tuple[Ints, LossTable]:
        """Return the entries that a mini-batch changes, each once, and their values after it.

        Args:
            table: the table before it.
            keys: entry of each of its examples, int64 [B].
            losses: of its examples, float32 [B].
            hits: whether their predictions are correct, bool [B].
        """

    def updated(
        self,
        table: LossTable,
        keys: Ints,
        losses: LossTable,
        hits: npt.NDArray[np.bool_],
        shares: int,
        parts: LossTable | None = None,
    ) -> LossTable:
        """Return the table after a mini-batch, or after a measurement of evaluation rows.

        Args:
            table, keys, losses, hits: see ``targets``.
            shares: the divisor of the change, when servers merge it.
            parts: share of each entry's evaluation rows that are measured, float32 [entries]; None for a mini-batch.
        """
        changed, values = self.targets(table, keys, losses, hits)
        factor: LossTable | np.float32 = np.float32(shares if self.has_owners else 1)
        # The changes of the workers that share an entry add up to the mean over its rows, however few have such rows. All
        # pull the same table. An entry that one worker alone measures gets its whole change.
        if parts is not None:
            factor = np.float32(shares) * parts[changed]
        result = table.copy()
        result[changed] += factor * (values - table[changed])
        return result


def check_selection(selection: Selection, sampler: Sampler, population: Population) -> Selection:
    """Return a selection of a sampler, which may be a user's own. O(B).

    Raises UsageError unless it has the positions of rows, as many as a mini-batch, and a weight for each if any."""
    places: Any = getattr(selection, "places", None)  # numpy reads a mask or a negative number otherwise, silently
    if not isinstance(places, np.ndarray) or places.ndim != 1 or not np.issubdtype(places.dtype, np.integer):
        kind = getattr(places, "dtype", type(places).__name__)
        raise UsageError(
            f"--sampling {sampler.name} selected {kind} {list(np.shape(places))}: a Selection has int64 [B]"
        )
    size = population.batch_size
    if sampler.fixed_size and len(places) != size:
        raise UsageError(
            f"--sampling {sampler.name} selected {len(places)} rows for a mini-batch of {size}: select {size}, or set its"
            " fixed_size to False"
        )
    if len(places) and not 0 <= places.min() <= places.max() < len(population):
        raise UsageError(
            f"--sampling {sampler.name} selected rows {places.min()} to {places.max()} of a worker with the rows 0 to"
            f" {len(population) - 1}"
        )
    if selection.weights is not None and np.shape(selection.weights) != places.shape:
        count = np.size(selection.weights)
        raise UsageError(f"--sampling {sampler.name} gave {count} weights for {len(places)} rows: give one per row")
    return selection


def groups_option() -> GroupBy:
    """Return the option for the groups of rows. It is one flag, which several samplers share."""
    by: GroupBy = option("class", "groups of rows: class, or the neighbourhoods of the set's sharding job")
    return by


def example_table_option() -> str:
    """Return the option for the table with values of rows. It is one flag, which several samplers share."""
    table: str = option(
        help="Parquet file, or a folder of such files, with the columns id and the sampler's own: weight, or loss as in the"
        " example ledger of another run",
        metavar="URI",
    )
    return table
