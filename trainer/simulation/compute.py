"""What a virtual worker computes: nothing, the gradient of a toy loss, or that of the model on its shard."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.core.seeds import Purpose, generator
from pipeline.core.shardset.ratios import Ratios
from trainer.config import Config, Facts
from trainer.coordination.passes import Seen

Floats = npt.NDArray[np.float32]


class Computed(NamedTuple):
    """A mini-batch's gradient [P + Q] as a server takes it, its size, its mean loss and its correct predictions."""

    vector: Floats
    examples: int
    loss: float
    correct: int


class Compute:
    """start: the first parameters, float32 [P + Q]. fingerprint: of the rows, where there are any. ratios: in which workers
    draw, where they are not equal. classifies: whether there are predictions that are correct or not."""

    num_parameters: int
    num_buffers: int = 0
    fingerprint: int | None = None
    ratios: Ratios = ()
    classifies: bool = False

    def start(self) -> Floats:
        return np.zeros(self.num_parameters + self.num_buffers, np.float32)

    @abstractmethod
    def step(self, worker: int, clock: int, parameters: Sequence[Floats]) -> Computed:
        """The gradient at ``parameters``, given in the servers' parts."""

    def set_threads(self, count: int) -> None:
        """Compute with ``count`` threads from here on, where threads change how gradients are rounded."""

    def seen(self, worker: int, clock: int) -> Seen | None:
        """The rows of a mini-batch, where there are any."""
        return None


class NoCompute(Compute):
    """A schedule without numbers: one parameter, whose gradient is 0."""

    num_parameters = 1
    _NOTHING = np.zeros(1, np.float32)

    def __init__(self, config: Config, num_workers: int) -> None:
        self.sizes = config.worker_batches(num_workers)

    def step(self, worker: int, clock: int, parameters: Sequence[Floats]) -> Computed:
        return Computed(self._NOTHING, self.sizes[worker], 0.0, 0)


class Quadratic(Compute):
    """The loss is half the sum of a_i w_i^2, with curvatures a_i from 1 down to 1/100 over 64 parameters that begin at 1.
    A mini-batch of B examples adds noise of standard deviation 1/sqrt(B) to the gradient, as sampling does."""

    num_parameters = 64

    def __init__(self, config: Config, num_workers: int) -> None:
        self.seed, self.sizes = config.run.seed, config.worker_batches(num_workers)
        self.curvature = np.geomspace(1, 0.01, self.num_parameters).astype(np.float32)

    def start(self) -> Floats:
        return np.ones(self.num_parameters, np.float32)

    def step(self, worker: int, clock: int, parameters: Sequence[Floats]) -> Computed:
        values = parameters[0] if len(parameters) == 1 else np.concatenate(parameters)
        with np.errstate(over="ignore"):  # of a run that diverges, which the coordinator notices
            slope = self.curvature * values
            loss = 0.5 * float(slope @ values)
        size = self.sizes[worker]
        noise = generator(self.seed, Purpose.TOY, worker, clock).standard_normal(len(values), np.float32)
        return Computed(slope + noise * np.float32(size**-0.5), size, loss, 0)


class RealCompute(Compute):
    """The model's own gradients, in this thread: the mini-batches, augmentation and dropout of the real worker."""

    def __init__(self, config: Config, num_workers: int) -> None:
        from trainer.data.batches import Loader
        from trainer.data.deal import deal
        from trainer.data.shards import open_pinned
        from trainer.models.build import build
        from trainer.models.devices import pick_device
        from trainer.models.flat_vector import FlatModel
        from trainer.worker.step import Step

        self.set_threads(config.processes.threads or 1)
        shards = open_pinned(config.data)
        built = build(config.model, shards.inputs, config.model_seed)
        flat = FlatModel(built.model)
        self.config, self._start, self.fingerprint = config, flat.read(), shards.fingerprint
        self.num_parameters, self.num_buffers = flat.num_parameters, flat.num_buffers
        self.pulled, self.pushed = np.zeros_like(self._start), np.zeros_like(self._start)
        device = pick_device(config.processes.device, 0)
        self.model_step = Step(config, built, self.pulled, self.pushed, device, num_workers)
        self.ratios, self.classifies = shards.ratios_of(num_workers), not built.targets
        self.loaders = [
            Loader.of_run(config, shards, rows, worker, num_workers)
            for worker, rows in enumerate(deal(shards, num_workers, targets=built.targets))
        ]

    def set_threads(self, count: int) -> None:
        import torch

        torch.set_num_threads(count)

    def start(self) -> Floats:
        return self._start

    def step(self, worker: int, clock: int, parameters: Sequence[Floats]) -> Computed:
        from trainer.worker.step import step_seed

        batch = self.loaders[worker].prepare(clock)
        np.concatenate(parameters, out=self.pulled)
        outcome = self.model_step(batch, step_seed(self.config.run.seed, worker, clock))
        assert outcome, "nobody cancels it"
        return Computed(self.pushed.copy(), len(batch.labels), *outcome)

    def seen(self, worker: int, clock: int) -> Seen | None:
        return self.loaders[worker].seen(clock)


COMPUTES: dict[str, type[NoCompute] | type[Quadratic] | type[RealCompute]] = {
    "none": NoCompute,
    "quadratic": Quadratic,
    "real": RealCompute,
}


def facts_of(compute: Compute, num_workers: int, rows: int) -> Facts:
    return Facts(
        num_workers,
        rows,
        compute.num_parameters,
        compute.num_buffers,
        fingerprint=compute.fingerprint,
        ratios=compute.ratios,
        classifies=compute.classifies,
    )
