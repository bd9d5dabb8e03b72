"""``--normalise``: each kind beside plain numpy, from the statistics over a run to the model that it leaves."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, generator
from tests.conftest import write_binary
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, SHAPE, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from trainer import Result, load
from trainer.__main__ import main as train_main
from trainer.config import SEPARATOR, Config, RunFacts
from trainer.data import mean_image as statistics
from trainer.data.batches import build_batches
from trainer.data.loading import load_worker
from trainer.data.mean_image import check_subtracted_mean, kept_mean_image, mean_image, subtracted_mean
from trainer.data.opening import open_shards
from trainer.data.pinned import open_pinned
from trainer.data.shards import Shards
from trainer.evaluation.recalibration import batches
from trainer.export.write import export
from trainer.home.folders import Folders
from trainer.home.work import WorkFolder
from trainer.inference.options import PredictOptions
from trainer.inference.predict import predict
from trainer.lifecycle.row_storage import host_reads, row_storage
from trainer.models.metadata import ModelMetadata, from_header
from trainer.options import Role
from trainer.report.settings import flags_in_words
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.replay import replay
from trainer.transport.agreement import Agreement

ROWS = rows_of(80, 7)
PIXELS = np.asarray(ROWS.images_NCHW)
CHANNELS = [120.0, 125.0, 130.0]  # in the manifest
KINDS = ("channel", "image", "none")
VALUES: dict[str, Any] = {"model": "logistic", "batch_size": 20, "threads": 1}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("normalise") / "set", parts_of(2), EVAL_ROWS)


@pytest.fixture(scope="module")
def run(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run in virtual time that subtracts the mean image."""
    return train(shards, tmp_path_factory.mktemp("run") / "run")


def parts_of(count: int) -> list[Any]:
    """Return the rows in ``count`` parts of different sizes."""
    order = np.random.default_rng(count).permutation(len(ROWS))
    cuts = np.sort(np.random.default_rng(count).choice(np.arange(10, 70), count - 1, replace=False))
    return [ROWS.view(np.sort(part)) for part in np.split(order, cuts)]


def train(shards: Path, output: Path, options: Any = QUIET, **values: Any) -> Result:
    config = make_config(shards, output, protocol="bsp", **VALUES | {"steps": 8, "normalise": "image"} | values)
    result = simulate(config, SimulationSettings(), options)
    assert isinstance(result, Result)
    return result


def numpy_mean_image(pixels: Any = PIXELS) -> np.ndarray:
    """Return the mean of each pixel by integers of Python, whose division is rounded once."""
    columns = np.reshape(pixels, (len(pixels), -1)).T
    return np.array([sum(column.tolist()) / len(pixels) for column in columns], np.float32).reshape(pixels.shape[1:])


def numpy_normalised(kind: str, pixels: Any) -> np.ndarray:
    """Return normalised images by plain numpy in float64."""
    by_pixel = {"channel": np.reshape(CHANNELS, (3, 1, 1)), "image": numpy_mean_image(), "none": np.zeros((3, 1, 1))}
    return np.asarray((np.asarray(pixels, np.float64) - by_pixel[kind]) / 255)


def mark_copies(folder: Path, worker: int, copies: np.ndarray) -> None:
    """Give the file of a worker the column ``copy``. copies: bool, one per row."""
    manifest = json.loads((folder / "manifest.json").read_text())
    about = manifest["workers"][worker]["files"][0]
    table = pq.read_table(folder / about["path"])
    pq.write_table(table.append_column("copy", pa.array(copies.astype(np.int8))), folder / about["path"])
    data = (folder / about["path"]).read_bytes()
    about |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


# The statistics


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_mean_image_has_the_same_bits_for_any_workers(workers: int, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "set", parts_of(workers), None)
    opened = open_shards(str(folder))
    expected = numpy_mean_image().tobytes()
    assert mean_image(opened).tobytes() == expected
    # Mapped rows are read in blocks.
    assert mean_image(replace(opened, mapped=tmp_path / "mapped")).tobytes() == expected


def test_copies_do_not_count_in_the_mean_image(tmp_path: Path) -> None:
    """Copies that sharding made would otherwise make the mean depend on the shards."""
    first, second = ROWS.view(np.arange(50)), ROWS.view(np.arange(40, 80))
    folder = write_shards(tmp_path / "set", [first, second], None)
    mark_copies(folder, 1, np.arange(40, 80) < 50)
    assert mean_image(open_shards(str(folder))).tobytes() == numpy_mean_image().tobytes()


