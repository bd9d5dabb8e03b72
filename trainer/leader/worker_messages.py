"""The messages of workers that exchange among themselves, as both of their leaders take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from trainer.transport.bodies.json_object import unpack_json
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.all_reduce import CopyReceipt
from trainer.transport.messages.gossip import PeerOffer, PoolRequest
from trainer.transport.messages.heads import Body, Message
from trainer.transport.messages.neighbours import ReplicaCopy
from trainer.transport.messages.peers import LinkLoss, PeerBeat, PeerJoin, RoundReport

FromWorker = PeerJoin | PeerBeat | RoundReport | ReplicaCopy | CopyReceipt | LinkLoss | PeerOffer | PoolRequest


class SendToWorker(Protocol):
    """Sends a message with its bodies to a worker."""

    def __call__(self, worker: int, message: Message, *bodies: bytes) -> None: ...


def introduction_of(body: Body) -> dict[str, Any]:
    """Parse the introduction of a join request. Raises MalformedMessageError."""
    values = unpack_json(body)
    texts = isinstance(values.get("address"), str) and isinstance(values.get("host"), str)
    if not texts or not isinstance(values.get("memory"), dict):
        raise MalformedMessageError("the introduction of a worker")
    return values


def reach_of(introduction: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an introduction that other workers need to connect."""
    return {name: introduction[name] for name in ("address", "host", "memory", "gpu") if name in introduction}
