"""``trainer.load`` and ``sharding predict`` beside the evaluator, plain torch, kills and wrong input."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.storage.store import Store
from pipeline.input.dataset import Dataset, discover
from tests.conftest import write_binary
from tests.support.configs import make_config
from tests.support.trainer_sets import CLASSES, EVAL_ROWS, SHAPE, rows_of, write_shards
from trainer import Options, load
from trainer.embed.__main__ import main as embed_main
from trainer.inference.__main__ import main
from trainer.inference.classifier import Classifier
from trainer.inference.options import PredictOptions
from trainer.inference.predict import METADATA_KEY, predict
from trainer.models import model_from_json
from trainer.models.devices import usual_torch
from trainer.models.linear import Logistic
from trainer.models.metadata import ModelMetadata
from trainer.models.resnet import ResNet20
from trainer.models.tasks import CLASSIFICATION
from trainer.runlog.result import Result
from trainer.simulate import SimulationSettings, simulate
from trainer.tables import resumable, rows
from trainer.tables.progress import TableProgress
from trainer.tables.resumable import TableFile

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
QUIET = Options(silent=True, report=False)
FAST: dict[str, Any] = {"image_shape": SHAPE, "threads": 1, "quiet": True, "format": "cifar10-binary"}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workers = [rows_of(30, 2), rows_of(50, 3, 100)]
    return write_shards(tmp_path_factory.mktemp("shards"), workers, EVAL_ROWS)


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    output = tmp_path_factory.mktemp("run") / "run"
    result = simulate(make_config(shards, output, epochs=1, batch_size=10), SimulationSettings(), QUIET)
    assert isinstance(result, Result)
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = np.asarray(EVAL_ROWS.images_NCHW).reshape(len(EVAL_ROWS), -1)
    folder = tmp_path_factory.mktemp("in") / "cifar"
    return write_binary(folder, EVAL_ROWS.labels.astype(np.uint8), images, files=2)


@pytest.mark.slow
def test_a_loaded_model_is_the_evaluated_one(run: Result) -> None:
    classifier = load(str(run.output))
    images = torch.from_numpy(EVAL_ROWS.images_NCHW)
    labels = torch.from_numpy(EVAL_ROWS.labels)
    with torch.no_grad():
        outputs = classifier(images)
    assert (outputs.argmax(1) == labels).float().mean().item() == pytest.approx(run.final_accuracy)
    network = ResNet20().make(SHAPE, CLASSES).eval()
    network.load_state_dict(load_file(str(run.output / "model.safetensors")), strict=False)
    mean = torch.tensor(classifier.metadata.mean)
    with torch.no_grad():
        expected = network((images.float() - mean[:, None, None]) / 255)
    torch.testing.assert_close(outputs, expected)
    by_class = [(outputs.argmax(1)[labels == c] == c).float().mean().item() for c in range(CLASSES)]
    assert run.class_accuracy == pytest.approx(by_class)
    assert np.array(run.confusion).sum() == len(EVAL_ROWS)
    assert (classifier.metadata.chw, classifier.metadata.classes, classifier.training) == (SHAPE, CLASSES, False)


@contextmanager
def set_torch(kind: str) -> Iterator[None]:
    """Set torch as a notebook may have it: by a context, or a default of the process."""
    contexts: dict[str, AbstractContextManager[object]] = {
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "no-grad": torch.no_grad(),
        "inference": torch.inference_mode(),
        "device": torch.device("meta"),
        "float64": nullcontext(),
        "nothing": nullcontext(),
    }
    torch.set_default_dtype(torch.float64 if kind == "float64" else torch.float32)
    try:
        with contexts[kind]:
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("kind", ["autocast", "no-grad", "inference", "device", "float64"])
def test_the_callers_torch_changes_no_run(kind: str, run: Result, shards: Path, tmp_path: Path) -> None:
    with set_torch(kind):
        same = simulate(make_config(shards, tmp_path / "run", epochs=1, batch_size=10), SimulationSettings(), QUIET)
        classifier = load(str(run.output))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (run.output / "model.safetensors").read_bytes()
    assert isinstance(same, Result)
    assert {(each.dtype, each.device.type) for each in classifier.parameters()} == {(torch.float32, "cpu")}
    classifier(torch.from_numpy(EVAL_ROWS.images_NCHW[:4])).sum().backward()


@pytest.mark.parametrize("kind", ["nothing", "autocast"])
def test_autocast_inside_uses_the_weights_of_each_step(kind: str) -> None:
    """Autocast keeps the weights that it has cast until the outermost of its blocks ends."""
    weights = torch.ones(4, 4, requires_grad=True)
    sums = []
    with set_torch(kind), usual_torch():
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                sums.append(torch.nn.functional.linear(torch.ones(1, 4), weights).sum().item())
            with torch.no_grad():
                weights += 1
    assert sums == [16, 32, 48]


def test_a_model_file_is_enough_to_load_a_model(run: Result, tmp_path: Path) -> None:
    shutil.copy(str(run.output / "model.safetensors"), tmp_path / "alone.safetensors")
    state = torch.random.get_rng_state()
    alone = load(tmp_path / "alone.safetensors")
    assert torch.equal(state, torch.random.get_rng_state())
    images = torch.from_numpy(EVAL_ROWS.images_NCHW)
    with torch.no_grad():
        assert torch.equal(alone(images), load(str(run.output))(images))
    assert load(str(run.output), best=True).metadata == alone.metadata


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_the_table_has_each_rows_probabilities(run: Result, source: Path, tmp_path: Path, device: Any) -> None:
    target = tmp_path / "table.parquet"
    asked = PredictOptions(run=str(run.output), output=str(target), input=str(source), device=device, **FAST)
    assert predict(asked).fresh
    table = pd.read_parquet(target)
    with torch.no_grad():
        expected = load(str(run.output))(torch.from_numpy(EVAL_ROWS.images_NCHW)).softmax(1).numpy()
    rtol, atol = (1e-5, 1e-6) if device == "cpu" else (1e-2, 1e-3)  # a GPU rounds the factors of convolutions to TF32
    np.testing.assert_allclose(np.stack(list(table["probabilities"])), expected, rtol=rtol, atol=atol)
    assert table["id"].tolist() == list(range(len(EVAL_ROWS)))
    assert table["label"].tolist() == expected.argmax(1).tolist()
    accuracy = (table["label"] == EVAL_ROWS.labels).mean()
    assert accuracy == pytest.approx(run.final_accuracy)
    data = target.read_bytes()
    assert not predict(asked).fresh
    assert target.read_bytes() == data
    about = json.loads(pq.read_schema(target).metadata[METADATA_KEY])
    assert about["model"] == load(str(run.output)).digest
    with pytest.raises(UsageError, match="another configuration or input: give --overwrite"):
        predict(replace(asked, batch_size=7))


def test_names_of_classes_are_in_the_table(run: Result, source: Path, tmp_path: Path) -> None:
    header = json.loads(whole_header(run))
    header["class_names"] = names = [f"kind {label}" for label in range(CLASSES)]
    tensors = load_file(str(run.output / "model.safetensors"))
    (tmp_path / "named").write_bytes(save(tensors, metadata={"model": json.dumps(header)}))
    predict(PredictOptions(run=str(tmp_path / "named"), output=str(tmp_path / "t"), input=str(source), **FAST))
    table = pd.read_parquet(tmp_path / "t")
    assert table["class"].tolist() == [names[label] for label in table["label"]]


@pytest.mark.parametrize(
    ("dtype", "other", "line"),
    [
        ("uint8", torch.float32, r"the model was trained on uint8 images: give uint8 of 0\.\.255"),
        ("uint8", torch.int64, "trained on uint8 images"),
        ("float32", torch.uint8, "the model was trained on float32 features: give"),
    ],
)
def test_images_of_another_type_are_refused(dtype: str, other: torch.dtype, line: str) -> None:
    about = ModelMetadata({"name": "logistic"}, [5, 1, 1], 3, [0.0] * 5, dtype=dtype)
    classifier = Classifier(Logistic().make(about.chw, 3), about, CLASSIFICATION, "")
    with pytest.raises(ValueError, match=line):
        classifier(torch.zeros(2, 5, 1, 1, dtype=other))
    right = torch.uint8 if dtype == "uint8" else torch.float32
    assert classifier(torch.zeros(2, 5, 1, 1, dtype=right)).shape == (2, 3)


def test_images_for_a_model_of_features_are_refused(run: Result, source: Path, tmp_path: Path) -> None:
    header = json.loads(whole_header(run)) | {"dtype": "float32"}
    tensors = load_file(str(run.output / "model.safetensors"))
    (tmp_path / "model").write_bytes(save(tensors, metadata={"model": json.dumps(header)}))
    with pytest.raises(UsageError, match=r"holds 3x8x8 images.*; the model takes images of 3x8x8 in float32"):
        predict(PredictOptions(run=str(tmp_path / "model"), output=str(tmp_path / "t"), input=str(source), **FAST))


@pytest.mark.parametrize(
    "changes",
    [
        {"network": {"name": "logistic", "no_such_key": 1}},
        {"network": {"name": "no_such_model"}},
        {"network": {}},
        {"network": {"name": "some:function", "no_such_key": 1}},
        {"shape": [3, 60_000, 60_000]},
        {"network": {"name": "logistic"}, "classes": 1 << 60},
    ],
)
def test_an_impossible_network_is_broken_data(run: Result, tmp_path: Path, changes: dict[str, Any]) -> None:
    header = json.loads(whole_header(run)) | changes
    tensors = load_file(str(run.output / "model.safetensors"))
    (tmp_path / "model").write_bytes(save(tensors, metadata={"model": json.dumps(header)}))
    with pytest.raises(DataError, match="model is not a model of a run, or damaged") as caught:
        load(tmp_path / "model")
    assert "\n" not in str(caught.value)


def test_a_small_file_of_a_huge_network_takes_no_memory(run: Result, tmp_path: Path) -> None:
    changes = {"network": {"name": "logistic"}, "shape": [3, 9000, 9000], "classes": 65_536}
    header = json.loads(whole_header(run)) | changes
    (tmp_path / "model").write_bytes(save({}, metadata={"model": json.dumps(header)}))
    with pytest.raises(DataError, match=r"model is of another network: 1\.weight has no counterpart"):
        load(tmp_path / "model")


def test_a_model_file_may_hold_integer_buffers_too(tmp_path: Path) -> None:
    """Runs leave BatchNorm's number of batches out; another program may have written the whole state."""
    about = ModelMetadata({"name": "resnet20"}, [3, 16, 16], 4, [120.0] * 3, dtype="uint8")
    tensors = dict(model_from_json(about.network).make((3, 16, 16), 4).state_dict())
    assert not all(value.is_floating_point() for value in tensors.values())
    (tmp_path / "model").write_bytes(save(tensors, metadata=about.to_header()))
    assert load(tmp_path / "model").network.state_dict().keys() == tensors.keys()


