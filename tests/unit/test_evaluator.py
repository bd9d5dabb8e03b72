"""The evaluator against plain torch and under kill -9."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as save_file
from sklearn.metrics import confusion_matrix

from pipeline.core.errors import DataError
from pipeline.core.shardset.layout import MAX_CLASSES
from pipeline.core.storage.store import Store
from tests.support.configs import make_config
from tests.support.kills import was_killed_at
from tests.support.trainer_runs import lines_of
from tests.support.trainer_sets import CLASSES, EVAL_ROWS, SHAPE, rows_of, write_rows, write_shards
from tests.support.virtual_runs import final, virtual
from trainer import Options
from trainer.checkpoints.decisions import read_stop
from trainer.checkpoints.generations import read_generations, write_generations
from trainer.checkpoints.prune import discard_after, prune
from trainer.checkpoints.read import evaluation_of, read_state, versions
from trainer.checkpoints.state import RunState, folder_of, slice_name
from trainer.checkpoints.write import mark_evaluated, mark_final
from trainer.checkpoints.write import write_slice as save_slice
from trainer.checkpoints.write import write_state as save_state
from trainer.config import Config
from trainer.coordination.cohorts import Cohort, Cohorts
from trainer.data.batches import Batch
from trainer.data.opening import open_shards
from trainer.data.rows import Rows
from trainer.evaluation import evaluator, process, recalibration
from trainer.evaluation.evaluator import NO_ROWS, Evaluator
from trainer.evaluation.guessing import NOTHING_LEARNED
from trainer.evaluation.measure import ClassCounts, EvaluationResult, evaluate, measure, penalty
from trainer.evaluation.recalibration import batches, recalibrate, sample_rows
from trainer.evaluation.training_mode import augmented, enter_training_mode
from trainer.home.folders import Folders
from trainer.home.place import StorePlace
from trainer.home.segments import begin_start
from trainer.home.work import WorkFolder
from trainer.lifecycle.ends import conclude
from trainer.models import ModelInput, model_from_json
from trainer.models.build import build
from trainer.models.flat_vector import FlatModel
from trainer.run_files import BEST, BEST_OF, METRICS, MODEL, NEWS
from trainer.runlog.events import log_event
from trainer.runlog.kinds.parse import event_from_json
from trainer.runlog.read import best, evaluations, read_events, read_pushes
from trainer.runlog.result import is_best_of, summarise
from trainer.transport.status import NOT_READY

DECAY = 0.01
QUIET = Options(silent=True, report=False)
CHANGES = ("replace", "rename", "unlink", "mkdir", "fsync", "write")


def main(config: Config, output: Path, *, stop: threading.Event | None = None) -> None:
    """The evaluator's process on the run of a local folder."""
    process.main(config, Folders.from_home(output), stop=stop)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workers = [rows_of(30, 2), rows_of(50, 3, 100)]
    return write_shards(tmp_path_factory.mktemp("shards"), workers, EVAL_ROWS)


def config_of(shards: Path, **values: Any) -> Config:
    return make_config(shards, "unused", **{"model": "perceptron", "epochs": 3, "weight_decay": DECAY, **values})


def vector(model: str, seed: int) -> np.ndarray:
    built = build(model_from_json({"name": model}), ModelInput(SHAPE, CLASSES), seed)
    return FlatModel(built.model).read()


def write(
    output: Path,
    version: int,
    model: str = "perceptron",
    boundary: int | None = None,
    final: bool = False,
    generation: int = 0,
) -> None:
    """A checkpoint of a model as it is initialised with the version and the generation as seed, of two servers."""
    flat = FlatModel(build(model_from_json({"name": model}), ModelInput(SHAPE, CLASSES), 0).model)
    values, parameters = vector(model, version + generation), flat.num_parameters
    folder, total = folder_of(output / "checkpoints", version), flat.num_parameters + flat.num_buffers
    half = parameters // 2
    for index, (begin, end) in enumerate(((0, half), (half, total))):
        momentum = np.zeros(min(end, parameters) - begin, np.float32)
        save_slice(folder, index, 2, version, begin, end, total, values[begin:end], momentum, generation)
    counts = (version, version, 0, generation, version / 10, boundary, final, {0: 1}, 2.5)
    save_state(folder, RunState(*counts, 2, parameters, flat.num_buffers, "{}"))


def finished_run(output: Path) -> None:
    """The end of two epochs, a checkpoint between them, and the end of the run."""
    write(output, 10, boundary=1)
    write(output, 15)
    write(output, 20, boundary=2)
    write(output, 25, boundary=3, final=True)


