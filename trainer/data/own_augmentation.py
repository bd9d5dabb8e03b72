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

from pipeline.core.errors import JobError, UsageError
from trainer.config import CROP_FLIP, Config
from trainer.data.shards import Shards
from trainer.models.own import USER_ERRORS, describe_error, load_function

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
        try:
            result = function(torch.from_numpy(images), generator)
        except USER_ERRORS as error:
            # Only the errors of a machine may be gone after a restart.
            kind = JobError if isinstance(error, OSError | MemoryError) else UsageError
            raise kind(f"{FLAG} {reference} fails for {len(images)} images: {describe_error(error)}") from error
        # Here too, because a function may fail for mini-batches of another size than the check's.
        before = torch.from_numpy(images)
        is_tensor = isinstance(result, torch.Tensor)
        if not is_tensor or (result.shape, result.dtype, result.device) != (before.shape, before.dtype, before.device):
            shape = tuple(getattr(result, "shape", ()))
            place = f" on {result.device}" if is_tensor and result.device != before.device else ""
            raise UsageError(
                f"{FLAG} {reference} made {getattr(result, 'dtype', type(result).__name__)} {shape}{place} of"
                f" {images.dtype} {images.shape}: it must return images of the same shape and type, on the CPU"
            )
        # A result that learned filters computed has a gradient, which numpy does not take.
        return np.ascontiguousarray(result.detach().numpy())

    return augment


def check_augmentation(config: Config, shards: Shards) -> None:
    """Raise UsageError for an augmentation that fails, or that differs when it is repeated."""
    augment = own_augmentation(config)
    if augment is None:
        return
    num_workers = config.num_workers(shards.num_workers)
    largest = max(2, *config.worker_batches(num_workers, shards.ratios_of(num_workers)))
    noise = np.random.default_rng(0).integers(0, 256, (largest, *shards.shape), np.uint8).astype(shards.layout.dtype)
    # A whole mini-batch, and few images many times, because half of all images may be left as they are.
    sizes = (largest, *[2] * 8)
    results = [
        [augment(noise[:size].copy(), np.random.default_rng(seed)) for seed, size in enumerate(sizes)] for _ in range(2)
    ]
    if any(one.tobytes() != other.tobytes() for one, other in zip(*results, strict=True)):
        raise UsageError(
            f"{FLAG} {config.data.augmentation} draws from another source than its generator, so that no run could be"
            " repeated"
        )
