"""Integer hashes that are the same on every machine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pipeline.arrays import Ints


def splitmix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Steele et al. 2014, a bijective mixer of 64-bit words."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def keyed_hash(values: Ints, key: int) -> npt.NDArray[np.uint64]:
    """A seeded 64-bit hash of each value."""
    salt = splitmix64(np.array([key & 0xFFFFFFFFFFFFFFFF], np.uint64))
    return splitmix64(np.asarray(values).astype(np.uint64) ^ salt)
