"""The factor of each gradient in the sum of its update."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.protocols.base import Protocol


class Weights:
    """Computes the factors of gradients from their staleness and number of examples.

    Args:
        protocol: gives the factor by staleness.
        num_workers: n.
        by_examples: weigh the gradients of one update by their numbers of examples, which differ under Bernoulli
            sampling, so that the update is the mean over all examples.
        usual: mean examples per mini-batch of the workers, if these differ on purpose, else None. Every gradient is
            then weighed by its examples over ``usual``, so that all examples count the same. Ignored if by_examples
            applies.

    Attributes:
        holds: whether all gradients of an update must have arrived before the first factor is known.
    """

    def __init__(self, protocol: Protocol, num_workers: int, *, by_examples: bool, usual: float | None = None) -> None:
        self.protocol = protocol
        self.num_workers = num_workers
        self._counts = by_examples and protocol.update_size(num_workers) > 1
        self.usual = None if self._counts else usual
        self.holds = self._counts and protocol.in_worker_order

    def factors(self, staleness: Sequence[int], examples: Sequence[float]) -> list[float]:
        """Return the factor of each gradient, in the same order.

        Args:
            staleness: updates since the parameters of each gradient.
            examples: of each gradient, per mini-batch if it is the sum of several.
        """
        factors = [self.protocol.weight(value, self.num_workers) for value in staleness]
        if self.usual is not None:
            return [factor * (count / self.usual) for factor, count in zip(factors, examples, strict=True)]
        if not self._counts:
            return factors
        mean = _mean(examples) if self.holds else 1.0
        return [factor * (count / mean) for factor, count in zip(factors, examples, strict=True)]

    def correction(self, examples: Sequence[float]) -> float:
        """Return the factor of the whole sum of an update. examples: one entry per gradient in it.

        It is 1 unless gradients are weighed by examples and were summed before the mean number of examples was
        known."""
        return 1.0 / _mean(examples) if self._counts and not self.holds else 1.0


def _mean(examples: Sequence[float]) -> float:
    return max(1, sum(examples)) / max(1, len(examples))
