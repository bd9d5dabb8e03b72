"""The neighbourhoods of evaluation rows, by the PCA and the k-means that a set keeps.

The arithmetic is of integers, so that a row gets the neighbourhood that the job would give it.

Shapes: N rows, d pixels of an image, p components, K neighbourhoods."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Floats, Ints
from pipeline.core.errors import DataError
from pipeline.core.npz import Arrays, check_arrays, from_bytes
from pipeline.core.shardset.generations import name_of_model
from pipeline.core.storage.retries import with_retries
from trainer.data.mapped_images import Images, Pixels
from trainer.data.shards import Shards
from trainer.watchdog import kick

STRATEGY = "distribution_aware"  # class_cluster has centres per class, in which no row is placed without its label
FILES = ("pca/arrays.npz", "kmeans/arrays.npz")
BLOCK_VALUES = 4 << 20  # pixels, or distances, that are held in float64 at a time


@dataclass(frozen=True)
class NeighbourhoodModel:
    """A fitted model as integers, held in float64, which multiplies them exactly.

    Attributes:
        weights: of the projection, float64 [d, p].
        shift: the number of low bits of a product that the rounding removes.
        centres: float64 [K, p], on the grid of the points.
    """

    weights: Floats
    shift: int
    centres: Floats

    def nearest(self, images: Pixels) -> Ints:
        """Return the number of the nearest centre of images in uint8 [N, d], int64 [N]: the lower one of a tie."""
        points = (images.astype(np.float64) @ self.weights).astype(np.int64) + (1 << self.shift >> 1) >> self.shift
        # |point|^2 is the same for all centres.
        norms = np.einsum("kp,kp->k", self.centres, self.centres)
        numbers: Ints = (points.astype(np.float64) @ (-2 * self.centres.T) + norms).argmin(axis=1)
        return numbers

    def assign(self, images: Images) -> Ints:
        """Return the neighbourhood of each image of [N, C, H, W], int64 [N], block by block.

        Costs 2 N p (d + K) flop."""
        numbers = np.empty(len(images), np.int64)
        step = max(1, BLOCK_VALUES // max(self.weights.shape[0], len(self.centres)))
        for low in range(0, len(images), step):
            kick()  # the watchdog: many large images take long
            block = np.asarray(images[low : low + step])
            numbers[low : low + len(block)] = self.nearest(block.reshape(len(block), -1))
        return numbers


@dataclass(frozen=True)
class Neighbourhoods:
    """The neighbourhood of each evaluation row, int64 [N], and the number of neighbourhoods."""

    numbers: Ints
    count: int

    def to_json(self, is_correct: npt.NDArray[np.bool_]) -> dict[str, list[int]]:
        """Return the keys of an ``eval`` event. is_correct: whether the class of each row is predicted, bool [N]."""
        return {
            "neighbourhood_rows": np.bincount(self.numbers, minlength=self.count).tolist(),
            "neighbourhood_correct": np.bincount(self.numbers[is_correct], minlength=self.count).tolist(),
        }


def read_model(shards: Shards) -> NeighbourhoodModel | None:
    """Return the model of a set of images; None if it keeps none that places an image.

    Raises DataError for a damaged model, and OSError."""
    by_name = {name_of_model(path): f"{shards.uri}/{path}" for path in shards.manifest.model or ()}
    is_of_images = shards.layout.dtype == "uint8" and not shards.manifest.params.get("embedding")
    if shards.sets or shards.manifest.strategy != STRATEGY or not is_of_images or not by_name.keys() >= {*FILES}:
        return None
    pca, kmeans = (_read(shards, by_name[name]) for name in FILES)
    uri = by_name[FILES[0]]
    try:
        # The arrays that the model needs, of all that the two files hold.
        needed = {"weights": pca["weights"], "pca": pca["grid"], "centres": kmeans["centres"], "kmeans": kmeans["grid"]}
        check_arrays(needed, weights=f"f8 {shards.layout.record_bytes} p", pca="i8 2", centres="i8 k p", kmeans="i8 2")
        shift, exponent = (int(value) for value in pca["grid"])
        if not (0 <= shift < 64 and exponent == int(kmeans["grid"][0]) and len(kmeans["centres"])):
            raise ValueError("its grid is not the grid of the centres")
        neighbourhoods = len(shards.manifest.neighbourhoods or ())
        if len(kmeans["centres"]) != neighbourhoods:
            raise ValueError(f"it has {len(kmeans['centres'])} centres, and the set {neighbourhoods} neighbourhoods")
    except (KeyError, ValueError) as error:
        raise DataError(f"{uri} is a damaged model: {error}") from None
    return NeighbourhoodModel(pca["weights"], shift, kmeans["centres"].astype(np.float64))


def _read(shards: Shards, uri: str) -> Arrays:
    """Return the arrays of a file of the model, whose checksums are verified. Raises DataError and OSError."""
    try:
        return from_bytes(with_retries(shards.store.read)(uri))
    except FileNotFoundError:
        raise DataError(f"{uri} is missing: the set was replaced, or copied without it") from None
    except ValueError as error:
        raise DataError(f"{uri} is a damaged model: {error}") from None


def neighbourhoods_of_images(shards: Shards, images: Images) -> Neighbourhoods | None:
    """Return the neighbourhoods of the evaluation rows; None if the set keeps no model. Raises as ``read_model``."""
    model = read_model(shards)
    return None if model is None else Neighbourhoods(model.assign(images), len(model.centres))
