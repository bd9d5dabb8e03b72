"""Graphs for tests of topologies and mixing, and their matrices from the definitions."""

from __future__ import annotations

import networkx as nx
import numpy as np
from hypothesis import strategies as st

from pipeline.core.arrays import Floats
from trainer.exchange.topologies import Link


def links_of(graph: nx.Graph) -> tuple[Link, ...]:
    """The links of a networkx graph whose nodes are 0 to N-1."""
    return tuple(sorted((min(edge), max(edge)) for edge in graph.edges))


def mixing_matrix(num_workers: int, edges: tuple[tuple[int, int, float], ...]) -> Floats:
    """W, by its definition: x_i + sum of w * (x_j - x_i)."""
    made = np.eye(num_workers)
    for i, j, weight in edges:
        made[i, j] += weight
        made[j, i] += weight
        made[i, i] -= weight
        made[j, j] -= weight
    return made


def second_eigenvalue(mixing: Floats) -> float:
    """The second largest absolute eigenvalue of W."""
    return float(np.sort(np.abs(np.linalg.eigvalsh(mixing)))[-2])


@st.composite
def connected_graphs(draw: st.DrawFn, most: int = 12) -> tuple[int, tuple[Link, ...]]:
    """The number of workers and the links of a connected graph: a random tree and more links."""
    num_workers = draw(st.integers(2, most))
    tree = {(draw(st.integers(0, child - 1)), child) for child in range(1, num_workers)}
    pairs = [(i, j) for i in range(num_workers) for j in range(i + 1, num_workers)]
    return num_workers, tuple(sorted(tree | draw(st.sets(st.sampled_from(pairs)))))
