"""Damage to files of several forms, drawn from a generator: bytes, JSON, TOML, CSV, .npz and Parquet."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Rng = np.random.Generator
Mutation = Callable[[bytes, Rng], bytes]
DEPTH = 100_000  # of nested lists: far beyond what a parser's stack holds
OUTSIDE = ("../../../outside", "/outside/x", "a/../../outside", "a\0b", "_model/x/../../../outside", "C:\\outside")
EXTREMES = (0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 1e308, -1e308, 0.5, 10**30, 1 << 31, 1 << 63, "", "x" * 5000, "1", "NaN", [], {}, [[]],
    [None], {"a": {}}, [1, 2, 3], *OUTSIDE,
)  # fmt: skip
TEXTS = ("nan", "inf", "-1", "1e400", "9" * 5000, "", '"', "\0", "é", "x" * 5000, "0x10", "1.5", "2147483648")


def mutate_bytes(data: bytes, rng: Rng) -> bytes:
    """Flip bits, cut, repeat, delete, move or overwrite a part."""
    damaged = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        size = len(damaged)
        if not size:
            return bytes(damaged)
        low = int(rng.integers(size))
        high = min(size, low + int(rng.integers(1, 1 + min(size, int(rng.choice([4, 64, 1024]))))))
        match int(rng.integers(8)):
            case 0 | 1:
                damaged[low] ^= 1 << int(rng.integers(8))
            case 2:
                del damaged[low:]
            case 3:
                damaged[low:low] = damaged[low:high]
            case 4:
                del damaged[low:high]
            case 5:
                damaged[low:high] = bytes(high - low)
            case 6:
                damaged[low:high] = rng.bytes(high - low)
            case 7:
                width = int(rng.choice([4, 8]))
                number = int(rng.choice(np.array(EXTREMES, np.uint64))) % (1 << 8 * width)
                damaged[low : low + width] = number.to_bytes(width, "little")
    return bytes(damaged)


def mutate_json(data: bytes, rng: Rng) -> bytes:
    """Change a value, its type or its key, add or remove one, exchange two; or nest it deeper than any parser goes."""
    root: Any = {"root": json.loads(data)}
    deep = "\u0001deep\u0001"
    for _ in range(int(rng.integers(1, 3))):
        places = _places(root)
        holder, key = places[int(rng.integers(len(places)))]
        match int(rng.integers(9)):
            case 0 | 1 | 2:
                holder[key] = deepcopy(VALUES[int(rng.integers(len(VALUES)))])
            case 3:
                holder[key] = _retyped(holder[key], rng)
            case 4:
                if holder is not root:
                    del holder[key]
            case 5:
                other, name = places[int(rng.integers(len(places)))]
                holder[key], other[name] = other[name], holder[key]
                if _is_cyclic(root):
                    return data[: len(data) // 2]
            case 6:
                if isinstance(holder, list):
                    holder.insert(key, holder[key])
                else:
                    holder[f"{key}_"] = holder.pop(key)
                    root.setdefault("root", None)
            case 7:
                if isinstance(holder[key], dict):
                    holder[key]["an unknown key"] = 1
            case 8:
                if rng.random() < 0.2:
                    holder[key] = deep
    text = json.dumps(root["root"], allow_nan=True)
    opening, closing = [("[", "]"), ('{"a":', "}")][int(rng.integers(2))]
    nested = opening * DEPTH + "1" + closing * DEPTH
    return text.replace(json.dumps(deep), nested).replace('"NaN"', "NaN").encode()


def _places(node: Any) -> list[tuple[Any, Any]]:
    """Every value below a node, as the container that holds it and its key."""
    found = []
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        found.append((node, key))
        if isinstance(node[key], dict | list):
            found += _places(node[key])
    return found


def _retyped(value: Any, rng: Rng) -> Any:
    kinds: tuple[Any, ...] = (str(value)[:1000], [value], {"a": value}, None)
    if isinstance(value, int | float) and not isinstance(value, bool):
        kinds = (*kinds, value + 1, -value, float(value), value * 1000, str(value))
    if isinstance(value, list):
        kinds = (*kinds, value[:-1], value * 2, dict(enumerate(value)))
    return kinds[int(rng.integers(len(kinds)))]


def _is_cyclic(node: Any) -> bool:
    try:
        json.dumps(node)
    except ValueError:
        return True
    return False


def mutate_lines(data: bytes, rng: Rng) -> bytes:
    """Of lines of JSON: change one, or delete, repeat or exchange some."""
    lines = data.splitlines()
    at, other = (int(number) for number in rng.integers(len(lines), size=2))
    match int(rng.integers(5)):
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            try:
                lines[at] = mutate_json(lines[at], rng)
            except ValueError:  # a line that is no JSON, as in the logs of Spark
                lines[at] = mutate_bytes(lines[at], rng)
    return b"\n".join(lines) + b"\n"


def mutate_toml(data: bytes, rng: Rng) -> bytes:
    """Change a value or a line, or nest a list deeper than any parser goes."""
    lines = data.decode().splitlines()
    at, other = (int(number) for number in rng.integers(len(lines), size=2))
    values = (
        "true",
        "-1",
        "1e400",
        "nan",
        "9" * 5000,
        '"x"',
        '""',
        "[]",
        "[[1]]",
        "{}",
        "1979-05-27",
        "{a = 1}",
        "0.5",
    )
    match int(rng.integers(6)):
        case 0:
            del lines[at]
        case 1:
            lines[at], lines[other] = lines[other], lines[at]
        case 2:
            lines.insert(other, lines[at])
        case 3:
            lines[at] = f"{lines[at].partition('=')[0]} = {'[' * 5000}{']' * 5000}"
        case _:
            lines[at] = f"{lines[at].partition('=')[0].strip() or 'a'} = {values[int(rng.integers(len(values)))]}"
    return "\n".join(lines).encode()


def mutate_csv(data: bytes, rng: Rng) -> bytes:
    """Change, add, remove or exchange fields, or lines."""
    rows = [line.split(",") for line in data.decode().splitlines()]
    for _ in range(int(rng.integers(1, 4))):
        row = rows[int(rng.integers(len(rows)))]
        at, other = (int(number) for number in rng.integers(len(row), size=2))
        match int(rng.integers(6)):
            case 0 | 1:
                row[at] = TEXTS[int(rng.integers(len(TEXTS)))]
            case 2:
                row[at], row[other] = row[other], row[at]
            case 3:
                row.insert(at, row[other])
            case 4:
                if len(row) > 1:
                    del row[at]
            case 5:
                rows.insert(int(rng.integers(len(rows))), list(row))
    return "\n".join(",".join(row) for row in rows).encode(errors="surrogateescape")


def mutate_npz(data: bytes, rng: Rng) -> bytes:
    """Another array under a name: of another shape or type, pickled, compressed, or with a header that tells of more."""
    with np.load(io.BytesIO(data)) as found:
        arrays: dict[str, Any] = dict(found)
    name = str(rng.choice(sorted(arrays)))
    array, kind = arrays[name], int(rng.integers(10))
    match kind:
        case 0:
            del arrays[name]
        case 1:
            arrays["another"] = array
        case 2:
            arrays[name] = np.array([{"a": 1}, None], object)
        case 3:
            arrays[name] = array.reshape(-1)[: array.size // 2]
        case 4:
            arrays[name] = (
                array.astype(str(rng.choice(["S8", "f4", "c16", "?"]))) if array.dtype.kind != "U" else array[None]
            )
        case 5:
            arrays[name] = array[None]
        case 6:
            other = str(rng.choice(sorted(arrays)))
            arrays[name], arrays[other] = arrays[other], arrays[name]
        case 7:
            arrays[name] = array * -1 if array.dtype.kind in "if" else array.astype("U1")
        case 8:
            arrays[name] = np.zeros(32 << 20, np.uint8)
    target = io.BytesIO()
    (np.savez_compressed if kind == 8 else np.savez)(target, **arrays)
    if kind < 9:
        return target.getvalue()
    # A header of the same length that tells of another shape; the checksum of the member does not fit any more.
    return re.sub(rb"\((\d+),\)", lambda match: b"(" + b"9" * len(match[1]) + b",)", target.getvalue())


def mutate_parquet(data: bytes, rng: Rng) -> bytes:
    """Another column, type, null, order or metadata, written anew in some way that Parquet knows."""
    table = pq.read_table(pa.BufferReader(data), use_threads=False)
    at = int(rng.integers(table.num_columns))
    field, column = table.schema.field(at), table.column(at)
    rows = len(table)
    match int(rng.integers(9)):
        case 0:
            table = table.remove_column(at)
        case 1:
            table = table.append_column(field, column)
        case 2:
            table = table.set_column(at, field.name, _retyped_column(rows, rng))
        case 3:
            values = column.to_pylist()
            values[int(rng.integers(rows))] = None
            table = table.set_column(at, field.name, pa.array(values, column.type))
        case 4:
            table = table.take(pa.array(rng.integers(rows, size=int(rng.integers(1, 2 * rows)))))
        case 5:
            names = list(table.column_names)
            rng.shuffle(names)
            table = table.rename_columns(names)
        case 6:
            shapes = (
                "[3, 1000000, 1000000]",
                "[3]",
                "[0, 2, 2]",
                "3",
                "null",
                "[" * 5000,
                '["a", "b", "c"]',
                "[3.5, 1, 1]",
            )
            about = {
                "shape": shapes[int(rng.integers(len(shapes)))],
                "dtype": str(rng.choice(["uint8", "float32", "x"])),
            }
            table = table.set_column(at, field.with_metadata(about), column)
        case 7:
            key = "org.apache.spark.sql.parquet.row.metadata"
            texts = ("[]", "1", "{}", '{"fields": 1}', '{"fields": [1]}', '{"fields": [{}]}', "[" * 50_000, "x")
            table = table.replace_schema_metadata({key: texts[int(rng.integers(len(texts)))]})
        case 8:
            table = table.slice(0, int(rng.integers(rows)))
    target = io.BytesIO()
    pq.write_table(
        table,
        target,
        compression=str(rng.choice(["none", "snappy", "zstd", "gzip"])),
        use_dictionary=bool(rng.integers(2)),
        data_page_version=str(rng.choice(["1.0", "2.0"])),
        row_group_size=int(rng.integers(1, 50)),
        write_statistics=bool(rng.integers(2)),
    )
    return target.getvalue()


def _retyped_column(rows: int, rng: Rng) -> pa.Array:
    kinds: tuple[Callable[[], pa.Array], ...] = (
        lambda: pa.array(["text"] * rows),
        lambda: pa.array([1.5] * rows),
        lambda: pa.array([float("nan")] * rows),
        lambda: pa.array([[1, 2]] * rows),
        lambda: pa.array([[]] * rows, pa.list_(pa.int64())),
        lambda: pa.array([{"bytes": b"x", "path": None}] * rows),
        lambda: pa.array([None] * rows),
        lambda: pa.array([b"x" * 48] * rows).dictionary_encode(),
        lambda: pa.array([(1 << 63) + 5] * rows, pa.uint64()),
        lambda: pa.array([-1] * rows, pa.int64()),
        lambda: pa.array([True] * rows),
        lambda: pa.array(list(range(rows)), pa.int8()),
        lambda: pa.array([{"a": [{"b": 1}]}] * rows),
    )
    return kinds[int(rng.integers(len(kinds)))]()


FORMS: dict[str, Mutation] = {
    "bytes": mutate_bytes,
    "json": mutate_json,
    "lines": mutate_lines,
    "toml": mutate_toml,
    "csv": mutate_csv,
    "npz": mutate_npz,
    "parquet": mutate_parquet,
}
