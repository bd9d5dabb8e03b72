"""An augmentation of the user's own: ``--augmentation module:function``.

The function gets the images of a mini-batch as the shard set has them and a generator, and returns images of the same shape
and type: function(images [B, C, H, W], generator) -> images. It must draw from the generator alone, because the mini-batches
of a worker are made in a thread beside the one that computes, and must be the same after a restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pipeline.core.errors import UsageError
from trainer.config import CROP_FLIP, Config
from trainer.data.shards import Shards
from trainer.models.own import load_function

FLAG = "--augmentation"
Images = npt.NDArray[Any]
Augmentation = Callable[[Images, np.random.Generator], Images]


def own_augmentation(config: Config) -> Augmentation | None:
    """Return the augmentation of the user's own, None for a run without one. Raises UsageError if there is no function."""
    reference = config.data.augmentation
    if reference == CROP_FLIP:
        return None
    function = load_function(FLAG, reference)

    def augment(images: Images, rng: np.random.Generator) -> Images:
        generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
        result = function(torch.from_numpy(images), generator)
        # Here too, because a function may fail for mini-batches of another size than the check's.
        is_alike = isinstance(result, torch.Tensor) and result.shape == images.shape
        if not is_alike or result.numpy().dtype != images.dtype:
            shape = tuple(getattr(result, "shape", ()))
            raise UsageError(
                f"{FLAG} {reference} made {getattr(result, 'dtype', type(result).__name__)} {shape} of {images.dtype}"
                f" {images.shape}: it must return images of the same shape and type"
            )
        return np.ascontiguousarray(result.numpy())

    return augment


def check_augmentation(config: Config, shards: Shards) -> None:
    """Raise UsageError for an augmentation that fails, or that differs when it is repeated."""
    augment = own_augmentation(config)
    if augment is None:
        return
    noise = np.random.default_rng(0).integers(0, 256, (2, *shards.shape)).astype(shards.layout.dtype)
    reference = config.data.augmentation
    try:
        # Many times, because half of all images may be left as they are.
        results = [[augment(noise.copy(), np.random.default_rng(seed)) for seed in range(8)] for _ in range(2)]
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{FLAG} {reference} fails: {' '.join(str(error).split())[:200]}") from None
    if any(one.tobytes() != other.tobytes() for one, other in zip(*results, strict=True)):
        raise UsageError(
            f"{FLAG} {reference} draws from another source than its generator, so that no run could be repeated"
        )
