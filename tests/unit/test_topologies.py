"""Topologies by name and from files, and their division into matchings."""

from __future__ import annotations

from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given

from pipeline.core.errors import UsageError
from tests.support.graphs import connected_graphs, links_of
from trainer.exchange.matchings import find_matchings
from trainer.exchange.topologies import (
    GRAPHS,
    MOST_LINKS,
    Link,
    build_links,
    implied_workers,
    parse_links,
    torus_sides,
)


def torus(rows: int, columns: int) -> nx.Graph:
    """networkx's torus; sides of 2 have single links there too."""
    return nx.convert_node_labels_to_integers(nx.grid_2d_graph(rows, columns, periodic=True), ordering="sorted")


@pytest.mark.parametrize("num_workers", range(3, 21))
def test_named_graphs_are_those_of_networkx(num_workers: int) -> None:
    assert build_links("ring", num_workers) == links_of(nx.cycle_graph(num_workers))
    assert build_links("complete", num_workers) == links_of(nx.complete_graph(num_workers))
    if num_workers not in (3, 5, 7, 11, 13, 17, 19):  # primes have no torus
        rows, columns = torus_sides(num_workers)
        assert rows * columns == num_workers
        assert nx.utils.graphs_equal(nx.Graph(build_links("torus", num_workers)), torus(rows, columns))


def test_the_exponential_graph_is_a_hypercube() -> None:
    cube = nx.convert_node_labels_to_integers(nx.hypercube_graph(4), ordering="sorted")
    assert build_links("exponential", 16) == links_of(cube)
    for num_workers in (3, 5, 6, 12, 100):
        assert nx.is_connected(nx.Graph(build_links("exponential", num_workers)))


def test_the_torus_is_as_square_as_possible() -> None:
    assert [torus_sides(n) for n in (4, 12, 16, 18, 1000)] == [(2, 2), (3, 4), (4, 4), (3, 6), (25, 40)]
    with pytest.raises(UsageError, match=r"torus needs rows and columns of 2 or more workers.* got 7"):
        build_links("torus", 7)


SIZES = [1, 2, 3, 4, 8, 9, 12, 15, 16, 30, 64]
NAMED = [("graph0", 8)]
NAMED += [(name, size) for name in ("ring", "complete", "exponential") for size in SIZES]
NAMED += [("torus", size) for size in SIZES if size > 3]


@pytest.mark.parametrize(("topology", "num_workers"), NAMED)
def test_matchings_of_named_graphs(topology: str, num_workers: int) -> None:
    """Matchings cover each link once; as few as the highest degree allows, which is one more with odd numbers."""
    links = build_links(topology, num_workers)
    matchings = find_matchings(topology, num_workers, links)
    check_matchings(matchings, links)
    degree = max((worker_degree for _, worker_degree in nx.Graph(links).degree), default=0)
    odd = num_workers % 2 and num_workers > 1 and topology in ("ring", "complete", "torus")
    assert len(matchings) == degree + bool(odd)


@pytest.mark.slow
@given(connected_graphs())
def test_matchings_of_any_graph(graph: tuple[int, tuple[Link, ...]]) -> None:
    num_workers, links = graph
    matchings = find_matchings("links.txt", num_workers, links)
    check_matchings(matchings, links)
    assert matchings == find_matchings("links.txt", num_workers, links)


def check_matchings(matchings: tuple[tuple[Link, ...], ...], links: tuple[Link, ...]) -> None:
    """Assert that matchings contain each link once, and that no worker has two links in a matching."""
    assert sorted(link for matching in matchings for link in matching) == list(links)
    for matching in matchings:
        assert matching
        assert nx.is_matching(nx.Graph(links), set(matching))


@given(connected_graphs())
def test_a_file_gives_back_its_links(graph: tuple[int, tuple[Link, ...]]) -> None:
    _, links = graph
    text = "# a graph\n\n" + "\n".join(f" {j}\t{i}  # link" for i, j in reversed(links))
    assert parse_links(text, "FILE") == links


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no links"),
        ("# only a comment\n", "has no links"),
        ("0 1\n1 2 3\n", "line 2 is not a pair of workers, such as 0 1: '1 2 3'"),
        ("0 -1", "line 1 is not a pair of workers"),
        ("0 1.5", "line 1 is not a pair of workers"),
        ("0 \u0661", "line 1 is not a pair of workers"),
        ("0 " + "9" * 5000, "line 1 is not a pair of workers"),
        ("0 1\n2 2", "line 2 links worker 2 to itself"),
        ("0 1\n\n1 0", "line 3 repeats the link 0 1 of line 1"),
        ("0 1\n2 3", "does not connect all workers from 0 to 3: no path leads from 0 to 2"),
        ("1 2", "does not connect all workers from 0 to 2: no path leads from 0 to 1"),
        ("0 999999999", "does not connect all workers from 0 to 999999999: no path leads from 0 to 1"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=r"^topology FILE[: ]") as caught:
        parse_links(text, "FILE")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_workers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "links.txt"
    file.write_text("0 1\n1 2\n")
    assert build_links(str(file), 3) == ((0, 1), (1, 2))
    assert [implied_workers(name) for name in (str(file), "graph0", "ring")] == [3, 8, None]
    for topology, workers, message in [
        (str(file), 4, "has 3 workers, not 4"),
        ("graph0", 12, "topology graph0 has 8 workers, not 12"),
        ("ring", 0, "--workers must be at least 1, got 0"),
        ("complete", 10_000, f"a graph can have {MOST_LINKS:,} links at most"),
        ("rign", 4, f"topology rign is none of {', '.join(GRAPHS)}, nor a file of links"),
        (str(tmp_path), 4, "cannot be read"),
    ]:
        with pytest.raises(UsageError) as caught:
            build_links(topology, workers)
        assert message in str(caught.value)
