"""The mean image of a training set, which ``--normalise image`` subtracts from images.

The sums of pixels are integers over all distinct rows of the set. So the mean has the same bits on every host, for any
number of workers and any division of the rows among them. Hosts agree on the digest of the shards, so that they need not
agree on the mean."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeline.core.atomic import write_durably
from pipeline.core.errors import UsageError
from trainer.config import CHANNEL, Config
from trainer.data.shard_file import TABLE, row_groups
from trainer.data.shards import Shards

MeanImage = npt.NDArray[np.float32]


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

    Raises DataError and OSError."""
    if shards.kept is None:
        return mean_image(shards)
    # The digest says that the file is of these rows.
    path = shards.kept / f"mean-{shards.digest}"
    try:
        return np.frombuffer(path.read_bytes(), np.float32).reshape(shards.shape)
    except FileNotFoundError:
        mean = mean_image(shards)
        shards.kept.mkdir(parents=True, exist_ok=True)
        write_durably(path, mean.tobytes())
        return mean


def check_normalise(config: Config, shards: Shards) -> None:
    """Raise UsageError for a normalisation of images if the set has real-valued features instead."""
    normalise = config.data.normalise
    if normalise != CHANNEL and shards.layout.dtype != "uint8":
        raise UsageError(
            f"--normalise {normalise} is for images in uint8, and {shards.uri} holds {shards.layout.describe()}, which are"
            " used as they are: leave it out"
        )
