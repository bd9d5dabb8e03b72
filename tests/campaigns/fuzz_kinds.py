"""The kinds of files that are damaged: how whole ones are written, and how the product reads them.

Reading returns what was read, in a form that can be compared, and asserts what its users rely on."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from pyspark.ml.util import DefaultParamsWriter
from scipy.io import savemat

from pipeline.assignment.speeds import measured_ratios
from pipeline.clustering import hashes, lloyd
from pipeline.clustering.gram import Spectrum
from pipeline.clustering.hash_model import HashModel
from pipeline.clustering.kmeans import BlockKMeansModel
from pipeline.clustering.kmeans_by_class import KMeansByClassModel
from pipeline.clustering.pca import BlockPCAModel
from pipeline.clustering.persistence import load_model, save_model
from pipeline.clustering.projection import quantise
from pipeline.core import command_line
from pipeline.core.errors import DataError
from pipeline.core.hashing import row_hashes
from pipeline.core.npz import to_bytes
from pipeline.core.shardset.attempt import is_running, seems_alive, whoami
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.damage import first_damage
from pipeline.core.shardset.generations import as_of, generations
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.manifest import ShardSet, open_committed
from pipeline.core.shardset.schema import record_schema
from pipeline.core.storage.store import Store
from pipeline.input.assignment_table import MOST_ROWS, open_table, read_lines
from pipeline.input.committed import committed_dataset
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.embedding_table import open_embeddings
from pipeline.input.quarantine import write_quarantine
from pipeline.input.scan import WORD, scan
from pipeline.input.vectors import vector_view
from pipeline.runs.reshard import (
    read_strategy,
    refuse_other_manifests,
    refuse_other_rows,
    resolved_params,
    stored_models,
)
from pipeline.spark.source import ScannedInput
from pipeline.stream.buckets import Buckets, StreamState
from pipeline.stream.checkpoint import check_checkpoint, planned_files, planned_offsets
from pipeline.stream.model import load_hashes, load_state
from tests.support.configs import make_config
from tests.support.made_up_run import eventful_run
from tests.support.made_up_study import ledger_of, make_plan, make_records
from tests.support.tfrecords import example, tfrecord
from trainer.checkpoints.generations import Generations, write_generations
from trainer.checkpoints.read import marked_states, newest, read_vector
from trainer.checkpoints.state import RunState, folder_of
from trainer.checkpoints.write import mark_evaluated, write_slice, write_state
from trainer.data.loading import load_eval, load_worker
from trainer.data.mean_image import subtracted_mean
from trainer.data.opening import open_shards
from trainer.embed.run import METADATA_KEY, table_schema
from trainer.flags import build_parser, config_of
from trainer.report import history
from trainer.report.findings import describe_incident, findings, headline, title
from trainer.report.settings import compact, flags_in_words
from trainer.run_files import CONFIG, METRICS, PUSHES, RESULT
from trainer.runlog.kinds.run import StartEvent
from trainer.runlog.kinds.training import TrainEvent
from trainer.runlog.read import read_events, read_pushes, surviving_events
from trainer.runlog.result import read_result, summarise
from trainer.runlog.run_record import RunRecord, saved_run
from trainer.simulation.replay import _read_run as read_replayed
from trainer.study.plan.cases import cell_settings, strategy_of
from trainer.study.plan.study_plan import read_plan
from trainer.study.run.folder import claim_folder, refuse_other_plan
from trainer.study.run.ledger import StudyLedger, environments
from trainer.tables.resumable import TableFile

STORE = Store()
SHAPE, SIZE, CLASSES, ROWS = (3, 4, 4), 48, 4, 60
LAYOUT = Layout(SHAPE, CLASSES)
SIDE = 4
Files = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Kind:
    """make: writes whole files into a folder; read: reads them as the product does. files: patterns of the names of those
    that are damaged, and how. is_exact: a damaged one is refused, or read as the whole one is. seal: what an attacker does
    after the damage, such as correcting checksums. may_write: below the folder."""

    make: Callable[[Path], object]
    read: Callable[[Path], Any]
    files: Files
    is_exact: bool = False
    seal: Callable[[Path], None] | None = None
    may_write: bool = False


def images_of(rows: int, seed: int = 0, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, size), dtype=np.uint8)


def labels_of(rows: int) -> np.ndarray:
    return (np.arange(rows) % CLASSES).astype(np.int32)


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


# Inputs.


def read_input(folder: Path) -> str:
    return read_rows(discover(STORE, str(folder), run=serial))


def read_rows(dataset: Dataset) -> str:
    """Scan as a job does, and read."""
    found = scan(dataset, [(0, dataset.rows)], 2, serial)
    blocks = list(dataset.read(0, dataset.rows))
    assert found.rows == sum(len(block.ids) for block in blocks) == dataset.rows
    assert all(block.images.shape == (len(block.ids), dataset.record_bytes) for block in blocks)
    return digest(*(block.images for block in blocks), *(block.labels for block in blocks))


def make_binary(folder: Path) -> None:
    for name, leading in (("data_batch_1.bin", 1), ("data_batch_2.bin", 1)):
        records = np.concatenate([labels_of(7).astype(np.uint8)[:, None]] * leading + [images_of(7, 1, 3072)], axis=1)
        (folder / name).write_bytes(records.tobytes())


def make_pickles(folder: Path) -> None:
    for protocol in (2, 4):
        batch = {b"labels": labels_of(5).tolist(), b"data": images_of(5, protocol, 3072), b"batch_label": b"x"}
        (folder / f"data_batch_{protocol}").write_bytes(pickle.dumps(batch, protocol=protocol))


def make_archives(folder: Path) -> None:
    images = images_of(30, 1, 192).reshape(30, 8, 8, 3)
    np.savez(folder / "a.npz", images=images, labels=labels_of(30))
    np.savez_compressed(folder / "b.npz", images=images[:7], labels=labels_of(7))


def image_file(pixels: np.ndarray, kind: str) -> bytes:
    target = io.BytesIO()
    Image.fromarray(pixels).save(target, kind)
    return target.getvalue()


def make_encoded(folder: Path) -> None:
    formats = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
    pixels = images_of(20, 3, 192).reshape(20, 8, 8, 3)
    values = [{"bytes": image_file(image, formats[at % 5]), "path": f"{at}.x"} for at, image in enumerate(pixels)]
    pq.write_table(pa.table({"image": values, "label": labels_of(20)}), folder / "a.parquet", row_group_size=8)


def make_tars(folder: Path) -> None:
    pixels = images_of(12, 4, 192).reshape(12, 8, 8, 3)
    modes: dict[str, Literal["w", "w:gz"]] = {"a.tar": "w", "b.tar.gz": "w:gz"}
    for name, mode in modes.items():
        with tarfile.open(folder / name, mode) as archive:
            for at, image in enumerate(pixels):
                for suffix, data in (
                    ("png", image_file(image, "PNG")),
                    ("json", json.dumps({"label": at % 4}).encode()),
                ):
                    info = tarfile.TarInfo(f"{'n' * 120 * (at == 3)}{at:03d}.{suffix}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))


def make_official(folder: Path) -> None:
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as archive:
        for name in ("data_batch_1", "test_batch"):
            data = pickle.dumps({b"data": images_of(3, 1, 3072), b"labels": [0, 1, 2]}, protocol=2)
            info = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def make_tfrecords(folder: Path) -> None:
    pixels = images_of(20, 3, 192).reshape(20, 8, 8, 3)
    rows = [example(image=image_file(image, "PNG"), label=f"class {at % 4}") for at, image in enumerate(pixels)]
    (folder / "a.tfrecord").write_bytes(tfrecord(rows))


def seal_tfrecords(folder: Path) -> None:
    """Make the checksums of all records right that still have a length."""
    path = folder / "a.tfrecord"
    data = path.read_bytes()
    records = []
    at = 0
    while at + 16 <= len(data) and (length := int.from_bytes(data[at : at + 8], "little")) <= len(data) - at - 16:
        records.append(data[at + 12 : at + 12 + length])
        at += length + 16
    path.write_bytes(tfrecord(records) + data[at:])


def make_npy(folder: Path) -> None:
    np.save(folder / "x_train.npy", images_of(30, 1, 192).reshape(30, 8, 8, 3))
    np.save(folder / "y_train.npy", labels_of(30))


def make_idx(folder: Path) -> None:
    images = b"\0\0\x08\x03" + np.array([30, 8, 8], ">u4").tobytes() + images_of(30, 1, 64).tobytes()
    labels = b"\0\0\x08\x01" + np.array([30], ">u4").tobytes() + labels_of(30).astype(np.uint8).tobytes()
    (folder / "a-images-idx3-ubyte").write_bytes(images)
    (folder / "a-labels-idx1-ubyte").write_bytes(labels)
    (folder / "b-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    (folder / "b-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


def make_mat(folder: Path) -> None:
    images = images_of(30, 1, 192).reshape(8, 8, 3, 30)
    savemat(folder / "a.mat", {"X": images, "y": labels_of(30)[:, None]})
    savemat(folder / "b.mat", {"X": images, "y": labels_of(30)[:, None]}, do_compression=True)


def make_arrow(folder: Path) -> None:
    pixels = images_of(20, 3, 192).reshape(20, 8, 8, 3)
    values = [{"bytes": image_file(image, "PNG"), "path": None} for image in pixels]
    names = pa.array([f"class {at % 4}" for at in range(20)]).dictionary_encode()
    rows = pa.table({"image": values, "label": names})
    with pa.ipc.new_file(folder / "a.arrow", rows.schema) as file:
        file.write_table(rows, max_chunksize=8)
    with pa.ipc.new_stream(folder / "b.arrow", rows.schema) as stream:
        stream.write_table(rows, max_chunksize=8)


def make_image_folder(folder: Path) -> None:
    for at, pixels in enumerate(images_of(12, 3, 192).reshape(12, 8, 8, 3)):
        path = folder / "ab"[at % 2] / f"{at}.{('png', 'jpg', 'bmp', 'webp')[at % 4]}"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels).save(path)


def make_raw(folder: Path) -> None:
    schema = record_schema(LAYOUT, neighbourhood=False, copy=False)
    columns = [np.arange(40), labels_of(40), [image.tobytes() for image in images_of(40)]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), folder / "a.parquet", row_group_size=9)


def make_dictionary(folder: Path) -> None:
    about = {"shape": json.dumps(SHAPE), "dtype": "uint8"}
    values = pa.array([image.tobytes() for image in images_of(40)], pa.binary()).dictionary_encode()
    schema = pa.schema([pa.field("image", values.type, metadata=about), pa.field("label", pa.int64())])
    table = pa.Table.from_arrays([values, pa.array(labels_of(40), pa.int64())], schema=schema)
    pq.write_table(table, folder / "a.parquet", row_group_size=9)


def make_vectors(folder: Path) -> None:
    make_raw(folder)
    table = pq.read_table(folder / "a.parquet", use_threads=False)
    vectors = np.random.default_rng(1).standard_normal((40, 5)).astype(np.float32)
    table = table.append_column("v", pa.array(list(vectors), pa.list_(pa.float32())))
    pq.write_table(table, folder / "a.parquet", row_group_size=9)


def read_vectors(folder: Path) -> str:
    return read_rows(vector_view(discover(STORE, str(folder), run=serial), "v"))


# Committed sets.

CHUNKS = ((0, 40), (40, 60))


def make_set(folder: Path) -> None:
    """Two workers, two chunks, neighbourhoods, evaluation rows, an assignment and a model."""
    images, labels, ids = images_of(ROWS), labels_of(ROWS), np.arange(ROWS)
    schema = record_schema(LAYOUT, neighbourhood=True)

    def write(path: str, rows: np.ndarray) -> dict[str, Any]:
        zeros = np.zeros(len(rows), np.int32)
        columns = [ids[rows], labels[rows], [images[row].tobytes() for row in rows], zeros, zeros]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        return write_listed(folder, path, pa.Table.from_arrays(arrays, schema=schema))

    workers = []
    for worker in range(2):
        files = [
            write(f"worker={worker:03d}/part-{chunk:05d}-v1-ab.parquet", ids[low:high][ids[low:high] % 2 == worker])
            for chunk, (low, high) in enumerate(CHUNKS)
        ]
        workers.append({"index": worker, "rows": 30, "copies": 0, "label_histogram": [8, 8, 7, 7], "files": files})
    lines = pa.table({"id": ids, "worker": ids % 2, "copy": ids * 0, "group": ids * 0})
    word = int(row_hashes(ids, labels, None, None, images).sum()) & WORD
    generation = {
        "version": 1, "batch": 0, "source": "s", "rows": ROWS, "copies": 0, "total": ROWS,
        "fingerprint": f"{ROWS}-{word:016x}", "mean": [1.0, 2.0, 3.0],
    }  # fmt: skip
    model = folder / "_model/v1-ab/m/arrays.npz"
    model.parent.mkdir(parents=True)
    model.write_bytes(to_bytes(a=np.arange(3)))
    manifest = {
        "format_version": 1, "version": 1, "generation": "v1-ab", "identity": "i", "strategy": "stratified",
        "params": {"start": "carry"}, "asked": {}, "seed": 3, "num_workers": 2, "ratios": None, "rows": ROWS, "copies": 0,
        "input": {"uri": "nowhere", "fingerprint": f"{ROWS}-{word:016x}", "listing": "l", "rows": ROWS, "id_column": "k"},
        "image": {"shape": list(SHAPE), "dtype": "uint8", "layout": "CHW", "mean": [1.0, 2.0, 3.0]},
        "labels": {"num_classes": CLASSES, "columns": ["label"]}, "chunks": [list(chunk) for chunk in CHUNKS],
        "workers": workers, "neighbourhoods": [{"size": ROWS, "sparse": False}],
        "eval": {"files": [write("_eval/part-00000-v1-ab.parquet", ids[:10])]},
        "model": {"files": [{"path": "_model/v1-ab/m/arrays.npz"}]},
        "assignment": {"rows": ROWS, "files": [write_listed(folder, "_assignment/part-00000-v1-ab.parquet", lines)]},
        "assignment_only": False, "seconds": {"scan": 0.5}, "versions": {"numpy": "2"}, "generations": [generation],
    }  # fmt: skip
    for path in ("manifest.json", "_manifests/000001.json"):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(json.dumps(manifest))


def write_listed(folder: Path, path: str, table: pa.Table) -> dict[str, Any]:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / path, compression="none", use_dictionary=False, row_group_size=10)
    data = (folder / path).read_bytes()
    return {"path": path, "rows": len(table), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def read_set(folder: Path) -> tuple[str, ...]:
    """As reshard, materialize, verify and the trainer do."""
    found = open_committed(STORE, str(folder))
    assert all(Path(folder, path).resolve().is_relative_to(folder.resolve()) for path in found.paths())
    refuse_other_manifests(found)
    read_strategy(found)
    resolved_params(found.manifest)
    assert all(".." not in name for _, name in stored_models(found))
    as_of(found, 0) if generations(found) else None
    dataset = committed_dataset(found)
    scanned = scan(dataset, [(0, dataset.rows)], 2, serial)
    refuse_other_rows(found, ScannedInput(dataset, scanned, [], [], None))
    if damage := first_damage(found, serial):
        raise DataError(damage)
    rows = read_rows(dataset)
    for path in [file.path for file in found.assignment_files()]:
        assert all(lines.shape[0] == 4 for lines in read_lines(STORE, f"{found.uri}/{path}"))
    shards = open_shards(str(folder))
    assert shards.fingerprint is None or subtracted_mean(shards).shape == shards.shape[:1]
    loaded = [load_worker(shards, worker) for worker in range(shards.num_workers)] + [load_eval(shards)]
    for part in loaded:
        assert part is None or part.images_NCHW.shape == (len(part), *shards.shape)
    return rows, *(digest(np.asarray(part.images_NCHW), part.labels, part.ids) for part in loaded if part)


def seal(folder: Path) -> None:
    """Correct sizes, digests and rows, where they can be told."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for part in (*manifest["workers"], manifest["eval"], manifest["assignment"]):
        for file in part["files"]:
            data = (folder / file["path"]).read_bytes()
            file |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            try:
                file["rows"] = pq.read_metadata(pa.BufferReader(data)).num_rows
            except (pa.ArrowException, OSError, ValueError):
                continue
    for copy in (path, folder / "_manifests/000001.json"):
        copy.write_text(json.dumps(manifest))


