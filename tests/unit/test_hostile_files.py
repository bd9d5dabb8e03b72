"""Files that somebody has damaged, or made to do harm: one line says what is wrong. One case a kind of fault."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError, JobError
from pipeline.core.json_values import build, fits, parse, parse_object
from pipeline.core.npz import check_arrays, from_bytes
from pipeline.core.shardset.attempt import is_running, whoami
from tests.campaigns.fuzz_kinds import KINDS, SHAPE
from trainer.checkpoints.read import newest, whole_states
from trainer.checkpoints.state import EvaluationMark, RunState
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards
from trainer.runlog.read import read_events, read_pushes
from trainer.simulation.profiles import PROFILES

DEEP = b"[" * 100_000
Change = Callable[[Any], Any]


def short(value: object) -> str:
    """Return the id of a case: pytest puts it into the environment, which holds no text of 100 KB."""
    return str(value)[:20]


def put(**values: Any) -> Change:
    """Set keys of a JSON object."""
    return lambda found: found | values


def inside(key: str, **values: Any) -> Change:
    """Set keys of an object inside a JSON object."""
    return lambda found: found | {key: found[key] | values}


def without(key: str) -> Change:
    return lambda found: {name: value for name, value in found.items() if name != key}


def damaged(kind: str, folder: Path, path: str, change: Change | bytes) -> None:
    """Write whole files of a kind, and one damaged: by its bytes, or by a change of its JSON."""
    KINDS[kind].make(folder)
    target = folder / path
    data = change if isinstance(change, bytes) else json.dumps(change(json.loads(target.read_bytes()))).encode()
    target.write_bytes(data)
    if path == "manifest.json":
        (folder / "_manifests/000001.json").write_bytes(data)


def refused(kind: str, folder: Path) -> str:
    """The line with which a kind's reader refuses a folder."""
    with pytest.raises(JobError) as caught:
        KINDS[kind].read(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


MANIFESTS: dict[str, tuple[Change | bytes, str]] = {
    "nested too deeply": (DEEP, "is not a shard manifest"),
    "rows as text": (put(rows="60"), "rows is '60'"),
    "rows of very many digits": (put(rows=10**30), "rows is '1000000"),
    "chunks that are no pairs": (put(chunks=[[0]]), "chunks are not ranges of ids"),
    "chunks with a gap": (put(chunks=[[0, 40], [41, 60]]), "chunks do not cover the ids from 0 to 60"),
    "fewer rows than its chunks": (put(rows=50), "chunks do not cover the ids from 0 to 50"),
    "chunks of a file elsewhere": (put(chunks=[[0, 40], [40, 50], [50, 60]]), "the set is damaged"),
    "an assignment without files": (put(assignment={"rows": 60}), "assignment has no list of files"),
    "means beyond float32": (inside("image", mean=[1.0, 2.0, 1e300]), "which float32 does not hold"),
    "a strategy of very many letters": (put(strategy="x" * 2000), "strategy is 'xxx"),
    "a layout of very many letters": (inside("image", layout="x" * 2000), "image.layout is 'xxx"),
    "a path of very many letters": (
        lambda found: found | {"eval": {"files": [found["eval"]["files"][0] | {"path": "x" * 2000}]}},
        "eval lists the path 'xxx",
    ),
    "no chunks": (without("chunks"), "it lacks 'chunks'"),
    "no workers": (put(num_workers=0, workers=[]), "num_workers is 0, with 0 workers"),
    "another number of workers": (put(num_workers=7), "num_workers is 7, with "),
    "no strategy": (without("strategy"), "it lacks strategy"),
    "a seed of another type": (put(seed="x"), "seed is 'x'"),
    "a parameter of another type": (put(asked={"start": 7}), "asked: 'start' is '7', not "),
    "a shape of two sides": (inside("image", shape=[3, 4]), "in the shape [3, 4]"),
    "a shape of terabytes": (inside("image", shape=[3, 1 << 20, 1 << 20]), "in the shape [3, 1048576, 1048576]"),
    "very many classes": (inside("labels", num_classes=1 << 31), "labels of 2147483648 classes, more than 65,536"),
    "a fingerprint that is none": (inside("input", fingerprint="60"), "input.fingerprint is '60'"),
    "a generation without rows": (put(generations=[{"version": 1}]), "generations: it lacks 'rows'"),
    "a digest that is a number": (
        lambda found: found | {"eval": {"files": [found["eval"]["files"][0] | {"sha256": 5}]}},
        "without its rows, bytes and sha256",
    ),
    "more rows than bytes": (
        lambda found: found | {"eval": {"files": [found["eval"]["files"][0] | {"rows": 10**9}]}},
        "with 1000000000 rows in",
    ),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_damaged_manifest_is_refused(case: str, tmp_path: Path) -> None:
    change, words = MANIFESTS[case]
    damaged("manifest", tmp_path, "manifest.json", change)
    assert words in refused("manifest", tmp_path)


def test_the_advice_about_a_damaged_manifest_can_be_followed(tmp_path: Path) -> None:
    """A job reads the manifest before it replaces the set, so --overwrite would end with the same line."""
    damaged("manifest", tmp_path, "manifest.json", put(rows="60"))
    assert refused("manifest", tmp_path).endswith("; restore it, or move the folder away and make the set again")


def test_shards_with_other_columns_are_refused(tmp_path: Path) -> None:
    """With sizes and digests that fit: whoever can write a shard can write a manifest."""
    KINDS["shards-sealed"].make(tmp_path)
    path = next(tmp_path.glob("worker=000/*.parquet"))
    table = pq.ParquetFile(path).read()
    table = table.set_column(0, "id", pa.array(["x"] * len(table)))
    pq.write_table(table, path, compression="none", use_dictionary=False)
    seal = KINDS["shards-sealed"].seal
    assert seal
    seal(tmp_path)
    assert "has no column id of int64" in refused("shards-sealed", tmp_path)


@pytest.mark.parametrize("change", ["nullable", "null", "no ids", "a label of text"])
def test_shards_whose_columns_others_wrote(change: str, tmp_path: Path) -> None:
    KINDS["shards-sealed"].make(tmp_path)
    whole = KINDS["shards-sealed"].read(tmp_path)
    path = next(tmp_path.glob("worker=000/*.parquet"))
    table = pq.ParquetFile(path).read()
    labels: list[Any] = table.column("label").to_pylist()
    if change == "null":
        labels[3] = None
    if change == "no ids":
        table = table.remove_column(0)
    column = pa.array(
        list(map(str, labels)) if change == "a label of text" else labels, None if "text" in change else pa.int32()
    )
    table = table.set_column(table.column_names.index("label"), "label", column)
    pq.write_table(table, path, compression="none", use_dictionary=False)
    seal = KINDS["shards-sealed"].seal
    assert seal
    seal(tmp_path)
    if change == "nullable":
        assert KINDS["shards-sealed"].read(tmp_path) == whole
        return
    assert path.name in refused("shards-sealed", tmp_path)
    with pytest.raises(DataError, match=rf"{path.name}.* it is damaged; rerun the job"):
        load_worker(open_shards(str(tmp_path)), 0)


SPARK_METADATA = (
    "[]",
    "1",
    '{"fields": 1}',
    '{"fields": [1]}',
    '{"fields": [{"name": "image", "metadata": 3}]}',
    "[" * 99_999,
)


@pytest.mark.parametrize("text", SPARK_METADATA, ids=short)
def test_spark_metadata_of_another_form_is_damage(text: str, tmp_path: Path) -> None:
    metadata = {"org.apache.spark.sql.parquet.row.metadata": text}
    table = pa.table({"image": [bytes(48)], "label": [1]}).replace_schema_metadata(metadata)
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet is damaged"):
        KINDS["parquet-raw"].read(tmp_path)


@pytest.mark.parametrize(
    "shape", ["[3]", "3", "null", '["a", 1, 1]', "[3, 1000000, 1000000]", "[0, 4, 4]", "[3.5, 4, 4]"]
)
def test_a_declared_shape_of_another_form_is_damage(shape: str, tmp_path: Path) -> None:
    field = pa.field("image", pa.binary(), metadata={"shape": shape})
    table = pa.Table.from_arrays(
        [pa.array([bytes(48)]), pa.array([1])], schema=pa.schema([field, ("label", pa.int64())])
    )
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet is damaged: a declared image shape of"):
        KINDS["parquet-raw"].read(tmp_path)


def npz(**arrays: Any) -> bytes:
    target = io.BytesIO()
    np.savez(target, **arrays)
    return target.getvalue()


def bomb() -> bytes:
    target = io.BytesIO()
    np.savez_compressed(target, keys=np.zeros(64 << 20, np.uint8))
    return target.getvalue()


def header_of_much() -> bytes:
    """An array whose header tells of a terabyte."""
    array = io.BytesIO()
    np.lib.format.write_array(array, np.zeros(100), allow_pickle=False)
    target = io.BytesIO()
    with ZipFile(target, "w") as archive:
        archive.writestr("a.npy", array.getvalue().replace(b"(100,), }" + b" " * 9, b"(100000000000,), }"))
    return target.getvalue()


def deflated() -> bytes:
    target = io.BytesIO()
    with ZipFile(target, "w", ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"x")
    return target.getvalue()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (npz(a=np.array([{}], object)), "it holds pickled objects"),
        (bomb(), "it is compressed"),
        (deflated(), "it is compressed"),
        (header_of_much(), "are no float64 array of shape"),
        (npz(a=np.arange(100))[:-30], "it is no .npz file"),
        (npz(a=np.arange(100)).replace(b"\x07\0\0\0\0\0\0\0", b"\x08\0\0\0\0\0\0\0"), "it is no .npz file: Bad CRC-32"),
        (b"", "it is no .npz file"),
    ],
    # Not the data: a zip file has the time at which it was made, and every process of the tests needs the same names.
    ids=["pickled", "a bomb", "compressed", "a huge header", "cut off", "another byte", "empty"],
)
def test_arrays_that_are_not_what_was_saved_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_bytes(data)


