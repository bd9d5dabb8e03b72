"""The client of all-reduce: connects a worker's replica to the other workers and to server 0."""

from __future__ import annotations

import logging
import secrets as random_numbers
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import zmq

from trainer.checkpoints.read import read_slice_range
from trainer.checkpoints.state import folder_of
from trainer.checkpoints.write import WriteOutcome, write_model
from trainer.config import Config, RunFacts
from trainer.coordination.orders import StepMeasurements
from trainer.exchange.all_reduce import adds_by_torch
from trainer.gossip.rounds import Examples
from trainer.home.folders import Folders
from trainer.home.place import Place
from trainer.leader.background import Background
from trainer.rules import slots_of
from trainer.transport.agreement import Agreement
from trainer.transport.bodies.examples import most_examples_bytes
from trainer.transport.bodies.reports import most_report_bytes
from trainer.transport.mesh import UNREACHABLE_S, Mesh
from trainer.transport.messages.all_reduce import CopyReceipt, StoreEntry
from trainer.transport.messages.peers import LinkLoss, PeerBeat, RunEnd
from trainer.transport.sockets import Secret, close
from trainer.watchdog import kick
from trainer.worker.clients.base import MustRejoin, Turn, Vector
from trainer.worker.clients.leader_link import LeaderLink
from trainer.worker.collective import TorchCollective
from trainer.worker.replica import Phase, Replica

logger = logging.getLogger(__name__)

RESEND_S = 1.0
REPORT_S = 0.2  # between two reports of rounds to server 0
WATCH_S = 0.2  # between two looks at the connections


def open_client(
    config: Config, facts: RunFacts, worker: int, addresses: Sequence[str], secret: Secret, folders: Folders
) -> AllReduceClient:
    """Return the client of a worker. addresses: of the servers; only server 0's is used."""
    return AllReduceClient(config, facts, worker, addresses[0], secret, folders.checkpoints)