@pytest.mark.parametrize("uri", ["table:foo", "delta:/tables/foo", "iceberg:a.foo"])
@pytest.mark.parametrize("command", [main, embed_main])
def test_a_spark_table_is_refused_with_the_way_to_read_it(command: Any, uri: str, tmp_path: Path) -> None:
    run_of = ["run"] if command is main else []
    line = f"--input {uri} is a Spark table, .*: shard it with sharding shard, .* --shards"
    with pytest.raises(UsageError, match=line):
        command([*run_of, "--input", uri, "--output", str(tmp_path / "t")])


def whole_header(run: Result) -> str:
    with safe_open(str(run.output / "model.safetensors"), "pt") as file:
        return str(file.metadata()["model"])


@pytest.mark.parametrize(("own", "policy"), [(None, "passive"), ("active", "active")])
@pytest.mark.parametrize("command", ["predict", "embed"])
def test_threads_sleep_while_they_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, own: str | None, policy: str
) -> None:
    """Threads that spin take the cores from each other when other programs run; a user's own policy stays."""
    monkeypatch.setenv("OMP_WAIT_POLICY", own or "")
    if own is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    run = [str(tmp_path)] if command == "predict" else []
    program = main if command == "predict" else embed_main
    with pytest.raises(DataError):
        program([*run, "--input", str(tmp_path / "none"), "--output", str(tmp_path / "t"), "--device", "cpu"])
    assert os.environ["OMP_WAIT_POLICY"] == policy


