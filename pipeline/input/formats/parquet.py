"""Parquet with an image column: raw bytes of a declared shape, or image files, bare or in Hugging Face's struct."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from PIL import ExifTags, Image, ImageFile, ImageOps

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.layout import CIFAR_SHAPE, MAX_IMAGE_BYTES, Dtype, KeptColumn, Layout
from pipeline.core.shardset.schema import (
    DTYPES,
    TARGET_COLUMN,
    broken_is_data_error,
    declared_metadata,
    declared_shape,
    kept_type,
    kept_values,
    raw_images,
    words_of,
)
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.channels import to_channels
from pipeline.input.formats.base import Columns, DataFile, Format, block_rows

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")
BUFFER_BYTES = 8 << 20  # the part of a column that is read at once, because a row group may be as large as its file
LOOKED_AT = 100  # the most images of a file that are tried to find its shape
DECODED_BYTES = 16 << 20  # encoded images that are decoded together, in bytes of pixels
LARGE_GROUP_BYTES = 64 << 20  # above, raw images are kept decoded, because each read decodes from the group's start
# The first bytes of image files, as (offset, bytes): PNG, JPEG, GIF, BMP, WebP, TIFF of either byte order, AVIF, HEIF,
# JPEG 2000.
SIGNATURES = (
    ((0, b"\x89PNG"),),
    ((0, b"\xff\xd8\xff"),),
    ((0, b"GIF8"),),
    ((0, b"BM"), (6, bytes(4))),
    ((0, b"RIFF"), (8, b"WEBP")),
    ((0, b"II*\0"),),
    ((0, b"MM\0*"),),
    ((4, b"ftyp"),),
    ((0, b"\0\0\0\x0cjP  "),),
)
SPARK_IMAGE = {"origin", "height", "width", "nChannels", "mode", "data"}  # the struct of Spark's image data source
ONE_FRAME = ("PNG", "JPEG", "MPO")  # formats of which only the first image is read


def _open(store: Store, path: str) -> pq.ParquetFile:
    """Open a Parquet file. Raises DataError if it is broken, and PermissionError if it may not be read."""
    try:
        return pq.ParquetFile(store.open(path), buffer_size=BUFFER_BYTES)
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise DataError(f"{path} is not a whole Parquet file: {str(error).splitlines()[0]}") from None


def _pick(schema: pa.Schema, names: tuple[str, ...], path: str) -> str:
    """Return the first of some names that is a column of the file. Raises DataError if there is none."""
    for name in names:
        if name in schema.names:
            return name
    raise DataError(f"{path} has no column {' or '.join(names)}; its columns are {', '.join(schema.names)}")


def _payload(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """Return the bytes of an image column, bare or in a struct."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_struct(array.type):
        array = pc.struct_field(array, "bytes")
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    return array.cast(pa.large_binary())


def _check_type(field: pa.Field, path: str) -> None:
    """Raise DataError if an image column holds neither bytes nor a struct with bytes."""
    kind = field.type
    if pa.types.is_struct(kind):
        names = {inner.name for inner in kind}
        # Spark's own image source is a likely origin, and its users need another advice than the general one.
        if names >= SPARK_IMAGE:
            raise DataError(
                f"{path}: column {field.name} is the struct of Spark's image source, of {', '.join(sorted(SPARK_IMAGE))},"
                ' which is not read; read the files by spark.read.format("binaryFile") and write their content as a column'
                " image"
            )
        if "bytes" not in names:
            raise DataError(
                f"{path}: column {field.name} is a struct of {', '.join(sorted(names))}; an image is binary, or a struct"
                " with a field bytes"
            )
        kind = kind.field("bytes").type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    if not any(is_kind(kind) for is_kind in binary):
        raise DataError(f"{path}: column {field.name} is {field.type}, not binary images")


def _dtype(schema: pa.Schema, column: str, path: str) -> Dtype:
    """Return the type of an image's numbers that a column declares, by default uint8. Raises DataError for others."""
    dtype = declared_metadata(schema, column).get("dtype", "uint8")
    if dtype not in DTYPES:
        raise DataError(f"{path}: column {column} is declared as {dtype}; the jobs read {' and '.join(DTYPES)}")
    return cast(Dtype, dtype)


