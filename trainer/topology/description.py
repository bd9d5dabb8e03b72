"""The numbers that follow from a topology: matchings, weights, spectrum, and bytes per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.core.arrays import Floats, Ints
from pipeline.core.errors import UsageError
from pipeline.core.reporting.tables import table, two_column_table
from trainer.exchange.link_weights import eigenvalues, laplacian
from trainer.exchange.matchings import Matching, find_matchings
from trainer.exchange.mixing import PAIR_WEIGHT, Edge, FullMixing, SampledMatchings, TopologyPlan, build_plan
from trainer.exchange.topologies import ONE_PEER, RANDOM_PAIR, implied_workers

MOST_WORKERS = 2000  # the spectrum takes O(N^3)
MANY = 12  # matchings, and links per matching, that the terminal shows
BYTES = 4  # of a float32


@dataclass(frozen=True)
class TopologyDescription:
    """A topology, the plan of its exchanges, and the traffic of a model.

    Attributes:
        topology: its name, or the path of its file.
        plan: the edges of each round.
        budget: MATCHA's share of the matchings, None without MATCHA.
        weight: weight of an edge in use.
        shares: each link with the share of the exchanges that use it.
        matchings: the matchings of the links, each with the share of the exchanges that use it; none for random pairs,
            which are drawn among all matchings.
        parameters: number of elements of the model.
        spectrum: eigenvalues of the graph's Laplacian, ascending, [N].
        mean_mixing: eigenvalues of the mean of W over all exchanges, descending, [N].
        degrees: neighbours of each worker, [N].
        loads: bytes that each worker sends per step, on average, [N].
    """

    topology: str
    plan: TopologyPlan
    budget: float | None
    weight: float
    shares: tuple[Edge, ...]
    matchings: tuple[tuple[Matching, float], ...]
    parameters: int
    spectrum: Floats
    mean_mixing: Floats
    degrees: Ints
    loads: Floats

    @property
    def links_in_use(self) -> float:
        """Return the number of links that an exchange uses, on average."""
        return sum(share for _, _, share in self.shares)

    @property
    def matchings_in_use(self) -> float:
        """Return the number of matchings that an exchange uses, on average."""
        return sum(share for _, share in self.matchings) if self.matchings else float(bool(self.shares))


def describe(
    topology: str, num_workers: int | None, parameters: int, *, budget: float | None = None, every: int = 1
) -> TopologyDescription:
    """Return the description of a topology.

    Args:
        topology: a name, or the path of a file of links.
        num_workers: number of workers; None for a topology that has only one size.
        parameters: number of elements of the model that workers send each other.
        budget: MATCHA's share of the matchings, None for all links in each exchange.
        every: rounds from one exchange to the next.

    Raises UsageError.
    """
    workers = num_workers if num_workers is not None else implied_workers(topology)
    if workers is None:
        raise UsageError(f"--workers is required, as topology {topology} can have any number of them")
    if workers > MOST_WORKERS:
        raise UsageError(f"--workers must be at most {MOST_WORKERS} to compute a spectrum, got {workers}")
    if parameters < 1:
        raise UsageError(f"--parameters must be at least 1, got {parameters}")
    # No number here depends on the seed, which only decides the draws of a run.
    plan = build_plan(topology, workers, seed=0, budget=budget, every=every)
    shares = plan.shares()
    links = np.array([(i, j) for i, j, _ in shares], np.int64).reshape(-1, 2)
    probabilities = np.array([share for _, _, share in shares])  # the mean share of exchanges that use each link
    weight = plan.weight if isinstance(plan, FullMixing | SampledMatchings) else PAIR_WEIGHT
    graph = laplacian(links, np.ones(len(links)), workers)
    mean_graph = laplacian(links, probabilities, workers)
    return TopologyDescription(
        topology,
        plan,
        budget,
        weight,
        shares,
        _matchings(topology, workers, shares),
        parameters,
        spectrum=eigenvalues(graph),
        mean_mixing=1 - weight * eigenvalues(mean_graph),
        degrees=np.bincount(links.ravel(), minlength=workers),
        # The diagonal is the mean number of neighbours in an exchange, and each of them gets the whole model.
        loads=np.abs(np.diagonal(mean_graph)) * parameters * BYTES / every,
    )


def _matchings(topology: str, num_workers: int, shares: tuple[Edge, ...]) -> tuple[tuple[Matching, float], ...]:
    """Return the matchings of a topology with their shares, which are those of their links."""
    if topology == RANDOM_PAIR:
        return ()
    by_link = {(i, j): share for i, j, share in shares}
    matchings = find_matchings(topology, num_workers, list(by_link))
    return tuple((matching, by_link[matching[0]]) for matching in matchings)


def as_json(description: TopologyDescription) -> dict[str, Any]:
    """Return a description as plain values, with the keys that trainer/FILES.md documents."""
    # JSON has no NumPy numbers, so each is converted.
    return {
        "topology": description.topology,
        "workers": description.plan.num_workers,
        "budget": description.budget,
        "every": description.plan.every,
        "links": len(description.shares),
        "degree": {"min": int(description.degrees.min()), "max": int(description.degrees.max())},
        "matchings": [
            {"probability": share, "links": [list(link) for link in links]} for links, share in description.matchings
        ],
        "in_use": {"links": description.links_in_use, "matchings": description.matchings_in_use},
        "weight": description.weight,
        "s": description.plan.contraction(),
        "lambda_2": float(description.spectrum[1]) if description.shares else None,
        "lambda_max": float(description.spectrum[-1]) if description.shares else None,
        "spectrum": {"laplacian": description.spectrum.tolist(), "mean_mixing": description.mean_mixing.tolist()},
        "parameters": description.parameters,
        "bytes_per_step": {
            "all": float(description.loads.sum()),
            "worker_mean": float(description.loads.mean()),
            "worker_max": float(description.loads.max()),
        },
    }


def screen(description: TopologyDescription) -> str:
    """Return a description as a page of text: the numbers, and a table of the matchings."""
    mean, most = (f"{value / 1e6:,.3f} MB" for value in (description.loads.mean(), description.loads.max()))
    low, high = (f"{value:,}" for value in (description.degrees.min(), description.degrees.max()))
    neighbours = low if low == high else f"{low} to {high}"
    in_matchings = f" in {len(description.matchings):,} matchings" if description.matchings else ""
    rhythm = "each round" if description.plan.every == 1 else f"every {description.plan.every} rounds"
    lines = [
        ("workers", f"{description.plan.num_workers:,} with {neighbours} neighbours"),
        ("links", f"{len(description.shares):,}{in_matchings}"),
        ("exchanges", f"{rhythm}, {_method(description)}"),
        (
            "in use",
            f"{description.links_in_use:,.2f} links, {description.matchings_in_use:,.2f} matchings per exchange on average",
        ),
        ("weight", f"{description.weight:.6f} for each link in use"),
    ]
    # A single worker has no second eigenvalue.
    if description.shares:
        lines += [
            ("Laplacian", f"lambda_2 {description.spectrum[1]:.6f}, largest eigenvalue {description.spectrum[-1]:.6f}"),
            (
                "mean of W",
                f"second eigenvalue {description.mean_mixing[1]:.6f}, smallest {description.mean_mixing[-1]:.6f}",
            ),
        ]
    lines += [
        (
            "s",
            f"{description.plan.contraction():.4f}: the most that an exchange leaves of the variance between models, in"
            " the mean",
        ),
        ("sent", f"{mean} per worker and step, {most} at most, for {description.parameters:,} parameters"),
    ]
    return f"topology {description.topology}\n{two_column_table(lines)}\n{_matchings_table(description)}".rstrip()


def _method(description: TopologyDescription) -> str:
    if description.budget is not None:
        return f"MATCHA with budget {description.budget:g}"
    return "a single matching" if description.topology in ONE_PEER else "D-PSGD with all links"


def _matchings_table(description: TopologyDescription) -> str:
    """Return a table with a row per matching: its links, and the share of the exchanges that use it."""
    rows = []
    for number, (matching, share) in enumerate(description.matchings[:MANY]):
        links = " ".join(f"{i}-{j}" for i, j in matching[:MANY])
        more = f" and {len(matching) - MANY:,} more" if len(matching) > MANY else ""
        rows.append((str(number), f"{share:.4f}", links + more))
    if not rows:
        return ""
    rest = len(description.matchings) - len(rows)
    matchings_table = table(rows, ("matching", "probability", "links"), right=(0, 1), indent="  ")
    return matchings_table + (f"\n  and {rest:,} more matchings" if rest else "")
