"""The state of a checkpoint, and the names of its files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, overload

from pipeline.core.json_values import build, parse, parse_object
from trainer.home.place import Place, StorePlace

STATE = "state.json"
EVALUATED = "evaluated"


@dataclass(frozen=True)
class RunState:
    """The state of a run at one version.

    Attributes:
        version: number of updates.
        accepted: gradients in those updates.
        examples: examples of those gradients.
        generation: the generation that wrote the checkpoint.
        epoch: global epochs so far.
        epoch_boundary: E at the end of epoch E, else None.
        final: whether the run ended here.
        clocks: applied and refused gradients by worker.
        seconds: training time so far.
        num_servers: slices of the checkpoint.
        num_parameters, num_buffers: P and Q, the parts of the flat vector.
        identity: canonical JSON of the configuration.
        memory: state of the protocol, or of the exchange if workers keep models of their own.
        passes: state of trainer.coordination.passes.
        epoch_sums: state of trainer.coordination.epoch_sums.
        parts: sizes in bytes of the files beside the slices that a complete checkpoint has, by name.
        stage: number of the stage that made the checkpoint, from 0. Its momentum is by the rule of that stage.
        ends_stage: whether that stage has ended with it. A rule that reads evaluations decides later, and is not in it.
        gossip: state of trainer.gossip.rounds.
        stragglers: state of trainer.coordination.stragglers.
        converged_steps: planned steps per worker of the run when the tolerance ended it with this checkpoint, so that a
            longer run trains on; None if it did not.
    """

    version: int
    accepted: int
    examples: int
    generation: int
    epoch: float
    epoch_boundary: int | None
    final: bool
    clocks: dict[int, int]
    seconds: float
    num_servers: int
    num_parameters: int
    num_buffers: int
    identity: str
    memory: dict[str, Any] = field(default_factory=dict)
    passes: dict[str, Any] = field(default_factory=dict)
    epoch_sums: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)
    stage: int = 0
    ends_stage: bool = False
    gossip: dict[str, Any] = field(default_factory=dict)
    stragglers: dict[str, Any] = field(default_factory=dict)
    converged_steps: int | None = None

    def __post_init__(self) -> None:
        if self.num_servers < 1 or min(self.num_parameters, self.num_buffers) < 0:
            raise ValueError(f"{self.num_servers} servers, {self.num_parameters} + {self.num_buffers} elements")
        if self.stage < 0:
            raise ValueError(f"stage {self.stage}")

    @property
    def total(self) -> int:
        """The length of the flat vector, P + Q."""
        return self.num_parameters + self.num_buffers

    @property
    def is_for_evaluation(self) -> bool:
        return self.final or self.epoch_boundary is not None

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), indent=1, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RunState:
        """Parse a state. Raises ValueError if it is malformed."""
        values = parse_object(data)
        clocks = values.get("clocks")
        if not isinstance(clocks, dict):
            raise ValueError("it has no clocks")
        return build(cls, values | {"clocks": {int(worker): clock for worker, clock in clocks.items()}})


@dataclass(frozen=True)
class EvaluationMark:
    """The evaluation of a checkpoint.

    Attributes:
        generation: the generation of the checkpoint.
        final: whether the checkpoint was the run's final one when it was evaluated.
        accuracy: share of correct predictions; None for real targets, and if nothing was measured.
        loss: None if nothing was measured, or the loss was not finite.
    """

    generation: int
    final: bool
    accuracy: float | None = None
    loss: float | None = None

    def is_of(self, state: RunState) -> bool:
        """Return whether this is the evaluation of a checkpoint.

        The evaluation of a final checkpoint stays valid when the run continues past it."""
        return self.generation == state.generation and self.final >= state.final

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> EvaluationMark:
        """Parse a mark. Raises ValueError if it is malformed."""
        return build(cls, parse(data))


def rank(accuracy: float | None, loss: float | None) -> tuple[float, float]:
    """Return the key by which evaluations are ordered; the best one has the greatest.

    The highest accuracy is best. Without an accuracy, or with 0, the lowest loss is: real targets have no accuracy, or 0 in
    older logs."""
    if accuracy:
        return accuracy, 0.0
    return 0.0, -loss if loss is not None and math.isfinite(loss) else -math.inf


@overload
def folder_of(root: Path, version: int) -> Path: ...
@overload
def folder_of(root: StorePlace, version: int) -> StorePlace: ...
def folder_of(root: Place, version: int) -> Place:
    return root / f"{version:08d}"


def slice_name(index: int, count: int, generation: int = 0) -> str:
    return f"slice-{index:03d}-of-{count:03d}-{generation}.safetensors"
