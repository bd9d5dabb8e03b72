"""The virtual network: a latency, and links: of servers, which all workers share, or one per worker."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Link:
    """A direction of a server's connection. Messages are transmitted one after the other, in the order of sending."""

    bytes_per_s: float
    free_at: float = 0.0

    def send(self, size: float, now: float) -> float:
        """Send a message of ``size`` bytes now, and return the time at which its last byte has left."""
        self.free_at = max(self.free_at, now) + size / self.bytes_per_s
        return self.free_at


class Network:
    """The links of all servers, simulated as one pair: servers have equal links and equal parts of every message.

    Args:
        latency_s: virtual seconds that every message takes in addition to its transmission.
        megabits_per_s: bandwidth per direction of a server's link.
        message_bytes: size of a server's part of a gradient, and of the parameters.
    """

    def __init__(self, latency_s: float, megabits_per_s: float, message_bytes: float) -> None:
        bytes_per_s = megabits_per_s * 1e6 / 8
        self.latency_s = latency_s
        self.message_bytes = message_bytes
        self.to_servers = Link(bytes_per_s)
        self.to_workers = Link(bytes_per_s)

    def push(self, now: float) -> float:
        """Send a gradient now, and return the time of its arrival."""
        return self.to_servers.send(self.message_bytes, now) + self.latency_s

    def reply(self, now: float) -> float:
        """Send parameters now, and return the time of their arrival."""
        return self.to_workers.send(self.message_bytes, now) + self.latency_s


class CollectiveNetwork:
    """The links of workers that sum their vectors by reduce-scatter and all-gather, a link per worker and direction.

    In each of the two phases, a worker sends N-1 pieces of 1/N of the vector, and receives as many at the same time.

    Args:
        latency_s: virtual seconds that every phase takes in addition to its transmissions.
        megabits_per_s: bandwidth per direction of a worker's link.
        vector_bytes: size of the vector that is summed.
        num_workers: N; a single worker sends nothing.
    """

    def __init__(self, latency_s: float, megabits_per_s: float, vector_bytes: float, num_workers: int) -> None:
        self.latency_s = latency_s if num_workers > 1 else 0.0
        self.phase_bytes = vector_bytes * (num_workers - 1) / num_workers
        self.phase_s = self.latency_s + self.phase_bytes / (megabits_per_s * 1e6 / 8)

    def push(self, now: float) -> float:
        """Send the pieces of a worker's gradient to their owners now, and return the time when the last is there."""
        return now + self.phase_s

    def reply(self, now: float) -> float:
        """Send the sums to all workers now, and return the time when the last is there."""
        return now + self.phase_s
