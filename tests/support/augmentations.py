"""Augmentations of a user's own, as ``--augmentation tests.support.augmentations:FUNCTION`` names them."""

from __future__ import annotations

import torch


def brightness(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Add one random number to all pixels of an image."""
    change = torch.randint(-20, 21, (len(images), 1, 1, 1), generator=generator)
    return (images.int() + change).clamp(0, 255).to(images.dtype)


def identity(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images


def cut(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images[..., 1:]


def scaled(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images.float() / 255


def halved(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a type that numpy does not have."""
    return images.bfloat16()


def elsewhere(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return images on a device that no numpy array is on."""
    return images.to("meta")


def unseeded(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return images + torch.randint(0, 3, images.shape).to(images.dtype)


def impatient(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    raise KeyError("contrast")


def small(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Fail for mini-batches of ten images."""
    if len(images) == 10:
        raise RuntimeError("ten are too many")
    return images


def learned(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return features with a gradient."""
    return images * torch.nn.Parameter(torch.ones(()))


def alone(images: torch.Tensor) -> torch.Tensor:
    return images
