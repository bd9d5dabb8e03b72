"""The virtual network: a latency, and server links that all workers share."""

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
