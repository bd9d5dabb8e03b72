"""Conversion of images to --channels: image files while they are decoded, other images after they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import Layout
from pipeline.core.storage.store import Store
from pipeline.input.channels import CHANNELS, to_channels
from pipeline.input.formats.base import Columns, DataFile, Format


def with_channels(file: DataFile, layout: Layout, channels: int | None) -> tuple[DataFile, Layout]:
    """Return a surveyed file and its layout after the conversion to ``channels``; None keeps the channels.

    Raises DataError if the rows are not grey or RGB images of uint8."""
    if channels is None:
        return file, layout
    if layout.dtype != "uint8" or layout.shape[0] not in CHANNELS:
        raise DataError(
            f"{file.path} holds {layout.describe()}; --channels converts uint8 images of 1 or 3 channels, so leave it out"
        )
    # The decoder converts each image by itself, because one Parquet file may hold grey and RGB image files.
    file_channels = channels if file.encoded else layout.shape[0]
    return replace(file, channels=file_channels), _with_channels(layout, channels)


def stored_layout(file: DataFile, layout: Layout) -> Layout:
    """Return the layout of a file's rows before their conversion. layout: the layout after it."""
    # A column of vectors (input/vectors.py) is read instead of the images, and has no channels.
    return _with_channels(layout, file.channels) if file.channels and not layout.column else layout


def read_converted(
    kind: Format, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
) -> Iterator[Columns]:
    """Yield the records start <= r < stop of a file like ``kind.read``, with the channels of the layout.

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
            yield replace(columns, images=pixels.reshape(len(pixels), -1))


def _with_channels(layout: Layout, channels: int) -> Layout:
    return replace(layout, shape=(channels, *layout.shape[1:]))
