"""An oracle of ``--sampling recency`` after a change of workers: the loss of each row by the example ledger alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

import numpy as np

from tests.support.divisions import drawn_rows
from trainer.checkpoints.read import newest, read_state
from trainer.checkpoints.replica_file import open_replicas, replica_name
from trainer.checkpoints.state import folder_of
from trainer.config import Config
from trainer.context import RunContext
from trainer.data.cohorts import build_cohort_batches
from trainer.data.deal import deal
from trainer.data.network import TABLE, build_network
from trainer.models.flat_vector import FlatModel
from trainer.runlog.run_record import read_record

Forgotten: TypeAlias = Mapping[tuple[int, int], int]


def assert_drawn_by_recent_losses(output: Path, forgotten: Forgotten | None = None) -> int:
    """Check the draws and the tables of the present workers of a run among neighbours; return how many draws read a loss.

    Each mini-batch must be the one that its sampler draws by a table that is filled from the ledger, whichever worker
    trained a row. In the newest checkpoint each worker's own table has the last losses of its rows.

    forgotten: by round and worker of the cohort that began the run, an earlier round: the losses of the worker's rows that
    count in the round are those before the earlier one."""
    config = read_record(output).config
    context = RunContext.from_config(config)
    parts = [rows.ids for rows in deal(context.shards, config.cohorts.first.workers)]
    ids = np.concatenate(parts)
    order = np.argsort(ids)
    drawn = drawn_rows(output, len(ids) * 1000)
    assert drawn["row"].nunique() == len(ids), "the ranks of ids are those of all rows"
    present = build_cohort_batches(config, context.shards, targets=False)
    table = np.full(len(ids), -1, np.float32)
    tables: dict[int, np.ndarray] = {}
    read = 0
    for clock, step in drawn.groupby("clock", sort=True):
        for (round, worker), earlier in (forgotten or {}).items():
            own = np.isin(ids, parts[worker])
            table[own] = tables[earlier][own] if round == clock else table[own]
        before = tables[clock] = table.copy()
        for worker, batch in step.groupby("worker"):
            places = order[batch["row"]]
            if clock >= config.cohorts.present.clock:
                sampler = present[worker].batches.sampler
                expected = present[worker].rows.ids[sampler.draw(clock, before).places]
                np.testing.assert_array_equal(ids[places], expected)
                blind = present[worker].rows.ids[sampler.draw(clock, np.full_like(table, -1)).places]
                read += not np.array_equal(blind, expected)
            for place, loss in zip(places, batch["loss"], strict=True):
                table[place] = loss
    np.testing.assert_array_equal(np.sort(np.concatenate([rows.ids for _, rows in present])), np.sort(ids))
    for (_, rows), stored in zip(present, stored_tables(output, config, context), strict=True):
        own = np.isin(ids, rows.ids)
        # A model with BatchNorm adds changes of its statistics, and with them those of the table, which rounds.
        np.testing.assert_allclose(stored[own], table[own], rtol=1e-6)
    return read


def stored_tables(output: Path, config: Config, context: RunContext) -> list[np.ndarray]:
    """Return the loss table of each worker in the newest checkpoint of a run."""
    flat = FlatModel(build_network(config, context.shards).model)
    root = output / "checkpoints"
    version = newest(root, verify=True)
    assert version is not None
    path = folder_of(root, version) / replica_name(read_state(root, version).generation)
    workers = config.cohorts.present.workers
    file = open_replicas(path, workers, flat.num_parameters, flat.num_buffers, version)
    return [np.array(values[flat.packed_range(TABLE)]) for values in file.values]