def _label_of_folder(path: str) -> int | None:
    """Return the class of a file's rows from a folder such as label=3, which Spark's partitionBy("label") makes."""
    labels = re.findall(rf"/(?:{'|'.join(LABEL_COLUMNS)})=(\d{{1,9}})(?=/)", path)
    return int(labels[-1]) if labels else None


def begins_as_image(data: bytes) -> bool:
    """True if bytes begin as a file of a known image format."""
    return any(all(data.startswith(part, at) for at, part in signature) for signature in SIGNATURES)


def is_encoded(data: bytes, pixels: int) -> bool:
    """True if bytes are an image file. Raw pixels may begin like one, but have the raw length."""
    return begins_as_image(data) and len(data) != pixels


class Undecodable(DataError):
    """An image file that Pillow cannot read."""


def decode(data: bytes) -> npt.NDArray[np.uint8]:
    """Return an image file as uint8 [C, H, W], with its EXIF orientation applied.

    Grey images keep one channel, all others become RGB. Raises DataError if this would lose bits, transparency or
    further frames, and Undecodable for a broken file."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return _pixels_of(image)
    except DataError:
        raise
    except Exception as error:  # Pillow raises many kinds for a broken image
        raise Undecodable(f"the image cannot be decoded ({words_of(error)})") from None


def _pixels_of(image: ImageFile.ImageFile) -> npt.NDArray[np.uint8]:
    """Return the pixels of an open image file, uint8 [C, H, W] (see ``decode``).

    Raises DataError if the conversion to 8-bit grey or RGB would lose frames, bits or transparency, or if the image is
    too large."""
    frames = 1 if image.format in ONE_FRAME else getattr(image, "n_frames", 1)
    if frames > 1:
        raise DataError(f"the image has {frames} frames; save each as an image of its own")
    if image.mode.startswith(("I", "F")):
        raise DataError(f"the image has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits")
    if 3 * image.width * image.height > MAX_IMAGE_BYTES:
        raise DataError(f"the image of {image.width}x{image.height} pixels has more than {MAX_IMAGE_BYTES:,} bytes")
    # Only real transparency is refused: an alpha channel that is opaque everywhere loses nothing.
    image.load()
    upright = ImageOps.exif_transpose(image) if _is_turned(image) else image
    if upright.has_transparency_data and upright.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        raise DataError(
            "the image is transparent in places; flatten it onto a background, in Pillow by"
            ' background.paste(image, mask=image.convert("RGBA").getchannel("A"))'
        )
    pixels = np.asarray(upright if upright.mode == "L" else upright.convert("RGB"))
    return pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)


def _is_turned(image: Image.Image) -> bool:
    """True if the image's EXIF data declare an orientation other than upright."""
    try:
        return image.getexif().get(ExifTags.Base.Orientation) in range(2, 9)
    except Exception:  # Pillow raises many kinds for broken EXIF data, although the pixels are intact
        return False


