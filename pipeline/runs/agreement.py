"""The agreement of a set's groups and workers with the neighbourhoods of another set of the same rows, from both
assignments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from operator import add

import numpy as np
import pyarrow.parquet as pq
from pyspark import SparkContext

from pipeline.core.arrays import Ints
from pipeline.core.errors import DataError
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.parts import ShardFile
from pipeline.core.shardset.schema import broken_is_data_error
from pipeline.core.storage.store import Store
from pipeline.quality.agreement import Cells, PairSums, contingency_table
from pipeline.quality.metrics import chi_square

Side = tuple[str, ShardFile]  # a set's folder, and one file of its assignment


@dataclass(frozen=True)
class SetAgreement:
    """The agreement of a set with a reference.

    Attributes:
        adjusted_rand: adjusted Rand index between the set's groups and the reference's neighbourhoods.
        chi_square_per_dof: chi-square per degree of freedom of the reference's neighbourhoods by the set's workers;
            None if the test does not apply.
    """

    adjusted_rand: float
    chi_square_per_dof: float | None


def agreement(context: SparkContext, shards: ShardSet, reference: ShardSet) -> SetAgreement | None:
    """Return the agreement of two sets of one input with the same number of workers.

    Returns None if one has no assignment, or the reference has no neighbourhoods. Counts go through one shuffle, by
    group of the set; the driver holds workers x neighbourhoods numbers. Raises DataError if the sets contain different
    rows."""
    left = shards.assignment_files()
    right = reference.assignment_files()
    near = len(reference.manifest.neighbourhoods or ())
    if not left or not right or not near:
        return None
    if len(left) != len(right):
        raise DataError(
            f"{shards.uri} and {reference.uri} divide the ids into {len(left)} and {len(right)} files; make one again with"
            " --overwrite"
        )
    slices = max(1, min(len(left), context.defaultParallelism))
    sides = [((shards.uri, one), (reference.uri, other)) for one, other in zip(left, right, strict=True)]
    parts = context.parallelize(sides, slices).flatMap(partial(cells_of_chunk, shards.store, near, slices))
    # The Rand index needs the total of each group, so all cells of a group meet in one task.
    totals = parts.partitionBy(slices + 1, int).mapPartitionsWithIndex(partial(sum_up, near, slices)).collect()
    sums = [each for each in totals if isinstance(each, PairSums)]
    by_worker = Cells.total(each for each in totals if isinstance(each, Cells))
    test = chi_square(contingency_table(by_worker, shards.num_workers, near))
    return SetAgreement(reduce(add, sums).adjusted_rand(), test.per_dof if test else None)


def cells_of_chunk(store: Store, near: int, slices: int, sides: tuple[Side, Side]) -> Iterator[tuple[int, Cells]]:
    """Yield (slice, cells) of one chunk: the cells of the groups of each slice, and under the number ``slices`` the
    cells of workers.

    Args:
        store: reaches both sets.
        near: number of neighbourhoods of the reference.
        slices: number of slices of groups.
        sides: the set's assignment file and the reference's.
    """
    (ids, workers, groups), (other_ids, _, neighbourhoods) = (owners(store, *side) for side in sides)
    if not np.array_equal(ids, other_ids):
        raise DataError(f"{sides[0][0]} and {sides[1][0]} hold other rows; make one again with --overwrite")
    cells = Cells.from_groups(groups, neighbourhoods, near)
    for number in range(slices):
        yield number, cells.select(np.flatnonzero(cells.keys // near % slices == number))
    yield slices, Cells.from_groups(workers, neighbourhoods, near)


def owners(store: Store, uri: str, file: ShardFile) -> tuple[Ints, Ints, Ints]:
    """Return id, worker and group of every row of a chunk, without copies, each int64 [rows]."""
    path = f"{uri}/{file.path}"
    with broken_is_data_error(path), store.open(path) as handle:
        table = pq.read_table(handle, columns=["id", "worker", "copy", "group"])
    owned = table.column("copy").to_numpy() == 0  # the row at its owner
    ids, workers, groups = (table.column(name).to_numpy()[owned].astype(np.int64) for name in ("id", "worker", "group"))
    return ids, workers, groups


def sum_up(near: int, slices: int, number: int, parts: Iterable[tuple[int, Cells]]) -> Iterator[PairSums | Cells]:
    """Yield the pair sums of one slice, or the total of the cells of workers; nothing for an empty slice.

    Args:
        near: number of neighbourhoods of the reference.
        slices: number of slices of groups.
        number: number of this slice, or ``slices`` for the cells of workers.
        parts: all cells of this number.
    """
    cells = [part for _, part in parts]
    if cells:
        total = Cells.total(cells)
        yield total if number == slices else PairSums.from_cells(total, near)
