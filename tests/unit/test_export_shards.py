"""``sharding export`` of a shard set, read back without the exporter's code, beside the rows that were written."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from pipeline.core.errors import DataError, UsageError
from tests.support.trainer_sets import CLASSES, EVAL_ROWS, rows_of, write_rows, write_shards
from trainer import torch_dataset
from trainer.data.opening import open_shards
from trainer.data.rows import Rows
from trainer.export import dataset, mds
from trainer.export import shards as exported
from trainer.export.__main__ import main
from trainer.export.dataset import class_names
from trainer.export.samples import Samples

WORKERS = [rows_of(30, 2), rows_of(50, 3, 100)]
FILES = {"worker-000-00000": WORKERS[0], "worker-001-00000": WORKERS[1], "test-00000": EVAL_ROWS}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("set") / "shards", WORKERS, EVAL_ROWS)


def export(shards: Path, kind: str, target: Path, *more: str) -> dict[str, bytes]:
    """Export by the command line, and return the files in the folder."""
    assert main([str(shards), "--as", kind, "--to", str(target), "--quiet", *more]) == 0
    return {str(path.relative_to(target)): path.read_bytes() for path in sorted(target.rglob("*")) if path.is_file()}


def pixels_of(png: bytes) -> Any:
    return np.moveaxis(np.asarray(Image.open(io.BytesIO(png))), -1, 0)


def read_tar(data: bytes) -> dict[str, dict[str, bytes]]:
    """Return the members of each sample, by key and suffix."""
    samples: dict[str, dict[str, bytes]] = defaultdict(dict)
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            key, _, suffix = member.name.partition(".")
            file = tar.extractfile(member)
            assert file
            samples[key][suffix] = file.read()
    return samples


def assert_equal_rows(rows: Rows, ids: list[int], labels: list[int], images: list[Any]) -> None:
    assert (ids, labels) == (rows.ids.tolist(), rows.labels.tolist())
    assert np.array_equal(np.stack(images), rows.images_NCHW)


def test_tars_hold_every_row_with_its_image_and_class(shards: Path, tmp_path: Path) -> None:
    files = export(shards, "webdataset", tmp_path / "tars")
    assert set(files) == {"README.md", "export.json", *(f"data/{name}.tar" for name in FILES)}
    for name, rows in FILES.items():
        samples = read_tar(files[f"data/{name}.tar"])
        assert all(set(sample) == {"png", "cls"} for sample in samples.values())
        parts = samples.values()
        labels = [int(part["cls"]) for part in parts]
        assert_equal_rows(rows, list(map(int, samples)), labels, [pixels_of(part["png"]) for part in parts])


def test_a_dataset_holds_every_row_with_its_image_and_class(shards: Path, tmp_path: Path) -> None:
    files = export(shards, "dataset", tmp_path / "dataset")
    for name, rows in FILES.items():
        table = pq.read_table(io.BytesIO(files[f"data/{name}.parquet"]))
        images = [pixels_of(image["bytes"]) for image in table["image"].to_pylist()]
        assert_equal_rows(rows, table["id"].to_pylist(), table["label"].to_pylist(), images)
        features = json.loads(table.schema.metadata[b"huggingface"])["info"]["features"]
        assert features["label"] == {"_type": "ClassLabel", "names": [str(number) for number in range(CLASSES)]}


def test_a_row_group_of_large_images_has_fewer_rows(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "ROW_GROUP_BYTES", 7 * open_shards(str(shards)).layout.record_bytes)
    files = export(shards, "dataset", tmp_path / "dataset")
    parquet = pq.ParquetFile(io.BytesIO(files["data/worker-000-00000.parquet"]))
    assert parquet.metadata.num_row_groups == 5
    assert parquet.read()["id"].to_pylist() == WORKERS[0].ids.tolist()


def read_mds(data: bytes, about: dict[str, Any]) -> list[dict[str, bytes]]:
    """Return the values of each sample of a shard, as the format of MosaicML streaming describes it.

    about: the entry of the shard in the index."""
    assert (about["format"], about["version"], about["raw_data"]["bytes"]) == ("mds", 2, len(data))
    (count,) = np.frombuffer(data, np.uint32, 1)
    assert count == about["samples"]
    offsets = np.frombuffer(data, np.uint32, count + 1, 4)
    in_shard = json.loads(data[4 * (count + 2) : offsets[0]])
    assert in_shard.items() <= about.items()
    samples = []
    for begin, end in pairwise(offsets):
        sizes = []
        at = int(begin)
        for size in about["column_sizes"]:
            sizes.append(size or int(np.frombuffer(data, np.uint32, 1, at)[0]))
            at += 0 if size else 4
        bounds = [at, *(at + np.cumsum(sizes))]
        assert bounds[-1] == end
        samples.append({name: data[bounds[i] : bounds[i + 1]] for i, name in enumerate(about["column_names"])})
    return samples


def number_in(data: bytes, encoding: str) -> Any:
    return np.frombuffer(data, encoding)[0].item()


def test_mds_shards_hold_every_row_with_its_image_and_class(shards: Path, tmp_path: Path) -> None:
    files = export(shards, "mds", tmp_path / "mds")
    folders = {"worker-000": WORKERS[0], "worker-001": WORKERS[1], "test": EVAL_ROWS}
    shard_names = {f"data/{name}/{file}" for name in folders for file in ("index.json", "shard.00000.mds")}
    assert set(files) == {"README.md", "export.json"} | shard_names
    for name, rows in folders.items():
        [about] = json.loads(files[f"data/{name}/index.json"])["shards"]
        types = dict(zip(about["column_names"], about["column_encodings"], strict=True))
        assert types == {"copy": "int32", "id": "int64", "image": "png", "label": "int64"}
        samples = read_mds(files[f"data/{name}/{about['raw_data']['basename']}"], about)
        ids, labels = ([number_in(each[key], "int64") for each in samples] for key in ("id", "label"))
        assert_equal_rows(rows, ids, labels, [pixels_of(each["image"]) for each in samples])


def test_arrays_that_png_cannot_hold_are_arrays_in_mds() -> None:
    images = np.random.default_rng(0).normal(size=(3, 2, 4, 5)).astype(np.float32)
    columns = {"id": np.arange(3), "copy": np.array([0, 0, 1], np.int32), "target": np.array([0.5, 1, 2], np.float32)}
    given: Any = SimpleNamespace(layout=SimpleNamespace(dtype="float32"), shape=(2, 4, 5))
    data = mds.make_shard(given, Samples(columns, images))
    about = {
        **{"format": "mds", "version": 2, "samples": 3, "raw_data": {"bytes": len(data)}},
        **{"compression": None, "hashes": [], "size_limit": None},
        "column_names": ["copy", "id", "image", "target"],
        "column_encodings": ["int32", "int64", "ndarray:float32:2,4,5", "float32"],
        "column_sizes": [4, 8, 160, 4],
    }
    samples = read_mds(data, about)
    assert np.array_equal(
        np.stack([np.frombuffer(each["image"], np.float32) for each in samples]), images.reshape(3, -1)
    )
    assert [number_in(each["target"], "float32") for each in samples] == [0.5, 1, 2]
    assert [number_in(each["copy"], "int32") for each in samples] == [0, 0, 1]


@pytest.mark.parametrize("kind", ["webdataset", "dataset", "mds"])
def test_a_killed_export_goes_on_and_ends_with_the_same_bytes(
    shards: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = export(shards, kind, tmp_path / "whole")
    make, made = exported.FORMATS[kind].make, []

    def dying(*arguments: Any) -> bytes:
        made.append(arguments)
        if len(made) == 2:
            raise KeyboardInterrupt
        return make(*arguments)

    monkeypatch.setitem(exported.FORMATS, kind, exported.FORMATS[kind]._replace(make=dying))
    with pytest.raises(KeyboardInterrupt):
        export(shards, kind, tmp_path / "killed")
    assert not (tmp_path / "killed" / "README.md").exists()
    assert export(shards, kind, tmp_path / "killed") == whole
    assert len(made) == 4, "the first file was not made again"


def test_a_second_export_into_a_folder_in_use_is_refused(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two exports at once could mix their files, or delete each other's."""
    whole = export(shards, "webdataset", tmp_path / "whole")
    make, refusals = exported.FORMATS["webdataset"].make, []

    def meet_another(*arguments: Any) -> bytes:
        for more in ((), ("--overwrite",)):
            with pytest.raises(UsageError, match="is in use by an export that has not ended") as refused:
                export(shards, "webdataset", tmp_path / "out", *more)
            refusals.append(refused)
        return make(*arguments)

    monkeypatch.setitem(exported.FORMATS, "webdataset", exported.FORMATS["webdataset"]._replace(make=meet_another))
    assert export(shards, "webdataset", tmp_path / "out") == whole
    assert len(refusals) == 2 * len(FILES)


