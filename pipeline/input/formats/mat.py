"""MATLAB files (.mat, up to version 7) with a variable of images and one of labels, such as SVHN's, read by SciPy."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import CIFAR_SHAPE, Layout
from pipeline.core.shardset.schema import no_labels, words_of
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.arrays import image_shape, labels_of, planar
from pipeline.input.formats.base import Columns, DataFile, Format, block_spans
from pipeline.input.formats.inflation import InflationLimit
from pipeline.input.read_options import ReadOptions

BEGIN = b"MATLAB "
BEGIN_BYTES = 128  # header before the variables: a text and the byte order
COMPRESSED = 15  # the type of a variable that is compressed
PIECE_BYTES = 1 << 12  # bytes that are inflated together, to 4 MiB at most
HDF5 = b"MATLAB 7.3"
IMAGE_VARIABLES = ("X", "x", "images", "data")
LABEL_VARIABLES = ("y", "labels", "label", "fine_labels")
SVHN = (32, 32, 3)  # the shape of an image of Street View House Numbers, whose label of the digit 0 is 10


class Mat(Format):
    """The format of MATLAB files, which are read whole by tasks. Images are uint8, rows first or last."""

    name: ClassVar[str] = "mat"
    summary: ClassVar[str] = "MATLAB files of images and of labels (SVHN), up to version 7"
    labels_in: ClassVar[str] = f"a file has them in a variable {', '.join(LABEL_VARIABLES[:-1])}"
    opens: ClassVar[bool] = True
    names_columns: ClassVar[bool] = True

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        return head[: len(BEGIN)] == BEGIN

    def survey(self, store: Store, file: FileInfo, options: ReadOptions) -> tuple[DataFile, Layout]:
        """Return the rows and layout of a file, from its list of variables. Raises DataError."""
        data = store.read(file.path)
        shapes = _variables(data, file.path)
        images = _pick(shapes, options.image_column, IMAGE_VARIABLES)
        labels = _pick(shapes, options.label_column, LABEL_VARIABLES)
        if images is None or (options.label_column and labels is None):
            missing = (options.image_column or "X") if images is None else options.label_column
            names = ", ".join(sorted(shapes)[:8]) or "none"
            raise DataError(f"{file.path} has no variable {missing}, but {names}; --image-column names another one")
        # The number of labels usually decides which axis is the rows.
        label_values = _load(data, file.path, [labels])[labels].reshape(-1) if labels else None
        count = None if label_values is None else len(label_values)
        array_shape, dtype = shapes[images]
        place = f"{file.path}, variable {images}"
        if len(array_shape) < 2:
            raise DataError(f"{place} has shape {array_shape}; images have a height and a width")
        rows_last = _rows_last(array_shape, count, options.shape, place)
        rows_shape = (array_shape[-1], *array_shape[:-1]) if rows_last else array_shape
        declared = options.shape or (CIFAR_SHAPE if len(rows_shape) == 2 else None)
        shape = image_shape(rows_shape, np.dtype(dtype), declared, place)
        rows = rows_shape[0]
        is_svhn = (
            label_values is not None and _counts_from_one(array_shape, label_values) and (label_values == 10).any()
        )
        return DataFile(
            file.path,
            file.bytes,
            file.modified_ms,
            rows,
            decode_rows=rows,
            change=file.change,
            image_column=images,
            label_column=labels or "",
            remark="has the label 10, which is read as class 0, as SVHN calls the digit 0" if is_svhn else "",
        ), Layout(shape, labelled=labels is not None)

    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records start <= r < stop of a file, which is read whole. Raises DataError."""
        data = store.read(file.path)
        _variables(data, file.path)  # the file may have changed since its survey
        arrays = _load(data, file.path, [file.image_column, *([file.label_column] if layout.labelled else [])])
        array = arrays[file.image_column]
        labels = no_labels(file.rows)
        if layout.labelled:
            labels = labels_of(
                _whole(arrays[file.label_column].reshape(-1)), file.rows, f"{file.path}, variable {file.label_column}"
            )
            if _counts_from_one(array.shape, labels):
                labels = labels % np.int32(10)
        if _rows_last(array.shape, file.rows, layout.shape, file.path):
            array = np.moveaxis(array, -1, 0)
        if len(array) != file.rows:
            raise DataError(f"{file.path} had {file.rows} rows and now has {len(array)}: it changed while it was read")
        for span in block_spans(start, stop, layout.record_bytes):
            yield Columns(labels[span], planar(array[span], layout, file.path) if images else None)


