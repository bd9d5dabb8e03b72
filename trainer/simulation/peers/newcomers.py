"""The virtual workers that wait for the model with which they begin. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.checkpoints.slice_file import Float32s


@dataclass
class Newcomer:
    """A worker that waits for a model.

    Attributes:
        first: the round with which it begins, and of which it needs another worker's model.
        sources: the neighbours from which it may come; empty: any worker.
        spare, spare_from: the first model of that round, and its worker, in case all sources die.
    """

    first: int
    sources: set[int]
    spare: Float32s | None = None
    spare_from: int = -1


class Newcomers(dict[int, Newcomer]):
    """Newcomers by worker, until a model is sent to them."""

    def note_model(self, worker: int, round: int, model: Float32s) -> list[int]:
        """Note the model with which a worker begins a round, and return the newcomers to which the worker sends it."""
        waiting = {index: newcomer for index, newcomer in self.items() if newcomer.first == round}
        for newcomer in waiting.values():
            if newcomer.spare is None:
                newcomer.spare = model
                newcomer.spare_from = worker
        return [index for index, each in waiting.items() if worker in each.sources or not each.sources]

    def lose(self, worker: int) -> list[int]:
        """Forget a worker that has died, and return the newcomers that get their spare model without this last source."""
        self.pop(worker, None)
        bereft = []
        for index, newcomer in self.items():
            if newcomer.sources == {worker} and newcomer.spare is not None:
                bereft.append(index)
            newcomer.sources.discard(worker)
        return bereft
