"""The wire format of messages, written down once more: it must not change by accident."""

from __future__ import annotations

import struct

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
from trainer.transport.messages.heads import Message
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

# Code and fields of every kind, written down once more: what is on the wire must not change by accident.
WIRE: dict[type[Message], tuple[int, str]] = {
    Join: (0, "qq"),
    Push: (1, "qqqq?"),
    GiveUp: (2, "qqq"),
    Heartbeat: (3, "qq?"),
    Hello: (4, "qq"),
    JoinReceipt: (5, "qqqq"),
    GradientReceipt: (6, "qqqqq"),
    LoadReceipt: (7, "qq"),
    WriteReceipt: (8, "qqqq"),
    AskStatus: (9, ""),
    WorkerLoss: (10, "q"),
    End: (11, ""),
    StatusReply: (12, ""),
    EndReply: (13, ""),
    Refusal: (14, "q"),
    Parameters: (15, "qqqqq?"),
    Stop: (16, "qqqqq"),
    Cancel: (17, "qqq"),
    Rejoin: (18, "qqq?"),
    Load: (19, "qqq"),
    Execute: (20, "q"),
    PeerJoin: (21, "qqqqq"),
    PeerBeat: (22, "qqq"),
    RoundReport: (23, "qqqq"),
    CopyReceipt: (24, "qqqqq"),
    LinkLoss: (25, "qqq"),
    Regroup: (26, "q"),
    Replacement: (27, "q"),
    PeerView: (28, "qqq"),
    WriteCopy: (29, "qq"),
    Settlement: (30, "qq"),
    WantSnapshot: (31, "qq"),
    RunEnd: (32, "q"),
    GradientPiece: (33, "qqq?"),
    RangeSum: (34, "qqq??"),
    ModelCopy: (35, "qq"),
    ChangeStage: (36, "q"),
    StoreEntry: (37, "q"),
    NeighbourView: (38, "qq"),
    RoundGrant: (39, "qqqq"),
    NeighbourModel: (40, "qqq"),
    ReplicaCopy: (41, "qqqq"),
    GossipOffer: (42, "qqq"),
    GossipPool: (43, "qqqqqqq"),
    GossipContent: (44, "qqq"),
    PeerOffer: (45, "qqqq"),
    PoolRequest: (46, "qqqq"),
}
# Of a mini-batch of one row that is not hashed, and whose loss is not kept, without examples for others.
REPORT = struct.pack("<iidddQQiiii", 1, 1, 0.5, 0.01, 0.0, 0, 0, -1, -1, -1, 0)


def raw(kind: type[Message], *values: int, code: int | None = None, magic: bytes = b"PS2") -> bytes:
    """The head of a message, valid or not. values: of its first fields; the others are 0."""
    number, fields = WIRE[kind]
    values += (0,) * (len(fields) - len(values))
    return struct.pack(f"<3sB{fields}", magic, number if code is None else code, *values)
