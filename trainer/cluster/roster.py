"""The roster of a run on a cluster: the decisions of the rendezvous, without sockets or a clock. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEASE_S = 10.0  # a replaced attempt that is silent for so long has ended, or ends as soon as it runs again
CUT_S = 2.0  # a live attempt whose connection broke would have reconnected by then


@dataclass
class RosterEntry:
    """The current attempt of a part.

    Attributes:
        attempt: its number.
        addresses: tcp:// addresses of the part's servers, by server index.
        heard: time of its last message (seconds).
    """

    attempt: int
    addresses: Mapping[int, str]
    heard: float


@dataclass
class ReplacedAttempt:
    """An attempt that a newer one of its part has replaced, but that may still run.

    Attributes:
        heard: time of its last message (seconds).
        cut: time at which its connection broke (seconds), None while it is connected.
    """

    heard: float
    cut: float | None = None

    def is_gone(self, now: float, lease_s: float) -> bool:
        """Return whether it cannot run any more: its lease has ended, or it has not reconnected within CUT_S."""
        return now - self.heard > lease_s or (self.cut is not None and now - max(self.cut, self.heard) > CUT_S)


@dataclass(frozen=True)
class AddressTable:
    """The address table of a run.

    Attributes:
        edition: number of the table, which grows whenever a server moves.
        addresses: tcp:// addresses of the servers, in order.
    """

    edition: int
    addresses: tuple[str, ...]


@dataclass
class Roster:
    """The newest attempt of each part. A part is one host's share of the run, an attempt one start of that part.

    A replaced attempt is fenced off: it gets the command to leave, and its successor gets no addresses until the old
    one has said goodbye, its connection is gone or its lease has ended. Two attempts of a part therefore never train at
    once.

    Attributes:
        num_parts, num_servers: parts and servers of the run.
        lease_s: silence after which a replaced attempt is gone (seconds).
        members: the current attempt of each part.
        replaced: replaced attempts that may still live, by part and attempt.
        table: the current address table, None until all parts have arrived.
    """

    num_parts: int
    num_servers: int
    lease_s: float = LEASE_S
    members: dict[int, RosterEntry] = field(default_factory=dict)
    replaced: dict[tuple[int, int], ReplacedAttempt] = field(default_factory=dict)
    table: AddressTable | None = None

    def hello(self, part: int, attempt: int, addresses: Mapping[int, str], now: float) -> bool:
        """Note a message of an attempt, and return whether the attempt is new and replaces the part's earlier one.

        False for further messages of the same attempt, and for an attempt that is older than the current one.

        addresses: tcp:// addresses of the part's servers, by server index; now: time of the message (seconds)."""
        member = self.members.get(part)
        if member and member.attempt >= attempt:
            self.heard(part, attempt, now)
            return False
        if member:
            self.replaced[part, member.attempt] = ReplacedAttempt(member.heard)
        self.members[part] = RosterEntry(attempt, dict(addresses), now)
        return True

    def heard(self, part: int, attempt: int, now: float) -> None:
        """Note the time of a message of an attempt, current or replaced. Messages of unknown attempts are ignored."""
        member = self.members.get(part)
        if member and member.attempt == attempt:
            member.heard = now
        elif (part, attempt) in self.replaced:
            self.replaced[part, attempt] = ReplacedAttempt(now)

    def cut(self, part: int, attempt: int, now: float) -> None:
        """Note that the connection of a replaced attempt is gone: its process has ended, or it will reconnect."""
        old_attempt = self.replaced.get((part, attempt))
        if old_attempt and old_attempt.cut is None:
            old_attempt.cut = now

    def waits_for(self, part: int) -> list[int]:
        """Return the replaced attempts of a part that may still live."""
        return [attempt for other, attempt in self.replaced if other == part]

    def goodbye(self, part: int, attempt: int) -> None:
        """Note that an attempt has ended its processes."""
        self.replaced.pop((part, attempt), None)

    def is_current(self, part: int, attempt: int) -> bool:
        member = self.members.get(part)
        return member is not None and member.attempt == attempt

    def address_table(self, part: int, attempt: int, now: float) -> AddressTable | None:
        """Return the address table for an attempt, or None while it must wait.

        A current attempt waits until all parts have arrived and its predecessor has ended. A replaced one gets no table
        any more. The table is updated first if all parts have arrived."""
        if not self.is_current(part, attempt) or self._is_fenced(part, now):
            return None
        if len(self.members) == self.num_parts:
            self._publish(now)
        return self.table

    def silent(self, now: float) -> dict[int, float]:
        """Return the parts that are silent for longer than a lease, with the duration (seconds)."""
        since = {part: now - member.heard for part, member in sorted(self.members.items())}
        return {part: seconds for part, seconds in since.items() if seconds > self.lease_s}

    def _is_fenced(self, part: int, now: float) -> bool:
        """Return whether a predecessor of a part's current attempt may still run. Forgets those that cannot."""
        for key in [key for key, old_attempt in self.replaced.items() if old_attempt.is_gone(now, self.lease_s)]:
            del self.replaced[key]
        return bool(self.waits_for(part))

    def _publish(self, now: float) -> None:
        """Update the address table once all parts have arrived.

        It stays as it is while the current attempt of any part with servers is fenced off, because the predecessor's
        servers may still be in use."""
        addresses_by_index: dict[int, str] = {}
        for part, member in self.members.items():
            if member.addresses and self._is_fenced(part, now):
                return
            addresses_by_index |= member.addresses
        addresses = tuple(addresses_by_index[index] for index in range(self.num_servers))
        if self.table is None or self.table.addresses != addresses:
            self.table = AddressTable(self.table.edition + 1 if self.table else 1, addresses)
