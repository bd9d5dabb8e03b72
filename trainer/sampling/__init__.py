"""Samplers: which of a worker's rows are in a mini-batch. Pure decisions, one file each."""

from __future__ import annotations

from pipeline.core.specs import registry
from trainer.sampling.balanced import BalancedSampler
from trainer.sampling.base import Sampler
from trainer.sampling.bernoulli import BernoulliSampler
from trainer.sampling.curriculum import CurriculumSampler
from trainer.sampling.data_aware import DataAwareSampler
from trainer.sampling.recency import RecencySampler
from trainer.sampling.representative import RepresentativeSampler
from trainer.sampling.shuffle import ShuffleSampler
from trainer.sampling.sliding_window import SlidingWindowSampler
from trainer.sampling.weighted import WeightedSampler

SAMPLERS: dict[str, type[Sampler]] = registry(
    ShuffleSampler,
    BernoulliSampler,
    BalancedSampler,
    RepresentativeSampler,
    WeightedSampler,
    CurriculumSampler,
    RecencySampler,
    SlidingWindowSampler,
    DataAwareSampler,
)

__all__ = ["SAMPLERS", "Sampler"]
