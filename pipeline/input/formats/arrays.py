"""Arrays of images and of labels: what the formats of numpy, IDX and MATLAB share."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import MAX_IMAGE_BYTES, Layout
from pipeline.input.formats.base import check_label_range


def image_shape(
    shape: tuple[int, ...], dtype: np.dtype[Any], declared: tuple[int, int, int] | None, place: str
) -> tuple[int, int, int]:
    """Return the shape of the images of an array, (channels, height, width). Raises DataError if it holds no images.

    Args:
        shape: the shape of the array.
        dtype: its type, which must be uint8.
        declared: the value of --image-shape, or None.
        place: the array, for error lines.
    """
    if dtype != np.uint8:
        raise DataError(f"{place} is {dtype}; images are uint8, 0 to 255")
    if declared is None:
        return shape_of(shape, place)
    if not shape or not _fits(shape[1:], declared):
        channels, height, width = declared
        # Axes of another order may hold as many numbers.
        advice = (
            f"; save them as [rows, {channels}, {height}, {width}], [rows, {height}, {width}, {channels}] or flat with"
            " the channels first"
            if prod(shape[1:]) == prod(declared)
            else ""
        )
        raise DataError(f"{place} has images of {shape[1:]}, not --image-shape {channels}x{height}x{width}{advice}")
    return declared


def _fits(axes: tuple[int, ...], shape: tuple[int, int, int]) -> bool:
    """True if the axes of an image say which number is which of a shape (channels, height, width).

    They are flat, channels first, channels last, or height and width of a grey image. The number of numbers alone does
    not decide: (height * width, channels) has another order than (channels, height * width)."""
    channels, height, width = shape
    grey = ((height, width),) if channels == 1 else ()
    return axes in (shape, (height, width, channels), (channels * height * width,), *grey)


def planar(array: npt.NDArray[Any], layout: Layout, place: str) -> npt.NDArray[np.uint8]:
    """Return images as bytes, uint8 [rows, C*H*W], channels first. Raises DataError if they are others than surveyed.

    place: the array, for error lines."""
    channels, height, width = layout.shape
    # The axes of a list differ from row to row, and a file may have changed since its survey.
    if array.dtype != np.uint8 or not _fits(array.shape[1:], layout.shape):
        raise DataError(f"{place} holds {array.dtype} images of {array.shape[1:]}, not of {layout.shape}")
    if array.shape[1:] == (height, width, channels):
        array = array.transpose(0, 3, 1, 2)
    # A copy only if the channels are last.
    return np.ascontiguousarray(array).reshape(len(array), layout.record_bytes)


def check_labels(shape: tuple[int, ...], dtype: np.dtype[Any], rows: int, place: str) -> None:
    """Raise DataError if an array does not hold a whole number per row. rows: the number of images; place: the array."""
    if dtype.kind not in "iu" or shape not in ((rows,), (rows, 1)):
        raise DataError(f"{place} is {dtype} {shape}; labels are {rows} whole numbers, one per image")


def labels_of(array: npt.NDArray[Any], rows: int, place: str) -> npt.NDArray[np.int32]:
    """Return labels as int32 [rows]. Raises DataError if they are not whole numbers of 32 bits, one per image."""
    check_labels(array.shape, array.dtype, rows, place)
    check_label_range(array, place)
    return array.reshape(rows).astype(np.int32)


def shape_of(shape: tuple[int, ...], place: str) -> tuple[int, int, int]:
    """Return the shape of an image, (channels, height, width), from the shape of an array of images.

    An array of three dimensions is grey; of four, the last is the channels if it is 1 or 3, else the first of an image.
    Raises DataError for other arrays. place: of the array, for the message."""
    image: tuple[int, ...] = ()
    if len(shape) == 3:
        image = (1, *shape[1:])
    elif len(shape) == 4:
        image = (shape[3], *shape[1:3]) if shape[3] in (1, 3) else shape[1:]
    if len(image) != 3 or not 0 < int(np.prod(image, dtype=object)) <= MAX_IMAGE_BYTES:
        raise DataError(
            f"{place} has shape {shape}; images are [rows, height, width], or with channels first or last; flat ones"
            " need --image-shape"
        )
    channels, height, width = image
    return channels, height, width