def test_another_folder_is_never_written_over(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(UsageError, match="is not empty, and holds no export"):
        export(shards, "dataset", tmp_path / "mine", "--overwrite")
    with pytest.raises(UsageError, match=f"--to {shards} and the input {shards} overlap"):
        export(shards, "dataset", shards)
    tars = export(shards, "webdataset", tmp_path / "out")
    with pytest.raises(UsageError, match="holds another export: give --overwrite"):
        export(shards, "dataset", tmp_path / "out")
    assert export(shards, "webdataset", tmp_path / "out") == tars
    assert set(export(shards, "dataset", tmp_path / "out", "--overwrite")) == {
        "README.md",
        "export.json",
        *(f"data/{name}.parquet" for name in FILES),
    }
    (tmp_path / "out" / "README.md").write_text("edited")
    assert export(shards, "dataset", tmp_path / "out")["README.md"] == b"edited", "nothing was left to write"
    damaged = tmp_path / "out" / "data" / "test-00000.parquet"
    damaged.write_bytes(b"damaged")
    replaced = export(shards, "dataset", tmp_path / "out", "--overwrite")
    assert replaced["README.md"] != b"edited"
    assert pq.read_table(io.BytesIO(replaced["data/test-00000.parquet"])).num_rows == len(EVAL_ROWS)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "export.json").write_text('{"by": "another program"}')
    with pytest.raises(UsageError, match="is not empty, and holds no export"):
        export(shards, "dataset", tmp_path / "other", "--overwrite")
    with pytest.raises(UsageError, match="--best chooses a model"):
        export(shards, "dataset", tmp_path / "out", "--best")