def test_an_input_that_changes_while_it_is_read_is_refused(
    run: Result, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table must not mix the rows of two inputs."""
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    write_parts = TableFile.write_parts

    def write_and_change(self: TableFile, *args: Any) -> None:
        write_parts(self, *args)
        os.utime(sorted(path for path in copy.rglob("*") if path.is_file())[0], (0, 0))

    monkeypatch.setattr(TableFile, "write_parts", write_and_change)
    with pytest.raises(JobError, match="source has changed while it was read; run it again"):
        predict(PredictOptions(run=str(run.output), output=str(tmp_path / "table"), input=str(copy), **FAST))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_unchanged_input_is_not_surveyed_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some formats open each of their files for a survey. Only a folder of images must be listed by one."""
    folder = tmp_path / "images" / "cat"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "1.png")
    calls: list[str] = []

    def counted(store: Store, uri: str, **options: Any) -> Dataset:
        calls.append(uri)
        return discover(store, uri, **options)

    monkeypatch.setattr(rows, "discover", counted)
    noted = Path(shutil.copytree(folder.parent, tmp_path / "noted"))
    (noted / "notes.txt").write_text("allowed with --format image-folder")
    for path, format in ((source, "cifar10-binary"), (folder.parent, None), (noted, "image-folder")):
        options = PredictOptions(
            run="run", output=str(tmp_path / "table"), input=str(path), format=format, image_shape=SHAPE
        )
        dataset = rows.open_rows(Store(), options)
        rows.refuse_change(Store(), options, dataset, TableFile(Store(), options.output, "", b""))
    assert calls == [str(source), *[str(folder.parent)] * 2, *[str(noted)] * 2]


