"""The options of a run that divides the rows of its set over the workers anew."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pipeline.core.errors import UsageError
from pipeline.core.importance import HEURISTIC_HELP, IGNORE_HELP, MEASURE_HELP, Heuristic, Measure
from pipeline.core.specs import Spec, option


@dataclass(frozen=True, kw_only=True)
class RepartitionOptions(Spec):
    """The options of a run that repartitions."""

    repartition: Literal["fixed", "random", "importance"] = option(
        "fixed",
        "rows of a worker: fixed: its shard; random: a new random deal of all rows in every epoch; importance: the random"
        " deals of the warm-up, then stripes or blocks of the rows by their losses, anew after every interval",
        advanced=True,
    )
    warmup_epochs: int = option(
        10, "--repartition importance: number of first epochs with a random deal", least=1, advanced=True
    )
    interval: int = option(
        5, "--repartition importance: number of passes over its rows that a worker makes between two divisions", least=1,
        advanced=True,
    )  # fmt: skip
    importance: Measure = option("average", f"--repartition importance: {MEASURE_HELP}", advanced=True)
    heuristic: Heuristic = option("stripes", f"--repartition importance: {HEURISTIC_HELP}", advanced=True)
    ignore_epochs: int = option(5, f"--repartition importance: {IGNORE_HELP}", least=0, advanced=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repartition == "importance" and self.ignore_epochs >= self.warmup_epochs:
            raise UsageError(
                f"--ignore-epochs {self.ignore_epochs} leaves no losses of --warmup-epochs {self.warmup_epochs}: give fewer"
            )
        if self.repartition != "importance":
            self._refuse_unused()

    def _refuse_unused(self) -> None:
        """Raise UsageError for an option that has no effect, because only ``importance`` has intervals."""
        for item in fields(RepartitionOptions):
            if item.name != "repartition" and getattr(self, item.name) != item.default:
                flag = f"--{item.name.replace('_', '-')}"
                raise UsageError(f"{flag} is for --repartition importance, not {self.repartition}: leave it out")

    def identity(self) -> dict[str, object]:
        """Return the fields that a resumed run must not change; without repartitioning none of these."""
        values = super().identity()
        if self.repartition == "importance":
            return values
        unused = {item.name for item in fields(RepartitionOptions)}
        if self.repartition == "random":
            unused.remove("repartition")
        return {name: value for name, value in values.items() if name not in unused}
