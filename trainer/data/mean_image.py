"""The mean that is subtracted from images: of each channel, or the mean image of a training set (``--normalise image``).

The sums of pixels are integers over all distinct rows of the set. So the mean has the same bits on every host, for any
number of workers and any division of the rows among them. Hosts agree on the digest of the shards, so that they need not
agree on the mean."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.core.atomic import write_durably
from pipeline.core.errors import UsageError
from trainer.config import CHANNEL, Config
from trainer.data.shard_file import TABLE, row_groups
from trainer.data.shards import Shards

MeanImage = npt.NDArray[np.float32]
# A model file holds the mean image in its header, about 19 bytes a value, and safetensors reads headers of up to 100 MB.
MOST_VALUES = 4_000_000


_images_by_digest: dict[str, MeanImage] = {}  # the mean images of this process, by the digests of their sets


def subtracted_mean(shards: Shards) -> npt.NDArray[np.float32]:
    """Return the numbers in 0..255 that are subtracted from images: float32 [C], or [C, H, W] for a mean image.

    For a mean image, the first call in a process reads its file, or all rows of the set if no process of this host has
    written the file. Raises DataError and OSError."""
    if shards.normalise == CHANNEL:
        return np.array(shards.manifest.image.mean, np.float32)
    if shards.normalise == "none":
        return np.zeros(shards.shape[0], np.float32)
    if shards.digest not in _images_by_digest:
        _images_by_digest[shards.digest] = kept_mean_image(shards)
    return _images_by_digest[shards.digest]


def mean_image(shards: Shards) -> MeanImage:
    """Return the mean of each pixel over the distinct training rows, in 0..255: float32 [C, H, W].

    Reads all files of the workers, one at a time. Raises DataError and OSError."""
    sums = np.zeros(shards.layout.record_bytes, np.int64)
    count = 0
    for file in shards.files():
        for columns, pixels in row_groups(shards, file, TABLE):
            is_distinct = np.broadcast_to(columns.get("copy", 0) == 0, len(pixels))
            sums += pixels[is_distinct].sum(axis=0, dtype=np.int64)
            count += int(is_distinct.sum())
    return (sums / count).astype(np.float32).reshape(shards.shape)


def kept_mean_image(shards: Shards) -> MeanImage:
    """Return the mean image from its file in the folder ``shards.kept``; compute it and write the file if that is absent.

    One process of a host computes it, and the others wait for its file. Raises DataError and OSError."""
    if shards.kept is None:
        return mean_image(shards)
    # The digest says that the file is of these rows.
    path = shards.kept / f"mean-{shards.digest}"
    mean = _read(path, shards)
    if mean is not None:
        return mean
    with _lock(shards.kept):
        mean = _read(path, shards)
        if mean is None:
            mean = mean_image(shards)
            # The end of another process's run may delete the folder at any time; the mean is known without its file.
            with suppress(FileNotFoundError):
                shards.kept.mkdir(parents=True, exist_ok=True)
                write_durably(path, mean.tobytes())
    return mean


def _read(path: Path, shards: Shards) -> MeanImage | None:
    """Return the mean image of a file; None if there is none, or one of another size, which was damaged from outside."""
    try:
        values = np.frombuffer(path.read_bytes(), np.uint8)
    except FileNotFoundError:
        return None
    if len(values) != 4 * shards.layout.record_bytes:
        return None
    return values.view(np.float32).reshape(shards.shape)


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is made if it does not exist. The kernel releases it when the process ends.

    Without the lock if the folder is deleted meanwhile, or on a file system that cannot lock folders: then several processes
    may compute the same."""
    handle = None
    try:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def check_subtracted_mean(config: Config, shards: Shards) -> None:
    """Raise UsageError for images without a mean that can be subtracted: real-valued features, or very large images."""
    normalise = config.data.normalise
    if normalise == "image" and shards.layout.record_bytes > MOST_VALUES:
        raise UsageError(
            f"--normalise image keeps the mean of each value of an image in the model file, at most {MOST_VALUES:,}, and"
            f" {shards.uri} holds {shards.layout.describe()}: give --normalise channel, or --resize to the job that shards"
        )
    if normalise != CHANNEL and shards.layout.dtype != "uint8":
        raise UsageError(
            f"--normalise {normalise} is for images in uint8, and {shards.uri} holds {shards.layout.describe()}, which are"
            " used as they are: leave it out"
        )
