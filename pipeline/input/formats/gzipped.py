"""Files that are compressed by gzip, as data sets are downloaded."""

from __future__ import annotations

import zlib

GZIP = b"\x1f\x8b"


def inflate_start(head: bytes, length: int) -> bytes:
    """Return the first bytes of a file, decompressed if it is compressed; b"" if they are damaged.

    head: the bytes as stored. length: the most bytes that are decompressed."""
    if head[:2] != GZIP:
        return head
    try:
        return zlib.decompressobj(31).decompress(head, length)
    except zlib.error:
        return b""
