"""Files that are compressed by gzip, as data sets are downloaded, and the size to which any compressed file may inflate."""

from __future__ import annotations

import gzip
import zlib

GZIP = b"\x1f\x8b"
ANY_BYTES = 64 << 20  # that a file of any size may inflate to
MOST_INFLATION = 100  # times the size of a larger one: deflate reaches 1,032 for blank bytes, and images seldom 10


class InflationLimit:
    """A count of the bytes to which a file inflates.

    Args:
        size: the size of the file.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.most = max(ANY_BYTES, MOST_INFLATION * size)
        self.count = 0

    def add(self, count: int) -> None:
        """Count bytes, before or after they are inflated. Raises ValueError if the file inflates to too many."""
        self.count += count
        if self.count > self.most:
            raise ValueError(
                f"its {self.size:,} bytes would inflate to more than {self.most:,} bytes, and to over {MOST_INFLATION}"
                " times its size; store it uncompressed if that is right"
            )


class LimitedReader:
    """A file that is inflated while it is read. ``read`` raises ValueError beyond the limit."""

    def __init__(self, file: gzip.GzipFile, limit: InflationLimit) -> None:
        self.file = file
        self.limit = limit

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.limit.add(len(data))
        return data


def inflate_start(head: bytes, length: int) -> bytes:
    """Return the first bytes of a file, decompressed if it is compressed; b"" if they are damaged.

    head: the bytes as stored. length: the most bytes that are decompressed."""
    if head[:2] != GZIP:
        return head
    try:
        return zlib.decompressobj(31).decompress(head, length)
    except zlib.error:
        return b""
