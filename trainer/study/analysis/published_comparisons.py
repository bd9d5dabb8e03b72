"""Published accuracies, differences of accuracy and times of training, beside which a study's report shows its own.

They are of other networks, longer runs and other machines than most studies: what can agree is the direction. Figures of
ways of sharding are in trainer.study.analysis.published."""

from __future__ import annotations

import math
from typing import NamedTuple

DATAGOSSIP = "DataGossip, figure 2, after 360 s, 3 and 6 runs"
THESIS = "Provatas's thesis, chapter 4, 3 runs"
SYNC_SWITCH = "Sync-Switch, ResNet-32, 8 GPUs"
RCD_SGD = "RCD-SGD, table 2, 10 runs"
STRIPES_BY_VARIANCE = "importance-aware training, table 1"
STRIPES = "importance-aware training, table 2"
BLOCKS = "importance-aware training, table 3, by variance"
TABLE_4 = "importance-aware training, table 4"
TABLE_5 = "importance-aware training, table 5"
MEAN = "mean of 36 settings, best epochs"


class PublishedDifference(NamedTuple):
    """A published comparison of two configurations.

    Attributes:
        source: paper, figure and number of runs.
        dataset: with which the name of a study's data set begins.
        compare: the axis of the two configurations in a study.
        baseline, member: their names in the shipped plans.
        setting: name of a shard configuration or variant that both share; empty for any.
        points: accuracy of the member minus the baseline's, in percentage points.
        speed: time of the baseline over the member's; NaN if it is not published, or if both trained for equal times.
    """

    source: str
    dataset: str
    compare: str
    baseline: str
    member: str
    setting: str
    points: float
    speed: float = math.nan


class PublishedAccuracy(NamedTuple):
    """A published mean accuracy.

    Attributes:
        source: paper, table and number of runs.
        dataset: with which the name of a study's data set begins.
        names: of its shards, protocol and so on in the shipped plans.
        percent: the accuracy.
    """

    source: str
    dataset: str
    names: tuple[str, ...]
    percent: float


# The paper has random shards with an exchange in every round, and its own with one in every second round; not the others.
ACCURACIES = (
    PublishedAccuracy(f"{RCD_SGD}, ResNet-50", "cifar10", ("random", "d-psgd"), 92.5),
    PublishedAccuracy(f"{RCD_SGD}, ResNet-50", "cifar10", ("submodular", "d-psgd-every-2"), 93.7),
    PublishedAccuracy(f"{RCD_SGD}, ResNet-50", "cifar10", ("random", "matcha"), 93.1),
    PublishedAccuracy(f"{RCD_SGD}, ResNet-50", "cifar10", ("submodular", "matcha-every-2"), 93.9),
    PublishedAccuracy(f"{RCD_SGD}, WideResNet", "cifar100", ("random", "d-psgd"), 71.8),
    PublishedAccuracy(f"{RCD_SGD}, WideResNet", "cifar100", ("submodular", "d-psgd-every-2"), 75.2),
    PublishedAccuracy(f"{RCD_SGD}, WideResNet", "cifar100", ("random", "matcha"), 75.5),
    PublishedAccuracy(f"{RCD_SGD}, WideResNet", "cifar100", ("submodular", "matcha-every-2"), 76.2),
)

