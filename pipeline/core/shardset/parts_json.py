"""The parts of a manifest as JSON: every key is checked, and a fault is named with its place. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, TypeGuard, TypeVar, get_type_hints

from pipeline.core.json_values import fits
from pipeline.core.shardset.layout import KeptColumn
from pipeline.core.shardset.parts import (
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

T = TypeVar("T")
MOST_TEXT = 1024  # characters of a path or a name, so that a message that quotes it stays one readable line


def json_key(item: Any) -> str:
    """Return the JSON key of a dataclass's field, "" for one that is not written."""
    return str(item.metadata.get("key", item.name))


@cache
def _fields(kind: Any) -> list[tuple[str, str, Any, bool]]:
    """Return (name, key, type, whether it is required) of each field of a part."""
    hints = get_type_hints(kind)
    return [
        (item.name, json_key(item), hints[item.name], item.default is MISSING and item.default_factory is MISSING)
        for item in fields(kind)
        if json_key(item)
    ]


Reader = Callable[[Any, str], Any]  # (value, its place in the manifest) to the value of a field


def part_from_json(kind: Callable[..., T], values: object, place: str, readers: dict[str, Reader]) -> T:
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
    return lambda value, place: None if none and value is None else part_from_json(kind, value, place, readers or {})


def _readers_of(kind: type, *, none: bool = False) -> Reader:
    """Return the reader of a list of parts. Its items have the place of the list in error messages.

    kind: the dataclass of a part. none: return None for a null instead of an empty list."""
    read = _reader(kind)

    def read_all(values: Any, place: str) -> Any:
        if values is None:
            return None if none else []
        if not isinstance(values, list):
            raise ValueError(f"{place} is {str(values)[:80]!r}")
        return [read(value, place) for value in values]

    return read_all


def _workers(values: list[Any], _: str) -> list[Worker]:
    return [part_from_json(Worker, value, f"workers[{index}]", _WITH_FILES) for index, value in enumerate(values)]


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
        if not (is_count(rows) and is_count(size) and isinstance(sha256, str) and sha256):
            raise ValueError(f"{place} lists {path} without its rows, bytes and sha256")
        # Rows of a shard are not compressed, and readers allocate memory for the listed number before they read.
        if place != "assignment" and rows > size:
            raise ValueError(f"{place} lists {path} with {rows} rows in {size} bytes")
        files.append(ShardFile(path, rows, size, sha256))
    return files


def _model(values: object, place: str) -> list[str] | None:
    """Return the paths of a model's files from {"files": [...]}, or None for null. Raises ValueError for other
    paths."""
    if values is None:
        return None
    paths = [file["path"] for file in _file_entries(values.get("files") if isinstance(values, dict) else None, place)]
    if wrong := next((path for path in paths if path.count("/") < 2), None):
        raise ValueError(f"model lists the path {wrong!r}, which is not _model/VERSION/NAME")
    return paths


_WITH_FILES: dict[str, Reader] = {"files": _files}
READERS: dict[str, Reader] = {
    "input": _reader(Input),
    "image": _reader(Image),
    "labels": _reader(Labels),
    "columns": _readers_of(KeptColumn),
    "workers": _workers,
    "neighbourhoods": _readers_of(Neighbourhood, none=True),
    "eval": _reader(Evaluation, _WITH_FILES | {"input": _reader(Input)}, none=True),
    "repeats": _reader(Repeats),
    "model": _model,
    "assignment": _reader(Assignment, _WITH_FILES, none=True),
    "stream": _reader(Stream),
    "generations": _readers_of(Generation),
}


def is_count(value: object) -> TypeGuard[int]:
    return fits(value, int) and isinstance(value, int) and value >= 0


def _stays_inside(path: str) -> bool:
    """True if a path is relative, cannot leave its folder and is no longer than a store's."""
    return (
        len(path) <= MOST_TEXT
        and all(part not in ("", ".", "..") for part in path.split("/"))
        and not set(path) & set("\\\0\n:*?")
    )


def part_to_json(value: Any) -> Any:
    """Return the JSON value of a part or of a list of parts."""
    if isinstance(value, list):
        return [part_to_json(item) for item in value] if value and is_dataclass(value[0]) else value
    if not is_dataclass(value):
        return value
    plain_values = {}
    for item in fields(value):
        field_value = getattr(value, item.name)
        if json_key(item) and (field_value or not item.metadata.get("optional")):
            plain_values[json_key(item)] = part_to_json(field_value)
    return plain_values
