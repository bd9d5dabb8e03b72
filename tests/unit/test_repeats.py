"""Repeated images against counting in plain Python, and what is said about them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.hashing import image_hashes
from pipeline.core.shardset.parts import Repeats
from pipeline.input.repeats import EXAMPLES, ImageHashes, find_repeats, merge_repeats, split_by_bucket

CONTENTS = st.lists(st.integers(0, 12), min_size=1, max_size=40)


def hashes_of(contents: list[int]) -> np.ndarray:
    return image_hashes(np.array(contents, np.uint8)[:, None] * np.ones(7, np.uint8))


def counted(training: list[int], evaluation: list[int]) -> Repeats:
    repeats = [[training.index(each), at] for at, each in enumerate(training) if each in training[:at]]
    leaks = [[training.index(each), at] for at, each in enumerate(evaluation) if each in training]
    return Repeats(len(repeats), len(leaks), repeats[:EXAMPLES], leaks[:EXAMPLES])


@given(CONTENTS, st.lists(st.integers(0, 15), max_size=20), st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_repeats_are_those_of_a_search(training: list[int], evaluation: list[int], buckets: int, pieces: int) -> None:
    """However rows are divided among tasks and buckets."""
    parts: dict[int, list[ImageHashes]] = {}
    for contents, is_evaluation in ((training, False), (evaluation, True)):
        ids = np.arange(len(contents))
        for piece in range(pieces):
            mine = ids[piece::pieces]
            if len(mine):
                images = ImageHashes(hashes_of(contents)[mine], mine, is_evaluation)
                for bucket, part in split_by_bucket(images, buckets):
                    parts.setdefault(bucket, []).append(part)
    # A bucket without rows has no repeats.
    found = merge_repeats([find_repeats(parts.get(bucket, [])) for bucket in range(buckets)])
    assert found == counted(training, evaluation)


def test_images_that_differ_in_a_byte_have_other_hashes() -> None:
    images = np.zeros((50, 3, 4, 4), np.uint8)
    images.reshape(50, -1)[np.arange(48), np.arange(48)] = 1
    hashes = image_hashes(images)
    assert len(set(hashes.tolist())) == 49
    assert hashes[48] == hashes[49]


def test_sentences_name_an_example() -> None:
    assert Repeats(1200, 1, [[3, 17]], [[4, 0]]).sentences() == [
        "rows with the image of an earlier row: 1,200, such as 17 (row 3)",
        "evaluation rows with the image of a training row: 1, such as 0 (row 4)",
    ]
    assert not Repeats().sentences()