DIFFERENCES = (
    PublishedDifference(DATAGOSSIP, "cifar10-grey", "variant", "none", "ab", "sorted", 5.3),
    PublishedDifference(DATAGOSSIP, "cifar10-grey", "variant", "none", "ab-every-1", "sorted", 6.4),
    PublishedDifference(DATAGOSSIP, "cifar10-grey", "variant", "none", "k5-every-4", "sorted", 5.3),
    PublishedDifference(DATAGOSSIP, "cifar10-grey", "variant", "none", "k5-every-1", "sorted", 6.4),
    PublishedDifference(DATAGOSSIP, "cifar10-grey", "variant", "none", "ab", "random", 1.6),
    PublishedDifference(DATAGOSSIP, "cifar10-grey", "variant", "none", "k5-every-4", "random", 1.6),
    PublishedDifference(DATAGOSSIP, "cifar10-grey", "variant", "none", "k5-every-1", "random", -2.0),
    PublishedDifference(DATAGOSSIP, "fashion", "variant", "none", "ab", "sorted", 4.3),
    PublishedDifference(DATAGOSSIP, "fashion", "variant", "none", "ab-every-1", "sorted", 2.8),
    PublishedDifference(DATAGOSSIP, "fashion", "variant", "none", "ab", "random", 0.2),
    PublishedDifference(THESIS, "cifar10", "protocol", "all-reduce", "auto", "c1", -0.10, 1.14),
    PublishedDifference(THESIS, "cifar10", "protocol", "all-reduce", "auto", "c2", 0.05, 2.07),
    PublishedDifference(THESIS, "cifar10", "protocol", "all-reduce", "asp", "c2", -0.90, 2.48),
    PublishedDifference(THESIS, "cifar100", "protocol", "all-reduce", "auto", "c1", -0.06, 1.10),
    PublishedDifference(THESIS, "cifar100", "protocol", "all-reduce", "auto", "c2", 0.19, 1.40),
    PublishedDifference(THESIS, "cifar100", "protocol", "all-reduce", "asp", "c2", -2.88, 2.28),
    PublishedDifference(SYNC_SWITCH, "cifar10", "protocol", "bsp", "asp", "", -2.8, 10650 / 1607),
    PublishedDifference(SYNC_SWITCH, "cifar10", "protocol", "bsp", "sync-switch-0.25", "", -0.1, 10650 / 3900),
    # The settings of the larger plan are those that the paper names, which are the best of 36, and its worst blocks.
    PublishedDifference(
        f"{STRIPES_BY_VARIANCE}, {MEAN}", "cifar10", "variant", "random", "stripes-variance", "", -0.14
    ),
    PublishedDifference(f"{STRIPES}, {MEAN}", "cifar10", "variant", "random", "stripes-average", "", -0.12),
    PublishedDifference(f"{BLOCKS}, {MEAN}", "cifar10", "variant", "random", "blocks-average", "", -0.17),
    PublishedDifference(f"{BLOCKS}, intervals of 30", "cifar10", "variant", "random", "blocks-average-long", "", -0.87),
    PublishedDifference(
        STRIPES_BY_VARIANCE, "cifar10", "variant", "random", "stripes-variance-w20-i30", "resnet18", 0.06
    ),
    PublishedDifference(STRIPES, "cifar10", "variant", "random", "stripes-average-w60-i10", "resnet18", -0.03),
    PublishedDifference(BLOCKS, "cifar10", "variant", "random", "blocks-variance-w10-i5", "resnet18", 0.08),
    PublishedDifference(BLOCKS, "cifar10", "variant", "random", "blocks-variance-w15-i30", "resnet18", -0.87),
    PublishedDifference(TABLE_4, "cifar10", "variant", "random", "stripes-variance-w30-i10", "resnet34", 0.26),
    PublishedDifference(TABLE_5, "cifar100", "variant", "random", "stripes-variance-w30-i1", "resnet34", 0.24),
)


def accuracies_of(dataset: str, names: frozenset[str]) -> list[PublishedAccuracy]:
    """Return the published accuracies of a cell of a study, by the names of its tables."""
    return [each for each in ACCURACIES if _is_of(each.dataset, dataset) and names.issuperset(each.names)]


def differences_of(
    dataset: str, compare: str, baseline: str, member: str, setting: tuple[str, ...]
) -> list[PublishedDifference]:
    """Return the published comparisons of a member of a study with its baseline.

    setting: names of everything that both share."""
    return [
        each
        for each in DIFFERENCES
        if (each.compare, each.baseline, each.member) == (compare, baseline, member)
        and _is_of(each.dataset, dataset)
        and (not each.setting or each.setting in setting)
    ]


def _is_of(published: str, dataset: str) -> bool:
    """Return whether a study's data set has the published one's name, or one that begins with it and a hyphen."""
    return dataset == published or dataset.startswith(f"{published}-")
