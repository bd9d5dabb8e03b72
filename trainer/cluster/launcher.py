"""What starts the parts of a run on the hosts of a cluster. The unit is one host's part: its processes share memory, and its
supervisor watches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.core.errors import UsageError
from trainer.options import Role


@dataclass(frozen=True)
class Part:
    """One host's share of a run. The first part has server 0 and the evaluator, and leads."""

    index: int
    roles: tuple[Role, ...]

    @property
    def leads(self) -> bool:
        return Role("server", 0) in self.roles

    def count(self, kind: str) -> int:
        return sum(role.kind == kind for role in self.roles)


@dataclass(frozen=True)
class Slot:
    """Where a part runs. attempt: grows whenever the part is started again; devices: the numbers or names of the GPUs that
    are its own, None where nothing assigns them; scratch: a folder for its files, the system's where None."""

    attempt: int
    devices: tuple[str, ...] | None = None
    scratch: str | None = None


# What a part is told: plain JSON values. It holds the run's token, so it goes through pipes and closures, and never into
# arguments, an environment or a log.
Invitation = Mapping[str, Any]


class Launcher(Protocol):
    """Starts every part somewhere, and again where one is lost, until it is stopped.

    A part is ``trainer.cluster.part.run_part``. It reports its end itself, so a launcher tells of a part only when it will
    not start it again."""

    def check(self, parts: Sequence[Part]) -> None:
        """Raises UsageError that names the setting which keeps the parts from running all at once."""

    def host(self) -> str:
        """A name or number by which the parts reach this process."""

    def threads(self, parts: Sequence[Part]) -> int:
        """For each worker: the same on every host and in every start, because sums depend on it."""

    def start(self, parts: Sequence[Part], invitation: Invitation) -> None: ...

    def failure(self) -> str | None:
        """Why the launcher has given a part up; None while it has not."""

    def waiting_for(self) -> str:
        """What would have more parts running, in words: a setting, a cluster's free cores."""

    def store(self) -> str:
        """Return settings of file systems that the parts may lack, in SETTINGS' form (core/storage/store.py), or ""."""

    def is_over(self) -> bool:
        """Whether no part runs, or will be started again."""

    def stop(self) -> None:
        """End all parts at once. The gentle end goes through the rendezvous before."""


def share_roles(num_servers: int, num_workers: int, hosts: int) -> list[Part]:
    """The parts of a run: servers in turn, workers in blocks whose sizes differ by at most one, the smaller blocks first,
    where server 0 and the evaluator are. Raises UsageError. Pure."""
    if not 1 <= hosts <= num_workers:
        raise UsageError(f"--hosts {hosts}: give 1 to {num_workers}, a host a worker at the most")
    bounds = [num_workers * host // hosts for host in range(hosts + 1)]
    parts = []
    for host in range(hosts):
        servers = [Role("server", index) for index in range(host, num_servers, hosts)]
        workers = [Role("worker", index) for index in range(bounds[host], bounds[host + 1])]
        parts.append(Part(host, (*servers, *workers, *([Role("evaluator")] if host == 0 else []))))
    return parts


def visible(devices: Sequence[str], now: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for a part that was given some of the devices. A number counts within those that are visible
    ``now``; a name is one already. Pure."""
    known = [device.strip() for device in now.split(",")] if now else []
    return ",".join(
        known[int(device)] if device.isdecimal() and int(device) < len(known) else device for device in devices
    )


def invited(invitation: Invitation, part: Part) -> dict[str, Any]:
    """What one part is told."""
    roles = ",".join(f"{role.kind}:{role.index}" if role.kind != "evaluator" else role.kind for role in part.roles)
    return {**invitation, "part": part.index, "roles": roles}
