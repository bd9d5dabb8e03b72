"""Repeated images and leaked evaluation rows from the input to manifest, inspect and report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

import pipeline
from pipeline.core.shardset.parts import Repeats
from pipeline.input.dataset import ranges
from pipeline.spark import images as images_module
from pipeline.upkeep.contents import describe
from tests.conftest import make_rows, write_binary

DATA: dict[str, Any] = {"format": "cifar10-binary", "image_shape": (3, 8, 8), "quiet": True}


@pytest.mark.usefixtures("undrawn")
def test_repeats_are_in_manifest_inspect_and_report(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the scan is divided among tasks and buckets, and again after resharding."""
    labels, images = make_rows(400, pixels=192)
    images[[90, 350]] = images[7]
    labels[90] = (labels[7] + 1) % 10  # the label does not matter
    images[399] = images[398]
    folder = write_binary(tmp_path / "train", labels, images, files=3)
    beside = write_binary(tmp_path / "test", labels[:30], np.r_[make_rows(28, seed=9, pixels=192)[1], images[[3, 90]]])
    expected = Repeats(3, 2, [[7, 90], [7, 350], [398, 399]], [[3, 28], [7, 29]])
    for pieces in (1, 4):
        monkeypatch.setattr(images_module.Images, "pieces", lambda self, n=pieces: ranges(0, self.dataset.rows, n))
        monkeypatch.setattr("pipeline.input.repeats.BUCKET_ROWS", 500 // pieces)
        output = str(tmp_path / f"o{pieces}")
        shards = pipeline.shard(
            spark,
            input=str(folder),
            eval_input=str(beside),
            output=output,
            strategy="random",
            num_workers=2,
            report=pieces == 1,
            **DATA,
        ).shards
        assert shards.manifest.repeats == expected
    assert ("note", "evaluation rows with the image of a training row: 2, such as 28 (row 3)") in describe(shards)
    findings = json.loads((tmp_path / "o1" / "quality.json").read_text())["verdict"]
    assert "Rows with the image of an earlier row: 3, such as 90 (row 7)." in [each["text"] for each in findings]
    moved = pipeline.reshard(
        spark, input=output, output=str(tmp_path / "moved"), num_workers=3, report=False, quiet=True
    ).shards
    assert moved.manifest.repeats == expected
