"""MLlib's convergence rule, which can end a run before its budget is spent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Read = Callable[[], npt.NDArray[np.float32]]


class Convergence:
    """MLlib's test for the end of a run: |w_t - w_(t-1)| < tolerance * max(|w_t|, 1) after global mini-batch t >= 2.

    A global mini-batch is n accepted gradients for n workers: one update of bsp, n updates of asp, which are n times
    smaller. If updates end between two mini-batches, w_t is taken after the update that completes the t-th. After a change
    of workers the mini-batches are counted anew, and the first one is compared with the checkpoint with which the new
    workers began. O(P) a mini-batch.

    Args:
        tolerance: 0 for a run that never converges.
        num_workers: n.
        read: returns the current parameters [P]; when this object is created, the parameters of the checkpoint.
        accepted: gradients of that checkpoint; 0 at the start of a run.
        update_size: gradients per update. If the last update before the checkpoint completed a mini-batch, the next one
            is compared with the checkpoint; otherwise the first complete mini-batch is not compared, as at the start.
        begin: gradients in the model with which these workers began, after others; 0 for the first workers of a run.
    """

    def __init__(
        self,
        tolerance: float,
        num_workers: int,
        read: Read,
        *,
        accepted: int = 0,
        update_size: int = 1,
        begin: int = 0,
    ) -> None:
        self.tolerance = tolerance
        self.num_workers = num_workers
        self.read = read
        self._begin = begin
        own = accepted - begin
        self._mini_batches = own // num_workers
        self._before: npt.NDArray[np.float64] | None = None
        # Other workers had made mini-batches before.
        has_previous = self._mini_batches or begin
        if tolerance and has_previous and (own - update_size) // num_workers < self._mini_batches:
            self._before = read().astype(np.float64)

    def is_reached(self, accepted: int) -> bool:
        """Return whether the run has converged with the update after which ``accepted`` gradients are in the model."""
        mini_batches = (accepted - self._begin) // self.num_workers
        if not self.tolerance or mini_batches == self._mini_batches or not mini_batches:
            return False
        before = self._before
        self._before = self.read().astype(np.float64)
        self._mini_batches = mini_batches
        if before is None:
            return False
        distance = np.linalg.norm(self._before - before)
        return bool(distance < self.tolerance * max(float(np.linalg.norm(self._before)), 1.0))
