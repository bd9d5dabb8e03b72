"""Samples as a .tar file for WebDataset: the members of a sample have its key as name, and their kind as suffix."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import numpy.typing as npt

from trainer.data.shards import Shards
from trainer.export.samples import Samples, are_pictures, make_pngs

SUFFIX = ".tar"
IN_OTHER_MEMBERS = ("id", "copy", "label")


def make_tar(shards: Shards, samples: Samples) -> bytes:
    """Return the .tar file of samples. Equal samples give equal bytes.

    A member KEY.png has the image, or KEY.npy its array [C, H, W] if it cannot be PNG; KEY.cls the number of the class;
    KEY.json the other columns, if there are any. KEY is the id, and for a copy the id, a dash and the copy's number."""
    columns = samples.columns
    is_png = are_pictures(shards)
    images = make_pngs(samples.images_NCHW) if is_png else [_make_npy(image) for image in samples.images_NCHW]
    others = [name for name in columns if name not in IN_OTHER_MEMBERS]
    buffer = io.BytesIO()
    # WebDataset joins neighbouring members with equal keys, so a sample's members follow each other.
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for row, image in enumerate(images):
            number = columns["id"][row]
            copy = columns["copy"][row]
            key = f"{number:012d}-{copy}" if copy else f"{number:012d}"
            _add(tar, f"{key}.png" if is_png else f"{key}.npy", image)
            if "label" in columns:
                _add(tar, f"{key}.cls", str(columns["label"][row]).encode())
            if others:
                _add(tar, f"{key}.json", json.dumps({name: columns[name][row].item() for name in others}).encode())
    return buffer.getvalue()


def _make_npy(array: npt.NDArray[np.generic]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a member. Its time and owner are 0, so that the file depends on the samples only."""
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
