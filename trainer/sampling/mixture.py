"""Mixtures of several sources of rows, in shares that a resumed run may change.

The source of each example is a function of its position in a worker's stream. Up to any position since the shares or the
workers were last changed, a source has its share of the examples, rounded up or down. Its rows are drawn in passes over the
source, which other workers complete like passes over a set."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipeline.core.arrays import Ints
from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, generator, word
from trainer.sampling.base import Population, Selection, SelectionStream
from trainer.sampling.orders import PassOrder, level_pattern, members_of
from trainer.sampling.passes import PassRows
from trainer.sampling.remainder import PassRule, WorkerPasses

LONGEST = 100_000  # examples after which a pattern of sources must repeat
MOST_EXPONENT = 20  # of a share such as 1e-3


class MixSpan(NamedTuple):
    """Shares of the sources from a clock on. shares: whole numbers without a common divisor."""

    clock: int
    shares: tuple[int, ...]


def parse_mix(text: str) -> tuple[MixSpan, ...]:
    """Parse shares such as ``0.5,0.3,0.2``, or their history: ``0.5,0.3,0.2;120:0.2,0.4,0.4``. Raises ValueError."""
    spans = []
    for number, part in enumerate(text.split(";")):
        clock, _, shares = part.rpartition(":")
        spans.append(MixSpan(int(clock) if number else 0, _whole_shares(shares if number else part)))
    clocks = [span.clock for span in spans]
    if clocks != sorted(set(clocks)) or len({len(span.shares) for span in spans}) > 1:
        raise ValueError(f"{text} is no history of shares")
    return tuple(spans)


def is_mix(text: str) -> bool:
    """Return whether a text can be parsed, or is empty."""
    try:
        return not text or bool(parse_mix(text))
    except (ValueError, ZeroDivisionError):
        return False


def changed_mix(history: str, request: str, clock: int) -> str:
    """Return the history of a run's shares with other ones from a clock on; unchanged if they are the last ones.

    Args:
        history: of the run.
        request: the shares or the history that a start asks for.
        clock: the first clock that no worker has reached.
    """
    spans = parse_mix(history)
    if request == history or parse_mix(request)[-1].shares == spans[-1].shares:
        return history
    # Shares that no worker has reached were never used.
    used = [part for part, span in zip(history.split(";"), spans, strict=True) if span.clock < clock]
    latest = request.split(";")[-1].rpartition(":")[2]
    return ";".join([*used, f"{clock}:{latest}"]) if used else latest


def mixture_stream(spans: tuple[MixSpan, ...], population: Population, sources: Ints) -> SelectionStream:
    """Return the selections of a worker. Raises UsageError if it has no rows of a source.

    Args:
        spans: the shares by clock; the first span begins at 0.
        population: the rows of all sources.
        sources: number of the source of each row, int64 [N].
    """
    count = len(spans[0].shares)
    missing = np.flatnonzero(np.bincount(sources, minlength=count) == 0)
    if len(missing):
        raise UsageError(f"--mix: worker {population.worker} has no rows of set {missing[0]} of --shards")
    rules = source_rules(population.seed, count)
    passes = [
        WorkerPasses(population.worker, rule, 0, (), rows)
        for rule, rows in zip(rules, members_of(sources), strict=True)
    ]
    plans = source_plans(spans, population.batch_size, population.seed, population.worker)
    draw = mixture_draw(plans, passes, population.batch_size)
    return lambda clock: Selection(draw(clock))


@dataclass(frozen=True)
class SourceOrder:
    """The order of a worker's rows of one source in each pass over them.

    Attributes:
        source: number of the source.
        sources: number of all sources.
    """

    source: int
    sources: int

    def pass_order(self, rows: PassRows) -> PassOrder:
        """Return the order of some rows in each pass over them."""

        def order(turn: int) -> Ints:
            number = turn * self.sources + self.source
            return generator(rows.seed, Purpose.GROUP_ORDER, rows.worker, number).permutation(rows.num_rows)

        return order


def source_rules(seed: int, sources: int) -> list[PassRule]:
    """Return the rule by which the rows of each source are drawn. seed: of the run; sources: their number."""
    return [PassRule(seed, SourceOrder(source, sources)) for source in range(sources)]


def mixture_draw(plans: Sequence[SourcePlan], passes: Sequence[WorkerPasses], batch_size: int) -> Callable[[int], Ints]:
    """Return a function from a step of a worker, from 0, to the rows of its mini-batch, int64.

    Args:
        plans: the sources of its stream.
        passes: its passes over each source.
        batch_size: its rows per mini-batch.
    """
    # Two entries: a mini-batch can contain the end of one pass over a source and the beginning of the next.
    orders = [lru_cache(maxsize=2)(each.order) for each in passes]

    def draw(step: int) -> Ints:
        positions = np.arange(step * batch_size, (step + 1) * batch_size)
        # A mini-batch is in one plan: shares change between mini-batches.
        sources, ranks = _plan_at(plans, step * batch_size).sources_at(positions)
        rows = np.empty(batch_size, np.int64)
        for source in np.unique(sources).tolist():
            slots = np.flatnonzero(sources == source)
            # The examples of a source follow each other in its passes.
            rows[slots] = passes[source].draw(int(ranks[slots[0]]), len(slots), orders[source])[0]
        return rows

    return draw


def _plan_at(plans: Sequence[SourcePlan], position: int) -> SourcePlan:
    """Return the plan of a position in a worker's stream."""
    return plans[bisect_right(plans, position, key=lambda plan: plan.position) - 1]


def examples_before(plans: Sequence[SourcePlan], position: int) -> list[int]:
    """Return how many examples of each source come before a position in a worker's stream."""
    counts: list[int] = _plan_at(plans, position).ranks_before(np.array([position]))[0].tolist()
    return counts


