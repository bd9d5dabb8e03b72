"""The figures that Provatas et al. (2021) and Provatas's thesis print: 12 asynchronous workers, ResNet-56.

Tables II, IV and V are of CIFAR-10, CIFAR-100's coarse and its fine classes; the final epoch of five runs each. The
columns that they name variance contain standard deviations: the standard deviations of the three runs that the thesis
lists in table 6.4 are 0.00066, 0.00056 and 0.00165, and the tables print 0.000648, 0.000550 and 0.001358. "Six times
less variance" therefore means a sixth of the standard deviation. These three have the divisor n, which the tables
probably have too; the program's divisor is n - 1. That makes 12 % with five runs, and no difference in ratios. With five
runs on each side, a ratio of standard deviations under 3.1 is not significant at 5 %.

The "up to eight times" of the paper's abstract is about the accuracy of the training rows as they were trained, which
TensorFlow prints: 8.48 for CIFAR-10 with 30 clusters, 10.3 for the fine classes with 50. They are the largest of the
paper's ratios. The training figures of the other rows are not known here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

RUNS = 5


class PublishedFigures(NamedTuple):
    """Means and standard deviations over runs at the final epoch. NaN: not known here.

    Attributes:
        accuracy, accuracy_sd, loss, loss_sd: on the evaluation images.
        train_accuracy_sd, train_loss, train_loss_sd: of the training rows as they were trained.
    """

    accuracy: float
    accuracy_sd: float
    loss: float
    loss_sd: float
    train_accuracy_sd: float = math.nan
    train_loss: float = math.nan
    train_loss_sd: float = math.nan


class PublishedTable(NamedTuple):
    """A published table.

    Attributes:
        title: number and subject of the table.
        rows: by the names that the shipped plans give to ways of sharding.
        whiskers: smallest and largest number of rows of a class in most random shards of the second of figure 7's three
            runs, as far as the figure can be read; 175 and 235 in the third one.
        sparse: clusters with at most as many images as workers, in three runs each (table III, thesis 6.4).
    """

    title: str
    rows: dict[str, PublishedFigures]
    whiskers: tuple[int, int] | None = None
    sparse: Mapping[str, tuple[int, int, int]] = {}


TABLES = {
    "cifar10": PublishedTable(
        "Table II, CIFAR-10",
        {
            "random": PublishedFigures(0.935489, 0.000863, 0.4424, 0.0062, 0.001086),
            "stratified": PublishedFigures(0.935396, 0.000284, 0.4441, 0.0054),
            "distribution_aware-k20": PublishedFigures(0.935291, 0.000648, 0.445127, 0.004059),
            "distribution_aware-k30": PublishedFigures(0.935885, 0.000550, 0.4421, 0.0034, 0.000128),
            "distribution_aware-k40": PublishedFigures(0.935127, 0.001358, 0.441692, 0.011402),
        },
        sparse={
            "distribution_aware-k20": (2, 1, 3),
            "distribution_aware-k30": (6, 6, 4),
            "distribution_aware-k40": (7, 8, 11),
        },
    ),
    "cifar100-coarse": PublishedTable(
        "Table IV, CIFAR-100, coarse classes",
        {
            "random": PublishedFigures(0.805993, 0.004452, 1.2165, 0.0101),
            "stratified": PublishedFigures(0.805841, 0.000728, 1.2328, 0.0061),
            "distribution_aware-k30": PublishedFigures(0.806072, 0.000931, 1.219970, 0.009967),
            "distribution_aware-k40": PublishedFigures(0.806237, 0.002374, 1.2116, 0.0087),
            "distribution_aware-k60": PublishedFigures(0.805775, 0.003009, 1.209313, 0.021793),
        },
        whiskers=(180, 230),
    ),
    "cifar100-fine": PublishedTable(
        "Table V, CIFAR-100, fine classes",
        {
            "random": PublishedFigures(0.704707, 0.002222, 1.8413, 0.0261, 0.007855),
            "stratified": PublishedFigures(0.708432, 0.001225, 1.8174, 0.0116),
            "distribution_aware-k50": PublishedFigures(
                0.707048, 0.004526, 1.835961, 0.019680, 0.000764, 0.513846, 0.004085
            ),
            "distribution_aware-k100": PublishedFigures(0.703488, 0.003561, 1.851682, 0.015945),
            "distribution_aware-k200": PublishedFigures(0.708234, 0.002264, 1.8392, 0.0134),
        },
    ),
}


def published_of(dataset: str) -> PublishedTable | None:
    """Return the table of a plan's data set, or None.

    The data set has the table's name, or one that begins with it and a hyphen."""
    return next((table for name, table in TABLES.items() if dataset == name or dataset.startswith(f"{name}-")), None)
