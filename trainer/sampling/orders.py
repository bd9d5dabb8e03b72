"""Orders of rows: permutations of passes, and the mini-batches that consecutive passes are cut into. Pure."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from trainer.sampling.base import Population, Selection

PassOrder: TypeAlias = Callable[[int], Ints]  # from the number of a pass to the order of its rows


def permutation(rows: int, seed: int, worker: int, turn: int) -> Ints:
    """Return the order of a worker's rows in pass ``turn`` over its shard: int64 [rows], read-only."""
    order = generator(seed, Purpose.ORDER, worker, turn).permutation(rows)
    order.flags.writeable = False
    return order


def indices(rows: int, batch: int, clock: int, seed: int, worker: int, order: PassOrder | None = None) -> Ints:
    """Return the rows of the mini-batch at a clock: int64 [batch], from position clock * batch of consecutive passes.

    If a pass ends inside a mini-batch, the next pass fills it up, so that no row is left for a later pass. O(batch),
    and O(rows) for the first mini-batch of a pass, for any clock.

    Args:
        rows: number of rows in the shard.
        batch: rows per mini-batch.
        clock: number of the mini-batch.
        seed: of the run.
        worker: number of the worker.
        order: function from the number of a pass to the order of its rows; default: ``permutation``.
    """
    start = clock * batch
    stop = (clock + 1) * batch
    turns = range(start // rows, (stop - 1) // rows + 1)
    order = order or partial(permutation, rows, seed, worker)
    parts = [order(turn)[max(0, start - turn * rows) : stop - turn * rows] for turn in turns]
    return np.concatenate(parts)


def select_of_passes(population: Population, order: PassOrder, clock: int) -> Selection:
    """Return the mini-batch at a clock of passes over all rows, with the number of passes that end in it.

    Args:
        population: the rows.
        order: the order of each pass.
        clock: number of the mini-batch.
    """
    rows = len(population)
    stop = (clock + 1) * population.batch_size
    passes = stop // rows - (stop - population.batch_size) // rows
    places = indices(rows, population.batch_size, clock, population.seed, population.worker, order)
    # After an end of a pass, the last ``stop % rows`` rows of the mini-batch belong to the next pass.
    return Selection(places, passes, stop % rows if passes else 0)


def members_of(groups: Ints) -> list[Ints]:
    """Return the positions of the rows of each group, ascending. groups: int64 [N], numbered from 0 without gaps."""
    sizes = np.bincount(groups)
    return np.split(np.argsort(groups, kind="stable"), np.cumsum(sizes)[:-1])


def level_pattern(sizes: Ints, rng: np.random.Generator) -> Ints:
    """Return a sequence of groups in which group g appears ``sizes[g]`` times, as evenly as possible: int64 [N].

    Among the first p entries each group has its share of p, rounded up or down, for every p. Such a sequence exists
    (Balinski and Young's quota methods). It is a schedule of unit jobs: appearance r of a group of n rows may come from
    position floor(r N / n) on, and not after position ceil((r + 1) N / n) - 1. The earliest deadline first meets all
    deadlines. O(N log G).

    rng: decides among groups with the same deadline."""
    total = int(sizes.sum())
    ranks = np.concatenate([np.arange(size) for size in sizes])
    groups = np.repeat(np.arange(len(sizes)), sizes)
    # Integers: with floats a release or a deadline could be off by one.
    releases = ranks * total // sizes[groups]
    deadlines = -(-(ranks + 1) * total // sizes[groups]) - 1
    order = np.argsort(releases, kind="stable")
    # Lists, because a numpy scalar per job would take most of the time.
    columns = (releases[order], deadlines[order], rng.random(total), groups[order])
    jobs = deque(zip(*(column.tolist() for column in columns), strict=True))
    waiting: list[tuple[int, float, int]] = []
    pattern = []
    for position in range(total):
        while jobs and jobs[0][0] <= position:
            heapq.heappush(waiting, jobs.popleft()[1:])
        pattern.append(heapq.heappop(waiting)[2])
    return np.array(pattern, np.int64)
