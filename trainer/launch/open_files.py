"""How many files a host's processes may have open: sockets, pipes and shared memory count."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import suppress

from pipeline.core.errors import UsageError
from trainer.options import Role

SPARE = 64  # what a process has open besides: libraries, logs, checkpoints
OF_A_WORKER = 3  # in a server: its socket, that of its heartbeats (server 0 alone), its shared memory
OF_A_CHILD = 3  # in the supervisor: its lifeline, and two pipes of the fork server


def raise_limit() -> None:
    """Let this process, and those that it starts, have as many open files as this host allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a system may have a lower limit than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def needed(roles: Sequence[Role], num_servers: int, num_workers: int) -> int:
    """Open files of the process that has the most, of those that run on one host. Pure."""
    server = OF_A_WORKER * num_workers + num_servers if any(role.kind == "server" for role in roles) else 0
    return SPARE + max(server, OF_A_CHILD * len(roles) + num_servers)


def check_limit(roles: Sequence[Role], num_servers: int, num_workers: int) -> None:
    """Raises UsageError if a process of this host would need more open files than the host allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed(roles, num_servers, num_workers)
    if hard != resource.RLIM_INFINITY and most > hard:
        raise UsageError(
            f"{num_workers} workers need {most} open files in one process, and this host allows {hard}: raise the limit"
            f" (ulimit -Hn {most}), or give fewer workers or other --roles to this host"
        )
