"""Resizing of images to --resize HxW, with the same bits on every machine.

The rule is Pillow's bilinear filter of 8-bit images: first the width, then the height, each unless it is right
already. Output i of n, from m inputs, is the mean of the inputs with weights max(0, 1 - |j + 1/2 - (i + 1/2) m / n| / s),
where s = max(1, m / n), divided by their sum and rounded to multiples of 2^-22; sums are rounded to whole numbers, half
up. The sides are stretched independently, nothing is cropped. tests/unit/test_resize.py computes the rule without
Pillow, so that a release of Pillow with another rule is noticed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

from pipeline.core.errors import UsageError
from pipeline.core.shardset.layout import MAX_IMAGE_BYTES

Size = tuple[int, int]  # height and width


def check_size(size: Size | None) -> None:
    """Raise UsageError for a size that no image can have."""
    if size is not None and not (min(size) >= 1 and 3 * size[0] * size[1] <= MAX_IMAGE_BYTES):
        raise UsageError(
            f"--resize {size[0]}x{size[1]}: height and width are at least 1, and make no larger images than"
            f" {MAX_IMAGE_BYTES:,} bytes"
        )


def resize(image: npt.NDArray[np.uint8], size: Size) -> npt.NDArray[np.uint8]:
    """Return an image uint8 [C, H, W], with C of 1 or 3, in another size: uint8 [C, *size]."""
    if image.shape[1:] == size:
        return image
    # Pillow takes grey images without an axis for channels, and colours with channels last.
    pixels = image[0] if len(image) == 1 else np.ascontiguousarray(image.transpose(1, 2, 0))
    # One direction per call: with both, Pillow 13 begins with another one than Pillow 12, and rounds in between.
    narrowed = Image.fromarray(pixels).resize((size[1], image.shape[1]), Image.Resampling.BILINEAR)
    resized = np.asarray(narrowed.resize(size[::-1], Image.Resampling.BILINEAR))
    return resized[None] if len(image) == 1 else resized.transpose(2, 0, 1)
