"""Events of the course of a run: its starts and ends, stages and generations, and its troubles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.runlog.kinds.base import LogEvent


@dataclass(frozen=True, kw_only=True)
class StartEvent(LogEvent):
    """A start of the run.

    Attributes:
        config: the configuration in JSON.
        plan: the trainer.plan.RunPlan in JSON; None in older logs.
        versions: versions of libraries.
        made: time, command and host of the start.
        resumed_from: version of the checkpoint from which it continues, None for a new run.
        simulated: settings of the virtual cluster, for virtual-time runs.
    """

    kind: str = field(default="start", init=False)
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    plan: dict[str, Any] | None = None
    versions: dict[str, Any] | None = None
    made: dict[str, str] = field(default_factory=dict)
    resumed_from: int | None = None
    simulated: dict[str, Any] | None = None

    def resumes_from(self) -> int | None:
        return self.resumed_from or 0


@dataclass(frozen=True, kw_only=True)
class GenerationEvent(LogEvent):
    """The servers have loaded the checkpoint of a version, which begins a generation.

    models: workers whose models the checkpoint has, in an exchange among neighbours; None in others, and older logs."""

    kind: str = field(default="generation", init=False)
    version: int = field()
    generation: int = field()
    models: list[int] | None = None

    def resumes_from(self) -> int | None:
        return self.version


@dataclass(frozen=True, kw_only=True)
class StageEvent(LogEvent):
    """A stage of a run with a switch begins.

    Attributes:
        stage: its number, from 0.
        exchange, protocol: names.
        version, epoch, seconds: updates, global epochs and training time of the checkpoint with which it begins.
        learning_rate, momentum: the single-process rate at the start of the schedule; the coefficient.
        reason: why it begins, in words.
    """

    kind: str = field(default="stage", init=False)
    version: int = field()
    stage: int
    exchange: str
    protocol: str
    epoch: float
    seconds: float
    learning_rate: float | None = None
    momentum: float | None = None
    reason: str


@dataclass(frozen=True, kw_only=True)
class RestartEvent(LogEvent):
    """A process was started again. role: worker, server, evaluator or fork server; index: its number; cause: in words."""

    kind: str = field(default="restart", init=False)
    role: str
    index: int
    cause: str | None = None


@dataclass(frozen=True, kw_only=True)
class RollbackEvent(LogEvent):
    """All servers have returned to a checkpoint. from_version, to_version: the versions; cause: in words."""

    kind: str = field(default="rollback", init=False)
    from_version: int
    to_version: int
    cause: str | None = None

    def resumes_from(self) -> int | None:
        return self.to_version


@dataclass(frozen=True, kw_only=True)
class WarningEvent(LogEvent):
    """A line that the terminal shows too."""

    kind: str = field(default="warning", init=False)
    message: str


@dataclass(frozen=True, kw_only=True)
class ConvergedEvent(LogEvent):
    """The tolerance has ended the run. accepted: accepted gradients so far; seconds: training time."""

    kind: str = field(default="converged", init=False)
    accepted: int = 0
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class EarlyStopEvent(LogEvent):
    """The evaluations have ended the run before its budget was spent.

    Attributes:
        version, epoch, seconds: of the last checkpoint.
        patience, min_delta: the options.
        best_epoch: the epoch of the last improvement; None if no loss was finite.
        best_loss: the loss on the evaluation rows after that epoch, without the L2 term.
    """

    kind: str = field(default="early_stop", init=False)
    version: int = field()
    epoch: int
    seconds: float | None = None
    patience: int
    min_delta: float = 0.0
    best_epoch: int | None = None
    best_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class EndEvent(LogEvent):
    """A start of the run has ended.

    Attributes:
        cause: finished, interrupted or failed.
        seconds: training time.
        updates: the version; older logs have it under this name alone.
        error: the error message of a failed run.
    """

    kind: str = field(default="end", init=False)
    cause: str | None = None
    seconds: float | None = None
    updates: int | None = None
    error: str | None = None

    def version_or_zero(self) -> int:
        return self.version if self.version is not None else self.updates or 0
