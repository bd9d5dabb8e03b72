"""Training rows that a run holds out: no worker trains on them, and their loss decides when the run switches.

Whether a row is held out is a function of its id and the run's seed alone. It is therefore the same for every worker,
every number of workers, every copy of the row and every start of the run."""

from __future__ import annotations

import numpy as np

from pipeline.core.arrays import Flags, Ints
from pipeline.core.hashing import is_drawn
from pipeline.core.seeds import Purpose, word
from trainer.config import Config
from trainer.data.places import only_trained
from trainer.data.rows import Rows, join_rows
from trainer.data.shard_file import pick_rows, read_ids
from trainer.data.shards import Shards

PARTS = 1 << 32  # a share is rounded to a multiple of 1 / PARTS


def is_held_out(ids: Ints, config: Config) -> Flags:
    """Return whether each row is held out of the training: bool [ids]."""
    return is_drawn(ids, PARTS, round(config.exchange.held_out_share * PARTS), word(config.run.seed, Purpose.HOLDOUT))


def trained_places(ids: Ints, config: Config, worker: int) -> Ints | None:
    """Return the positions of the rows that a worker trains on, int64; None for all of them.

    Raises UsageError if none is left. ids: of the worker's rows."""
    if not config.exchange.held_out_share:
        return None
    return only_trained(np.arange(len(ids)), ~is_held_out(ids, config), worker)


def trained_rows(shards: Shards, config: Config) -> Flags | None:
    """Return whether a run trains on each row, by its number over all shards: bool [rows]; None for all of them.

    Reads the ids of all rows, if any are held out. Raises DataError and OSError."""
    return ~is_held_out(read_ids(shards), config) if config.exchange.held_out_share else None


def load_held_out(shards: Shards, config: Config, *, targets: bool = False) -> Rows:
    """Return the distinct rows that are held out. Reads all shards, block by block. Raises DataError and OSError.

    targets: read real targets instead of labels."""

    def choose(block: Rows, first: int) -> Ints:
        return np.flatnonzero(is_held_out(block.ids, config))

    rows = join_rows([pick_rows(shards, file, choose, targets=targets) for file in shards.files() if file.rows])
    _, first = np.unique(rows.ids, return_index=True)  # copies of a row may be in several shards
    return rows.select(first)


def trained_fingerprint(shards: Shards, config: Config) -> int | None:
    """Return the sum of the hashes of the distinct rows that a run trains on; None if the manifest does not tell."""
    return None if config.exchange.held_out_share else shards.fingerprint
