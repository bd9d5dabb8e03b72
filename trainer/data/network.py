"""The network of a run: the model and, behind its statistics, the loss table of its sampler if it has one."""

from __future__ import annotations

import torch

from trainer.config import Config
from trainer.data.shards import Shards
from trainer.exchange.neighbours import NeighbourExchange
from trainer.models.build import NetworkAndTask, build
from trainer.models.flat_vector import FlatModel
from trainer.sampling.base import SetSizes

TABLE = "_loss_table"  # name of the buffer, which is in no model file


def build_network(config: Config, shards: Shards) -> NetworkAndTask:
    """Make the network of a run, by ``build``. Raises UsageError.

    The loss table is a buffer, so that servers, exchanges and checkpoints treat it like statistics of BatchNorm."""
    network = build(config.model, shards.inputs, config.model_seed)
    if sampler := config.table_sampler:
        rows = sum(shards.shard_rows)
        if config.data.repartition != "fixed":
            rows = shards.rows  # without copies
        portions = config.evaluation_portions(shards.num_workers) or 1
        sizes = SetSizes(rows, shards.num_classes, len(shards.manifest.neighbourhoods or ()), portions)
        length = sampler.length(sizes)
        network.model.register_buffer(TABLE, torch.full((length,), sampler.first_value))
    return network


def loss_table_of(config: Config, shards: Shards, flat: FlatModel) -> tuple[int, tuple[int, ...]]:
    """Return ``table_begin`` and ``shard_rows`` of a run's facts, of a model with its loss table."""
    sampler = config.table_sampler
    if not (sampler and sampler.has_row_entries and isinstance(config.exchange, NeighbourExchange)):
        return 0, ()
    assert not config.exchange.held_out_share, "the rows of a worker are those that own_entries says"
    return flat.packed_range(TABLE).start, shards.shard_rows
