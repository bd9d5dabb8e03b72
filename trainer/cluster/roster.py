"""Who takes part in a run on a cluster: decisions of the rendezvous, without sockets and without a clock. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LEASE_S = 10.0  # one that was replaced and was not heard of for so long has ended, or will when it looks
CUT_S = 2.0  # one whose connection is gone would have connected again by then


@dataclass
class Member:
    """The attempt of a part that counts. addresses: of its servers by number; heard: when it last spoke (seconds)."""

    attempt: int
    addresses: Mapping[int, str]
    heard: float


@dataclass
class Replaced:
    """An attempt that has a successor. heard: when it last spoke; cut: since when its connection is gone (seconds)."""

    heard: float
    cut: float | None = None

    def is_gone(self, now: float, lease_s: float) -> bool:
        return now - self.heard > lease_s or (self.cut is not None and now - max(self.cut, self.heard) > CUT_S)


@dataclass(frozen=True)
class Book:
    """Where all servers listen. edition: grows whenever a server moves."""

    edition: int
    addresses: tuple[str, ...]


@dataclass
class Roster:
    """Each part's newest attempt. One that has a successor is fenced off: it is told to leave, and its successor waits until
    it has said goodbye or its lease has ended.

    num_parts, num_servers: of the run."""

    num_parts: int
    num_servers: int
    lease_s: float = LEASE_S
    members: dict[int, Member] = field(default_factory=dict)
    replaced: dict[tuple[int, int], Replaced] = field(default_factory=dict)  # by part and attempt
    book: Book | None = None

    def hello(self, part: int, attempt: int, addresses: Mapping[int, str], now: float) -> bool:
        """A part is there; whether that is news. An attempt that comes after its successor is none."""
        known = self.members.get(part)
        if known and known.attempt >= attempt:
            self.heard(part, attempt, now)
            return False
        if known:
            self.replaced[part, known.attempt] = Replaced(known.heard)
        self.members[part] = Member(attempt, dict(addresses), now)
        return True

    def heard(self, part: int, attempt: int, now: float) -> None:
        known = self.members.get(part)
        if known and known.attempt == attempt:
            known.heard = now
        elif (part, attempt) in self.replaced:
            self.replaced[part, attempt] = Replaced(now)

    def cut(self, part: int, attempt: int, now: float) -> None:
        """The connection of an attempt is gone: its process has ended, or it connects anew."""
        found = self.replaced.get((part, attempt))
        if found and found.cut is None:
            found.cut = now

    def waits_for(self, part: int) -> list[int]:
        """The earlier attempts of a part that may still live."""
        return [attempt for other, attempt in self.replaced if other == part]

    def goodbye(self, part: int, attempt: int) -> None:
        """An attempt has ended its processes."""
        self.replaced.pop((part, attempt), None)

    def is_current(self, part: int, attempt: int) -> bool:
        known = self.members.get(part)
        return known is not None and known.attempt == attempt

    def page(self, part: int, attempt: int, now: float) -> Book | None:
        """What an attempt may go by: None while it must wait."""
        if not self.is_current(part, attempt) or self._is_fenced(part, now):
            return None
        if len(self.members) == self.num_parts:
            self._publish(now)
        return self.book

    def silent(self, now: float) -> dict[int, float]:
        """The parts that were not heard of for a lease, and for how long (seconds)."""
        since = {part: now - member.heard for part, member in sorted(self.members.items())}
        return {part: seconds for part, seconds in since.items() if seconds > self.lease_s}

    def _is_fenced(self, part: int, now: float) -> bool:
        for key in [key for key, found in self.replaced.items() if found.is_gone(now, self.lease_s)]:
            del self.replaced[key]
        return bool(self.waits_for(part))

    def _publish(self, now: float) -> None:
        """Addresses of a part that waits are not published: until then its predecessor's hold."""
        found: dict[int, str] = {}
        for part, member in self.members.items():
            if member.addresses and self._is_fenced(part, now):
                return
            found |= member.addresses
        addresses = tuple(found[index] for index in range(self.num_servers))
        if self.book is None or self.book.addresses != addresses:
            self.book = Book(self.book.edition + 1 if self.book else 1, addresses)
