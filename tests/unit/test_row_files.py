"""Memory-mapped rows, beside the same rows in memory: columns, mini-batches, whole runs, and makers that are killed."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError, JobError
from tests.clusters.machine import ROOT
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_rows, write_shards
from tests.support.virtual_runs import QUIET, final
from trainer.config import RunFacts
from trainer.data import row_files, shard_file
from trainer.data.batches import build_batches
from trainer.data.cohorts import load_numbers
from trainer.data.deal import deal
from trainer.data.loading import load_eval, load_files, load_worker
from trainer.data.mapped_images import MappedFile, MappedImages, join_images
from trainer.data.mixture import open_mixture
from trainer.data.network import TABLE, build_network
from trainer.data.opening import open_shards
from trainer.data.repartition import all_rows
from trainer.data.rows import COLUMNS, Rows, join_rows
from trainer.data.shards import Shards
from trainer.home.folders import Folders
from trainer.home.work import WorkFolder
from trainer.lifecycle import row_storage as storage_module
from trainer.lifecycle.interruption import RunInterruptedError
from trainer.lifecycle.row_storage import RowReads, host_reads, row_storage
from trainer.options import Role, all_roles
from trainer.sampling import SAMPLERS
from trainer.simulate import SimulationSettings, simulate

SIZES = (48, 40, 45)
ROLES = all_roles(1, 3)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three unequal shards; the first has two files, and copies of rows of the third."""
    parts = [rows_of(size, number, 100 * number) for number, size in enumerate(SIZES)]
    root = write_shards(tmp_path_factory.mktemp("set"), parts, EVAL_ROWS)
    manifest = json.loads((root / "manifest.json").read_text())
    copies = parts[2].select(np.arange(7))
    manifest["workers"][0]["files"].append(write_rows(root, "worker=000/more.parquet", copies))
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def mapped(root: Path, folder: Path) -> Shards:
    return replace(open_shards(str(root)), mapped=folder)


def assert_equal(rows: Rows, expected: Rows) -> None:
    np.testing.assert_array_equal(np.asarray(rows.images_NCHW), np.asarray(expected.images_NCHW))
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(rows, name), getattr(expected, name), strict=True)


# --- rows -----------------------------------------------------------------------------------------------------------------


def test_mapped_rows_are_the_rows_in_memory(shards: Path, tmp_path: Path) -> None:
    """Rows are equal by worker, of all shards, dealt to fewer and to more workers, by numbers, and for the evaluation."""
    in_memory, on_disk = open_shards(str(shards)), mapped(shards, tmp_path)
    for worker in range(3):
        rows = load_worker(on_disk, worker)
        assert isinstance(rows.images_NCHW, MappedImages)
        assert_equal(rows, load_worker(in_memory, worker))
    assert_equal(all_rows(on_disk), all_rows(in_memory))
    assert len(all_rows(on_disk)) == sum(SIZES) < sum(map(len, deal(on_disk, 3)))
    for workers in (1, 2, 5):
        for rows, expected in zip(deal(on_disk, workers), deal(in_memory, workers), strict=True):
            assert isinstance(rows.images_NCHW, MappedImages)
            assert_equal(rows, expected)
    numbers = [np.array([0, 3, 54, 60, 139]), np.arange(50, 130, 7)]
    for rows, expected in zip(
        *(load_numbers(each, numbers, targets=False) for each in (on_disk, in_memory)), strict=True
    ):
        assert isinstance(rows.images_NCHW, MappedImages)
        assert_equal(rows, expected)
    evaluated, expected_evaluated = load_eval(on_disk), load_eval(in_memory)
    assert evaluated
    assert expected_evaluated
    assert_equal(evaluated, expected_evaluated)


def test_rows_that_a_stream_appends_follow_in_the_file(shards: Path, tmp_path: Path) -> None:
    in_memory, on_disk = open_shards(str(shards)), mapped(shards, tmp_path)
    first, second = (load_files(on_disk, on_disk.worker_files(worker)) for worker in (1, 2))
    expected = join_rows([load_worker(in_memory, worker) for worker in (1, 2)])
    assert_equal(join_rows([first, second]), expected)


