"""The metadata of a model file, which suffice to make its network and to normalise its inputs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

import numpy as np

from pipeline.core.json_values import build, parse_object
from pipeline.core.shardset.layout import MAX_CLASSES, MAX_IMAGE_BYTES, Dtype

ENTRY = "model"  # the only entry, because safetensors does not order several


@dataclass(frozen=True)
class ModelMetadata:
    """The entry ``model`` in the metadata of a model file, as JSON.

    Attributes:
        network: name and flags of the model, as in config.json.
        shape: channels, height and width of an image.
        classes: number of classes; None for a model of real targets.
        mean: numbers in 0..255 that are subtracted from images: the mean of each channel of the training images [C], the
            mean of each of their pixels [C, H, W], or zeros [C].
        class_names: name of each class, by its number; empty if the shard set names none.
        dtype: uint8 or float32, the numbers of the training images; None in files of earlier versions.
    """

    network: dict[str, Any]
    shape: list[int]
    classes: int | None
    mean: list[float] | list[list[list[float]]]
    class_names: list[str] = field(default_factory=list)
    dtype: str | None = None

    @property
    def chw(self) -> tuple[int, int, int]:
        channels, height, width = self.shape
        return channels, height, width

    @property
    def has_mean_image(self) -> bool:
        """Return whether the mean is that of each pixel [C, H, W], not of each channel [C]."""
        return isinstance(self.mean[0], list)

    @property
    def training_dtype(self) -> str:
        """Return uint8 or float32. In files of earlier versions only real-valued features have the shape of 1x1 images."""
        return self.dtype or ("float32" if self.chw[1:] == (1, 1) else "uint8")

    def to_header(self) -> dict[str, str]:
        """Return the metadata as a model file holds them."""
        optional = ("class_names", "dtype")
        values = {name: value for name, value in asdict(self).items() if value or name not in optional}
        return {ENTRY: json.dumps(values)}


def from_header(metadata: Mapping[str, str]) -> ModelMetadata:
    """Read the metadata of a model file. Raises KeyError, TypeError or ValueError if they are damaged or of another program.

    metadata: text by name."""
    about = build(ModelMetadata, parse_object(metadata[ENTRY]))
    is_possible = len(about.shape) == 3 and min(about.shape) > 0 and math.prod(about.shape) <= MAX_IMAGE_BYTES
    if not is_possible or (about.classes is not None and not 1 <= about.classes <= MAX_CLASSES):
        raise ValueError(f"images of shape {about.shape} in {about.classes} classes")
    mean = np.array(about.mean, np.float64)  # raises ValueError for lists of unequal lengths
    if mean.shape not in (about.chw[:1], about.chw):
        raise ValueError(f"means of shape {list(mean.shape)} for images of shape {about.shape}")
    if about.class_names and len(about.class_names) > (about.classes or 0):
        raise ValueError(f"{len(about.class_names)} names of {about.classes} classes")
    if about.dtype not in (None, *get_args(Dtype)):
        raise ValueError(f"images of {about.dtype}")
    return about
