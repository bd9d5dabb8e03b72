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
        loads: bytes that each worker sends per step, in the mean, [N].
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
        """Return the number of links that an exchange uses, in the mean."""
        return sum(share for _, _, share in self.shares)

    @property
    def matchings_in_use(self) -> float:
        """Return the number of matchings that an exchange uses, in the mean."""
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
    chances = np.array([share for _, _, share in shares])
    weight = plan.weight if isinstance(plan, FullMixing | SampledMatchings) else PAIR_WEIGHT
    graph = laplacian(links, np.ones(len(links)), workers)
    mean = laplacian(links, chances, workers)
    return TopologyDescription(
        topology,
        plan,
        budget,
        weight,
        shares,
        _matchings(topology, workers, shares),
        parameters,
        spectrum=eigenvalues(graph),
        mean_mixing=1 - weight * eigenvalues(mean),
        degrees=np.bincount(links.ravel(), minlength=workers),
        # The diagonal is the mean number of neighbours in an exchange, and each of them gets the whole model.
        loads=np.abs(np.diagonal(mean)) * parameters * BYTES / every,
    )


def _matchings(topology: str, num_workers: int, shares: tuple[Edge, ...]) -> tuple[tuple[Matching, float], ...]:
    """Return the matchings of a topology with their shares, which are those of their links."""
    if topology == RANDOM_PAIR:
        return ()
    by_link = {(i, j): share for i, j, share in shares}
    matchings = find_matchings(topology, num_workers, list(by_link))
    return tuple((matching, by_link[matching[0]]) for matching in matchings)


def as_json(made: TopologyDescription) -> dict[str, Any]:
    """Return a description as plain values, with the keys that trainer/FILES.md documents."""
    return {
        "topology": made.topology,
        "workers": made.plan.num_workers,
        "budget": made.budget,
        "every": made.plan.every,
        "links": len(made.shares),
        "degree": {"min": int(made.degrees.min()), "max": int(made.degrees.max())},
        "matchings": [
            {"probability": share, "links": [list(link) for link in links]} for links, share in made.matchings
        ],
        "in_use": {"links": made.links_in_use, "matchings": made.matchings_in_use},
        "weight": made.weight,
        "s": made.plan.contraction(),
        "lambda_2": float(made.spectrum[1]) if made.shares else None,
        "lambda_max": float(made.spectrum[-1]) if made.shares else None,
        "spectrum": {"laplacian": made.spectrum.tolist(), "mean_mixing": made.mean_mixing.tolist()},
        "parameters": made.parameters,
        "bytes_per_step": {
            "all": float(made.loads.sum()),
            "worker_mean": float(made.loads.mean()),
            "worker_max": float(made.loads.max()),
        },
    }


def screen(made: TopologyDescription) -> str:
    """Return a description as a page of text: the numbers, and a table of the matchings."""
    mean, most = (f"{value / 1e6:,.3f} MB" for value in (made.loads.mean(), made.loads.max()))
    low, high = (f"{value:,}" for value in (made.degrees.min(), made.degrees.max()))
    neighbours = low if low == high else f"{low} to {high}"
    in_matchings = f" in {len(made.matchings):,} matchings" if made.matchings else ""
    rhythm = "each round" if made.plan.every == 1 else f"every {made.plan.every} rounds"
    lines = [
        ("workers", f"{made.plan.num_workers:,} with {neighbours} neighbours"),
        ("links", f"{len(made.shares):,}{in_matchings}"),
        ("exchanges", f"{rhythm}, {_method(made)}"),
        ("in use", f"{made.links_in_use:,.2f} links, {made.matchings_in_use:,.2f} matchings per exchange in the mean"),
        ("weight", f"{made.weight:.6f} for each link in use"),
    ]
    # A single worker has no second eigenvalue.
    if made.shares:
        lines += [
            ("Laplacian", f"lambda_2 {made.spectrum[1]:.6f}, largest eigenvalue {made.spectrum[-1]:.6f}"),
            ("mean of W", f"second eigenvalue {made.mean_mixing[1]:.6f}, smallest {made.mean_mixing[-1]:.6f}"),
        ]
    lines += [
        (
            "s",
            f"{made.plan.contraction():.4f}: the most that an exchange leaves of the variance between models, in the mean",
        ),
        ("sent", f"{mean} per worker and step, {most} at most, for {made.parameters:,} parameters"),
    ]
    return f"topology {made.topology}\n{two_column_table(lines)}\n{_matchings_table(made)}".rstrip()


def _method(made: TopologyDescription) -> str:
    if made.budget is not None:
        return f"MATCHA with budget {made.budget:g}"
    return "a single matching" if made.topology in ONE_PEER else "D-PSGD with all links"


def _matchings_table(made: TopologyDescription) -> str:
    """Return a table with a row per matching: its links, and the share of the exchanges that use it."""
    rows = []
    for number, (matching, share) in enumerate(made.matchings[:MANY]):
        links = " ".join(f"{i}-{j}" for i, j in matching[:MANY])
        more = f" and {len(matching) - MANY:,} more" if len(matching) > MANY else ""
        rows.append((str(number), f"{share:.4f}", links + more))
    if not rows:
        return ""
    rest = len(made.matchings) - len(rows)
    shown = table(rows, ("matching", "probability", "links"), right=(0, 1), indent="  ")
    return shown + (f"\n  and {rest:,} more matchings" if rest else "")