class Killed(Exception):
    pass


@pytest.mark.parametrize("seed", range(2))
def test_a_killed_prediction_goes_on_to_the_same_bytes(
    run: Result, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Every change of the store may be the last of a process: before it, or after it was made."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(resumable, "PART_ROWS", 7)
    whole, target = tmp_path / "whole", tmp_path / "table"
    predict(PredictOptions(run=str(run.output), output=str(whole), input=str(source), **FAST))
    changes_left = 0

    def dying(name: str) -> None:
        real = getattr(Store, name)

        def change(self: Store, *args: Any, **options: Any) -> Any:
            nonlocal changes_left
            changes_left -= 1
            if changes_left == 0 and rng.random() < 0.5:
                raise Killed
            result = real(self, *args, **options)
            if changes_left <= 0:
                raise Killed
            return result

        monkeypatch.setattr(Store, name, change)

    for name in ("replace", "rename", "delete", "sync_folder"):
        dying(name)
    kills = 0
    while True:
        changes_left = int(rng.integers(1, 5))
        try:
            predict(PredictOptions(run=str(run.output), output=str(target), input=str(source), **FAST))
            break
        except Killed:
            kills += 1
            assert kills < 100
            assert not target.exists() or target.read_bytes() == whole.read_bytes()
    assert kills > 1
    assert target.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "table"}


