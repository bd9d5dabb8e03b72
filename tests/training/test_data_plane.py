"""Samplers and the example ledger on real processes, killed and resumed, beside the same run in virtual time."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from tests.support.configs import make_config
from tests.support.divisions import DividedRun, assert_divided_by_losses
from tests.support.slow_model import SLOW
from tests.support.trainer_runs import RunFolder, Training, train_here, until
from tests.support.trainer_sets import copy_of
from tests.support.virtual_runs import QUIET, final
from trainer.checkpoints.read import newest
from trainer.home.place import Place, entries, place_of
from trainer.runlog.result import read_result
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.replay import replay

pytestmark = pytest.mark.full
COMMON = ("--model", "logistic", "--batch-size", 24, "--learning-rate", 0.02, "--threads", 1, "--no-report", "--quiet")
CASES = [
    ("representative", "bsp", ""),
    ("data-aware", "bsp", ""),
    ("recency", "", "all-reduce"),
    ("balanced", "", "d-psgd"),
]


def read(home: Place) -> pd.DataFrame:
    """The example ledger of a run on any store."""
    names = [entry.name for entry in entries(home / "examples")]
    # The last files that a killed process wrote may lie there as drafts until the run is resumed.
    files = [home / "examples" / name for name in names if name.endswith(".parquet")]
    return pd.concat([pq.read_table(io.BytesIO(file.read_bytes())).to_pandas() for file in files], ignore_index=True)


def assert_ledger_fits_log(ledger: pd.DataFrame, pushes: pd.DataFrame) -> None:
    """Check the ledger against the means and counts of pushes.csv, whose loss includes the L2 term."""
    pushes = pushes[pushes["accepted"] == 1]
    assert len(ledger) == pushes["examples"].sum()
    number = np.repeat(np.arange(len(pushes)), pushes["examples"])
    assert ledger.groupby(number)["correct"].sum().tolist() == pushes["correct"].tolist()
    gaps = pushes["loss"].to_numpy() - ledger.groupby(number)["loss"].mean().to_numpy()
    assert (gaps > -1e-4).all()


@pytest.mark.parametrize(("sampler", "protocol", "exchange"), CASES, ids=lambda word: word)
def test_real_processes_have_the_bits_of_virtual_time(
    sampler: str, protocol: str, exchange: str, shards: Path, tmp_path: Path
) -> None:
    words: dict[str, Any] = {"protocol": protocol, "exchange": exchange}
    chosen = {key: value for key, value in words.items() if value}
    flags = [word for key, value in chosen.items() for word in (f"--{key}", value)]
    real = train_here(shards, tmp_path / "real", *COMMON, "--sampling", sampler, "--steps", 70, *flags)
    common: dict[str, Any] = {"model": "logistic", "batch_size": 24, "learning_rate": 0.02, "threads": 1}
    config = make_config(shards, tmp_path / "virtual", sampling=sampler, steps=70, **common, **chosen)
    np.testing.assert_array_equal(real.vector(), final(simulate(config, SimulationSettings(), QUIET)))


def test_validation_losses_are_those_of_virtual_time(shards: Path, tmp_path: Path) -> None:
    """Each worker reads its part of the evaluation rows, here from memory-mapped files."""
    own: dict[str, Any] = {"sampling": "data-aware", "weakness": "validation-loss", "protocol": "bsp", "steps": 70}
    flags = [word for key, value in own.items() for word in (f"--{key}", value)]
    real = train_here(shards, tmp_path / "real", *COMMON, *flags, "--row-storage", "mapped")
    common: dict[str, Any] = {"model": "logistic", "batch_size": 24, "learning_rate": 0.02, "threads": 1}
    config = make_config(shards, tmp_path / "virtual", **common, **own)
    np.testing.assert_array_equal(real.vector(), final(simulate(config, SimulationSettings(), QUIET)))


def test_a_killed_repartitioned_run_has_its_bits(shards: Path, tmp_path: Path, runs: list[Training]) -> None:
    """Kill a worker in an interval: the other phases follow from the losses that the checkpoint has."""
    settings: dict[str, Any] = {"repartition": "importance", "warmup_epochs": 2, "ignore_epochs": 0, "interval": 1}
    settings |= {"exchange": "all-reduce", "steps": 600, "importance": "variance", "heuristic": "blocks"}
    words = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", value)]
    run = Training(shards, tmp_path / "run", *COMMON, *words, "--checkpoint-every-s", 0.5)
    runs.append(run)
    run.wait_for_updates(100)
    run.send("worker-1")
    assert run.wait() == 0, run.said()
    common: dict[str, Any] = {"model": "logistic", "batch_size": 24, "learning_rate": 0.02, "threads": 1}
    config = make_config(shards, tmp_path / "virtual", protocol="bsp", **common, **settings)
    expected = final(simulate(config, SimulationSettings(), QUIET))
    np.testing.assert_array_equal(RunFolder(tmp_path / "run").vector(), expected)


def test_a_killed_asp_run_divides_rows_by_their_losses(shards: Path, tmp_path: Path, runs: list[Training]) -> None:
    """Kill a worker in an interval: the others wait for its losses where the next one begins."""
    about = DividedRun(rows=720, workers=3, batch=24, steps=600, warmup_epochs=2, ignore_epochs=0, interval=1)
    settings = {name: value for name, value in about.flags.items() if name != "batch_size"}
    words = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", value)]
    own = ("--protocol", "asp", "--servers", 2, "--example-ledger", "--checkpoint-every-s", 0.5)
    run = Training(shards, tmp_path / "run", *COMMON, *words, *own)
    runs.append(run)
    run.wait_for_updates(250)
    run.send("worker-1")
    assert run.wait() == 0, run.said()
    assert run.events("restart")
    assert_divided_by_losses(tmp_path / "run", about)
    assert replay(tmp_path / "run").is_equal


def test_kills_lose_no_example_and_repeat_none(shards: Path, tmp_path: Path, runs: list[Training]) -> None:
    """A worker, a server, then every process of an asynchronous run that reads its loss table."""
    own = (*SLOW, "--protocol", "asp", "--servers", 2, "--sampling", "data-aware", "--example-ledger")
    flags = (*COMMON, *own, "--checkpoint-every-s", 0.5)
    run = Training(shards, tmp_path / "run", *flags, "--steps", 100_000)
    runs.append(run)
    run.wait_for_updates(100)
    run.send("worker-1")
    run.wait_for_updates(run.updates() + 200)
    run.send("server-1")
    generation = run.generation()
    while not run.trains_after(generation):
        run.wait_for_updates(1)
    run.wait_for_updates(run.updates() + 200)
    run.end()
    steps = (run.updates() // 3) + 100
    resumed = train_here(shards, tmp_path / "run", *flags, "--steps", steps, "--resume")
    assert_ledger_fits_log(read(tmp_path / "run"), resumed.pushes())


def test_a_killed_run_with_mapped_rows_has_its_bits(shards: Path, tmp_path: Path, runs: list[Training]) -> None:
    """A worker, then every process, whose files the resumed run uses again; at the end they are gone."""
    common = (*COMMON, "--protocol", "bsp", "--row-storage", "mapped", "--checkpoint-every-s", 0.5)
    run = Training(shards, tmp_path / "run", *common, "--steps", 600)
    runs.append(run)
    run.wait_for_updates(50)
    run.send("worker-1")
    run.wait_for_updates(run.updates() + 50)
    run.end()
    (folder,) = (tmp_path / "run" / "rows").iterdir()
    files = {path: path.stat().st_ino for path in folder.iterdir()}
    assert len(files) == 4, "three shards and the evaluation rows"
    resumed = Training(shards, tmp_path / "run", *common, "--steps", 600, "--resume")
    runs.append(resumed)
    until(lambda: resumed.process.poll() is not None or resumed.pid("worker-2"), "the resumed run has workers")
    assert resumed.process.poll() is not None or {path: path.stat().st_ino for path in folder.iterdir()} == files
    assert resumed.wait() == 0, resumed.said()
    assert not (tmp_path / "run" / "rows").exists()
    values: dict[str, Any] = {"model": "logistic", "batch_size": 24, "learning_rate": 0.02, "threads": 1, "steps": 600}
    config = make_config(shards, tmp_path / "virtual", protocol="bsp", row_storage="memory", **values)
    virtual = final(simulate(config, SimulationSettings(), QUIET))
    np.testing.assert_array_equal(RunFolder(tmp_path / "run").vector(), virtual)


@pytest.mark.parametrize("place", ["hdfs"], indirect=True)
def test_a_ledger_is_on_every_store(place: str, shards: Path, runs: list[Training]) -> None:
    run = Training(shards, place, *COMMON, "--protocol", "bsp", "--epochs", 2, "--example-ledger")  # type: ignore[arg-type]
    runs.append(run)
    assert run.wait() == 0, run.said()
    home = place_of(place)
    ledger = read(home)
    assert_ledger_fits_log(ledger, read_result(home).pushes())
    assert ledger["epoch"].value_counts().to_dict() == {1: 720, 2: 720}


def test_a_killed_mixture_resumes_with_other_shares(
    sets: dict[int, Path], tmp_path: Path, runs: list[Training]
) -> None:
    """Two sets of the same rows, on real processes; each worker has the old shares up to a step, then the new ones."""
    copied = copy_of(sets[3], tmp_path / "copy")
    own = (*SLOW, "--protocol", "asp", "--example-ledger", "--checkpoint-every-s", 0.5)
    flags = (*COMMON, *own, "--shards", sets[3], copied)
    run = Training(sets[3], tmp_path / "run", *flags, "--mix", "3,1", "--steps", 100_000)
    runs.append(run)
    # From its first checkpoint alone, the run would have no steps with the old shares.
    until(lambda: newest(tmp_path / "run" / "checkpoints"), "a checkpoint after the first")
    run.wait_for_updates(200)
    run.end()
    steps = run.updates() // 3 + 100
    resumed = train_here(sets[3], tmp_path / "run", *flags, "--mix", "1,1", "--steps", steps, "--resume")
    ledger, pushes = read(tmp_path / "run"), resumed.pushes()
    assert_ledger_fits_log(ledger, pushes)
    history = json.loads((tmp_path / "run" / "config.json").read_text())["config"]["data"]["mix"]
    clock = int(history.removeprefix("3,1;").removesuffix(":1,1"))
    clocks = np.repeat(pushes["clock"].to_numpy(), pushes["examples"])
    second = ledger["id"].to_numpy() >> 40
    for before, share in ((clocks < clock, 0.25), (clocks >= clock, 0.5)):
        assert abs(second[before].sum() - share * before.sum()) < 3, "each of three workers is exact within one"
    parts = resumed.result()["mixture"]
    assert [part["first_step"] for part in parts] == [0, clock]
    for part, is_part in zip(parts, (clocks < clock, clocks >= clock), strict=True):
        assert [each["rows"] for each in part["sets"]] == np.bincount(second[is_part], minlength=2).tolist()
