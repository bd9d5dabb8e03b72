"""The options that all commands have that compute a table from images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pipeline.core.command_line import image_shape, image_size
from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, option
from pipeline.core.storage.uri import names_table
from pipeline.input.channels import check_channels
from pipeline.input.resize import check_size


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
    resize: tuple[int, int] | None = option(
        None,
        "resize the images of --input, as the sharding jobs do",
        metavar="HxW",
        parse=image_size,
        shown="unchanged",
        advanced=True,
    )
    image_column: str | None = option(
        None, "column or array of the images of --input", metavar="NAME", shown="a usual name", advanced=True
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
        # The trainer reads no tables of Spark: it runs without a JVM.
        if self.input is not None and names_table(self.input):
            raise UsageError(
                f"--input {self.input} is a Spark table, and this command reads files: shard it with sharding shard,"
                " and give the set as --shards"
            )
        if (self.input is None) == (self.shards is None):
            raise UsageError("give the images to read: either --input or --shards")
        layout = (self.format, self.image_shape, self.channels, self.resize, self.image_column)
        if self.shards is not None and any(layout):
            raise UsageError(
                "--shards contains the layout of its images: leave out --format, --image-shape, --channels, --resize and"
                " --image-column"
            )
        check_channels(self.channels)
        check_size(self.resize)

    def identity(self) -> dict[str, Any]:
        # Options that earlier versions lacked count only if they are set, so that their tables stay current.
        return {name: value for name, value in super().identity().items() if name not in ADDED or value is not None}


ADDED = ("resize", "image_column")
ROWS = (
    "input",
    "shards",
    "format",
    "image_shape",
    "channels",
    *ADDED,
    "output",
)  # the group of flags for the rows, in order
