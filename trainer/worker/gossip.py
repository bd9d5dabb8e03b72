"""The exchange of examples on a worker: gives its own to others between two steps, and adopts those that it gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from trainer.data.gossip import GossipSampler, ReadRows, rows_of_pool
from trainer.data.sampling import Draw
from trainer.gossip.rounds import Examples
from trainer.runlog.example_ledger import IdLosses
from trainer.worker.clients.base import Turn


@runtime_checkable
class ExampleLink(Protocol):
    """A client that sends examples to all other workers."""

    def offer_examples(self, epoch: int, examples: Examples) -> None:
        """Send examples without waiting. epoch: of this worker, by whose losses they were selected."""
        ...


class WorkerGossip:
    """A worker's part in the exchange of examples. Nothing here waits for another worker.

    Args:
        sampler: draws the worker's mini-batches.
        link: sends its examples.
        drop_ahead: drops the mini-batches that were made ahead, of which a new pool may change any.
        read_rows: reads rows by their ids, after a resume.
        read_losses: read_losses(version) reads the run's ledger up to a version; None if it keeps none, or no selection
            needs it.
    """

    def __init__(
        self,
        sampler: GossipSampler,
        link: ExampleLink,
        drop_ahead: Callable[[], None],
        read_rows: ReadRows,
        read_losses: Callable[[int], Iterable[IdLosses]] | None,
    ) -> None:
        self.sampler = sampler
        self.link = link
        self.drop_ahead = drop_ahead
        self.read_rows = read_rows
        self.read_losses = read_losses
        self._generation = 0

    def begin(self, turn: Turn) -> None:
        """Adopt the examples that came with a turn, and give examples if the step begins a new pass."""
        # The losses in memory may be of steps that a roll-back has made void, or of none after a restart.
        if self.read_losses and turn.generation != self._generation:
            self.sampler.restore_losses(self.read_losses(turn.version))
        self._generation = turn.generation
        if turn.pool:
            self.sampler.adopt(turn.pool.clock, turn.pool.first, rows_of_pool(turn.pool, self.read_rows))
            self.drop_ahead()
        if gift := self.sampler.selection(turn.clock):
            self.link.offer_examples(gift.epoch, gift.examples)

    def end(self, draw: Draw, outcomes: tuple[np.ndarray, np.ndarray] | None) -> None:
        """Record the losses of a mini-batch. outcomes: losses and hits of its examples; None if they do not count."""
        if outcomes:
            self.sampler.note(draw, outcomes[0])
