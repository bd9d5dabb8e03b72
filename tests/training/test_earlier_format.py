"""A shard set and a training run that an earlier version wrote, read by this one.

``tests/support/earlier_format.tar.xz`` has a folder of 48 rows of 1x4x4, their set for two workers and a bsp run of 6 steps,
as commit 67b790b wrote them below /data/earlier. When the format changes, a second archive joins it; this one stays."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.sql import SparkSession

import pipeline
from pipeline.core.errors import DataError
from pipeline.upkeep.verify import verify
from tests.support.trainer_runs import RunFolder, train_here
from trainer import load, torch_dataset
from trainer.comparison.__main__ import main as compare_runs
from trainer.report.page import write_report
from trainer.runlog.result import read_result

ARCHIVE = Path(__file__).parents[1] / "support" / "earlier_format.tar.xz"
BEFORE = "/data/earlier"  # where the files were written
FLAGS = ("--model", "logistic", "--protocol", "bsp", "--batch-size", 8, "--threads", 1, "--no-report", "--quiet")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The folder with ``in``, ``held``, ``set`` and ``run``. The run names the places that they have here."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "earlier"
    for name in ("config.json", "metrics.jsonl"):
        file = folder / "run" / name
        file.write_text(file.read_text().replace(BEFORE, str(folder)))
    return folder


def rows_by_id(folder: Path) -> dict[int, bytes]:
    """The images of all shards by id, as pyarrow alone reads them."""
    tables = [pq.read_table(file) for file in sorted(folder.glob("worker=*/*.parquet"))]
    return {row["id"]: row["image"] for table in tables for row in table.select(["id", "image"]).to_pylist()}


def test_an_earlier_set_is_verified_and_read(earlier: Path) -> None:
    shards = pipeline.open_shards(str(earlier / "set"))
    assert (shards.manifest.strategy, shards.manifest.rows, shards.num_workers) == ("stratified", 48, 2)
    assert not verify(shards, deep=True)
    source = pq.read_table(earlier / "in" / "a.parquet")["image"].to_pylist()
    assert rows_by_id(earlier / "set") == dict(enumerate(source))
    image, label = torch_dataset(str(earlier / "set"), worker=1)[0]
    assert (tuple(image.shape), image.dtype, int(label) in (0, 1)) == ((1, 4, 4), torch.uint8, True)


def test_an_earlier_run_has_a_result_and_a_report(earlier: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = read_result(earlier / "run")
    assert (result.cause, result.updates, result.final_accuracy) == ("finished", 6, 1.0)
    assert write_report(earlier / "run") == earlier / "run" / "report.html"
    assert compare_runs([str(earlier / "run")]) == 0
    assert " 6 " in capsys.readouterr().out
    # Model files had no description of the network then: one line says so.
    with pytest.raises(DataError, match=r"is not a model of a run.*train again to write it"):
        load(str(earlier / "run"))


@pytest.mark.full
def test_an_earlier_run_is_resumed(earlier: Path) -> None:
    before = (earlier / "run" / "pushes.csv").read_text()
    run = train_here(earlier / "set", earlier / "run", *FLAGS, "--steps", 12, "--resume")
    assert (run.result()["updates"], run.result()["final_accuracy"]) == (12, 1.0)
    assert (earlier / "run" / "pushes.csv").read_text().startswith(before.rstrip("\n"))
    assert [event["resumed_from"] for event in run.events("start")] == [None, 6]
    held = pq.read_table(earlier / "held" / "a.parquet").to_pydict()
    images = torch.from_numpy(np.stack([np.frombuffer(image, np.uint8).reshape(1, 4, 4) for image in held["image"]]))
    outputs = load(str(earlier / "run"))(images)
    assert outputs.argmax(1).tolist() == held["label"]


@pytest.mark.full
def test_a_new_run_trains_on_an_earlier_set(earlier: Path, tmp_path: Path) -> None:
    run = train_here(earlier / "set", tmp_path / "new", *FLAGS, "--steps", 6)
    assert run.result()["final_accuracy"] == 1.0
    earlier_events = RunFolder(earlier / "run").events("pass")
    assert [event["fingerprint"] for event in run.events("pass")] == [event["fingerprint"] for event in earlier_events]


@pytest.mark.full
def test_a_job_finds_its_earlier_set_and_deals_it_anew(spark: SparkSession, earlier: Path, tmp_path: Path) -> None:
    """After an upgrade, a scheduled job does not write what is there; three workers get the rows of two."""
    manifest = earlier / "set" / "manifest.json"
    before = manifest.read_bytes()
    common = {"image_shape": (1, 4, 4), "quiet": True, "report": False}
    places = {"input": str(earlier / "in"), "eval_input": str(earlier / "held"), "output": str(earlier / "set")}
    again = pipeline.shard(spark, **places, strategy="stratified", num_workers=2, **common)  # type: ignore[arg-type]
    assert not again.fresh
    assert manifest.read_bytes() == before
    output = str(tmp_path / "three")
    pipeline.reshard(spark, input=str(earlier / "set"), output=output, num_workers=3, quiet=True, report=False)
    assert rows_by_id(Path(output)) == rows_by_id(earlier / "set")
    assert json.loads((Path(output) / "manifest.json").read_text())["rows"] == 48