# Models.


@cache
def models() -> dict[str, Any]:
    draw = np.random.default_rng(4)
    components = np.linalg.qr(draw.standard_normal((SIZE, 3)))[0].T.copy()
    spectrum = Spectrum(components, np.array([9.0, 4.0, 1.0]), 20.0)
    fitted = lloyd.Fit(draw.integers(-90, 90, (5, 3)), np.arange(5, 0, -1), 123, 7)
    functions = hashes.fit(images_of(50), "lsh", 6, 1)
    keys = np.unique(functions.buckets(images_of(50)))
    return {
        "pca": BlockPCAModel(quantise(spectrum, whiten=True), spectrum, draw.standard_normal(SIZE), 50),
        "kmeans": BlockKMeansModel(fitted, 4),
        "by-class": KMeansByClassModel({0: fitted, 3: fitted}, CLASSES, 4),
        "hashes": HashModel(functions, None, keys),
    }


def make_models(folder: Path) -> None:
    context: Any = SimpleNamespace(version="4.0.0")
    for name, model in models().items():
        assert DefaultParamsWriter._get_metadata_to_save(model, context)
        save_model(model, STORE, str(folder / name), context)


def read_models(folder: Path) -> tuple[str, ...]:
    points = np.random.default_rng(1).integers(-90, 90, (9, 3)).astype(np.int32)
    pca = load_model(BlockPCAModel, STORE, str(folder / "pca"))
    kmeans = load_model(BlockKMeansModel, STORE, str(folder / "kmeans"))
    by_class = load_model(KMeansByClassModel, STORE, str(folder / "by-class"))
    functions = load_model(HashModel, STORE, str(folder / "hashes"))
    assert kmeans.trainingCost >= 0
    return (
        digest(pca.projection(images_of(9)), pca.explained_variance_ratio),
        digest(lloyd.nearest(points, kmeans.fitted.centres)[0], *kmeans.clusterCenters()),
        digest(*by_class.centres()),
        digest(functions.hashes.buckets(images_of(9)), functions.keys),
    )