def events(output: Path, kind: str) -> list[dict[str, Any]]:
    """Those of a kind, but the warning that these models, which nobody trained, have learned nothing."""
    found = lines_of(output / METRICS, kind)
    return [event for event in found if not event.get("message", "").startswith(NOTHING_LEARNED)]


def plainly(module: torch.nn.Module, rows: Rows) -> tuple[float, float]:
    """Mean cross entropy and accuracy of a classifier, image by image."""
    module.eval()
    losses, right = [], []
    with torch.no_grad():
        for image, label in zip(rows.images_NCHW, rows.labels, strict=True):
            mean = torch.tensor([120.0, 125.0, 130.0]).view(1, 3, 1, 1)
            logits = module((torch.tensor(image[None]).float() - mean) / 255)
            losses.append(float(-torch.log_softmax(logits, 1)[0, label]))
            right.append(int(logits.argmax()) == label)
        return float(np.mean(losses)), float(np.mean(right))


def decay(module: torch.nn.Module) -> float:
    weights = [m.weight.detach() for m in module.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    return DECAY / 2 * sum(float(weight.square().sum()) for weight in weights)


# Measuring


@pytest.mark.parametrize("size", [1, 7, 60, 500])
def test_loss_and_accuracy_do_not_depend_on_how_the_rows_are_batched(size: Any) -> None:
    built = build(model_from_json({"name": "cnn"}), ModelInput(SHAPE, CLASSES), 1)
    mean = np.array([120, 125, 130], np.float32)
    found = evaluate(built.model, built.task, batches(EVAL_ROWS, mean, size))
    assert found[:2] == pytest.approx(plainly(built.model, EVAL_ROWS), rel=1e-4)
    one_by_one = [evaluate(built.model, built.task, iter([batch])).loss for batch in batches(EVAL_ROWS, mean, 1)]
    assert found.noise == pytest.approx(np.std(one_by_one) / len(one_by_one) ** 0.5, rel=1e-4)


def test_confusion_is_scikit_learns() -> None:
    built = build(model_from_json({"name": "cnn"}), ModelInput(SHAPE, CLASSES), 1)
    mean = np.array([120, 125, 130], np.float32)
    found = evaluate(built.model, built.task, batches(EVAL_ROWS, mean, 7), CLASSES)
    images = (torch.from_numpy(EVAL_ROWS.images_NCHW).float() - torch.from_numpy(mean)[:, None, None]) / 255
    with torch.no_grad():
        predicted = built.model.eval()(images).argmax(1)
    expected = confusion_matrix(EVAL_ROWS.labels, predicted, labels=range(CLASSES))
    assert found.classes is not None
    assert found.classes.to_json() == {
        "class_rows": expected.sum(1).tolist(),
        "class_correct": expected.diagonal().tolist(),
        "confusion": expected.tolist(),
    }


def test_many_classes_are_counted_without_a_table_of_their_pairs() -> None:
    counts = ClassCounts(MAX_CLASSES)
    counts.add(np.array([MAX_CLASSES - 1, 7, 7]), np.array([0, 7, 8]))
    found = counts.to_json()
    assert (found["class_rows"][7], found["class_correct"][7], sum(found["class_rows"])) == (2, 1, 3)
    assert "confusion" not in found


def test_an_evaluation_changes_no_number_of_the_model() -> None:
    built = build(model_from_json({"name": "cnn"}), ModelInput(SHAPE, CLASSES), 1)
    before = {name: tensor.clone() for name, tensor in built.model.state_dict().items()}
    evaluate(built.model, built.task, batches(EVAL_ROWS, np.zeros(3, np.float32), 7))
    for name, tensor in built.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("name", ["cnn", "resnet20"])
def test_training_mode_leaves_the_model_as_it_was(name: str) -> None:
    built = build(model_from_json({"name": name}), ModelInput(SHAPE, CLASSES), 1)
    model = built.model
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    losses = []
    for version in (3, 3, 4):
        with enter_training_mode(model, 7, version):
            parts = augmented(batches(EVAL_ROWS, np.zeros(3, np.float32), 60), 7, version)
            losses.append(measure(model, built.task, parts).loss)
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    # Whatever the running statistics are.
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.fill_(5)
    with enter_training_mode(model, 7, 3):
        parts = augmented(batches(EVAL_ROWS, np.zeros(3, np.float32), 60), 7, 3)
        assert measure(model, built.task, parts).loss == losses[0]


def test_the_mode_of_evaluation_changes_no_parameter(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "set", [EVAL_ROWS], EVAL_ROWS)
    values: dict[str, Any] = {"model": "cnn", "steps": 2, "batch_size": 20, "threads": 1}
    clean, paper = (
        virtual(tmp_path / mode, shards=shards, compute="real", workers=1, evaluation_mode=mode, **values)
        for mode in ("clean", "paper")
    )
    assert final(clean).tobytes() == final(paper).tobytes()
    assert clean.final_loss != paper.final_loss


@pytest.mark.parametrize(("dtype", "augment"), [(np.uint8, False), (np.float32, True)])
def test_images_that_training_leaves_alone_stay_whole(dtype: Any, augment: bool, tmp_path: Path) -> None:
    """Expect equal losses in both modes of a network without dropout and statistics."""
    rows = Rows(np.asarray(EVAL_ROWS.images_NCHW, dtype), EVAL_ROWS.labels, EVAL_ROWS.ids)
    shards = write_shards(tmp_path / "set", [rows], rows)
    values: dict[str, Any] = {"model": "logistic", "steps": 1, "batch_size": 20, "threads": 1, "augment": augment}
    clean, paper = (
        virtual(tmp_path / mode, shards=shards, compute="real", workers=1, evaluation_mode=mode, **values)
        for mode in ("clean", "paper")
    )
    assert clean.final_loss == pytest.approx(paper.final_loss)


def test_real_targets_have_a_loss_and_no_accuracy() -> None:
    built = build(model_from_json({"name": "linear"}), ModelInput(SHAPE, CLASSES, has_targets=True), 1)
    images = torch.zeros(4, *SHAPE)
    found = evaluate(built.model, built.task, iter([Batch(images, torch.tensor([1.0, 2.0, 3.0, 4.0]))]))
    assert found.accuracy is None
    assert found.loss > 0


def test_an_evaluation_of_no_rows_is_refused() -> None:
    built = build(model_from_json({"name": "linear"}), ModelInput(SHAPE, CLASSES), 1)
    with pytest.raises(ValueError, match="no rows"):
        evaluate(built.model, built.task, iter(()))


def test_the_penalty_is_of_weights_without_biases_and_norms() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with torch.no_grad():
        model[0].weight[:] = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        model[0].bias[:] = 100.0
        model[1].weight[:] = 100.0
    assert penalty(model, 0.1) == pytest.approx(0.5 * 0.1 * 30)


@pytest.mark.slow
def test_recalibrated_statistics_forget_their_earlier_values() -> None:
    torch.manual_seed(0)
    first, second = torch.nn.BatchNorm2d(3, momentum=0.003), torch.nn.BatchNorm2d(3, momentum=0.003)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), torch.nn.Dropout(0.5), second)
    for norm in (first, second):
        norm.running_mean.fill_(17.0)
        norm.num_batches_tracked.fill_(40)
    images = torch.randn(64, 3, 5, 5) * torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1) + 5
    recalibrate(model, iter([Batch(part, torch.zeros(len(part))) for part in images.split(16)]))
    # what the second layer sees: the first normalises each batch by itself; dropout is off
    seen = [torch.relu(F.batch_norm(part, None, None, training=True)) for part in images.split(16)]
    for norm, parts in ((first, images.split(16)), (second, seen)):
        expected = torch.stack([part.mean((0, 2, 3)) for part in parts]).mean(0)
        torch.testing.assert_close(norm.running_mean, expected, rtol=1e-5, atol=1e-5)
        expected = torch.stack([part.var((0, 2, 3)) for part in parts]).mean(0)
        torch.testing.assert_close(norm.running_var, expected, rtol=1e-4, atol=1e-5)
    assert first.momentum == second.momentum == 0.003
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("model", ["cnn", "resnet20"])
def test_an_evaluation_has_the_same_bits_on_any_threads(model: str) -> None:
    """Statistics, loss and accuracy: hosts of one run differ in cores, and its results must not."""
    rows = rows_of(3 * 64, 5)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            built = build(model_from_json({"name": model}), ModelInput(SHAPE, CLASSES), 1)
            recalibrate(built.model, batches(rows, np.full(3, 120, np.float32), 64))
            measured = evaluate(built.model, built.task, batches(rows, np.full(3, 120, np.float32), 64))
            results.append((FlatModel(built.model).read().tobytes(), measured, penalty(built.model, DECAY)))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(result == results[0] for result in results)