def test_files_of_equal_sets_in_a_mixture_have_their_own_ids(shards: Path, tmp_path: Path) -> None:
    other = shutil.copytree(shards, tmp_path / "other")
    sets = [str(shards), str(other)]
    rows = load_worker(replace(open_mixture(sets), mapped=tmp_path / "rows"), 1)
    assert_equal(rows, load_worker(open_mixture(sets), 1))
    assert len(np.unique(rows.ids)) == 2 * SIZES[1]


@pytest.mark.parametrize("seed", range(5))
def test_mapped_images_select_like_an_array(seed: int) -> None:
    """Views of views, slices with steps, joined parts: beside numpy's own."""
    rng = np.random.default_rng(seed)
    parts = [rng.integers(0, 256, (size, 1, 2, 2), dtype=np.uint8) for size in rng.integers(1, 9, 4)]
    files = [MappedFile(part) for part in parts]
    images: Any = MappedImages(files)
    expected = np.concatenate(parts)
    for _ in range(4):
        places = rng.integers(0, len(expected), rng.integers(1, 30))
        np.testing.assert_array_equal(images[places], expected[places])
        begin, end = sorted(rng.integers(0, len(expected) + 1, 2).tolist())
        cut = slice(begin, end, int(rng.integers(1, 4)))
        np.testing.assert_array_equal(images[cut], expected[cut])
        assert images.shape == expected.shape
        assert images.nbytes == expected.nbytes
        images, expected = images.view(places), expected[places]
        if rng.integers(2):
            images, expected = join_images([images, MappedImages(files)]), np.concatenate([expected, *parts])
    for outside in (-1, len(expected)):
        with pytest.raises(IndexError):
            images[np.array([outside])]


class AdvisedMap(mmap.mmap):
    """A mapping that notes for which bytes it was told that they will be needed."""

    needed: list[tuple[int, int]]

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        end = len(self) if length is None else start + length
        assert start % mmap.PAGESIZE == 0
        if option == mmap.MADV_WILLNEED:
            self.needed.append((start, end))
        super().madvise(option, start, end - start)


