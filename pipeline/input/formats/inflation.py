"""The size to which a compressed file may inflate, whatever it claims."""

from __future__ import annotations

import gzip

ANY_BYTES = 64 << 20  # a file of any size may inflate to this size
MOST_INFLATION = 100  # limit of the ratio for larger files: deflate reaches 1,032 for blank bytes, images seldom 10


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
