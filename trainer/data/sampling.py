"""The drawing of mini-batches: a sampler's selection of a worker's rows at a clock."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from trainer.coordination.orders import RowLosses
from trainer.coordination.passes import RowSums
from trainer.data.augment import Floats
from trainer.data.follow import Following
from trainer.data.rows import Rows
from trainer.sampling.base import SelectionStream, TableStream
from trainer.sampling.orders import permutation

Hits: TypeAlias = npt.NDArray[np.bool_]


class ValidationRows(NamedTuple):
    """A worker's part of the evaluation rows, whose losses enter the loss table.

    Attributes:
        rows: the rows.
        keys: entries of the rows in the table, int64 [M].
        mean: of the images, float32 [C], or [C, H, W] for a mean image, in 0..255.
        parts: share of all evaluation rows of an entry that are the worker's, float32 [entries]; read at ``keys`` alone.
        shares: of the portions in the evaluation rows of each group, float32 [portions, groups].
    """

    rows: Rows
    keys: Ints
    mean: Floats
    parts: Floats
    shares: Floats

    def losses_of_groups(self, table: Floats) -> Floats:
        """Return the mean loss of each group, float32 [groups]. table: of each portion and group, in this order."""
        losses: Floats = (table.reshape(self.shares.shape) * self.shares).sum(axis=0)
        return losses


class Draw(NamedTuple):
    """The rows of one mini-batch.

    Attributes:
        rows: all rows of the worker.
        places: the positions of the mini-batch's rows among them, int64 [B].
        passes: ends of passes in the mini-batch; None if the sampler does not make passes over the same rows.
        next_pass_rows: number of places after the last of these ends, which belong to the next pass.
        weights: factors of the rows' losses, float32 [B]; None for the factor 1.
        keys: entries of the rows in the sampler's loss table, int64 [B]; None without a table.
        is_foreign: whether they are other workers' rows, which count neither in passes nor in the example ledger.
        validation: evaluation rows whose losses enter the loss table after this mini-batch; None for none.
    """

    rows: Rows
    places: Ints
    passes: int | None = None
    next_pass_rows: int = 0
    weights: Floats | None = None
    keys: Ints | None = None
    is_foreign: bool = False
    validation: ValidationRows | None = None

    def seen(self) -> RowSums | None:
        """Return the hash sums of the mini-batch. O(B). None if rows are not hashed, or passes are not known."""
        if self.passes is None or not len(self.rows.hashes):
            return None
        hashes = self.rows.hashes[self.places]
        return RowSums(int(hashes.sum()), int(hashes[len(hashes) - self.next_pass_rows :].sum()), self.passes)

    def row_losses(self, outcomes: tuple[Floats, Hits] | None) -> RowLosses | None:
        """Return the losses of the mini-batch with the ids of its rows. outcomes: loss and hit of each; None for none."""
        return RowLosses(self.rows.ids[self.places], *outcomes) if outcomes and not self.is_foreign else None


class RowSampler(Protocol):
    """Draws the mini-batches of one worker.

    Attributes:
        reads_table: whether draws need a loss table, so that no mini-batch can be drawn ahead.
    """

    reads_table: bool

    def draw(self, clock: int, table: Floats | None = None) -> Draw:
        """Return the mini-batch at a clock. Clocks may come in any order, and from any one thread.

        table: the loss table of the parameters with which the gradient is computed."""
        ...


class FixedSampler:
    """Draws from rows that do not change.

    Args:
        rows: the worker's rows.
        stream: selects from the rows at ``places``.
        places: positions of the rows that may be drawn, int64; None for all.
    """

    reads_table = False

    def __init__(self, rows: Rows, stream: SelectionStream, places: Ints | None = None) -> None:
        self.rows = rows
        self.stream = stream
        self.places = places

    def draw(self, clock: int, table: Floats | None = None) -> Draw:
        selection = self.stream(clock)
        places = selection.places if self.places is None else self.places[selection.places]
        return Draw(self.rows, places, selection.passes, selection.next_pass_rows, selection.weights)


class TableRowSampler:
    """Draws from rows that do not change, by a loss table.

    Args:
        rows: the worker's rows.
        stream: selects from the rows at ``places``.
        keys: entries of the rows at ``places`` in the table, int64.
        places: positions of the rows that may be drawn, int64; None for all.
        validation: evaluation rows whose losses enter the table instead; None for losses of training rows.
        epoch_steps: mini-batches between two measurements of ``validation``.
    """

    reads_table = True

    def __init__(
        self,
        rows: Rows,
        stream: TableStream,
        keys: Ints,
        places: Ints | None = None,
        validation: ValidationRows | None = None,
        epoch_steps: int = 1,
    ) -> None:
        self.rows = rows
        self.stream = stream
        self.keys = keys
        self.places = places
        self.validation = validation
        self.epoch_steps = epoch_steps

    def draw(self, clock: int, table: Floats | None = None) -> Draw:
        assert table is not None, "every caller has the parameters"
        selection = self.stream(clock, self.validation.losses_of_groups(table) if self.validation else table)
        places = selection.places if self.places is None else self.places[selection.places]
        if self.validation is None:
            return Draw(self.rows, places, weights=selection.weights, keys=self.keys[selection.places])
        # In the last step of an epoch, so that the next one draws by these losses.
        is_due = (clock + 1) % self.epoch_steps == 0
        return Draw(self.rows, places, weights=selection.weights, validation=self.validation if is_due else None)


class FollowSampler:
    """Draws passes over rows that grow; see ``Following``.

    Args:
        follow: the passes and their rows.
        batch_size: rows per mini-batch.
        seed: of the run.
        worker: number of the worker.
    """

    reads_table = False

    def __init__(self, follow: Following, batch_size: int, *, seed: int, worker: int) -> None:
        self.follow = follow
        self.batch_size = batch_size
        self._order = lru_cache(maxsize=2)(lambda rows, turn: permutation(rows, seed, worker, turn))

    def draw(self, clock: int, table: Floats | None = None) -> Draw:
        rows, places = self.follow.chosen(self.batch_size, clock, self._order)
        return Draw(rows, places)
