"""The virtual network: a latency, and links of the servers that all workers share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Link:
    """One direction of a server's connection: messages go one after the other, in the order in which they are sent."""

    bytes_per_s: float
    free_at: float = 0.0

    def send(self, size: float, now: float) -> float:
        """When the last byte of a message has left, if it is sent now."""
        self.free_at = max(self.free_at, now) + size / self.bytes_per_s
        return self.free_at


class Network:
    """All servers have equal links and equal parts of every message, so one pair of links stands for all of them."""

    def __init__(self, latency_s: float, megabits_per_s: float, message_bytes: float) -> None:
        bytes_per_s = megabits_per_s * 1e6 / 8
        self.latency_s, self.message_bytes = latency_s, message_bytes
        self.to_servers, self.to_workers = Link(bytes_per_s), Link(bytes_per_s)

    def push(self, now: float) -> float:
        """When a gradient that is sent now has arrived."""
        return self.to_servers.send(self.message_bytes, now) + self.latency_s

    def reply(self, now: float) -> float:
        """When the parameters that are sent now have arrived."""
        return self.to_workers.send(self.message_bytes, now) + self.latency_s