def stream_set(folder: Path) -> ShardSet:
    files = [f"_model/v1-ab/{name}/arrays.npz" for name in ("hashes", "buckets")]
    return ShardSet(STORE, str(folder), Manifest(strategy="hash", num_workers=0, workers=[], model=files))


def make_stream_models(folder: Path) -> None:
    buckets = Buckets(np.array([-5, 3, 8]), np.array([2, 0, 1]), np.array([4, 1, 2]), np.array([0, 1, 2]))
    model = models()["hashes"]
    found = {"buckets": StreamState(buckets, np.arange(3)).to_bytes(), "hashes": to_bytes(**model.arrays())}
    for name, data in found.items():
        path = folder / f"_model/v1-ab/{name}/arrays.npz"
        path.parent.mkdir(parents=True)
        path.write_bytes(data)


def read_stream_models(folder: Path) -> tuple[str, ...]:
    state, functions = load_state(stream_set(folder)), load_hashes(stream_set(folder))
    grown = state.buckets.with_keys(np.array([1, 3]))
    return digest(*grown.arrays().values(), state.sums), digest(functions.buckets(images_of(9)))


# Tables.


def make_assignments(folder: Path) -> None:
    ids = np.arange(50)
    pq.write_table(pa.table({"id": ids, "worker": ids % 3}), folder / "a.parquet", row_group_size=20)
    text = "id,worker,copy\n" + "".join(f"{row},{row % 3},0\n" for row in ids)
    (folder / "b.csv").write_text(text)
    (folder / "c.csv.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def read_assignments(folder: Path) -> None:
    for path in open_table(STORE, str(folder)).files:
        for lines in read_lines(STORE, path):
            assert lines.shape[0] == 4
            assert lines[:2].size == 0 or (lines[:2].min() >= 0 and lines[0].max() <= MOST_ROWS)


def make_embeddings(folder: Path) -> None:
    vectors = np.random.default_rng(2).standard_normal((40, 6)).astype(np.float32)
    schema = table_schema(6).with_metadata({METADATA_KEY: b'{"identity": "i"}'})
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), 6)
    table = pa.Table.from_arrays([pa.array(np.arange(40)), column], schema=schema)
    pq.write_table(table, folder / "a.parquet", row_group_size=15, use_dictionary=False)
    pq.write_table(pa.table({"id": np.arange(40, 50), "embedding": list(vectors[:10])}), folder / "b.parquet")


