"""The place of one server in a run, which its supervisor gives to its process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from socket import socket

from trainer.home.folders import Folders
from trainer.transport.sockets import Secret


@dataclass(frozen=True)
class Endpoint:
    """The number, the addresses and the folders of a server.

    Attributes:
        index: number of the server.
        addresses: one per server. This server listens at ``addresses[index]``; all others connect to ``addresses[0]``.
        secret: the token of the run, which authenticates connections.
        listener: a socket of the supervisor that already listens at this server's address; None if this server must
            bind it.
        folders: the run's folders on this host.
    """

    index: int
    addresses: Sequence[str]
    secret: Secret
    listener: socket | None
    folders: Folders

    @property
    def address(self) -> str:
        return self.addresses[self.index]
