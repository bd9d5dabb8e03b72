"""The rounds of an exchange of examples, as server 0 keeps them; under all-reduce also every worker.

A round begins empty. Every worker adds its examples once, at a selection of its own. When all workers that take part have
added theirs, the round is complete: its examples are the pools of all workers, each without its own, from their next steps
on. A selection of a worker whose examples are in the round already is dropped. Nobody waits: until a round is complete,
workers train with the pools of the one before.

The state is plain JSON and a part of every checkpoint. It names examples by their ids, because the set has their content."""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.core.arrays import Ints
from trainer.coordination.orders import ExampleOffer

MOST_EXAMPLE_BYTES = 4 << 20  # of an image, because messages have a limit: 1024 x 1024 pixels in RGB have 3 MiB


class Examples(NamedTuple):
    """Examples that workers exchange.

    Attributes:
        ids: int64 [K].
        labels: int64 [K], or targets in float32; empty if only the ids are known here, as after a resume.
        images_KCHW: uint8, or real-valued features in float32; empty as ``labels``.
    """

    ids: Ints
    labels: npt.NDArray[np.int64 | np.float32]
    images_KCHW: npt.NDArray[np.uint8 | np.float32]

    @property
    def has_content(self) -> bool:
        return len(self.labels) == len(self.ids)

    def drop(self, begin: int, end: int) -> Examples:
        """Return the examples but those at the places ``begin`` to ``end``."""
        own = np.s_[begin:end]
        ids = np.delete(self.ids, own)
        if not self.has_content:
            return _ids_alone(ids)
        return Examples(ids, np.delete(self.labels, own), np.delete(self.images_KCHW, own, axis=0))


class Pool(NamedTuple):
    """The examples of other workers, as one worker gets them.

    Attributes:
        round: number of their round, from 1; 0 for no examples.
        clock: the worker's first step with this pool.
        first: the worker's first step with any pool; mini-batches are woven from it on.
        examples: of all workers, in their order; the same object for all pools of a round.
        own_begin, own_end: the places of the worker's own ones, which it leaves out.
    """

    round: int
    clock: int
    first: int
    examples: Examples
    own_begin: int = 0
    own_end: int = 0

    def others(self) -> Examples:
        """Return the examples of all other workers, in their order."""
        return self.examples.drop(self.own_begin, self.own_end)


EMPTY = Examples(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 0, 0, 0), np.uint8))


