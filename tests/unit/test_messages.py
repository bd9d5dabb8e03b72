"""The heads of messages on the wire."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from tests.support.wire import WIRE, raw
from trainer.transport.malformed import MalformedMessageError
from trainer.transport.messages.heads import KINDS, Message, pack, unpack


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_carries_the_fields_of_its_kind_and_no_others(kind: type[Message]) -> None:
    code, fields = WIRE[kind]
    values: list[Any] = [number % 2 == 0 if field == "?" else 10 + number for number, field in enumerate(fields)]
    message = kind(*values)
    assert pack(message) == struct.pack(f"<3sB{fields}", b"PS2", code, *values)
    assert unpack(memoryview(pack(message))) == message
    for place, field in enumerate(fields):
        if field == "q":
            with pytest.raises(MalformedMessageError):
                unpack(raw(kind, *values[:place], -1))
