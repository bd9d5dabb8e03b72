"""The sum of all workers' gradients in a round, as one worker takes part in it: range by range, or by a collective."""

from __future__ import annotations

import numpy as np

from trainer.config import Config, RunFacts, slice_bounds
from trainer.coordination.orders import StepMeasurements
from trainer.coordination.parameter_slice import add_pushed
from trainer.rules import build_weights
from trainer.transport.bodies.reports import pack_reports, unpack_report, unpack_reports
from trainer.transport.bodies.vectors import from_body, to_body
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.all_reduce import GradientPiece, RangeSum
from trainer.transport.messages.heads import Body
from trainer.worker.replica_links import Collective, Links, Vector


class RoundSums:
    """The gradients and sums of the present round that have arrived.

    Args:
        config, facts: the run.
        worker: number of this worker, which adds up the range of the same number.
        pushed: float32 [P + Q], this worker's gradient.
        own_sum: float32 [P + Q], where this worker writes the sum of its range.
        links, collective: as of Replica.

    Attributes:
        wish: number of the last snapshot that server 0 has asked for.
        reports: the reports of all workers, which come with every sum; empty before the first one.
        snapshot: whether the round ends with a snapshot that server 0 has asked for.
    """

    def __init__(
        self,
        config: Config,
        facts: RunFacts,
        worker: int,
        pushed: Vector,
        own_sum: Vector,
        links: Links,
        collective: Collective | None,
    ) -> None:
        self.facts = facts
        self.worker = worker
        self.pushed = pushed
        self.own_sum = own_sum
        self.links = links
        self.collective = collective
        self.workers = range(facts.num_workers)
        self.bounds = slice_bounds(facts.elements, facts.num_workers)
        self.weights = build_weights(config, facts)
        self.wish = 0
        self._granted = 0  # number of the last snapshot that was made; only worker 0 uses it
        self._round = (0, 0)  # numbers of the view, and of the version
        # For sums that are copied: from shared memory, or from the collective.
        self._total = np.empty(facts.elements, np.float32)
        self.clear()

    def clear(self) -> None:
        """Forget the gradients and sums of a round that is complete, or void."""
        # By worker, its report and its gradient in this worker's range; None for a gradient in shared memory.
        self._pieces: dict[int, tuple[StepMeasurements, Vector | None]] = {}
        # By worker, the sum of its range: a part of ``_total``, of a message, or of this worker's own sum.
        self._sums: dict[int, Vector] = {}
        self._has_started = False  # whether the collective adds up the gradients
        self.reports: tuple[StepMeasurements, ...] = ()
        self.snapshot = False

    @property
    def are_complete(self) -> bool:
        """Return whether the sums of all ranges are here."""
        return len(self._sums) == len(self.workers)

    def sums_by_range(self) -> list[Vector]:
        """Return the sums of a complete round, in the order of ranges."""
        return [self._sums[owner] for owner in self.workers]

    def grant_wish(self) -> None:
        """Note that this worker has made the snapshot of a round."""
        self._granted = self.wish

    def forget_wishes(self) -> None:
        """Forget all wishes, because a restarted server 0 counts them from 0 again."""
        self.wish = self._granted = 0

    def send_gradient(self, number: int, version: int, report: StepMeasurements) -> None:
        """Send the gradient in ``pushed`` to the owners of its ranges, and begin a round by that.

        number, version: of the view and its model; report: the measurements of the step."""
        self._round = number, version
        self.links.offer_piece(number, version)
        body = pack_reports([report])
        # The report travels with the gradient and returns with the sums, so that all workers have all reports for the
        # log, and no line is lost with a worker.
        for owner, (begin, end) in enumerate(self.bounds):
            part = self.pushed[begin:end]
            if owner == self.worker:
                self._pieces[owner] = (report, part)
                continue
            in_memory = self._is_apart(owner)
            piece = GradientPiece(number, version, self.worker, in_memory)
            self.links.send(owner, piece, body, b"" if in_memory else to_body(part))
        self._add_up()

    def take_piece(self, message: GradientPiece, report: Body, elements: Body) -> None:
        """Take a worker's gradient in the range of this one. Raises MalformedMessageError."""
        begin, end = self.bounds[self.worker]
        part = None if message.in_memory else from_body(elements, end - begin)
        self._pieces[message.worker] = (unpack_report(report), part)
        self._add_up()

    def take_sum(self, message: RangeSum, reports: Body, elements: Body) -> None:
        """Take the sum of another worker's range. Raises MalformedMessageError."""
        begin, end = self.bounds[message.worker]
        part = self._total[begin:end]
        # With a collective this only says that the sender has the sum, as this worker has or will have.
        if message.in_memory and not self.collective:
            # If its mark is missing before or after the copy, the owner has left this view, and a Regroup follows.
            memory = self.links.memory_of(message.worker)
            shared = memory.range_sum(*self._round, begin, end)
            if shared is None:
                return
            part[:] = shared
            if memory.range_sum(*self._round, begin, end) is None:
                return
        elif not self.collective:
            part = from_body(elements, end - begin)
        self._note(message.worker, part, unpack_reports(reports), snapshot=message.snapshot)

    def take_total(self, total: Vector) -> None:
        """Take the sum that the collective has made, and tell all others.

        The round is complete when all workers have it: the collective can fail on one of them and not on another."""
        np.copyto(self._total, total)
        begin, end = self.bounds[self.worker]
        self._send_sum(tuple(self._pieces[worker][0] for worker in self.workers), self._total[begin:end])

    def _add_up(self) -> None:
        """Once all pieces have arrived, add up this worker's range in the order of workers, and send the sum to all."""
        if len(self._pieces) < len(self.workers) or self.worker in self._sums:
            return
        reports = tuple(self._pieces[worker][0] for worker in self.workers)
        factors = self.weights.factors([0] * len(reports), [report.examples for report in reports])
        if self.collective:
            # Not before all reports are here: then no worker still computes, and the operation does not wait for it.
            if not self._has_started:
                self._has_started = True
                self.collective.start(self._round[1], self.pushed, factors[self.worker])
            return
        begin, end = self.bounds[self.worker]
        vectors = []
        for worker in self.workers:
            part = self._piece(worker)
            if part is None:  # the worker has left this view, and a Regroup follows
                return
            vectors.append(part)
        total = self.own_sum[begin:end]
        self.links.offer_sum(0, 0)
        add_pushed(total, vectors, factors, min(max(self.facts.num_parameters - begin, 0), end - begin))
        # A worker that has changed its piece meanwhile has left this view, which makes this sum void.
        if any(self._piece(worker) is None for worker in self.workers):
            return
        self.links.offer_sum(*self._round)
        self._send_sum(reports, total)

    def _piece(self, worker: int) -> Vector | None:
        """Return a worker's gradient in this one's range; None if its shared memory no longer has it."""
        part = self._pieces[worker][1]
        if part is not None:
            return part
        return self.links.memory_of(worker).piece(*self._round, *self.bounds[self.worker])

    def _send_sum(self, reports: tuple[StepMeasurements, ...], total: Vector) -> None:
        """Send the sum of this worker's range to all others, and note it."""
        # Worker 0 decides for all. No worker can complete the round without its sum, so none misses the snapshot.
        snapshot = self.worker == 0 and self.wish > self._granted
        body = pack_reports(reports)
        for other in self.workers:
            if other != self.worker:
                in_memory = self._is_apart(other)
                message = RangeSum(*self._round, self.worker, in_memory, snapshot)
                self.links.send(other, message, body, b"" if in_memory else to_body(total))
        self._note(self.worker, total, reports, snapshot=snapshot)

    def _is_apart(self, worker: int) -> bool:
        """Return whether the elements of messages to a worker are apart from them: in memory, or in the collective."""
        return self.collective is not None or self.links.shares_memory(worker)

    def _note(self, owner: int, total: Vector, reports: tuple[StepMeasurements, ...], *, snapshot: bool) -> None:
        """Note the sum of a worker's range. Raises MalformedMessageError."""
        if len(reports) != len(self.workers):
            raise MalformedMessageError(f"{len(reports)} reports")
        self._sums[owner] = total
        self.reports = reports
        self.snapshot |= snapshot and owner == 0
