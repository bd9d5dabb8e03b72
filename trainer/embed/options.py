"""The options of ``python -m trainer embed``."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.core.command_line import seed as seed_number
from pipeline.core.specs import option
from trainer.tables.options import TableOptions


@dataclass(frozen=True)
class Embedding(TableOptions):
    """The options of an embedding run.

    The optimiser's defaults are the paper's, which does not give the number of epochs."""

    fit_rows: int = option(
        50_000, "approximate number of rows that the auto-encoder is trained on, drawn by id", least=1
    )
    epochs: float = option(1.0, "passes over the training rows", above=0)
    batch_size: int = option(100, "rows per step", least=2)
    learning_rate: float = option(5e-3, "learning rate of Adam", above=0)
    weight_decay: float = option(5e-4, "weight decay of Adam", least=0, advanced=True)
    seed: int = option(0, "seed of initial parameters, drawn rows and their order", parse=seed_number)
    checkpoint_every_s: float = option(
        30.0, "seconds between checkpoints", metavar="SECONDS", above=0, may_change=True, advanced=True
    )
