"""The models that a worker has sent to others, which it sends again when a connection breaks. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import NamedTuple

from trainer.worker.replica_links import Vector

KEPT_MESSAGES = 2  # a neighbour that lacks one can be at most one exchange behind


class FirstModel(NamedTuple):
    """The model with which a newcomer begins.

    Attributes:
        worker, session: of the newcomer.
        round: its first round.
        values: float32 [P + Q].
    """

    worker: int
    session: int
    round: int
    values: Vector


class SentModels:
    """Models by the session of their receiver, a membership of a neighbour."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[tuple[int, Vector]]] = {}  # the last models, with their rounds
        self._first: dict[int, FirstModel] = {}  # to newcomers that may not have them

    def add(self, session: int, round: int, parameters: Vector) -> None:
        """Note the model of a round, which a neighbour was sent."""
        self._recent.setdefault(session, deque(maxlen=KEPT_MESSAGES)).append((round, parameters))

    def add_first(self, model: FirstModel) -> None:
        """Note the model that a newcomer was sent."""
        self._first[model.session] = model

    def has_first(self, session: int) -> bool:
        return session in self._first

    def confirm_first(self, session: int) -> None:
        """Forget the first model of a newcomer that has sent a model of its own, and so has it."""
        self._first.pop(session, None)

    def retain(self, sessions: Collection[int], newcomers: Collection[int]) -> None:
        """Forget all receivers but some. sessions: of members; newcomers: of those that begin with this worker's model."""
        self._recent = {session: models for session, models in self._recent.items() if session in sessions}
        self._first = {session: model for session, model in self._first.items() if session in newcomers}

    def first_models(self) -> Iterator[FirstModel]:
        """Yield the models of newcomers that may not have them."""
        yield from self._first.values()

    def last_models(self, session: int) -> Iterator[tuple[int, Vector]]:
        """Yield round and parameters of the last models to a receiver, oldest first."""
        yield from self._recent.get(session, ())