class GossipRounds:
    """The rounds of a run, and what each worker has of them.

    Args:
        memory: the state, which is changed in place.

    Attributes:
        number: of the last complete round, 0 before the first.
    """

    def __init__(self, memory: dict[str, Any]) -> None:
        self.memory = memory
        if not memory:
            memory.update(round=0, ids={}, first={}, begins={}, epochs={}, open={})
        self._whole = EMPTY  # the examples of the last complete round
        self._places: dict[int, tuple[int, int]] = {}  # of each worker's own ones
        # After a resume only the ids of examples are known.
        self._join({int(worker): _ids_alone(ids) for worker, ids in memory["ids"].items()})
        # Epoch and examples of each worker in the round that is not complete.
        self._open = {int(worker): (epoch, _ids_alone(ids)) for worker, (epoch, ids) in memory["open"].items()}
        self._receipts: dict[int, tuple[int, int]] = {}  # the session and round of each worker's pool

    @property
    def number(self) -> int:
        number: int = self.memory["round"]
        return number

    @property
    def contributors(self) -> int:
        """The number of workers whose examples are in the round that is not complete."""
        return len(self._open)

    def add(self, worker: int, epoch: int, examples: Examples) -> bool:
        """Add a worker's examples to the round that is not complete, and return whether they count.

        They do not if the worker has examples in it, or had some of this epoch in an earlier one. epoch: its own."""
        if not self.accepts(worker, epoch):
            return False
        self._open[worker] = epoch, examples
        self.memory["open"][str(worker)] = [epoch, examples.ids.tolist()]
        return True

    def accepts(self, worker: int, epoch: int) -> bool:
        """Return whether a worker's examples would count now; see ``add``."""
        return worker not in self._open and epoch > self.memory["epochs"].get(str(worker), -1)

    def add_offers(
        self, offers: Mapping[int, ExampleOffer | None], contents: Mapping[int, Examples] | None = None
    ) -> None:
        """Add the examples that workers have given before the same step.

        offers: by worker; contents: the examples, of workers whose content is known here (default: of none)."""
        for worker, offer in offers.items():
            if offer:
                content = (contents or {}).get(worker)
                is_known = content is not None and tuple(content.ids.tolist()) == offer.ids
                self.add(worker, offer.epoch, content if content and is_known else _ids_alone(offer.ids))

    @property
    def ids(self) -> dict[str, list[int]]:
        """The ids of the last complete round by worker."""
        ids: dict[str, list[int]] = self.memory["ids"]
        return ids

    def complete(self, members: Set[int]) -> bool:
        """Complete the round if all members have added theirs. Returns whether it is complete now.

        The examples of a worker that is no member any more are used too. A round to which a single worker has added
        would be a pool for nobody else, and waits. members: workers that take part."""
        if not self.is_complete(members):
            return False
        parts = {worker: self._open[worker][1] for worker in sorted(self._open)}
        self._join(parts)
        self.memory["round"] += 1
        self.memory["ids"] = {str(worker): examples.ids.tolist() for worker, examples in parts.items()}
        self.memory["epochs"] |= {str(worker): epoch for worker, (epoch, _) in self._open.items()}
        self._open = {}
        self.memory["open"] = {}
        return True

    def is_complete(self, members: Set[int]) -> bool:
        """Return whether the round has the examples of all members; see ``complete``."""
        return len(self._open) >= 2 and members <= self._open.keys()

    def recall(self, earlier: GossipRounds) -> None:
        """Take over the content of examples that earlier rounds had, too. earlier: of the same run."""
        if earlier.ids == self.ids:
            self._whole = earlier._whole
        for worker, (epoch, examples) in self._open.items():
            if worker in earlier._open and np.array_equal(earlier._open[worker][1].ids, examples.ids):
                self._open[worker] = epoch, earlier._open[worker][1]

    def _join(self, parts: dict[int, Examples]) -> None:
        """Keep the examples of a complete round together, once for all pools. parts: by worker, in their order."""
        self._whole = join_examples(list(parts.values())) if parts else EMPTY
        ends = np.cumsum([len(examples.ids) for examples in parts.values()], dtype=np.int64).tolist()
        self._places = dict(zip(parts, pairwise([0, *ends]), strict=True))

    def next_pool(self, worker: int, session: int, clock: int) -> Pool | None:
        """Return the pool that a worker must get before a step, and note that it has it; None if it has the newest.

        A new session gets its pool again, as of the step at which the worker had it first, or is told that it has none.

        session: the worker's membership; clock: number of the step."""
        if self._receipts.get(worker) == (session, self.number):
            return None
        self._receipts[worker] = session, self.number
        if self._lacks_others(worker):
            return Pool(0, clock, clock, EMPTY)
        # After a roll-back a worker may repeat steps that it had made without a pool, or with the one before.
        first = min(self.memory["first"].get(str(worker), clock), clock)
        self.memory["first"][str(worker)] = first
        number, begin = self.memory["begins"].get(str(worker), (0, clock))
        begin = min(begin, clock) if number == self.number else clock
        self.memory["begins"][str(worker)] = [self.number, begin]
        return self.pool(worker, begin, first)

    def pool(self, worker: int, clock: int, first: int) -> Pool:
        """Return the last complete round as the pool of a worker. clock, first: see Pool."""
        return Pool(self.number, clock, first, self._whole, *self._places.get(worker, (0, 0)))

    def _lacks_others(self, worker: int) -> bool:
        """Return whether the last complete round has no examples of other workers, such as before the first one."""
        begin, end = self._places.get(worker, (0, 0))
        return len(self._whole.ids) == end - begin


def first_step(memory: Mapping[str, Any], worker: int) -> int | None:
    """Return a worker's first step with any pool; None if it has had none. memory: the state in a checkpoint."""
    # Workers that are in different steps have their first pool from the same step on.
    if "schedule" in memory:
        first: int | None = memory["schedule"]["first"]
    else:
        first = memory.get("first", {}).get(str(worker))
    return first


def join_examples(parts: list[Examples]) -> Examples:
    """Return examples of several workers together; their ids alone if the content of some is not known."""
    ids = np.concatenate([part.ids for part in parts])
    if not all(part.has_content for part in parts):
        return _ids_alone(ids)
    return Examples(
        ids, np.concatenate([part.labels for part in parts]), np.concatenate([part.images_KCHW for part in parts])
    )


def _ids_alone(ids: Any) -> Examples:
    return EMPTY._replace(ids=np.asarray(ids, np.int64))
