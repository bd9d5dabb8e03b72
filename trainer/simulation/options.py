"""The settings of the virtual cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.core.command_line import seed
from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, option
from trainer.simulation.failures import FORM, Failure, parse_failures
from trainer.simulation.profiles import Homogeneous, Profile, parse_profile

STEP_TIMES = ("profile", "step_ms", "schedule_seed")  # fields
LONGEST_MS = 1e100  # of an option, so that no sum of times is infinite


@dataclass(frozen=True)
class SimulationSettings(Spec):
    """The settings of a run in virtual time: computation, workers, step times, network and scripted failures."""

    compute: Literal["none", "quadratic", "real"] = option(
        "real",
        "gradients to compute: none (the schedule alone), quadratic (a toy loss), or real (the model on the shards)",
    )
    workers: int | None = option(
        None,
        "virtual workers, to which the shards are dealt",
        least=1,
        shown="a worker per shard; with --resume the number that the run had",
    )
    rows: int = option(50_000, "examples of the simulated data set without --shards", least=1, advanced=True)
    profile: Profile = option(
        Homogeneous(),
        "distribution of step times",
        metavar="NAME",
        parse=parse_profile,
        shown="homogeneous",
    )
    step_ms: float = option(
        100.0,
        "milliseconds per ordinary step",
        metavar="MS",
        above=0,
        most=LONGEST_MS,
        expected=f"a positive number of at most {LONGEST_MS:g}",
        advanced=True,
    )
    latency_ms: float = option(0.0, "milliseconds per message", metavar="MS", least=0, most=LONGEST_MS, advanced=True)
    bandwidth_mbps: float | None = option(
        None,
        "megabits per second and direction of each server's link, which all workers share; without servers, of each"
        " worker's own link",
        least=1e-100,  # below it, a time could be infinite
        shown="unlimited",
        advanced=True,
    )
    schedule_seed: int | None = option(
        None, "seed of step times", least=0, parse=seed, shown="the value of --seed", advanced=True
    )
    failures: tuple[Failure, ...] = option(
        (),
        f"scripted failures, a list of {FORM}",
        metavar="LIST",
        parse=parse_failures,
        shown="none",
        advanced=True,
    )

    def failures_of(self, num_workers: int) -> tuple[Failure, ...]:
        """Return the failures that concern a number of workers, which may be fewer than the run had before a resume."""
        return tuple(each for each in self.failures if each.worker is None or each.worker < num_workers)

    def check(self, num_workers: int) -> None:
        """Raise UsageError for a failure of a worker that does not exist. num_workers: the most that the run has had."""
        for failure in self.failures:
            if failure.worker is not None and failure.worker >= num_workers:
                raise UsageError(f"--failures {failure}: the run has workers 0..{num_workers - 1}")

    def to_json(self) -> dict[str, Any]:
        """Return plain values; profile and failures as written on the command line."""
        profile = self.profile.name + (f":{self.profile.parameter}" if self.profile.parameter else "")
        return self.params() | {"profile": profile, "failures": ",".join(map(str, self.failures))}
