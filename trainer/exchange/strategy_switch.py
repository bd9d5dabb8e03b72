"""Strategy-Switch: all-reduce at first, asynchronous updates on servers later (Provatas 2024, chapter 4)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from pipeline.core.errors import UsageError
from pipeline.core.specs import option
from trainer.exchange.all_reduce import AllReduce
from trainer.exchange.base import Exchange
from trainer.exchange.parameter_server import ParameterServer
from trainer.exchange.switching import Switching
from trainer.protocols.asp import ASP
from trainer.protocols.base import Protocol
from trainer.protocols.bsp import BSP


def parse_alpha(text: str) -> float | None:
    """Return the value of --alpha, None for auto. Raises UsageError."""
    try:
        return None if text == "auto" else float(text)
    except ValueError:
        raise UsageError(f"--alpha must be auto or a number from 0 to 1, got {text!r}") from None


@dataclass(frozen=True)
class StrategySwitch(Switching):
    """All-reduce for the first epochs of a run, then ASP on servers, which are idle until then.

    alpha is the share of the epochs by all-reduce, rounded down to whole epochs. If it is None, the empirical rule of
    the thesis decides (trainer.coordination.switch_rule), from the losses at the ends of epochs: on the evaluation rows,
    as in the thesis, or on a share of the training rows that no worker trains on."""

    name: ClassVar[str] = "strategy-switch"
    server: ClassVar[str] = "trainer.server.stages"
    worker_timeout_s: ClassVar[float] = AllReduce.worker_timeout_s  # workers of the first stage wait for each other
    summary: ClassVar[str] = "all-reduce until the loss changes little, then asp on the servers"

    alpha: float | None = option(
        None,
        "share of the epochs by all-reduce; auto: until the loss of --switch-on changes less than --switch-threshold",
        metavar="SHARE",
        least=0,
        most=1,
        parse=parse_alpha,
        shown="auto",
    )
    switch_window: int = option(
        5, "epochs over which --alpha auto averages the relative change of the loss", metavar="EPOCHS", least=1
    )
    switch_threshold: float = option(
        1.0, "mean relative change below which --alpha auto switches, in percent", metavar="PERCENT", above=0
    )

    switch_on: Literal["evaluation", "holdout"] = option(
        "evaluation",
        "loss that --alpha auto reads: on the evaluation rows, or on training rows that are held out of the training",
    )
    holdout_share: float = option(
        0.05, "share of the training rows that --switch-on holdout holds out", metavar="SHARE", above=0, most=0.5
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.switch_on == "holdout" and self.alpha is not None:
            raise UsageError(
                f"--switch-on holdout is read by --alpha auto only: leave it out, or leave out --alpha {self.alpha:g}"
            )

    @property
    def held_out_share(self) -> float:
        return self.holdout_share if self.switch_on == "holdout" else 0.0

    @property
    def switches_by_rule(self) -> bool:
        return self.alpha is None

    def stages(self) -> tuple[tuple[Exchange, Protocol], ...]:
        return (AllReduce(), BSP()), (ParameterServer(), ASP())

    def switch_step(self, steps: int, steps_per_epoch: int) -> int:
        if self.alpha == 1:
            return steps
        return int(Fraction(str(self.alpha)) * steps / steps_per_epoch) * steps_per_epoch

    def switch_reason(self) -> str:
        return f"alpha {self.alpha:g} of the epochs"
