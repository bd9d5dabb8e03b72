"""The rule by which silent workers do not count as lost after a pause of server 0. Pure."""

from __future__ import annotations


class PauseWatch:
    """Notices pauses of server 0, which then has heartbeats to read before any worker counts as silent."""

    def __init__(self) -> None:
        self._ticked = 0.0
        self._patient_until = 0.0

    def tick(self, now: float, timeout_s: float) -> bool:
        """Note that the server runs, and return whether silent workers count as lost.

        now: the caller's clock in seconds; timeout_s: the silence after which a worker is lost."""
        if now - self._ticked > timeout_s / 4:
            self._patient_until = now + timeout_s
        self._ticked = now
        return now >= self._patient_until
