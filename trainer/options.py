"""The part of this host in a run: its processes, the addresses of the servers, and its output."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from pipeline.core.errors import UsageError
from pipeline.core.specs import Spec, option
from trainer.report.metrics import parse_endpoint

Kind = Literal["server", "worker", "evaluator"]


@dataclass(frozen=True)
class Role:
    """A process of a run. str(role) is used as the name of its log file."""

    kind: Kind
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}-{self.index}"


def all_roles(num_servers: int, num_workers: int) -> list[Role]:
    servers = [Role("server", index) for index in range(num_servers)]
    return [*servers, *(Role("worker", index) for index in range(num_workers)), Role("evaluator")]


def parse_roles(text: str) -> tuple[Role, ...]:
    """Parse roles such as ``server:0,worker:0-5,evaluator``; ranges are inclusive. Raises UsageError."""
    roles = [role for part in text.split(",") for role in _parse_part(part.strip())]
    twice = next((role for role, count in Counter(roles).items() if count > 1), None)
    if twice:
        raise UsageError(f"--roles {text} names {twice.kind}:{twice.index} twice")
    return tuple(roles)


def _parse_part(part: str) -> list[Role]:
    """Parse one entry of --roles, such as ``worker:0-5``. Raises UsageError."""
    match = re.fullmatch(r"(server|worker):(\d{1,4})(?:-(\d{1,4}))?|evaluator", part)
    if not match:
        raise UsageError(f"--roles: {part!r} is not server:N, server:A-B, worker:N, worker:A-B or evaluator")
    if part == "evaluator":
        return [Role("evaluator")]
    first = int(match[2])
    last = int(match[3] or match[2])
    if last < first:
        raise UsageError(f"--roles: {part} is an empty range; write {match[1]}:{last}-{first}")
    return [Role(cast(Kind, match[1]), index) for index in range(first, last + 1)]


def parse_addresses(text: str) -> tuple[str, ...]:
    """Split a list of addresses, one per server in order. The transport checks their form."""
    return tuple(part.strip() for part in text.split(","))


@dataclass(frozen=True)
class Options(Spec):
    """The options of this host in a run. They may differ between hosts, and between starts."""

    resume: bool = option(False, "resume the run in --output, which a larger --epochs or --steps extends")
    overwrite: bool = option(False, "delete the run in --output and start again")
    workers: int | None = option(
        None,
        "with --resume: number of workers from the newest checkpoint on, for any number of shards; the rows that the"
        " interrupted pass lacks are divided among them; --batch-size may change, too",
        least=1,
        shown="the number that the run had, at first that of the shards",
        advanced=True,
    )
    roles: tuple[Role, ...] | None = option(
        None,
        "processes of this host, such as server:0,worker:0-5,evaluator",
        metavar="LIST",
        parse=parse_roles,
        shown="all",
        advanced=True,
    )
    addresses: tuple[str, ...] = option(
        (),
        "addresses of the servers in order, such as tcp://hostA:7000,tcp://hostB:7000",
        metavar="LIST",
        parse=parse_addresses,
        shown="ports of this host",
        advanced=True,
    )
    token_file: Path | None = option(
        None,
        "file with the secret of all hosts, which authenticates processes and encrypts traffic between hosts",
        metavar="FILE",
        parse=Path,
        advanced=True,
    )
    tensorboard: bool = option(
        False, "write TensorBoard logs to OUTPUT/tensorboard (needs the extra tensorboard)", advanced=True
    )
    metrics_port: tuple[str, int] | None = option(
        None,
        "serve metrics of the run for Prometheus at http://THIS_HOST:PORT/metrics, at ADDRESS alone if given; 0: any free"
        " port, which is printed (needs the extra metrics)",
        metavar="[ADDRESS:]PORT",
        parse=parse_endpoint,
        shown="off",
        advanced=True,
    )
    metrics_file: Path | None = option(
        None,
        "file FILE.prom for the metrics of the run when it ends, for the textfile collector of Prometheus's node_exporter"
        " (needs the extra metrics)",
        metavar="FILE",
        parse=Path,
        advanced=True,
    )
    report: bool = option(True, "write report.html at the end", advanced=True)
    quiet: bool = option(False, "print only the result and errors", advanced=True)
    silent: bool = False  # print nothing at all, for programs that use the Result
    # Whether a command line has --batch-size, or its --config does: a resume with other workers keeps the run's mini-batch
    # otherwise. None for programs, whose configuration counts if the number of workers changes.
    batch_size_given: bool | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        # The command line refuses its two flags, but a file of defaults or a program may set both.
        if self.resume and self.overwrite:
            raise UsageError("resume continues the run in --output, and overwrite deletes it: set only one of them")
        if self.roles is not None and not self.addresses:
            raise UsageError("--roles starts a part of a run: give --addresses too, the addresses of all servers")
        if self.roles is not None and not self.token_file:
            raise UsageError(
                "--roles starts a part of a run: give --token-file too, with the same secret on every host"
                " (make one with: openssl rand -hex 32)"
            )

    def has(self, role: Role) -> bool:
        """Return whether a role runs on this host."""
        return self.roles is None or role in self.roles

    @property
    def computes(self) -> bool:
        """Return whether workers or the evaluator run on this host."""
        return self.roles is None or any(role.kind != "server" for role in self.roles)

    def roles_of(self, num_servers: int, num_workers: int) -> list[Role]:
        """Return the roles of this host in the order of their start. Raises UsageError for roles that do not exist.

        num_servers, num_workers: servers and workers of the whole run."""
        every = all_roles(num_servers, num_workers)
        for role in self.roles or ():
            if role not in every:
                count = num_servers if role.kind == "server" else num_workers
                raise UsageError(
                    f"--roles names {role.kind}:{role.index}, but the run has {role.kind}s 0..{count - 1}: it has"
                    " as many workers as shards, unless a resume changed them, and --servers sets the number of servers"
                )
        return [role for role in every if self.has(role)]
