"""What a job asks for, whatever the strategy, and what makes two asks the same. No Spark."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from pipeline.errors import UsageError
from pipeline.manifest import FORMAT_VERSION
from pipeline.storage import Store
from pipeline.strategies import Strategy


@dataclass(frozen=True)
class Request:
    """What a job asks for, whatever the strategy. interval: {"ds": ...} or {"run_id": ...} of a batch run, or None."""

    input: str
    output: str
    num_workers: int
    eval_input: str | None = None
    format: str | None = None
    shape: tuple[int, int, int] | None = None
    num_classes: int | None = None
    overwrite: bool = False
    allow_empty: bool = False
    interval: dict[str, str] | None = None

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise UsageError(f"--workers must be at least 1, got {self.num_workers}")


def check_output(store: Store, request: Request) -> str:
    """The resolved output, once it is clear that writing there can make sense. Raises UsageError."""
    output = store.resolve(request.output)
    for given in filter(None, (request.input, request.eval_input)):
        source = store.resolve(given)
        if output == source or source.startswith(output + "/") or output.startswith(source + "/"):
            raise UsageError(f"--output {output} and the input {source} overlap; choose a folder of its own")
    try:
        if not store.info(output).is_dir:
            raise UsageError(f"--output {output} is a file; choose a folder")
    except FileNotFoundError:
        pass
    return output


def identity(request: Request, strategy: Strategy) -> str:
    """A digest of everything but the input that decides the shards: equal runs have equal ones."""
    asked = {
        "format_version": FORMAT_VERSION,
        "strategy": strategy.name,
        "params": strategy.params(),
        "seed": strategy.seed,
        "num_workers": request.num_workers,
        "interval": request.interval,
        "shape": request.shape,
        "classes": request.num_classes,
        "eval": bool(request.eval_input),
    }
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()
