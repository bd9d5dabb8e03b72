"""The models of all workers in one file of a checkpoint, as safetensors: a row per worker, written in any order."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.core.errors import DataError
from trainer.checkpoints.slice_file import LENGTH_BYTES, Float32s, broken, json_header

ALIGNMENT = 8  # of the first array, as in other safetensors files


def replica_name(generation: int) -> str:
    return f"replicas-{generation}.safetensors"


class ReplicaSummary(NamedTuple):
    """The mean of all models, and how far they are from it.

    Attributes:
        values: float32 [P + Q], the mean of all models in the order of workers, summed in float64.
        momentum: float32 [P], the mean of all momenta.
        distance: root of the mean squared Euclidean distance of the workers' parameters [P] from their mean.
    """

    values: Float32s
    momentum: Float32s
    distance: float


class ReplicaFile:
    """An open file of models, mapped into memory, so that a checkpoint of many workers needs no copy of their models.

    Attributes:
        path: the file.
        values: float32 [N, P + Q], the models by worker; zeros for a worker that has none.
        momentum: float32 [N, P].
    """

    def __init__(self, path: Path, begin: int, shape: tuple[int, int, int], *, write: bool) -> None:
        """Map a file. begin: first byte of the arrays; shape: N, P and Q."""
        workers, parameters, buffers = shape
        self.path = path
        mode: Literal["r+", "r"] = "r+" if write else "r"
        elements = parameters + buffers
        self.values = np.memmap(path, "<f4", mode, begin, (workers, elements))
        self.momentum = np.memmap(path, "<f4", mode, begin + 4 * workers * elements, (workers, parameters))

    def put(self, worker: int, values: Float32s, momentum: Float32s) -> None:
        """Write a worker's model and momentum."""
        self.values[worker] = values
        self.momentum[worker] = momentum

    def flush(self) -> int:
        """Write the file to disk durably, and return its size in bytes."""
        self.values.flush()
        self.momentum.flush()
        return self.path.stat().st_size

    def summary(self, workers: Sequence[int]) -> ReplicaSummary:
        """Return the mean of the models of some workers. Reads their values twice."""
        parameters = self.momentum.shape[1]
        with np.errstate(over="ignore", invalid="ignore"):  # a run that diverges ends because its mean is not finite
            values = mean_of([self.values[worker] for worker in workers])
            momentum = mean_of([self.momentum[worker] for worker in workers])
            squares = [np.sum(np.square(self.values[worker, :parameters] - values[:parameters])) for worker in workers]
            distance = float(np.sqrt(sum(squares) / len(workers)))
            return ReplicaSummary(values.astype(np.float32), momentum.astype(np.float32), distance)


def mean_of(vectors: Sequence[Float32s]) -> npt.NDArray[np.float64]:
    """Return the mean of at least one vector, added in the given order."""
    total = np.zeros(len(vectors[0]))
    for vector in vectors:
        total += vector
    total /= len(vectors)
    return total


def create_replicas(path: Path, num_workers: int, num_parameters: int, num_buffers: int, version: int) -> ReplicaFile:
    """Create a file for the models of a version, filled with zeros. Raises OSError."""
    values = 4 * num_workers * (num_parameters + num_buffers)
    size = values + 4 * num_workers * num_parameters
    header = {
        "__metadata__": {"version": str(version)},
        "values": {"dtype": "F32", "shape": [num_workers, num_parameters + num_buffers], "data_offsets": [0, values]},
        "momentum": {"dtype": "F32", "shape": [num_workers, num_parameters], "data_offsets": [values, size]},
    }
    text = json.dumps(header).encode()
    # Aligned arrays can be mapped into memory.
    text += b" " * (-len(text) % ALIGNMENT)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(LENGTH_BYTES + len(text) + size)
        # On a full disk this raises OSError. Without it, the first write to the mapped file would kill the process.
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, LENGTH_BYTES + len(text) + size)
            except OSError:
                path.unlink()  # some file systems keep the part that they have allocated
                raise
    return ReplicaFile(path, LENGTH_BYTES + len(text), (num_workers, num_parameters, num_buffers), write=True)


def open_replicas(path: Path, num_workers: int, num_parameters: int, num_buffers: int, version: int) -> ReplicaFile:
    """Open the models of a version. Raises DataError if the file is missing, or holds something else."""
    try:
        header, begin = json_header(path)
        shapes = [header[name]["shape"] for name in ("values", "momentum")]
        stored_version = int(header["__metadata__"]["version"])
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the checkpoint was never finished") from None
    except (ValueError, KeyError, TypeError) as error:
        raise broken(path, f"is torn or holds no models ({error})") from None
    # A file of a roll-back, or of another run, has models of other lengths or of another version.
    if stored_version != version or shapes != [
        [num_workers, num_parameters + num_buffers],
        [num_workers, num_parameters],
    ]:
        raise broken(path, f"holds other models than those of version {version}")
    return ReplicaFile(path, begin, (num_workers, num_parameters, num_buffers), write=False)
