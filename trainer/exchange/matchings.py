"""The division of a topology's links into matchings: sets of links in which every worker has at most one.

The links of a matching can be used at the same time, so a round takes as long as its number of matchings. MATCHA
decides for each matching whether a round uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.exchange.topologies import EXPONENTIAL, GRAPH0, Link, bit_pairs, ring, torus_sides

Matching = tuple[Link, ...]


def find_matchings(topology: str, num_workers: int, links: Sequence[Link]) -> tuple[Matching, ...]:
    """Return matchings that contain each link once.

    Named topologies get the fewest matchings, except a torus with an odd side. Its links, and links from a file, are
    coloured greedily: mostly a few more matchings than the highest degree, and always less than twice as many.

    Args:
        topology: its name, or any other text for a graph without a division of its own.
        num_workers: number of workers.
        links: the links of the topology, ascending.
    """
    explicit = EXPLICIT.get(topology)
    explicit_matchings = explicit(num_workers) if explicit else None
    matchings = color_links(links) if explicit_matchings is None else explicit_matchings
    return tuple(tuple(sorted(matching)) for matching in matchings)


def are_interchangeable(topology: str, num_workers: int) -> bool:
    """Return whether symmetries of a topology, which keep its graph, can turn any of its matchings into any other.

    lambda_2 is concave, so equal probabilities of such matchings are the best ones: the mean of any other probabilities
    over all symmetries."""
    if topology == "ring":
        return num_workers % 2 == 0
    if topology == "torus":
        rows, columns = torus_sides(num_workers)
        return rows == columns and rows % 2 == 0
    return topology == "complete"


def ring_matchings(num_workers: int) -> list[list[Link]]:
    """Return two matchings that alternate along the ring, and a third one for the last link of an odd ring."""
    links = ring(num_workers)
    if num_workers == 2:
        return [links]
    closing = (0, num_workers - 1)
    path = [link for link in links if link != closing]
    halves = [path[::2], path[1::2]]
    # On an even ring, the closing link continues the alternation: both its ends have a link of the first matching only.
    if num_workers % 2:
        return [*halves, [closing]] if num_workers > 1 else []
    return [halves[0], [*halves[1], closing]]


def tournament(num_workers: int) -> list[list[Link]]:
    """Return the rounds of a round-robin tournament, in which every pair of workers meets once.

    The circle method: the last of an even number of workers stays in its place and the others move round. With an odd
    number, that place is empty and its partner pauses."""
    even = num_workers + num_workers % 2
    turning = even - 1
    rounds = []
    for shift in range(turning):
        pairs = [((shift + k) % turning, (shift - k) % turning) for k in range(1, even // 2)]
        pairs.append((shift, turning))
        rounds.append([(min(pair), max(pair)) for pair in pairs if max(pair) < num_workers])
    return rounds if num_workers > 1 else []


def torus_matchings(num_workers: int) -> list[list[Link]] | None:
    """Return the matchings of both directions of a torus; None if a side is odd, which needs other divisions."""
    rows, columns = torus_sides(num_workers)
    if rows % 2 or columns % 2:
        return None
    across = [
        [(row * columns + low, row * columns + high) for row in range(rows) for low, high in matching]
        for matching in ring_matchings(columns)
    ]
    down = [
        [(low * columns + column, high * columns + column) for column in range(columns) for low, high in matching]
        for matching in ring_matchings(rows)
    ]
    return [*across, *down]


def bit_matchings(num_workers: int) -> list[list[Link]]:
    """Return a matching for each bit of the workers' numbers."""
    return [bit_pairs(num_workers, bit) for bit in range((num_workers - 1).bit_length())]


EXPLICIT: dict[str, Callable[[int], list[list[Link]] | None]] = {
    "ring": ring_matchings,
    "complete": tournament,
    "torus": torus_matchings,
    EXPONENTIAL: bit_matchings,
    "graph0": lambda _: [list(matching) for matching in GRAPH0],
}


def color_links(links: Sequence[Link]) -> list[list[Link]]:
    """Return the colour classes of a greedy edge colouring (DSATUR, Brelaz 1979), largest first.

    O(E^2) for E links."""
    import networkx as nx  # loads slowly, and only few topologies need it

    # Links that share a worker exclude each other. The order of the nodes decides ties, so it must not be that of a set.
    conflicts = nx.Graph()
    conflicts.add_nodes_from(links)
    by_worker: dict[int, list[Link]] = {}
    for link in links:
        for worker in link:
            conflicts.add_edges_from((other, link) for other in by_worker.get(worker, ()))
            by_worker.setdefault(worker, []).append(link)
    colors = nx.greedy_color(conflicts, "DSATUR")
    classes: list[list[Link]] = [[] for _ in range(1 + max(colors.values(), default=-1))]
    for link in links:
        classes[colors[link]].append(link)
    return sorted(classes, key=lambda links: (-len(links), links))
