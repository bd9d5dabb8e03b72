"""The network of a spec, initialised from a run's seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, word
from trainer.models.base import ModelInput, ModelSpec
from trainer.models.devices import preserve_generator
from trainer.models.tasks import Task


@dataclass(frozen=True)
class NetworkAndTask:
    """A float32 network on the CPU, in train mode, and its task.

    targets: whether it fits real targets instead of labels."""

    model: nn.Module
    task: Task
    targets: bool = False


def build(spec: ModelSpec, inputs: ModelInput, seed: int) -> NetworkAndTask:
    """Make a network for the images of a shard set.

    The same seed gives the same bits, independent of the state of torch's generator, which is not changed. Waits for
    a simulation in another thread.

    Raises UsageError for images that the model does not support, and for rows without the labels or targets that it
    learns."""
    targets = spec.regresses and inputs.has_targets
    if not targets and not inputs.has_labels:
        beside = "; a linear model fits its targets" if inputs.has_targets else ""
        raise UsageError(f"the rows of --shards have no labels to learn, as the set was made by --unlabelled{beside}")
    with preserve_generator():
        # Seeds the CPU's generator only: torch.manual_seed would also seed devices, which the fork does not restore.
        torch.default_generator.manual_seed(word(seed, Purpose.INITIALISATION))
        model = spec.make(inputs.shape, 1 if targets else inputs.num_classes)
    return NetworkAndTask(model, spec.task(), targets)
