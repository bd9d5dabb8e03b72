"""The making of mini-batches: tensors of drawn rows, normalised and augmented."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from pipeline.core.arrays import Ints
from pipeline.core.seeds import Purpose, generator
from trainer.config import Config
from trainer.data.augment import Floats, augment, normalise
from trainer.data.deal import dealt_sizes
from trainer.data.example_table import values_of
from trainer.data.follow import Following
from trainer.data.gossip import GossipSampler
from trainer.data.holdout import trained_places
from trainer.data.loading import load_eval
from trainer.data.mean_image import subtracted_mean
from trainer.data.mixture import sources_of
from trainer.data.neighbourhoods import read_model
from trainer.data.own_augmentation import Augmentation, own_augmentation
from trainer.data.repartition import partition_sampler
from trainer.data.rows import Rows
from trainer.data.sampling import Draw, FixedSampler, FollowSampler, RowSampler, TableRowSampler, ValidationRows
from trainer.data.shards import Shards
from trainer.exchange.neighbours import NeighbourExchange
from trainer.models.own import OwnModel
from trainer.sampling.base import GroupBy, Population, Selection, TableSampler, check_selection
from trainer.sampling.mixture import mixture_stream, parse_mix


class Batch(NamedTuple):
    """The tensors of a mini-batch. images_BCHW: float32, normalised. labels: int64 [B], or targets in float32."""

    images_BCHW: torch.Tensor
    labels: torch.Tensor


class MiniBatch(NamedTuple):
    """A mini-batch with its origin.

    Attributes:
        tensors: what the model computes with.
        draw: the rows that it was made of.
        read_s: seconds that drawing and making took.
    """

    tensors: Batch
    draw: Draw
    read_s: float


def make_batch(
    draw: Draw,
    mean: Floats,
    rng: np.random.Generator | None = None,
    own: Augmentation | None = None,
    *,
    may_share: bool = False,
) -> Batch:
    """Return the tensors of drawn rows.

    Args:
        draw: the rows.
        mean: float32 [C] or [C, H, W], in 0..255.
        rng: decides on random changes of images; None makes none. Real-valued features are not cropped and flipped.
        own: an augmentation of the user's own, before the normalisation (default: crops and flips after it).
        may_share: whether the tensors of all rows in their order may share memory with the rows. Nobody may change them.
    """
    # Gathering all rows takes longer than the gradient of a linear model.
    places = slice(None) if may_share and own is None and _are_all(draw) else draw.places
    raw = draw.rows.images_NCHW[places]
    if own is not None and rng is not None:
        raw = own(raw, rng)
    images = normalise(raw, mean)
    if own is None and rng is not None and raw.dtype == np.uint8:
        images = augment(images, rng)
    return Batch(torch.from_numpy(images), torch.from_numpy(draw.rows.labels[places]))


def _are_all(draw: Draw) -> bool:
    """Return whether a mini-batch has all rows, in their order."""
    places = draw.places
    return len(places) == len(draw.rows) and bool((places[1:] > places[:-1]).all())


class Batches:
    """The mini-batches of one worker by clock, made in the calling thread: a pure function of the clock.

    Args:
        sampler: draws the rows.
        mean: float32 [C] or [C, H, W], in 0..255.
        seed: of the run.
        worker: number of the worker.
        augment: whether to augment images at random.
        own, may_share: see ``make_batch``.
    """

    def __init__(
        self,
        sampler: RowSampler,
        mean: Floats,
        *,
        seed: int,
        worker: int,
        augment: bool,
        own: Augmentation | None = None,
        may_share: bool = False,
    ) -> None:
        self.sampler = sampler
        self.mean = mean
        self.seed = seed
        self.worker = worker
        self.augment = augment
        self.own = own
        self.may_share = may_share

    def make(self, clock: int, table: Floats | None = None) -> MiniBatch:
        """Return the mini-batch at a clock, the number of the worker's step. table: see RowSampler."""
        start = time.perf_counter()
        draw = self.sampler.draw(clock, table)
        rng = generator(self.seed, Purpose.AUGMENTATION, self.worker, clock) if self.augment else None
        tensors = make_batch(draw, self.mean, rng, self.own, may_share=self.may_share)
        return MiniBatch(tensors, draw, time.perf_counter() - start)

    @property
    def gossip(self) -> GossipSampler | None:
        """The sampler of a worker that exchanges examples with others; None for other workers."""
        return self.sampler if isinstance(self.sampler, GossipSampler) else None

    def ends_of_passes(self, first: int, end: int) -> int:
        """Return the number of passes over the worker's rows that end in mini-batches ``first`` to ``end`` - 1."""
        # A worker has no examples of others for steps that it has missed.
        if gossip := self.gossip:
            return sum(gossip.passes(clock) for clock in range(first, end))
        return sum(self.sampler.draw(clock).passes or 0 for clock in range(first, end))


def build_batches(
    config: Config, shards: Shards, rows: Rows, worker: int, num_workers: int, *, follow: Following | None = None
) -> Batches:
    """Return the mini-batches of one worker of a run: the same for real workers, virtual time and replay.

    Args:
        config: the run.
        shards: its set.
        rows: the rows dealt to the worker; all rows of the set if the run repartitions.
        worker: number of the worker.
        num_workers: number of workers.
        follow: passes over rows that grow; None for fixed rows.
    """
    sampler = build_sampler(config, shards, rows, worker, num_workers, follow=follow)
    return batches_of_sampler(config, shards, sampler, worker)


