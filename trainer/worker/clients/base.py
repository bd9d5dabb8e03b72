"""The interface between the worker's loop and its exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import JobError
from trainer.coordination.orders import StepMeasurements
from trainer.gossip.rounds import Pool

Vector = npt.NDArray[np.float32]


class MustRejoin(Exception):
    """The run has dropped this worker or rolled back, so its current step is void and it must join again."""


class ReplacedError(JobError):
    """A later process has taken this worker's place."""


class StageSwitch(Exception):
    """The run is in another stage, whose exchange this client does not have.

    Attributes:
        stage: number of that stage.
    """

    def __init__(self, stage: int) -> None:
        super().__init__(f"stage {stage}")
        self.stage = stage


@dataclass(frozen=True)
class Turn:
    """The next step: mini-batch ``clock``, with the parameters of ``version``, which are in the client's ``pulled``.

    Attributes:
        missed_from: the first mini-batch that this worker has missed, of those before ``clock``; None if it has missed
            none.
        pool: examples of other workers, to be used from this step on; None to keep those that it has.
    """

    clock: int
    version: int
    generation: int
    missed_from: int | None = None
    pool: Pool | None = field(default=None, compare=False)


class Client(Protocol):
    """A worker's connection to the others of a run, for one exchange.

    The worker computes at ``pulled`` and leaves its gradient in ``pushed`` before it calls ``exchange``. During a call
    both belong to the client; in between they belong to the worker.

    Attributes:
        pulled, pushed: float32 [P + Q], parameters, then BatchNorm's statistics; the same arrays for the whole life of
            the client, because the model computes in them.
    """

    pulled: Vector
    pushed: Vector

    def join(self) -> Turn | None:
        """Join the run and return the first turn; blocks until it is due. Returns None if there is nothing left to do.

        Raises UsageError if this host does not belong to the run, StageSwitch if another exchange has its place."""
        ...

    def exchange(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        """Exchange the gradient of a turn and return the next turn; blocks until it is due. None ends the worker.

        Raises MustRejoin and StageSwitch."""
        ...

    def poll_cancelled(self, turn: Turn) -> bool:
        """Return whether the gradient of this turn would be refused. Called between two micro-batches, so it is cheap."""
        ...

    def give_up(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        """Report a cancelled turn, which has no gradient, and return the next turn; blocks until it is due.

        Returns None if there is nothing left to do. Raises MustRejoin."""
        ...

    def close(self) -> None:
        """Close all connections."""
        ...
