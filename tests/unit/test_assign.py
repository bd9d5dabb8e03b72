"""Ranks, tables and permutations against brute force."""

import random
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from pipeline.assignment import chunks
from pipeline.assignment.chunks import chunk_bounds, count_by_chunk, offsets_by_chunk, piece_bounds, sum_counts
from pipeline.assignment.groups import GroupTable, SparseIf, group_table
from pipeline.assignment.permutation import keyed_permutation, keyed_permutations
from pipeline.assignment.ranks import ranks
from pipeline.input.dataset import Block, ranges
from pipeline.input.formats import Columns
from pipeline.input.scan import Scan
from pipeline.output.placement import Dealing, deliver_rows
from pipeline.strategies import STRATEGIES
from pipeline.strategies.base import Context

groups_of_rows = st.lists(st.integers(0, 6), min_size=1, max_size=200).map(np.array)


@given(groups_of_rows, st.integers(1, 9), st.data())
@settings(max_examples=100, deadline=None)
def test_two_passes_rank_every_row_in_its_group_for_any_chunks(
    groups: npt.NDArray[np.int64], pieces: int, data: st.DataObject
) -> None:
    """Two counting passes rank every row in its group whatever the chunks."""
    rows = len(groups)
    cuts = sorted(data.draw(st.lists(st.integers(0, rows), min_size=pieces - 1, max_size=pieces - 1)))
    bounds = list(zip([0, *cuts], [*cuts, rows], strict=True))
    offsets = offsets_by_chunk(count_by_chunk(np.arange(rows), groups, 7, _without_empty(bounds)).table)
    found = [
        ranks(groups[low:high], offset.copy())
        for (low, high), offset in zip(_without_empty(bounds), offsets, strict=True)
    ]
    seen: dict[int, int] = {}
    brute = []
    for group in groups.tolist():
        brute.append(seen.get(group, 0))
        seen[group] = brute[-1] + 1
    assert np.concatenate(found).tolist() == brute


def _without_empty(bounds: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(low, high) for low, high in bounds if low < high]


@given(st.integers(1, 3000), st.integers(0, 2**32), st.data())
@settings(max_examples=60, deadline=None)
def test_a_keyed_permutation_is_a_permutation(size: int, key: int, data: st.DataObject) -> None:
    """A keyed permutation is a permutation and places rows one by one."""
    whole = keyed_permutation(np.arange(size), size, key)
    assert sorted(whole.tolist()) == list(range(size))
    some = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    assert keyed_permutation(np.array(some), size, key).tolist() == whole[some].tolist()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8), st.integers(0, 2**70), st.randoms())
@settings(max_examples=40, deadline=None)
def test_groups_are_permuted_together_as_alone(sizes: list[int], key: int, order: random.Random) -> None:
    rows = [(group, value) for group, size in enumerate(sizes) for value in range(size)]
    order.shuffle(rows)
    groups, values = np.array(rows).T
    keys = [key * 7 + group for group in range(len(sizes))]
    together = keyed_permutations(values, groups, np.array(sizes), keys)
    for group, size in enumerate(sizes):
        inside = groups == group
        assert together[inside].tolist() == keyed_permutation(values[inside], size, keys[group]).tolist()


# Strategies that place rows by ids and labels alone, so that no Spark is needed.
BY_LABEL = [
    name
    for name, kind in STRATEGIES.items()
    if not (kind.looks_at_pixels or kind.reads_table) and kind().bundle_column is None
]