class ParquetImages(Format):
    """The format of Parquet files. The image shape comes from the schema, or from the first image."""

    name: ClassVar[str] = "parquet"
    summary: ClassVar[str] = "Parquet"
    opens: ClassVar[bool] = True
    may_be_empty: ClassVar[bool] = True

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        return head[:4] == b"PAR1"

    def survey(self, store: Store, file: FileInfo, shape: tuple[int, int, int] | None) -> tuple[DataFile, Layout]:
        with broken_is_data_error(file.path):
            return self._survey(store, file, shape)

    def _survey(self, store: Store, file: FileInfo, shape: tuple[int, int, int] | None) -> tuple[DataFile, Layout]:
        """Return the rows and layout of a file of images.

        Args:
            store: the file system.
            file: the file.
            shape: shape of raw images [C, H, W] without a declaration in the schema; None: CIFAR's.
        """
        parquet = _open(store, file.path)
        schema = parquet.schema_arrow
        rows = parquet.metadata.num_rows
        image = _pick(schema, IMAGE_COLUMNS, file.path)
        _check_type(schema.field(image), file.path)
        data = DataFile(file.path, file.bytes, file.modified_ms, rows, change=file.change)
        if not any(name in schema.names for name in LABEL_COLUMNS):
            data = replace(data, label=_label_of_folder(file.path))
        layout = Layout(
            declared_shape(schema, image) or shape or CIFAR_SHAPE,
            coarse=20 if "coarse_label" in schema.names else None,
            dtype=_dtype(schema, image, file.path),
            targets=TARGET_COLUMN in schema.names and pa.types.is_floating(schema.field(TARGET_COLUMN).type),
            labelled=data.label is not None or any(name in schema.names for name in LABEL_COLUMNS),
        )
        if rows == 0:
            return data, layout
        shape, encoded = _first_shape(parquet, image, layout, file.path)
        layout = replace(layout, shape=shape)
        if encoded:
            return replace(data, decode_rows=max(1, DECODED_BYTES // layout.record_bytes), encoded=True), layout
        # Tasks that start inside a large row group would each decode it from its start: keep it decoded.
        group = max(parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups))
        if group * layout.record_bytes > LARGE_GROUP_BYTES:
            data = replace(data, decode_rows=group)
        return data, layout

    def read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        with broken_is_data_error(file.path):
            yield from self._read(store, file, start, stop, layout, images)

    def _read(
        self, store: Store, file: DataFile, start: int, stop: int, layout: Layout, images: bool
    ) -> Iterator[Columns]:
        """Yield records start <= r < stop of a file, one row group after the other. Raises DataError."""
        parquet = _open(store, file.path)
        if parquet.metadata.num_rows != file.rows:
            raise DataError(f"{file.path} had {file.rows} rows and now has {parquet.metadata.num_rows}: it changed")
        of_rows = layout.labelled and file.label is None
        label = _pick(parquet.schema_arrow, LABEL_COLUMNS, file.path) if of_rows else None
        image = _pick(parquet.schema_arrow, (layout.column,) if layout.column else IMAGE_COLUMNS, file.path)
        beside = ["coarse_label"] * bool(layout.coarse) + [TARGET_COLUMN] * layout.targets
        names = [*([label] if label else []), *beside, *([image] if images else [])]
        names += [column.name for column in layout.attributes]
        first = 0
        step = block_rows(layout.record_bytes)
        for group in range(parquet.num_row_groups):
            rows = parquet.metadata.row_group(group).num_rows
            low = max(start - first, 0)
            high = min(stop - first, rows)
            if low < high:
                # One row group at a time: groups outside of the range are never read.
                batches = parquet.iter_batches(step, [group], columns=names)
                for at, part in _slice_batches(batches, low, high):
                    record = first + at
                    yield Columns(
                        labels=_whole(part.column(label), label, file.path, record)
                        if label
                        else np.full(len(part), file.label or 0, np.int32),
                        images=self._images(part.column(image), layout, file, record) if images else None,
                        coarse_labels=_whole(part.column("coarse_label"), "coarse_label", file.path, record)
                        if layout.coarse
                        else None,
                        targets=_targets(part.column(TARGET_COLUMN), file.path, record) if layout.targets else None,
                        attributes={
                            each.name: kept_values(part.column(each.name), each, file.path)
                            for each in layout.attributes
                        },
                    )
            first += rows

    def kept_columns(self, store: Store, file: FileInfo, names: Sequence[str]) -> tuple[KeptColumn, ...]:
        schema = _open(store, file.path).schema_arrow
        columns = []
        for name in names:
            if name not in schema.names:
                raise UsageError(f"{file.path} has no column {name}; its columns are {', '.join(schema.names)}")
            kind = kept_type(schema.field(name).type)
            if kind is None:
                raise UsageError(
                    f"{file.path}: column {name} is {schema.field(name).type}; numbers, text, dates and times are kept"
                )
            columns.append(KeptColumn(name, kind))
        return tuple(columns)

    def _images(self, column: Any, layout: Layout, file: DataFile, first: int) -> npt.NDArray[np.uint8]:
        """Return the images or vectors of a column as bytes, uint8 [rows, record_bytes]. Raises DataError.

        first: number in the file of the column's first row, for error lines."""
        path = file.path
        if layout.column:
            return vectors_of(column, layout, path, first)
        size = layout.record_bytes
        _check_type(pa.field("image", column.type), path)  # the file may have been replaced since its survey
        values = _payload(column)
        if values.null_count:
            row = first + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
            raise DataError(f"{path}, row {row}: the image is null")
        # Only uint8 images can be image files. Raw images are converted as one block.
        if layout.dtype != "uint8" or _looks_raw(values, size):
            return raw_images(values, size, path, first)
        out = np.empty((len(values), size), np.uint8)
        for at, value in enumerate(values):
            place = f"{path}, row {first + at}"
            out[at] = _pixels(value.as_py(), layout, place, to_layout_channels=bool(file.channels))
        return out


def _looks_raw(values: Any, size: int) -> bool:
    """Return whether all values have the raw size and none begins like an image file.

    values: large_binary; size: bytes of a raw image."""
    if not pc.all(pc.equal(pc.binary_length(values), size)).as_py():
        return False
    pixels = raw_images(values, size, "", 0)
    for signature in SIGNATURES:
        # An image that is shorter than a signature cannot begin with it.
        begins = np.full(len(pixels), size >= max(at + len(part) for at, part in signature))
        for at, part in signature:
            if begins.any():
                begins &= (pixels[:, at : at + len(part)] == np.frombuffer(part, np.uint8)).all(axis=1)
        if begins.any():
            return False
    return True


def _first_shape(parquet: pq.ParquetFile, column: str, layout: Layout, path: str) -> tuple[tuple[int, int, int], bool]:
    """Return the shape of the first valid image, and whether it is encoded.

    A broken image does not condemn its file: if none of the first LOOKED_AT images is valid, the error of the first is
    raised.

    Args:
        parquet: the open file.
        column: the image column.
        layout: the layout of raw images.
        path: the file, for error lines.
    """
    problem: DataError | None = None
    for row, batch in enumerate(islice(parquet.iter_batches(1, columns=[column]), LOOKED_AT)):
        data = _payload(batch.column(0))[0].as_py()
        try:
            return _shape_of(data, layout, f"{path}, row {row}")
        except DataError as error:
            problem = problem or error
    assert problem
    raise problem


def _shape_of(data: bytes | None, layout: Layout, place: str) -> tuple[tuple[int, int, int], bool]:
    """Return the shape [C, H, W] of an image, and whether it is encoded (an image file).

    Raises DataError if it is null, cannot be decoded, or does not have the size of a raw image."""
    if data is None:
        raise DataError(f"{place}: the image is null")
    # Only uint8 rows may be image files: Pillow decodes to bytes, and float32 values may begin like an image file.
    if layout.dtype == "uint8" and is_encoded(data, layout.record_bytes):
        try:
            channels, height, width = decode(data).shape
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        return (channels, height, width), True
    if len(data) != layout.record_bytes:
        size = "x".join(map(str, layout.shape)) + (" float32" if layout.dtype == "float32" else "")
        raise DataError(
            f"{place}: {len(data)} bytes that begin as no known image file, and raw images of {size} have"
            f" {layout.record_bytes}; declare --image-shape"
        )
    return layout.shape, False


def _pixels(data: bytes, layout: Layout, place: str, *, to_layout_channels: bool) -> npt.NDArray[np.uint8]:
    """Return one image, encoded or raw, as uint8 [C*H*W]. Raises DataError.

    Each image is classified by itself, independent of block boundaries. Raw pixels may begin like an image file: bytes
    of the raw size that cannot be decoded are raw. Bytes of the raw size that can be decoded are an image file.

    Args:
        data: the bytes of the image.
        layout: the layout of the rows.
        place: the file and row, for error lines.
        to_layout_channels: convert decoded images to the layout's number of channels (--channels).
    """
    is_raw = len(data) == layout.record_bytes
    if not begins_as_image(data):
        if not is_raw:
            raise DataError(f"{place}: the image has {len(data)} bytes, not {layout.record_bytes}")
        return np.frombuffer(data, np.uint8)
    # Bytes of the raw size that do not decode are pixels that happen to begin like an image file.
    try:
        image = decode(data)
    except DataError as error:
        if is_raw and isinstance(error, Undecodable):
            return np.frombuffer(data, np.uint8)
        raise DataError(f"{place}: {error}") from None
    if to_layout_channels:
        image = to_channels(image, layout.shape[0])
    if image.shape != layout.shape:
        size, first = ("x".join(map(str, shape)) for shape in (image.shape, layout.shape))
        advice = "; --channels 1 or 3 converts grey and RGB" if image.shape[1:] == layout.shape[1:] else ""
        raise DataError(f"{place}: the image is {size}, the first one {first}{advice}")
    return image.reshape(-1)


def _targets(column: pa.ChunkedArray, path: str, first: int) -> npt.NDArray[np.float32]:
    """Return a column of targets as float32. Raises DataError for one that is null or not finite.

    first: number in the file of the column's first row."""
    values = np.asarray(column.cast(pa.float32()).to_numpy(zero_copy_only=False))
    bad_rows = np.flatnonzero(~np.isfinite(values))
    if len(bad_rows):
        raise DataError(
            f"{path}, row {first + int(bad_rows[0])}: {TARGET_COLUMN} is {values[bad_rows[0]]}, not a number"
        )
    return values


def _slice_batches(batches: Iterator[pa.RecordBatch], low: int, high: int) -> Iterator[tuple[int, pa.Table]]:
    """Yield the rows low <= r < high of a row group by batch, with the position of each batch's first row.

    Rows before ``low`` are decoded, rows after ``high`` are not read, and only one batch is held at a time."""
    at = 0
    for batch in batches:
        start = max(low - at, 0)
        stop = min(high - at, len(batch))
        if start < stop:
            yield at + start, pa.Table.from_batches([batch.slice(start, stop - start)])
        at += len(batch)
        if at >= high:
            return


def _whole(column: pa.ChunkedArray, name: str, path: str, first: int) -> npt.NDArray[np.int32]:
    """Return an integer column as int32. Raises DataError for nulls, other types and numbers beyond int32.

    first: number in the file of the column's first row, for error lines."""
    if column.null_count:
        row = first + int(np.flatnonzero(column.is_null().to_numpy())[0])
        raise DataError(f"{path}, row {row}: {name} is null")
    if not pa.types.is_integer(column.type):
        raise DataError(f"{path}: {name} is {column.type}, not whole numbers")
    try:
        return np.asarray(column.cast(pa.int32()).to_numpy())
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}, near row {first}: {name}: {error}") from None


