"""Samples as a Parquet file for the Hugging Face Hub and ``datasets.load_dataset``, which decodes its images."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.shards import Shards
from trainer.export.samples import Samples, are_pictures, make_pngs

SUFFIX = ".parquet"
ROW_GROUP_ROWS = 1000  # readers of the Hub load a whole row group
ENTRY = b"huggingface"  # the entry of the file's metadata from which load_dataset reads the types of columns
VALUES = {"target": "float32", "coarse_label": "int64", "copy": "int32", "neighbourhood": "int32"}


def make_parquet(shards: Shards, samples: Samples) -> bytes:
    """Return the Parquet file of samples: ``image``, ``label`` if there are classes, ``id``, ``copy`` and other columns.

    ``image`` is an encoded picture; real-valued features and other images are lists in C order (channels, height, width)."""
    arrays: dict[str, pa.Array] = {"image": _make_images(shards, samples)}
    features: dict[str, dict[str, Any]] = {"image": _image_feature(shards)}
    if "label" in samples.columns:
        arrays["label"] = pa.array(samples.columns["label"].astype(np.int64))
        features["label"] = {"_type": "ClassLabel", "names": class_names(shards)}
    for name in ("id", *(name for name in VALUES if name in samples.columns)):
        dtype = VALUES.get(name, "int64")
        arrays[name] = pa.array(samples.columns[name].astype(dtype))
        features[name] = {"_type": "Value", "dtype": dtype}
    # Without this entry a reader would take classes for numbers, and pictures for structs.
    metadata = {ENTRY: json.dumps({"info": {"features": features}}).encode()}
    table = pa.table(arrays).replace_schema_metadata(metadata)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=ROW_GROUP_ROWS)
    return buffer.getvalue()


def class_names(shards: Shards) -> list[str]:
    """Return the name of each class, and its number where the set names none."""
    names = shards.manifest.labels.class_names
    return [*names, *map(str, range(len(names), shards.num_classes))]


def _make_images(shards: Shards, samples: Samples) -> pa.Array:
    if are_pictures(shards):
        pngs = pa.array(make_pngs(samples.images_NCHW), pa.binary())
        return pa.StructArray.from_arrays([pngs, pa.nulls(len(pngs), pa.string())], ["bytes", "path"])
    values = samples.images_NCHW.reshape(len(samples), -1)
    offsets = np.arange(len(values) + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))


def _image_feature(shards: Shards) -> dict[str, Any]:
    if are_pictures(shards):
        return {"_type": "Image"}
    return {"_type": "Sequence", "feature": {"_type": "Value", "dtype": str(shards.layout.dtype)}}
