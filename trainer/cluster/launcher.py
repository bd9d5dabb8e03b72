"""The interface of launchers, which start the parts of a run on the hosts of a cluster.

A part is all that runs on one host: its processes share memory and are watched by its supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipeline.core.errors import DataError, UsageError
from pipeline.core.json_values import build
from trainer.config import Config
from trainer.options import Role, parse_roles


@dataclass(frozen=True)
class Part:
    """The roles of one host in a run. The first part has server 0 and the evaluator, and leads."""

    index: int
    roles: tuple[Role, ...]

    @property
    def leads(self) -> bool:
        return Role("server", 0) in self.roles

    def count(self, kind: str) -> int:
        return sum(role.kind == kind for role in self.roles)


@dataclass(frozen=True)
class PartExecution:
    """The place and attempt of a part's execution.

    Attributes:
        attempt: grows with every restart of the part.
        devices: numbers or names of its GPUs, None if the cluster does not assign GPUs.
        scratch: parent of its temporary folders, None for the system's temporary folder.
    """

    attempt: int
    devices: tuple[str, ...] | None = None
    scratch: str | None = None


@dataclass(frozen=True)
class LaunchArguments:
    """The launch arguments of a part.

    They contain the run's token, so they are passed through pipes and closures, never through command lines,
    environments or logs. On their way they are plain JSON, which needs no import of this package.

    Attributes:
        part: the part.
        rendezvous: tcp:// address of the rendezvous.
        token: the token of the run.
        config: the run.
        shards: digest of its shard set.
        report, tensorboard: the options of these names.
        store: file system settings of the starting process, as in SETTINGS (core/storage/store.py), or "".
    """

    part: Part
    rendezvous: str
    token: str = field(repr=False)
    config: Config
    shards: str
    report: bool
    tensorboard: bool
    store: str

    def to_json(self) -> dict[str, Any]:
        """Return the arguments as plain JSON."""
        return {
            "rendezvous": self.rendezvous,
            "token": self.token,
            "config": self.config.to_json(),
            "shards": self.shards,
            "options": {"report": self.report, "tensorboard": self.tensorboard},
            "store": self.store,
            "part": self.part.index,
            "roles": roles_in_words(self.part.roles),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LaunchArguments:
        """Parse the result of ``to_json``. Raises DataError, which does not quote the token."""
        try:
            rest = dict(values)
            part = build(Part, {"index": rest.pop("part"), "roles": parse_roles(str(rest.pop("roles")))})
            config = Config.from_json(_pop_object(rest, "config"))
            return build(cls, _pop_object(rest, "options") | rest | {"part": part, "config": config})
        # A configuration of another version has other keys and other ranges.
        except (KeyError, TypeError, ValueError, UsageError) as fault:
            reason = f"it lacks {fault}" if isinstance(fault, KeyError) else str(fault)
            raise DataError(
                f"the launch arguments of a host are not read here: {reason}; install one version of the program on all"
                " hosts"
            ) from None


def _pop_object(values: dict[str, Any], key: str) -> dict[str, Any]:
    """Remove and return the object at a key. Raises KeyError, and ValueError for a value of another type."""
    value = values.pop(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key!r} is a {type(value).__name__}, not an object")
    return value


def roles_in_words(roles: Sequence[Role]) -> str:
    """Return roles as text that ``parse_roles`` reads."""
    return ",".join(f"{role.kind}:{role.index}" if role.kind != "evaluator" else role.kind for role in roles)


class Launcher(Protocol):
    """The interface of a launcher, which starts every part and restarts lost ones until it is stopped.

    A part is a call of ``trainer.cluster.part.run_part``. It reports its end itself, so a launcher reports only a part
    that it has given up."""

    def check(self, parts: Sequence[Part]) -> None:
        """Raise UsageError if not all parts can run at once, naming the setting that prevents it."""

    def host(self) -> str:
        """Return the name or number of the host at which the parts can reach this process."""

    def threads(self, parts: Sequence[Part]) -> int:
        """Return the threads per worker.

        They are the same on every host and in every start, because floating-point sums depend on them."""

    def start(self, arguments: Sequence[LaunchArguments]) -> None:
        """Start the parts, one for each item of ``arguments``."""

    def failure(self) -> str | None:
        """Return why the launcher has given up a part; None if it has not."""

    def waiting_for(self) -> str:
        """Return the cause for which missing parts wait, as text: a setting, or too few free cores."""

    def store(self) -> str:
        """Return file system settings for hosts without any, as in SETTINGS (core/storage/store.py), or ""."""

    def is_over(self) -> bool:
        """Return whether no part runs or will be restarted."""

    def stop(self) -> None:
        """Kill all parts. Orderly ends are requested through the rendezvous before."""


def share_roles(num_servers: int, num_workers: int, hosts: int) -> list[Part]:
    """Assign the roles of a run to hosts. Raises UsageError unless 1 <= hosts <= num_workers. Pure.

    Servers are assigned round-robin, workers in blocks whose sizes differ by at most one, the smaller blocks first, so
    that host 0, with server 0 and the evaluator, has the fewest workers."""
    if not 1 <= hosts <= num_workers:
        raise UsageError(f"--hosts {hosts}: give 1 to {num_workers}, at most one host per worker")
    bounds = [num_workers * host // hosts for host in range(hosts + 1)]
    parts = []
    for host in range(hosts):
        servers = [Role("server", index) for index in range(host, num_servers, hosts)]
        workers = [Role("worker", index) for index in range(bounds[host], bounds[host + 1])]
        parts.append(Part(host, (*servers, *workers, *([Role("evaluator")] if host == 0 else []))))
    return parts


def visible(devices: Sequence[str], now: str | None) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for a part with the given devices. Pure.

    devices: each a number, which is an index into the list ``now``, or a name, which stays as it is; now: the present
    value of the variable, None if it is not set."""
    available = [device.strip() for device in now.split(",")] if now else []
    return ",".join(
        available[int(device)] if device.isdecimal() and int(device) < len(available) else device for device in devices
    )