def test_arrays_that_numpy_2_0_wrote_are_read() -> None:
    """It stored the argument of savez as an array."""
    target = io.BytesIO(npz(bits=np.arange(3)))
    with ZipFile(target, "a") as archive, archive.open("allow_pickle.npy", "w") as file:
        np.save(file, np.array(False))
    assert from_bytes(target.getvalue()).keys() == {"bits"}


def test_arrays_are_read_as_they_were_saved() -> None:
    arrays = {
        "a": np.arange(6).reshape(2, 3),
        "b": np.array("text"),
        "c": np.asfortranarray(np.ones((2, 3))),
        "d": np.empty(0),
    }
    found = from_bytes(npz(**arrays))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
        assert found[name].flags.writeable


def test_arrays_of_other_shapes_are_told_apart() -> None:
    arrays = {"a": np.zeros((2, 3)), "b": np.zeros(3, np.int64), "c": np.array("text")}
    check_arrays(arrays, a="f8 n k", b="i8 k", c="U")
    for forms in ({"a": "f8 k n"}, {"a": "f4 n k"}, {"b": "i8"}, {"b": "i8 4"}, {"c": "f8"}):
        with pytest.raises(ValueError, match=f"{next(iter(forms))} is "):
            check_arrays(arrays, **{"b": "i8 k", "a": "f8 n k", "c": "U"} | forms)
    with pytest.raises(ValueError, match="it holds the arrays a, b, c, not a"):
        check_arrays(arrays, a="f8 n k")