def read_embeddings(folder: Path) -> None:
    table = open_embeddings(STORE, str(folder))
    for part in table.parts:
        for ids, vectors in table.read(part):
            assert vectors.shape == (len(ids), table.length)
            assert np.isfinite(vectors).all()
    TableFile(STORE, str(folder / "a.parquet"), "i", METADATA_KEY, overwrite=True).read_finished()


# Runs.


def make_checkpoints(folder: Path) -> None:
    for version in (10, 20):
        values = np.random.default_rng(version).standard_normal(10).astype(np.float32)
        state = RunState(
            version, 40, 1280, 3, 1.5, None, False, {0: version, 1: 2}, 1.5, 2, 7, 3, "{}", {"a": [1]}, {"b": 2}
        )
        place = folder_of(folder, version)
        for index, (low, high) in enumerate(((0, 5), (5, 10))):
            momentum = -values[low : min(high, 7)]
            write_slice(place, index, 2, version, low, high, 10, values[low:high], momentum, 3)
        write_state(place, state)
        mark_evaluated(folder, state, 0.5)
    write_generations(folder, Generations(((2, 5), (3, 7))))


def read_checkpoints(folder: Path) -> None:
    newest(folder, verify=True)
    for state, mark in marked_states(folder):
        assert mark is None or mark.accuracy is None or isinstance(mark.accuracy, int | float)
        try:
            vector = read_vector(folder, state.version)
        except DataError:
            continue
        assert vector.shape == (state.total,)