def test_an_export_stays_out_of_sets_and_runs(shards: Path, tmp_path: Path) -> None:
    """The next reader of the set, or the next start of the run, would meet files that it did not write."""
    others, bare, run = (tmp_path / name for name in ("others", "bare", "run"))
    write_shards(others, WORKERS, None)
    write_rows(bare, "worker=000/part.parquet", WORKERS[0])
    run.mkdir()
    (run / "config.json").touch()
    (run / "metrics.jsonl").touch()
    for source, target, message in (
        (shards, shards / "export", f"--to {shards}/export and the input {shards} overlap"),
        (shards, others / "worker=000" / "export", f"lies in the shard set {others}; choose another"),
        (shards, run / "export", f"lies in the run {run}; choose another"),
        (bare, bare / "export", f"--to {bare}/export and the input {bare} overlap"),
    ):
        with pytest.raises(UsageError, match=message):
            export(source, "webdataset", target)
        assert not target.exists()


def test_the_columns_left_out_are_said_with_quiet(
    shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--quiet hides progress, not what the export lacks."""
    copy = write_shards(tmp_path / "shards", WORKERS, None)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["columns"] = [{"name": "site", "type": "string"}]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    export(copy, "webdataset", tmp_path / "tars")
    said = capsys.readouterr().err
    assert said.endswith(" export    warning: the columns that --keep-columns kept are left out (site)\n")
    assert said.count("\n") == 1


def test_a_damaged_file_ends_the_export_without_a_card(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", WORKERS, None)
    damaged = shards / "worker=001" / "part.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match="sha256"):
        export(shards, "webdataset", tmp_path / "out")
    assert not (tmp_path / "out" / "README.md").exists()


def test_names_of_exported_classes_differ() -> None:
    """A set may name fewer classes than it has, or two alike."""
    labels = SimpleNamespace(class_names=["1", "", "1"])
    given = SimpleNamespace(manifest=SimpleNamespace(labels=labels), num_classes=5)
    names = class_names(given)  # type: ignore[arg-type]
    assert names == ["1", "1 (class 1)", "1 (class 2)", "3", "4"]


@pytest.mark.parametrize("kind", ["webdataset", "dataset", "mds"])
def test_a_file_without_rows_becomes_a_file_without_samples(kind: str, tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", WORKERS, None)
    manifest = json.loads((shards / "manifest.json").read_text())
    manifest["workers"][0]["files"].append(write_rows(shards, "worker=000/empty.parquet", rows_of(0, 1)))
    (shards / "manifest.json").write_text(json.dumps(manifest))
    files = export(shards, kind, tmp_path / "out")
    if kind == "dataset":
        empty = pq.read_schema(io.BytesIO(files["data/worker-000-00001.parquet"]))
        assert empty == pq.read_schema(io.BytesIO(files["data/worker-000-00000.parquet"]))
    elif kind == "mds":
        [first] = json.loads(files["data/worker-000/index.json"])["shards"]
        assert first["raw_data"]["basename"] == "shard.00000.mds", "its reader expects samples in a shard"
        assert np.frombuffer(files["data/worker-000/shard.00001.mds"], np.uint32, 1)[0] == 0
    else:
        assert not read_tar(files["data/worker-000-00001.tar"])


def test_a_run_and_a_set_are_not_confused(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(UsageError, match="is a run, and --as dataset writes shard sets"):
        export(tmp_path / "run", "dataset", tmp_path / "out")
    with pytest.raises(DataError, match="it is a shard set, and holds no model"):
        export(shards, "torchscript", tmp_path / "model.pt")


@pytest.mark.parametrize("worker", ["0", 1.5, True])
def test_a_worker_that_is_no_number_is_refused(shards: Path, worker: Any) -> None:
    with pytest.raises(UsageError, match=re.escape(f"worker must be a whole number, got {worker!r}")):
        torch_dataset(str(shards), worker)


def test_a_transform_in_place_changes_no_row(shards: Path) -> None:
    data = torch_dataset(shards, 1, transform=lambda image: image.fill_(7))  # type: ignore[arg-type]
    assert [data[0][0].unique().tolist(), data[1][0].unique().tolist()] == [[7], [7]]
    assert torch.equal(torch.from_numpy(data.rows.images_NCHW), torch.from_numpy(WORKERS[1].images_NCHW))


def test_torch_reads_a_shard(shards: Path) -> None:
    data = torch_dataset(str(shards), 1, transform=lambda image: image.float() / 255)
    images, labels = next(iter(DataLoader(data, batch_size=50)))
    assert torch.equal(images, torch.from_numpy(WORKERS[1].images_NCHW).float() / 255)
    assert torch.equal(labels, torch.from_numpy(WORKERS[1].labels))
    assert torch_dataset(str(shards)).rows.ids.tolist() == EVAL_ROWS.ids.tolist()
    with pytest.raises(UsageError, match="has no targets: give targets=False"):
        torch_dataset(str(shards), 1, targets=True)
    with pytest.raises(UsageError, match="there is no worker 2"):
        torch_dataset(str(shards), 2)
