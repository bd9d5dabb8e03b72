"""Short real runs, one a way of training that no other test takes: each option is held against what it promises."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.clusters import Hdfs
from tests.support.configs import make_config
from tests.support.trainer_runs import ROOT
from trainer import Options, Result, train
from trainer.checkpoints.read import newest, read_state, read_vector
from trainer.data.loading import load_eval
from trainer.data.mean_image import subtracted_mean
from trainer.data.opening import open_shards
from trainer.evaluation.evaluator import BATCH, TRAIN_ROWS
from trainer.evaluation.measure import evaluate, penalty
from trainer.evaluation.recalibration import batches, recalibrate, sample_rows
from trainer.models import ModelInput
from trainer.models.build import build
from trainer.models.flat_vector import FlatModel
from trainer.run_files import CHECKPOINTS, TENSORBOARD
from trainer.runlog.read import evaluations

WORKERS, STEPS = 3, 4
COMMON: dict[str, Any] = {"batch_size": 24, "learning_rate": 0.02, "threads": 1, "device": "cpu", "steps": STEPS}


@pytest.fixture(scope="module")
def runs(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Train once for each set of values, however many tests ask for it."""
    root = tmp_path_factory.mktemp("runs")
    done: dict[str, Result] = {}

    def run(**values: Any) -> Result:
        key = repr(sorted(values.items()))
        if key not in done:
            asked = {"model": "cnn", "protocol": "bsp"} | COMMON | values
            config = make_config(shards, root / f"run-{len(done)}", **asked)
            result = train(config, Options(silent=True, report=False, tensorboard=values == {"norm": "group"}))
            assert result is not None
            done[key] = result
        return done[key]

    yield run
    shutil.rmtree(root)


def vector(result: Result) -> tuple[npt.NDArray[np.float32], int]:
    """The run's last checkpoint: parameters, then statistics; and how many parameters."""
    root = result.output / CHECKPOINTS
    version = newest(root, verify=True)
    assert version is not None
    return read_vector(root, version), read_state(root, version).num_parameters


@pytest.mark.full
def test_running_statistics_change_nothing_that_is_trained(runs: Any) -> None:
    """Gradients are taken with a mini-batch's own statistics, so all three ways end at the same parameters, bit for bit."""
    ways = {way: vector(runs(model="resnet20", batch_norm=way)) for way in ("ema", "last", "recalibrate")}
    parameters = {way: values[:count] for way, (values, count) in ways.items()}
    statistics = {way: values[count:] for way, (values, count) in ways.items()}
    for way in ("last", "recalibrate"):
        np.testing.assert_array_equal(parameters[way], parameters["ema"])
    assert len(statistics["ema"]) > 0
    assert not np.array_equal(statistics["last"], statistics["ema"])


@pytest.mark.full
def test_shards_without_a_manifest_train_as_their_set(runs: Any, shards: Path, tmp_path: Path) -> None:
    """The folders of the workers alone, copied, end at the same parameters, bit for bit; one line says what they are."""
    folders = [tmp_path / f"worker={worker:03d}" for worker in range(WORKERS)]
    for folder in folders:
        shutil.copytree(shards / folder.name, folder)
    command = [sys.executable, "-m", "trainer", "--shards", *map(str, folders), "--output", str(tmp_path / "run")]
    command += ["--model", "cnn", "--protocol", "bsp"]
    for name, value in COMMON.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = (
        f"{WORKERS} shards without a manifest below {tmp_path}: 720 rows of 3x8x8 uint8 in 10 classes, fingerprint 720-"
    )
    assert done.stdout.count(line) == 1
    root = tmp_path / "run" / CHECKPOINTS
    version = newest(root, verify=True)
    assert version is not None
    values, count = vector(runs())
    np.testing.assert_array_equal(read_vector(root, version)[:count], values[:count])


