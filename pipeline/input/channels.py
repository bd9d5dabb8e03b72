"""Conversion of images between grey and RGB."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import UsageError

CHANNELS = (1, 3)
# Weights of ITU-R 601-2 in 1/65536, as Pillow rounds them, so that its convert("L") gives the same bits.
LUMA = np.array([19595, 38470, 7471], np.uint32)
HALF = np.uint32(1 << 15)


def check_channels(channels: int | None) -> None:
    """Raise UsageError for a number of channels that no image is converted to."""
    if channels is not None and channels not in CHANNELS:
        raise UsageError(f"--channels must be 1 (grey) or 3 (RGB), got {channels}")


def to_channels(images: npt.NDArray[np.uint8], channels: int) -> npt.NDArray[np.uint8]:
    """Return images uint8 [..., C, H, W] with C of 1 or 3 as [..., channels, H, W]; grey becomes three equal channels."""
    if images.shape[-3] == channels:
        return images
    if channels == 3:
        return np.repeat(images, 3, axis=-3)
    weighted = np.einsum("...chw,c->...hw", images, LUMA, dtype=np.uint32, casting="safe")
    grey: npt.NDArray[np.uint8] = ((weighted + HALF) >> 16).astype(np.uint8)
    return grey[..., None, :, :]