def test_the_slower_of_two_same_commands_leaves_no_folder(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int64())])
    spans = [(0, 2), (2, 4)]
    progress = TableProgress(quiet=True, phase="predict")
    table = TableFile(Store(), str(tmp_path / "table"), "identity", b"key")

    def rows_between(low: int, high: int) -> pa.RecordBatch:
        return pa.record_batch([range(low, high)], schema)

    def later(low: int, high: int) -> pa.RecordBatch:
        if low:  # the other command ends before the last part
            table.write_parts(spans, rows_between, progress)
            table.finish(2, schema, {})
        return rows_between(low, high)

    table.write_parts(spans, later, progress)
    table.finish(2, schema, {})
    assert [path.name for path in tmp_path.iterdir()] == ["table"]


def test_only_its_own_table_is_replaced(run: Result, source: Path, shards: Path, tmp_path: Path) -> None:
    """--overwrite is for tables that the command made, not for any other file."""
    asked = PredictOptions(run=str(run.output), output="", input=str(source), overwrite=True, **FAST)
    (tmp_path / "text").write_text("no Parquet file")
    pq.write_table(pa.table({"id": [1], "label": [2]}), tmp_path / "other")
    pq.write_table(pa.table({"id": [1]}).replace_schema_metadata({METADATA_KEY: b"[]"}), tmp_path / "damaged")
    for name in ("text", "other", "damaged"):
        data = (tmp_path / name).read_bytes()
        for overwrite in (False, True):
            with pytest.raises(
                UsageError, match=f"{name} exists, and is no table that this command made; choose another"
            ):
                predict(replace(asked, output=str(tmp_path / name), overwrite=overwrite))
        assert (tmp_path / name).read_bytes() == data
    whole = (shards / "worker=000" / "part.parquet").read_bytes()
    (tmp_path / "link").symlink_to(shards / "worker=000")
    for path in (shards / "worker=000" / "part.parquet", shards / "new", tmp_path / "link" / "new"):
        with pytest.raises(UsageError, match=f"lies in the shard set {shards}; choose another"):
            predict(replace(asked, output=str(path)))
    assert (shards / "worker=000" / "part.parquet").read_bytes() == whole
    assert {path.name for path in shards.iterdir()} == {"manifest.json", "worker=000", "worker=001", "eval"}


def test_a_wrong_model_or_input_is_one_line(
    run: Result, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"model\.safetensors does not exist: give the folder of a run that has ended"):
        load(empty)
    shutil.copy(str(run.output / "best.safetensors"), empty)
    with pytest.raises(DataError, match="the run has not ended; the best model so far can be loaded"):
        load(empty)
    whole = (run.output / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-8])
    with pytest.raises(DataError, match=r"cut\.safetensors is damaged"):
        load(tmp_path / "cut.safetensors")
    (tmp_path / "text").write_bytes(b"no model at all, but long enough to have a header")
    with pytest.raises(DataError, match="text is not a model of a run, or damaged"):
        load(tmp_path / "text")
    (tmp_path / "other.safetensors").write_bytes(whole.replace(b"resnet20", b"resnet32"))
    with pytest.raises(DataError, match=r"is of another network: .* has no counterpart"):
        load(tmp_path / "other.safetensors")
    images = np.asarray(EVAL_ROWS.images_NCHW)[:, :, :4].reshape(len(EVAL_ROWS), -1)
    low = write_binary(tmp_path / "low", EVAL_ROWS.labels.astype(np.uint8), images)
    narrow = {**FAST, "image_shape": (SHAPE[0], 4, SHAPE[2])}
    with pytest.raises(UsageError, match="the model takes images of 3x"):
        predict(PredictOptions(run=str(run.output), output=str(tmp_path / "t"), input=str(low), **narrow))
    with pytest.raises(UsageError, match="give the images to read: either --input or --shards"):
        main([str(run.output), "--output", str(tmp_path / "t")])
    assert not (tmp_path / "t").exists()
    flags = ["--input", str(source), "--output", str(tmp_path / "t"), "--image-shape", "3x8x8"]
    assert main([str(run.output), *flags, "--format", "cifar10-binary", "--quiet"]) == 0
    assert "made; predictions of 60 rows" in capsys.readouterr().out