def test_the_sample_of_training_rows_is_spread_and_repeatable(tmp_path: Path) -> None:
    copies = rows_of(5, 9, 500)  # sharding gave these to both workers
    workers = [
        Rows(*(np.concatenate(pair) for pair in zip(*map(astuple, (rows_of(count, s, 100 * s), copies)), strict=True)))
        for s, count in ((1, 45), (2, 5))
    ]
    shards = open_shards(str(write_shards(tmp_path, workers, None)))
    sample = sample_rows(shards, 20, seed=3)
    source = {int(i): image for rows in workers for i, image in zip(rows.ids, rows.images_NCHW, strict=True)}
    assert len(set(sample.ids)) == len(sample) <= 20
    assert sum((sample.ids >= 200) & (sample.ids < 205)) == 5, "worker 1 has ten rows and gives all ten"
    for i, image in zip(sample.ids, sample.images_NCHW, strict=True):
        np.testing.assert_array_equal(image, source[int(i)])
    np.testing.assert_array_equal(sample.ids, sample_rows(shards, 20, seed=3).ids)
    assert set(sample.ids) != set(sample_rows(shards, 20, seed=4).ids)
    assert set(sample_rows(shards, 2000, seed=3).ids) == source.keys()


def test_a_sample_of_a_set_in_ratios_is_in_its_ratios(tmp_path: Path) -> None:
    root = write_shards(tmp_path, [rows_of(60, 1), rows_of(20, 2, 100)], None)
    manifest = json.loads((root / "manifest.json").read_text()) | {"ratios": [3, 1]}
    (root / "manifest.json").write_text(json.dumps(manifest))
    sample = sample_rows(open_shards(str(root)), 16, seed=3)
    assert (len(sample), sum(sample.ids < 100)) == (16, 12)


