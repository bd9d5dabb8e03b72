"""The topologies of decentralised exchanges: which workers are neighbours, by name or from a file.

A topology is a connected graph without direction. Workers are numbered from 0; a link (i, j) has i < j."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from pipeline.core.errors import UsageError

Link = tuple[int, int]

EXPONENTIAL = "exponential"
RANDOM_PAIR = "random-pair"
ONE_PEER = (EXPONENTIAL, RANDOM_PAIR)  # a worker has at most one neighbour per exchange
MOST_LINKS = 1_000_000  # of a graph: more would take gigabytes
# The graph of MATCHA's published code (Wang et al. 2019), divided into its matchings.
GRAPH0 = (
    ((1, 5), (6, 7), (0, 4), (2, 3)),
    ((1, 7), (3, 6)),
    ((0, 1), (3, 7), (5, 6)),
    ((1, 2), (0, 7)),
    ((1, 3),),
)
GRAPH0_WORKERS = 8


def ring(num_workers: int) -> list[Link]:
    """Return the links of a ring; two workers share a single link."""
    return _unique((worker, (worker + 1) % num_workers) for worker in range(num_workers))


def complete(num_workers: int) -> list[Link]:
    """Return a link for every pair of workers. Raises UsageError if there are too many."""
    pairs = num_workers * (num_workers - 1) // 2
    if pairs > MOST_LINKS:
        raise UsageError(f"{num_workers:,} workers have {pairs:,} pairs; a graph can have {MOST_LINKS:,} links at most")
    return [(i, j) for i in range(num_workers) for j in range(i + 1, num_workers)]


def torus(num_workers: int) -> list[Link]:
    """Return the links of a grid whose rows and columns are rings. Worker ``row * columns + column`` is at (row, column)."""
    rows, columns = torus_sides(num_workers)
    places = [(row, column) for row in range(rows) for column in range(columns)]
    right = ((row * columns + column, row * columns + (column + 1) % columns) for row, column in places)
    down = ((row * columns + column, (row + 1) % rows * columns + column) for row, column in places)
    return _unique([*right, *down])


def torus_sides(num_workers: int) -> tuple[int, int]:
    """Return the rows and columns of the torus that is nearest to a square. Raises UsageError if there is none."""
    rows = max(side for side in range(1, math.isqrt(num_workers) + 1) if num_workers % side == 0)
    if rows == 1:
        raise UsageError(
            f"topology torus needs rows and columns of 2 or more workers, such as 4, 6, 8 or 9 workers, got {num_workers}"
        )
    return rows, num_workers // rows


def exponential(num_workers: int) -> list[Link]:
    """Return the links between workers whose numbers differ in one bit: a hypercube, for a power of two."""
    return _unique(pair for bit in range((num_workers - 1).bit_length()) for pair in bit_pairs(num_workers, bit))


def bit_pairs(num_workers: int, bit: int) -> list[Link]:
    """Return the pairs of workers whose numbers differ in one bit only. bit: its place, from 0."""
    step = 1 << bit
    return [(worker, worker + step) for worker in range(num_workers - step) if not worker & step]


def graph0(num_workers: int) -> list[Link]:
    """Return the links of MATCHA's graph of 8 workers. Raises UsageError for another number of workers."""
    _check_size("graph0", GRAPH0_WORKERS, num_workers)
    return _unique(link for matching in GRAPH0 for link in matching)


GRAPHS: dict[str, Callable[[int], list[Link]]] = {
    "ring": ring,
    "complete": complete,
    "torus": torus,
    EXPONENTIAL: exponential,
    RANDOM_PAIR: complete,
    "graph0": graph0,
}


def build_links(topology: str, num_workers: int) -> tuple[Link, ...]:
    """Return the links of a topology in ascending order.

    topology: a name of GRAPHS or the path of a file with the two workers of a link per line. Raises UsageError for an
    unknown name, a number of workers that the topology cannot have, and a broken file or graph."""
    check_workers(num_workers)
    if topology in GRAPHS:
        return tuple(GRAPHS[topology](num_workers))
    links = read_links(topology)
    _check_size(topology, _workers_of(links), num_workers)
    return links


def check_workers(num_workers: int) -> None:
    """Raise UsageError if there is no worker."""
    if num_workers < 1:
        raise UsageError(f"--workers must be at least 1, got {num_workers}")


def implied_workers(topology: str) -> int | None:
    """Return the number of workers of a topology that has only one size, and None for others.

    Raises UsageError as build_links does."""
    if topology in GRAPHS:
        return GRAPH0_WORKERS if topology == "graph0" else None
    return _workers_of(read_links(topology))


def read_links(path: str) -> tuple[Link, ...]:
    """Return the links of a file, sorted. Raises UsageError for a missing or broken file and a graph in several parts."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"topology {path} is none of {', '.join(GRAPHS)}, nor a file of links") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"topology {path} cannot be read: {error}") from None
    return parse_links(text, path)


def parse_links(text: str, path: str) -> tuple[Link, ...]:
    """Return the links of a file's text, sorted: two workers per line; an empty line or a comment after # is ignored.

    path: for messages. Raises UsageError."""
    lines: dict[Link, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"topology {path}: line {number}"
        if len(words) != 2 or not all(word.isascii() and word.isdigit() and len(word) <= 9 for word in words):
            raise UsageError(f"{place} is not a pair of workers, such as 0 1: {line.strip()[:60]!r}")
        low, high = sorted(map(int, words))
        if low == high:
            raise UsageError(f"{place} links worker {low} to itself")
        # A repeated link is probably a typing error for another one.
        if (low, high) in lines:
            raise UsageError(f"{place} repeats the link {low} {high} of line {lines[low, high]}")
        lines[low, high] = number
    if not lines:
        raise UsageError(f"topology {path} has no links")
    links = tuple(sorted(lines))
    check_connected(links, _workers_of(links), path)
    return links


def check_connected(links: Iterable[Link], num_workers: int, topology: str) -> None:
    """Raise UsageError if the links do not connect all workers."""
    neighbours: dict[int, list[int]] = {0: []}
    for i, j in links:
        neighbours.setdefault(i, []).append(j)
        neighbours.setdefault(j, []).append(i)
    # Breadth-first search: the models of workers that it does not reach would never mix with worker 0's.
    reached = {0}
    queue = deque(reached)
    while queue:
        new = set(neighbours[queue.popleft()]) - reached
        reached |= new
        queue.extend(new)
    if len(reached) < num_workers:
        missing = next(worker for worker in range(num_workers) if worker not in reached)
        raise UsageError(
            f"topology {topology} does not connect all workers from 0 to {num_workers - 1}:"
            f" no path leads from 0 to {missing}"
        )


def _workers_of(links: Iterable[Link]) -> int:
    return 1 + max(high for _, high in links)


def _check_size(topology: str, own: int, num_workers: int) -> None:
    if num_workers != own:
        raise UsageError(f"topology {topology} has {own} workers, not {num_workers}")


def _unique(pairs: Iterable[tuple[int, int]]) -> list[Link]:
    """Return pairs as links in ascending order, without repetitions and without links of a worker to itself."""
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
