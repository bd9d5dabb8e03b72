"""An independent, uniformly drawn worker for every row, so that shard sizes are binomial."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from pipeline.assignment.bundles import BundleOrder
from pipeline.assignment.groups import GroupTable
from pipeline.assignment.uneven import RatioDeal
from pipeline.core.arrays import Ints
from pipeline.core.hashing import keyed_hash
from pipeline.strategies.base import Context, FitResult, OneGroup, Strategy, row_counts


@dataclass(frozen=True)
class Independent(OneGroup):
    seed: int

    def workers(self, ids: Ints, groups: Ints, ranks: Ints, table: GroupTable) -> Ints:
        """Return a worker for each row, int64 [rows], drawn by a hash of its id in proportion to the workers'
        shares."""
        high = keyed_hash(ids, self.seed) >> np.uint64(32)  # a 32-bit uniform; the product below has no modulo bias
        ratios = table.uneven.ratios if isinstance(table.uneven, RatioDeal) else (1,) * table.num_workers
        places = (high * np.uint64(sum(ratios))) >> np.uint64(32)
        workers: Ints = np.repeat(np.arange(table.num_workers), ratios)[places]
        return workers


@dataclass(frozen=True)
class RandomIid(Strategy):
    """Rows drawn independently, as when keys are hashed to workers.

    Shards can be uneven. With few rows a shard can be empty, which is refused."""

    name: ClassVar[str] = "random_iid"
    summary: ClassVar[str] = "rows drawn independently; shard sizes are binomial"
    bundle_order: ClassVar[BundleOrder] = "independent"

    def fit(self, context: Context) -> FitResult:
        return FitResult(Independent(self.seed), row_counts(context))
