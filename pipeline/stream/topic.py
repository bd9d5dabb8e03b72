"""Names of Kafka topics and of the files with their messages, which contain one raw record each. Pure."""

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
    """Return servers and topic. Raises UsageError for another form."""
    match = TOPIC.fullmatch(uri)
    if not match:
        raise UsageError(f"--source {uri} is not kafka://HOST:PORT/TOPIC")
    return match["servers"], match["topic"]


def drop_servers(uri: str) -> str:
    """Return the part of a source that stays when its servers move: a topic's name, or the whole folder."""
    return f"kafka:{address(uri)[1]}" if is_topic(uri) else uri


def record_bytes(request: StreamRequest) -> int:
    """Return the size of a message in bytes. Raises UsageError for a format without fixed-size records."""
    kind = FORMATS[request.read_options.format or FORMAT]
    if not isinstance(kind, FixedRecords):
        raise UsageError(f"--format {kind.name}: a message holds one raw record, of cifar10-binary or cifar100-binary")
    return kind.record_bytes(request.read_options.shape)


def landed_name(partition: int) -> str:
    """Return the name of the file with a batch's messages of one partition."""
    return f"partition-{partition}.bin"


def partition_of(path: str) -> str:
    """Return the partition of such a file, in words."""
    match = _LANDED.fullmatch(path.rpartition("/")[2])
    return f"partition {match[1]}" if match else path