class SourcePlan(NamedTuple):
    """The sources of a stream from a position on.

    Attributes:
        position: the first position.
        pattern: source of each position, which repeats, int64 [L].
        ranks: how many examples of its source come before each position of the pattern, int64 [L].
        totals: examples of each source in the pattern, int64 [S].
        begins: examples of each source before ``position``, int64 [S].
    """

    position: int
    pattern: Ints
    ranks: Ints
    totals: Ints
    begins: Ints

    @classmethod
    def from_pattern(cls, position: int, pattern: Ints, begins: Ints) -> SourcePlan:
        """Count the examples of the sources in a pattern. See the attributes."""
        ranks = np.empty(len(pattern), np.int64)
        for source in range(len(begins)):
            slots = np.flatnonzero(pattern == source)
            ranks[slots] = np.arange(len(slots))
        return cls(position, pattern, ranks, np.bincount(pattern, minlength=len(begins)), begins)

    def ranks_before(self, positions: Ints) -> Ints:
        """Return how many examples of each source come before some positions, int64 [P, S]. positions: int64 [P]."""
        periods, inside = np.divmod(positions - self.position, len(self.pattern))
        before = np.zeros((len(self.pattern) + 1, len(self.begins)), np.int64)
        for source in range(len(self.begins)):
            before[1:, source] = np.cumsum(self.pattern == source)
        ranks: Ints = self.begins + np.outer(periods, self.totals) + before[inside]
        return ranks

    def sources_at(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the source of some positions, and how many examples of it come before each, int64 each."""
        periods, inside = np.divmod(positions - self.position, len(self.pattern))
        sources = self.pattern[inside]
        return sources, self.begins[sources] + periods * self.totals[sources] + self.ranks[inside]


def source_plans(spans: tuple[MixSpan, ...], batch_size: int, seed: int, worker: int) -> list[SourcePlan]:
    """Return the sources of a worker's stream, in a plan for each span of shares.

    Args:
        spans: the shares by clock; the first span begins at 0.
        batch_size: rows per mini-batch of the worker.
        seed: of the run.
        worker: number of the worker.
    """
    plans: list[SourcePlan] = []
    for number, span in enumerate(spans):
        pattern = level_pattern(np.array(span.shares), generator(seed, Purpose.GROUP_PATTERN, worker, number))
        position = span.clock * batch_size
        # Passes over the sources continue when the shares change, so that no row is drawn twice in a pass.
        begins = plans[-1].ranks_before(np.array([position]))[0] if plans else np.zeros(len(span.shares), np.int64)
        plans.append(SourcePlan.from_pattern(position, pattern, begins))
    return plans


def cohort_plans(
    spans: tuple[MixSpan, ...], batch_size: int, seed: int, worker: int, *, clock: int, number: int
) -> list[SourcePlan]:
    """Return the sources of the stream of a worker of a cohort, which begins at a clock: one plan per span from there on.

    The stream of the first cohort is the one of ``source_plans``. A later one has random numbers of its own.

    Args:
        spans, batch_size, seed, worker: see ``source_plans``.
        clock: the first clock of the cohort.
        number: of the cohort, from 0.
    """
    present = bisect_right(spans, clock, key=lambda span: span.clock) - 1
    own = tuple(MixSpan(max(0, span.clock - clock), span.shares) for span in spans[present:])
    return source_plans(own, batch_size, word(seed, Purpose.COHORT, number) if number else seed, worker)


def rows_by_source(plans: list[SourcePlan], batch_size: int, clocks: Ints, examples: Ints) -> Ints:
    """Return how many rows of each source are in some pushes of a worker, by plan: int64 [plans, S].

    Args:
        plans: the result of ``source_plans`` of the worker.
        batch_size: rows per mini-batch of the worker.
        clocks: number of the first mini-batch of each push, int64 [P].
        examples: rows of all mini-batches of each push, int64 [P].
    """
    begins = clocks * batch_size
    ends = begins + examples
    # Pushes that follow each other are one stretch of the stream: of most workers there are only a few stretches.
    cuts = np.flatnonzero(begins[1:] != ends[:-1])
    begins = np.append(begins[:1], begins[cuts + 1])
    ends = np.append(ends[cuts], ends[-1:])
    firsts = [plan.position for plan in plans]
    limits = [*firsts[1:], max(firsts[-1], int(ends.max(initial=0)))]
    counts = []
    for plan, limit in zip(plans, limits, strict=True):
        inside = (np.clip(bounds, plan.position, limit) for bounds in (begins, ends))
        first, last = (plan.ranks_before(bounds).sum(axis=0) for bounds in inside)
        counts.append(last - first)
    return np.array(counts)


def _whole_shares(text: str) -> tuple[int, ...]:
    """Return positive shares as whole numbers in the same proportion. Raises ValueError."""
    parts = text.lower().split(",")
    # Before they are read: a power of ten with a long exponent has as many digits.
    if any(abs(int(part.partition("e")[2] or 0)) > MOST_EXPONENT for part in parts):
        raise ValueError(f"{text} has an exponent beyond {MOST_EXPONENT}")
    shares = [Fraction(part) for part in parts]
    if min(shares) <= 0:
        raise ValueError(f"{text} has a share that is not positive")
    # Exactly, as the decimals say: a rounded share would drift away from them.
    scale = math.lcm(*(share.denominator for share in shares))
    whole = [int(share * scale) for share in shares]
    divisor = math.gcd(*whole)
    if sum(whole) // divisor > LONGEST:
        raise ValueError(f"{text} repeats after more than {LONGEST} examples only")
    return tuple(number // divisor for number in whole)
