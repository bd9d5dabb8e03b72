"""The options of runs whose workers exchange examples."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, option
from trainer.gossip import SELECTORS


@dataclass(frozen=True, kw_only=True)
class GossipOptions(Spec):
    """The options of a run whose workers exchange examples."""

    gossip: int = option(
        0,
        "examples that each worker gives to all others once per pass over its rows, by DataGossip; 0: none",
        metavar="K",
        least=0,
        advanced=True,
    )
    gossip_every: int = option(
        4,
        "--gossip: mini-batches of its own rows that a worker makes between two of other workers' examples",
        metavar="F",
        least=1,
        advanced=True,
    )
    selector: str = option(
        "random",
        "--gossip: examples that a worker gives: random; static: the same random ones in every round; hem: of the greatest"
        " losses; spl: below a growing threshold, by their losses; ab: by the variance of their losses; active-bias: by"
        " sqrt(v + v^2/t) of the variance v of t losses",
        metavar="NAME",
        check=lambda name: name in SELECTORS,
        expected=" or ".join(SELECTORS),
        advanced=True,
    )
    gossip_signal: Literal["end", "start"] = option(
        "end",
        "--gossip: time of a worker's selection: end of each pass over its rows; start: also before the first pass, with"
        " the pass that begins as the epoch of spl",
        advanced=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gossip:
            return
        for item in fields(GossipOptions):
            if getattr(self, item.name) != item.default:
                flag = f"--{item.name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} is for runs whose workers exchange examples: give --gossip K, or leave it out"
                )

    def identity(self) -> dict[str, object]:
        """Return the fields that a resumed run must not change; without gossip none of these."""
        values = super().identity()
        own = set() if self.gossip else set(GossipOptions.__dataclass_fields__)
        return {name: value for name, value in values.items() if name not in own}
