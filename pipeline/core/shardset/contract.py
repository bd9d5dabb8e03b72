"""The fields of a manifest, and their JSON. No I/O.

One function reads a manifest, ``Manifest.from_json``, and one writes it, ``to_json``. Keys that a version does not know are
ignored, in the manifest and in each of its parts; a set to which it appends loses them. A field whose key an older
version did not write gets its default; ``Manifest.absent`` names such keys of the manifest itself."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeGuard, TypeVar, get_type_hints

from pipeline.core.json_values import fits
from pipeline.core.shardset.layout import KeptColumn

T = TypeVar("T")
FORMAT_VERSION = 1
FINGERPRINT = re.compile(r"\d+-[0-9a-f]{16}")
MOST_TEXT = 1024  # characters of a path or a name, so that a message that quotes it stays one readable line
OPTIONAL = {"optional": True}  # metadata of fields that are written only if they have a value


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file of a set.

    Attributes:
        path: relative to OUTPUT.
        rows: includes copies.
        bytes: size of the file.
        sha256: digest of the file's bytes.
    """

    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Input:
    """The rows that a set was made of.

    Attributes:
        uri: folder, file or pattern.
        format: such as ``parquet``.
        files: number of files.
        bytes: total size of the files.
        rows: rows of all files.
        fingerprint: ``rows-hash`` of the content, independent of order and files; None if it was not computed.
        listing: digest of the names, sizes and times of the files.
        attributes: sum of the hashes of the kept columns, in hexadecimal; None without such columns.
        quarantined: broken records that were left out.
        id_column: column that gave the order of a table's rows; None if the rows are no table's, and in sets of older
            versions.
    """

    uri: str = ""
    format: str = ""
    files: int = 0
    bytes: int = 0
    rows: int = 0
    fingerprint: str | None = None
    listing: str = ""
    attributes: str | None = field(default=None, metadata=OPTIONAL)
    quarantined: int = field(default=0, metadata=OPTIONAL)
    id_column: str | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True)
