"""What names a topic of Kafka and its messages, which hold one raw record each. Pure."""

from __future__ import annotations

import re

from pipeline.core.errors import UsageError
from pipeline.input.formats import FORMATS
from pipeline.input.formats.cifar_binary import FixedRecords
from pipeline.stream.request import StreamRequest

TOPIC = re.compile(r"kafka://(?P<servers>[^/]+)/(?P<topic>[A-Za-z0-9._-]+)")
FORMAT = "cifar10-binary"
_LANDED = re.compile(r"partition-(\d+)\.bin")


def is_topic(uri: str) -> bool:
    return uri.startswith("kafka:")


def address(uri: str) -> tuple[str, str]:
    """Servers and topic. Raises UsageError."""
    match = TOPIC.fullmatch(uri)
    if not match:
        raise UsageError(f"--source {uri} is not kafka://HOST:PORT/TOPIC")
    return match["servers"], match["topic"]


def without_servers(uri: str) -> str:
    """What stays of a source when its servers move: a topic's name; all of a folder's."""
    return f"kafka:{address(uri)[1]}" if is_topic(uri) else uri


def record_bytes(request: StreamRequest) -> int:
    """Of a message. Raises UsageError for a format that has no records of one size."""
    kind = FORMATS[request.format or FORMAT]
    if not isinstance(kind, FixedRecords):
        raise UsageError(f"--format {kind.name}: a message holds one raw record, of cifar10-binary or cifar100-binary")
    return kind.record_bytes(request.shape)


def landed_name(partition: int) -> str:
    """Of the file in which a batch's messages of a partition are."""
    return f"partition-{partition}.bin"


def partition_of(path: str) -> str:
    """Which partition the messages of such a file are of, in words."""
    match = _LANDED.fullmatch(path.rpartition("/")[2])
    return f"partition {match[1]}" if match else path
