"""The fingerprint of the rows that each pass over the set has trained, computed from accepted gradients only."""

from __future__ import annotations

from typing import Any, NamedTuple

WORD = 1 << 64


class RowSums(NamedTuple):
    """The rows of a mini-batch, as sums of their hashes modulo 2^64. A worker makes passes over its shard, row by row.

    Attributes:
        fingerprint: sum over all rows of the mini-batch.
        begun: sum over the rows after the last end of a pass in the mini-batch, which belong to the next pass.
        passes: ends of passes in the mini-batch, mostly 0, more than 1 for a tiny shard.
    """

    fingerprint: int
    begun: int
    passes: int

    def with_missed(self, passes: int) -> RowSums:
        """Return these sums, plus passes that ended in mini-batches that the worker skipped just before this one.

        The worker was lost meanwhile, so the skipped rows count as not trained. Without their ends, every later pass
        would be compared with the wrong rows.

        passes: number of passes that ended in the skipped mini-batches."""
        if not passes:
            return self
        # If no pass ends in this mini-batch itself, all of its rows come after the skipped ends.
        return RowSums(self.fingerprint, self.begun if self.passes else self.fingerprint, self.passes + passes)

    def followed_by(self, later: RowSums) -> RowSums:
        """Return the sums of this mini-batch and of the worker's next one together."""
        fingerprint = (self.fingerprint + later.fingerprint) % WORD
        if later.passes or not self.passes:
            return RowSums(fingerprint, later.begun, self.passes + later.passes)
        return RowSums(fingerprint, (self.begun + later.fingerprint) % WORD, self.passes)


class Whole(NamedTuple):
    """Passes ``first`` to ``last``, counted from 1, that all workers have ended, and the fingerprint of their rows."""

    first: int
    last: int
    fingerprint: int


class Passes:
    """Sums the fingerprints of gradients by pass. O(1) per gradient; memory O(workers + passes between them).

    state: the state in plain JSON, which is in every checkpoint, so that gradients that a roll-back undoes do not count.
    Its keys: sums (by worker, over all its rows so far), ended (by worker, number of its passes), at (by number of a
    pass, the sum over the workers that have ended it of their sums up to its end, and the number of these workers),
    last (number and sum of the last pass that all workers have ended)."""

    def __init__(self, num_workers: int, state: dict[str, Any]) -> None:
        self.num_workers = num_workers
        self.state = state
        self.whole: list[Whole] = []  # until take() returns them
        for name, empty in (("sums", {}), ("ended", {}), ("at", {}), ("last", [0, 0])):
            state.setdefault(name, empty)

    def use(self, worker: int, row_sums: RowSums) -> None:
        """Count a gradient that goes into an update."""
        name = str(worker)
        state = self.state
        total = state["sums"][name] = (state["sums"].get(name, 0) + row_sums.fingerprint) % WORD
        if not row_sums.passes:
            return
        passes = state["ended"][name] = state["ended"].get(name, 0) + row_sums.passes
        sum_, count = state["at"].get(str(passes), (0, 0))
        state["at"][str(passes)] = [(sum_ + total - row_sums.begun) % WORD, count + 1]
        if count + 1 == self.num_workers:
            self._end(passes)

    def miss(self, worker: int, row_sums: RowSums) -> None:
        """Count the ends of passes in a refused gradient, but not its rows, which are not trained in this pass."""
        self.use(worker, RowSums(0, 0, row_sums.passes))

    def _end(self, number: int) -> None:
        """Note that all workers have ended pass ``number``, and with it any pass since the last such one."""
        before, sum_before = self.state["last"]
        sum_ = self.state["at"][str(number)][0]
        self.whole.append(Whole(before + 1, number, (sum_ - sum_before) % WORD))
        self.state["last"] = [number, sum_]
        self.state["at"] = {at: entry for at, entry in self.state["at"].items() if int(at) > number}

    def take(self) -> list[Whole]:
        """Return the passes that all workers have ended since the last call."""
        whole_passes = self.whole
        self.whole = []
        return whole_passes
