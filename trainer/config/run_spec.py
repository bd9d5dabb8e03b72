"""The options of a run about its output, length, seeds and checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.core.command_line import seed as seed_number
from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, option


@dataclass(frozen=True)
class RunSpec(Spec):
    """The output, length, seeds and checkpoints of a run. Either epochs or steps is given."""

    output: str = option(help="folder of the run, local, hdfs:// or s3://", metavar="URI", may_change=True)
    epochs: int | None = option(
        None, "length of the run in passes over the training examples", least=1, may_change=True
    )
    steps: int | None = option(
        None, "length of the run in mini-batches per worker, instead of --epochs", least=1, may_change=True
    )
    seed: int = option(
        0, "seed of initial parameters, order of examples, augmentation and dropout", least=0, parse=seed_number
    )
    model_seed: int | None = option(
        None, "seed of initial parameters alone", least=0, parse=seed_number, shown="the value of --seed", advanced=True
    )
    precision: Literal["fp32", "bf16"] = option(
        "fp32",
        "numbers of the forward and backward pass on the workers: bf16 uses torch's automatic mixed precision with"
        " bfloat16; parameters, messages, updates and evaluations stay float32",
        advanced=True,
    )
    evaluation_mode: Literal["clean", "paper"] = option(
        "clean",
        "evaluation of models: clean, or paper: with images augmented as in training and the network in training mode, as"
        " the published results of importance-aware training were measured",
        advanced=True,
    )
    stop: Literal["global", "local"] = option(
        "global",
        "end of the run: global counts the steps of all workers together, local lets every worker do its own number of"
        " steps",
        advanced=True,
    )
    patience: int | None = option(
        None,
        "end the run early after so many epochs in a row in which the loss on the evaluation rows does not improve",
        metavar="EPOCHS",
        least=1,
        may_change=True,
        shown="never end early",
        advanced=True,
    )
    min_delta: float = option(
        0.0,
        "with --patience, an epoch counts as an improvement only if the loss falls by more than this",
        least=0,
        may_change=True,
        advanced=True,
    )
    checkpoint_every_s: float = option(
        60.0, "seconds between checkpoints", metavar="SECONDS", above=0, may_change=True, advanced=True
    )
    example_ledger: bool = option(
        False,
        "keep the loss of every trained example, and whether it was predicted correctly, as Parquet in OUTPUT/examples",
        advanced=True,
    )
    epoch_checkpoints: bool = option(
        True, "also write and evaluate a checkpoint at the end of every epoch", may_change=True, advanced=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.epochs is None) == (self.steps is None):
            raise UsageError("give the length of the run: either --epochs or --steps")
        if self.patience is None and self.min_delta:
            raise UsageError(
                f"--min-delta {self.min_delta:g} is for early stopping: give --patience EPOCHS, or leave it out"
            )
        if self.patience is not None and not self.epoch_checkpoints:
            raise UsageError(
                f"--patience {self.patience} evaluates every epoch: leave out --no-epoch-checkpoints, or --patience"
            )
