"""The settings of the virtual cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.core.command_line import seed
from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, option
from trainer.simulation.failures import FORM, Failure, parse_failures
from trainer.simulation.profiles import PROFILES, Homogeneous, Profile, parse_profile

_PROFILES = "; ".join(f"{kind.form}: {kind.summary}" for kind in PROFILES.values())


@dataclass(frozen=True)
class Simulated(Spec):
    """The settings of a run in virtual time: computation, workers, step times, network and scripted failures."""

    compute: Literal["none", "quadratic", "real"] = option(
        "real",
        "none: a schedule without numbers; quadratic: the gradients of a toy loss; real: those of the model on the shards",
    )
    workers: int | None = option(
        None, "virtual workers, over which the shards are dealt", metavar="N", least=1, shown="as many as shards"
    )
    rows: int = option(50_000, "examples of the set, where there are no --shards", metavar="R", least=1)
    profile: Profile = option(
        Homogeneous(), f"how long a step takes. {_PROFILES}", metavar="NAME", parse=parse_profile, shown="homogeneous"
    )
    step_ms: float = option(100.0, "of an ordinary step", metavar="MS", above=0)
    latency_ms: float = option(0.0, "of a message", metavar="MS", least=0)
    bandwidth_mbps: float | None = option(
        None,
        "megabits a second of each server's link, a direction, which all workers share",
        metavar="M",
        above=0,
        shown="without limit",
    )
    schedule_seed: int | None = option(
        None, "of the time that steps take", metavar="S", least=0, parse=seed, shown="that of --seed"
    )
    failures: tuple[Failure, ...] = option(
        (), f"scripted failures, a list of {FORM}", metavar="LIST", parse=parse_failures, shown="none"
    )

    def check(self, num_workers: int) -> None:
        """Raise UsageError for a failure of a worker that does not exist."""
        for failure in self.failures:
            if failure.worker is not None and failure.worker >= num_workers:
                raise UsageError(f"--failures {failure}: the run has workers 0..{num_workers - 1}")

    def to_json(self) -> dict[str, Any]:
        """Return plain values; profile and failures as written on the command line."""
        profile = self.profile.name + (f":{self.profile.parameter}" if self.profile.parameter else "")
        return self.params() | {"profile": profile, "failures": ",".join(map(str, self.failures))}
