"""A trainer on committed shard sets, by parameter servers, all-reduce or decentralised averaging.

Its API: ``train(config) -> Result``, ``load(run) -> Classifier``, ``torch_dataset(shards, worker)``.

Importing it loads no torch."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api import train
    from trainer.config import Config, Data, Optimiser, Processes, RunSpec
    from trainer.data.torch_dataset import torch_dataset
    from trainer.inference.classifier import Classifier, load
    from trainer.options import Options
    from trainer.runlog.result import Result

if sys.argv[:1] == ["-m"]:  # python -m: the working folder, which is first on the path, may hold another pipeline
    sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
    from pipeline.core.import_path import leave_working_folder

    del sys.path[0]
    leave_working_folder(__name__, __file__)

_HOMES = {
    "train": "trainer.api",
    "Config": "trainer.config",
    "Data": "trainer.config",
    "Optimiser": "trainer.config",
    "Processes": "trainer.config",
    "RunSpec": "trainer.config",
    "torch_dataset": "trainer.data.torch_dataset",
    "Classifier": "trainer.inference.classifier",
    "load": "trainer.inference.classifier",
    "Options": "trainer.options",
    "Result": "trainer.runlog.result",
}

__all__ = [
    "Classifier",
    "Config",
    "Data",
    "Optimiser",
    "Options",
    "Processes",
    "Result",
    "RunSpec",
    "load",
    "torch_dataset",
    "train",
]


def __getattr__(name: str) -> Any:
    """The public names, loaded when they are first used."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
