"""The process of a server in a run whose stages have different servers: each stage's server takes over from the last."""

from __future__ import annotations

import socket as sockets
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

from pipeline.core.errors import UsageError
from trainer.config import Config, RunFacts
from trainer.exchange.parameter_server import ParameterServer
from trainer.home.folders import Folders
from trainer.transport.sockets import Secret

REBIND_S = 10.0  # an address that this process used is free again soon after its socket is closed
RETRY_S = 0.05


class StageServer(Protocol):
    """A server of one or several stages. ``run`` returns the module of the next server."""

    def run(self) -> str: ...
    def close(self) -> None: ...


def main(
    config: Config,
    facts: RunFacts,
    index: int,
    addresses: Sequence[str],
    secret: Secret,
    listener: sockets.socket | None,
    folders: Folders,
) -> None:
    """Run one server through all stages; never returns. See trainer.server.process.Server for the arguments.

    Server 0 begins as the server of the first stage, which hands over at once if the newest checkpoint continues in
    another one. The other servers only take part in stages with parameter servers; in other stages they are idle.

    listener: as there."""
    module = config.stage_configs()[0].exchange.server if index == 0 else ParameterServer.server
    while True:
        server = _open_server(module, config, facts, index, addresses, secret, listener, folders)
        module = server.run()
        server.close()


def _open_server(
    module: str,
    config: Config,
    facts: RunFacts,
    index: int,
    addresses: Sequence[str],
    secret: Secret,
    listener: sockets.socket | None,
    folders: Folders,
) -> StageServer:
    """Return the server that a module opens. Raises UsageError if the address is still taken after REBIND_S seconds."""
    deadline = time.monotonic() + REBIND_S
    while True:
        try:
            # A copy, because the server of the next stage needs the listening socket, too.
            copied = listener.dup() if listener else None
            server: StageServer = import_module(module).open_server(
                config, facts, index, addresses, secret, copied, folders
            )
        except UsageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
        else:
            return server
