"""The wire format of examples that workers exchange: ids, labels and images of K rows as the body of one message."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from trainer.gossip.rounds import EMPTY, MOST_EXAMPLE_BYTES, Examples
from trainer.transport.malformed import MalformedMessageError

_HEAD = struct.Struct("<I???III")  # count; has content; has real targets; has real-valued images; C, H, W
_ID = np.dtype("<i8")
_LABELS = (np.dtype("<i8"), np.dtype("<f4"))
_IMAGES = (np.dtype("u1"), np.dtype("<f4"))
_ID_TEXT_BYTES = 21  # of an id as JSON, with a comma: at most 19 digits and a sign


def pack_examples(examples: Examples) -> bytes:
    """Return examples as the body of a message."""
    has_targets = examples.labels.dtype == np.float32
    has_features = examples.images_KCHW.dtype == np.float32
    head = _HEAD.pack(
        len(examples.ids), examples.has_content, has_targets, has_features, *examples.images_KCHW.shape[1:]
    )
    columns: list[Any] = [examples.ids.astype(_ID, copy=False)]
    if examples.has_content:
        columns.append(examples.labels.astype(_LABELS[has_targets], copy=False))
        columns.append(examples.images_KCHW.astype(_IMAGES[has_features], copy=False))
    return b"".join((head, *(np.ascontiguousarray(column).tobytes() for column in columns)))


def unpack_examples(body: bytes | memoryview) -> Examples:
    """Parse examples, as copies. Raises MalformedMessageError."""
    try:
        count, has_content, has_targets, has_features, *shape = _HEAD.unpack_from(body)
    except struct.error:
        raise MalformedMessageError(f"examples in {len(body)} bytes") from None
    columns: list[tuple[np.dtype[Any], list[int]]] = [(_ID, [count])]
    if has_content:
        columns += [(_LABELS[has_targets], [count]), (_IMAGES[has_features], [count, *shape])]
    sizes = [dtype.itemsize * math.prod(dimensions) for dtype, dimensions in columns]
    # Before any copy, because a stranger's numbers may be anything.
    if _HEAD.size + sum(sizes) != len(body):
        raise MalformedMessageError(f"{count} examples in {len(body)} bytes")
    arrays: list[Any] = []
    begin = _HEAD.size
    for (dtype, dimensions), size in zip(columns, sizes, strict=True):
        arrays.append(np.frombuffer(body, dtype, math.prod(dimensions), begin).reshape(dimensions).copy())
        begin += size
    return Examples(*arrays) if has_content else EMPTY._replace(ids=arrays[0])


def most_ids_bytes(count: int) -> int:
    """Return a limit for the length of ids as JSON. count: number of ids."""
    return count * _ID_TEXT_BYTES


def most_examples_bytes(count: int) -> int:
    """Return a limit for the length of packed examples. count: number of examples."""
    return count * MOST_EXAMPLE_BYTES
