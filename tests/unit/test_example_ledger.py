"""The example ledger: every example of an accepted gradient once, with its loss, whatever was killed."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.core.errors import UsageError
from tests.support.configs import make_config
from tests.support.samplers import make_sampler
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import QUIET, RESUME, final
from trainer import Result
from trainer.checkpoints.prune import WAITING, prune
from trainer.checkpoints.read import versions
from trainer.checkpoints.state import folder_of
from trainer.coordination.orders import Record, RowLosses, StepMeasurements
from trainer.data.augment import normalise
from trainer.data.example_table import table_warning
from trainer.data.loading import load_worker
from trainer.data.mean_image import subtracted_mean
from trainer.data.opening import open_shards
from trainer.models.build import build
from trainer.runlog import example_ledger
from trainer.runlog.example_ledger import ExampleLedger
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.failures import parse_failures
from trainer.simulation.profiles import parse_profile

ROWS = 0xAB  # the fingerprint of the set
PAIRS: list[dict[str, Any]] = [{"protocol": "asp"}, {"exchange": "d-psgd"}, {"exchange": "all-reduce"}]
FULL: list[dict[str, Any]] = [{"protocol": "bsp"}, {"protocol": "k-bsp", "k": 2}, {"protocol": "k-batch-bsp", "k": 2}]
FULL += [{"exchange": "strategy-switch", "alpha": 0.5}]
every_pair = pytest.mark.parametrize(
    "pair",
    [*PAIRS, *(pytest.param(pair, marks=pytest.mark.full) for pair in FULL)],
    ids=lambda pair: next(iter(pair.values())),
)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of 48 rows: an epoch is a pass."""
    parts = [rows_of(48, seed, first_id) for seed, first_id in ((2, 0), (3, 100), (4, 200))]
    folder = write_shards(tmp_path_factory.mktemp("set"), parts, EVAL_ROWS)
    manifest = json.loads((folder / "manifest.json").read_text())
    rows = {"uri": "rows", "format": "npz", "files": 1, "bytes": 1, "rows": 144, "fingerprint": f"144-{ROWS:016x}"}
    (folder / "manifest.json").write_text(json.dumps(manifest | {"input": rows}))
    return folder


def run(shards: Path, output: Path, options: Any = QUIET, **values: Any) -> Result:
    common: dict[str, Any] = {"model": "logistic", "batch_size": 24, "threads": 1, "epochs": 3}
    common |= {"example_ledger": True, "weight_decay": 0.0, "augment": False}
    settings = {"profile": parse_profile("lognormal:0.5")} | {
        key: values.pop(key) for key in ("failures", "compute", "workers") if key in values
    }
    return simulate(make_config(shards, output, **common | values), SimulationSettings(**settings), options)


def read(run: Path) -> pd.DataFrame:
    """The ledger of a run, in the order of its files."""
    files = sorted((run / "examples").iterdir())
    return pd.concat([pq.read_table(file).to_pandas() for file in files], ignore_index=True)


def test_the_watchdog_learns_of_each_file_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker reads the ledger after a roll-back, which may take longer than a stall may."""
    ledger = ExampleLedger(tmp_path / "examples", 7)
    for version in range(3):
        ledger.add([record(version, 2)], 1.0)
        ledger.write(version)
    kicks: list[int] = []
    monkeypatch.setattr(example_ledger, "kick", lambda: kicks.append(1))
    assert len(list(example_ledger.recorded_losses(tmp_path, 2))) == len(kicks) == 3


def assert_ledger_fits_log(done: Result) -> None:
    """Check the ledger against pushes.csv, which has means and counts of the same examples, in the same order."""
    pushes = done.pushes()
    pushes = pushes[pushes["accepted"] == 1]
    assert isinstance(done.output, Path)
    ledger = read(done.output)
    assert len(ledger) == pushes["examples"].sum() == done.examples
    number = np.repeat(np.arange(len(pushes)), pushes["examples"])
    means = ledger.groupby(number)["loss"].mean().to_numpy()
    np.testing.assert_allclose(means, pushes["loss"].to_numpy(), rtol=1e-5)
    assert ledger.groupby(number)["correct"].sum().tolist() == pushes["correct"].tolist()


@pytest.mark.slow
@every_pair
def test_the_ledger_has_the_examples_of_the_log(pair: dict[str, Any], shards: Path, tmp_path: Path) -> None:
    """Through the death of a worker and of all servers; without it the parameters have the same bits."""
    calm = run(shards, tmp_path / "calm", **pair)
    assert_ledger_fits_log(calm)
    plain = run(shards, tmp_path / "plain", example_ledger=False, **pair)
    assert final(plain).tobytes() == final(calm).tobytes()
    assert not (tmp_path / "plain" / "examples").exists()
    failures = parse_failures("worker:1@0.45+0.2,server@1.1+0.2")
    assert_ledger_fits_log(run(shards, tmp_path / "hurt", failures=failures, checkpoint_every_s=0.3, **pair))


@pytest.mark.parametrize("pair", [{"protocol": "bsp"}, {"exchange": "all-reduce"}], ids=["bsp", "all-reduce"])
def test_every_row_is_there_once_an_epoch(pair: dict[str, Any], shards: Path, tmp_path: Path) -> None:
    run(shards, tmp_path / "run", **pair)
    table = make_sampler("curriculum", str(tmp_path / "run" / "examples"))
    assert not table_warning(table, ROWS), "its files name the rows of the set"
    assert f"these rows have {ROWS + 1:016x}: losses are given" in table_warning(table, ROWS + 1)
    ledger = read(tmp_path / "run")
    ids = sorted(int(each) for worker in range(3) for each in load_worker(open_shards(str(shards)), worker).ids)
    for epoch in (1, 2, 3):
        assert sorted(ledger[ledger["epoch"] == epoch]["id"].tolist()) == ids


def test_a_loss_is_that_of_its_image_at_the_parameters(shards: Path, tmp_path: Path) -> None:
    """At the first parameters, each loss computed from the row's image alone."""
    run(shards, tmp_path / "run", protocol="bsp", steps=1, epochs=None)
    opened = open_shards(str(shards))
    network = build(make_config(model="logistic").model, opened.inputs, 0)
    images: dict[int, tuple[np.ndarray, int]] = {}
    for part in (load_worker(opened, worker) for worker in range(3)):
        pairs = zip(np.asarray(part.images_NCHW), part.labels.tolist(), strict=True)
        images |= dict(zip(part.ids.tolist(), pairs, strict=True))
    for row in read(tmp_path / "run").itertuples():
        image, label = images[int(row.id)]
        outputs = network.model(torch.from_numpy(normalise(image[None], subtracted_mean(opened))))
        expected = -torch.log_softmax(outputs, 1)[0, label].detach()
        assert row.loss == pytest.approx(float(expected), rel=1e-5)
        assert row.correct == (int(outputs.argmax()) == label)