@pytest.mark.parametrize(
    ("name", "params"), [*((name, {}) for name in BY_LABEL), ("stratified", {"shuffle_within_class": True})]
)
def test_chunks_and_their_order_change_no_rows_worker(name: str, params: dict[str, Any]) -> None:
    """Place 1, 7 and 64 chunks, each alone, in one or two blocks, and the last chunk first."""
    labels = np.random.default_rng(5).integers(0, 10, 2600).astype(np.int32)
    placed = []
    for number in (1, 7, 64):
        bounds = ranges(0, 2600, number)
        counted = (count_by_chunk(np.arange(*ids), labels[slice(*ids)], 10, bounds) for ids in bounds[::-1])
        scan = Scan(2600, sum_counts(counted, number, 10), np.zeros(3, np.int64), 0)
        context = Context(None, scan, bounds, 5, lambda phase: nullcontext(), print, "")  # type: ignore[arg-type]
        result = STRATEGIES[name](seed=3, **params).fit(context)
        table = group_table(result.counts.sum(axis=0), 5, result.start, result.sparse_if, table=result.table)
        dealing = Dealing(result.grouping, table, offsets_by_chunk(result.counts))
        workers = np.full(2600, -1)
        for chunk in reversed(range(number)):
            blocks = (np.arange(*ids) for ids in ranges(*bounds[chunk], chunk % 2 + 1))
            parts = dealing.deliveries(chunk, (Block(ids, Columns(labels[ids], None, None, None)) for ids in blocks))
            for part in parts:
                workers[part.block.ids[part.rows]] = part.workers
        assert 0 <= workers.min() <= workers.max() == 4
        placed.append(workers)
    assert np.array_equal(placed[0], placed[1])
    assert np.array_equal(placed[0], placed[2])


def test_a_keyed_permutation_is_the_same_in_every_release() -> None:
    """Values of the first release: committed sets are dealt again with the same rows."""
    assert keyed_permutation(np.arange(10), 10, 3).tolist() == [4, 6, 7, 2, 0, 3, 5, 1, 8, 9]


def test_permutations_of_many_seeds_deal_classes_hypergeometrically() -> None:
    """Under ``random`` the class counts of a shard are hypergeometric; 300 seeds, chi-square."""
    rows, members, workers, seeds = 1200, 240, 6, 300
    drawn = stats.hypergeom(rows, members, rows // workers)
    groups = np.repeat(np.arange(seeds), members)
    values = np.tile(np.arange(members), seeds)
    owners = keyed_permutations(values, groups, np.full(seeds, rows), range(seeds)) % workers
    counts = np.bincount(groups * workers + owners, minlength=seeds * workers).reshape(seeds, workers)
    first = counts[:, 0]
    edges = [-1, *(int(drawn.ppf(q)) for q in (0.1, 0.25, 0.5, 0.75, 0.9)), rows]
    observed = np.histogram(first, bins=np.array(edges) + 0.5)[0]
    expected = np.diff(drawn.cdf(edges)) * seeds
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert abs(counts.std() - drawn.std()) < 0.1 * drawn.std()


@pytest.mark.parametrize(
    ("classes", "sizes", "expected"),
    [  # 12 workers: what ``zero`` does to the 50,000 rows of CIFAR
        (10, 5000, [4170] * 8 + [4160] * 4),
        (20, 2500, [4180] * 4 + [4160] * 8),
        (100, 500, [4200] * 8 + [4100] * 4),
    ],
)
def test_starting_at_worker_zero_gives_the_papers_shard_sizes(classes: int, sizes: int, expected: list[int]) -> None:
    """Starting every class at worker zero gives the paper's shard sizes."""
    table = group_table(np.full(classes, sizes), 12)
    assert _owner_sizes(table) == expected
    carried = group_table(np.full(classes, sizes), 12, start="carry")
    assert sorted(set(_owner_sizes(carried))) == [4166, 4167]


def _owner_sizes(table: GroupTable) -> list[int]:
    groups = np.repeat(np.arange(len(table.sizes)), table.sizes)
    owners = (table.starts[groups] + np.concatenate([np.arange(s) for s in table.sizes])) % table.num_workers
    return [int(count) for count in np.bincount(owners, minlength=table.num_workers)]


@pytest.mark.parametrize(("rule", "sparse"), [("le", [True, True, False]), ("lt", [True, False, False])])
def test_a_cluster_of_n_rows_is_sparse_by_pseudo_code_only(rule: SparseIf, sparse: list[bool]) -> None:
    """A cluster of exactly n rows is sparse by the pseudo code and dense by the prose."""
    table = group_table(np.array([11, 12, 13]), 12, sparse_if=rule)
    assert table.sparse.tolist() == sparse
    assert table.copies == 11 * sum(size for size, is_sparse in zip([11, 12, 13], sparse, strict=True) if is_sparse)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.integers(2, 9))
