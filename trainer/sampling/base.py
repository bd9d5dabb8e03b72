"""The interface of samplers: parameters as a spec, and the stream of a worker's selections.

A selection is a pure function of (seed, worker, clock), and of nothing that a process keeps. A resumed or restarted worker
therefore needs no state but its clock, and workers of a run never share random numbers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Self, TypeAlias

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
    """

    labels: npt.NDArray[np.int64 | np.float32]
    neighbourhoods: npt.NDArray[np.integer] | None
    values: npt.NDArray[np.float64] | None
    batch_size: int
    share: float
    epoch_steps: int
    seed: int
    worker: int

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
        places: their positions in the population, int64 [B], or the slice of all.
        passes: ends of passes in the mini-batch; None if the sampler does not make passes over all rows.
        next_pass_rows: number of places after the last of these ends, which belong to the next pass.
    """

    places: Ints | slice
    passes: int | None = None
    next_pass_rows: int = 0


# The selection at a clock. Clocks may come in any order, and from any one thread.
SelectionStream: TypeAlias = Callable[[int], Selection]


@dataclass(frozen=True)
class Sampler(Spec):
    """The base class of samplers, with one file per sampler.

    Attributes:
        fixed_size: whether every mini-batch has the same number of rows. Otherwise an update is the mean over examples.
        column: column of the table that has a value for each row; "" for samplers without a table.
    """

    fixed_size: ClassVar[bool] = True
    column: ClassVar[str] = ""

    @abstractmethod
    def stream(self, population: Population) -> SelectionStream:
        """Return the selections of a worker. Raises UsageError for rows that the sampler cannot draw from."""

    @property
    def grouping(self) -> GroupBy | None:
        """The groups of rows that the sampler needs, or None."""
        return getattr(self, "group_by", None)

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
                "--group-by neighbourhood: the shard set has none; make it with spark-submit jobs/distribution_aware.py,"
                " or give --group-by class"
            )


def group_by_option() -> GroupBy:
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
