"""The shard set of a run: a set or a mixture, at the generation to which the run is pinned."""

from __future__ import annotations

from dataclasses import replace

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.generations import as_of, generations
from trainer.config import SEPARATOR, Data
from trainer.data.mixture import open_mixture
from trainer.data.opening import open_shards
from trainer.data.shards import Shards


def open_pinned(data: Data, *, digest: str = "") -> Shards:
    """Open the set or the mixture of a run, as it was at the generation that the run is pinned to, if any.

    Its ``mean`` is the one that the run subtracts. Raises as ``open_shards`` and ``pin_generation``, and DataError if
    the set has another digest than ``digest``, which is that of the running run; "" for any."""
    # A process that knows the digest belongs to a run whose start has listed all files, which takes long for many workers.
    lists_files = not digest
    try:
        if data.mix:
            shards = open_mixture(data.shards.split(SEPARATOR), lists_files=lists_files)
        else:
            shards = open_shards(data.shards, lists_files=lists_files)
        shards = pin_generation(shards, data.generation)
    except UsageError:
        # The set of the run has this generation, and the sets of its mixture have the same workers and classes.
        if digest:
            raise _replaced(data.shards) from None
        raise
    # A process that is started again must not read other rows than the others.
    if digest and shards.digest != digest:
        raise _replaced(shards.uri)
    return replace(shards, normalise=data.normalise)


def _replaced(uri: str) -> DataError:
    return DataError(
        f"{uri} was replaced by another set while this run used it: restore the set, or start anew with --overwrite"
    )


def pin_generation(shards: Shards, generation: int | None) -> Shards:
    """Return a set as it was at a generation; unchanged for None.

    Raises UsageError for a generation that the set lacks, or that has a worker without rows."""
    if generation is None:
        return shards
    count = len(generations(shards))
    if generation >= count:
        description = f"has generations 0..{count - 1}" if count else "was made at once, without generations"
        raise UsageError(f"--generation {generation}: {shards.uri} {description}")
    pinned = as_of(shards, generation)
    # open_shards has checked the newest generation only: a worker may have got its first rows later.
    empty = next((worker for worker in range(pinned.num_workers) if not pinned.worker_rows(worker)), None)
    if empty is not None:
        raise UsageError(
            f"--generation {generation}: {shards.uri} had no rows for worker {empty} then; give a later one of"
            f" 0..{count - 1}"
        )
    return pinned
