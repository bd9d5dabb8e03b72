"""The factors of gradients in their update's sum."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.protocols.base import Protocol


class Weights:
    """by_examples: an update of several gradients weighs each by its number of examples, so that it is the mean over all
    of them; such numbers differ under Bernoulli sampling. usual: the mean mini-batch of a worker, where workers draw
    different ones on purpose: every gradient then counts by its number of examples over it, be it alone in its update, so
    that every example counts the same; without effect where by_examples sees to that. holds: whether the gradients of an
    update must be there before the first factor is known."""

    def __init__(self, protocol: Protocol, num_workers: int, *, by_examples: bool, usual: float | None = None) -> None:
        self.protocol, self.num_workers = protocol, num_workers
        self._counts = by_examples and protocol.update_size(num_workers) > 1
        self.usual = None if self._counts else usual
        self.holds = self._counts and protocol.in_worker_order

    def of(self, staleness: Sequence[int], examples: Sequence[int]) -> list[float]:
        """The factor of each gradient, by its staleness and its number of examples."""
        factors = [self.protocol.weight(value, self.num_workers) for value in staleness]
        if self.usual is not None:
            return [factor * (count / self.usual) for factor, count in zip(factors, examples, strict=True)]
        if not self._counts:
            return factors
        mean = _mean(examples) if self.holds else 1.0
        return [factor * (count / mean) for factor, count in zip(factors, examples, strict=True)]

    def correction(self, examples: Sequence[int]) -> float:
        """The factor of a whole sum: what its gradients' factors lack, where they were summed before the mean number of
        examples was known."""
        return 1.0 / _mean(examples) if self._counts and not self.holds else 1.0


def _mean(examples: Sequence[int]) -> float:
    return max(1, sum(examples)) / max(1, len(examples))
