"""The virtual seconds of every step of a run."""

from __future__ import annotations

from trainer.config import Config, RunFacts
from trainer.simulation.options import SimulationSettings


class StepTimes:
    """The step times that the settings of the virtual cluster define, the same whenever they are asked for."""

    def __init__(self, config: Config, facts: RunFacts, simulated: SimulationSettings) -> None:
        self.simulated = simulated
        self.seed = config.run.seed if simulated.schedule_seed is None else simulated.schedule_seed
        # Step times are proportional to the mini-batch, which differs between workers of a set with ratios. Profiles
        # with absolute times (trace, exponential) ignore this.
        batches = config.worker_batches(facts.num_workers, facts.ratios) if facts.ratios else (1,) * facts.num_workers
        self.shares = [batch * facts.num_workers / sum(batches) for batch in batches]

    def seconds(self, worker: int, clock: int) -> float:
        """Return the virtual seconds of a worker's step, which the profile defines."""
        ordinary_s = self.simulated.step_ms / 1000 * self.shares[worker]
        return self.simulated.profile.seconds(ordinary_s, self.seed, worker, clock)
