"""How this host takes part in a run: which of its processes, where the servers are, and what people want to see."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from pipeline.errors import UsageError

Kind = Literal["server", "worker", "evaluator"]


@dataclass(frozen=True)
class Role:
    """One process of a run. Its text names its log."""

    kind: Kind
    index: int = 0

    def __str__(self) -> str:
        return f"{self.kind}-{self.index}"


@dataclass(frozen=True)
class Options:
    """What a command line says beside the Config: it may differ from host to host, and from start to start.

    roles: those that run here, None for all; addresses: where each server listens, empty for places that only this
    machine reaches; token_file: holds the secret that the hosts of a run share. Raises UsageError."""

    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    roles: tuple[Role, ...] | None = None
    addresses: tuple[str, ...] = ()
    token_file: Path | None = None
    tensorboard: bool = False
    report: bool = True

    def __post_init__(self) -> None:
        if self.roles is not None and not self.addresses:
            raise UsageError("--roles starts a part of a run: give --addresses too, where all hosts find the servers")
        if self.roles is not None and not self.token_file:
            raise UsageError(
                "--roles starts a part of a run: give --token-file too, the same secret on every host"
                " (make one with: openssl rand -hex 32)"
            )

    def has(self, role: Role) -> bool:
        """Whether a role runs here."""
        return self.roles is None or role in self.roles

    def roles_of(self, num_servers: int, num_workers: int) -> list[Role]:
        """The roles that run here, in the order of their start. Raises UsageError for one that the run does not have."""
        every = all_roles(num_servers, num_workers)
        for role in self.roles or ():
            if role not in every:
                count = num_servers if role.kind == "server" else num_workers
                raise UsageError(
                    f"--roles names {role.kind}:{role.index}, but the run has {role.kind}s 0..{count - 1}: the shards"
                    f" decide on the workers, --servers on the servers"
                )
        return [role for role in every if self.has(role)]


def all_roles(num_servers: int, num_workers: int) -> list[Role]:
    servers = [Role("server", index) for index in range(num_servers)]
    return [*servers, *(Role("worker", index) for index in range(num_workers)), Role("evaluator")]


def parse_roles(text: str) -> tuple[Role, ...]:
    """``server:0,worker:0-5,evaluator`` as roles; a range holds both of its ends. Raises UsageError."""
    found = [role for part in text.split(",") for role in _parse_part(part.strip())]
    twice = next((role for role in found if found.count(role) > 1), None)
    if twice:
        raise UsageError(f"--roles {text} names {twice.kind}:{twice.index} twice")
    return tuple(found)


def _parse_part(part: str) -> list[Role]:
    match = re.fullmatch(r"(server|worker):(\d{1,4})(?:-(\d{1,4}))?|evaluator", part)
    if not match:
        raise UsageError(f"--roles: {part!r} is none of server:N, server:A-B, worker:N, worker:A-B, evaluator")
    if part == "evaluator":
        return [Role("evaluator")]
    first, last = int(match[2]), int(match[3] or match[2])
    if last < first:
        raise UsageError(f"--roles: {part} ends before it begins; write {match[1]}:{last}-{first}")
    return [Role(cast(Kind, match[1]), index) for index in range(first, last + 1)]


def parse_addresses(text: str) -> tuple[str, ...]:
    """One address a server, in their order; the transport checks their form."""
    return tuple(part.strip() for part in text.split(","))