def test_a_sample_reads_only_the_files_that_it_takes_rows_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are those of a set with one file a worker."""
    workers = [rows_of(60, 1), rows_of(20, 2, 100)]
    whole = open_shards(str(write_shards(tmp_path / "whole", workers, None)))
    root = write_shards(tmp_path / "parts", workers, None)
    manifest = json.loads((root / "manifest.json").read_text())
    for worker, rows in enumerate(workers):
        cuts = [Rows(*(part[at : at + 5] for part in astuple(rows))) for at in range(0, len(rows), 5)]
        files = [write_rows(root, f"worker={worker:03d}/part-{at}.parquet", cut) for at, cut in enumerate(cuts)]
        manifest["workers"][worker]["files"] = files
    (root / "manifest.json").write_text(json.dumps(manifest))
    read: list[str] = []
    pick = recalibration.pick_rows

    def watched(shards: Any, file: Any, *more: Any, **named: Any) -> Rows:
        read.append(file.path)
        return pick(shards, file, *more, **named)

    monkeypatch.setattr(recalibration, "pick_rows", watched)
    sample = sample_rows(open_shards(str(root)), 4, seed=3)
    assert len(set(read)) == len(read) <= 4
    for found, expected in zip(astuple(sample), astuple(sample_rows(whole, 4, seed=3)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_rows_sorted_by_class_recalibrate_like_shuffled_ones(tmp_path: Path) -> None:
    """In batches of one class each, the variance between classes would be missing from the statistics."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(CLASSES), 50)
    images = (rng.integers(0, 40, (200, *SHAPE)) + 60 * labels[:, None, None, None]).astype(np.uint8)
    shards = open_shards(str(write_shards(tmp_path, [Rows(images, labels, np.arange(200))], None)))
    shuffled = np.random.default_rng(1).permutation(200)
    mean, found = np.zeros(3, np.float32), []
    for rows in (sample_rows(shards, 200, seed=3), Rows(images[shuffled], labels[shuffled], shuffled)):
        norm = torch.nn.BatchNorm2d(3)
        recalibrate(norm, batches(rows, mean, 50))
        found.append((norm.running_mean.numpy().copy(), norm.running_var.numpy().copy()))
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-5)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=0.05)


def astuple(rows: Rows) -> tuple[Any, ...]:
    return rows.images_NCHW, rows.labels, rows.ids


# The process