def make_run(folder: Path) -> None:
    run = eventful_run(num_workers=3, epochs=5, steps_per_epoch=8)
    run.save(folder)
    plan = run.events[0]["plan"]
    plan |= {"threads_per_worker": 1}
    run.save(folder)
    config = make_config("/s", "/o", epochs=5, protocol="ssp")
    record = RunRecord(config, 3, 240, "0123", threads=1)
    (folder / CONFIG).write_text(json.dumps(record.to_json()))
    (folder / RESULT).write_text(json.dumps(summarise(read_events(folder / METRICS), read_pushes(folder / PUSHES))))


def read_log(folder: Path) -> None:
    """As the report, the study and the ratios of machines do; without the drawing."""
    events, pushes = read_events(folder / METRICS), read_pushes(folder / PUSHES)
    summary, live = summarise(events, pushes), surviving_events(events)
    workers = max(summary["num_workers"], 1)
    pushes = pushes[pushes["worker"] < workers]  # as a report does
    happened = history.incidents(live)
    for axis in ("epoch", "seconds"):
        history.marks(happened, axis)
        for value in ("loss", "accuracy"):
            history.curves(live, axis, value)
    if trains := history.select_kind(live, TrainEvent):
        present = history.present_workers(live, workers)
        history.clock_table(trains, workers, [present[id(event)] for event in trains])
    history.throughput_table(pushes, workers)
    history.staleness_spread(pushes[pushes["accepted"] == 1], workers)
    history.worker_rows(live, pushes, workers)
    assert findings(live, summary)
    assert headline(summary)
    assert title(summary, workers)
    for incident in happened:
        describe_incident(incident)
    for start in history.select_kind(events, StartEvent):
        flags_in_words(start.config, {})
        for value in (start.plan or {}).values():
            compact(value)
    measured_ratios(str(folder), STORE)


