"""A worker's part in rounds without servers: its copy of the model, and the pieces and sums of the current round.

In a round, worker j receives every worker's gradient in range j of the flat vector, adds them up, and sends the sum to
all. A worker completes a round once it has all sums, which needs all N workers, so that the versions of two workers
differ by at most 1. Server 0 decides who takes part: a view has a number, and messages of lower numbers are void. The
replica has neither sockets nor a clock, so that tests can deliver its messages in any order."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any

import numpy as np

from trainer.config import Config, RunFacts
from trainer.coordination.budget import Budget, Position
from trainer.coordination.orders import ExampleOffer, Round, StepMeasurements
from trainer.gossip.rounds import Examples, GossipRounds, Pool
from trainer.rules import build_slice, slots_of, worker_rate
from trainer.transport.bodies.examples import most_ids_bytes, pack_examples, unpack_examples
from trainer.transport.bodies.json_object import JSON_LIMIT_BYTES, unpack_json
from trainer.transport.bodies.rounds import pack_rounds
from trainer.transport.bodies.vectors import from_body
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.all_reduce import GradientPiece, PeerView, RangeSum, Settlement, WantSnapshot, WriteCopy
from trainer.transport.messages.gossip import GossipContent
from trainer.transport.messages.heads import Body, Message
from trainer.transport.messages.peers import ModelCopy, PeerJoin, Regroup, RoundReport
from trainer.worker.replica_links import Collective, Links, Vector
from trainer.worker.round_history import ModelSnapshot, RoundHistory
from trainer.worker.round_sums import RoundSums

FromPeer = GradientPiece | RangeSum | ModelCopy | GossipContent


class Phase(Enum):
    """The state of a replica.

    OUTSIDE: it is in no view. COPYING: it waits for the model of its view. TURN: its worker can compute a gradient.
    ROUND: it has sent that gradient and waits for pieces and sums. TRAINED: no round of the stage is left, or a loss
    was not finite."""

    OUTSIDE = "outside"
    COPYING = "copying"
    TURN = "turn"
    ROUND = "round"
    TRAINED = "trained"


class Replica:
    """A worker's model and its part in the rounds.

    Args:
        config, facts: the run.
        worker: number of the worker.
        process: a random number that identifies its process.
        values: float32 [P + Q], the model, at which the worker computes. A step may change the statistics, its last Q
            elements, which the replica then restores.
        pushed: float32 [P + Q], where the worker leaves its gradient.
        own_sum: float32 [P + Q], where this worker writes the sum of its range, and workers of its host read it.
        links: sends messages.
        load: load(version) returns values and momentum of a checkpoint.
        write: write(generation, version, values, momentum) writes a checkpoint, in the background.
        collective: adds up the gradients instead of the owners of ranges; None without one.

    Attributes:
        phase: see Phase.
        number: of its view, or of a later Regroup, by which server 0 tells a worker to leave its view and join again.
        generation: of its model.
        version: of its model; -1 if it has none.
        clock: number of its next mini-batch.
        history: rounds and snapshots that server 0 has not settled; its last round is number ``reached``.
        gossip: the rounds in which workers exchange examples, as of the version; None if they do not.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        worker: int,
        process: int,
        values: Vector,
        pushed: Vector,
        own_sum: Vector,
        links: Links,
        load: Callable[[int], tuple[Vector, Vector]],
        write: Callable[[int, int, Vector, Vector], None],
        collective: Collective | None = None,
    ) -> None:
        self.config = config
        self.facts = facts
        self.worker = worker
        self.process = process
        self.values = values
        self.links = links
        self.load = load
        self.write = write
        self.collective = collective
        self.num_workers = facts.num_workers
        momentum = np.zeros(slots_of(config) * facts.num_parameters, np.float32)
        self.slice = build_slice(config, facts.num_workers, values, momentum)
        self._statistics = values[facts.num_parameters :].copy()
        self.budget = self._budget(Position())
        self.phase = Phase.OUTSIDE
        self.number = 0
        self.generation = 0
        self.version = -1
        self.clock = 0
        self.history = RoundHistory(facts.num_workers)
        self._joined = 0  # the number of the view that it has adopted
        self._view_generation = 0
        self.has_diverged = False
        self._sums = RoundSums(config, facts, worker, pushed, own_sum, links, collective)
        self._offer: ExampleOffer | None = None  # the examples that this worker gives with its gradient
        self._examples: dict[int, Examples] = {}  # by worker, those that it and others give in the present round
        self._early: list[tuple[FromPeer, tuple[Body, ...]]] = []
        self.gossip = GossipRounds({}) if config.data.gossip else None
        # The ids of the last complete round and of the next one, beside the rest.
        self._view_bytes = JSON_LIMIT_BYTES + most_ids_bytes(2 * facts.num_workers * config.data.gossip)

    @property
    def reached(self) -> int:
        """The number of completed rounds: the version, and one more if the last had a loss that is not finite."""
        return self.version + self.has_diverged

    @property
    def must_wait(self) -> bool:
        """True if server 0 has so many rounds or snapshots to settle that the next step must wait."""
        return self.history.is_full(self.version)

    # --- views --------------------------------------------------------------------------------------------------------

    def obey(self, message: Message, body: Body) -> None:
        """Handle a message of server 0. Raises MalformedMessageError, and DataError for a damaged checkpoint."""
        match message:
            case Regroup():
                self.leave(message.number)
            case PeerView():
                self.adopt(message, body)
            case WantSnapshot(number=self.number):
                self._sums.wish = message.wish
            case Settlement(generation=self.generation):
                self.history.settle(self.reached, message.version, unpack_json(body)["pending"])
            case WriteCopy(generation=self.generation):
                self._write(message.version)

    def joining(self) -> tuple[PeerJoin, bytes]:
        """Return the join request for the next view, and the rounds that server 0 has not settled."""
        join = PeerJoin(self.worker, self.process, self.number, self.generation, self.version + 1)
        return join, pack_rounds(self.history.rounds)

    def report(self) -> tuple[RoundReport, bytes] | None:
        """Return a report of the rounds that server 0 has not settled, or None if there are none.

        All workers say how many rounds they have completed. Only worker 0 sends the rounds, which have the reports of all
        workers."""
        if not self.history.rounds or self.phase is Phase.OUTSIDE:
            return None
        rounds = self.history.rounds if self.worker == 0 else []
        return RoundReport(self.worker, self.process, self.number, self.reached), pack_rounds(rounds)

    def leave(self, number: int) -> None:
        """Leave the view that has been adopted, as a Regroup of a later number demands; the worker then asks to join.

        An outdated ``number`` changes nothing. number: of the Regroup."""
        if number < self.number or number <= self._joined:
            return
        self.number = number
        self._restore_statistics()
        self.phase = Phase.OUTSIDE
        if self.has_diverged:  # the round is repeated, with the same loss
            self.has_diverged = False
            self.history.rounds.pop()
        self._clear_round()
        if self.collective:
            self.collective.close()
        # 0: void, so that workers of this host no longer read them.
        self.links.offer_piece(0, 0)
        self.links.offer_sum(0, 0)
        self._early = [early for early in self._early if early[0].number >= number]

    def holding(self) -> dict[str, Any]:
        """Return the versions of this worker's snapshots, for its join request."""
        return {"copies": self.history.versions(self.generation)}

    def adopt(self, view: PeerView, body: Body) -> None:
        """Enter a view: continue with this worker's model, load the checkpoint, or wait for another member's model.

        A worker whose model does not have exactly the view's generation and version takes a copy, even if its own
        version is higher, because the rounds of that model are void. A view that is outdated, or for an earlier process
        of this worker, is ignored.

        Args:
            view: number, generation and version.
            body: JSON with ``members`` (process and address of each worker), ``source`` (the worker that has the model;
                None: the checkpoint), ``copies`` (the workers to which the source sends it), ``accepted`` and
                ``examples`` (the position), ``until``, ``clocks`` (the next mini-batch of each worker), and ``gossip`` if
                workers exchange examples (the state of their rounds).
        Raises:
            MalformedMessageError, and DataError for a damaged checkpoint.
        """
        details = unpack_json(body, self._view_bytes)
        members = details["members"]
        # An outdated view, or one that this worker has entered already.
        if view.number < self.number or view.number <= self._joined:
            return
        if members[self.worker]["process"] != self.process:
            return
        self.number = view.number
        self._joined = view.number
        self._view_generation = view.generation
        self._clear_round()
        self.history.rounds = []  # server 0 has all up to the version of the view
        self.has_diverged = False
        self.links.connect(members)
        if self.collective:
            self.collective.open(view.number, members)
        self.budget = self._budget(Position(view.version, details["accepted"], details["examples"]), details["until"])
        self.clock = details["clocks"][self.worker]
        if self.gossip:
            earlier = self.gossip
            self.gossip = GossipRounds(details["gossip"])
            self.gossip.recall(earlier)
        source = details["source"]
        if source is None:
            self.history.snapshots = {}
            self._sums.forget_wishes()
            self._take(view.version, *self.load(view.version))
        elif (self.generation, self.version) == (view.generation, view.version):
            if source == self.worker:
                for other in details["copies"]:
                    copy = ModelCopy(view.number, view.version)
                    self.links.send(other, copy, self.values.tobytes(), self.slice.momentum.tobytes())
            self._begin()
        else:
            self.phase = Phase.COPYING
        self._handle_early()  # messages of this view that arrived before it

    def _take(self, version: int, values: Vector, momentum: Vector) -> None:
        """Replace the model. Both arrays are complete, so an incomplete copy never overwrites part of the old model."""
        np.copyto(self.values, values)
        np.copyto(self.slice.momentum, momentum)
        self.slice.restart(version)
        self.version = version
        self.generation = self._view_generation
        self._begin()

    def _begin(self) -> None:
        """Begin a turn at the present version, or enter TRAINED if no round is left."""
        np.copyto(self._statistics, self.values[self.facts.num_parameters :])
        is_over = self.budget.is_spent() or self.budget.is_stage_spent()
        self.phase = Phase.TRAINED if is_over else Phase.TURN

    def _restore_statistics(self) -> None:
        np.copyto(self.values[self.facts.num_parameters :], self._statistics)

    def _budget(self, position: Position, until: int | None = None) -> Budget:
        steps = self.config.steps_per_worker(self.facts.rows)
        steps_per_epoch = self.config.steps_per_epoch(self.facts.rows)
        cohort = self.config.cohorts.present
        return Budget(self.num_workers, steps, steps_per_epoch, "global", position, until=until, cohort=cohort)

    # --- rounds -------------------------------------------------------------------------------------------------------

    def give_examples(self, epoch: int, examples: Examples) -> None:
        """Send examples to all other workers before the gradient of the present round, unless they would not count.

        A worker sends its sum after them, so all others have them when they complete the round. epoch: of this worker."""
        assert self.gossip, "only workers that exchange examples give any"
        if not self.gossip.accepts(self.worker, epoch):
            return
        self._offer = ExampleOffer(epoch, tuple(examples.ids.tolist()))
        self._examples[self.worker] = examples
        body = pack_examples(examples)
        for other in range(self.num_workers):
            if other != self.worker:
                self.links.send(other, GossipContent(self.number, self.version, self.worker), body)

    def next_pool(self) -> Pool | None:
        """Return the examples of others that the worker needs before its next step; None if it has them."""
        return self.gossip.next_pool(self.worker, self.number, self.clock) if self.gossip else None

    def submit(self, report: StepMeasurements) -> None:
        """Send the gradient in ``pushed`` to the owners of its ranges. ``handle`` completes the round."""
        self._restore_statistics()
        self.phase = Phase.ROUND
        self._sums.send_gradient(self.number, self.version, report._replace(offer=self._offer))
        self._handle_early()
        self._try_to_complete()

    def handle(self, message: Message, bodies: tuple[Body, ...]) -> None:
        """Handle a message of another worker. Raises MalformedMessageError.

        A message of a later view or round is kept until it is due; a message of an earlier one is dropped."""
        if not isinstance(message, FromPeer):
            raise MalformedMessageError(f"{type(message).__name__} from a worker")
        if self._is_early(message):
            self._early.append((message, bodies))
        elif self._is_due(message):
            self._use(message, bodies)

    def _is_early(self, message: FromPeer) -> bool:
        if message.number != self.number or self._joined < self.number:
            return message.number >= self.number
        if isinstance(message, ModelCopy):
            return False
        # The sender can be ahead: this worker may still copy the model, compute its gradient, or lack sums of a round.
        is_behind = message.version == self.version and self.phase is Phase.TURN
        return self.phase is Phase.COPYING or is_behind or message.version > self.version

    def _is_due(self, message: FromPeer) -> bool:
        if message.number != self.number:
            return False
        if isinstance(message, ModelCopy):
            return self.phase is Phase.COPYING
        return self.phase is Phase.ROUND and message.version == self.version

    def _handle_early(self) -> None:
        """Handle the stored early messages, and keep those that are still early.

        At arrival, they were of a later view or round than this worker's."""
        early = self._early
        self._early = []
        for message, bodies in early:
            self.handle(message, bodies)

    def _use(self, message: FromPeer, bodies: tuple[Body, ...]) -> None:
        """Use a message of the current round, or the model of the view. Raises MalformedMessageError."""
        if isinstance(message, ModelCopy):
            values = from_body(bodies[0], self.facts.elements)
            self._take(message.version, values, from_body(bodies[1], len(self.slice.momentum)))
            self._handle_early()
            return
        if message.worker >= self.num_workers:
            raise MalformedMessageError(str(message))
        if isinstance(message, GossipContent):
            self._examples[message.worker] = unpack_examples(bodies[0])
        elif isinstance(message, GradientPiece):
            self._sums.take_piece(message, *bodies)
        else:
            self._sums.take_sum(message, *bodies)
        # A piece may have been the last one of this worker's own sum.
        self._try_to_complete()

    def collected(self, number: int, version: int, total: Vector) -> None:
        """Take the sum that the collective has made in a round. A sum of another round is dropped."""
        if (number, version) == (self.number, self.version) and self.phase is Phase.ROUND:
            self._sums.take_total(total)
            self._try_to_complete()

    def _clear_round(self) -> None:
        self._sums.clear()
        self._offer = None
        self._examples = {}

    def _try_to_complete(self) -> None:
        """Make the update of the round if all sums have arrived. A loss that is not finite ends the run without it."""
        if not self._sums.are_complete:
            return
        reports = self._sums.reports
        snapshot = self._sums.snapshot
        sums = self._sums.sums_by_range()
        contents = self._examples
        self._clear_round()
        self.history.rounds.append(Round(snapshot, reports))
        if not all(math.isfinite(report.loss) for report in reports):
            self.has_diverged = True
            self.phase = Phase.TRAINED
            return
        examples = [report.examples for report in reports]
        rate = worker_rate(self.config, self.facts, self.budget.epoch)
        # All replicas make the same update from the same sums, so that their models stay equal bit for bit.
        self.slice.apply_sum(sums, rate, self.num_workers, self._sums.weights.correction(examples))
        boundary = self.budget.use(self.num_workers, sum(examples))
        self.version += 1
        self.clock += 1
        # As server 0 does with the reports, so that all have the same rounds.
        if self.gossip:
            self.gossip.add_offers({worker: report.offer for worker, report in enumerate(reports)}, contents)
            self.gossip.complete(set(range(self.num_workers)))
        self._begin()
        if snapshot:
            self._sums.grant_wish()
        if snapshot or (boundary is not None and self.config.run.epoch_checkpoints) or self.phase is Phase.TRAINED:
            copy = ModelSnapshot(self.generation, self.values.copy(), self.slice.momentum.copy())
            self.history.snapshots[self.version] = copy

    def _write(self, version: int) -> None:
        """Write the snapshot of a version: this worker's copy or, after the last round, the model itself."""
        copy = self.history.snapshots.get(version)
        if copy:
            self.write(copy.generation, version, copy.values, copy.momentum)
        elif self.phase is Phase.TRAINED and version == self.version:
            self.write(self.generation, version, self.values, self.slice.momentum)
