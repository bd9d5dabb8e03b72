"""The models of neighbours, kept until the rounds that use them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection

from trainer.worker.replica_links import Vector


class NeighbourModels:
    """Models by the session of their sender, a membership of a neighbour, and by round."""

    def __init__(self) -> None:
        self._models: dict[int, dict[int, Vector]] = {}
        self._departed: dict[int, int] = {}  # workers that have left, by session; their last models may still be used

    def put(self, session: int, round: int, model: Vector) -> None:
        self._models.setdefault(session, {})[round] = model

    def pop(self, session: int, round: int) -> Vector:
        return self._models[session].pop(round)

    def let_go(self, worker: int, session: int, first: int, has_link: Callable[[int], bool]) -> None:
        """Drop a departed worker's models from the first round on for which its model is missing.

        From that round on the receiver does without it, whatever arrives later: no survivor uses a model after a gap.

        Args:
            worker, session: the departed worker.
            first: the first round that can still use a model.
            has_link: has_link(round) says whether a round has a link to the worker.
        """
        models = self._models.pop(session, {})
        used = {}
        for round in range(first, max(models, default=-1) + 1):
            if has_link(round):
                if round not in models:
                    break
                used[round] = models[round]
        if used:
            self._models[session] = used
            self._departed[session] = worker

    def retain(self, sessions: Collection[int], number: int) -> None:
        """Drop the models of sessions that are over, because a view with other members begins.

        sessions: of the members; number: of the view."""
        self._departed = {each: worker for each, worker in self._departed.items() if self._models.get(each)}
        # Messages of sessions that the receiver has not heard of yet have higher numbers than its view.
        current = {*sessions, *self._departed}
        self._models = {each: models for each, models in self._models.items() if each in current or each > number}

    def forget_departed(self) -> None:
        self._departed = {}

    def session_with(self, worker: int, session: int | None, round: int) -> int | None:
        """Return the session of a worker from which there is a model of a round; None if there is none.

        session: the present one; None for a worker that takes no part."""
        sessions = [each for each, other in self._departed.items() if other == worker]
        if session is not None:
            sessions.append(session)
        return next((each for each in sessions if round in self._models.get(each, ())), None)