@settings(max_examples=100, deadline=None)
def test_carrying_on_deals_the_owners_of_sparse_groups_in_turns_too(sizes: list[int], workers: int) -> None:
    table = group_table(np.array(sizes), workers, "carry", "le")
    groups = np.repeat(np.arange(len(sizes)), sizes)
    ranks = np.concatenate([np.arange(size) for size in sizes])
    found = table.owners(groups, ranks)
    for kind in (table.sparse, ~table.sparse):
        mine = found[kind[groups]]
        assert mine.tolist() == (np.arange(len(mine)) % workers).tolist()


def test_one_worker_gets_no_duplicates_even_of_sparse_groups() -> None:
    assert group_table(np.array([1, 1, 5]), 1, sparse_if="le").copies == 0


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
@settings(max_examples=60, deadline=None)
def test_rows_reach_their_owner_once_and_broadcast_rows_all(owners: list[int], data: st.DataObject) -> None:
    """Deliveries reach the owner once and everybody for broadcast rows."""
    broadcast = np.array(data.draw(st.lists(st.booleans(), min_size=len(owners), max_size=len(owners))))
    got: dict[int, list[tuple[int, int]]] = {}
    rows, workers, copies = deliver_rows(np.array(owners), broadcast, 5)
    for row, worker, copy in zip(rows.tolist(), workers.tolist(), copies.tolist(), strict=True):
        got.setdefault(row, []).append((worker, copy))
    for row, owner in enumerate(owners):
        assert (owner, 0) in got[row]
        assert sorted(copy for _, copy in got[row]) == (list(range(5)) if broadcast[row] else [0])
        assert len({worker for worker, _ in got[row]}) == len(got[row])


@given(st.integers(1, 10**7), st.integers(1, 300), st.integers(1, 200_000))
@settings(max_examples=100, deadline=None)
def test_chunks_cover_all_ids_once_in_order(rows: int, workers: int, record_bytes: int) -> None:
    bounds = chunk_bounds(rows, workers, record_bytes)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == rows
    assert all(left[1] == right[0] for left, right in pairwise(bounds))


@given(groups_of_rows, st.integers(1, 9), st.integers(1, 12))
@settings(max_examples=100, deadline=None)
def test_counts_of_parts_add_up_and_hold_only_their_chunks(
    groups: npt.NDArray[np.int64], chunks: int, tasks: int
) -> None:
    """Counts of parts add up to those of all rows and hold no more than their chunks."""
    rows = len(groups)
    bounds = _without_empty([(rows * at // chunks, rows * (at + 1) // chunks) for at in range(chunks)])
    pieces = _without_empty([(rows * at // tasks, rows * (at + 1) // tasks) for at in range(tasks)])
    parts = [
        count_by_chunk(np.arange(low, high), groups[low:high], int(groups[low:high].max()) + 1, bounds)
        for low, high in pieces
    ]
    brute = np.zeros((len(bounds), 7), np.int64)
    for row, group in enumerate(groups.tolist()):
        brute[next(at for at, (low, high) in enumerate(bounds) if low <= row < high), group] += 1
    assert np.array_equal(sum_counts(parts, len(bounds), 7), brute)
    assert np.array_equal(sum_counts([sum(parts[1:], parts[0])], len(bounds), 7), brute)
    assert sum(len(part.table) for part in parts) <= len(bounds) + len(pieces)


def test_the_number_of_pieces_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MOST_CHUNKS", 1000)
    assert len(piece_bounds([(0, 1 << 20)], 1 << 22)) == 1000