def batches_of_sampler(config: Config, shards: Shards, sampler: RowSampler, worker: int) -> Batches:
    """Return the mini-batches of a worker's sampler. See ``build_batches`` for the other arguments."""
    return Batches(
        sampler,
        subtracted_mean(shards),
        seed=config.run.seed,
        worker=worker,
        augment=config.data.augment,
        own=own_augmentation(config),
        # A model of the user's own may change its input in place.
        may_share=not isinstance(config.model, OwnModel),
    )


def build_sampler(
    config: Config, shards: Shards, rows: Rows, worker: int, num_workers: int, *, follow: Following | None = None
) -> RowSampler:
    """Return the sampler of one worker of a run, by the arguments of ``build_batches``."""
    if config.data.repartition != "fixed":
        return partition_sampler(config, shards, rows, worker, num_workers)
    seed = config.run.seed
    batch_size = config.worker_batches(num_workers, shards.ratios_of(num_workers))[worker]
    if follow:
        return FollowSampler(follow, batch_size, seed=seed, worker=worker)
    places = trained_places(rows.ids, config, worker)
    population = population_of(config, shards, rows, places, batch_size, worker)
    if config.data.mix:
        sources = sources_of(rows.ids if places is None else rows.ids[places])
        return FixedSampler(rows, mixture_stream(parse_mix(config.data.mix), population, sources), places)
    if config.table_sampler:
        # The entry of a row does not depend on the rows that are held out, which other workers do not know.
        first = sum(dealt_sizes(shards, num_workers)[:worker])
        population = replace(population, numbers=first + (np.arange(len(rows)) if places is None else places))
    own = sampler_of_rows(config, shards, rows, population, num_workers, places)
    if not config.data.gossip or not isinstance(own, FixedSampler):
        return own
    steps_per_pass = -(-len(population.labels) // batch_size)
    return GossipSampler(own, rows, config, worker, batch_size, steps_per_pass, places=places)


def sampler_of_rows(
    config: Config, shards: Shards, rows: Rows, population: Population, num_workers: int, places: Ints | None = None
) -> FixedSampler | TableRowSampler:
    """Return the sampler of a worker whose rows do not change.

    Args:
        config: the run.
        shards: its set.
        rows: the rows of the worker.
        population: the rows that it draws from.
        num_workers: number of workers.
        places: positions of the rows that it draws from; None for all.
    """
    sampler = config.sampler
    if not isinstance(sampler, TableSampler):
        stream = sampler.stream(population)
        return FixedSampler(rows, lambda clock: check_selection(stream(clock), sampler, population), places)
    keys = sampler.keys(population)
    validation = None
    if sampler.validates:
        # Neighbours merge no tables, so that each of them measures all rows.
        divisor = 1 if isinstance(config.exchange, NeighbourExchange) else num_workers
        portions = config.evaluation_portions(shards.num_workers)
        validation = _validation_rows(shards, sampler.grouping, population, divisor, portions)
    by_table = sampler.table_stream(population)

    def select(clock: int, table: Floats) -> Selection:
        return check_selection(by_table(clock, table), sampler, population)

    return TableRowSampler(rows, select, keys, places, validation, population.epoch_steps)


def _validation_rows(
    shards: Shards, by: GroupBy | None, population: Population, divisor: int, portions: int | None
) -> ValidationRows:
    """Return a worker's part of the evaluation rows of a set, with their classes or neighbourhoods. Raises DataError.

    Args:
        shards: the set.
        by: the groups that the table has entries of.
        population: the rows of the worker; the evaluation rows have real targets if these have.
        divisor: number of workers that share the evaluation rows.
        portions: see ``Config.evaluation_portions``.
    """
    rows = load_eval(shards, targets=population.labels.dtype == np.float32)
    assert rows is not None, "checked before the run"
    keys = rows.labels.astype(np.int64)
    num_groups = shards.num_classes
    if by == "neighbourhood":
        model = read_model(shards)
        assert model is not None, "checked before the run"
        keys = model.assign(rows.images_NCHW)
        num_groups = len(shards.manifest.neighbourhoods or ())
    numbers = np.arange(len(rows))
    if portions:
        numbers %= portions
        keys += numbers * num_groups
    places = np.flatnonzero(numbers % divisor == population.worker % divisor)
    counts = np.bincount(keys, minlength=(portions or 1) * num_groups)
    # Each portion is measured by one worker. The view of one number takes no memory in each of many virtual workers.
    parts = np.broadcast_to(np.float32(1), counts.shape)
    if not portions:
        parts = (np.bincount(keys[places], minlength=len(counts)) / np.maximum(counts, 1)).astype(np.float32)
    rows_of_groups = counts.reshape(-1, num_groups)
    # A group without evaluation rows keeps the first value of its first entry.
    rows_of_groups[0, rows_of_groups.sum(axis=0) == 0] = 1
    shares = (rows_of_groups / rows_of_groups.sum(axis=0)).astype(np.float32)
    return ValidationRows(rows.view(places), keys[places], subtracted_mean(shards), parts, shares)


def population_of(
    config: Config, shards: Shards, rows: Rows, places: Ints | None, batch_size: int, worker: int
) -> Population:
    """Return the rows of a worker as a sampler sees them. Raises ValueError without rows.

    Args:
        config: the run.
        shards: its set.
        rows: the rows dealt to the worker.
        places: positions of the rows that the worker trains on; None for all.
        batch_size: rows per mini-batch of this worker.
        worker: number of the worker.
    """
    trained: Ints | slice = slice(None) if places is None else places
    return Population(
        labels=rows.labels[trained],
        neighbourhoods=rows.neighbourhoods[trained] if len(rows.neighbourhoods) else None,
        values=values_of(config.sampler, rows.ids[trained]),
        batch_size=batch_size,
        share=config.data.batch_size / shards.rows,
        epoch_steps=config.steps_per_epoch(shards.rows),
        seed=config.run.seed,
        worker=worker,
    )
