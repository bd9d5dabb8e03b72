"""The weights of D-PSGD and the probabilities and weight of MATCHA, from the spectra of Laplacian matrices.

lambda_2, the second smallest eigenvalue of a Laplacian, says how well a graph is connected: it is 0 for a graph in
several parts. J is the matrix whose elements are all 1/N."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipeline.core.arrays import Floats, Ints
from trainer.exchange.matchings import Matching
from trainer.exchange.topologies import Link, torus_sides

DIGITS = 6  # of probabilities and weights; SLSQP finds no more
GAIN = 1e-6  # smaller relative gains of lambda_2 over equal probabilities are rounding errors


def extremes(topology: str, num_workers: int, links: Sequence[Link]) -> tuple[float, float]:
    """Return lambda_2 and the largest eigenvalue of a topology of two workers or more.

    O(1) for ring, torus and complete, otherwise O(N^3)."""
    if topology == "ring":
        return _ring_extremes(num_workers)
    if topology == "complete":
        return float(num_workers), float(num_workers)
    if topology == "torus":  # the eigenvalues of a product of graphs are the sums of theirs
        sides = [_ring_extremes(side) for side in torus_sides(num_workers)]
        return min(low for low, _ in sides), sum(high for _, high in sides)
    values = eigenvalues(laplacian(np.array(links), np.ones(len(links)), num_workers))
    return float(values[1]), float(values[-1])


def _ring_extremes(num_workers: int) -> tuple[float, float]:
    """Return lambda_2 and the largest eigenvalue of a ring; its eigenvalues are 2 - 2 cos(2 pi k / N)."""
    if num_workers == 2:  # a single link
        return 2.0, 2.0
    low, high = (2 - 2 * math.cos(2 * math.pi * k / num_workers) for k in (1, num_workers // 2))
    return low, high


def laplacian(links: Ints, weights: Floats, num_workers: int) -> Floats:
    """Return the Laplacian matrix [N, N] of a graph. links: [E, 2]; weights: of the links, [E]."""
    matrix = np.zeros((num_workers, num_workers))
    matrix[links[:, 0], links[:, 1]] = -weights
    matrix += matrix.T
    np.fill_diagonal(matrix, -matrix.sum(axis=1))
    return matrix


def eigenvalues(matrix: Floats) -> Floats:
    """Return the eigenvalues of a symmetric matrix, ascending."""
    return np.asarray(np.linalg.eigvalsh(matrix), np.float64)


def constant_weight(lambda_2: float, lambda_max: float) -> float:
    """Return the weight of all links with which averaging converges fastest (Xiao and Boyd 2004, eq. 23)."""
    return 2 / (lambda_2 + lambda_max)


def contraction(weight: float, lambda_2: float, lambda_max: float) -> float:
    """Return the largest eigenvalue of W^2 - J for W = I - weight * Laplacian."""
    return max(1 - weight * lambda_2, weight * lambda_max - 1) ** 2


class SampledGraph:
    """A graph whose matchings are in use at random, each independently of the others (MATCHA, Wang et al. 2019).

    Attributes:
        links: the links of all matchings, [E, 2].
        owners: the matching of each link, [E].
        num_matchings: number of matchings M.
        num_workers: number of workers N.
    """

    def __init__(self, matchings: Sequence[Matching], num_workers: int) -> None:
        self.links = np.array([link for matching in matchings for link in matching])
        self.owners = np.repeat(np.arange(len(matchings)), [len(matching) for matching in matchings])
        self.num_matchings = len(matchings)
        self.num_workers = num_workers

    def equal_probabilities(self, budget: float) -> Floats:
        """Return the budget as the probability of each matching, [M]."""
        return np.full(self.num_matchings, budget)

    def best_probabilities(self, budget: float) -> Floats:
        """Return the probabilities [M] of mean at most ``budget`` with the largest lambda_2 of the mean Laplacian.

        lambda_2 is concave, so the maximum that SLSQP finds is the best. MATCHA's paper solves a semidefinite program.
        """
        from scipy.optimize import minimize

        equal = self.equal_probabilities(budget)
        if budget == 1:
            return equal

        def loss(probabilities: Floats) -> tuple[float, Floats]:
            value, gradient = self.connectivity(probabilities)
            return -value, -gradient

        total = budget * self.num_matchings
        spare = {
            "type": "ineq",
            "fun": lambda probabilities: total - probabilities.sum(),
            "jac": lambda probabilities: -np.ones_like(probabilities),
        }
        limits = [(0.0, 1.0)] * self.num_matchings
        options = {"ftol": 1e-12, "maxiter": 500}
        optimum = minimize(loss, equal, jac=True, method="SLSQP", bounds=limits, constraints=[spare], options=options).x
        better = np.round(np.clip(optimum, 0, 1), DIGITS)
        # Where lambda_2 is a multiple eigenvalue, SLSQP may end beside the start without having gained anything.
        gained = self.connectivity(better)[0] > (1 + GAIN) * self.connectivity(equal)[0]
        return better if gained else equal

    def connectivity(self, probabilities: Floats) -> tuple[float, Floats]:
        """Return lambda_2 of the mean Laplacian, and its gradient v' L_j v by the probabilities, [M].

        v: an eigenvector of lambda_2; of a multiple eigenvalue any one, which gives a supergradient."""
        mean = laplacian(self.links, probabilities[self.owners], self.num_workers)
        # The constant vector has the eigenvalue 0. Moved above all others, it cannot mix with v, not even if the mean
        # graph is in several parts. eigh(subset_by_index=...) fails on some complete graphs.
        values, vectors = np.linalg.eigh(mean + 2.0)
        steps = vectors[self.links[:, 0], 0] - vectors[self.links[:, 1], 0]
        return float(values[0]), np.bincount(self.owners, steps**2, self.num_matchings).astype(np.float64)

    def best_weight(self, probabilities: Floats) -> tuple[float, float]:
        """Return the weight a with the smallest s, and s: the largest eigenvalue of the mean of W^2 - J.

        W = I - a * Laplacian of the links in use. The mean of the squared Laplacian is mean^2 + 2 * spread, because
        L_j^2 = 2 L_j for a matching. MATCHA's program has b >= a^2 instead of a^2; the smallest b is the best."""
        from scipy.optimize import minimize_scalar

        chances = probabilities[self.owners]
        mean = laplacian(self.links, chances, self.num_workers)
        values = eigenvalues(mean)
        if np.ptp(probabilities) == 0:
            # Mean and spread are multiples of the same Laplacian; its extreme eigenvalues decide.
            share = float(probabilities[0])
            return equal_weight(share, float(values[1]) / share, float(values[-1]) / share)
        square = mean @ mean + 2 * laplacian(self.links, chances * (1 - chances), self.num_workers)
        rest = np.eye(self.num_workers) - 1 / self.num_workers

        def s(weight: float) -> float:
            return float(eigenvalues(rest - 2 * weight * mean + weight**2 * square)[-1])

        # Along an eigenvector of the mean, the best weight is at most 1 / eigenvalue.
        optimum = minimize_scalar(s, bounds=(0, 1 / values[1]), method="bounded", options={"xatol": 1e-9 / values[1]})
        weight = float(f"{optimum.x:.{DIGITS}g}")
        return weight, s(weight)


def equal_weight(share: float, lambda_2: float, lambda_max: float) -> tuple[float, float]:
    """Return MATCHA's weight and s (see ``best_weight``) if all probabilities are equal.

    Args:
        share: the probability of every matching.
        lambda_2, lambda_max: of the Laplacian of all links.
    """
    from scipy.optimize import minimize_scalar

    if share == 1:
        weight = constant_weight(lambda_2, lambda_max)
        return weight, contraction(weight, lambda_2, lambda_max)

    def s(weight: float) -> float:
        """Return the largest eigenvalue of the mean of W^2 - J, for W with this weight.

        The matrix has the eigenvectors of the Laplacian; the polynomial below gives its
        eigenvalue for each eigenvalue of the Laplacian but 0."""
        # The polynomial is convex, so its maximum is at lambda_2 or at lambda_max.
        return max(
            1 - 2 * weight * share * value + weight**2 * (share**2 * value**2 + 2 * share * (1 - share) * value)
            for value in (lambda_2, lambda_max)
        )

    limit = 1 / (share * lambda_2)
    optimum = minimize_scalar(s, bounds=(0, limit), method="bounded", options={"xatol": 1e-9 * limit})
    weight = float(f"{optimum.x:.{DIGITS}g}")
    return weight, s(weight)
