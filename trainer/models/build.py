"""A spec's network, drawn from a run's seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, word
from trainer.models.base import ModelInput, ModelSpec
from trainer.models.tasks import Task


@dataclass(frozen=True)
class Built:
    """A network on the CPU in float32, in train mode, and its task. targets: whether that is to fit the rows' targets."""

    model: nn.Module
    task: Task
    targets: bool = False


def build(spec: ModelSpec, inputs: ModelInput, seed: int) -> Built:
    """Make a network for the images of a shard set.

    The same seed gives the same bits whatever was drawn from torch's generator before, and leaves it as it was. Raises
    UsageError for images that the model does not take, and for rows without what it is to learn."""
    targets = spec.regresses and inputs.has_targets
    if not targets and not inputs.has_labels:
        beside = "; a linear model fits its targets" if inputs.has_targets else ""
        raise UsageError(f"the rows of --shards have no labels to learn, as the set was made by --unlabelled{beside}")
    with torch.random.fork_rng(devices=[]):
        # The CPU's generator only: torch.manual_seed would re-seed those of the devices, which the fork leaves out.
        torch.default_generator.manual_seed(word(seed, Purpose.INITIALISATION))
        model = spec.make(inputs.shape, 1 if targets else inputs.num_classes)
    return Built(model, spec.task(), targets)