MODELS = ("pca", "kmeans", "by-class", "hashes")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", ["pickled", "another shape", "lost", "text", "deep", "no parameters"])
def test_a_damaged_model_is_refused(name: str, change: str, tmp_path: Path) -> None:
    KINDS["model"].make(tmp_path)
    arrays, about = tmp_path / name / "arrays.npz", tmp_path / name / "metadata/part-00000"
    found = from_bytes(arrays.read_bytes())
    key = "weights" if "weights" in found else "centres"
    if change == "pickled":
        arrays.write_bytes(npz(**found | {key: np.array([{}], object)}))
    elif change == "another shape":
        arrays.write_bytes(npz(**found | {key: found[key][..., None]}))
    elif change == "lost":
        del found[key]
        arrays.write_bytes(npz(**found))
    else:
        texts = {"deep": DEEP, "text": b'{"uid": 3, "paramMap": {"nowhere": 1}}'}
        whole = json.loads(about.read_bytes())
        about.write_bytes(texts.get(change) or json.dumps(without("defaultParamMap")(whole)).encode())
    assert f"{tmp_path / name} is a damaged model, or of another kind" in refused("model", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"numbers": np.zeros(3, np.int64)},
        {"copied": np.full(3, 9)},
        {"keys": np.zeros(3, np.int64)},
        {"sums": np.zeros(3)},
    ],
)
def test_damaged_counters_of_a_stream_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    KINDS["stream-model"].make(tmp_path)
    path = tmp_path / "_model/v1-ab/buckets/arrays.npz"
    path.write_bytes(npz(**from_bytes(path.read_bytes()) | change))
    assert f"{path} is damaged" in refused("stream-model", tmp_path)


STATES: dict[str, Change | bytes] = {
    "very many servers": put(num_servers=10**12),
    "servers as a fraction": put(num_servers=2.0),
    "a version as text": put(version="20"),
    "clocks as a list": put(clocks=[1]),
    "a clock as text": put(clocks={"0": "x"}),
    "a key of another version": put(another=1),
    "nested too deeply": DEEP,
}


