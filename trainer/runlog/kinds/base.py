"""The fields of every event.

Keys that this version does not know are ignored, and so are values that no reader uses: see the rule in
pipeline.core.json_values. The order of the keys in the file is the writer's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

HEAD = ("event", "time", "version", "generation")  # the keys that any event may have


@dataclass(frozen=True, kw_only=True)
class LogEvent:
    """An event of a run.

    Attributes:
        kind: its name in the file, under the key ``event``.
        time: when it was logged (seconds since 1970); virtual seconds in virtual time.
        version: the version of the parameters that it is about; None if it is about none.
        generation: the generation that it belongs to; None if it does not say so.
    """

    kind: str = field(default="", init=False)
    time: float | None = None
    version: int | None = None
    generation: int | None = None

    def version_or_zero(self) -> int:
        return self.version or 0

    def resumes_from(self) -> int | None:
        """Return the version from which the run continues, if this event makes later versions void; None otherwise."""
        return None


@dataclass(frozen=True, kw_only=True)
class OtherEvent(LogEvent):
    """An event of a kind that this version does not know. values: its other values, as in the file."""

    kind: str = field()
    values: dict[str, Any] = field(default_factory=dict)


Kind = type[LogEvent]