class AllReduceClient:
    """A worker's part in all-reduce; implements trainer.worker.clients.base.Client.

    Args:
        config, facts: the run.
        worker: number of the worker.
        leader: address of server 0.
        secret: the token of the run.
        checkpoints: folder of checkpoints.
    """

    def __init__(
        self, config: Config, facts: RunFacts, worker: int, leader: str, secret: Secret, checkpoints: Place
    ) -> None:
        self.agreement = Agreement.from_config(config, facts)
        # A run with a switch has this exchange in one of its stages.
        stage = next(each for each in config.stage_configs() if each.exchange.client == __name__)
        self.worker = worker
        self.process = random_numbers.randbits(62)
        self.checkpoints = checkpoints
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        has_collective = adds_by_torch(stage.exchange)
        # torch.distributed reads no memory of other processes.
        use_memory = config.processes.same_host == "memory" and not has_collective
        # The reports of a round, the state of the update rule in a copy of the model, or the examples of a worker.
        most = config.data.gossip
        longest = max(
            most_report_bytes(config.reported_rows(facts.rows), facts.num_workers * most),
            4 * slots_of(stage) * facts.num_parameters,
            most_examples_bytes(most),
        )
        self.mesh = Mesh(
            self.context, worker, leader, secret, facts.elements, use_memory=use_memory, body_bytes=longest
        )
        shared = self.mesh.memory
        self.pushed: Vector = shared.gradient if shared else np.zeros(facts.elements, np.float32)
        own_sum = shared.range_sums if shared else np.zeros(facts.elements, np.float32)
        self.pulled: Vector = np.zeros(facts.elements, np.float32)
        self.background = Background()
        self.collective: TorchCollective | None = None
        if has_collective:
            patience_s = UNREACHABLE_S + stage.worker_timeout_s  # a frozen worker is lost before
            self.collective = TorchCollective(
                self.mesh, facts, leader, self.background.post, self._collected, patience_s
            )
        self.replica = Replica(
            stage,
            facts,
            worker,
            self.process,
            self.pulled,
            self.pushed,
            own_sum,
            self.mesh,
            partial(read_slice_range, checkpoints, begin=0, end=facts.elements),
            self._write,
            self.collective,
        )
        self.link = LeaderLink(self.context, leader, secret, self.agreement, self._beat)
        self._poller = zmq.Poller()
        for source in (self.link.socket, self.mesh.inbox, self.background):
            self._poller.register(source, zmq.POLLIN)
        self._has_finished = False
        self._writing: set[tuple[int, int]] = set()  # (generation, version) of the checkpoints that are being written
        self._has_reported_end = False
        self._view = 0  # number of the view of the present turn
        self._reported_at = self._new_at = self._watched_at = self._heard_at = 0.0
        self._reported_round = (0, 0)  # view and number of completed rounds of the last report

    # --- the interface of the worker's loop ---------------------------------------------------------------------------

    def join(self) -> Turn | None:
        """Join the next view; blocks until all workers have."""
        return self._wait(resend=self._send_join)

    def exchange(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        if self.replica.number != self._view or self.replica.phase is not Phase.TURN:
            raise MustRejoin
        self.replica.submit(report)
        following = self._wait()
        self.mesh.note_round()
        return following

    def offer_examples(self, epoch: int, examples: Examples) -> None:
        """Send examples to all other workers, before the gradient of the present turn.

        epoch: of this worker, by whose losses they were selected."""
        self.replica.give_examples(epoch, examples)

    def poll_cancelled(self, turn: Turn) -> bool:
        """Return False: all-reduce uses every gradient, so no step is cancelled."""
        return False

    def give_up(self, turn: Turn, report: StepMeasurements) -> Turn | None:
        raise AssertionError("no step is cancelled")

    def close(self) -> None:
        self.link.close()
        if self.collective:
            self.collective.close()
        close(self.context)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, resend: Callable[[], None] | None = None) -> Turn | None:
        """Handle messages until the next turn is due, and return it; None at the end.

        resend: sends the join request, now and every RESEND_S seconds; without it, MustRejoin is raised once the worker
        has left its view."""
        due = 0.0
        replica = self.replica
        while not self._has_finished:
            kick()
            now = time.monotonic()
            # A single worker completes its rounds alone, and must still hear server 0.
            if now - self._heard_at >= WATCH_S:
                self._hear(0, now)
            if replica.phase is Phase.TURN and not replica.must_wait:
                self._report(now)
                replica.links.offer_piece(0, 0)  # the next step writes the gradient
                self._view = replica.number
                return Turn(replica.clock, replica.version, replica.generation, pool=replica.next_pool())
            if replica.phase is Phase.OUTSIDE:
                if resend is None:
                    raise MustRejoin
                if now >= due:
                    due = now + RESEND_S
                    resend()
            self._report(now)
            self._look_at_connections(now)
            before = replica.number
            self._hear(50, now)
            if replica.number > before:
                due = 0.0  # answer a Regroup at once
        return None

    def _hear(self, wait_ms: int, now: float) -> None:
        """Handle the messages that arrive within ``wait_ms``, and the checkpoints that have been written."""
        self._heard_at = now
        ready = dict(self._poller.poll(wait_ms))
        if self.mesh.inbox in ready:
            self._drain_mesh()
        for message, bodies in self.link.receive(self.process):
            if isinstance(message, RunEnd):
                self._has_finished = True
            else:
                self.replica.obey(message, bodies[0])
        if self.background.fileno() in ready:
            self.background.collect()

    def _drain_mesh(self) -> None:
        for message, bodies in self.mesh.receive():
            if self.collective and isinstance(message, StoreEntry):
                self.collective.hear(message, *bodies)
            else:
                self.replica.handle(message, bodies)

    def _collected(self, number: int, version: int, total: Vector) -> None:
        self.replica.collected(number, version, total)

    # --- messages to server 0 -----------------------------------------------------------------------------------------

    def _send_join(self) -> None:
        about = self.collective.introduction() if self.collective else {}
        introduction = self.agreement.introduction(**self.mesh.introduction(), **self.replica.holding(), **about)
        message, rounds = self.replica.joining()
        self.link.send(message, introduction, rounds)

    def _report(self, now: float) -> None:
        """Report completed rounds to server 0: new ones every REPORT_S seconds, and at once at the end, others to repeat it.

        A repetition does not delay the report of a new round, of which server 0 needs the reports of all workers."""
        replica = self.replica
        round_now = (replica.number, replica.reached)
        is_new = round_now != self._reported_round
        is_due = now - (self._new_at if is_new else self._reported_at) >= (REPORT_S if is_new else RESEND_S)
        is_due |= replica.phase is Phase.TRAINED and not self._has_reported_end
        if is_due and (report := replica.report()):
            self._reported_at = now
            self._new_at = now if is_new else self._new_at
            self._reported_round = round_now
            self._has_reported_end = replica.phase is Phase.TRAINED
            self.link.send(report[0], b"", report[1])

    def _look_at_connections(self, now: float) -> None:
        """Ask server 0 for a new view if a connection broke, because messages may be lost.

        Checks every WATCH_S seconds. Raises JobError if another member stays unreachable."""
        if now - self._watched_at < WATCH_S:
            return
        self._watched_at = now
        # No call may be skipped, because each also reads the events of its connections.
        has_broken = self.link.watch.has_broken()  # raises UsageError for a wrong token
        has_broken |= self.mesh.has_broken()
        # The collective's connections can break alone. Without a new view the round would never end.
        if self.collective:
            has_broken |= self.collective.has_broken(now)
        if self.replica.phase is Phase.OUTSIDE:
            return
        self.mesh.check_reachable()
        # Server 0 can answer over a new connection only after a first message on it: this one.
        if has_broken:
            self.link.send(LinkLoss(self.worker, self.process, self.replica.number))

    def _beat(self) -> PeerBeat:
        """Return this worker's heartbeat; called by a thread.

        It has the number of this worker's view, so that server 0 can repeat a message that was lost."""
        return PeerBeat(self.worker, self.process, self.replica.number)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _write(self, generation: int, version: int, values: Vector, momentum: Vector) -> None:
        """Write a checkpoint, with a single slice, in the background, and report that to server 0.

        Server 0 repeats its request until the report arrives, so a write that is under way is not started again."""
        if (generation, version) in self._writing:
            return
        self._writing.add((generation, version))
        work = partial(self._write_checkpoint, generation, version, values, momentum)
        self.background.submit(work, partial(self._tell_written, generation, version))

    def _write_checkpoint(self, generation: int, version: int, values: Vector, momentum: Vector) -> WriteOutcome:
        if not (np.isfinite(values).all() and np.isfinite(momentum).all()):
            return WriteOutcome.NOT_FINITE
        folder = folder_of(self.checkpoints, version)
        try:
            write_model(folder, version, values, momentum, generation, self.replica.slice.slots)
        except OSError as error:
            logger.warning(f"the checkpoint of version {version} was not written: {error}")
            return WriteOutcome.FAILED
        return WriteOutcome.WRITTEN

    def _tell_written(self, generation: int, version: int, outcome: WriteOutcome) -> None:
        self._writing.discard((generation, version))
        receipt = CopyReceipt(self.worker, self.process, generation, version, int(outcome))
        self.link.send(receipt)
