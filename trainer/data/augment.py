"""Preparation of images for the network: mean subtraction and, in training, a random crop and flip.

Shapes: B images, C channels, H and W pixels. All operations work on whole batches in numpy, on one thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

Floats = npt.NDArray[np.float32]
PAD = 2  # zeros on each side: 32x32 becomes 36x36


def normalise(images_BCHW: npt.NDArray[np.uint8 | np.float32], mean: Floats) -> Floats:
    """Return (x - mean) / 255 as contiguous float32: with a mean, values average 0 over the training set.

    Real-valued features are not changed, because their producer has scaled them. mean: float32 [C] of channels, or
    [C, H, W] of pixels, in 0..255; zeros only scale the images."""
    if images_BCHW.dtype != np.uint8:
        return images_BCHW.astype(np.float32, copy=False)
    by_pixel = mean if mean.ndim == 3 else mean[:, None, None]
    out = np.subtract(images_BCHW, by_pixel, dtype=np.float32)
    out *= np.float32(1 / 255)
    return out


def augment(images_BCHW: Floats, rng: np.random.Generator) -> Floats:
    """Pad each image with a border of ``PAD`` zeros, crop it at random to its old size, and flip half of the images.

    The images are normalised already, so that zero is the mean that was subtracted, and black if there was none."""
    count = len(images_BCHW)
    top, left = rng.integers(0, 2 * PAD + 1, (2, count))
    return crop_and_flip(images_BCHW, top, left, rng.random(count) < 0.5)


def crop_and_flip(
    images_BCHW: Floats, top: npt.NDArray[np.int64], left: npt.NDArray[np.int64], flip: npt.NDArray[np.bool_]
) -> Floats:
    """Return crops of padded images, some of them flipped: contiguous float32 [B, C, H, W]. Costs one gather.

    Args:
        images_BCHW: normalised images, which are padded by ``PAD`` zeros on each side.
        top: first row of each crop in the padded image, 0..2*PAD, int64 [B].
        left: first column of each crop in the padded image, 0..2*PAD, int64 [B].
        flip: whether to mirror each crop left to right, bool [B].
    """
    count, channels, height, width = images_BCHW.shape
    padded = np.zeros((count, channels, height + 2 * PAD, width + 2 * PAD), np.float32)
    padded[:, :, PAD:-PAD, PAD:-PAD] = images_BCHW
    # numpy's type stubs allow a single axis only
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))  # type: ignore[call-overload]
    out: Floats = np.ascontiguousarray(windows[np.arange(count), :, top, left])
    out[flip] = out[flip, ..., ::-1]
    return out