class Image:
    """The images of a set.

    Attributes:
        shape: channels, height, width.
        dtype: type of a value, ``uint8`` or ``float32``.
        layout: order of the axes.
        mean: mean of each channel over all rows.
    """

    shape: list[int]
    dtype: str
    layout: str
    mean: list[float]

    @property
    def chw(self) -> tuple[int, int, int]:
        """Channels, height and width. Raises ValueError for a shape of another number of sides."""
        channels, height, width = self.shape
        return channels, height, width


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of a set.

    Attributes:
        columns: the columns beside the image: ``label``, ``coarse_label``, ``target``.
        num_classes: number of classes of ``label``.
        class_names: name of each class, by its number; empty if they are unknown.
    """

    columns: list[str] = field(default_factory=lambda: ["label"])
    num_classes: int
    class_names: list[str] = field(default_factory=list, metadata=OPTIONAL)


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The shard of a worker.

    Attributes:
        index: number of the worker.
        rows: rows of the shard, copies included.
        copies: copies among them.
        files: in the order of ids; empty in an assignment without shards.
        label_histogram: rows by class.
        neighbourhood_histogram: rows by neighbourhood; None if there are none or too many to list.
    """

    index: int = 0
    rows: int = 0
    copies: int = 0
    files: list[ShardFile]
    label_histogram: list[int] = field(default_factory=list)
    neighbourhood_histogram: list[int] | None = field(default=None, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class Neighbourhood:
    """A group of similar rows. size: number of rows; sparse: whether its rows are copied to every worker."""

    size: int
    sparse: bool


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The evaluation rows of a set: their number, files in the order of ids, rows by class, and origin."""

    rows: int = 0
    files: list[ShardFile]
    label_histogram: list[int] = field(default_factory=list)
    input: Input = field(default_factory=Input)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The table of the worker of every row: its number of rows, copies included, and its files in the order of ids."""

    rows: int = 0
    files: list[ShardFile]


@dataclass(frozen=True)
class Repeats:
    """Rows whose images equal the images of other rows, byte for byte.

    Attributes:
        rows: training rows with the image of an earlier training row.
        evaluation: evaluation rows with the image of a training row.
        examples: the first of these training rows, each as [id of the earlier row, its own id].
        evaluation_examples: the first of these evaluation rows, each as [id of the training row, its own id].
    """

    rows: int = 0
    evaluation: int = 0
    examples: list[list[int]] = field(default_factory=list)
    evaluation_examples: list[list[int]] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """Return a clause about the training rows and one about the evaluation rows, without those that have none."""
        lines = []
        if self.rows:
            example = "".join(f", such as {other} (row {first})" for first, other in self.examples[:1])
            lines.append(f"rows with the image of an earlier row: {self.rows:,}{example}")
        if self.evaluation:
            example = "".join(f", such as {other} (row {first})" for first, other in self.evaluation_examples[:1])
            lines.append(f"evaluation rows with the image of a training row: {self.evaluation:,}{example}")
        return lines


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The state of the stream that makes a growing set.

    Attributes:
        state_bytes: size of the counters of its buckets.
        window_first: id of the first row of the open window.
        query: id that the checkpoint gave the stream.
        newest_ms: time of the newest record, in ms since 1970.
    """

    state_bytes: int = 0
    window_first: int = 0
    query: str = ""
    newest_ms: int = 0


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A generation of a growing set.

    Attributes:
        rows: rows of this generation, without copies.
        copies: copies of this generation's rows.
        total: rows up to and including this generation.
        fingerprint: fingerprint of the ``total`` rows.
        mean: mean of each channel over the ``total`` rows.
        buckets: number of buckets up to and including this generation.
        closes: whether a window ends with this generation.
        batch: number of the batch in the source.
        source: digest of the batch's origin.
        quarantined: records that were put aside.
        seconds: from the start of the batch to its commit.
        version: version of the manifest that added it, 0 before its commit.
    """

    rows: int
    copies: int
    total: int
    fingerprint: str
    mean: list[float]
    buckets: int = 0
    closes: bool = False
    batch: int
    source: str
    quarantined: int = 0
    seconds: float = 0.0
    version: int


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
        if not isinstance(values.get("workers"), list) or not _is_count(values.get("num_workers")):
            raise ValueError("num_workers or workers is missing")
        manifest = _part(cls, values, "", _READERS)
        if not 1 <= manifest.num_workers == len(manifest.workers):
            raise ValueError(f"num_workers is {manifest.num_workers}, with {len(manifest.workers)} workers")
        print_ = manifest.input.fingerprint
        if print_ is not None and not FINGERPRINT.fullmatch(print_):
            raise ValueError(f"input.fingerprint is {print_[:80]!r}")
        return replace(manifest, absent=frozenset(_key(item) for item in fields(cls)) - values.keys() - {""})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the manifest."""
        values: dict[str, Any] = {"format_version": FORMAT_VERSION, **_plain(self)}
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


def _key(item: Any) -> str:
    """Return the JSON key of a dataclass's field, "" for one that is not written."""
    return str(item.metadata.get("key", item.name))


@cache
def _fields(kind: Any) -> list[tuple[str, str, Any, bool]]:
    """Return (name, key, type, whether it is required) of each field of a part."""
    hints = get_type_hints(kind)
    return [
        (item.name, _key(item), hints[item.name], item.default is MISSING and item.default_factory is MISSING)
        for item in fields(kind)
        if _key(item)
    ]


Reader = Callable[[Any, str], Any]  # (value, its place in the manifest) to the value of a field


def _part(kind: Callable[..., T], values: object, place: str, readers: dict[str, Reader]) -> T:
    """Return a part of a manifest. Raises ValueError with the first key that is missing or of another type.

    Args:
        kind: its dataclass.
        values: its JSON object.
        place: its key, "" for the manifest itself.
        readers: reader of each key whose value is a part itself.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{place} has no list of files" if "files" in readers else f"{place} is {str(values)[:80]!r}")
    dot = "." if place else ""
    arguments: dict[str, Any] = {}
    for name, key, hint, required in _fields(kind):
        if key not in values and (key != "files" or key not in readers):
            if required:
                raise ValueError(f"{place}: it lacks {key!r}" if place else f"it lacks {key!r}")
            continue
        value = values.get(key)
        # The URI of an input and the name of its column are as long as their user made them.
        too_long = key not in ("uri", "id_column") and isinstance(value, str) and len(value) > MOST_TEXT
        if key in readers:
            value = readers[key](value, f"{place}{dot}{key}")
        elif too_long or not fits(value, hint):
            raise ValueError(f"{place}{dot}{key} is {str(value)[:80]!r}")
        arguments[name] = value
    return kind(**arguments)


def _reader(kind: type, readers: dict[str, Reader] | None = None, *, none: bool = False) -> Reader:
    """Return the reader of a part. none: whether null is a valid value, which means that there is no part."""
    return lambda value, place: None if none and value is None else _part(kind, value, place, readers or {})


def _readers_of(read: Reader, *, none: bool = False) -> Reader:
    """Return the reader of a list of parts. Its items have the place of the list in error messages.

    read: the reader of an item. none: return None for a null instead of raising."""

    def read_all(values: Any, place: str) -> Any:
        if values is None and none:
            return None
        if not isinstance(values, list):
            raise ValueError(f"{place} is {str(values)[:80]!r}")
        return [read(value, place) for value in values]

    return read_all


def _workers(values: list[Any], _: str) -> list[Worker]:
    return [_part(Worker, value, f"workers[{index}]", _WITH_FILES) for index, value in enumerate(values)]


def _file_entries(values: object, place: str) -> list[dict[str, Any]]:
    """Return the entries of a list of files, whose paths are checked.

    Readers and writers join paths to their own folders, so paths that lead out of the set's folder are refused."""
    if not isinstance(values, list) or not all(isinstance(file, dict) for file in values):
        raise ValueError(f"{place} has no list of files")
    for file in values:
        path = file.get("path")
        if not isinstance(path, str) or not _stays_inside(path):
            raise ValueError(f"{place} lists the path {str(path)[:80]!r}, which is not one inside the set's folder")
    return values


def _files(values: object, place: str) -> list[ShardFile]:
    """Return the files of a list of files. Raises ValueError for one without rows, bytes or sha256, or with impossible
    rows."""
    place = place.removesuffix(".files")
    files = []
    for file in _file_entries(values, place):
        path = file["path"]
        rows = file.get("rows")
        size = file.get("bytes")
        sha256 = file.get("sha256")
        if not (_is_count(rows) and _is_count(size) and isinstance(sha256, str) and sha256):
            raise ValueError(f"{place} lists {path} without its rows, bytes and sha256")
        # Rows of a shard are not compressed, and readers allocate memory for the listed number before they read.
        if place != "assignment" and rows > size:
            raise ValueError(f"{place} lists {path} with {rows} rows in {size} bytes")
        files.append(ShardFile(path, rows, size, sha256))
    return files


def _columns(values: Any, place: str) -> list[KeptColumn]:
    read = _readers_of(_reader(KeptColumn), none=True)
    return read(values, place) or []


def _model(values: object, place: str) -> list[str] | None:
    """Return the paths of a model's files from {"files": [...]}, or None for null. Raises ValueError for other
    paths."""
    if values is None:
        return None
    paths = [file["path"] for file in _file_entries(values.get("files") if isinstance(values, dict) else None, place)]
    if wrong := next((path for path in paths if path.count("/") < 2), None):
        raise ValueError(f"model lists the path {wrong!r}, which is not _model/VERSION/NAME")
    return paths


def _generations(values: Any, place: str) -> list[Generation]:
    read = _readers_of(_reader(Generation), none=True)
    return read(values, place) or []


_WITH_FILES: dict[str, Reader] = {"files": _files}
_READERS: dict[str, Reader] = {
    "input": _reader(Input),
    "image": _reader(Image),
    "labels": _reader(Labels),
    "columns": _columns,
    "workers": _workers,
    "neighbourhoods": _readers_of(_reader(Neighbourhood), none=True),
    "eval": _reader(Evaluation, _WITH_FILES | {"input": _reader(Input)}, none=True),
    "repeats": _reader(Repeats),
    "model": _model,
    "assignment": _reader(Assignment, _WITH_FILES, none=True),
    "stream": _reader(Stream),
    "generations": _generations,
}


def _is_count(value: object) -> TypeGuard[int]:
    return fits(value, int) and isinstance(value, int) and value >= 0


def _stays_inside(path: str) -> bool:
    """True if a path is relative, cannot leave its folder and is no longer than a store's."""
    return (
        len(path) <= MOST_TEXT
        and all(part not in ("", ".", "..") for part in path.split("/"))
        and not set(path) & set("\\\0\n:*?")
    )


def _plain(value: Any) -> Any:
    """Return the JSON value of a part or of a list of parts."""
    if isinstance(value, list):
        return [_plain(item) for item in value] if value and is_dataclass(value[0]) else value
    if not is_dataclass(value):
        return value
    plain_values = {}
    for item in fields(value):
        field_value = getattr(value, item.name)
        if _key(item) and (field_value or not item.metadata.get("optional")):
            plain_values[_key(item)] = _plain(field_value)
    return plain_values
