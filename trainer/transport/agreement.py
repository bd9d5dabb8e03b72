"""The values that all hosts of a run must have in common; their digest is part of each introduction to server 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pipeline.core.errors import UsageError
from trainer.config import Config, RunFacts
from trainer.transport.bodies.json_object import pack_json, unpack_json
from trainer.transport.malformed import MalformedMessageError

KEY = "run"
SHARDS = ("worker count", "shard digest")  # decided by --shards


@dataclass(frozen=True)
class Agreement:
    """The common values of a run's hosts.

    essentials: plain JSON values by name, in the order in which a difference is reported."""

    essentials: Mapping[str, Any]

    @classmethod
    def from_config(cls, config: Config, facts: RunFacts) -> Agreement:
        about = dict(zip(SHARDS, (facts.num_workers, facts.shards), strict=True))
        model = {"parameters of the model": facts.elements}
        # The evaluator of one host decides what the leader on another one does.
        run = config.run
        stopping = {} if run.patience is None else {"--patience": run.patience, "--min-delta": run.min_delta}
        return cls(about | config.essentials() | {"--servers": config.processes.servers} | stopping | model)

    @property
    def digest(self) -> str:
        return sha256(json.dumps(self.essentials, sort_keys=True).encode()).hexdigest()[:16]

    def introduction(self, **more: Any) -> bytes:
        """Return the body of a message that introduces a process to server 0."""
        return pack_json({KEY: self.digest} | more)

    def admits(self, introduction: Mapping[str, Any]) -> bool:
        """Return whether the host of an introduced process agrees.

        Raises MalformedMessageError if it is not an introduction."""
        digest = introduction.get(KEY)
        if not isinstance(digest, str):
            raise MalformedMessageError("no introduction")
        return digest == self.digest

    def refusal(self) -> bytes:
        """Return the body of server 0's reply to a host that does not agree."""
        return pack_json(self.essentials)

    def refused(self, refusal: bytes | memoryview) -> UsageError:
        """Return the error for server 0's refusal of this host, with the first value that differs.

        Raises MalformedMessageError."""
        leaders = unpack_json(refusal)
        own = json.loads(json.dumps(self.essentials))
        name = next((name for name in own | leaders if own.get(name) != leaders.get(name)), None)
        if name is None:
            return UsageError("the host of server 0 has another version of the trainer: give every host the same")
        remedy = "shards" if name in SHARDS else "command"
        return UsageError(
            f"{name} is {_shown(own, name)} here and {_shown(leaders, name)} on the host of server 0:"
            f" give every host the same {remedy}"
        )


def _shown(essentials: Mapping[str, Any], name: str) -> str:
    value = essentials.get(name, "not set")
    return value if isinstance(value, str) else json.dumps(value)