def test_every_end_of_an_epoch_is_measured_as_plain_torch_measures_it(tmp_path: Path, shards: Path) -> None:
    finished_run(tmp_path)
    main(config_of(shards), tmp_path)
    found = events(tmp_path, "eval")
    assert [(e["version"], e["epoch"], e["seconds"], e["rows"], e["final"]) for e in found] == [
        (10, 1, 2.5, 60, False),
        (20, 2, 2.5, 60, False),
        (25, 3, 2.5, 60, True),
    ]
    train = [rows_of(30, 2), rows_of(50, 3, 100)]
    every = Rows(*(np.concatenate(pair) for pair in zip(*map(astuple, train), strict=True)))
    for event in found:
        module = build(model_from_json({"name": "perceptron"}), ModelInput(SHAPE, CLASSES), event["version"]).model
        for prefix, rows in (("", EVAL_ROWS), ("train_", every)):
            loss, accuracy = plainly(module, rows)
            assert event[f"{prefix}loss"] == pytest.approx(loss + decay(module), rel=1e-4)
            assert event[f"{prefix}accuracy"] == accuracy
    top = max(found, key=lambda event: event["accuracy"])
    for name, version in ((BEST, top["version"]), (MODEL, 25)):
        model = build(model_from_json({"name": "perceptron"}), ModelInput(SHAPE, CLASSES), 99).model
        model.load_state_dict(load_file(tmp_path / name))
        np.testing.assert_array_equal(FlatModel(model).read(), vector("perceptron", version))
    root = tmp_path / "checkpoints"
    marks = [evaluation_of(root, read_state(root, version)) for version in versions(root)]
    assert [mark and mark.accuracy for mark in marks] == [
        found[0]["accuracy"],
        None,
        found[1]["accuracy"],
        found[2]["accuracy"],
    ]


def test_the_saved_model_is_the_recalibrated_one(tmp_path: Path, shards: Path) -> None:
    write(tmp_path, 5, model="cnn", boundary=1, final=True)
    main(config_of(shards, model="cnn", batch_norm="recalibrate"), tmp_path)
    model = build(model_from_json({"name": "cnn"}), ModelInput(SHAPE, CLASSES), 99).model
    missing = model.load_state_dict(load_file(tmp_path / MODEL), strict=False).missing_keys
    assert all(name.endswith("num_batches_tracked") for name in missing)
    (event,) = events(tmp_path, "eval")
    loss, accuracy = plainly(model, EVAL_ROWS)
    assert event["loss"] == pytest.approx(loss + decay(model), rel=1e-4)
    assert event["accuracy"] == accuracy
    assert not np.array_equal(FlatModel(model).read(), vector("cnn", 5))


@pytest.mark.full
def test_an_evaluator_killed_at_any_change_repeats_nothing(tmp_path: Path, shards: Path) -> Any:
    finished_run(tmp_path / "whole")
    main(config_of(shards), tmp_path / "whole")

    def outcome(output: Path) -> Any:
        times = ("time",)
        kept = [{k: v for k, v in e.items() if k not in times} for e in events(output, "eval")]
        return kept, [(output / name).read_bytes() for name in (BEST, MODEL)]

    for step in itertools.count():
        output = tmp_path / str(step)
        finished_run(output)
        died = was_killed_at(step, partial(main, config_of(shards), output), CHANGES)
        main(config_of(shards), output)
        assert outcome(output) == outcome(tmp_path / "whole")
        assert sorted(path.name for path in output.iterdir()) == [BEST_OF, BEST, "checkpoints", METRICS, MODEL]
        if not died:
            break
    assert step > 15, "there are more steps than that"


