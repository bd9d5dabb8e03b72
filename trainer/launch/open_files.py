"""The limit of open files per process, which includes sockets, pipes and shared memory."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from contextlib import suppress

from pipeline.core.errors import UsageError
from trainer.options import Role

SPARE = 64  # other open files of a process: libraries, logs, checkpoints
FILES_PER_WORKER = 4  # in a server: socket, heartbeats' socket (server 0 only), shared memory, pipe
FILES_PER_CHILD = 3  # in the supervisor: its lifeline, and two pipes of the fork server


def raise_limit() -> None:
    """Raise the limit of this process, and of processes that it starts, to the maximum that this host allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a system may have a lower limit than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def needed(roles: Sequence[Role], num_servers: int, num_workers: int) -> int:
    """Return the open files of the host's process that needs the most. Pure."""
    server = FILES_PER_WORKER * num_workers + num_servers if any(role.kind == "server" for role in roles) else 0
    return SPARE + max(server, FILES_PER_CHILD * len(roles) + num_servers)


def check_limit(roles: Sequence[Role], num_servers: int, num_workers: int) -> None:
    """Raise UsageError if a process of this host would need more open files than the host allows.

    roles: the roles of this host; num_servers, num_workers: of the whole run."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = needed(roles, num_servers, num_workers)
    if hard != resource.RLIM_INFINITY and most > hard:
        raise UsageError(
            f"{num_workers} workers need {most} open files in one process, and this host allows {hard}: raise the limit"
            f" (ulimit -Hn {most}), or give fewer workers or other --roles to this host"
        )
