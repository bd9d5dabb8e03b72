"""--resize follows its published rule, which is computed here with whole numbers and fractions, without Pillow."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest

from pipeline.core.errors import UsageError
from pipeline.input.read_options import ReadOptions
from pipeline.input.resize import resize

ONE = 1 << 22


def weights(inputs: int, outputs: int) -> list[list[int]]:
    """The weight of every input in every output, in multiples of 2^-22."""
    scale = Fraction(inputs, outputs)
    support = max(Fraction(1), scale)
    table = []
    for output in range(outputs):
        centre = (output + Fraction(1, 2)) * scale
        row = [max(Fraction(0), 1 - abs(j + Fraction(1, 2) - centre) / support) for j in range(inputs)]
        table.append([floor(weight / sum(row) * ONE + Fraction(1, 2)) for weight in row])
    return table


def along_rows(image: np.ndarray, outputs: int) -> np.ndarray:
    """An image [H, W] with ``outputs`` columns."""
    if image.shape[1] == outputs:
        return image
    sums = image.astype(np.int64) @ np.array(weights(image.shape[1], outputs)).T
    resized: np.ndarray = np.clip((sums + ONE // 2) // ONE, 0, 255).astype(np.uint8)
    return resized


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("old", "new"), [((7, 5), (3, 4)), ((4, 6), (9, 13)), ((32, 32), (8, 8)), ((5, 9), (5, 2)), ((1, 1), (3, 2))]
)
def test_bits_are_those_of_the_rule(old: tuple[int, int], new: tuple[int, int], channels: int) -> None:
    image = np.random.default_rng(4).integers(0, 256, (channels, *old), dtype=np.uint8)
    expected = [along_rows(along_rows(plane, new[1]).T, new[0]).T for plane in image]
    assert np.array_equal(resize(image, new), np.stack(expected))


def test_an_image_of_the_size_is_not_changed() -> None:
    image = np.zeros((3, 4, 5), np.uint8)
    assert resize(image, (4, 5)) is image


@pytest.mark.parametrize("size", [(0, 3), (1 << 15, 1 << 15)])
def test_impossible_sizes_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"--resize .*at least 1"):
        ReadOptions(resize=size)
