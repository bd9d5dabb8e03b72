"""TFRecord files written without the product: protocol buffers and checksums by their definitions."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache


@cache
def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ 0x82F63B78 if byte & 1 else byte >> 1
        table.append(byte)
    return table


def checksum(data: bytes) -> int:
    """CRC-32C, byte by byte."""
    table = _table()
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> bytes:
    crc = checksum(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord(records: Sequence[bytes]) -> bytes:
    parts = []
    for record in records:
        length = struct.pack("<Q", len(record))
        parts += [length, masked(length), record, masked(record)]
    return b"".join(parts)


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def example(*, packed: bool = True, **features: bytes | int | float | str | list[int] | list[str]) -> bytes:
    """A tf.train.Example. Names have a slash for every two underscores."""
    entries = []
    for name, value in features.items():
        if isinstance(value, list):
            numbers = [each for each in value if isinstance(each, int)]
            if packed and numbers:
                feature = field(3, field(1, b"".join(map(varint, numbers))))
            elif numbers:
                feature = field(3, b"".join(varint(1 << 3) + varint(each) for each in numbers))
            else:
                feature = field(1, b"".join(field(1, str(each).encode()) for each in value))
        elif isinstance(value, int):
            feature = field(3, field(1, varint(value)) if packed else varint(1 << 3) + varint(value))
        elif isinstance(value, float):
            feature = field(2, field(1, struct.pack("<f", value)))
        else:
            feature = field(1, field(1, value.encode() if isinstance(value, str) else value))
        entries.append(field(1, field(1, name.replace("__", "/").encode()) + field(2, feature)))
    return field(1, b"".join(entries))
