"""The options of ``sharding predict``."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.core.specs import option
from trainer.tables.options import TableOptions


@dataclass(frozen=True)
class PredictOptions(TableOptions):
    """The options of a table of predictions. The run is a positional argument of the command line."""

    run: str = option("", "folder of the run, or a model file", may_change=True)  # the digest of the model counts
    best: bool = option(False, "use the model of the best evaluation instead of the final model", may_change=True)
    batch_size: int = option(500, "images per forward pass", least=1, advanced=True)