@pytest.mark.parametrize("case", STATES)
def test_a_damaged_state_is_passed_over(case: str, tmp_path: Path) -> None:
    damaged("checkpoint", tmp_path, "00000020/state.json", STATES[case])
    told: list[str] = []
    assert newest(tmp_path, verify=True, warn=told.append) == 10
    assert [state.version for state in whole_states(tmp_path)] == [10]


def test_a_damaged_mark_of_the_evaluator_is_no_mark(tmp_path: Path) -> None:
    for change in (put(final="yes"), put(generation="3"), put(accuracy="high")):
        text = json.dumps(change({"generation": 3, "final": False, "accuracy": None}))
        with pytest.raises(ValueError, match="is '"):
            EvaluationMark.from_bytes(text.encode())
        damaged("checkpoint", tmp_path, "00000020/evaluated", text.encode())
        KINDS["checkpoint"].read(tmp_path)


@pytest.mark.parametrize(
    "about",
    [
        {"values": {"dtype": "F32", "shape": [5.0], "data_offsets": [0, 20]}},
        {"values": {"dtype": "F32", "shape": [-5], "data_offsets": [0, -20]}},
        {"__metadata__": {"version": float("inf")}},
        {"__metadata__": [1]},
        {"values": 1},
    ],
)
def test_a_damaged_header_of_a_slice_is_passed_over(about: dict[str, Any], tmp_path: Path) -> None:
    KINDS["checkpoint"].make(tmp_path)
    path = next((tmp_path / "00000020").glob("slice-000*"))
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8:end]) | about).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    told: list[str] = []
    assert newest(tmp_path, verify=True, warn=told.append) == 10
    assert "is torn or no slice of a checkpoint" in told[0]


@pytest.mark.parametrize("data", [b"[[1, 1e999]]", b"[[1]]", b'[["1", 2]]', DEEP, b"{}"], ids=short)
def test_damaged_generations_are_refused(data: bytes, tmp_path: Path) -> None:
    damaged("checkpoint", tmp_path, "generations.json", data)
    assert "generations.json is damaged" in refused("checkpoint", tmp_path)


CONFIGS: dict[str, Change | bytes] = {
    "nested too deeply": DEEP,
    "a list": b"[]",
    "workers as text": inside("shards", num_workers="3"),
    "a batch size as text": lambda found: found | {"config": inside("data", batch_size="12")(found["config"])},
    "a fraction of a batch": lambda found: found | {"config": inside("data", batch_size=12.5)(found["config"])},
    "a protocol that is a list": lambda found: found | {"config": inside("protocol", name=[1])(found["config"])},
    "a bound as text": lambda found: found | {"config": inside("protocol", staleness_bound="3")(found["config"])},
    "a model that is a number": lambda found: found | {"config": found["config"] | {"model": 1}},
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_damaged_configuration_is_refused(case: str, tmp_path: Path) -> None:
    damaged("run", tmp_path, "config.json", CONFIGS[case])
    assert "config.json is damaged, or of another version" in refused("run", tmp_path)


RESULTS: dict[str, Change | bytes] = {
    "nested too deeply": DEEP,
    "cut off": b'{"protocol": ',
    "updates as text": put(updates="7"),
    "a key of another version": put(another=1),
    "no updates": without("updates"),
}


@pytest.mark.parametrize("case", RESULTS)
def test_a_damaged_result_is_refused(case: str, tmp_path: Path) -> None:
    damaged("run", tmp_path, "result.json", RESULTS[case])
    assert "result.json is damaged" in refused("run", tmp_path)


EVENTS = [
    {"event": ["train"]},
    {"event": "eval", "version": "3"},
    {"event": "eval"},
    {"event": "eval", "version": 1 << 70},
    {"event": "restart", "role": "worker"},
    {"event": "pass", "first": 0, "last": 1},
    {"event": "train", "seconds": 1.0, "version": 1, "epoch": 0.1, "loss": "low", "accuracy": 1, "workers": []},
    {"event": "start", "plan": {"num_workers": 1 << 40}},
    {"event": "start", "config": {"data": 1}},
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_of_other_types_is_left_out_of_the_log(event: dict[str, Any], tmp_path: Path) -> None:
    """As a line is that a full disk cut off."""
    KINDS["log"].make(tmp_path)
    whole = read_events(tmp_path / "metrics.jsonl")
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(json.dumps(event).encode() + b"\n" + DEEP + b"\n")
    assert read_events(tmp_path / "metrics.jsonl") == whole
    KINDS["log"].read(tmp_path)


@pytest.mark.parametrize("field", ["inf", "1e300", "-1", "1.5", '"', "nan", "9" * 40, "x"])
def test_a_push_whose_numbers_cannot_be_is_left_out(field: str, tmp_path: Path) -> None:
    KINDS["log"].make(tmp_path)
    path = tmp_path / "pushes.csv"
    whole, lines = read_pushes(path), path.read_text().splitlines()
    values = lines[5].split(",")
    values[2] = field
    path.write_text("\n".join([*lines[:6], ",".join(values), *lines[6:]]) + "\n")
    assert read_pushes(path).equals(whole)
    KINDS["log"].read(tmp_path)


def test_a_trace_of_damaged_pushes_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "pushes.csv").write_bytes(b"\0\xff\n" * 5)
    with pytest.raises(DataError, match=r"pushes\.csv has no column generation: it is damaged"):
        PROFILES["trace"](str(tmp_path)).check()


@pytest.mark.parametrize("path", ["trainer.toml", "plan.toml"])
@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "9" * 5000], ids=short)
def test_toml_beyond_what_python_parses_is_refused(path: str, value: str, tmp_path: Path) -> None:
    KINDS["settings"].make(tmp_path)
    (tmp_path / path).write_text(f"epochs = {value}\n")
    assert path in refused("settings", tmp_path)


