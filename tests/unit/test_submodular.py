"""Blocks by submodular functions: against brute force, on any processor's arithmetic, and through the job."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics.pairwise import cosine_similarity

from pipeline.assignment.blocks import (
    FUNCTIONS,
    MOST_BLOCKS,
    BlockRule,
    Blocks,
    FunctionName,
    block_counts,
    fill_blocks,
    owners_of_class,
)
from pipeline.clustering import similarity
from pipeline.clustering.similarity import (
    LAST,
    ONE,
    STEPS,
    cosine_similarities,
    exponentials,
    mean_distance,
    similarities,
)
from pipeline.core.errors import UsageError
from pipeline.core.shardset.ratios import largest_remainder
from pipeline.strategies.submodular import Parts, Submodular
from tests.support.processors import assert_same_bits

Value = Callable[[np.ndarray[Any, Any], set[int]], int]
ROOT = Path(__file__).resolve().parents[2]
Turns = list[tuple[int, int]]  # (block, point), in the order in which points are placed


def graph_cut(similar: np.ndarray[Any, Any], block: set[int]) -> int:
    return sum(int(similar[v, a]) for v in range(len(similar)) if v not in block for a in block)


def facility_location(similar: np.ndarray[Any, Any], block: set[int]) -> int:
    return sum(max((int(similar[v, a]) for a in block), default=0) for v in range(len(similar)))


VALUES: dict[FunctionName, Value] = {"graph-cut": graph_cut, "facility-location": facility_location}


def naive(similar: np.ndarray[Any, Any], capacities: list[int], value: Value, *, by_size: bool = False) -> Turns:
    """Algorithm 1 as it is printed: every value and every gain out of the definition of the function, at every turn."""
    blocks: list[set[int]] = [set() for _ in capacities]
    free, open_blocks, turns = set(range(len(similar))), {j for j, c in enumerate(capacities) if c}, []
    while free:

        def rank(j: int) -> tuple[Fraction | int, int]:
            return (Fraction(len(blocks[j]), capacities[j]) if by_size else value(similar, blocks[j])), j

        chosen = min(open_blocks, key=rank)
        if len(blocks[chosen]) == capacities[chosen]:
            open_blocks.remove(chosen)
            continue
        before = value(similar, blocks[chosen])
        point = min(free, key=lambda i: (before - value(similar, blocks[chosen] | {i}), i))
        blocks[chosen].add(point)
        free.remove(point)
        turns.append((chosen, point))
    return turns


def turns_of(blocks: Blocks, capacities: list[int], *, by_size: bool = False) -> Turns:
    taken: Turns = []
    take = blocks.add_best_point

    def recorded(block: int) -> int:
        taken.append((block, take(block)))
        return taken[-1][1]

    blocks.add_best_point = recorded  # type: ignore[method-assign]
    found = fill_blocks(blocks, capacities, by_size=by_size)
    assert [int(found[point]) for _, point in taken] == [block for block, _ in taken]
    return taken


@st.composite
def classes(draw: st.DrawFn, most: int = 8) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Similarities with many ties, and capacities that hold all points."""
    rows = draw(st.integers(1, most))
    numbers = draw(st.lists(st.integers(0, 4), min_size=rows * rows, max_size=rows * rows))
    half = np.triu(np.array(numbers, np.int32).reshape(rows, rows), 1)
    similar = half + half.T + 4 * np.eye(rows, dtype=np.int32)
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=4)))
    return similar, np.diff([0, *cuts, rows]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("name", list(FUNCTIONS))
@given(made=classes())
@settings(max_examples=150, deadline=None)
def test_the_sequence_is_that_of_naive_greedy_by_the_definition(
    name: FunctionName, by_size: bool, made: tuple[np.ndarray[Any, Any], list[int]]
) -> None:
    similar, capacities = made
    blocks = FUNCTIONS[name](similar, len(capacities))
    found = turns_of(blocks, capacities, by_size=by_size)
    assert found == naive(similar, capacities, VALUES[name], by_size=by_size)
    held = [{point for block, point in found if block == j} for j in range(len(capacities))]
    assert blocks.values == [VALUES[name](similar, block) for block in held]


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_gains_of_every_set_of_eight_points_equal_brute_force(name: FunctionName) -> None:
    """The point that is taken after each possible beginning, and what it adds."""
    similar = similarities(np.random.default_rng(2).integers(-50, 50, (8, 3)).astype(np.int32))
    for size in range(8):
        for held in combinations(range(8), size):
            grown = FUNCTIONS[name](similar, 1)
            for point in held:  # only this point is free to be taken
                force(grown, point)
            before = VALUES[name](similar, set(held))
            assert grown.values == [before]
            gains = {i: VALUES[name](similar, {*held, i}) - before for i in range(8) if i not in held}
            taken = grown.add_best_point(0)
            assert taken == min(gains, key=lambda i: (-gains[i], i))
            assert grown.values == [before + gains[taken]]


def force(blocks: Any, point: int) -> None:
    """Have a block take a certain point, by way of its own bookkeeping."""
    if hasattr(blocks, "_gains"):
        kept = blocks._gains.copy()
        blocks._gains[:] = np.iinfo(np.int64).min // 2
        blocks._gains[0, point] = kept[0, point]
        assert blocks.add_best_point(0) == point
        kept[:, point] = -(1 << 62)
        blocks._gains[:] = kept - 2 * blocks.similarities[point]
    else:
        kept = list(blocks._bounds[0])
        blocks._bounds[0][:] = [entry for entry in kept if entry[1] == point]
        assert blocks.add_best_point(0) == point
        blocks._bounds[0][:] = kept


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_lazy_and_naive_agree_on_a_class_of_real_size_of_a_test(name: FunctionName) -> None:
    points = np.random.default_rng(3).normal(0, 900, (40, 5)).astype(np.int32)
    points[20:25] = points[3]  # ties
    similar = similarities(points)
    for capacities in ([10] * 4, [20, 10, 5, 5]):
        assert turns_of(FUNCTIONS[name](similar, 4), capacities) == naive(similar, capacities, VALUES[name])


PEERS: dict[str, Any] = json.loads((ROOT / "tests" / "support" / "peer_vectors.json").read_text())


@pytest.mark.parametrize(
    "case", PEERS["cases"], ids=lambda case: f"{case['peer']}-{case['function']}-{len(case['points'])}"
)
def test_the_sequence_and_its_gains_are_those_of_other_packages(case: dict[str, Any]) -> None:
    """Those of tests/support/peer_vectors.py, which tells the releases too."""
    blocks = FUNCTIONS[case["function"]](similarities(np.array(case["points"], np.int32)), 1)
    taken, values = [], [0]
    for _ in case["taken"]:
        taken.append(blocks.add_best_point(0))
        values += blocks.values
    assert taken == case["taken"]
    assert np.diff(values).tolist() == case["gains"]
    assert len(taken) >= 8


@pytest.mark.parametrize("rule", ["micro", "paper", "size"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
@given(st.integers(1, 60), st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_point_has_a_worker_and_every_worker_its_capacity(
    name: FunctionName, rule: BlockRule, rows: int, ratios: list[int], seed: int
) -> None:
    points = np.random.default_rng(seed).integers(-3, 4, (rows, 2)).astype(np.int32)
    capacities = largest_remainder(np.array([rows]), tuple(ratios))[0]
    owners = owners_of_class(similarities(points), capacities, name, rule, tuple(ratios))
    assert np.bincount(owners, minlength=len(ratios)).tolist() == capacities.tolist()


def test_seven_points_in_three_to_two_to_one() -> None:
    assert largest_remainder(np.array([7]), (3, 2, 1)).tolist() == [[4, 2, 1]]


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=100).filter(lambda ratios: sum(ratios) <= 1 << 14))
@settings(max_examples=100, deadline=None)
def test_micro_blocks_are_few_and_near_the_ratios(ratios: list[int]) -> None:
    counts = block_counts(tuple(ratios))
    most = max(MOST_BLOCKS, 2 * len(ratios))
    assert min(counts) >= 1
    if sum(ratios) <= most:
        assert counts == tuple(ratios)
    else:
        assert sum(counts) <= most + len(ratios)
        share = np.array(ratios) / sum(ratios)
        off = np.abs(np.array(counts) / sum(counts) - share)
        assert (off <= len(ratios) / most).all()


@pytest.mark.slow
def test_ratios_of_measured_speeds_become_nearly_as_many_blocks() -> None:
    ratios = (100, 50, 26)

    def off(counts: tuple[int, ...]) -> float:
        return max(abs(count / sum(counts) / (ratio / 176) - 1) for count, ratio in zip(counts, ratios, strict=True))

    triples = [(a, b, c) for a in range(1, 63) for b in range(1, 64 - a) for c in range(1, 65 - a - b)]
    assert off(block_counts(ratios)) == min(map(off, triples)) < 0.02


@pytest.mark.parametrize("rule", ["micro", "paper", "size"])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_the_order_of_points_changes_no_block_values(name: FunctionName, rule: BlockRule) -> None:
    """The order of points changes no block's values where no gains tie."""
    rng = np.random.default_rng(5)
    points = rng.normal(0, 1 << 16, (90, 6)).astype(np.int32)
    order = rng.permutation(90)
    ratios = (3, 2, 1)
    capacities = np.array([45, 30, 15])
    here, there = (
        owners_of_class(similarities(each), capacities, name, rule, ratios) for each in (points, points[order])
    )
    assert np.array_equal(here[order], there)


def test_similarities_are_the_exponentials_of_exact_distances() -> None:
    points = np.random.default_rng(0).integers(-(1 << 20), 1 << 20, (70, 9)).astype(np.int32)
    exact = [[sum((int(a) - int(b)) ** 2 for a, b in zip(x, y, strict=True)) for y in points] for x in points]
    sigma = sum(math.sqrt(squared) for row in exact for squared in row) / 70**2
    assert mean_distance(points) == pytest.approx(sigma, rel=1e-9)
    expected = [[math.exp(-squared / (2 * sigma**2)) for squared in row] for row in exact]
    found = similarities(points)
    assert np.abs(found / ONE - expected).max() <= 2.0**-17 + 2.0**-21 + 1e-9
    assert np.array_equal(found, found.T)
    assert (found.diagonal() == ONE).all()


def test_cosine_similarities_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(3).integers(-(1 << 20), 1 << 20, (70, 9)).astype(np.int32)
    centre = points.mean(axis=0).astype(np.int64)
    points[4] = centre
    found = cosine_similarities(points, centre)
    expected = (1 + cosine_similarity(points - centre)) / 2
    np.fill_diagonal(expected, 1)
    assert np.abs(found / ONE - expected).max() < 1e-5
    assert np.array_equal(found, found.T)
    monkeypatch.setattr(similarity, "BLOCK_VALUES", 1000)
    assert np.array_equal(cosine_similarities(points, centre), found)


def test_how_many_rows_are_computed_at_a_time_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(1).normal(0, 1 << 18, (130, 64)).astype(np.int32)
    whole = similarities(points)
    monkeypatch.setattr(similarity, "BLOCK_VALUES", 1000)
    assert np.array_equal(similarities(points), whole)


def test_points_that_are_all_the_same_are_all_alike() -> None:
    assert (similarities(np.full((5, 3), 7, np.int32)) == ONE).all()
    assert similarities(np.array([[4, 4]], np.int32)).tolist() == [[ONE]]


def test_the_table_of_exponentials_is_rounded_from_the_real_ones() -> None:
    table = exponentials()
    assert len(table) == LAST + 1
    assert (table[0], table[-1]) == (ONE, 0)
    assert (np.diff(table) <= 0).all()
    real = np.exp(-np.arange(LAST + 1) / STEPS) * ONE
    assert np.abs(table - real).max() <= 0.5 + 1e-6


PROGRAM = """
import hashlib, json
import numpy as np
from threadpoolctl import threadpool_info
from pipeline.assignment.blocks import FUNCTIONS, owners_of_class
from pipeline.clustering.similarity import similarities
points = (np.random.default_rng(0).normal(0, 1 << 19, (900, 64)) / (1 + np.arange(64))).astype(np.int32)
similar = similarities(points)
found = [owners_of_class(similar, np.array([450, 225, 113, 112]), name, rule, (4, 2, 1, 1))
         for name in FUNCTIONS for rule in ("micro", "paper", "size")]
plain = points.astype(float) / 3 @ points.T.astype(float)
digest = hashlib.sha256(b"".join(each.tobytes() for each in [similar, *found])).hexdigest()
print(json.dumps([digest, hashlib.sha256(plain.tobytes()).hexdigest(),
                  [pool.get("architecture") for pool in threadpool_info()]]))
"""


@pytest.mark.full
def test_blocks_have_the_same_bits_on_any_processor() -> None:
    """OpenBLAS' kernels of several processors, and numpy without the instructions that it would choose here."""
    assert_same_bits(PROGRAM)


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from pipeline.assignment.blocks import block_bytes, owners_of_class
from pipeline.clustering.similarity import exponentials, similarity_bytes, similarities
def kilobytes(name):
    return int(Path("/proc/self/status").read_text().partition(name)[2].split()[0])
rows, name, workers = 4000, sys.argv[1], int(sys.argv[2])
points = (np.random.default_rng(0).normal(0, 1 << 19, (rows, 64)) / (1 + np.arange(64))).astype(np.int32)
owners_of_class(similarities(points[:200]), np.array([100, 100]), name, "paper", None)
before = kilobytes("VmRSS:")
owners_of_class(similarities(points), np.full(workers, rows // workers), name, "paper", None)
print((kilobytes("VmHWM:") - before) * 1024, similarity_bytes(rows, 64) + block_bytes(rows, workers, name))
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize("workers", [2, 50])
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_task_holds_what_is_said_beforehand(name: FunctionName, workers: int) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MEMORY, name, str(workers)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    held, told = map(int, done.stdout.split())
    assert 0.6 * told < held < 1.1 * told


def mean_mmd(similar: np.ndarray[Any, Any], owners: np.ndarray[Any, Any]) -> float:
    """MMD^2 between a worker's points and all of the class, mean over workers; the kernel is the similarity."""
    kernel = similar.astype(np.float64) / ONE
    to_class = kernel.mean(axis=0)
    blocks = [np.flatnonzero(owners == worker) for worker in range(int(owners.max()) + 1)]
    return float(np.mean([kernel[np.ix_(b, b)].mean() - 2 * to_class[b].mean() + to_class.mean() for b in blocks]))


def beside_random(similar: np.ndarray[Any, Any], ratios: tuple[int, ...], name: FunctionName, rule: BlockRule) -> float:
    """``mean_mmd`` of the blocks over that of random blocks of the same sizes."""
    capacities = largest_remainder(np.array([len(similar)]), ratios)[0]
    plain = np.repeat(np.arange(len(ratios)), capacities)
    rng = np.random.default_rng(0)
    chance = np.mean([mean_mmd(similar, rng.permutation(plain)) for _ in range(5)])
    unequal = ratios if len(set(ratios)) > 1 else None
    return mean_mmd(similar, owners_of_class(similar, capacities, name, rule, unequal)) / float(chance)


def made_class(rows: int) -> np.ndarray[Any, Any]:
    """Points of a few groups and some that lie outside."""
    rng = np.random.default_rng(7)
    centres = rng.normal(0, 2000, (5, 16))
    points = centres[rng.integers(0, 5, rows)] + rng.normal(0, 1500, (rows, 16)) * rng.gamma(2, 0.5, (rows, 1))
    return points.astype(np.int32)


@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_micro_blocks_beat_unequal_blocks_of_the_papers_rule(name: FunctionName) -> None:
    """Unequal blocks by the paper's rule are worse than chance and micro blocks are not."""
    similar = similarities(made_class(600))
    assert beside_random(similar, (1,) * 8, name, "paper") < 0.8
    assert beside_random(similar, (4, 2, 1, 1), name, "paper") > 1.3
    assert beside_random(similar, (4, 2, 1, 1), name, "micro") < 0.8


# (function, rule, ratios, what was measured elsewhere with PCA-64, the bounds held here)
CAT: list[tuple[FunctionName, BlockRule, tuple[int, ...], float, tuple[float, float]]] = [
    ("graph-cut", "paper", (1,) * 8, 0.25, (0.1, 0.4)),
    ("facility-location", "paper", (1,) * 8, 0.71, (0.4, 0.9)),
    ("graph-cut", "paper", (4, 2, 1, 1), 21.9, (14, 30)),
    ("facility-location", "paper", (4, 2, 1, 1), 9.4, (6, 13)),
    ("graph-cut", "size", (4, 2, 1, 1), 2.6, (1.7, 3.5)),
    ("facility-location", "size", (4, 2, 1, 1), 1.9, (1.2, 2.7)),
    ("graph-cut", "micro", (4, 2, 1, 1), 0.19, (0.1, 0.4)),
    ("facility-location", "micro", (4, 2, 1, 1), 0.64, (0.35, 0.9)),
]


@pytest.fixture(scope="module")
def cats(cifar10: Path) -> np.ndarray[Any, Any]:
    return similarities(cat_points(cifar10))


def cat_points(cifar10: Path) -> np.ndarray[Any, Any]:
    """CIFAR-10's class 3 on 64 principal components of its own, int32 [5000, 64]."""
    records = np.concatenate(
        [np.fromfile(path, np.uint8).reshape(-1, 3073) for path in cifar10.glob("data_batch_*.bin")]
    )
    return class_points(records[records[:, 0] == 3][:, 1:])


def class_points(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Images of one class on 64 principal components of their own, int32 [rows, 64]."""
    images = rows.astype(np.float64)
    images -= images.mean(axis=0)
    _, vectors = np.linalg.eigh(images.T @ images)
    points: np.ndarray[Any, Any] = np.rint(images @ vectors[:, -64:] * 64).astype(np.int32)
    return points


@pytest.mark.full
@pytest.mark.parametrize(("name", "rule", "ratios", "published", "bounds"), CAT)
def test_blocks_of_real_cats_are_as_far_as_was_measured(
    cats: np.ndarray[Any, Any],
    name: FunctionName,
    rule: BlockRule,
    ratios: tuple[int, ...],
    published: float,
    bounds: tuple[float, float],
) -> None:
    """On real cats blocks are as far from the class as was measured."""
    assert bounds[0] < published < bounds[1]
    assert bounds[0] < beside_random(cats, ratios, name, rule) < bounds[1]


def in_parts(
    points: np.ndarray[Any, Any],
    number: int,
    name: FunctionName,
    ratios: tuple[int, ...] = (4, 2, 1, 1),
    rule: BlockRule = "micro",
    key: int = 5,
) -> np.ndarray[Any, Any]:
    """The owners of a class that is cut into parts, one after the other."""
    parts = Parts(np.array([0, number]), key)
    ids, labels = np.arange(len(points)), np.zeros(len(points), np.int64)
    groups = parts(labels, ids)
    of_class = largest_remainder(np.array([len(points)]), ratios)
    capacities = parts.capacities(np.bincount(groups, minlength=number), of_class)
    owners = np.empty(len(points), np.int64)
    unequal = ratios if len(set(ratios)) > 1 else None
    for group, rows in enumerate(capacities):
        mine = groups == group
        owners[mine] = owners_of_class(similarities(points[mine]), rows, name, rule, unequal)
    assert np.bincount(owners).tolist() == of_class[0].tolist()
    return owners


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_a_class_in_parts_is_nearly_as_evenly_placed(name: FunctionName) -> None:
    points = made_class(1200)
    similar = similarities(points)
    by_chance = np.random.default_rng(0).permutation(in_parts(points, 1, name))
    whole, quarters = (mean_mmd(similar, in_parts(points, number, name)) for number in (1, 4))
    assert whole < quarters < 0.8 * mean_mmd(similar, by_chance)


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=5),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 9),
)
@settings(max_examples=100, deadline=None)
def test_parts_hold_what_the_class_holds(sizes: list[int], ratios: list[int], most: int) -> None:
    parts = Parts.from_sizes(np.array(sizes), most, 1)
    assert parts.number == sum(max(1, math.ceil(size / most)) for size in sizes)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    groups = parts(labels, np.arange(len(labels)))
    assert np.array_equal(np.searchsorted(parts.firsts, groups, side="right") - 1, labels)
    of_class = largest_remainder(np.array(sizes), tuple(ratios))
    of_groups = np.bincount(groups, minlength=parts.number)
    found = parts.capacities(of_groups, of_class)
    assert (found >= 0).all()
    assert np.array_equal(found.sum(axis=1), of_groups)
    for label in range(len(sizes)):
        part = slice(parts.firsts[label], parts.firsts[label + 1])
        assert np.array_equal(found[part].sum(axis=0), of_class[label])
        assert (np.abs(found[part] - of_groups[part, None] * np.array(ratios) / sum(ratios)) < parts.number + 1).all()


@pytest.mark.parametrize("text", ["pca:", "pca:x", "pca:2.5", "pca:-1", "", "pca:64:2", "pca:0.0"])
def test_an_embedding_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--embedding must be"):
        Submodular(embedding=text)


def test_the_memory_that_a_task_may_take_is_not_part_of_the_set() -> None:
    assert Submodular(task_memory_gb=9.0).params() == Submodular().params()
