"""Conversion of images to --channels and --resize: image files while they are decoded, other images after they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import Layout
from pipeline.core.storage.store import Store
from pipeline.input.channels import CHANNELS, to_channels
from pipeline.input.formats.base import DECODED_BYTES, Columns, DataFile, Format
from pipeline.input.read_options import ReadOptions
from pipeline.input.resize import resize


def with_conversion(file: DataFile, layout: Layout, options: ReadOptions) -> tuple[DataFile, Layout]:
    """Return a surveyed file and its layout after the conversion to --channels and --resize, if they are given.

    Raises DataError if the rows are not grey or RGB images of uint8."""
    if options.channels is None and options.resize is None:
        return file, layout
    if layout.dtype != "uint8" or layout.shape[0] not in CHANNELS:
        flag = "--channels" if options.channels else "--resize"
        raise DataError(
            f"{file.path} holds {layout.describe()}; {flag} converts uint8 images of 1 or 3 channels, so leave it out"
        )
    channels = options.channels or layout.shape[0]
    height, width = options.resize or layout.shape[1:]
    decode_rows = file.decode_rows
    # Photographs that are made small: else each would be kept in a file of its own.
    if file.encoded and 0 < decode_rows < file.rows:
        decode_rows = min(file.rows, max(decode_rows, DECODED_BYTES // (channels * height * width)))
    # The decoder converts each image by itself, because one file may hold image files of several sizes, grey and RGB.
    return replace(
        file,
        decode_rows=decode_rows,
        channels=options.channels and (channels if file.encoded else layout.shape[0]),
        size=options.resize and ((height, width) if file.encoded else layout.shape[1:]),
    ), replace(layout, shape=(channels, height, width))


def stored_layout(file: DataFile, layout: Layout) -> Layout:
    """Return the layout of a file's rows before their conversion. layout: the layout after it."""
    # A column of vectors (input/vectors.py) is read instead of the images, and has neither channels nor a size.
    if layout.column:
        return layout
    height, width = file.size or layout.shape[1:]
    return replace(layout, shape=(file.channels or layout.shape[0], height, width))


def read_converted(
    kind: Format, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
) -> Iterator[Columns]:
    """Yield the records start <= r < stop of a file like ``kind.read``, with the shape of the layout.

    Args:
        kind: the format of the file.
        store: the file system.
        file: the surveyed file.
        start: the first record.
        stop: the record after the last.
        layout: the layout of the converted rows.
        images: whether to read images.
    """
    file_layout = stored_layout(file, layout)
    for columns in kind.read(store, file, start, stop, file_layout, images):
        if columns.images is None or file_layout.shape == layout.shape:
            yield columns
        else:
            pixels = to_channels(columns.images.reshape(-1, *file_layout.shape), layout.shape[0])
            if file.size:
                pixels = np.stack([resize(image, layout.shape[1:]) for image in pixels])
            yield replace(columns, images=pixels.reshape(len(pixels), -1))
