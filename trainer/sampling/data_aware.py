"""``data-aware``: more rows of the neighbourhoods on which the model is weak."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, generator
from pipeline.core.specs import option
from trainer.sampling.base import (
    GroupBy,
    LossTable,
    Population,
    Selection,
    SetSizes,
    TableSampler,
    TableStream,
    groups_option,
)
from trainer.sampling.orders import members_of

DECAY = 0.9  # of the mean that an entry of the table is


class ShardGroups(NamedTuple):
    """The groups that have rows in a worker's shard.

    Attributes:
        keys: their entries in the table, int64 [G].
        members: the positions of their rows, int64 each.
        shares: their shares of the shard, float64 [G].
    """

    keys: Ints
    members: list[Ints]
    shares: npt.NDArray[np.float64]


@dataclass(frozen=True)
class DataAwareSampler(TableSampler):
    """Draws groups in proportion to their rows and their weakness, mixed with their share of the shard.

    The weakness of a group is a running mean of the losses, or of the errors, of its examples, or the mean loss of its
    evaluation rows, each measured when its worker last ended an epoch. In the first epoch groups are drawn by their
    shares alone. Provatas (2024), 5.3 and 7.2.2, describes the idea, without numbers."""

    name: ClassVar[str] = "data-aware"
    summary: ClassVar[str] = "draw more rows of the classes or neighbourhoods on which the model is weak"
    first_value: ClassVar[float] = 1.0
    sampling_groups: GroupBy = groups_option()
    weakness: Literal["loss", "error", "validation-loss"] = option(
        "loss",
        "weakness of a group: its mean loss or its share of wrong predictions in training, or validation-loss: its mean loss"
        " on the evaluation rows, once per epoch",
    )
    uniform_share: float = option(
        0.5, "part of the draws that is by the shares of groups alone, not by their weakness", above=0, most=1
    )
    unbiased: bool = option(
        False, "weigh losses so that the expected gradient is that of uniform draws, whatever groups are drawn"
    )

    @property
    def validates(self) -> bool:
        return self.weakness == "validation-loss"

    def check(self, *, has_classes: bool, has_neighbourhoods: bool) -> None:
        super().check(has_classes=has_classes, has_neighbourhoods=has_neighbourhoods)
        # A real number is never predicted exactly, so that all groups would be equally weak.
        if self.weakness == "error" and not has_classes:
            raise UsageError(
                "--weakness error counts wrong predictions of classes, but the model fits real targets: give --weakness loss"
                " or validation-loss"
            )

    def length(self, sizes: SetSizes) -> int:
        groups = sizes.classes if self.sampling_groups == "class" else sizes.neighbourhoods
        return groups * sizes.portions if self.validates else groups

    def keys(self, population: Population) -> Ints:
        numbers = population.labels if self.sampling_groups == "class" else population.neighbourhoods
        assert numbers is not None, "checked before the run"
        return numbers.astype(np.int64)

    def table_stream(self, population: Population) -> TableStream:
        members = members_of(population.groups(self.sampling_groups))
        sizes = np.array([len(rows) for rows in members])
        groups = ShardGroups(np.unique(self.keys(population)), members, sizes / sizes.sum())
        return partial(self._select, population, groups)

    def probabilities(self, groups: ShardGroups, table: LossTable) -> npt.NDArray[np.float64]:
        """Return the probability of each group: (1 - e) n W / sum(n W) + e n / N, with its weakness W and n rows."""
        weak: npt.NDArray[np.float64] = groups.shares * table[groups.keys].clip(0)
        # No group is weak, as with errors after all predictions were correct.
        if not weak.sum() > 0:
            return groups.shares
        weak *= (1 - self.uniform_share) / weak.sum()
        weak += self.uniform_share * groups.shares
        return weak

    def _select(self, population: Population, groups: ShardGroups, clock: int, table: LossTable) -> Selection:
        """Return the mini-batch at a clock: groups with replacement, and no row of a group twice before all are drawn.

        A mini-batch knows nothing of the draws before it, which a restarted worker would have lost."""
        is_first_epoch = clock < population.epoch_steps
        probabilities = groups.shares if is_first_epoch else self.probabilities(groups, table)
        rng = generator(population.seed, Purpose.TABLE_DRAW, population.worker, clock)
        counts = rng.multinomial(population.batch_size, probabilities)
        chosen_groups = np.flatnonzero(counts)
        parts = [np.resize(rng.permutation(groups.members[g]), counts[g]) for g in chosen_groups]
        weights = None
        if self.unbiased:
            weights = np.repeat(groups.shares / probabilities, counts).astype(np.float32)
        return Selection(np.concatenate(parts), weights=weights)

    def targets(
        self, table: LossTable, keys: Ints, losses: LossTable, hits: npt.NDArray[np.bool_]
    ) -> tuple[Ints, LossTable]:
        measured = (~hits).astype(np.float32) if self.weakness == "error" else losses
        changed, examples = np.unique(keys, return_inverse=True)
        means = np.bincount(examples, weights=measured) / np.bincount(examples)
        # All evaluation rows together need no running mean over mini-batches.
        decay = 0.0 if self.validates else DECAY
        values = decay * table[changed] + (1 - decay) * means
        return changed, values.astype(np.float32)
