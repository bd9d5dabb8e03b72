"""The same images through several formats give the same shards, byte for byte, and keep the names of their classes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

import pipeline
from pipeline.core.errors import DataError
from pipeline.core.shardset.manifest import ShardSet
from tests.support.tfrecords import example, tfrecord

NAMES = ("ant", "bee", "cat")
LABELS = np.repeat(np.arange(3), 20)
IMAGES = np.random.default_rng(3).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


def make_folder(path: Path) -> None:
    for row, (label, image) in enumerate(zip(LABELS, IMAGES, strict=True)):
        file = path / NAMES[label] / f"{row:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(png(image))


def make_tar(path: Path) -> None:
    path.mkdir()
    with tarfile.open(path / "a.tar", "w") as archive:
        for row, (label, image) in enumerate(zip(LABELS, IMAGES, strict=True)):
            for suffix, data in (("png", png(image)), ("cls", NAMES[label].encode())):
                info = tarfile.TarInfo(f"{row:03d}.{suffix}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


def make_mat(path: Path) -> None:
    path.mkdir()
    savemat(path / "a.mat", {"X": np.moveaxis(IMAGES, 0, -1), "y": LABELS[:, None]})


def digests(shards: ShardSet) -> list[tuple[int, str]]:
    return [(file.rows, file.sha256) for file in shards.files()]


@pytest.mark.parametrize("make", [make_folder, make_tar])
def test_formats_give_the_same_shards(make: Any, tmp_path: Path, spark: Any) -> None:
    make(tmp_path / "in")
    make_mat(tmp_path / "mat")
    sets = [
        pipeline.shard(
            spark, input=str(tmp_path / name), output=str(tmp_path / f"{name}-out"), strategy="stratified", num_workers=2,
            report=make is make_folder and name == "in", quiet=True,
        )
        for name in ("in", "mat")
    ]  # fmt: skip
    named, numbered = (result.shards for result in sets)
    assert digests(named) == digests(numbered)
    assert named.manifest.labels.class_names == list(NAMES)
    assert numbered.manifest.labels.class_names == []
    if sets[0].report:
        page = Path(sets[0].report).read_text()
        assert "3: 0 ant, 1 bee, 2 cat" in page
        made = pipeline.reshard(spark, input=named.uri, output=str(tmp_path / "re"), num_workers=3, report=False)
        assert made.shards.manifest.labels.class_names == list(NAMES)


def test_broken_records_are_left_out_and_listed(tmp_path: Path, spark: Any) -> None:
    make_folder(tmp_path / "in")
    (tmp_path / "in/bee/025.png").write_bytes(b"no image")
    flags: dict[str, Any] = {
        "input": str(tmp_path / "in"),
        "strategy": "random",
        "num_workers": 2,
        "report": False,
        "quiet": True,
    }
    with pytest.raises(DataError, match=r"bee/025.png: the image has 8 bytes"):
        pipeline.shard(spark, output=str(tmp_path / "out"), **flags)
    shards = pipeline.shard(spark, output=str(tmp_path / "out"), max_bad_records="2%", **flags).shards
    assert (shards.manifest.rows, shards.manifest.input.quarantined) == (59, 1)
    (line,) = (tmp_path / "out/_quarantine/batch-00000000.jsonl").read_text().splitlines()
    assert json.loads(line)["source"] == str(tmp_path / "in/bee")
    assert "025.png" in json.loads(line)["reason"]


@pytest.mark.full
def test_a_record_with_a_wrong_checksum_is_left_out(tmp_path: Path, spark: Any) -> None:
    parts = [tfrecord([example(image=bytes(3072), label=number % 2)]) for number in range(8)]
    parts[0] = parts[0][:-1] + bytes([parts[0][-1] ^ 1])
    (tmp_path / "in").write_bytes(b"".join(parts))
    flags: dict[str, Any] = {"strategy": "random", "num_workers": 2, "report": False, "quiet": True}
    with pytest.raises(DataError, match=r"is damaged: the record at byte 0 has a wrong checksum"):
        pipeline.shard(spark, input=str(tmp_path / "in"), output=str(tmp_path / "out"), **flags)
    shards = pipeline.shard(
        spark, input=str(tmp_path / "in"), output=str(tmp_path / "out"), max_bad_records="1", **flags
    ).shards
    assert (shards.manifest.rows, shards.manifest.input.quarantined) == (7, 1)
    (line,) = (tmp_path / "out/_quarantine/batch-00000000.jsonl").read_text().splitlines()
    assert "wrong checksum" in json.loads(line)["reason"]


def test_broken_evaluation_rows_are_not_counted_as_training(tmp_path: Path, spark: Any) -> None:
    """Both sides of an archive are in one file: a training and an evaluation row have a label out of range."""
    archive_path = str(tmp_path / "a.tar.gz")
    with tarfile.open(archive_path, "w:gz") as archive:
        for name, labels in (("data_batch_1", (0, 1, 77, 2)), ("test_batch", (0, 10, 2))):
            data = b"".join(bytes([label]) + bytes(3072) for label in labels)
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    shards = pipeline.shard(
        spark, input=archive_path, eval_input=archive_path, output=str(tmp_path / "out"), strategy="random",
        num_workers=2, max_bad_records="1", report=False, quiet=True,
    ).shards  # fmt: skip
    assert (shards.manifest.rows, shards.manifest.input.quarantined) == (3, 1)
    assert len((tmp_path / "out/_quarantine/batch-00000000.jsonl").read_text().splitlines()) == 2
