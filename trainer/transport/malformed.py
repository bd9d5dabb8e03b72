"""The error of a receiver that cannot read a message."""

from __future__ import annotations


class MalformedMessageError(ValueError):
    """A message that no peer of this version sends."""