def test_a_plan_of_a_study_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    damaged("study", tmp_path, "plan.json", DEEP)
    assert "plan.json is damaged" in refused("study", tmp_path)


def test_a_ledger_with_a_number_beyond_floats_is_refused(tmp_path: Path) -> None:
    KINDS["study"].make(tmp_path)
    path = tmp_path / "ledger.jsonl"
    path.write_text(path.read_text().replace('"wall_s":2.0', f'"wall_s":{10**400}', 1))
    assert "line 1 is no line of a ledger" in refused("study", tmp_path)


def test_a_damaged_quarantine_is_kept_and_refused(tmp_path: Path) -> None:
    """What a topic has forgotten may be in it."""
    KINDS["stream"].make(tmp_path)
    path = tmp_path / "_quarantine/batch-00000000.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    held = path.read_bytes()
    assert f"{path} is damaged" in refused("stream", tmp_path)
    assert path.read_bytes() == held


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("checkpoint/sources/0/1", 'v1\n{"path": 5, "timestamp": 1, "batchId": 1}\n'),
        ("checkpoint/sources/0/1", 'v1\n{"path": "a", "timestamp": "1", "batchId": 1}\n'),
        ("checkpoint/offsets/1", "v1\n" + "[" * 100_000),
        ("checkpoint/offsets/1", 'v1\n{"logOffset": 1000000000000}\n'),
        ("topic/offsets/1", 'v1\n{"t": {"0": 1e999}}\n'),
        ("topic/offsets/1", 'v1\n{"t": 3}\n'),
        ("_attempts/abc/beat", "[]"),
        ("_attempts/abc/beat", "[" * 100_000),
    ],
    ids=short,
)
def test_logs_of_spark_that_cannot_be_read_tell_nothing(path: str, text: str, tmp_path: Path) -> None:
    KINDS["stream"].make(tmp_path)
    (tmp_path / path).write_text(text)
    KINDS["stream"].read(tmp_path)


@pytest.mark.parametrize("pid", [1 << 80, "x", None, [1]])
def test_a_heartbeat_of_no_process_tells_nothing(pid: object) -> None:
    assert is_running(whoami() | {"pid": pid}) is None


def test_a_table_with_damaged_metadata_is_none_of_a_command(tmp_path: Path) -> None:
    KINDS["embeddings"].make(tmp_path)
    path = tmp_path / "a.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"sharding.embedding": DEEP}), path)
    assert "a.parquet exists, and is no table that this command made" in refused("embeddings", tmp_path)


def test_values_of_json_are_held_against_their_types() -> None:
    assert fits(3, int)
    assert fits(3, float)
    assert fits(None, int | None)
    assert fits({"a": [1, 2]}, dict[str, list[int]])
    assert fits([1, 2.5], tuple[float, ...])
    for value, hint in (
        (True, int),
        (1.0, int),
        (1 << 63, int),
        (float("nan"), float),
        ("1", int),
        ([1, "2"], list[int]),
        ([1, "2"], tuple[float, ...]),
        (1, tuple[float, ...]),
    ):
        assert not fits(value, hint)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse(DEEP)
    with pytest.raises(ValueError, match="it is a list, not an object"):
        parse_object(b"[]")
    for values, words in (
        ([], "it is a list"),
        ({"x": 1}, "unknown key 'x'"),
        ({"version": "1"}, "'version' is '1', not int"),
    ):
        with pytest.raises(ValueError, match=words):
            build(RunState, values)
    assert SHAPE == (3, 4, 4)
