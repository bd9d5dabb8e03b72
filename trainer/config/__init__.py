"""The configuration of a run: its options by part, the whole, and the facts that follow from the shard set and the model."""

from trainer.config.config import Config
from trainer.config.data import CHANNEL, CROP_FLIP, SEPARATOR, Data
from trainer.config.facts import RunFacts, slice_bounds
from trainer.config.optimiser import ADAM, ADAPTIVE_RATE, FRESH_MOMENTUM, SGD, Optimiser
from trainer.config.processes import Processes
from trainer.config.run_spec import RunSpec

__all__ = [
    "ADAM",
    "ADAPTIVE_RATE",
    "CHANNEL",
    "CROP_FLIP",
    "FRESH_MOMENTUM",
    "SEPARATOR",
    "SGD",
    "Config",
    "Data",
    "Optimiser",
    "Processes",
    "RunFacts",
    "RunSpec",
    "slice_bounds",
]
