"""The facts about a run that its configuration alone does not tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.json_values import build, fits
from pipeline.core.shardset.ratios import Ratios


@dataclass(frozen=True)
class RunFacts:
    """The facts about a run that every process knows.

    Attributes:
        num_workers: workers, one per shard unless a resume has changed that.
        rows: distinct training examples.
        num_parameters: length P of the first part of the flat vector, the model's parameters.
        num_buffers: length Q of its second part, BatchNorm's running statistics.
        shards: digest of the shard set's content.
        fingerprint: sum of the hashes of the distinct rows modulo 2^64; None if the manifest has none.
        ratios: ratios of the shards, empty if they are equal.
        classifies: whether the model predicts classes, so that there is an accuracy.
        table_begin: place of the loss table in the flat vector, if each worker keeps the losses of its own rows; else 0.
        shard_rows: rows of each shard, copies included, of which such a table has an entry each; empty without one.
    """

    num_workers: int
    rows: int
    num_parameters: int
    num_buffers: int
    shards: str = ""
    fingerprint: int | None = None
    ratios: Ratios = ()
    classifies: bool = True
    table_begin: int = 0
    shard_rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratios", tuple(self.ratios))  # JSON has lists
        object.__setattr__(self, "shard_rows", tuple(self.shard_rows))

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain JSON, the fingerprint in hexadecimal: it may exceed int64."""
        fingerprint = None if self.fingerprint is None else f"{self.fingerprint:016x}"
        return asdict(self) | {
            "fingerprint": fingerprint,
            "ratios": list(self.ratios),
            "shard_rows": list(self.shard_rows),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunFacts:
        """Parse the result of ``to_json``. Raises DataError."""
        ratios = values.get("ratios", [])
        fingerprint = values.get("fingerprint")
        try:
            if not fits(ratios, list[int]) or not fits(fingerprint, str | None):
                raise ValueError("'ratios' or 'fingerprint' is of another type")
            number = None if fingerprint is None else int(fingerprint, 16)
            return replace(build(cls, {**values, "ratios": (), "fingerprint": None}), ratios=ratios, fingerprint=number)
        except ValueError as fault:
            raise DataError(
                f"the facts of the run are not read here: {fault}; install one version of the program on all hosts"
            ) from None

    @property
    def elements(self) -> int:
        """The length P + Q of the flat vector."""
        return self.num_parameters + self.num_buffers

    @property
    def own_losses(self) -> slice:
        """The range of the loss table in the flat vector, if each worker keeps the losses of its own rows; else empty."""
        return slice(self.table_begin, self.table_begin + sum(self.shard_rows))


def slice_bounds(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, total) into ``parts`` half-open ranges, whose sizes differ by at most one: bounds total*i//parts."""
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]