def vectors_of(column: Any, layout: Layout | None, path: str, first: int) -> npt.NDArray[np.uint8]:
    """Return a column of vectors as the bytes of float32: uint8 [rows, 4 d].

    Vectors are lists of numbers or spark.ml's dense ones.

    Args:
        column: the column.
        layout: the expected layout; None takes the length of the first vector.
        path: the file, for error lines.
        first: the row number of the column's first value.

    Raises:
        DataError: a broken value, with its place.
        UsageError: the column does not hold vectors.
    """
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_struct(array.type) and {"type", "values"} <= {field.name for field in array.type}:
        if not pc.all(pc.equal(array.field("type"), 1)).as_py():
            raise DataError(f"{path}, near row {first}: a sparse vector; --embedding takes dense ones")
        array = array.field("values")
    # Spark ML's dense vectors are now lists too.
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    number = (pa.types.is_floating, pa.types.is_integer)
    if not any(kind(array.type) for kind in lists) or not any(kind(array.type.value_type) for kind in number):
        raise UsageError(f"--embedding: the column of {path} holds {array.type}, not vectors")
    if array.null_count:
        row = first + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{path}, row {row}: the vector is null")
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    expected = layout.shape[0] if layout else int(lengths[0])
    if (lengths != expected).any():
        at = int(np.flatnonzero(lengths != expected)[0])
        raise DataError(f"{path}, row {first + at}: the vector has {lengths[at]} numbers, the first one {expected}")
    flat = np.asarray(array.flatten().to_numpy(zero_copy_only=False)).astype(np.float32).reshape(len(array), expected)
    bad_rows = np.flatnonzero(~np.isfinite(flat).all(axis=1))
    if len(bad_rows):
        raise DataError(
            f"{path}, row {first + int(bad_rows[0])}: the vector holds numbers that are not finite in float32"
        )
    return flat.view(np.uint8).reshape(len(array), 4 * expected)