def _whole(labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return labels as int64 if they are whole numbers of a real type, which is MATLAB's default, and else as they are."""
    if labels.dtype.kind == "f" and (np.abs(labels) <= 1 << 31).all() and (labels == np.floor(labels)).all():
        return labels.astype(np.int64)
    return labels


def _counts_from_one(shape: tuple[int, ...], labels: npt.NDArray[Any]) -> bool:
    """True if images have SVHN's shape and labels are in 1..10: SVHN counts from 1, and the digit 0 is class 10.

    shape: of the array of images."""
    return shape[:3] == SVHN and len(labels) > 0 and bool(labels.min() >= 1 and labels.max() <= 10)


def _rows_last(shape: tuple[int, ...], rows: int | None, declared: tuple[int, int, int] | None, place: str) -> bool:
    """True if the rows of an array of images are its last axis, as in SVHN; False if they are the first.

    The number of rows decides. If it fits both axes or is unknown, the shape that an image would have decides: the
    declared one, else one of 1 or 3 channels, first or last. Raises DataError if this leaves both axes or none.

    Args:
        shape: the shape of the array.
        rows: the number of labels; None without labels.
        declared: the shape of an image, or None.
        place: the array, for error lines.
    """
    if len(shape) not in (3, 4):
        return False
    images = {False: shape[1:], True: shape[:-1]}  # the shape of an image, by whether the rows are last
    choices = [last for last in images if rows in (None, shape[-1 if last else 0])]
    if len(choices) == 2:
        choices = [last for last in images if _can_be_image(images[last], declared)]
        # Another declared shape has an error line of its own.
        if len(choices) != 1 and (choices or not declared):
            raise DataError(
                f"{place} has shape {shape}: the first axis or the last can be the rows; --image-shape decides if one of"
                " them leaves images of this shape, or save the images as .npz with the rows first"
            )
    return choices == [True]


def _can_be_image(shape: tuple[int, ...], declared: tuple[int, int, int] | None) -> bool:
    """True if an array of a shape can be an image of a declared shape, or without one a grey or an RGB image."""
    if declared:
        channels, height, width = declared
        return shape in (declared, (height, width, channels)) or (channels, *shape) == (1, height, width)
    return len(shape) == 2 or shape[0] in (1, 3) or shape[-1] in (1, 3)


def _pick(shapes: dict[str, Any], name: str | None, usual: tuple[str, ...]) -> str | None:
    return next((choice for choice in ((name,) if name else usual) if choice in shapes), None)


def _variables(data: bytes, path: str) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return the shape and the type of each variable of a file. Raises DataError if it is damaged or of version 7.3."""
    if data[: len(HDF5)] == HDF5:
        raise DataError(f"{path} is a MATLAB file of version 7.3, which is HDF5; save it with -v7 in MATLAB")
    from scipy.io import whosmat  # takes 0.15 s, which no other format should cost

    try:
        _check_inflation(data)
        listed = whosmat(io.BytesIO(data))
        for _, shape, _ in listed:
            if min(shape, default=0) < 0:
                raise ValueError("a variable has a negative length")
            # A variable can claim any size.
            InflationLimit(len(data)).add(prod(shape))
    except Exception as error:  # a damaged file raises almost anything
        raise DataError(f"{path} is damaged: {words_of(error) or type(error).__name__}") from None
    kinds = [(name, tuple(shape), "bool" if kind == "logical" else kind) for name, shape, kind in listed]
    return {name: (shape, kind) for name, shape, kind in kinds if kind in np.sctypeDict}


def _check_inflation(data: bytes) -> None:
    """Raise ValueError if the variables of a file inflate to too many bytes, which SciPy would hold.

    Costs an inflation of all of them, a piece at a time."""
    limit = InflationLimit(len(data))
    order = "<" if data[BEGIN_BYTES - 2 : BEGIN_BYTES] == b"IM" else ">"
    start = BEGIN_BYTES
    while start + 8 <= len(data):
        kind, size = struct.unpack_from(f"{order}II", data, start)
        end = start + 8 + size
        if kind == COMPRESSED:
            inflater = zlib.decompressobj()
            for piece in range(start + 8, min(end, len(data)), PIECE_BYTES):
                limit.add(len(inflater.decompress(data[piece : min(piece + PIECE_BYTES, end)])))
                # What follows the end of the stream would be copied again with every piece.
                if inflater.eof:
                    break
        start = end


def _load(data: bytes, path: str, names: list[str]) -> dict[str, npt.NDArray[Any]]:
    """Return some variables of a file that ``_variables`` has checked. Raises DataError if it is damaged or lacks one."""
    from scipy.io import loadmat

    try:
        arrays = loadmat(io.BytesIO(data), variable_names=names)
        return {name: np.asarray(arrays[name]) for name in names}
    except Exception as error:  # a damaged file raises almost anything
        raise DataError(f"{path} is damaged: {words_of(error) or type(error).__name__}") from None
