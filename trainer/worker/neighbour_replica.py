"""A worker's part in rounds among neighbours: its own model, and its neighbours' models of the current round.

In a round with links, a worker sends its model to its neighbours and waits for theirs, but for nobody else's. Server 0
decides who takes part. A view lists all members, each with the session and the first round of its membership. A worker
begins only rounds that server 0 has granted, and no member that joins later takes part in a granted round. The replica
has neither sockets nor a clock, so that tests can deliver its messages in any order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from trainer.config import Config, RunFacts
from trainer.coordination.orders import ExampleOffer, OwnRound, StepMeasurements
from trainer.exchange.mixing import TopologyPlan, links_by_worker, mix_parameters
from trainer.exchange.neighbours import NeighbourExchange
from trainer.exchange.plan_json import linked_pairs, plan_from_json
from trainer.gossip.rounds import Examples, Pool
from trainer.leader.peer_checkpoints import is_due
from trainer.rules import build_replica, replica_rate, weighted_batch
from trainer.transport.bodies.json_object import unpack_json
from trainer.transport.bodies.reports import report_bytes
from trainer.transport.bodies.rounds import MOST_ROUNDS_BYTES, pack_own_rounds
from trainer.transport.bodies.vectors import from_body, to_body
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.gossip import GossipPool, PeerOffer, PoolRequest
from trainer.transport.messages.heads import Body, Message
from trainer.transport.messages.neighbours import NeighbourModel, NeighbourView, ReplicaCopy, RoundGrant
from trainer.transport.messages.peers import ModelCopy, PeerJoin, Regroup, RoundReport
from trainer.worker.neighbour_links import NeighbourLinks, PeerEntry
from trainer.worker.neighbour_models import NeighbourModels
from trainer.worker.received_pools import ReceivedPools
from trainer.worker.replica_links import Vector
from trainer.worker.sent_models import FirstModel, SentModels

MOST_COPIES = 2  # models for checkpoints that server 0 does not have; with more, the next step waits
MOST_UNHEARD = 100_000  # rounds that a worker keeps for server 0 before it waits


class NeighbourPhase(Enum):
    """The state of a replica.

    OUTSIDE: it is no member. COPYING: it waits for its first model. BLOCKED: its next round is not granted or needs
    examples of others that are not here, or server 0 must log its last ones before. TURN: its worker can compute a
    gradient. WAITING: it waits for models of neighbours. TRAINED: no round is left, or a loss was not finite."""

    OUTSIDE = "outside"
    COPYING = "copying"
    BLOCKED = "blocked"
    TURN = "turn"
    WAITING = "waiting"
    TRAINED = "trained"


# phases in which its model is the one with which its present round begins
CAN_HAND_OVER = (NeighbourPhase.BLOCKED, NeighbourPhase.TURN, NeighbourPhase.TRAINED)


class NeighbourReplica:
    """A worker's own model and its part in the rounds.

    Args:
        config, facts: the run.
        worker: number of the worker.
        process: a random number that identifies its process.
        values: float32 [P + Q], at which the worker computes. A step may change its last Q elements.
        pushed: float32 [P + Q], where the worker leaves its gradient.
        links: sends messages to neighbours.

    Attributes:
        phase: see NeighbourPhase.
        number: of the newest view, or of a later Regroup, by which server 0 tells a worker to leave and join again.
        session: of its membership, 0 outside.
        generation: of its model.
        round: the round that it computes, or the first one that it will compute.
        until: the first round that is not granted.
        rounds: completed rounds that server 0 does not have; the last one is ``round`` - 1.
        copies: models for checkpoints that server 0 does not have, by version.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        worker: int,
        process: int,
        values: Vector,
        pushed: Vector,
        links: NeighbourLinks,
    ) -> None:
        exchange = config.exchange
        assert isinstance(exchange, NeighbourExchange), "only these have neighbours"
        self.config = config
        self.facts = facts
        self.exchange = exchange
        self.worker = worker
        self.process = process
        self.values = values
        self.pushed = pushed
        self.links = links
        self.steps = config.steps_per_worker(facts.rows)
        self.steps_per_epoch = config.steps_per_epoch(facts.rows)
        self.usual_batch = weighted_batch(config, facts)
        self.plan: TopologyPlan | None = None
        # Its values are replaced in every round and never changed, because unsent messages refer to them.
        self.model = build_replica(config, facts, values.copy(), np.zeros(facts.num_parameters, np.float32))
        self.phase = NeighbourPhase.OUTSIDE
        self.number = 0
        self.session = 0
        self.generation = 0
        self.round = 0
        self.until = 0
        self.rounds: list[OwnRound] = []
        self.copies: dict[int, tuple[Vector, Vector]] = {}
        self.members: dict[int, PeerEntry] = {}
        self._start = 0  # the version with which the generation began
        self._due: frozenset[int] = frozenset()  # versions of checkpoints by time
        self._partners: frozenset[int] = frozenset()  # workers with which it can have a link
        self._models = NeighbourModels()
        self._sent_models = SentModels()
        self._early: tuple[ModelCopy, tuple[Body, ...]] | None = None  # a first model of a membership that is to begin
        self._unused: set[int] = set()  # neighbours that were left out of the last round that had a link to them
        # Rounds of this worker that server 0 has logged; -1 while it does not know the first model.
        self._logged_rounds = -1
        self._must_be_logged = 0  # rounds that server 0 must have logged before this worker sends a model
        self._sent_bytes = 0  # in the present round
        self._offer: ExampleOffer | None = None  # the examples that this worker gives in the present round
        self._pools = ReceivedPools()
        self._report = StepMeasurements(0, 0.0, 0, 0.0)

    @property
    def must_wait(self) -> bool:
        """True if server 0 lacks so many rounds or models of checkpoints that the next step must wait."""
        if len(self.copies) > MOST_COPIES or len(self.rounds) > MOST_UNHEARD:
            return True
        size = report_bytes(self.rounds[-1].report) if self.rounds else 0
        return len(self.rounds) * size > MOST_ROUNDS_BYTES

    @property
    def missed_from(self) -> int | None:
        """The first round that the worker has missed before the present one; None if it took part before."""
        own = self.members.get(self.worker)
        return own.missed_from if own and self.round == own.first else None

    # --- membership ---------------------------------------------------------------------------------------------------

    def joining(self) -> PeerJoin:
        """Return the join request, or the request for a first model that was lost."""
        return PeerJoin(self.worker, self.process, self.number, self.generation, 0)

    def obey(self, message: Message, body: Body) -> None:
        """Handle a message of server 0 other than a model. Raises MalformedMessageError."""
        match message:
            case Regroup():
                if message.number > self.session:  # otherwise it is older than this membership
                    self._leave(message.number)
            case NeighbourView():
                self._adopt(message, unpack_json(body))
            case RoundGrant(number=self.number, generation=self.generation):
                if self.phase is not NeighbourPhase.OUTSIDE:
                    self._use_grant(message, unpack_json(body))

    def _leave(self, number: int) -> None:
        """Leave the membership: server 0 demands that with a Regroup, or the new view no longer lists this process.

        The worker then asks to join again. Its model and early messages stay. number: of that Regroup or view."""
        self.number = max(self.number, number)
        self.phase = NeighbourPhase.OUTSIDE
        self.session = 0
        self._forget()

    def _forget(self) -> None:
        """Forget everything that belongs to a membership, except early messages."""
        self.members = {}
        self.until = 0
        self.rounds = []
        self.copies = {}
        self._logged_rounds = -1
        self._models.forget_departed()
        self._sent_models = SentModels()
        self._due = frozenset()
        self._unused = set()
        # Server 0 may have other rounds of examples after a roll-back.
        self._offer = None
        self._pools = ReceivedPools()

    def _adopt(self, view: NeighbourView, details: dict[str, Any]) -> None:
        """Take over a view, if it is newer. Members that have left are out from the first round without their model."""
        if view.number <= self.number:
            return
        members = {int(worker): PeerEntry(**entry) for worker, entry in details["members"].items()}
        own = members.get(self.worker)
        if own is None or own.process != self.process:
            self._leave(view.number)
            return
        self.number = view.number
        if own.session != self.session or view.generation != self.generation:
            self._enter(own, view.generation, details)
        sessions = {entry.session for entry in members.values()}
        for worker, entry in self.members.items():
            if entry.session not in sessions:
                self._models.let_go(
                    worker, entry.session, max(self.round, entry.first), partial(self._has_link, worker)
                )
        self.members = members
        # All that belongs to other sessions is void. A newcomer that has its model may be no partner any more.
        self._models.retain(sessions, view.number)
        newcomers = {entry.session: worker for worker, entry in members.items() if entry.source == self.worker}
        self._sent_models.retain(sessions, newcomers)
        partners = self._partners.union(newcomers.values())
        workers = range(self.facts.num_workers)
        present = [members.get(other) if other in partners else None for other in workers]
        self.links.connect([entry.to_links() if entry else None for entry in present])
        if self._early:
            self.take(*self._early)
        self._hand_over()
        self._try_to_complete()

    def _enter(self, own: PeerEntry, generation: int, details: dict[str, Any]) -> None:
        """Begin a membership, which waits for a first model. own: this worker's entry."""
        self._forget()
        self.session = own.session
        self.generation = generation
        self.round = own.first
        self._start = details["version"]
        # As server 0 has it: this host could compute other weights, or lack the file of links.
        try:
            self.plan = plan_from_json(details["plan"])
        except ValueError as error:
            raise MalformedMessageError(str(error)) from None
        pairs = linked_pairs(self.plan)
        self._partners = frozenset(other for pair in pairs if self.worker in pair for other in pair) - {self.worker}
        self.phase = NeighbourPhase.COPYING

    def _use_grant(self, grant: RoundGrant, details: dict[str, Any]) -> None:
        """Take over a grant, and begin the next round if the worker waited for it."""
        self._due = frozenset(details["due"])
        # Of the examples of others, only the last two rounds can be needed.
        if self.config.data.gossip:
            self._pools.announce(details["pools"])
        needed = [each for each in self.copies if each > details["complete"] and each not in details["have"]]
        self.copies = {version: self.copies[version] for version in needed}
        self._logged_rounds = max(self._logged_rounds, grant.received - 1)
        first = self.round - len(self.rounds)
        if self._logged_rounds > first:
            del self.rounds[: self._logged_rounds - first]
        self.until = max(self.until, grant.until)
        if self.phase is NeighbourPhase.BLOCKED:
            self._hand_over()
            self._begin()

    def take(self, message: ModelCopy, bodies: tuple[Body, ...]) -> None:
        """Begin with a first model, of a checkpoint or another worker. Raises MalformedMessageError.

        A model from another worker can arrive before the view of its membership, and is kept until then. A model for an
        earlier membership, from a source that was paused, is ignored."""
        if message.number > max(self.session, self._early[0].number if self._early else 0):
            self._early = (message, bodies)
        if self.phase is not NeighbourPhase.COPYING or message.number != self.session:
            return
        values = from_body(bodies[0], self.facts.elements).copy()
        parameters = self.facts.num_parameters
        momentum = from_body(bodies[1], parameters).copy() if len(bodies[1]) else np.zeros(parameters, np.float32)
        self.model = build_replica(self.config, self.facts, values, momentum)
        self._early = None
        self._must_be_logged = self.round
        self._hold()

    # --- examples of others -------------------------------------------------------------------------------------------

    def give_examples(self, epoch: int, examples: Examples) -> PeerOffer:
        """Give examples to all others with the present round, and return the message for server 0. epoch: of this worker."""
        self._offer = ExampleOffer(epoch, tuple(examples.ids.tolist()))
        return PeerOffer(self.worker, self.process, self.session, epoch)

    def wanted_pool(self) -> PoolRequest | None:
        """Return a request for the examples of others that will be used and are not here; None if all are."""
        number = self._pools.missing(self.round)
        return None if number is None else PoolRequest(self.worker, self.process, self.session, number)

    def take_pool(self, message: GossipPool, examples: Examples) -> None:
        """Keep examples of others. Those of an earlier membership are dropped."""
        if message.session != self.session:
            return
        own = message.own_begin, message.own_end
        pool = Pool(message.round, message.clock, message.first, examples, *own)
        if self._pools.take(pool) and self.phase is NeighbourPhase.BLOCKED:
            self._hand_over()
            self._begin()

    def next_pool(self) -> Pool | None:
        """Return the examples of others that the worker needs before its present step; None if it has them."""
        return self._pools.hand_over(self.round) if self.config.data.gossip else None

    # --- rounds -------------------------------------------------------------------------------------------------------

    def submit(self, report: StepMeasurements) -> None:
        """Note that the gradient of the present round is in ``pushed``. The round ends with the neighbours' models."""
        self._report = report._replace(offer=self._offer)
        self._offer = None
        self.phase = NeighbourPhase.WAITING
        if self.exchange.order == "grad-then-avg":
            self._descend(self.model.values.copy())
            self._send_model()
        self._try_to_complete()

    def handle(self, message: Message, bodies: tuple[Body, ...]) -> None:
        """Handle a message of another worker. Raises MalformedMessageError."""
        match message:
            case ModelCopy():
                self.take(message, bodies)
            case NeighbourModel():
                self._receive(message, bodies[0])
            case _:
                raise MalformedMessageError(f"{type(message).__name__} from a worker")

    def _receive(self, message: NeighbourModel, body: Body) -> None:
        """Keep a neighbour's model until its round. A model of a session that has left is dropped.

        So is one of a round that is over: it was sent again, because a connection broke."""
        entry = self.members.get(message.worker)
        is_member = entry is not None and entry.session == message.session
        # Before its own view comes, this worker cannot know which sessions are its neighbours'.
        is_early = message.session > self.number or self.phase is NeighbourPhase.OUTSIDE
        if not (is_early or (is_member and message.round >= self.round)):
            return
        model = from_body(body, self.facts.num_parameters)
        self._models.put(message.session, message.round, model)
        self._sent_models.confirm_first(message.session)
        self._try_to_complete()

    def repeat(self) -> None:
        """Send the last models to all neighbours again, because a connection broke. Duplicates do no harm."""
        for first in self._sent_models.first_models():
            self._post_first(first)
        for worker, entry in self.members.items():
            for round, model in self._sent_models.last_models(entry.session):
                self._post(worker, round, model)

    def _hold(self) -> None:
        """Note that the model of the present round is here."""
        self.phase = NeighbourPhase.BLOCKED
        self._hand_over()
        self._begin()
        np.copyto(self.values, self.model.values)  # after the model is sent, because neighbours wait for it

    def _hand_over(self) -> None:
        """Send this worker's model to newcomers that begin with the same round, if it is their source."""
        if self.phase not in CAN_HAND_OVER or self._logged_rounds < self._must_be_logged:
            return
        for worker, entry in self.members.items():
            is_due_now = entry.source == self.worker and entry.first == self.round
            if is_due_now and not self._sent_models.has_first(entry.session):
                first = FirstModel(worker, entry.session, self.round, self.model.values)
                self._sent_models.add_first(first)
                self._sent_bytes += 4 * self.facts.elements
                self._post_first(first)

    def _begin(self) -> None:
        """Begin the present round if it is granted, or enter TRAINED after the last one.

        Server 0 must first have logged a first model or a change of the links, because this worker then sends its
        model: if the worker were killed, a replay could not know what it sent."""
        if (self.round >= self.until and self.round < self.steps) or self._logged_rounds < self._must_be_logged:
            return
        if self.round < self.steps and not self._pools.is_ready(self.round):
            return
        # The checkpoint of the version with which the generation began exists, so no copy of that is kept.
        cohort = self.config.cohorts.present
        if self.round > self._start and is_due(self.round, cohort, self.steps_per_epoch, self.steps, self._due):
            self.copies[self.round] = (self.model.values, self.model.momentum.copy())
        if self.round >= self.steps:
            self.phase = NeighbourPhase.TRAINED
            return
        self.phase = NeighbourPhase.TURN
        if self.exchange.order == "avg-then-grad":
            self._send_model()

    def _send_model(self) -> None:
        """Send the model to the neighbours of the present round that take part; nothing if there are none."""
        parameters = self.model.values[: self.facts.num_parameters]
        for other, _ in self._neighbours(self.round):
            entry = self.members.get(other)
            if entry and entry.first <= self.round:
                self._sent_models.add(entry.session, self.round, parameters)
                self._sent_bytes += parameters.nbytes
                self._post(other, self.round, parameters)

    def _post(self, worker: int, round: int, parameters: Vector) -> None:
        self.links.send(worker, NeighbourModel(self.session, self.worker, round), to_body(parameters))

    def _post_first(self, model: FirstModel) -> None:
        self.links.send(model.worker, ModelCopy(model.session, model.round), to_body(model.values), b"")

    def _try_to_complete(self) -> None:
        """Complete the round if the models of all neighbours have arrived, and begin the next one."""
        if self.phase is not NeighbourPhase.WAITING:
            return
        links = self._usable_links()
        if links is None:
            return
        # All other models stay: they may belong to a membership that begins later, with an earlier round.
        self._mix([(weight, self._models.pop(session, self.round)) for _, weight, session in links])
        unused = {other for other, _ in self._neighbours(self.round)} - {other for other, _, _ in links}
        changed = [other for other, _ in self._neighbours(self.round) if (other in unused) != (other in self._unused)]
        self._unused ^= set(changed)
        self.rounds.append(OwnRound(self._sent_bytes, self._report, tuple(changed)))
        self._sent_bytes = 0
        self.round += 1
        if changed:
            self._must_be_logged = self.round
        if math.isfinite(self._report.loss):
            self._hold()
        else:
            self.phase = NeighbourPhase.TRAINED

    def _usable_links(self) -> list[tuple[int, float, int]] | None:
        """Return index, weight and session of each neighbour in the present round; None if a model is still missing.

        A neighbour that has left is in it if its model arrived before. The weights are always the whole graph's, whoever
        has left, so that both ends of a link use the same."""
        links = []
        for other, weight in self._neighbours(self.round):
            entry = self.members.get(other)
            present = entry.session if entry and entry.first <= self.round else None
            session = self._models.session_with(other, present, self.round)
            if session is not None:
                links.append((other, weight, session))
            elif present is not None:
                return None
        return links

    def _mix(self, others: Sequence[tuple[float, Vector]]) -> None:
        """Average the parameters with the neighbours'. BatchNorm's statistics are not averaged.

        With avg-then-grad, then take the step of the present gradient from the average.

        others: weight and parameters of each neighbour, in the order of their indices."""
        mixed = mix_parameters(self.model.values, others, self.facts.num_parameters)
        if self.exchange.order == "avg-then-grad":
            self._descend(mixed)
        else:
            self.model.values = mixed

    def _descend(self, values: Vector) -> None:
        """Subtract the gradient from ``values``, which become the model."""
        self.model.values = values
        weight = self._report.examples / self.usual_batch if self.usual_batch else 1.0
        with np.errstate(over="ignore", invalid="ignore"):  # server 0 ends a run whose model is not finite
            self.model.apply([self.pushed], replica_rate(self.config, self.facts, self.round), [weight])

    def _neighbours(self, round: int) -> tuple[tuple[int, float], ...]:
        assert self.plan
        return links_by_worker(self.plan.edges(round)).get(self.worker, ())

    def _has_link(self, worker: int, round: int) -> bool:
        return any(other == worker for other, _ in self._neighbours(round))

    # --- messages to server 0 -----------------------------------------------------------------------------------------

    def report(self) -> tuple[RoundReport, bytes] | None:
        """Return a report of the rounds that server 0 does not have; without any, it says that a model is here.

        None for a worker without a model."""
        if self.phase in (NeighbourPhase.OUTSIDE, NeighbourPhase.COPYING):
            return None
        return RoundReport(self.worker, self.process, self.session, self.round), pack_own_rounds(self.rounds)

    def copy_of(self, version: int) -> tuple[ReplicaCopy, Body, Body]:
        """Return the message with the model of a version in ``copies``."""
        values, momentum = self.copies[version]
        return ReplicaCopy(self.worker, self.process, self.session, version), to_body(values), to_body(momentum)