@pytest.mark.parametrize(("side", "offset"), [(1, 64), (8, 4096), (8, 5000), (90, 128)])
def test_selected_rows_are_asked_for_and_no_others(
    side: int, offset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Select rows of a file in parts of a few rows, and compare the pages that were asked for with those of each row."""
    rng = np.random.default_rng(side)
    size = side * side
    expected = rng.integers(0, 256, (200, 1, side, side), dtype=np.uint8)
    (tmp_path / "rows").write_bytes(bytes(offset) + expected.tobytes())
    monkeypatch.setattr("trainer.data.mapped_images.AHEAD_BYTES", 7 * size)
    with open(tmp_path / "rows", "rb") as source:
        data = AdvisedMap(source.fileno(), 0, access=mmap.ACCESS_READ)
    images = np.frombuffer(data, np.uint8, offset=offset).reshape(expected.shape)
    # A second file, without a mapping, has the first rows.
    files = MappedImages([MappedFile(expected[:5]), MappedFile(images, data, offset)])
    expected = np.concatenate([expected[:5], expected])
    for count in (0, 1, 7, 8, 150):
        data.needed = []
        rows = rng.integers(0, len(expected), count)
        np.testing.assert_array_equal(files[rows], expected[rows])
        pages = {page for first, end in data.needed for page in range(first // mmap.PAGESIZE, -(-end // mmap.PAGESIZE))}
        byte_pages = {
            (offset + row * size + byte) // mmap.PAGESIZE for row in rows[rows >= 5] - 5 for byte in range(size)
        }
        assert pages == byte_pages


def test_a_slice_of_images_needs_no_memory_for_all_places() -> None:
    images = MappedImages([MappedFile(np.broadcast_to(np.uint8(7), (1 << 52, 1, 1, 1)))])
    assert images[-2:].tolist() == images[5:9:2].tolist() == [[[[7]]]] * 2


# --- mini-batches and runs ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Weights and losses of all rows."""
    rng = np.random.default_rng(5)
    columns = {"id": np.arange(300), "weight": rng.uniform(0, 2, 300), "loss": rng.uniform(0, 3, 300)}
    path = tmp_path_factory.mktemp("table") / "table.parquet"
    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.mark.parametrize("name", [*SAMPLERS, "random", "importance"])
def test_mini_batches_have_the_same_bits(name: str, shards: Path, table: str, tmp_path: Path) -> None:
    """Every sampler and repartition has equal tensors, ids, hash sums and entries of the loss table."""
    values: dict[str, Any] = {"model": "logistic", "batch_size": 24, "epochs": 9}
    if name in SAMPLERS:
        values |= {"sampling": name} | ({"example_table": table} if SAMPLERS[name].column else {})
    else:
        about = {"warmup_epochs": 2, "ignore_epochs": 0, "interval": 2} if name == "importance" else {}
        values |= {"repartition": name, "protocol": "bsp"} | about
    config = make_config(shards, **values)
    sets = [open_shards(str(shards)), mapped(shards, tmp_path)]
    buffers = dict(build_network(config, sets[0]).model.named_buffers())
    losses = (
        np.random.default_rng(1).uniform(0, 3, buffers[TABLE].shape).astype(np.float32) if TABLE in buffers else None
    )
    for worker in range(3):
        loaded = [all_rows(each) if name not in SAMPLERS else load_worker(each, worker) for each in sets]
        makers = [build_batches(config, each, rows, worker, 3) for each, rows in zip(sets, loaded, strict=True)]
        for clock in (0, 1, 7, 30):
            (images, labels), draw, _ = makers[0].make(clock, losses)
            (other_images, other_labels), other, _ = makers[1].make(clock, losses)
            assert images.equal(other_images)
            assert labels.equal(other_labels)
            assert draw.seen() == other.seen()
            np.testing.assert_array_equal(draw.rows.ids[draw.places], other.rows.ids[other.places])
            np.testing.assert_array_equal(draw.keys, other.keys)


@pytest.mark.parametrize(
    "values", [{"protocol": "asp"}, {"protocol": "bsp", "repartition": "random"}], ids=["asp", "repartition"]
)
def test_a_run_has_the_same_bits_and_leaves_no_files(values: dict[str, Any], shards: Path, tmp_path: Path) -> None:
    """In virtual time. The second run chooses mapped rows itself, because a worker's memory is small."""
    runs = []
    for storage in ({"row_storage": "memory"}, {"worker_memory": 50_000}, {"row_storage": "mapped"}):
        output = tmp_path / "-".join(storage)
        config = make_config(shards, output, model="logistic", batch_size=24, steps=25, **storage, **values)
        runs.append(simulate(config, SimulationSettings(workers=2), QUIET))
        assert not (output / "rows").exists()
    models = [(run.output / "model.safetensors").read_bytes() for run in runs]
    assert models[0] == models[1] == models[2]
    assert final(runs[0]).tobytes() == final(runs[1]).tobytes()


# --- makers ---------------------------------------------------------------------------------------------------------------


def test_two_processes_make_each_file_once(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads stand for processes: a lock belongs to an open file."""
    written: list[str] = []
    write = row_files._write

    def counted(shards: Shards, target: row_files.RowFile, draft: Any) -> None:
        written.append(target.file.path)
        write(shards, target, draft)

    monkeypatch.setattr(row_files, "_write", counted)
    monkeypatch.setattr(row_files, "LOOK_S", 0.001)
    rows: list[Rows] = []
    threads = [
        threading.Thread(target=lambda: rows.append(all_rows(mapped(shards, tmp_path / "rows")))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == len(set(written)) == 4
    assert all(path.suffix == ".rows" for path in (tmp_path / "rows").iterdir())
    for each in rows:
        assert_equal(each, all_rows(open_shards(str(shards))))


def test_a_file_that_a_killed_process_began_is_made_anew(shards: Path, tmp_path: Path) -> None:
    on_disk = mapped(shards, tmp_path / "rows")
    expected = load_worker(open_shards(str(shards)), 0)
    load_worker(on_disk, 0)
    complete = sorted((tmp_path / "rows").iterdir())
    contents = [path.read_bytes() for path in complete]
    for path in complete:
        path.rename(path.with_name(path.name + row_files.DRAFT))
        path.with_name(path.name + row_files.DRAFT).write_bytes(b"torn" * 5000)
    assert_equal(load_worker(on_disk, 0), expected)
    assert [path.read_bytes() for path in complete] == contents
    # A file that was cut off from outside would kill whoever reads it.
    os.truncate(complete[0], 100)
    assert_equal(load_worker(on_disk, 0), expected)
    # A file has its full size long before its rows are written.
    complete[0].write_bytes(bytes(len(contents[0])))
    assert_equal(load_worker(on_disk, 0), expected)
    assert sorted((tmp_path / "rows").iterdir()) == complete


def test_a_process_waits_for_the_maker_of_a_file(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The maker gives up, as if it had been killed: then the waiting process makes the file."""
    on_disk = mapped(shards, tmp_path)
    (file,) = on_disk.worker_files(1)
    target = row_files.row_file(on_disk, file, tmp_path, targets=False, with_hashes=True)
    waits = []
    with open(target.path.with_name(target.path.name + row_files.DRAFT), "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            if len(waits) == 3:
                fcntl.flock(other, fcntl.LOCK_UN)

        # Only in this module: threads of py4j sleep, too.
        monkeypatch.setattr(row_files, "time", SimpleNamespace(sleep=sleep))
        rows = load_worker(on_disk, 1)
    assert len(waits) == 3
    assert_equal(rows, load_worker(open_shards(str(shards)), 1))


def test_a_maker_leaves_the_file_that_another_began_anew(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody deletes the draft, and another process begins it anew, which has its full size at once."""
    on_disk = mapped(shards, tmp_path)
    (file,) = on_disk.worker_files(1)
    target = row_files.row_file(on_disk, file, tmp_path, targets=False, with_hashes=True)
    draft_path = target.path.with_name(target.path.name + row_files.DRAFT)
    others: list[Any] = []
    write = row_files._write

    def write_slowly(shards: Shards, target: row_files.RowFile, draft: Any) -> None:
        write(shards, target, draft)
        if not others:
            draft_path.unlink()
            others.append(open(draft_path, "wb"))  # noqa: SIM115
            fcntl.flock(others[0], fcntl.LOCK_EX)
            os.truncate(draft_path, target.bytes)

    def sleep(_: float) -> None:
        assert draft_path.exists()
        assert not target.path.exists()
        others[0].close()

    monkeypatch.setattr(row_files, "_write", write_slowly)
    monkeypatch.setattr(row_files, "time", SimpleNamespace(sleep=sleep))
    rows = load_worker(on_disk, 1)
    assert others[0].closed
    assert_equal(rows, load_worker(open_shards(str(shards)), 1))


def test_files_that_are_deleted_before_they_are_opened_are_made_again(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of another process's run on this host deletes them."""
    make_all = row_files.make_all
    calls = []

    def make_and_delete(shards: Shards, files: Any) -> None:
        make_all(shards, files)
        calls.append(len(files))
        if len(calls) == 1:
            shutil.rmtree(tmp_path / "rows")

    monkeypatch.setattr(row_files, "make_all", make_and_delete)
    assert_equal(load_worker(mapped(shards, tmp_path / "rows"), 0), load_worker(open_shards(str(shards)), 0))
    assert calls == [2, 2]


def test_a_file_is_allocated_piece_by_piece(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog learns of each piece."""
    events: list[Any] = []
    allocate = os.posix_fallocate

    def watched(descriptor: int, offset: int, length: int) -> None:
        events.append((offset, length))
        allocate(descriptor, offset, length)

    monkeypatch.setattr(row_files, "FLUSH_BYTES", 4000)
    monkeypatch.setattr(os, "posix_fallocate", watched)
    monkeypatch.setattr(row_files, "kick", lambda: events.append("kick"))
    load_worker(mapped(shards, tmp_path), 1)
    (path,) = tmp_path.iterdir()
    size = path.stat().st_size
    pieces = [(begin, min(4000, size - begin)) for begin in range(0, size, 4000)]
    assert len(pieces) > 2
    assert events == [event for piece in pieces for event in (piece, "kick")]


@pytest.mark.parametrize("fault", ["full disk", "damaged shard"])
def test_a_file_that_cannot_be_made_leaves_nothing(
    fault: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shutil.copytree(shards, tmp_path / "set")
    expected: tuple[type[Exception], str] = (OSError, "No space left on device.*rows.draft")
    if fault == "full disk":

        def fail(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", fail)
    else:
        path = root / "worker=001/part.parquet"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        expected = DataError, "it is damaged; rerun the job of its set"
    with pytest.raises(expected[0], match=expected[1]):
        load_worker(mapped(root, tmp_path / "rows"), 1)
    assert not list((tmp_path / "rows").iterdir())


class RemoteStore:
    """A store whose bucket is a local folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.longest = 0
        self.suffixes: set[str] = set()

    def read_range(self, uri: str, offset: int, length: int) -> bytes:
        self.longest = max(self.longest, length)
        self.suffixes |= {path.suffix for path in self.root.parent.joinpath("rows").iterdir()}
        with open(self.root / uri.removeprefix("s3://bucket/"), "rb") as file:
            file.seek(offset)
            return file.read(length)


def test_a_remote_file_is_downloaded_piece_by_piece(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has no name meanwhile, and is gone afterwards, also of a damaged file."""
    root = shutil.copytree(shards, tmp_path / "set")
    monkeypatch.setattr(shard_file, "PIECE_BYTES", 1000)
    store: Any = RemoteStore(root)
    remote = replace(mapped(root, tmp_path / "rows"), store=store, uri="s3://bucket")
    assert_equal(load_worker(remote, 0), load_worker(open_shards(str(shards)), 0))
    assert store.longest == 1000
    assert store.suffixes == {".rows", ".draft"}
    file = root / "worker=002/part.parquet"
    file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(DataError, match=r"part.parquet has sha256 .* it is damaged"):
        load_worker(remote, 2)
    (root / "worker=001/part.parquet").write_bytes(bytes(remote.worker_files(1)[0].bytes))
    with pytest.raises(DataError, match=r"s3://bucket/worker=001/part.parquet has sha256 .* it is damaged"):
        load_worker(remote, 1)
    assert all(path.suffix == ".rows" for path in (tmp_path / "rows").iterdir())


# --- memory ---------------------------------------------------------------------------------------------------------------

LIMIT = 24 << 20
PROGRAM = """
import re, resource, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
from tests.support.draws import shuffled
from trainer.data import row_files, shards as module
from trainer.data.loading import load_worker
from trainer.data.opening import open_shards

def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

peak = 0
def look(*_):
    global peak
    peak = max(peak, anonymous())

def watched(write):
    def watched_write(*args):
        look()
        write(*args)
    return watched_write

module.kick = look
row_files._write_at = watched(row_files._write_at)
small, large, folder = sys.argv[1:]
load_worker(replace(open_shards(small), mapped=Path(folder)), 0)  # loads libraries
before = anonymous()
opened = open_shards(large)
rows = load_worker(replace(opened, mapped=Path(folder)) if folder else opened, 0)
sampler = shuffled(rows, 64, seed=0, worker=0)
total = 0
for clock in range(len(rows) // 64):
    draw = sampler.draw(clock)
    total += int(rows.images_NCHW[draw.places].sum())
    look()
print(peak - before, total)
"""


@pytest.mark.slow
def test_a_shard_of_ten_limits_needs_less_than_one(tmp_path: Path) -> None:
    """In one row group, decoded and drawn once, while the process's anonymous memory is watched."""
    shape = (3, 32, 32)
    count = 10 * LIMIT // int(np.prod(shape))
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
    expected = int(data.sum(dtype=np.int64))
    small = write_shards(tmp_path / "small", [rows_of(100, 1)], None)
    large = write_shards(tmp_path / "large", [rows_of(1, 1)], None)
    manifest = json.loads((large / "manifest.json").read_text())
    rows = Rows(data, rng.integers(0, 4, count), np.arange(count))
    manifest["workers"][0]["files"] = [write_rows(large, "worker=000/part.parquet", rows)]
    manifest |= {"rows": count}
    manifest["image"]["shape"] = list(shape)
    (large / "manifest.json").write_text(json.dumps(manifest))
    del rows, data
    assert pq.ParquetFile(large / "worker=000/part.parquet").num_row_groups == 1
    command = [sys.executable, "-c", PROGRAM, str(small), str(large), str(tmp_path / "rows")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    grown, total = map(int, done.stdout.split())
    assert total == expected, "every row was drawn once"
    assert 0 < grown < LIMIT


class Disk(NamedTuple):
    free: int


@pytest.fixture
def work(tmp_path: Path) -> WorkFolder:
    return WorkFolder(Folders.from_home(tmp_path))


def test_rows_are_mapped_if_they_exceed_half_a_workers_memory(shards: Path, work: WorkFolder) -> None:
    opened = open_shards(str(shards))
    facts = RunFacts(3, opened.rows, 10, 0)
    # The first worker has the most rows.
    files = [file.bytes for file in opened.worker_files(0)]
    config = make_config(shards, worker_memory=1 << 30)
    needed = storage_module.row_needs(config, opened, host_reads(config, facts, opened, ROLES), work.folders.work)
    assert 55 * 192 + max(files) < needed.worker_bytes < 55 * 192 + max(files) + 30_000
    for limit, choice in ((2 * needed.worker_bytes, "in memory"), (2 * needed.worker_bytes - 1, "memory-mapped in ")):
        config = make_config(shards, worker_memory=limit)
        with row_storage(config, opened, host_reads(config, facts, opened, ROLES), work, leads=True) as line:
            assert line.startswith(choice)
            assert (work.folders.rows is not None) == (choice != "in memory")
        assert work.folders.rows is None


def test_without_room_for_files_rows_that_fit_the_memory_are_there(
    shards: Path, work: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless mapped files are demanded. The line says why."""
    opened = open_shards(str(shards))
    facts = RunFacts(3, opened.rows, 10, 0)
    reads = host_reads(make_config(shards), facts, opened, ROLES)
    needed = storage_module.row_needs(make_config(shards), opened, reads, work.folders.work).worker_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(100))
    with row_storage(make_config(shards, worker_memory=needed), opened, reads, work, leads=True) as line:
        assert work.folders.rows is None
        assert re.fullmatch(r"in memory: .* per worker; no room for mapped files: \d+ kB to write, 100 B free", line)
    for values in ({"worker_memory": needed - 1}, {"worker_memory": needed, "row_storage": "mapped"}):
        with (
            pytest.raises(JobError, match="100 B free: make room"),
            row_storage(make_config(shards, **values), opened, reads, work, leads=True),
        ):
            pass
    with row_storage(
        make_config(shards, row_storage="memory", worker_memory=1), opened, reads, work, leads=True
    ) as line:
        assert line.endswith("per worker")


def test_in_virtual_time_one_process_has_all_rows(shards: Path, work: WorkFolder) -> None:
    opened = open_shards(str(shards))
    config = make_config(shards)
    reads = RowReads([opened.files()], opened.eval_files(), targets=False)
    needs = storage_module.row_needs(config, opened, reads, work.folders.work)
    virtual = storage_module.row_needs(config, opened, reads._replace(in_virtual_time=True), work.folders.work)
    (evaluated,) = [
        row_files.row_file(opened, file, work.folders.work, targets=False, with_hashes=False).bytes
        for file in opened.eval_files()
    ]
    assert virtual.worker_bytes == needs.worker_bytes + evaluated
    assert needs.memory_in_words().endswith("per worker")
    assert virtual.memory_in_words().endswith("for all workers")


def test_drafts_of_killed_processes_take_no_space(shards: Path, work: WorkFolder) -> None:
    """A draft that a process writes stays."""
    opened = open_shards(str(shards))
    config = make_config(shards, row_storage="mapped")
    reads = host_reads(config, RunFacts(3, opened.rows, 10, 0), opened, ROLES)
    folder = work.folders.work / "rows" / storage_module.host_name()
    folder.mkdir(parents=True)
    left, written = folder / f"left{row_files.DRAFT}", folder / f"written{row_files.DRAFT}"
    left.write_bytes(b"torn")
    with open(written, "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with row_storage(config, opened, reads, work, leads=True):
            assert list(folder.iterdir()) == [written]


def test_a_host_needs_the_files_of_its_roles(shards: Path) -> None:
    opened = open_shards(str(shards))
    facts = RunFacts(3, opened.rows, 10, 0)
    reads = host_reads(make_config(shards), facts, opened, [Role("server", 0), Role("worker", 1)])
    assert reads.loaded == [opened.worker_files(1)]
    assert not reads.evaluated
    repartitioned = make_config(shards, protocol="bsp", repartition="random")
    reads = host_reads(repartitioned, facts, opened, [Role("worker", 1), Role("evaluator")])
    assert reads.loaded == [opened.files()]
    assert reads.evaluated == opened.eval_files()


def test_too_little_space_is_said_before_the_start(
    shards: Path, work: WorkFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a killed start count as written, and files of a run that has ended are deleted."""
    opened = open_shards(str(shards))
    facts = RunFacts(3, opened.rows, 10, 0)
    config = make_config(shards, row_storage="mapped")
    reads = host_reads(config, facts, opened, ROLES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(100))
    with (
        pytest.raises(
            JobError, match=r"need \d+ kB in .*, which has 100 B free: make room, or give --row-storage memory"
        ),
        row_storage(config, opened, reads, work, leads=True),
    ):
        pass
    folder = work.folders.work / "rows" / storage_module.host_name()
    for worker in range(3):
        load_worker(replace(opened, mapped=folder), worker)
    load_eval(replace(opened, mapped=folder))
    with row_storage(config, opened, reads, work, leads=True) as line:
        assert re.search(r": 0 B to write, 100 B free; in memory: \d+ kB of the", line)
        assert len(list(folder.iterdir())) == 5
    assert not (work.folders.work / "rows").exists()


@pytest.mark.parametrize(
    "error", [None, RunInterruptedError(changes=True), RunInterruptedError(), JobError("failed")], ids=repr
)
def test_the_end_of_a_run_deletes_files_unless_it_continues(
    error: JobError | None, shards: Path, work: WorkFolder
) -> None:
    """The run continues at once with other workers, and other hosts may train on after an error of the leading host."""
    opened = open_shards(str(shards))
    config = make_config(shards, row_storage="mapped")
    reads = host_reads(config, RunFacts(3, opened.rows, 10, 0), opened, ROLES)
    own = work.folders.work / "rows" / storage_module.host_name()
    other = work.folders.work / "rows" / "other"
    other.mkdir(parents=True)
    with suppress(JobError), row_storage(config, opened, reads, work, leads=True):
        load_worker(replace(opened, mapped=work.folders.rows), 0)
        assert own.exists()
        if error:
            raise error
    assert own.exists() == getattr(error, "changes", False)
    assert other.exists() == (error is not None)


def test_parts_on_one_machine_have_their_own_files(shards: Path, work: WorkFolder) -> None:
    """The end of one leaves those of the others."""
    opened = open_shards(str(shards))
    config = make_config(shards, row_storage="mapped")
    reads = host_reads(config, RunFacts(3, opened.rows, 10, 0), opened, ROLES)
    root = work.folders.work / "rows"
    with row_storage(config, opened, reads, work, leads=True, part=0):
        load_worker(replace(opened, mapped=work.folders.rows), 0)
        files = list(root.rglob("*.rows"))
        other = WorkFolder(Folders.from_home(work.folders.work))
        with row_storage(config, opened, reads, other, leads=False, part=1):
            load_worker(replace(opened, mapped=other.folders.rows), 0)
            assert len(list(root.rglob("*.rows"))) == 2 * len(files) == 4
        assert list(root.rglob("*.rows")) == files
