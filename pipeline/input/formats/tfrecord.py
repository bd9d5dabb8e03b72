"""TFRecord files of tf.train.Example, read without TensorFlow: checksums of every record, and protocol buffers by hand."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import google_crc32c

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import MAX_IMAGE_BYTES
from pipeline.core.storage.files import FileInfo
from pipeline.core.storage.store import Store
from pipeline.input.formats.samples import Sample, SampleFormat
from pipeline.input.formats.tar import as_label

HEADER = struct.Struct("<QI")  # length of a record, and the checksum of these 8 bytes
CHECKSUM = struct.Struct("<I")
MASK = 0xA282EAD8
BUFFER_BYTES = 1 << 20
MOST_RECORD = MAX_IMAGE_BYTES + (1 << 20)
IMAGE_FEATURES = ("image/encoded", "image", "image_raw", "img", "jpg", "png", "encoded")
LABEL_FEATURES = ("image/class/label", "label", "labels", "class", "cls", "y")
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # the types of a field


class ExampleRecord(NamedTuple):
    """A record of a file: its offset, its content, and whether this has a wrong checksum."""

    offset: int
    data: bytes
    is_damaged: bool


class SeveralValues(NamedTuple):
    """The number of values of a feature that has more than one."""

    values: int


class TFRecord(SampleFormat):
    """The format of TFRecord files of tf.train.Example."""

    name: ClassVar[str] = "tfrecord"
    summary: ClassVar[str] = "TFRecord files of tf.train.Example"
    labels_in: ClassVar[str] = (
        f"an example has one in a feature {', '.join(LABEL_FEATURES[:-1])} or {LABEL_FEATURES[-1]}"
    )

    def recognises(self, file: FileInfo, head: bytes, shape: tuple[int, int, int] | None) -> bool:
        return len(head) >= HEADER.size and HEADER.unpack_from(head)[1] == masked_crc(head[:8])

    def samples(
        self, store: Store, path: str, offset: int, image_name: str, label_name: str | None
    ) -> Iterator[Sample]:
        """Yield the examples of a file, whose checksums are compared."""
        for record in _read_records(store, path, offset):
            # Whatever is wrong with a message, its place is what a user needs.
            place = f"{path}, record at byte {record.offset}"
            try:
                if record.is_damaged:
                    raise DataError(f"{path} is damaged: the record at byte {record.offset} has a wrong checksum")
                yield Sample(record.offset, *_image_and_label(record.data, image_name, label_name, place), place)
            except DataError as error:
                yield Sample(record.offset, b"", None, place, error)


def _image_and_label(
    data: bytes, image_name: str, label_name: str | None, place: str
) -> tuple[bytes, int | str | None]:
    """Return the image and the label of an example. Raises DataError if one of them cannot be read.

    data: the example. place: it in words, for error lines. For the names see ``samples``."""
    try:
        features = parse_example(data)
    except (ValueError, IndexError, UnicodeDecodeError, struct.error):
        raise DataError(f"{place} is no tf.train.Example") from None
    image = _feature(features, image_name, IMAGE_FEATURES, place)
    if not isinstance(image, bytes):
        raise DataError(
            f"{place}: the feature of the image is {str(image)[:80]!r}, not bytes; write it as a bytes_list of one"
            " image file, or of its raw bytes"
        )
    # An example without any usual feature has no label, which is no error yet.
    is_usual = label_name == "" and any(name in features for name in LABEL_FEATURES)
    if not label_name and not is_usual:
        return image, None
    label = _feature(features, label_name or "", LABEL_FEATURES, place)
    try:
        return image, as_label(label.decode() if isinstance(label, bytes) else label, place)
    except UnicodeDecodeError:
        raise DataError(f"{place}: the label is no text") from None


def masked_crc(data: bytes) -> int:
    """Return the CRC-32C of some bytes as TFRecord files hold it: rotated, plus a constant."""
    word: int = google_crc32c.value(data)
    return ((word >> 15 | word << 17) + MASK) & 0xFFFFFFFF


def _read_records(store: Store, path: str, offset: int) -> Iterator[ExampleRecord]:
    """Yield the records of a file from an offset on.

    Raises DataError if one is cut, or if the checksum of its length is wrong, so that the next one cannot be found."""
    with store.open(path) as raw, io.BufferedReader(raw, BUFFER_BYTES) as file:  # type: ignore[type-var]
        file.seek(offset)
        while head := file.read(HEADER.size):
            if len(head) < HEADER.size:
                raise DataError(f"{path} is cut: a record begins at byte {offset} and lacks its header")
            length, checksum = HEADER.unpack(head)
            if checksum != masked_crc(head[:8]):
                raise DataError(f"{path} is damaged at byte {offset}: the length of a record has a wrong checksum")
            # The length is checked before as much memory is taken.
            if length > MOST_RECORD:
                raise DataError(
                    f"{path}: the record at byte {offset} has {length:,} bytes, more than {MOST_RECORD:,}; write smaller"
                    " records"
                )
            body = file.read(length + CHECKSUM.size)
            if len(body) < length + CHECKSUM.size:
                raise DataError(f"{path} is cut: the record at byte {offset} has {len(body)} of {length + 4} bytes")
            data = body[:length]
            yield ExampleRecord(offset, data, masked_crc(data) != CHECKSUM.unpack_from(body, length)[0])
            offset += HEADER.size + len(body)


def _feature(features: dict[str, Any], name: str, usual: tuple[str, ...], place: str) -> Any:
    """Return the value of a feature: of the given name, or of the first usual one.

    Raises DataError if there is none, or if the feature has several values."""
    for choice in (name,) if name else usual:
        value = features.get(choice)
        if isinstance(value, SeveralValues):
            raise DataError(
                f"{place}: the feature {choice} has {value.values:,} values, and a row has one image and one label; name"
                " another feature by --image-column or --label-column, or write one value (of an image its bytes)"
            )
        if choice in features:
            return value
    raise DataError(f"{place} has no feature {name or usual[0]}; its features are {', '.join(sorted(features))[:200]}")


def parse_example(data: bytes) -> dict[str, Any]:
    """Return the value of each feature of a tf.train.Example, bytes, int or SeveralValues, by name.

    Features of real numbers and empty ones are None. Raises ValueError, IndexError or UnicodeDecodeError for other
    messages."""
    features: dict[str, Any] = {}
    for number, message in fields_of(data):
        if number == 1 and isinstance(message, bytes):  # Features: a map of names to Feature
            for _, entry in fields_of(message):
                parts = dict(fields_of(_as_bytes(entry)))
                features[_as_bytes(parts.get(1, b"")).decode()] = _value(_as_bytes(parts.get(2, b"")))
    return features


def _value(feature: bytes) -> bytes | int | SeveralValues | None:
    """Return the value of a Feature: of a BytesList (1) or an Int64List (3); None for a FloatList (2) or without one."""
    count = 0
    first: bytes | int | None = None
    for kind, values in fields_of(feature):
        for _, value in fields_of(_as_bytes(values)):
            # Packed numbers: each ends with a byte below 128.
            if kind == 3 and isinstance(value, bytes):
                first = _varint(value, 0)[0] if value and not count else first
                count += sum(byte < 128 for byte in value)
            elif kind in (1, 3):
                first = first if count else value
                count += 1
    if count > 1:
        return SeveralValues(count)
    return _signed(first) if isinstance(first, int) else first


def fields_of(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field of a protocol buffer. Raises ValueError or IndexError if it is damaged."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        # All other kinds are bytes of a length that is known before they are read.
        length = {FIXED64: 8, FIXED32: 4}.get(kind)
        if kind == BYTES:
            length, at = _varint(message, at)
        if length is None or at + length > len(message):
            raise ValueError(f"a field of type {kind} at byte {at}")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return a number of 7 bits per byte, and the place after it. Raises ValueError or IndexError if it does not end."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 10 bytes")


def _signed(value: int) -> int:
    """Return a number of 64 bits as a signed one."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number where a message is expected")
    return value
