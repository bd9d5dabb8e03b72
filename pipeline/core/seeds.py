"""Random number generators derived from a run's seed, with a distinct purpose for every use.

Two uses with the same purpose would get the same numbers. numpy pads seed sequences with zeros, so that [s, 3, w] and
[s, 3, w, 0] are equal; every sequence here is [seed, purpose, worker, number]."""

from __future__ import annotations

from enum import IntEnum, unique

import numpy as np


@unique
class Purpose(IntEnum):
    """The purposes of random numbers. The number of a purpose must never change, because that changes all results."""

    INITIALISATION = 0  # a model's first parameters
    ORDER = 1  # the order of a worker's rows in pass ``number``
    AUGMENTATION = 2  # crops and flips of the mini-batch at clock ``number``
    DROPOUT = 3  # dropout masks of the step at clock ``number``
    SAMPLING = 4  # which rows are in the mini-batch at clock ``number``, under Bernoulli sampling
    TRAIN_SAMPLE = 5  # the training rows that a model is evaluated on
    STEP_TIME = 6  # the seconds of the virtual step at clock ``number``
    TOY = 7  # the noise of a toy gradient at clock ``number``
    FIT_ROWS = 9  # which rows a PCA, or hash functions, are fitted to
    CLASS_PARTS = 10  # the part of its class that a row is in, if classes are divided
    HASH_FUNCTIONS = 11  # hash function ``number``; worker 1: the multipliers that combine values into a key
    BUCKET_STARTS = 12  # which worker has the first row of a stream's bucket
    LINKS = 13  # which links of a topology are in use in round ``number``
    SKEW = 14  # the shares of classes in skewed shards
    HOLDOUT = 15  # which training rows are not trained, but decide when a run switches
    SIZES = 18  # shares of workers that are drawn from a distribution
    GROUP_ORDER = 16  # the order of rows in pass ``number``, of samplers other than shuffle and bernoulli
    GROUP_PATTERN = 17  # ties in the sequence of groups in a pass
    TABLE_DRAW = 19  # which rows are in the mini-batch at clock ``number``, of samplers with a loss table
    SIMILARITY_WIDTH = 20  # the rows of all classes whose mean distance is the width of similarities
    REPARTITION = 21  # the random deal of all rows in epoch ``number``
    REMAINDER = 22  # who draws which of the rows that pass ``number`` lacks when cohort ``worker`` begins
    GOSSIP_SELECTION = 23  # which examples a worker gives to others, at the end of its epoch ``number``
    GOSSIP_ORDER = 24  # the order of other workers' examples in a worker's pool
    COHORT = 25  # the seed of samplers without passes in cohort ``worker``
    EVALUATION = 40  # the augmentation of evaluation images at version ``number``; worker 1: dropout there
    SAMPLE_ORDER = 8  # the order of the training rows that a model is evaluated on, and recalibrated with


def sequence(seed: int, purpose: Purpose, worker: int = 0, number: int = 0) -> np.random.SeedSequence:
    """Return the seed sequence of one use."""
    words = [seed, int(purpose), worker, number]
    # An array has the same bits as the list, and numpy takes it in a fourth of the time, if each number is one word.
    if max(words) < 1 << 32:
        return np.random.SeedSequence(np.array(words, np.uint32))
    return np.random.SeedSequence(words)


def generator(seed: int, purpose: Purpose, worker: int = 0, number: int = 0) -> np.random.Generator:
    """Return a numpy generator for one use."""
    return np.random.default_rng(sequence(seed, purpose, worker, number))


def word(seed: int, purpose: Purpose, worker: int = 0, number: int = 0) -> int:
    """Return 64 bits that seed the generator of another library."""
    return int(sequence(seed, purpose, worker, number).generate_state(1, np.uint64)[0])