def read_run(folder: Path) -> None:
    saved_run(folder).intact()
    result = read_result(folder)
    assert isinstance(result.num_workers, int)
    read_replayed(folder)


# Settings and studies.

TOML = """\
model = "cnn"
protocol = "ssp"
staleness_bound = 5
epochs = 3
batch_size = 120
learning_rate = 0.05
augment = false
recipe = "constant"
heartbeat_timeout_s = 12.5
"""
STUDY = """\
title = "Two ways"
seeds = 3
workers = 4
margin = 0.01
vary = ["model", "order"]
compare = "sharding"

[datasets.sample]
input = "build/sample"
eval_input = "build/sample"

[shardings.random]
strategy = "random"

[shardings.stratified]
strategy = "stratified"

[models.cnn]
model = "cnn"

[protocols.asp]
protocol = "asp"

[training]
epochs = 5
batch_size = 128

[virtual]
profile = "lognormal:0.3"
"""


def make_settings(folder: Path) -> None:
    (folder / "trainer.toml").write_text(TOML)
    (folder / "plan.toml").write_text(STUDY)


def read_settings(folder: Path) -> None:
    args = command_line.parse(
        build_parser(), ["--config", str(folder / "trainer.toml"), "--shards", "s", "--output", "o"]
    )
    config_of(args)
    plan = read_plan(folder / "plan.toml")
    for cell in plan.cells():
        cell_settings(plan, cell)
    for name in plan.shardings:
        strategy_of(plan, name)


