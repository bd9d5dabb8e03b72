"""Shards without a manifest: what is read of them equals the set they came from, and bad ones are one line."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError, UsageError
from tests.support.configs import make_config
from tests.support.trainer_sets import rows_of, write_bare_shard, write_shards
from trainer import Options, train
from trainer.config import SEPARATOR
from trainer.data import bare_shards
from trainer.data.bare_shards import BareShard, describe_bare
from trainer.data.loading import load_worker
from trainer.data.mean_image import subtracted_mean
from trainer.data.opening import open_shards
from trainer.flags import build_parser, config_of
from trainer.simulate import SimulationSettings, simulate

SHAPE = (3, 4, 4)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def joined(*paths: Path) -> str:
    return SEPARATOR.join(map(str, paths))


@pytest.mark.parametrize("kind", ["files", "folders"])
def test_bare_shards_hold_their_rows_and_describe_them(tmp_path: Path, kind: str) -> None:
    files = [write_bare_shard(tmp_path / f"worker=00{n}" / "a.parquet", 10 * n) for n in range(2)]
    (tmp_path / "worker=000" / "_SUCCESS").write_text("")
    shards = open_shards(joined(*(files if kind == "files" else [file.parent for file in files])))
    loaded = [load_worker(shards, worker) for worker in range(2)]
    assert [rows.ids.tolist() for rows in loaded] == [list(range(10)), list(range(10, 20))]
    pixels = np.concatenate([rows.images_NCHW for rows in loaded])
    np.testing.assert_allclose(subtracted_mean(shards), pixels.mean(axis=(0, 2, 3)), rtol=1e-6)
    assert (shards.rows, shards.num_classes, shards.shape, shards.num_workers) == (20, 4, SHAPE, 2)
    total = sum(int(value) for rows in loaded for value in rows.hashes) % (1 << 64)
    assert shards.fingerprint == total
    assert describe_bare(shards) == (
        f"2 shards without a manifest below {tmp_path}: 20 rows of 3x4x4 uint8 in 4 classes, fingerprint 20-{total:016x}"
    )


def test_copies_of_a_row_count_once(tmp_path: Path) -> None:
    files = [write_bare_shard(tmp_path / f"{n}.parquet", 0, copy=np.full(10, n)) for n in range(2)]
    shards = open_shards(joined(*files))
    assert (shards.rows, shards.manifest.copies) == (10, 10)
    assert shards.fingerprint == open_shards(str(files[0])).fingerprint


def test_files_are_read_once_per_host_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_bare_shard(tmp_path / f"{n}.parquet", 10 * n) for n in range(2)]
    first = open_shards(joined(*files))
    read = bare_shards._read_manifest
    monkeypatch.setattr(bare_shards, "_read_manifest", None)
    assert open_shards(joined(*files)).manifest == first.manifest
    monkeypatch.setattr(bare_shards, "_read_manifest", read)
    write_bare_shard(files[1], 30, rows=12)
    assert open_shards(joined(*files)).rows == 22


def test_a_file_and_its_folder_open_one_after_the_other(tmp_path: Path) -> None:
    """Expect the rows of a file by either path, although both list the same file."""
    file = write_bare_shard(tmp_path / "folder" / "a.parquet", 0)
    for path in (file, file.parent, file):
        assert load_worker(open_shards(str(path)), 0).ids.tolist() == list(range(10))


def test_the_folder_of_a_shard_of_a_set_is_still_refused(tmp_path: Path) -> None:
    write_bare_shard(tmp_path / "worker=000" / "a.parquet", 0)
    assert open_shards(str(tmp_path / "worker=000")).num_workers == 1
    with pytest.raises(DataError, match="no shards were ever committed there"):
        open_shards(str(tmp_path))


def test_a_set_in_a_folder_named_like_a_file_opens(tmp_path: Path) -> None:
    """Open a committed set whose folder has the suffix of a Parquet file, as outputs of Spark often have."""
    folder = write_shards(tmp_path / "set.parquet", [rows_of(20, 1)], None)
    assert open_shards(str(folder)).rows == 20
    assert open_shards(str(write_bare_shard(tmp_path / "shard.parquet" / "a.parquet", 0).parent)).rows == 10


def test_paths_that_are_no_shards_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_bare_shard(tmp_path / "a.parquet", 0)
    (tmp_path / "empty").mkdir()
    for other in ("empty", "nothing", "b.parquet"):
        line = (
            f"^--shards {tmp_path}/{other}: no Parquet file, and no folder with any; give one such path per worker, or"
        )
        with pytest.raises(UsageError, match=line):
            open_shards(joined(file, tmp_path / other))
    with pytest.raises(UsageError, match=r"a\.parquet is given twice; every worker needs a shard of its own$"):
        open_shards(joined(file, file))
    monkeypatch.setattr(bare_shards, "bare_files", lambda store, uri: BareShard(uri, ()))
    with pytest.raises(UsageError, match=r"are in different stores; copy them into one$"):
        open_shards(SEPARATOR.join([str(file), "hdfs://n:9/b.parquet"]))


def test_shards_of_other_forms_are_one_line(tmp_path: Path) -> None:
    first = write_bare_shard(tmp_path / "a.parquet", 0)
    other = write_bare_shard(tmp_path / "b.parquet", 10, shape=(1, 4, 4))
    line = (
        "a.parquet has 3x4x4 uint8 images with label, .*b.parquet has 1x4x4 uint8 images with label: shards of one run"
    )
    with pytest.raises(DataError, match=line):
        open_shards(joined(first, other))
    pq.write_table(pa.table({"id": [1], "label": [0], "image": [b"abc"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet does not say the shape and type of its images; write the image"):
        open_shards(joined(first, tmp_path / "c.parquet"))
    pq.write_table(pa.table({"id": [1], "pixels": [b"abc"]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet has no column image; write"):
        open_shards(joined(first, tmp_path / "c.parquet"))
    (tmp_path / "c.parquet").write_bytes(b"no Parquet")
    with pytest.raises(DataError, match=r"c\.parquet is damaged: "):
        open_shards(joined(first, tmp_path / "c.parquet"))
    with pytest.raises(DataError, match=r"d\.parquet has no rows, and .*; delete it, or leave it out of --shards$"):
        open_shards(joined(first, write_bare_shard(tmp_path / "d.parquet", 0, rows=0)))


def test_a_run_trains_every_row_of_bare_shards_once_an_epoch(tmp_path: Path) -> None:
    """Every process opens the shards of the configuration again, so it must take several paths, too."""
    files = [write_bare_shard(tmp_path / f"{n}.parquet", 10 * n, rows=10) for n in range(2)]
    config = make_config(joined(*files), tmp_path / "run", model="logistic", epochs=2, batch_size=4)
    result = simulate(config, SimulationSettings(), Options(silent=True, report=False))
    assert result is not None
    assert result.passes["whole"] == result.passes["true"] == 2
    assert result.passes["expected"] == result.passes["fingerprint"]


def test_other_workers_are_offered_by_sharding_anew(tmp_path: Path) -> None:
    """There is no manifest, without which nothing is resharded."""
    files = [write_bare_shard(tmp_path / f"{n}.parquet", 10 * n, rows=10) for n in range(2)]
    config = make_config(joined(*files), tmp_path / "run", model="logistic")
    with pytest.raises(UsageError, match=r"per shard, 2; with --resume .* and sharding shard --workers 5 makes"):
        train(config, Options(silent=True, workers=5))


def test_the_command_line_takes_several_paths(tmp_path: Path) -> None:
    args = build_parser().parse_args(
        ["--shards", "hdfs://n:9/a", "hdfs://n:9/b", "--output", str(tmp_path), "--epochs", "1"]
    )
    args.names_in_argv = set()
    assert config_of(args).data.shards == SEPARATOR.join(["hdfs://n:9/a", "hdfs://n:9/b"])
