"""The fields of a manifest, and their JSON. No I/O.

One function reads a manifest, ``Manifest.from_json``, and one writes it, ``to_json``. Keys that a version does not know are
ignored, in the manifest and in each of its parts; a set to which it appends loses them. A field whose key an older
version did not write gets its default; ``Manifest.absent`` names such keys of the manifest itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pipeline.core.shardset.layout import KeptColumn
from pipeline.core.shardset.parts import (
    OPTIONAL,
    Assignment,
    Evaluation,
    Generation,
    Image,
    Input,
    Labels,
    Neighbourhood,
    Repeats,
    ShardFile,
    Stream,
    Worker,
)
from pipeline.core.shardset.parts_json import READERS, is_count, json_key, part_from_json, part_to_json

FORMAT_VERSION = 1
FINGERPRINT = re.compile(r"\d+-[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest. The order of the fields is the order of its keys.

    Attributes:
        strategy: name of the strategy, or ``assigned`` for rows that a table has placed.
        params: parameters that the set was made with, for readers of the report, and for the strategy when the set is
            dealt again.
        asked: the strategy's parameters as requested; ``params`` also has the parameters that the fit decided.
        seed: seed of everything random.
        num_workers: number of shards.
        ratios: shares of the workers; None: equal.
        group_by: column whose values are kept together at one worker, or None.
        rows: number of distinct rows.
        copies: number of copies beside them.
        interval: ``ds`` or ``run_id`` of a batch run, or None.
        input: origin of the rows.
        image: shape, type and means of the images.
        labels: columns and classes.
        columns: the columns of the input that the shards keep.
        chunks: the id ranges [first, end) that share a chunk number.
        workers: the shards.
        neighbourhoods: by number; None for a strategy without neighbourhoods.
        evaluation: the evaluation rows, or None. Its key is ``eval``.
        repeats: rows that repeat images; None if they were not looked for.
        model: paths of the files of fitted models, or None.
        assignment: the worker of every row; None in sets of older versions.
        assignment_only: whether the set is an assignment without shards.
        identity: digest of the configuration.
        seconds: duration of each phase, for the report.
        versions: versions of Python and libraries, for the report.
        made: time, command, host and Spark master, for the report; None in sets of older versions.
        stream: state of the stream, None for a set that does not grow.
        generations: oldest first; empty for a set that does not grow.
        version: number under which the manifest was committed, 0 before.
        generation: stamp in the names of the version's files.
        absent: keys that the file lacked.
    """

    strategy: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    num_workers: int
    ratios: list[int] | None = None
    group_by: str | None = field(default=None, metadata=OPTIONAL)
    rows: int = 0
    copies: int = 0
    interval: Mapping[str, str] | None = None
    input: Input = field(default_factory=Input)
    image: Image = field(default_factory=lambda: Image([], "", "", []))
    labels: Labels = field(default_factory=lambda: Labels(columns=[], num_classes=0))
    columns: list[KeptColumn] = field(default_factory=list, metadata=OPTIONAL)
    chunks: list[list[int]] = field(default_factory=list)
    workers: list[Worker]
    neighbourhoods: list[Neighbourhood] | None = None
    evaluation: Evaluation | None = field(default=None, metadata={"key": "eval"})
    repeats: Repeats | None = field(default=None, metadata=OPTIONAL)
    model: list[str] | None = None
    assignment: Assignment | None = None
    assignment_only: bool = False
    identity: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    made: dict[str, str] | None = field(default=None, metadata=OPTIONAL)
    stream: Stream | None = field(default=None, metadata=OPTIONAL)
    generations: list[Generation] = field(default_factory=list, metadata=OPTIONAL)
    version: int = 0
    generation: str = ""
    absent: frozenset[str] = field(default=frozenset(), repr=False, compare=False, metadata={"key": ""})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Manifest:
        """Return the manifest of a JSON object. Raises ValueError with its first fault."""
        if not isinstance(values.get("workers"), list) or not is_count(values.get("num_workers")):
            raise ValueError("num_workers or workers is missing")
        manifest = part_from_json(cls, values, "", READERS)
        if not 1 <= manifest.num_workers == len(manifest.workers):
            raise ValueError(f"num_workers is {manifest.num_workers}, with {len(manifest.workers)} workers")
        print_ = manifest.input.fingerprint
        if print_ is not None and not FINGERPRINT.fullmatch(print_):
            raise ValueError(f"input.fingerprint is {print_[:80]!r}")
        return replace(manifest, absent=frozenset(json_key(item) for item in fields(cls)) - values.keys() - {""})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the manifest."""
        values: dict[str, Any] = {"format_version": FORMAT_VERSION, **part_to_json(self)}
        return values | {"model": self.model and {"files": [{"path": path} for path in self.model]}}

    def require(self, *keys: str) -> None:
        """Raise ValueError if the file lacked one of these keys of the manifest."""
        if missing := next((key for key in keys if key in self.absent), None):
            raise ValueError(f"it lacks {missing!r}")

    def with_paths(self, place: Callable[[str], str]) -> Manifest:
        """Return the manifest with other file paths. place(path): the new path of a file, relative to OUTPUT."""

        def moved(files: list[ShardFile]) -> list[ShardFile]:
            return [replace(file, path=place(file.path)) for file in files]

        return replace(
            self,
            workers=[replace(worker, files=moved(worker.files)) for worker in self.workers],
            evaluation=self.evaluation and replace(self.evaluation, files=moved(self.evaluation.files)),
            model=self.model and [place(path) for path in self.model],
            assignment=self.assignment and replace(self.assignment, files=moved(self.assignment.files)),
        )
