"""Shards as the trainer reads them: made by the pipeline, held against the input; broken in every way; HDFS failing."""

from __future__ import annotations

import hashlib
import json
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.layout import Layout
from pipeline.core.shardset.schema import record_schema
from pipeline.input.dataset import Block
from pipeline.input.formats import Columns
from pipeline.input.read_options import ReadOptions
from pipeline.input.records import record_batch
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.strategies.distribution_aware import DistributionAware
from tests.conftest import make_rows, write_binary
from tests.support.virtual_runs import final, virtual
from trainer import Result, load
from trainer.data.loading import load_eval, load_worker
from trainer.data.mean_image import subtracted_mean
from trainer.data.neighbourhoods import neighbourhoods_of_images, read_model
from trainer.data.opening import open_shards

SHAPE = (3, 4, 4)
PIXELS = 48
WORKERS = 2
ROWS = 8200  # enough for two files a worker
ISOLATED = (17, 400, 8100)  # images like no other: a neighbourhood so small that every worker gets a copy


@dataclass(frozen=True)
class Made:
    """A committed set and the input it was made of."""

    folder: Path
    labels: np.ndarray
    images: np.ndarray
    eval_labels: np.ndarray
    eval_images: np.ndarray


@pytest.fixture(scope="module")
def made(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("trainer")
    labels, images = make_rows(ROWS, seed=5, pixels=PIXELS)
    rng = np.random.default_rng(5)
    for row in ISOLATED:
        images[row] = rng.integers(0, 2, PIXELS) * 255
    eval_labels, eval_images = make_rows(90, seed=6, pixels=PIXELS)
    write_binary(root / "train", labels, images)
    write_binary(root / "test", eval_labels, eval_images)
    request = Request(
        input=str(root / "train"),
        eval_input=str(root / "test"),
        output=str(root / "shards"),
        num_workers=WORKERS,
        read_options=ReadOptions("cifar10-binary", SHAPE),
    )
    strategy = DistributionAware(clusters=40, components=20.0, whiten=True)
    shard(spark.sparkContext, request, strategy, PhaseLog(quiet=True))
    return Made(root / "shards", labels, images, eval_labels, eval_images)


@pytest.fixture
def broken(made: Made, tmp_path: Path) -> Path:
    """A copy of the set, to be damaged."""
    return Path(shutil.copytree(made.folder, tmp_path / "broken"))


def manifest_of(folder: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return manifest


def change(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    manifest = manifest_of(folder)
    edit(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def first_file(folder: Path) -> Path:
    return folder / str(manifest_of(folder)["workers"][0]["files"][0]["path"])


def write_shard(path: Path, shape: tuple[int, int, int], labels: list[int], pixels: int) -> dict[str, Any]:
    """A shard file of black images, and what a manifest says of it."""
    rows = len(labels)
    columns = Columns(np.array(labels, np.int32), np.zeros((rows, pixels), np.uint8), None, None)
    schema = record_schema(Layout(shape), neighbourhood=False, copy=False)
    batch = record_batch(schema, Block(np.arange(rows), columns))
    pq.write_table(pa.Table.from_batches([batch]), path, compression="none", use_dictionary=False)
    data = path.read_bytes()
    return {"rows": rows, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_every_worker_loads_its_own_rows_and_its_copies(made: Made) -> None:
    """Every worker loads the rows of the input that are its own and its copies."""
    shards = open_shards(str(made.folder))
    seen = []
    for worker in range(WORKERS):
        assert len(shards.worker_files(worker)) == 2
        rows = load_worker(shards, worker)
        assert [part.dtype.name for part in (rows.images_NCHW, rows.labels, rows.ids)] == ["uint8", "int64", "int64"]
        assert np.array_equal(rows.labels, made.labels[rows.ids])
        assert np.array_equal(rows.images_NCHW, made.images[rows.ids].reshape(-1, *SHAPE))
        assert len(rows) == shards.worker_rows(worker) == shards.manifest.workers[worker].rows
        seen.append(rows.ids)
    times = np.bincount(np.concatenate(seen), minlength=ROWS)
    assert (len(times), times.min()) == (ROWS, 1)
    assert times.sum() == ROWS + shards.manifest.copies > ROWS


def test_evaluation_rows_have_the_order_of_their_input(made: Made, broken: Path) -> None:
    """The evaluation rows are those of the evaluation input in its order."""
    rows = load_eval(open_shards(str(made.folder)))
    assert rows is not None
    assert np.array_equal(rows.labels, made.eval_labels)
    assert np.array_equal(rows.images_NCHW, made.eval_images.reshape(-1, *SHAPE))
    change(broken, lambda manifest: manifest.update(eval=None))
    assert load_eval(open_shards(str(broken))) is None


def test_a_set_has_shape_classes_and_channel_means(made: Made) -> None:
    """A set knows its shape its classes and the mean of each channel."""
    shards = open_shards(str(made.folder))
    assert (shards.shape, shards.num_classes, shards.rows, shards.num_workers) == (SHAPE, 10, ROWS, WORKERS)
    assert subtracted_mean(shards).dtype == np.float32
    np.testing.assert_allclose(subtracted_mean(shards), made.images.reshape(-1, *SHAPE).mean((0, 2, 3)), atol=1e-4)


def test_neighbourhoods_are_those_that_the_pipeline_assigned(made: Made) -> None:
    """The training rows, read as if they were evaluation rows, get the numbers of their column."""
    shards = open_shards(str(made.folder))
    for worker in range(WORKERS):
        rows = load_worker(shards, worker)
        found = neighbourhoods_of_images(shards, rows.images_NCHW)
        assert found is not None
        assert found.count == len(manifest_of(made.folder)["neighbourhoods"])
        assert len(set(rows.neighbourhoods.tolist())) > 10
        assert np.array_equal(found.numbers, rows.neighbourhoods), "integers leave nothing to rounding"


def test_the_final_model_is_measured_by_neighbourhood(made: Made, tmp_path: Path) -> None:
    values: dict[str, Any] = {"model": "perceptron", "steps": 2, "batch_size": 20, "threads": 1}
    result = virtual(tmp_path, shards=made.folder, compute="real", workers=WORKERS, **values)
    rows, accuracy = result.neighbourhood_rows, result.neighbourhood_accuracy
    assert rows is not None
    assert accuracy is not None
    assert sum(rows) == len(made.eval_labels)
    assert [count == 0 for count in rows] == [share is None for share in accuracy]
    right = sum(count * share for count, share in zip(rows, accuracy, strict=True) if share is not None)
    assert result.final_accuracy == pytest.approx(right / len(made.eval_labels))
    assert result.weakest_neighbourhoods_accuracy is not None
    assert result.weakest_neighbourhoods_accuracy <= right / len(made.eval_labels)


def test_validation_losses_are_learned_by_neighbourhood(made: Made, tmp_path: Path) -> None:
    """The oracle is the model of a run that ends a step earlier; an epoch is 2 steps."""

    def train(steps: int) -> Result:
        values: dict[str, Any] = {
            "model": "perceptron",
            "batch_size": open_shards(str(made.folder)).rows // 2,
            "threads": 1,
            "augment": False,
        }
        values |= {"sampling": "data-aware", "weakness": "validation-loss", "sampling_groups": "neighbourhood"}
        folder = tmp_path / str(steps)
        return virtual(
            folder, shards=made.folder, compute="real", workers=WORKERS, protocol="bsp", steps=steps, **values
        )

    before, after = train(3), train(4)
    evaluated = load_eval(open_shards(str(made.folder)))
    assert evaluated is not None
    found = neighbourhoods_of_images(open_shards(str(made.folder)), evaluated.images_NCHW)
    assert found is not None
    with torch.no_grad():
        outputs = load(str(before.output))(torch.from_numpy(np.asarray(evaluated.images_NCHW)))
        losses = torch.nn.functional.cross_entropy(
            outputs, torch.from_numpy(evaluated.labels), reduction="none"
        ).numpy()
    counts = np.bincount(found.numbers, minlength=found.count)
    means = np.bincount(found.numbers, losses, minlength=found.count) / np.maximum(counts, 1)
    # A group without evaluation rows keeps its first value.
    expected = np.where(counts, means, final(before)[-found.count :])
    np.testing.assert_allclose(final(after)[-found.count :], expected, rtol=1e-4)


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m.update(model=None),
        lambda m: m.update(strategy="class_cluster"),
        lambda m: m["params"].update(embedding="v"),
        lambda m: m["image"].update(dtype="float32"),
    ],
)
def test_a_set_without_a_model_of_its_images_has_none(broken: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Nothing is read: the files of the model may be missing."""
    change(broken, edit)
    shards = open_shards(str(broken))
    shutil.rmtree(broken / "_model")
    assert read_model(shards) is None


def test_a_damaged_model_is_a_warning_of_the_run(broken: Path, tmp_path: Path) -> None:
    """The run goes on without the accuracy by neighbourhood."""
    shards = open_shards(str(broken))
    (path,) = broken.glob("_model/*/pca/arrays.npz")
    data = bytearray(path.read_bytes())
    path.unlink()
    with pytest.raises(DataError, match=f"{path} is missing"):
        read_model(shards)
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"{path} is a damaged model"):
        read_model(shards)
    values: dict[str, Any] = {"model": "perceptron", "steps": 1, "batch_size": 20, "threads": 1}
    result = virtual(tmp_path / "run", shards=broken, compute="real", workers=WORKERS, **values)
    assert result.class_accuracy is not None
    assert result.neighbourhood_accuracy is None
    messages = [getattr(event, "message", "") for event in result.events()]
    assert sum(message.startswith("accuracy is not counted by neighbourhood: ") for message in messages) == 1


def test_a_model_of_another_set_is_refused(broken: Path) -> None:
    """A row of a neighbourhood that the set lacks would have no entry in a loss table."""
    shards = open_shards(str(broken))
    (path,) = broken.glob("_model/*/kmeans/arrays.npz")
    arrays = dict(np.load(path))
    count = len(arrays["centres"])
    np.savez(path, **arrays | {"centres": np.tile(arrays["centres"], (2, 1))})
    with pytest.raises(DataError, match=f"is a damaged model: it has {2 * count} centres, and the set {count}"):
        read_model(shards)


def test_a_worker_needs_the_files_of_no_other(broken: Path) -> None:
    shards = open_shards(str(broken))
    shutil.rmtree(broken / "worker=001")
    assert len(load_worker(shards, 0)) == shards.worker_rows(0)


def test_loading_holds_the_rows_and_one_file_at_a_time(broken: Path) -> None:
    paths = [f"worker=000/part-0000{number}-large.parquet" for number in range(6)]
    files = [{"path": path, **write_shard(broken / path, (3, 32, 32), [0] * 500, 3072)} for path in paths]
    change(broken, lambda manifest: manifest["image"].update(shape=[3, 32, 32]))
    change(broken, lambda manifest: manifest["workers"][0].update(files=files))
    with pytest.raises(DataError, match=r"part-00000-large\.parquet has no column neighbourhood, as the set's"):
        load_worker(open_shards(str(broken)), 0)
    change(broken, lambda manifest: manifest.update(neighbourhoods=None))
    shards = open_shards(str(broken))
    load_worker(shards, 0)  # what is allocated once and for all
    peaks = []
    for _ in range(3):  # other threads of this process are counted too: the least is the load itself
        tracemalloc.start()
        rows = load_worker(shards, 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert min(peaks) < rows.images_NCHW.nbytes + 1.5 * files[0]["bytes"]


@pytest.mark.parametrize("index", [-1, WORKERS])
def test_a_worker_that_the_set_does_not_have_is_a_usage_error(made: Made, index: int) -> None:
    with pytest.raises(UsageError, match=rf"there is no worker {index}: .* has workers 0\.\.1"):
        load_worker(open_shards(str(made.folder)), index)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda m: m["workers"][1].update(files=[], rows=0),
            r"1 of 2 workers have no rows \(the first is 1\).*reshard",
        ),
        (lambda m: m.update(format_version=2), "format version 2; this version reads 1"),
        (
            lambda m: m["image"].update(dtype="float64"),
            "holds float64 images in CHW order; the trainer reads uint8 and float32",
        ),
        (lambda m: m["image"].update(layout="HWC"), "holds uint8 images in HWC order; the trainer reads .* in CHW"),
        (lambda m: m.pop("image"), r"manifest\.json is damaged \(it lacks 'image'\)"),
        (lambda m: m["image"].update(mean=[1.0]), r"manifest\.json is damaged"),
        (lambda m: m.update(workers=m["workers"][:1]), r"manifest\.json is damaged: num_workers is 2, with 1 workers"),
        (lambda m: m["workers"][0]["files"][0].pop("sha256"), r"manifest\.json is damaged: .*sha256"),
    ],
)
def test_a_manifest_that_cannot_be_trained_on_is_refused(
    broken: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    change(broken, edit)
    with pytest.raises(DataError, match=message) as refused:
        open_shards(str(broken))
    assert "\n" not in str(refused.value)


def test_a_missing_or_shortened_file_is_refused_at_once(broken: Path) -> None:
    """A missing or shortened file is refused before anything is read."""
    path = first_file(broken)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(DataError, match=rf"{path} has {len(data) - 1} bytes, not {len(data)}.*rerun the job"):
        open_shards(str(broken))
    path.unlink()
    with pytest.raises(DataError, match=rf"{path} is missing.*rerun the job"):
        open_shards(str(broken))


def test_a_changed_byte_is_noticed(broken: Path) -> None:
    shards = open_shards(str(broken))
    data = bytearray(first_file(broken).read_bytes())
    data[len(data) // 2] ^= 1
    first_file(broken).write_bytes(data)
    with pytest.raises(DataError, match=rf"{first_file(broken)} has sha256 .* it is damaged"):
        load_worker(shards, 0)


def test_a_set_that_is_replaced_under_the_trainer_is_named(broken: Path) -> None:
    shards = open_shards(str(broken))
    first_file(broken).unlink()
    with pytest.raises(DataError, match=rf"{first_file(broken)} no longer exists: the set was replaced"):
        load_worker(shards, 0)


@pytest.mark.parametrize(
    ("shape", "labels", "pixels", "message"),
    [
        ((3, 2, 8), [1, 2], 48, "holds 2 images of 3x2x8, not 2 of 3x4x4: sets were mixed"),
        (SHAPE, [1, 2], 47, "row 0: the image has 47 bytes, not 48"),
        (SHAPE, [1, 2, 10], 48, r"row 2: label 10 is not in 0\.\.9"),
        (SHAPE, [1, -1, 3], 48, r"row 1: label -1 is not in 0\.\.9"),
    ],
)
def test_a_file_that_breaks_the_contract_is_refused_by_row(
    broken: Path, shape: tuple[int, int, int], labels: list[int], pixels: int, message: str
) -> None:
    entry = write_shard(first_file(broken), shape, labels, pixels)
    change(broken, lambda manifest: manifest["workers"][0]["files"][0].update(entry))
    with pytest.raises(DataError, match=message) as refused:
        load_worker(open_shards(str(broken)), 0)
    assert str(first_file(broken)) in str(refused.value)


def test_a_file_with_other_rows_than_the_manifest_says_is_refused(broken: Path) -> None:
    change(broken, lambda manifest: manifest["workers"][0]["files"][0].update(rows=7))
    with pytest.raises(DataError, match="not 7 of 3x4x4"):
        load_worker(open_shards(str(broken)), 0)


def test_a_listed_file_that_is_no_parquet_is_refused(broken: Path) -> None:
    data = b"no parquet" * 900
    first_file(broken).write_bytes(data)
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    change(broken, lambda manifest: manifest["workers"][0]["files"][0].update(entry))
    with pytest.raises(DataError, match=rf"{first_file(broken)} is damaged"):
        load_worker(open_shards(str(broken)), 0)
