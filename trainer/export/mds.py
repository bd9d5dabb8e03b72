"""Samples as a shard of MosaicML streaming (MDS), and the index of a folder of such shards.

The format (mosaicml-streaming, version 2): a shard is the number N of its samples, N + 1 offsets of the samples in the
file, both uint32, a JSON object that describes the columns, and the samples. A sample is the sizes (uint32) of its columns
of variable size, and then the values of all columns, in the order of their names. ``index.json`` names the shards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from pipeline.core.errors import UsageError
from pipeline.core.json_values import parse_object
from trainer.data.shards import Shards
from trainer.export.samples import TYPES, Samples, are_pictures, make_pngs
from trainer.home.place import Place, entries, read_range

SUFFIX = ".mds"
MOST_BYTES = 1 << 32  # that an offset can name


def make_shard(shards: Shards, samples: Samples) -> bytes:
    """Return the shard of samples: ``image``, ``id``, ``copy``, ``label`` if there are classes, and other columns.

    ``image`` is a PNG file, or an array [C, H, W] if it cannot be PNG. Raises UsageError for 4 GiB and more."""
    is_png = are_pictures(shards)
    encoded = make_pngs(samples.images_NCHW) if is_png else [image.tobytes() for image in samples.images_NCHW]
    values = {"image": encoded} | {
        name: [value.tobytes() for value in column.astype(TYPES[name])] for name, column in samples.columns.items()
    }
    rows = [b"".join(parts) for parts in zip(*(values[name] for name in sorted(values)), strict=True)]
    # The only column of variable size is the PNG file.
    if is_png:
        rows = [np.uint32(len(image)).tobytes() + row for image, row in zip(encoded, rows, strict=True)]
    about = json.dumps(_columns(shards, samples.columns), sort_keys=True).encode()
    offsets = np.cumsum([4 + 4 * (len(rows) + 1) + len(about), *map(len, rows)], dtype=np.int64)
    if offsets[-1] >= MOST_BYTES:
        raise UsageError(
            f"a file of the set has {offsets[-1] / 2**30:.1f} GiB as a shard of streaming, which holds less than 4: make"
            " the set again with fewer rows per file"
        )
    return b"".join([np.uint32(len(rows)).tobytes(), offsets.astype(np.uint32).tobytes(), about, *rows])


def make_index(folder: Place) -> bytes:
    """Return the index of the shards in a folder. Raises OSError."""
    shards = []
    for entry in entries(folder):
        if not entry.name.endswith(SUFFIX):
            continue
        place = folder / entry.name
        rows, first = (int(number) for number in np.frombuffer(read_range(place, 0, 8), "<u4"))
        begin = 4 + 4 * (rows + 1)
        about = parse_object(read_range(place, begin, first - begin))
        data = {"basename": entry.name, "bytes": entry.bytes, "hashes": {}}
        # Readers expect a sample in each shard.
        if rows:
            shards.append(about | {"raw_data": data, "samples": rows, "zip_data": None})
    return json.dumps({"version": 2, "shards": shards}, sort_keys=True).encode()


def _columns(shards: Shards, columns: Iterable[str]) -> dict[str, Any]:
    """Return the description of the columns, in shards and in the index. columns: names beside the image."""
    shape = ",".join(map(str, shards.shape))
    encodings = {name: TYPES[name] for name in columns}
    sizes: dict[str, int | None] = {name: np.dtype(encoding).itemsize for name, encoding in encodings.items()}
    encodings["image"] = "png" if are_pictures(shards) else f"ndarray:{shards.layout.dtype}:{shape}"
    sizes["image"] = None if are_pictures(shards) else math.prod(shards.shape) * np.dtype(shards.layout.dtype).itemsize
    # Readers take the sizes and values of a sample in this order.
    names = sorted(encodings)
    return {
        "version": 2,
        "format": "mds",
        "compression": None,
        "hashes": [],
        "size_limit": None,
        "column_names": names,
        "column_encodings": [encodings[name] for name in names],
        "column_sizes": [sizes[name] for name in names],
    }
