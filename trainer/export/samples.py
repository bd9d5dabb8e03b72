"""The rows of a shard file as samples of other formats.

Shapes: N rows, C channels, H and W pixels."""

from __future__ import annotations

import io
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.core.machine import usable_cores
from pipeline.core.shardset.parts import ShardFile
from pipeline.core.shardset.schema import TARGET_COLUMN
from trainer.data.shard_file import TABLE, row_groups
from trainer.data.shards import Shards

# numpy types of the columns beside the image, in the order of exported files
TYPES = {
    "label": "int64", "id": "int64", "target": "float32", "coarse_label": "int64", "copy": "int32", "neighbourhood": "int32",
}  # fmt: skip
PNG_CHANNELS = (1, 3)
PARTS_PER_CORE = 4
PNG_LEVEL = 1  # of compression: twice as fast as the default level, for files a few percent larger


@dataclass(frozen=True)
class Samples:
    """The rows of a shard file.

    Attributes:
        columns: arrays [N] by name: id, copy (0 for the row itself), and label, coarse_label, target or
            neighbourhood, if the set has them.
        images_NCHW: uint8, or real-valued features in float32.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    images_NCHW: npt.NDArray[Any]

    def __len__(self) -> int:
        return len(self.images_NCHW)


def are_pictures(shards: Shards) -> bool:
    """Return whether the rows of a set can be PNG files."""
    return shards.layout.dtype == "uint8" and shards.shape[0] in PNG_CHANNELS


def read_samples(shards: Shards, file: ShardFile) -> Samples:
    """Read a file of a set and check it against the manifest. Keeps the file and its images in memory.

    Raises DataError for a damaged file, OSError if it cannot be read."""
    # The parts of a file without rows, which may have no row group.
    present = ["id", "copy", *["label"] * shards.has_labels, *[TARGET_COLUMN] * shards.has_targets]
    parts: list[dict[str, Any]] = [{name: np.empty(0, np.int64) for name in present}]
    images: list[npt.NDArray[Any]] = [np.empty((0, *shards.shape), shards.layout.dtype)]
    for columns, data in row_groups(shards, file, TABLE):
        columns = columns | {"id": columns["id"] + shards.first_id(file)}
        columns.setdefault("copy", np.zeros(len(data), np.int32))
        if not shards.has_labels:
            del columns["label"]
        parts.append(columns)
        images.append(data.view(shards.layout.dtype).reshape(-1, *shards.shape))
    parts = parts[1:] or parts
    return Samples({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, np.concatenate(images))


def make_png(image_CHW: npt.NDArray[np.uint8]) -> bytes:
    """Return an image of 1 or 3 channels as a PNG file."""
    buffer = io.BytesIO()
    pixels = image_CHW[0] if len(image_CHW) == 1 else np.moveaxis(image_CHW, 0, -1)
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()


def make_pngs(images_NCHW: npt.NDArray[np.uint8]) -> list[bytes]:
    """Return images as PNG files. The compression of large images uses all cores."""
    cores = usable_cores()
    # A task for each image would cost as much as the compression of a small one.
    parts = np.array_split(images_NCHW, PARTS_PER_CORE * cores)
    with ThreadPoolExecutor(cores) as pool:
        return [png for pngs in pool.map(lambda part: list(map(make_png, part)), parts) for png in pngs]