def test_a_recalibrated_model_has_statistics_of_training_rows(runs: Any, shards: Path) -> None:
    result = runs(batch_norm="recalibrate")
    values, _ = vector(result)
    found = open_shards(str(shards))
    built = build(make_config(model="cnn").model, found.inputs, seed=0)
    flat = FlatModel(built.model)
    import torch

    flat.attach(torch.from_numpy(values))
    recalibrate(flat.model, batches(sample_rows(found, TRAIN_ROWS, 0), subtracted_mean(found), BATCH))
    rows = load_eval(found)
    assert rows is not None
    loss, accuracy, *_ = evaluate(flat.model, built.task, batches(rows, subtracted_mean(found), BATCH))
    assert result.final_accuracy == pytest.approx(accuracy)
    assert result.final_loss == pytest.approx(loss + penalty(flat.model, 2e-4), rel=1e-5)


@pytest.mark.full
def test_group_normalisation_has_no_statistics_and_trains(runs: Any) -> None:
    result = runs(norm="group")
    values, count = vector(result)
    assert (result.cause, len(values)) == ("finished", count)
    start = build(make_config(model="cnn", norm="group").model, ModelInput((3, 8, 8), 10), seed=0)
    assert not np.array_equal(values, FlatModel(start.model).read())


def test_exact_shares_use_the_whole_mini_batch(runs: Any) -> None:
    result = runs(batch_size=25, worker_batch="exact")
    examples = result.pushes().groupby("worker")["examples"].unique()
    assert [list(each) for each in examples] == [[9], [8], [8]]
    assert result.examples == 25 * STEPS


@pytest.mark.full
def test_with_local_stop_every_worker_does_exactly_its_own_steps(runs: Any) -> None:
    result = runs(protocol="asp", stop="local")
    assert list(result.pushes().groupby("worker")["clock"].count()) == [STEPS] * WORKERS


@pytest.mark.full
def test_sockets_and_shared_memory_end_with_the_same_bits(runs: Any) -> None:
    sockets, memory = runs(same_host="socket"), runs(batch_norm="ema")
    np.testing.assert_array_equal(vector(sockets)[0], vector(memory)[0])


def test_tensorboard_reads_what_the_log_holds(runs: Any) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = runs(norm="group")
    written = EventAccumulator(str(result.output / TENSORBOARD))
    written.Reload()
    evaluated = evaluations(result.events())
    curve = written.Scalars("evaluation/accuracy")
    assert [point.value for point in curve] == pytest.approx([event.accuracy for event in evaluated])


def test_a_finished_run_returns_its_written_result(runs: Any, shards: Path) -> None:
    result = runs(norm="group")
    again = train(
        make_config(shards, result.output, model="cnn", protocol="bsp", norm="group", **COMMON), Options(silent=True)
    )
    assert again == result
    assert (result.num_workers, result.num_servers, result.updates, result.cause) == (WORKERS, 1, STEPS, "finished")
    assert set(result.weights()) >= {"head.0.weight", "head.0.bias"}


SCRIPT = """
import sys
from trainer import Config, Data, Options, RunSpec, train
result = train(Config(Data(sys.argv[1], batch_size=24), RunSpec(sys.argv[2], steps=2)), Options(silent=True, report=False))
print(result.model, result.protocol, result.updates)
"""


def test_a_script_without_a_guard_may_train(shards: Path, tmp_path: Path) -> None:
    """Processes must not import the program that started them, which would train again.

    They import nothing but their network: all else is loaded in the fork server, once."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(shards), str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["resnet20", "asp", "6"]), done.stderr
    for log in (tmp_path / "run" / "logs").glob("[we]*-0.log"):
        imported = re.findall(r"^import time: .*\| +(\S+)$", log.read_text(), re.MULTILINE)
        assert imported
        assert [name for name in imported if not name.startswith("trainer.models.networks")] == [], log


@pytest.mark.full
def test_a_run_reads_hdfs_natively_and_through_a_gateway(hdfs: Hdfs, shards: Path, runs: Any, tmp_path: Path) -> None:
    """Wherever the shards are read from, a run ends with the same bits."""
    expected = vector(runs(batch_norm="ema"))[0]
    hdfs.client().upload("/train-ways", str(shards))
    for number, uri in enumerate((f"{hdfs.uri}/train-ways", f"{hdfs.web_uri}/train-ways")):
        config = make_config(uri, tmp_path / f"run-{number}", model="cnn", protocol="bsp", **COMMON)
        result = train(config, Options(silent=True, report=False))
        assert result is not None
        np.testing.assert_array_equal(vector(result)[0], expected)