def test_the_mean_image_of_a_mixture_is_of_all_rows(tmp_path: Path) -> None:
    sets = [write_shards(tmp_path / f"set-{seed}", [rows_of(20, seed), rows_of(30, seed + 1)], None) for seed in (3, 5)]
    config = make_config(SEPARATOR.join(map(str, sets)), mix="0.5,0.5", normalise="image", **VALUES)
    pixels = np.concatenate([rows_of(*part).images_NCHW for part in ((20, 3), (30, 4), (20, 5), (30, 6))])
    assert subtracted_mean(open_pinned(config.data)).tobytes() == numpy_mean_image(pixels).tobytes()


def test_processes_of_a_host_compute_the_mean_image_once(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = replace(open_shards(str(shards)), normalise="image", kept=tmp_path / "rows" / "host")
    first = kept_mean_image(opened)
    monkeypatch.setattr(statistics, "mean_image", None)
    assert kept_mean_image(replace(opened)).tobytes() == first.tobytes() == numpy_mean_image().tobytes()


def test_several_processes_compute_the_mean_image_once(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for processes: a lock belongs to an open file."""
    calls: list[Shards] = []
    means: list[bytes] = []

    def slow(opened: Shards) -> Any:
        calls.append(opened)
        time.sleep(0.05)
        return mean_image(opened)

    monkeypatch.setattr(statistics, "mean_image", slow)
    opened = replace(open_shards(str(shards)), normalise="image", kept=tmp_path / "rows" / "host")
    threads = [
        threading.Thread(target=lambda: means.append(kept_mean_image(replace(opened)).tobytes())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert means == [numpy_mean_image().tobytes()] * 4
    assert len(calls) == 1
    assert [path.name for path in (tmp_path / "rows" / "host").iterdir()] == [f"mean-{opened.digest}"]


@pytest.mark.parametrize("step", ["mean_image", "write_durably"])
def test_the_end_of_a_run_may_delete_the_folder_meanwhile(
    step: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of another process's run on this host deletes it."""
    opened = replace(open_shards(str(shards)), normalise="image", kept=tmp_path / "rows" / "host")
    original = getattr(statistics, step)

    def late(*arguments: Any) -> Any:
        shutil.rmtree(tmp_path / "rows", ignore_errors=True)
        return original(*arguments)

    monkeypatch.setattr(statistics, step, late)
    assert kept_mean_image(opened).tobytes() == numpy_mean_image().tobytes()


def test_a_mean_image_of_another_size_is_computed_anew(shards: Path, tmp_path: Path) -> None:
    opened = replace(open_shards(str(shards)), normalise="image", kept=tmp_path)
    path = tmp_path / f"mean-{opened.digest}"
    path.write_bytes(bytes(100))
    assert kept_mean_image(opened).tobytes() == numpy_mean_image().tobytes() == path.read_bytes()


def test_a_start_keeps_the_mean_image_that_another_one_reads(shards: Path, tmp_path: Path) -> None:
    """Rows are in memory, so that the second start deletes decoded rows of a killed one, and nothing else."""
    config = make_config(shards, tmp_path, normalise="image", **VALUES)
    opened = replace(open_shards(str(shards)), normalise="image")
    roles = [Role("worker", 0)]
    reads = host_reads(config, RunFacts(3, 3, 10, 0), opened, roles)
    said: list[str] = []
    with row_storage(config, opened, reads, WorkFolder(Folders.from_home(tmp_path)), leads=True, say=said.append):
        (kept,) = (tmp_path / "rows").rglob("mean-*")
        (kept.parent / "8c1f-0.rows").write_bytes(b"decoded")
        with row_storage(config, opened, reads, WorkFolder(Folders.from_home(tmp_path)), leads=False):
            assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    assert said == [f"--normalise image: the mean image of {opened.rows:,} rows is computed"]
    assert not (tmp_path / "rows").exists()


# Mini-batches and evaluations


@pytest.mark.parametrize("kind", KINDS)
def test_mini_batches_are_normalised_as_by_numpy(shards: Path, kind: str) -> None:
    config = make_config(shards, augment=False, normalise=kind, **VALUES)
    opened = open_pinned(config.data)
    made = build_batches(config, opened, load_worker(opened, 1), 1, 2).make(3)
    expected = numpy_normalised(kind, made.draw.rows.images_NCHW[made.draw.places])
    np.testing.assert_allclose(made.tensors.images_BCHW.numpy(), expected, rtol=0, atol=1e-6)
    evaluated = np.concatenate([images.numpy() for images, _ in batches(EVAL_ROWS, subtracted_mean(opened), 7)])
    np.testing.assert_allclose(evaluated, numpy_normalised(kind, EVAL_ROWS.images_NCHW), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_padded_after_the_normalisation(shards: Path, kind: str) -> None:
    """The border is zero in the network's input: the mean that was subtracted, or black."""
    config = make_config(shards, normalise=kind, seed=5, **VALUES)
    opened = open_pinned(config.data)
    made = build_batches(config, opened, load_worker(opened, 1), 1, 2).make(3)
    plain = numpy_normalised(kind, made.draw.rows.images_NCHW[made.draw.places])
    padded = np.pad(plain, ((0, 0), (0, 0), (2, 2), (2, 2)))
    rng = generator(5, Purpose.AUGMENTATION, 1, 3)
    top, left = rng.integers(0, 5, (2, len(plain)))
    is_flipped = rng.random(len(plain)) < 0.5
    crops = [padded[i, :, y : y + 8, x : x + 8] for i, (y, x) in enumerate(zip(top, left, strict=True))]
    expected = [crop[..., ::-1] if flip else crop for crop, flip in zip(crops, is_flipped, strict=True)]
    np.testing.assert_allclose(made.tensors.images_BCHW.numpy(), expected, rtol=0, atol=1e-6)


# Runs


def test_a_run_computes_the_mean_image_once(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Shards] = []

    def counted(opened: Shards) -> Any:
        calls.append(opened)
        return mean_image(opened)

    monkeypatch.setattr(statistics, "mean_image", counted)
    train(shards, tmp_path / "run", steps=1)
    assert len(calls) == 1


def test_kinds_give_different_runs(shards: Path, run: Result, tmp_path: Path) -> None:
    others = [train(shards, tmp_path / kind, normalise=kind) for kind in ("channel", "none")]
    assert len({final(each).tobytes() for each in (run, *others)}) == 3
    metadata = load(str(others[1].output)).metadata
    assert metadata.mean == [0.0, 0.0, 0.0]
    assert load(str(others[0].output)).metadata.mean == CHANNELS


def test_a_resumed_or_mapped_run_has_the_same_bits(shards: Path, run: Result, tmp_path: Path) -> None:
    train(shards, tmp_path / "parts", steps=3)
    resumed = train(shards, tmp_path / "parts", RESUME)
    mapped = train(shards, tmp_path / "mapped", row_storage="mapped")
    assert final(run).tobytes() == final(resumed).tobytes() == final(mapped).tobytes()
    assert replay(resumed.output).is_equal
    assert not (Path(str(mapped.output)) / "rows").exists()


def test_another_normalisation_is_refused_on_resume(shards: Path, tmp_path: Path) -> None:
    train(shards, tmp_path / "run", steps=2)
    with pytest.raises(UsageError, match=r"--normalise image.*, not none|--normalise none") as caught:
        train(shards, tmp_path / "run", RESUME, normalise="none")
    assert "\n" not in str(caught.value)


def test_a_run_folder_without_the_option_is_of_channel(shards: Path, tmp_path: Path) -> None:
    """Earlier versions named no normalisation, in the configuration and in the identity of checkpoints."""
    whole = train(shards, tmp_path / "whole", normalise="channel")
    older = train(shards, tmp_path / "older", normalise="channel", steps=3)
    for path in Path(str(older.output)).rglob("*"):
        if path.suffix in (".json", ".jsonl"):
            text = path.read_text()
            path.write_text(re.sub(r'\\?"(--)?normalise\\?": ?\\?"channel\\?", ?', "", text))
            assert not re.search(r"normalise\b(?!\.py)", path.read_text())
    assert final(train(shards, tmp_path / "older", RESUME, normalise="channel")).tobytes() == final(whole).tobytes()
    assert Config.from_json(json.loads((tmp_path / "older" / "config.json").read_text())["config"])


def test_hosts_and_the_report_know_the_normalisation(shards: Path) -> None:
    configs = [make_config(shards, normalise=kind, **VALUES) for kind in KINDS]
    facts = RunFacts(2, 80, 10, 0, open_shards(str(shards)).digest)
    assert len({Agreement.from_config(config, facts).digest for config in configs}) == 3
    values = {row.flag: row.value for row in flags_in_words(configs[1].to_json(), {})}
    assert values["--normalise"] == "image"


# The model


def test_the_model_file_has_the_mean_image(run: Result) -> None:
    classifier = load(str(run.output))
    network = classifier.network
    weights = load_file(str(run.output / "model.safetensors"))
    assert classifier.metadata.mean == numpy_mean_image().tolist()
    images = torch.from_numpy(numpy_normalised("image", EVAL_ROWS.images_NCHW)).float()
    with torch.no_grad():
        outputs = classifier(torch.from_numpy(EVAL_ROWS.images_NCHW))
        torch.testing.assert_close(outputs, network(images), rtol=0, atol=1e-5)
    assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    assert (outputs.argmax(1).numpy() == EVAL_ROWS.labels).mean() == pytest.approx(run.final_accuracy)


def test_predictions_use_the_mean_image(run: Result, tmp_path: Path) -> None:
    images = np.asarray(EVAL_ROWS.images_NCHW).reshape(len(EVAL_ROWS), -1)
    source = write_binary(tmp_path / "cifar", EVAL_ROWS.labels.astype(np.uint8), images)
    options: dict[str, Any] = {"image_shape": SHAPE, "threads": 1, "quiet": True, "format": "cifar10-binary"}
    predict(PredictOptions(run=str(run.output), output=str(tmp_path / "table"), input=str(source), **options))
    labels = pd.read_parquet(tmp_path / "table")["label"]
    assert (labels.to_numpy() == EVAL_ROWS.labels).mean() == pytest.approx(run.final_accuracy)


@pytest.mark.parametrize("kind", ["image", "none"])
def test_exports_normalise_as_the_run(
    shards: Path, run: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    result = run if kind == "image" else train(shards, tmp_path / "run", normalise=kind)
    images = torch.from_numpy(EVAL_ROWS.images_NCHW)
    with torch.no_grad():
        expected = load(str(result.output))(images)
    export(str(result.output), str(tmp_path / "model.pt"), "torchscript")
    graph = torch.jit.load(tmp_path / "model.pt")
    torch.testing.assert_close(graph(images), expected, rtol=0, atol=1e-5)
    export(str(result.output), str(tmp_path / "hub"), "safetensors")
    card = (tmp_path / "hub" / "README.md").read_text()
    words = {"image": "(image - mean image of the training set) / 255", "none": "| image / 255 |"}
    assert words[kind] in card
    monkeypatch.chdir(tmp_path / "hub")
    for program in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        names: dict[str, Any] = {"images": images}
        exec(program, names)
        torch.testing.assert_close(names["outputs"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "mean",
    [
        [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0]]],
        [[[1.0, 2.0], [3.0, 4.0]]],
        [[[1.0]], [[1.0]]],
        [[[1.0, 2.0], [3.0, float("inf")]]] * 2,
        [1.0],
    ],
)
def test_a_mean_of_another_shape_is_refused(mean: Any) -> None:
    header = {"model": json.dumps({"network": {}, "shape": [2, 2, 2], "classes": 3, "mean": mean})}
    with pytest.raises(ValueError, match=r"means of shape|inhomogeneous shape|'mean' is"):
        from_header(header)


def test_a_mean_image_is_read_back_as_it_was_written() -> None:
    about = ModelMetadata({}, [1, 2, 2], 3, [[[1.5, 2.0], [3.0, 4.25]]])
    assert from_header(about.to_header()) == about


# Refusals


def test_an_unknown_normalisation_is_one_line(shards: Path, tmp_path: Path) -> None:
    flags = ["--shards", str(shards), "--output", str(tmp_path / "run"), "--steps", "1", "--normalise", "mean"]
    with pytest.raises(UsageError, match=r"--normalise: invalid choice: 'mean' \(choose from .?channel") as caught:
        train_main(flags)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_real_valued_features_are_not_normalised(shards: Path) -> None:
    opened = open_shards(str(shards))
    real = replace(opened, manifest=replace(opened.manifest, image=replace(opened.manifest.image, dtype="float32")))
    check_subtracted_mean(make_config(shards, **VALUES), real)
    for kind in ("image", "none"):
        with pytest.raises(UsageError, match=f"--normalise {kind} is for images in uint8, and .* leave it out"):
            check_subtracted_mean(make_config(shards, normalise=kind, **VALUES), real)


def test_a_mean_image_too_large_for_a_model_file_is_refused(shards: Path) -> None:
    opened = open_shards(str(shards))
    wide = replace(opened.manifest.image, shape=[3, 1300, 1300])
    large = replace(opened, manifest=replace(opened.manifest, image=wide))
    check_subtracted_mean(make_config(shards, normalise="none", **VALUES), large)
    with pytest.raises(
        UsageError, match=r"^--normalise image keeps .* at most 4,000,000, and .*give --normalise channel"
    ):
        check_subtracted_mean(make_config(shards, normalise="image", **VALUES), large)


def test_a_model_that_never_changes_has_no_tolerance(tmp_path: Path) -> None:
    config = make_config("", tmp_path / "run", tolerance=0.1, **VALUES)
    with pytest.raises(UsageError, match=r"^--tolerance 0\.1 ends a run whose model hardly changes"):
        simulate(config, SimulationSettings(compute="none", workers=2, rows=40), QUIET)


def test_toy_losses_have_no_images_to_normalise(tmp_path: Path) -> None:
    config = make_config("", tmp_path / "run", normalise="none", **VALUES)
    with pytest.raises(UsageError, match="--normalise none changes images of rows, --compute quadratic has none"):
        simulate(config, SimulationSettings(compute="quadratic", workers=2, rows=40), QUIET)
