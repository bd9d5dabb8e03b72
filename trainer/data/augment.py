"""What an image goes through before the network: mean subtraction and, in training, a random crop and flip.

Shapes: B images, C channels, H and W pixels. Everything is a whole-batch operation in numpy, on one thread."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

Floats = npt.NDArray[np.float32]
PAD = 2  # zeros on each side: 32x32 becomes 36x36


def normalise(images_BCHW: npt.NDArray[np.uint8 | np.float32], mean: Floats) -> Floats:
    """(x - mean) / 255 as float32, contiguous: the training mean of each channel is 0, black to white a distance of 1.

    mean: float32 [C], in 0..255 like the pixels. Real-valued features are what they are: whoever made them scaled them."""
    if images_BCHW.dtype != np.uint8:
        return images_BCHW.astype(np.float32, copy=False)
    out = np.subtract(images_BCHW, mean[:, None, None], dtype=np.float32)
    out *= np.float32(1 / 255)
    return out


def augment(images_BCHW: Floats, rng: np.random.Generator) -> Floats:
    """Crop each image at random out of itself with a border of ``PAD`` zeros, and flip half of them.

    Zeros are the mean colour, because the images are normalised."""
    count = len(images_BCHW)
    top, left = rng.integers(0, 2 * PAD + 1, (2, count))
    return crop_and_flip(images_BCHW, top, left, rng.random(count) < 0.5)


def crop_and_flip(
    images_BCHW: Floats, top: npt.NDArray[np.int64], left: npt.NDArray[np.int64], flip: npt.NDArray[np.bool_]
) -> Floats:
    """Image i, padded by ``PAD`` zeros on each side, cut to its old size from row top[i] and column left[i] on, and then
    mirrored left to right where flip[i]. top, left: 0..2*PAD. Float32 [B, C, H, W], contiguous; one gather."""
    count, channels, height, width = images_BCHW.shape
    padded = np.zeros((count, channels, height + 2 * PAD, width + 2 * PAD), np.float32)
    padded[:, :, PAD:-PAD, PAD:-PAD] = images_BCHW
    # numpy's types know one axis only
    windows = sliding_window_view(padded, (height, width), axis=(2, 3))  # type: ignore[call-overload]
    out: Floats = np.ascontiguousarray(windows[np.arange(count), :, top, left])
    out[flip] = out[flip, ..., ::-1]
    return out