def test_an_event_is_in_the_home_before_its_checkpoint_is_marked(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A marked checkpoint is not evaluated again, so that the event would be lost with this host."""
    home = tmp_path / "home"
    logged: list[bool] = []

    def mark(*values: Any) -> bool:
        logged.append(any(b'"eval"' in path.read_bytes() for path in home.rglob("*") if path.is_file()))
        return mark_evaluated(*values)

    monkeypatch.setattr(evaluator, "mark_evaluated", mark)
    (tmp_path / "work").mkdir()
    write(home, 10, boundary=1, final=True)
    process.main(config_of(shards), begin_start(StorePlace(str(home), Store()), tmp_path / "work"))
    assert logged == [True]


def test_an_evaluator_asks_a_store_only_when_there_may_be_news(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside server 0, which announces checkpoints: in virtual time, with an announcement after 10 seconds."""
    (tmp_path / "work").mkdir()
    folders = begin_start(StorePlace(str(tmp_path / "home"), Store()), tmp_path / "work")
    now = 0.0

    class Stop:
        """Ends the evaluator after two minutes."""

        def is_set(self) -> bool:
            return now >= 120

        def wait(self, seconds: float) -> bool:
            nonlocal now
            now += seconds
            if now == 10:
                (folders.work / NEWS).write_text(".")
            return False

    looks: list[float] = []
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(Evaluator, "catch_up", lambda self: looks.append(now))
    process.main(config_of(shards), folders, stop=cast(threading.Event, Stop()))
    assert looks == [0, 10, 70, 130]


@pytest.mark.slow
def test_checkpoints_are_evaluated_as_they_appear_until_the_final_one(tmp_path: Path, shards: Path) -> None:
    write(tmp_path, 10, boundary=1)
    process = threading.Thread(target=main, args=(config_of(shards), tmp_path))
    process.start()
    while not evaluation_of(tmp_path / "checkpoints", read_state(tmp_path / "checkpoints", 10)):
        assert process.is_alive()
        time.sleep(0.01)
    write(tmp_path, 20, boundary=2, final=True)
    process.join(60)
    assert not process.is_alive()
    assert [event["version"] for event in events(tmp_path, "eval")] == [10, 20]


def test_an_evaluator_told_to_stop_first_does_what_is_there(tmp_path: Path, shards: Path) -> None:
    write(tmp_path, 10, boundary=1)
    stop = threading.Event()
    stop.set()
    main(config_of(shards), tmp_path, stop=stop)
    assert [event["version"] for event in events(tmp_path, "eval")] == [10]


def test_a_run_is_over_at_its_evaluated_final_checkpoint(tmp_path: Path, shards: Path) -> None:
    found = Evaluator(config_of(shards), open_shards(str(shards)), Folders.from_home(tmp_path))
    assert not found.catch_up()
    write(tmp_path, 10, boundary=1)
    assert not found.catch_up()
    write(tmp_path, 20, final=True)
    assert found.catch_up()
    assert found.catch_up()
    mark_final(tmp_path / "checkpoints", read_state(tmp_path / "checkpoints", 20), final=False)
    assert not found.catch_up()


def test_what_was_measured_before_a_rollback_is_measured_again(tmp_path: Path, shards: Path) -> None:
    write(tmp_path, 10, boundary=1)
    stop = threading.Event()
    stop.set()
    main(config_of(shards), tmp_path, stop=stop)
    with (tmp_path / METRICS).open("a") as log:
        log.write('{"event": "rollback", "time": 1, "from_version": 12, "to_version": 8, "cause": "broken"}\n')
    shutil.rmtree(folder_of(tmp_path / "checkpoints", 10))
    write(tmp_path, 10, boundary=1)
    main(config_of(shards), tmp_path, stop=stop)
    assert [event["version"] for event in events(tmp_path, "eval")] == [10, 10]


def roll_back(output: Path, generation: int, version: int, *, discard: bool = True) -> None:
    """What server 0 does when all servers go back."""
    root = output / "checkpoints"
    write_generations(root, read_generations(root).begin(generation, version))
    log_event(output, "generation", generation=generation, version=version)
    if discard:
        discard_after(root, version)


def evaluate_what_is_there(output: Path, shards: Path) -> None:
    stop = threading.Event()
    stop.set()
    main(config_of(shards), output, stop=stop)


def model_in(path: Path) -> np.ndarray:
    model = build(model_from_json({"name": "perceptron"}), ModelInput(SHAPE, CLASSES), 99).model
    model.load_state_dict(load_file(path))
    return FlatModel(model).read()


@pytest.mark.parametrize("stage", ["measured", "being measured"])
def test_an_evaluation_of_a_discarded_history_does_not_count(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """Whether the roll-back comes before or after its event is written; the new history has the same versions."""
    write(tmp_path, 5)
    write(tmp_path, 10, boundary=1)
    with monkeypatch.context() as patched:
        at = "evaluate" if stage == "being measured" else "mark_evaluated"
        then = getattr(evaluator, at)

        def interrupted(*arguments: Any) -> Any:
            if read_generations(tmp_path / "checkpoints").latest == 0:
                roll_back(tmp_path, 7, 5)
                write(tmp_path, 10, boundary=1, generation=7)
            return then(*arguments)

        patched.setattr(evaluator, at, interrupted)
        evaluate_what_is_there(tmp_path, shards)
    evaluate_what_is_there(tmp_path, shards)
    assert [(event["version"], event["generation"]) for event in events(tmp_path, "eval")] == [(10, 0), (10, 7)]
    log = read_events(tmp_path / METRICS)
    (counts,) = evaluations(log)
    assert counts.generation == 7
    summary = summarise(log, read_pushes(tmp_path / "none"))
    assert (summary["best_accuracy"], summary["final_accuracy"]) == (counts.accuracy, counts.accuracy)
    np.testing.assert_array_equal(model_in(tmp_path / BEST), vector("perceptron", 17))


def test_a_roll_back_restores_the_best_model_that_is_left(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint is kept for that, though newer ones would have had it deleted."""
    accuracies = {10: 0.5, 20: 0.4, 30: 0.3, 40: 0.9}
    found = lambda *_: EvaluationResult(1.0, accuracies[max(accuracies.keys() & present())], 0.0)  # noqa: E731
    monkeypatch.setattr(evaluator, "evaluate", found)
    root = tmp_path / "checkpoints"

    def present() -> set[int]:
        return set(versions(root))

    for version in accuracies:
        write(tmp_path, version, boundary=version // 10)
        evaluate_what_is_there(tmp_path, shards)
        prune(root)
    assert versions(root) == [10, 30, 40]
    np.testing.assert_array_equal(model_in(tmp_path / BEST), vector("perceptron", 40))
    roll_back(tmp_path, 7, 30)
    evaluate_what_is_there(tmp_path, shards)
    top = best(evaluations(read_events(tmp_path / METRICS)))
    assert top
    assert (top.version, top.accuracy) == (10, 0.5)
    np.testing.assert_array_equal(model_in(tmp_path / BEST), vector("perceptron", 10))


def test_the_best_model_of_real_targets_has_the_lowest_loss(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = {10: 3.0, 20: 0.5, 30: 1.0}
    monkeypatch.setattr(
        evaluator, "evaluate", lambda *_: EvaluationResult(losses[versions(tmp_path / "checkpoints")[-1]], None, 0.0)
    )
    for version in losses:
        write(tmp_path, version, boundary=version // 10)
        evaluate_what_is_there(tmp_path, shards)
        prune(tmp_path / "checkpoints", keep=1)
    np.testing.assert_array_equal(model_in(tmp_path / BEST), vector("perceptron", 20))
    assert versions(tmp_path / "checkpoints") == [20, 30]
    assert [event["accuracy"] for event in events(tmp_path, "eval")] == [None] * 3


def test_a_best_model_is_known_without_a_word_in_it(tmp_path: Path, shards: Path) -> None:
    """Whether a kill came between the model and best.json, or an older version wrote the model alone."""
    for version in (10, 20):
        write(tmp_path, version, boundary=version // 10)
    evaluate_what_is_there(tmp_path, shards)
    top = best(evaluations(read_events(tmp_path / METRICS)))
    assert top
    assert is_best_of(tmp_path, top)
    model, other = (tmp_path / BEST).read_bytes(), save_file({"x": torch.zeros(1)})
    (tmp_path / BEST).write_bytes(other)
    assert not is_best_of(tmp_path, top)
    evaluate_what_is_there(tmp_path, shards)
    assert (tmp_path / BEST).read_bytes() == model
    (tmp_path / BEST_OF).unlink()
    assert not is_best_of(tmp_path, top)
    about = {"version": top.version, "generation": 0}
    (tmp_path / BEST).write_bytes(save_file({"x": torch.zeros(1)}, {"trained": json.dumps(about)}))
    assert is_best_of(tmp_path, top)
    assert not is_best_of(tmp_path, replace(top, generation=1))


def test_a_models_metadata_say_how_to_use_it(tmp_path: Path, shards: Path) -> None:
    write(tmp_path, 10, boundary=1, final=True)
    main(config_of(shards), tmp_path)
    with safe_open(tmp_path / MODEL, "np") as file:
        about = json.loads(file.metadata()["model"])
    images = {"shape": list(SHAPE), "mean": [120.0, 125.0, 130.0], "dtype": "uint8"}
    assert about == {"network": {"name": "perceptron"}, "classes": CLASSES, **images}


def test_a_run_cut_short_has_the_model_of_its_best_accuracy(tmp_path: Path, shards: Path) -> None:
    write(tmp_path, 10, boundary=1)
    evaluate_what_is_there(tmp_path, shards)
    write(tmp_path, 20, boundary=2)
    work = WorkFolder(Folders.from_home(tmp_path))
    conclude(work, QUIET, NOT_READY, "interrupted")
    assert (tmp_path / BEST).exists()
    log_event(tmp_path, "eval", version=20, generation=0, epoch=2, seconds=2.0, loss=0.1, accuracy=1.0, final=False)
    conclude(work, QUIET, NOT_READY, "interrupted")
    assert not (tmp_path / BEST).exists()
    evaluate_what_is_there(tmp_path, shards)
    np.testing.assert_array_equal(model_in(tmp_path / BEST), vector("perceptron", 20))


@pytest.mark.slow
def test_a_deleted_waiting_checkpoint_is_skipped_silently(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (10, 20, 30):
        write(tmp_path, version, boundary=version // 10, final=version == 30)
    load = Evaluator._load

    def late(self: Any, state: RunState) -> Any:
        if state.version == 10:
            shutil.rmtree(folder_of(tmp_path / "checkpoints", 10))
        return load(self, state)

    monkeypatch.setattr(Evaluator, "_load", late)
    main(config_of(shards), tmp_path)
    assert [event["version"] for event in events(tmp_path, "eval")] == [20, 30]
    assert events(tmp_path, "warning") == []


def test_what_was_read_of_the_log_is_not_read_again(tmp_path: Path, shards: Path) -> None:
    write(tmp_path, 10, boundary=1)
    found = Evaluator(config_of(shards), open_shards(str(shards)), Folders.from_home(tmp_path))
    found.catch_up()
    log = tmp_path / METRICS
    log.write_bytes(b" " * (log.stat().st_size - 1) + b"\n")  # nobody would know of version 10 who reads it now
    found.handle(read_state(tmp_path / "checkpoints", 10))
    assert events(tmp_path, "eval") == []


def test_the_watchdog_learns_of_each_event_that_is_read(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new evaluator reads the log of weeks, which may take longer than a stall may."""
    new = Evaluator(config_of(shards), open_shards(str(shards)), Folders.from_home(tmp_path))
    for number in range(3):
        log_event(tmp_path, "warning", message=f"warning {number}")
    kicks: list[int] = []
    monkeypatch.setattr(evaluator, "kick", lambda: kicks.append(1))
    new.keep_best()
    assert len(kicks) == 3


def test_without_evaluation_rows_a_warning_and_a_model_come(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", [rows_of(10, 1)], None)
    write(tmp_path, 10, boundary=1)
    write(tmp_path, 20, final=True)
    for _ in range(2):
        main(config_of(shards), tmp_path)
    assert [event["message"] for event in events(tmp_path, "warning")] == [NO_ROWS]
    assert events(tmp_path, "eval") == []
    assert (tmp_path / MODEL).exists()
    assert not (tmp_path / BEST).exists()


def test_a_broken_checkpoint_is_told_of_and_passed_over(tmp_path: Path, shards: Path) -> None:
    finished_run(tmp_path)
    broken = folder_of(tmp_path / "checkpoints", 10) / slice_name(1, 2)
    broken.write_bytes(broken.read_bytes()[:-1])
    main(config_of(shards), tmp_path)
    assert [event["version"] for event in events(tmp_path, "eval")] == [20, 25]
    (warning,) = events(tmp_path, "warning")
    assert str(broken) in warning["message"]


@pytest.mark.parametrize("first", [0, 30], ids=["of these workers", "before other workers"])
def test_patience_counts_epochs_that_cannot_be_measured(tmp_path: Path, shards: Path, first: int) -> None:
    """A checkpoint before the present workers ends no run, because none of them has its rows."""
    for epoch in (1, 2, 3):
        write(tmp_path, 10 * epoch, boundary=epoch)
    write(tmp_path, 40)
    (folder_of(tmp_path / "checkpoints", 20) / slice_name(1, 2)).write_bytes(b"")
    config = config_of(shards, patience=2, min_delta=1e6)
    later = Cohorts((Cohort(2, 128), Cohort(3, 128, version=first + 1, ends=(0, 0)))) if first else Cohorts()
    Evaluator(replace(config, cohorts=later), open_shards(str(shards)), Folders.from_home(tmp_path)).catch_up()
    stop = read_stop(tmp_path / "checkpoints")
    assert (stop and stop.epoch) == (None if first else 3)


def test_a_broken_final_checkpoint_is_an_error(tmp_path: Path, shards: Path) -> None:
    write(tmp_path, 10, final=True)
    broken = folder_of(tmp_path / "checkpoints", 10) / slice_name(1, 2)
    broken.write_bytes(b"")
    with pytest.raises(DataError, match=str(broken)):
        main(config_of(shards), tmp_path)


def test_a_model_that_diverged_is_reported_without_a_number(
    tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan = np.full_like(vector("perceptron", 0), np.nan)
    monkeypatch.setitem(globals(), "vector", lambda model, seed: nan)
    write(tmp_path, 10, boundary=1, final=True)
    main(config_of(shards), tmp_path)
    (event,) = events(tmp_path, "eval")
    assert event["loss"] is None
    assert summarise([event_from_json(event)], read_pushes(tmp_path / "none"))["final_loss"] is None
