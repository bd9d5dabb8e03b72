"""Samples as a Parquet file for the Hugging Face Hub and ``datasets.load_dataset``, which decodes its images."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.shards import Shards
from trainer.export.samples import TYPES, Samples, are_pictures, make_pngs

SUFFIX = ".parquet"
ROW_GROUP_ROWS = 1000  # readers of the Hub load a whole row group
ROW_GROUP_BYTES = 256 << 20  # of images as arrays; Arrow's offsets count at most 2^31 values
ENTRY = b"huggingface"  # the entry of the file's metadata from which load_dataset reads the types of columns


def make_parquet(shards: Shards, samples: Samples) -> bytes:
    """Return the Parquet file of samples: ``image``, ``label`` if there are classes, ``id``, ``copy`` and other columns.

    ``image`` is an encoded picture; real-valued features and other images are lists in C order (channels, height, width)."""
    types = {"image": _image_type(shards)}
    features: dict[str, dict[str, Any]] = {"image": _image_feature(shards)}
    if "label" in samples.columns:
        types["label"] = pa.int64()
        features["label"] = {"_type": "ClassLabel", "names": class_names(shards)}
    for name, dtype in TYPES.items():
        if name in samples.columns and name != "label":
            types[name] = pa.from_numpy_dtype(dtype)
            features[name] = {"_type": "Value", "dtype": dtype}
    # Without this entry a reader would take classes for numbers, and pictures for structs.
    metadata = {ENTRY: json.dumps({"info": {"features": features}}).encode()}
    schema = pa.schema(list(types.items()), metadata=metadata)
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, schema) as writer:
        rows = max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // shards.layout.record_bytes))
        for first in range(0, len(samples), rows):
            part = slice(first, first + rows)
            columns = [pa.array(samples.columns[name][part], type_) for name, type_ in types.items() if name != "image"]
            arrays = [_make_images(shards, samples.images_NCHW[part]), *columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
    return buffer.getvalue()


def class_names(shards: Shards) -> list[str]:
    """Return a name for each class, all different, as readers need them: its number where the set names none."""
    set_names = shards.manifest.labels.class_names
    all_set_names = set(set_names)
    names: list[str] = []
    earlier_names = set()  # a search in the list would be slow for thousands of classes
    for number in range(shards.num_classes):
        name = set_names[number] if number < len(set_names) and set_names[number] else str(number)
        # Sets may have equal names, and names that are numbers of other classes.
        is_taken = name in earlier_names or (number >= len(set_names) and name in all_set_names)
        names.append(f"{name} (class {number})" if is_taken else name)
        earlier_names.add(names[-1])
    return names


def _make_images(shards: Shards, images_NCHW: npt.NDArray[Any]) -> pa.Array:
    if are_pictures(shards):
        pngs = pa.array(make_pngs(images_NCHW), pa.binary())
        return pa.StructArray.from_arrays([pngs, pa.nulls(len(pngs), pa.string())], ["bytes", "path"])
    size = math.prod(shards.shape)
    offsets = pa.array(np.arange(len(images_NCHW) + 1) * size, pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.array(images_NCHW.reshape(-1)))


def _image_type(shards: Shards) -> pa.DataType:
    if are_pictures(shards):
        return pa.struct({"bytes": pa.binary(), "path": pa.string()})
    return pa.list_(pa.from_numpy_dtype(shards.layout.dtype))


def _image_feature(shards: Shards) -> dict[str, Any]:
    if are_pictures(shards):
        return {"_type": "Image"}
    return {"_type": "Sequence", "feature": {"_type": "Value", "dtype": str(shards.layout.dtype)}}
