"""What Provatas et al. (2021) and Provatas's thesis print of the same question: 12 asynchronous workers, ResNet-56.

Tables II, IV and V are of CIFAR-10, CIFAR-100's coarse and its fine classes; the final epoch of five runs each. The columns
that they name variance are standard deviations: those of the three runs that the thesis lists in table 6.4 are 0.00066,
0.00056 and 0.00165, and the tables print 0.000648, 0.000550 and 0.001358. So "six times less variance" is a sixth of the
standard deviation. With five runs on each side a ratio of standard deviations under 3.1 is not significant at 5 %."""

from __future__ import annotations

from typing import NamedTuple

RUNS = 5
SPARSE_RUNS = 3


class Printed(NamedTuple):
    """Of the evaluation images, at the final epoch: mean and standard deviation. NaN stands for what is not printed."""

    accuracy: float
    accuracy_sd: float


class PublishedTable(NamedTuple):
    """title: which table. rows: by the names that the shipped plans give to ways of sharding."""

    title: str
    rows: dict[str, Printed]


TABLES = {
    "cifar10": PublishedTable(
        "Table II, CIFAR-10",
        {
            "random": Printed(0.935489, 0.000863),
            "stratified": Printed(0.935396, 0.000284),
            "distribution_aware-k20": Printed(0.935291, 0.000648),
            "distribution_aware-k30": Printed(0.935885, 0.000550),
            "distribution_aware-k40": Printed(0.935127, 0.001358),
        },
    ),
    "cifar100-coarse": PublishedTable(
        "Table IV, CIFAR-100, coarse classes",
        {
            "random": Printed(0.805993, 0.004452),
            "stratified": Printed(0.805841, 0.000728),
            "distribution_aware-k30": Printed(0.806072, 0.000931),
            "distribution_aware-k40": Printed(0.806237, 0.002374),
            "distribution_aware-k60": Printed(0.805775, 0.003009),
        },
    ),
    "cifar100-fine": PublishedTable(
        "Table V, CIFAR-100, fine classes",
        {
            "random": Printed(0.704707, 0.002222),
            "stratified": Printed(0.708432, 0.001225),
            "distribution_aware-k50": Printed(0.707048, 0.004526),
            "distribution_aware-k100": Printed(0.703488, 0.003561),
            "distribution_aware-k200": Printed(0.708234, 0.002264),
        },
    ),
}
# Table III (thesis 6.4): clusters of at most as many images as workers, in three runs each, CIFAR-10.
SPARSE = {
    "distribution_aware-k20": (2, 1, 3),
    "distribution_aware-k30": (6, 6, 4),
    "distribution_aware-k40": (7, 8, 11),
}


def published_of(dataset: str) -> PublishedTable | None:
    """The table of a plan's data set, whose name is the table's, or begins with it and a hyphen."""
    return next((table for name, table in TABLES.items() if dataset == name or dataset.startswith(f"{name}-")), None)
