"""The heads of messages as bytes: the code of a kind, and its fields."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar, get_args, get_type_hints

from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.all_reduce import (
    CopyReceipt,
    GradientPiece,
    PeerView,
    RangeSum,
    Settlement,
    StoreEntry,
    WantSnapshot,
    WriteCopy,
)
from trainer.transport.messages.gossip import GossipContent, GossipOffer, GossipPool, PeerOffer, PoolRequest
from trainer.transport.messages.neighbours import NeighbourModel, NeighbourView, ReplicaCopy, RoundGrant
from trainer.transport.messages.peers import (
    LinkLoss,
    ModelCopy,
    PeerBeat,
    PeerJoin,
    Regroup,
    Replacement,
    RoundReport,
    RunEnd,
)
from trainer.transport.messages.servers import (
    Cancel,
    ChangeStage,
    Execute,
    GiveUp,
    GradientReceipt,
    Heartbeat,
    Hello,
    Join,
    JoinReceipt,
    Load,
    LoadReceipt,
    Parameters,
    Push,
    Rejoin,
    Stop,
    WriteReceipt,
)
from trainer.transport.messages.supervisors import AskStatus, End, EndReply, Refusal, StatusReply, WorkerLoss

MAGIC = b"PS2"
Body = bytes | memoryview
B = TypeVar("B", bound=Body)
Message = (
    Join
    | Push
    | GiveUp
    | Heartbeat
    | Hello
    | JoinReceipt
    | GradientReceipt
    | LoadReceipt
    | WriteReceipt
    | AskStatus
    | WorkerLoss
    | End
    | StatusReply
    | EndReply
    | Refusal
    | Parameters
    | Stop
    | Cancel
    | Rejoin
    | Load
    | Execute
    | PeerJoin
    | PeerBeat
    | RoundReport
    | CopyReceipt
    | LinkLoss
    | Regroup
    | Replacement
    | PeerView
    | WriteCopy
    | Settlement
    | WantSnapshot
    | RunEnd
    | GradientPiece
    | RangeSum
    | ModelCopy
    | ChangeStage
    | StoreEntry
    | NeighbourView
    | RoundGrant
    | NeighbourModel
    | ReplicaCopy
    | GossipOffer
    | GossipPool
    | GossipContent
    | PeerOffer
    | PoolRequest
)
TWO_BODIES = (Push, PeerJoin, RoundReport, GradientPiece, RangeSum, ModelCopy, StoreEntry, ReplicaCopy)
KINDS: tuple[type[Message], ...] = get_args(Message)  # the code of a kind is its place
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_FORMATS = {int: "q", bool: "?"}
_HEADS = [struct.Struct("<3sB" + "".join(map(_FORMATS.__getitem__, get_type_hints(kind).values()))) for kind in KINDS]


def pack(message: Message) -> bytes:
    """Return the head of a message."""
    code = _CODES[type(message)]
    return _HEADS[code].pack(MAGIC, code, *message)


def unpack(head: bytes | memoryview) -> Message:
    """Parse the head of a message. No field is negative. Raises MalformedMessageError."""
    message, end = unpack_at(head, 0)
    if end != len(head):
        raise MalformedMessageError(f"a head of {len(head)} bytes for {type(message).__name__}")
    return message


def unpack_at(data: bytes | memoryview, at: int) -> tuple[Message, int]:
    """Parse the head that begins at a byte, and return it with its end. Raises MalformedMessageError."""
    try:
        code = data[at + 3]
        head = _HEADS[code]
        magic, _, *values = head.unpack_from(data, at)
    except (IndexError, struct.error):
        raise MalformedMessageError(f"a head of {len(data) - at} bytes") from None
    # Numbers, sessions and generations count up from 0, so that receivers need to check upper bounds only.
    if magic != MAGIC or (values and min(values) < 0):
        raise MalformedMessageError(f"a head {bytes(data[at : at + head.size]).hex()}")
    return KINDS[code]._make(values), at + head.size


def unpack_frames(frames: Sequence[B]) -> tuple[Message, tuple[B, ...]]:
    """Parse the frames of a message, its head and then its bodies. Raises MalformedMessageError.

    A message has one body, which may be empty, or two."""
    if len(frames) < 2:
        raise MalformedMessageError(f"{len(frames)} frames")
    message = unpack(frames[0])
    if len(frames) != (3 if isinstance(message, TWO_BODIES) else 2):
        raise MalformedMessageError(f"{len(frames)} frames of {type(message).__name__}")
    return message, tuple(frames[1:])
