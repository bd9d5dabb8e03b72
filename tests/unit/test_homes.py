"""Runs whose home is anywhere: their files and checkpoints, and writers that are killed there.

A ``StorePlace`` of a local folder goes the ways of HDFS, but for the network."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError, UsageError
from pipeline.core.storage.hdfs import HdfsFiles, HdfsWriter
from pipeline.core.storage.local import LocalFiles
from pipeline.core.storage.objects import ObjectFiles
from pipeline.core.storage.store import Store
from tests.support.places import STORE, elsewhere
from tests.unit.test_checkpoint import numbers, state_of, write
from trainer.checkpoints.generations import Generations, write_generations
from trainer.checkpoints.prune import prune, roll_back
from trainer.checkpoints.read import (
    evaluation_of,
    is_whole,
    newest,
    read_slice_range,
    read_state,
    read_vector,
    unevaluated,
    versions,
    whole,
)
from trainer.checkpoints.state import folder_of, slice_name
from trainer.checkpoints.write import mark_evaluated, mark_final, write_state
from trainer.home.place import StorePlace, copy_into, listing, place_of, resolve_home, write_whole


def test_a_file_is_put_once_and_replaced_whole(place: str) -> None:
    path = f"{place}/a/b/file"
    STORE.put_new(path, b"one")
    with pytest.raises(FileExistsError):
        STORE.put_new(path, b"two")
    assert STORE.read(path) == b"one"
    STORE.replace(path, b"two")
    STORE.replace(f"{place}/c/file", b"three")
    assert (STORE.read(path), STORE.read(f"{place}/c/file")) == (b"two", b"three")
    assert listing(StorePlace(place, STORE)) == ["a/b/file", "c/file"], "no draft is left"


def test_a_long_file_is_copied_in_blocks(home: StorePlace, tmp_path: Path) -> None:
    """Copy a file to a store and back, with less than half of it in memory."""
    source, target = tmp_path / "log", tmp_path / "copy"
    source.write_bytes(content := np.random.default_rng(0).bytes(32 << 20))
    tracemalloc.start()
    write_whole(home / "runs" / "log", source)
    with open(target, "w+b") as file:
        copy_into(home / "runs" / "log", file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert target.read_bytes() == content
    assert peak < len(content) / 2


def test_a_copy_is_of_one_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace a file after its first block was read."""

    class ReplacedReader(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell():
                raise OSError("the file was replaced while it was read; read it again")
            return super().read(size)

    readers = [io.BytesIO(b"new"), ReplacedReader(b"first version")]
    monkeypatch.setattr(Store, "open", lambda self, uri: readers.pop())
    with open(tmp_path / "copy", "w+b") as file:
        copy_into(StorePlace("hdfs://namenode:9000/log", STORE), file)
    assert (tmp_path / "copy").read_bytes() == b"new"


def test_a_checkpoint_anywhere_reads_back_cut_into_any_ranges(home: StorePlace) -> None:
    write(home, state_of(5), [3, 4, 9])
    assert (whole(home), versions(home)) == ([5], [5])
    np.testing.assert_array_equal(read_vector(home, 5), numbers(5, 10))
    for begin_at, end in itertools.combinations(range(11), 2):
        values, momentum = read_slice_range(home, 5, begin_at, end)
        np.testing.assert_array_equal(values, numbers(5, 10)[begin_at:end])
        np.testing.assert_array_equal(momentum, -numbers(5, 10)[:7][begin_at:end])


def test_the_newest_sound_checkpoint_anywhere_is_found(home: StorePlace) -> None:
    for version in (1, 2, 3):
        write(home, state_of(version))
    (folder_of(home, 3) / slice_name(0, 2)).unlink()
    assert whole(home) == [1, 2]
    torn = folder_of(home, 2) / slice_name(1, 2)
    write_whole(torn, torn.read_bytes()[:-1])
    warnings: list[str] = []
    assert newest(home, verify=True, warn=warnings.append) == 1
    assert [str(torn) in warning for warning in warnings] == [True]
    with pytest.raises(DataError, match="torn"):
        read_vector(home, 2)


def test_what_replaces_a_file_is_seen_though_it_was_read_before(home: StorePlace) -> None:
    """Files that a listing says have not changed are not read again."""
    write(home, state_of(1, final=True, epoch_boundary=1))
    before = read_state(home, 1)
    assert before.final
    assert evaluation_of(home, before) is None
    mark_evaluated(home, before, 0.5)
    mark_final(home, before, final=False)
    after = read_state(home, 1)
    assert not after.final
    assert (is_whole(home, before), is_whole(home, after)) == (False, True)
    assert unevaluated(home) == []
    other = replace(after, generation=0, examples=after.examples + 1)  # of the same length
    write_state(folder_of(home, 1), other)
    assert read_state(home, 1) == other


def test_pruning_and_roll_backs_work_on_every_store(home: StorePlace) -> None:
    for version in range(1, 6):
        write(home, state_of(version, epoch_boundary=version))
        mark_evaluated(home, read_state(home, version), 0.9 if version == 2 else 0.5)
    assert prune(home) == []
    assert versions(home) == [2, 4, 5], "the best, and the newest two"
    slow = folder_of(home, 5) / slice_name(1, 2)
    slow.unlink()
    assert roll_back(home, 7) == (4, 7)
    assert versions(home) == [2, 4]
    write_generations(home, Generations(((7, 3),)))
    assert whole(home) == [2]


CHANGES = ("create", "makedirs", "rename", "delete", "put", "put_new")


def killed_at_every_change(uri: str) -> list[int | None]:
    """Have processes of this one write checkpoint 4 over three others and delete old ones, each killed one change of the
    store later than the one before; the newest sound checkpoint that each has left. In a process without a client."""
    found: list[int | None] = []
    mine, theirs = os.pipe()
    for step in itertools.count():
        root = StorePlace(f"{uri}/{step}", STORE)
        assert not in_a_child(partial(write_all, root, 1, 2, 3))
        died = in_a_child(partial(go_on, root, step))
        assert not in_a_child(partial(tell, root, theirs))
        found.append(json.loads(os.read(mine, 100)))
        if not died:
            break
    return found


def write_all(root: StorePlace, *versions: int) -> None:
    for version in versions:
        write(root, state_of(version))


def go_on(root: StorePlace, step: int) -> None:
    kill_at(step)
    write_all(root, 4)
    prune(root, keep=1)


def tell(root: StorePlace, pipe: int) -> None:
    os.write(pipe, json.dumps(sound(root)).encode())


def sound(root: StorePlace) -> int | None:
    """The newest; every whole checkpoint has the numbers that were written, and the next writer finds its way."""
    for version in whole(root):
        np.testing.assert_array_equal(read_vector(root, version), numbers(version, 10))
    latest = newest(root, verify=True)
    write(root, state_of(9))
    prune(root, keep=1)
    assert whole(root) == [9]
    return latest


def in_a_child(work: Callable[[], object]) -> bool:
    """Whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr)
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status != 0


def kill_at(step: int) -> None:
    """Before change number ``step`` of a store, or half-way through a write, this process is killed."""
    left = [step]

    def die_here() -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def fatal(change: Callable[..., Any]) -> Callable[..., Any]:
        def dying(*args: Any, **more: Any) -> Any:
            die_here()
            return change(*args, **more)

        return dying

    def half(writer: HdfsWriter, data: bytes) -> int:
        written = whole_write(writer, data[: len(data) // 2])
        die_here()
        return written + whole_write(writer, data[len(data) // 2 :])

    whole_write = HdfsWriter.write
    for kind in (LocalFiles, HdfsFiles, ObjectFiles):
        for name in CHANGES:
            if hasattr(kind, name):
                setattr(kind, name, fatal(getattr(kind, name)))
    vars_of: Any = HdfsWriter
    vars_of.write = half


@pytest.mark.full
@pytest.mark.parametrize("place", ["file", "hdfs", "s3"], indirect=True)
def test_a_writer_killed_on_a_store_leaves_a_whole_checkpoint(place: str) -> None:
    found = elsewhere(killed_at_every_change, place)
    assert len(found) > 5, "there are more steps than that"
    assert found == sorted(found)
    assert set(found) == {3, 4}


@pytest.mark.parametrize(
    ("output", "part"),
    [
        ("webhdfs:///run", "'' is not host:port"),
        ("http://name/run", "for reading"),
        ("hdfs:/x", "no host"),
        ("ftp://name/run", "'ftp' is not supported"),
        ("s3://", "no bucket"),
        ("", "empty path"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_in_one_line(output: str, part: str) -> None:
    with pytest.raises(UsageError, match=part) as refused:
        resolve_home(output)
    assert str(refused.value).startswith("--output")
    assert "\n" not in str(refused.value)


def test_an_output_is_said_in_its_canonical_form() -> None:
    assert resolve_home("hdfs://name:8020/a/../run/") == "hdfs://name:8020/run"
    assert resolve_home("s3a://bucket/run/") == "s3://bucket/run"
    assert resolve_home("file:///x/run") == "/x/run"
    assert place_of("x") == Path.cwd() / "x"
