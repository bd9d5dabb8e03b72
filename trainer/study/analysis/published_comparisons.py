"""Published differences of accuracy and times of training, beside which a study's report shows its own.

They are of other networks, longer runs and other machines than most studies: what can agree is the direction. Figures of
ways of sharding are in trainer.study.analysis.published."""

from __future__ import annotations

import math
from typing import NamedTuple

DATAGOSSIP = "DataGossip, figure 2, after 360 s, 3 and 6 runs"
THESIS = "Provatas's thesis, chapter 4, 3 runs"
SYNC_SWITCH = "Sync-Switch, ResNet-32, 8 GPUs"


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
)


def differences_of(
    dataset: str, compare: str, baseline: str, member: str, setting: tuple[str, ...]
) -> list[PublishedDifference]:
    """Return the published comparisons of a member of a study with its baseline.

    setting: names of everything that both share. A data set has a published one's name, or begins with it and a hyphen.
    """
    return [
        each
        for each in DIFFERENCES
        if (each.compare, each.baseline, each.member) == (compare, baseline, member)
        and (dataset == each.dataset or dataset.startswith(f"{each.dataset}-"))
        and (not each.setting or each.setting in setting)
    ]
