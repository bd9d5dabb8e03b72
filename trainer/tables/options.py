"""The options that all commands have that compute a table from images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.core.command_line import image_shape
from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, option
from pipeline.input.channels import check_channels


@dataclass(frozen=True)
class TableOptions(Spec):
    """The rows, the table and the device of a command, with either input or shards."""

    output: str = option(help="Parquet file of the table, local, hdfs:// or s3://", metavar="URI", may_change=True)
    input: str | None = option(
        None, "folder, file or glob pattern of images, as for the sharding jobs", metavar="URI", may_change=True
    )
    shards: str | None = option(
        None, "committed shard set whose training images to read, instead of --input", metavar="URI", may_change=True
    )
    format: str | None = option(None, "layout of --input", metavar="NAME", shown="detected")
    image_shape: tuple[int, int, int] | None = option(
        None,
        "shape of images in files that do not contain it",
        metavar="CxHxW",
        parse=image_shape,
        shown="3x32x32",
        advanced=True,
    )
    channels: int | None = option(
        None, "convert the images of --input to 1 or 3 channels", shown="unchanged", advanced=True
    )
    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "device of the computation; auto: a GPU if available", may_change=True
    )
    threads: int = option(
        0,
        "CPU threads, of which another number can change the rounding; 0 uses all cores of this host",
        least=0,
        may_change=True,
        advanced=True,
    )
    overwrite: bool = option(False, "replace a table of another configuration or input", may_change=True)
    quiet: bool = option(False, "print only the result and errors", may_change=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.input is None) == (self.shards is None):
            raise UsageError("give the images to read: either --input or --shards")
        if self.shards is not None and (self.format or self.image_shape or self.channels):
            raise UsageError(
                "--shards contains the layout of its images: leave out --format, --image-shape and --channels"
            )
        check_channels(self.channels)


ROWS = ("input", "shards", "format", "image_shape", "channels", "output")  # the group of flags for the rows, in order
