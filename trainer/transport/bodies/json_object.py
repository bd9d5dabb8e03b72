"""JSON objects as bodies of messages."""

from __future__ import annotations

import json
from typing import Any

from trainer.transport.malformed import MalformedMessageError

JSON_LIMIT_BYTES = 1 << 20


def pack_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def unpack_json(data: bytes | memoryview, most_bytes: int = JSON_LIMIT_BYTES) -> dict[str, Any]:
    """Parse a JSON object of at most ``most_bytes``. Raises MalformedMessageError."""
    if len(data) > most_bytes:
        raise MalformedMessageError(f"{len(data)} bytes of JSON")
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError):
        raise MalformedMessageError("no JSON") from None
    if not isinstance(value, dict):
        raise MalformedMessageError("no JSON object")
    return value