@pytest.mark.slow
@pytest.mark.parametrize("pair", [{"protocol": "bsp"}, {"exchange": "d-psgd"}], ids=["bsp", "d-psgd"])
def test_a_resumed_run_has_the_ledger_of_the_whole_one(
    pair: dict[str, Any], shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From every checkpoint, with what a kill after a later checkpoint's ledger, and before its state, leaves."""
    monkeypatch.setattr(prune, "__defaults__", (1000, WAITING))
    run(shards, tmp_path / "whole", checkpoint_every_s=0.3, **pair)
    found = versions(tmp_path / "whole" / "checkpoints")
    for version in found[:-1]:
        part = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"part-{version}"))
        (part / "result.json").unlink()
        for later in found:
            if later > version:
                shutil.rmtree(folder_of(part / "checkpoints", later))
        draft = part / "examples" / f".{version + 1:08d}-7.parquet.58f3f2b4.tmp"
        draft.write_bytes(b"PAR1")
        again = run(shards, part, RESUME, checkpoint_every_s=0.3, **pair)
        assert_ledger_fits_log(again)
        pd.testing.assert_frame_equal(read(part), read(tmp_path / "whole"))
        assert not draft.exists()


def record(version: int, count: int, *, accepted: bool = True) -> Record:
    rows = RowLosses(np.arange(count) + 10 * version, np.zeros(count, np.float32), np.zeros(count, np.bool_))
    return Record(version, 0, 0, 0, 0, StepMeasurements(count, 0.0, 0, 0.1, row_losses=rows), accepted)


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_failed_write_loses_no_example(is_stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next checkpoint has them, once. Refused gradients and later versions are not written."""
    ledger = ExampleLedger(tmp_path, 7)
    ledger.add([record(1, 2), record(1, 3, accepted=False), record(2, 1)], 0.5)

    def fail(path: Path, data: bytes) -> NoReturn:
        if is_stored:  # and only the answer was lost
            path.write_bytes(data)
        raise OSError("full")

    with monkeypatch.context() as patch:
        patch.setattr(example_ledger, "write_whole", fail)
        with pytest.raises(OSError, match="full"):
            ledger.write(1)
    ledger.add([record(3, 1)], 1.25)
    ledger.write(2)
    assert [path.name for path in tmp_path.iterdir()] == ["00000002-7.parquet"]
    table = pq.read_table(tmp_path / "00000002-7.parquet")
    assert table.to_pydict() == {"id": [10, 11, 20], "epoch": [1] * 3, "loss": [0.0] * 3, "correct": [False] * 3}
    ledger.discard()
    ledger.write(3)
    assert len(list(tmp_path.iterdir())) == 1, "the run has rolled back"


def test_a_file_has_seven_bytes_per_example(tmp_path: Path) -> None:
    """Pack the ids of 60,000 rows in random order into 17 bits or so; a loss has 4 bytes, whose bits are random."""
    rng = np.random.default_rng(0)
    ids, losses, hits = rng.permutation(60_000), rng.random(60_000, np.float32), rng.random(60_000) < 0.5
    ledger = ExampleLedger(tmp_path, 7)
    for version, places in enumerate(np.array_split(np.arange(60_000), 400), 1):
        measured = StepMeasurements(150, 0.0, 0, 0.1, row_losses=RowLosses(ids[places], losses[places], hits[places]))
        ledger.add([Record(version, 0, version, 0, 0, measured, accepted=True)], 1.0)
    ledger.write(400)
    [path] = tmp_path.iterdir()
    assert path.stat().st_size < 7 * 60_000
    table = pq.read_table(path)
    for name, column in (("id", ids), ("loss", losses), ("correct", hits)):
        assert np.array_equal(table[name].to_numpy(), column)


def test_examples_are_added_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow store does not hold up the thread that serves the workers."""
    ledger = ExampleLedger(tmp_path, 7)
    ledger.add([record(1, 2)], 0.5)

    def write(*_: object) -> None:
        adding = threading.Thread(target=ledger.add, args=([record(2, 1)], 1.0), daemon=True)
        adding.start()
        adding.join(5)
        assert not adding.is_alive(), "it waits for the write"

    with monkeypatch.context() as patch:
        patch.setattr(example_ledger, "write_whole", write)
        ledger.write(1)
    ledger.write(2)
    assert pq.read_table(tmp_path / "00000002-7.parquet").column("id").to_pylist() == [20]


def test_a_ledger_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--example-ledger keeps losses of rows, --compute none has none"):
        run("", tmp_path / "run", compute="none", workers=2)  # type: ignore[arg-type]