def make_study(folder: Path) -> None:
    plan = make_plan(seeds=3)
    claim_folder(plan, folder)
    ledger_of(folder, make_records(plan, lambda run: 0.5 + run.seed / 100))


def read_study(folder: Path) -> None:
    plan = make_plan(seeds=3)
    refuse_other_plan(plan, folder)
    records = StudyLedger(folder / "ledger.jsonl").records_of_plan(plan)
    environments(records)
    assert all(0 <= (record["final_accuracy"] or 0) <= 1 for record in records)


# Streams and attempts.


def make_stream(folder: Path) -> None:
    checkpoint = folder / "checkpoint"
    files = {
        "offsets/0": 'v1\n{"batchWatermarkMs": 0}\n{"logOffset": 0}\n',
        "offsets/1": 'v1\n{"batchWatermarkMs": 0}\n{"logOffset": 1}\n',
        "commits/0": 'v1\n{"nextBatchWatermarkMs": 0}\n',
        "sources/0/0": 'v1\n{"path": "file:///in/a.bin", "timestamp": 1000, "batchId": 0}\n',
        "sources/0/1": 'v1\n{"path": "file:///in/b%20c.bin", "timestamp": 2000, "batchId": 1}\n',
    }
    topic = {
        "offsets/0": 'v1\n{}\n{"t": {"0": 9, "1": 4}}\n',
        "offsets/1": 'v1\n{}\n{"t": {"0": 12, "1": 4}}\n',
        "sources/0/0": 'v1\n{"t": {"0": 3, "1": 0}}\n',
    }
    for root, texts in ((checkpoint, files), (folder / "topic", topic)):
        for path, text in texts.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
    aside = folder / "_quarantine"
    aside.mkdir()
    lines = [
        {"source": "kafka:t", "record": 3, "records": 1, "reason": "r", "value": "eA=="},
        {"source": "a", "reason": "r"},
    ]
    (aside / "batch-00000000.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    attempt = folder / "_attempts/abc"
    attempt.mkdir(parents=True)
    (attempt / "beat").write_text(json.dumps(whoami() | {"finished": False}))


def read_stream(folder: Path) -> None:
    for batch in (0, 1):
        for file in planned_files(STORE, str(folder / "checkpoint"), batch):
            assert isinstance(file.modified_ms, int)
        for first, end in planned_offsets(STORE, str(folder / "topic"), batch).values():
            assert isinstance(first, int)
            assert isinstance(end, int)
    check_checkpoint(STORE, str(folder / "checkpoint"), None, str(folder))
    write_quarantine(STORE, str(folder / "_quarantine/batch-00000000.jsonl"), [{"source": "b", "reason": "r"}])
    assert seems_alive(STORE, str(folder), "abc") in (True, False)
    assert is_running(whoami())


BYTES, JSON, LINES = ("bytes",), ("bytes", "json", "json"), ("bytes", "lines", "lines")
PARQUET = ("bytes", "bytes", "parquet")
KINDS: dict[str, Kind] = {
    "cifar-binary": Kind(make_binary, read_input, {"*.bin": BYTES}),
    "cifar-pickle": Kind(make_pickles, read_input, {"data_batch_*": BYTES}),
    "npz": Kind(make_archives, read_input, {"*.npz": ("bytes", "npz", "npz")}),
    "npy": Kind(make_npy, read_input, {"*.npy": BYTES}),
    "idx": Kind(make_idx, read_input, {"*-ubyte": BYTES, "*.gz": BYTES}),
    "mat": Kind(make_mat, read_input, {"*.mat": BYTES}),
    "tar": Kind(make_tars, read_input, {"*.tar": BYTES, "*.gz": BYTES}),
    "cifar-archive": Kind(make_official, read_input, {"*.gz": BYTES}),
    "tfrecord": Kind(make_tfrecords, read_input, {"*.tfrecord": BYTES}),
    "tfrecord-sealed": Kind(make_tfrecords, read_input, {"*.tfrecord": BYTES}, seal=seal_tfrecords),
    "arrow": Kind(make_arrow, read_input, {"*.arrow": BYTES}),
    "image-folder": Kind(make_image_folder, read_input, {"*/*": BYTES}),
    "parquet-encoded": Kind(make_encoded, read_input, {"*.parquet": PARQUET}),
    "parquet-raw": Kind(make_raw, read_input, {"*.parquet": PARQUET}),
    "parquet-dictionary": Kind(make_dictionary, read_input, {"*.parquet": PARQUET}),
    "parquet-list": Kind(make_vectors, read_vectors, {"*.parquet": PARQUET}),
    "manifest": Kind(make_set, read_set, {"manifest.json": JSON, "_manifests/*.json": JSON}),
    "shards": Kind(make_set, read_set, {"*/part-*.parquet": PARQUET}, is_exact=True),
    "shards-sealed": Kind(make_set, read_set, {"*/part-*.parquet": PARQUET}, seal=seal),
    "model": Kind(
        make_models, read_models, {"arrays.npz": ("bytes", "npz", "npz"), "metadata/part-*": JSON}, is_exact=False
    ),
    "stream-model": Kind(make_stream_models, read_stream_models, {"arrays.npz": ("bytes", "npz", "npz")}),
    "assignment": Kind(
        make_assignments, read_assignments, {"*.parquet": PARQUET, "*.csv": ("bytes", "csv", "csv"), "*.csv.gz": BYTES}
    ),
    "embeddings": Kind(make_embeddings, read_embeddings, {"*.parquet": PARQUET}),
    "checkpoint": Kind(
        make_checkpoints,
        read_checkpoints,
        {"state.json": JSON, "evaluated": JSON, "generations.json": JSON, "*.safetensors": BYTES},
    ),
    "log": Kind(make_run, read_log, {"metrics.jsonl": LINES, "pushes.csv": ("bytes", "csv", "csv")}),
    "run": Kind(make_run, read_run, {"config.json": JSON, "result.json": JSON}),
    "settings": Kind(make_settings, read_settings, {"*.toml": ("bytes", "toml", "toml")}),
    "study": Kind(make_study, read_study, {"ledger.jsonl": LINES, "plan.json": JSON}),
    "stream": Kind(
        make_stream,
        read_stream,
        {"offsets/*": LINES, "0/*": LINES, "commits/*": LINES, "*.jsonl": LINES, "beat": JSON},
        may_write=True,
    ),
}
