"""The options of ``python -m trainer embed``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.core.command_line import image_shape
from pipeline.core.command_line import seed as seed_number
from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, option
from pipeline.input.channels import check_channels


@dataclass(frozen=True)
class Embedding(Spec):
    """The options of an embedding run, with either input or shards.

    The optimiser's defaults are the paper's, which does not give the number of epochs."""

    output: str = option(help="the table, one Parquet file: local, hdfs:// or s3://", metavar="TABLE", may_change=True)
    input: str | None = option(
        None, "folder, file or pattern of images, as the jobs take it", metavar="URI", may_change=True
    )
    shards: str | None = option(None, "a committed shard set instead", metavar="URI", may_change=True)
    format: str | None = option(None, "layout of --input", metavar="NAME", shown="recognised by itself")
    image_shape: tuple[int, int, int] | None = option(
        None, "image size where files do not tell", metavar="CxHxW", parse=image_shape, shown="3x32x32"
    )
    channels: int | None = option(
        None, "1 or 3, to which images of --input are converted", metavar="C", shown="as they are"
    )
    fit_rows: int = option(
        50_000, "rows that the auto-encoder learns from, about, drawn by their ids", metavar="N", least=1
    )
    epochs: float = option(1.0, "passes over them", metavar="E", above=0)
    batch_size: int = option(100, "rows of a step", metavar="B", least=2)
    learning_rate: float = option(5e-3, "of Adam", metavar="A", above=0)
    weight_decay: float = option(5e-4, "of Adam", metavar="W", least=0)
    seed: int = option(0, "of initial parameters, rows and their order", metavar="S", parse=seed_number)
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "where it computes; auto: on a GPU where there is one", may_change=True
    )
    threads: int = option(
        0, "of the computation on the CPU; another number may round otherwise", metavar="T", least=0, may_change=True,
        shown="0: this host's cores",
    )  # fmt: skip
    checkpoint_every_s: float = option(30.0, "between checkpoints", metavar="SECONDS", above=0, may_change=True)
    overwrite: bool = option(False, "replace a table of another configuration or input", may_change=True)
    quiet: bool = option(False, "print the end and errors only", may_change=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.input is None) == (self.shards is None):
            raise UsageError("give the images to embed: either --input or --shards")
        if self.shards is not None and (self.format or self.image_shape or self.channels):
            raise UsageError("--shards tell their own layout: leave --format, --image-shape and --channels out")
        check_channels(self.channels)
