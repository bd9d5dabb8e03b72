"""The process of a server in a run whose stages have different servers: each stage's server takes over from the last."""

from __future__ import annotations

import time
from dataclasses import replace
from importlib import import_module
from typing import Protocol

from pipeline.core.errors import UsageError
from trainer.config import Config, RunFacts
from trainer.exchange.parameter_server import ParameterServer
from trainer.server.endpoint import Endpoint

REBIND_S = 10.0  # an address that this process used is free again soon after its socket is closed
RETRY_S = 0.05


class StageServer(Protocol):
    """A server of one or several stages. ``run`` returns the module of the next server."""

    def run(self) -> str: ...
    def close(self) -> None: ...


def main(config: Config, facts: RunFacts, endpoint: Endpoint) -> None:
    """Run one server through all stages; never returns. See trainer.server.process.Server for the arguments.

    Server 0 begins as the server of the first stage, which hands over at once if the newest checkpoint continues in
    another one. The other servers only take part in stages with parameter servers; in other stages they are idle."""
    module = ParameterServer.server if endpoint.index else config.stage_configs()[0].exchange.server
    while True:
        server = _open_server(module, config, facts, endpoint)
        module = server.run()
        server.close()


def _open_server(module: str, config: Config, facts: RunFacts, endpoint: Endpoint) -> StageServer:
    """Return the server that a module opens. Raises UsageError if the address is still taken after REBIND_S seconds.

    Args:
        module: of the server.
        config, facts: the run.
        endpoint: the place of the server.
    """
    deadline = time.monotonic() + REBIND_S
    while True:
        try:
            # A copy, because the server of the next stage needs the listening socket, too.
            copied = replace(endpoint, listener=endpoint.listener.dup() if endpoint.listener else None)
            server: StageServer = import_module(module).open_server(config, facts, copied)
        except UsageError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
        else:
            return server
