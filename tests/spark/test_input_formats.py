"""The same images through several formats give the same shards, byte for byte, and keep the names of their classes."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pipeline
from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.manifest import ShardSet
from tests.conftest import make_rows
from tests.support.application import run_job
from tests.support.tfrecords import example, tfrecord
from tests.unit.test_formats import png, write_every

NAMES = ("ant", "bee", "cat")
ROWS = 60
LABELS, IMAGES = np.repeat(np.arange(3, dtype=np.uint8), ROWS // 3), make_rows(ROWS, seed=3)[1]


def as_png(image: np.ndarray) -> bytes:
    return png(image.reshape(3, 32, 32))


def make_folder(path: Path) -> Path:
    for row, (label, image) in enumerate(zip(LABELS, IMAGES, strict=True)):
        file = path / NAMES[label] / f"{row:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(as_png(image))
    return path


def make_tar(path: Path) -> Path:
    with tarfile.open(path, "w") as archive:
        for row, (label, image) in enumerate(zip(LABELS, IMAGES, strict=True)):
            for suffix, data in (("png", as_png(image)), ("cls", NAMES[label].encode())):
                info = tarfile.TarInfo(f"{row:03d}.{suffix}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return path


def digests(shards: ShardSet) -> list[tuple[int, str]]:
    return [(file.rows, file.sha256) for file in shards.files()]


def assert_holds_all_rows(shards: ShardSet) -> pa.Table:
    """Return the rows of a set's shards. Fail unless they are those that were written."""
    files = Path(shards.uri.removeprefix("file:")).glob("worker=*/*.parquet")
    rows = pa.concat_tables([pq.ParquetFile(path).read() for path in files]).sort_by("id")
    assert rows["id"].to_pylist() == list(range(ROWS))
    assert rows["label"].to_pylist() == LABELS.tolist()
    assert rows["image"].to_pylist() == [image.tobytes() for image in IMAGES]
    return rows


def test_every_format_gives_the_same_shards(tmp_path: Path, spark: Any) -> None:
    """Shard each by a job. Those of formats with coarse labels have a column more. Names of classes are kept."""
    inputs = write_every(tmp_path, LABELS, IMAGES)
    named = {"image-folder": make_folder(tmp_path / "named"), "tar": make_tar(tmp_path / "named.tar")}
    found: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for name, path in (inputs | named).items():
        output = tmp_path / f"{name}-out"
        flags = ("--input", path, "--output", output, "--workers", 2, "--no-report", "--quiet")
        done = run_job("baseline.py", *flags)
        assert done.code == 0, f"{name}: {done.err}"
        shards = pipeline.open_shards(str(output))
        columns = tuple(assert_holds_all_rows(shards).column_names)
        assert digests(shards) == found.setdefault(columns, digests(shards)), name
        if name in named:
            assert shards.manifest.labels.class_names == list(NAMES)
    assert len(found) == 2


@pytest.mark.usefixtures("undrawn")
def test_classes_keep_their_names_in_a_report_and_when_dealt_anew(tmp_path: Path, spark: Any) -> None:
    source, output = make_folder(tmp_path / "in"), tmp_path / "out"
    result = pipeline.shard(spark, input=str(source), output=str(output), strategy="random", num_workers=2, quiet=True)
    assert result.report
    assert "3: 0 ant, 1 bee, 2 cat" in Path(result.report).read_text()
    made = pipeline.reshard(spark, input=str(output), output=str(tmp_path / "re"), num_workers=3, report=False)
    assert made.shards.manifest.labels.class_names == list(NAMES)


def test_renamed_classes_make_another_set(tmp_path: Path, spark: Any) -> None:
    """The rows are the same, and their listing is not."""
    source, output = make_folder(tmp_path / "in"), tmp_path / "out"
    settings: dict[str, Any] = {"input": str(source), "output": str(output), "strategy": "random", "num_workers": 2}
    settings |= {"report": False, "quiet": True}
    assert pipeline.shard(spark, **settings).fresh
    (source / "cat").rename(source / "lynx")
    with pytest.raises(UsageError, match="--overwrite"):
        pipeline.shard(spark, **settings)
    result = pipeline.shard(spark, **settings, overwrite=True)
    assert result.fresh
    assert result.shards.manifest.labels.class_names == ["ant", "bee", "lynx"]
    assert not pipeline.shard(spark, **settings).fresh


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
        spark, input=str(tmp_path / "in"), output=str(tmp_path / "out"), max_bad_records=1, **flags
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
