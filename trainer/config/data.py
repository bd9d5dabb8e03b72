"""The options of a run about its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.core.errors import UsageError
from pipeline.core.specs import option
from trainer.gossip.options import GossipOptions
from trainer.models.own import is_reference
from trainer.sampling import SAMPLERS
from trainer.sampling.mixture import is_mix, parse_mix
from trainer.sampling.repartition import RepartitionOptions
from trainer.sampling.shuffle import ShuffleSampler

SEPARATOR = "\n"  # of several paths in the place of a set's URI: no path has it
CROP_FLIP = "crop-flip"
CHANNEL = "channel"  # the default of --normalise


@dataclass(frozen=True)
class Data(RepartitionOptions, GossipOptions):
    """The training data, and how mini-batches are drawn from it.

    batch_size is the global mini-batch B. Each of n workers draws B/n examples per step, rounded as worker_batch says,
    or its part of B by the ratios of the shards; under Bernoulli sampling a random number around that. sampling is the
    name of Config.sampler."""

    shards: str = option(
        help="folder of a committed shard set, or without a manifest the Parquet file or folder of every shard",
        metavar="URI",
        may_change=True,
    )
    batch_size: int = option(128, "examples per mini-batch, divided among the workers", least=1)
    worker_batch: Literal["floor", "exact"] = option(
        "floor",
        "division of a mini-batch that the number of workers does not divide: floor drops the remainder, exact gives an"
        " extra example to each of the first workers",
        advanced=True,
    )
    sampling: str = option(
        ShuffleSampler.name,
        "sampler, which draws a worker's mini-batches from its rows",
        check=lambda name: name in SAMPLERS,
        expected=" or ".join(SAMPLERS),
        advanced=True,
    )
    mix: str = option(
        "",
        "shares of several shard sets in the examples of every worker, such as 0.5,0.3,0.2, for as many --shards; a resumed"
        " run may change them",
        metavar="LIST",
        check=is_mix,
        expected="positive shares, such as 0.5,0.3,0.2",
        may_change=True,
        advanced=True,
    )
    augment: bool = option(True, "augment training images at random", advanced=True)
    augmentation: str = option(
        CROP_FLIP,
        "augmentation of training images: crop-flip, or module:function, which is called with the images of a mini-batch"
        " and a torch.Generator, and returns images",
        metavar="NAME",
        check=lambda name: name == CROP_FLIP or is_reference(name),
        expected=f"{CROP_FLIP} or module:function",
        advanced=True,
    )
    normalise: Literal["channel", "image", "none"] = option(
        CHANNEL,
        "the mean that is subtracted from images before they are divided by 255: channel subtracts the training images'"
        " mean of each channel, image their mean of each pixel (the mean image), none nothing",
        advanced=True,
    )
    follow: bool = option(
        False,
        "after each pass over a worker's rows, include the rows that a stream has appended since",
        may_change=True,
        advanced=True,
    )
    generation: int | None = option(
        None,
        "generation of a streamed shard set to train on",
        least=0,
        may_change=True,
        shown="the newest at the start of the run",
        advanced=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.follow and self.sampling != ShuffleSampler.name:
            raise UsageError(
                f"--follow needs passes over all rows in random order, which --sampling {self.sampling} does not make;"
                " leave out one of them"
            )
        # Each of these options changes which rows or images a worker draws, and excludes others that do.
        if self.augmentation != CROP_FLIP and not self.augment:
            raise UsageError(
                f"--no-augment leaves no images for --augmentation {self.augmentation}: leave out one of them"
            )
        if self.mix:
            self._check_mix()
        if self.repartition != "fixed":
            self._check_repartition()
        if self.gossip:
            self._check_gossip()

    def _check_gossip(self) -> None:
        """Raise UsageError for options that exclude an exchange of examples."""
        for is_given, flag in (
            (self.repartition != "fixed", f"--repartition {self.repartition}"),
            (self.follow, "--follow"),
            (bool(self.mix), "--mix"),
        ):
            if is_given:
                raise UsageError(
                    f"--gossip {self.gossip} exchanges examples among the shards of one set: leave out {flag}"
                )

    def _check_repartition(self) -> None:
        """Raise UsageError for options that exclude a repartition."""
        for is_given, flag in (
            (self.sampling != ShuffleSampler.name, f"--sampling {self.sampling}"),
            (self.follow, "--follow"),
            (bool(self.mix), "--mix"),
        ):
            if is_given:
                raise UsageError(
                    f"--repartition {self.repartition} draws passes over all rows of a set: leave out {flag}"
                )

    def _check_mix(self) -> None:
        """Raise UsageError for options that exclude a mixture, or another number of sets than of shares."""
        for is_given, flag in (
            (self.sampling != ShuffleSampler.name, f"--sampling {self.sampling}"),
            (self.follow, "--follow"),
            (self.generation is not None, f"--generation {self.generation}"),
        ):
            if is_given:
                raise UsageError(f"--mix draws passes over each of several sets: leave out {flag}")
        sets = len(self.shards.split(SEPARATOR))
        if sets != len(parse_mix(self.mix)[0].shares):
            raise UsageError(f"--mix {self.mix}: give as many shares as --shards names sets, {sets}")
