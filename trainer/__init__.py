"""A parameter-server trainer that lives on committed shards: ``train(config) -> Result``. Loads no torch by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api import train
    from trainer.config import Config, Data, Optimiser, Processes, RunSpec
    from trainer.options import Options
    from trainer.runlog.result import Result

_HOMES = {
    "train": "trainer.api",
    "Config": "trainer.config",
    "Data": "trainer.config",
    "Optimiser": "trainer.config",
    "Processes": "trainer.config",
    "RunSpec": "trainer.config",
    "Options": "trainer.options",
    "Result": "trainer.runlog.result",
}

__all__ = ["Config", "Data", "Optimiser", "Options", "Processes", "Result", "RunSpec", "train"]


def __getattr__(name: str) -> Any:
    """The public names, loaded when they are first used."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
