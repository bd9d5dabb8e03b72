"""Messages from supervisors to server 0, and its replies."""

from __future__ import annotations

from typing import NamedTuple


class AskStatus(NamedTuple):
    """A supervisor asks for the run's status. Body: an introduction."""


class WorkerLoss(NamedTuple):
    """A supervisor's worker has ended. Body: an introduction."""

    worker: int


class End(NamedTuple):
    """A supervisor is about to stop the run, which needs a checkpoint. Body: an introduction."""


class StatusReply(NamedTuple):
    """The reply to AskStatus. Body: the status in JSON."""


class EndReply(NamedTuple):
    """The reply to End. Body: the status in JSON, whose version the checkpoint will have at least."""


class Refusal(NamedTuple):
    """Server 0's reply to an introduction of another run. Body: the essentials of its own.

    session: of the refused process; 0 for a supervisor."""

    session: int
