"""Step-time distributions of virtual workers. The time of a step is a pure function of (seed, worker, clock)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError, UsageError
from pipeline.core.seeds import Purpose, generator

# Virtual cores of the nine machines of the thesis's cluster #C2. Step times are inversely proportional to them.
C2_CORES = (8, 8, 8, 8, 8, 4, 4, 2, 2)
MOST = 1e100  # parameter of a profile


@dataclass(frozen=True)
class Profile:
    """A step-time distribution. parameter: the text after the colon of --profile."""

    name: ClassVar[str]
    form: ClassVar[str]
    summary: ClassVar[str]

    parameter: str = ""

    @abstractmethod
    def seconds(self, step_s: float, seed: int, worker: int, clock: int) -> float:
        """Return the seconds of a step.

        Args:
            step_s: seconds of an ordinary step.
            seed: of the schedule.
            worker: number of the worker.
            clock: number of the step.
        """

    def check(self) -> None:
        """Raise UsageError for an invalid parameter."""
        if self.parameter:
            raise UsageError(f"--profile {self.name} takes no parameter after a colon, got {self.parameter}")

    def number(self, meaning: str) -> float:
        """Return the parameter as a positive number with which no time is infinite. Raises UsageError."""
        try:
            value = float(self.parameter)
        except ValueError:
            value = 0.0
        if not 1 / MOST <= value <= MOST:
            raise UsageError(
                f"--profile {self.form}: {meaning} must be a positive number of {1 / MOST:g} to {MOST:g}, got"
                f" {self.parameter!r}"
            )
        return value


class Homogeneous(Profile):
    name = "homogeneous"
    form = "homogeneous"
    summary = "equal step times"

    def seconds(self, step_s: float, seed: int, worker: int, clock: int) -> float:
        return step_s


class OneSlow(Profile):
    name = "one-slow"
    form = "one-slow:F"
    summary = "worker 0 is F times slower"

    def check(self) -> None:
        self.number("F")

    def seconds(self, step_s: float, seed: int, worker: int, clock: int) -> float:
        return step_s * (self.number("F") if worker == 0 else 1.0)


class MixedCluster(Profile):
    """A heterogeneous cluster: workers are assigned to the nine machines of C2_CORES in turn."""

    name = "mixed"
    form = "mixed"
    summary = "machines with 8, 4 and 2 cores in the ratio 5:2:2, as in the thesis's cluster #C2"

    def seconds(self, step_s: float, seed: int, worker: int, clock: int) -> float:
        return step_s * C2_CORES[0] / C2_CORES[worker % len(C2_CORES)]


class Exponential(Profile):
    """The exponential distribution of Dutta et al. 2018, without its shift."""

    name = "exponential"
    form = "exponential:RATE"
    summary = "an exponential distribution with RATE steps per second"

    def check(self) -> None:
        self.number("RATE")

    def seconds(self, step_s: float, seed: int, worker: int, clock: int) -> float:
        return float(generator(seed, Purpose.STEP_TIME, worker, clock).exponential(1 / self.number("RATE")))


class LogNormal(Profile):
    name = "lognormal"
    form = "lognormal:SIGMA"
    summary = "a log-normal distribution of the same mean, with standard deviation SIGMA of the logarithm"

    def check(self) -> None:
        self.number("SIGMA")

    def seconds(self, step_s: float, seed: int, worker: int, clock: int) -> float:
        sigma = self.number("SIGMA")
        exponent = generator(seed, Purpose.STEP_TIME, worker, clock).normal(-sigma * sigma / 2, sigma)
        return step_s * float(np.exp(exponent))


class Trace(Profile):
    """Recorded step times: worker w cycles through the times of worker w mod n of a real run with n workers."""

    name = "trace"
    form = "trace:RUN"
    summary = "the step times of a real run, in their order"

    def check(self) -> None:
        if not self.parameter:
            raise UsageError(f"--profile {self.form}: give the folder of a run after the colon")
        with suppress(NotADirectoryError):
            if self._times:
                return
        raise DataError(f"--profile {self.form}: {self.parameter} contains no run with pushes")

    @cached_property
    def _times(self) -> Mapping[int, npt.NDArray[np.float64]]:
        """Return the step times of each worker, float64 [steps], in seconds. Workers are renumbered from 0 without gaps."""
        from trainer.home.place import place_of
        from trainer.run_files import PUSHES
        from trainer.runlog.read import read_pushes

        pushes = read_pushes(place_of(self.parameter) / PUSHES, ["worker", "step_s"])
        pushes = pushes[pushes["step_s"] > 0]
        workers = enumerate(sorted(pushes["worker"].unique()))
        return {index: pushes.loc[pushes["worker"] == worker, "step_s"].to_numpy() for index, worker in workers}

    def seconds(self, step_s: float, seed: int, worker: int, clock: int) -> float:
        times = self._times[worker % len(self._times)]
        return float(times[clock % len(times)])


PROFILES: dict[str, type[Profile]] = {
    kind.name: kind for kind in (Homogeneous, OneSlow, MixedCluster, Exponential, LogNormal, Trace)
}


def parse_profile(text: str) -> Profile:
    """Parse a profile such as ``one-slow:4``. Raises UsageError, and DataError for a trace without a run."""
    name, _, parameter = text.partition(":")
    if name not in PROFILES:
        forms = ", ".join(kind.form for kind in PROFILES.values())
        raise UsageError(f"--profile must be one of {forms}; got {text!r}")
    profile = PROFILES[name](parameter)
    profile.check()
    return profile
