"""Generations of a set: each is in it once and whole, wherever the process that commits it is killed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.core.npz import to_bytes
from pipeline.core.shardset import damage, versions
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.shardset.commit import has_leftovers, publish
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.generations import append_generation, as_of, generations, last_batch, sum_of_fingerprints
from pipeline.core.shardset.manifest import ShardSet, missing_file, open_committed, read_committed
from pipeline.core.shardset.parts import Assignment, Generation, Image, Input, ShardFile, Worker
from pipeline.core.storage.store import Store
from pipeline.input.dataset import serial
from pipeline.upkeep import verify as verify_command
from tests.support.commits import FatalStore, assert_nothing_else, staged
from tests.support.exit_codes import ended
from tests.support.kills import forked, was_killed
from tests.support.places import STORE, elsewhere

WORKERS = 2


def contents(batch: int) -> dict[str, bytes]:
    shards = {f"worker={w:03d}/part-{batch:05d}.parquet": f"batch {batch} of {w}".encode() * 20 for w in range(WORKERS)}
    lines = {f"_assignment/part-{batch:05d}.parquet": b"lines"}
    buckets = {"_model/buckets/arrays.npz": to_bytes(batch=np.array(batch))}
    hashes = {"_model/hashes/arrays.npz": to_bytes(planes=np.zeros(1))}
    return shards | lines | buckets | (hashes if batch == 0 else {})


def manifest_of(batch: int, files: dict[str, bytes], before: int, fingerprint: str = "") -> Manifest:
    """A generation of 10 rows a worker, after so many rows of a fingerprint."""

    def entries(folder: str) -> list[ShardFile]:
        return [
            ShardFile(path, 10, len(data), hashlib.sha256(data).hexdigest())
            for path, data in files.items()
            if path.startswith(folder)
        ]

    rows = 10 * WORKERS
    word = f"{rows}-{(batch + 1) * (1 << 62) % (1 << 64):016x}"
    generation = Generation(
        batch=batch,
        source=f"{batch}",
        rows=rows,
        copies=0,
        total=before + rows,
        fingerprint=sum_of_fingerprints([*filter(None, [fingerprint]), word]),
        mean=[float(batch)],
        version=0,
    )
    return Manifest(
        strategy="hash",
        num_workers=WORKERS,
        rows=rows,
        input=Input(files=1, bytes=100, rows=rows, fingerprint=word, listing=f"{batch}"),
        image=Image([1, 1, 1], "uint8", "CHW", [float(batch)]),
        chunks=[[before, before + rows]],
        workers=[
            Worker(index=w, rows=10, label_histogram=[1] * (batch + 1), files=entries(f"worker={w:03d}"))
            for w in range(WORKERS)
        ],
        model=[path for path in files if path.startswith("_model")],
        assignment=Assignment(rows=rows, files=entries("_assignment")),
        seconds={"write": 0.5},
        generations=[generation],
    )


def append(store: Store, output: str, batch: int) -> bool:
    """Commit a batch as a generation, if it is not committed; whether it was committed now."""
    before = read_committed(store, output)
    if before and batch <= last_batch(before):
        return False
    files = contents(batch)
    with Attempt(store, output, heartbeat_s=60) as attempt:
        moves = staged(attempt, files)
        fingerprint = before.manifest.input.fingerprint if before else None
        manifest = manifest_of(batch, files, before.manifest.rows if before else 0, fingerprint or "")
        publish(attempt, manifest, moves, before=before, supersedes=lambda theirs: False, appends=True)
    return True


def batches(output: str) -> list[int]:
    """Those that a reader finds, every byte of them checked."""
    found = read_committed(STORE, output)
    if found is None:
        return []
    assert missing_file(found) is None
    for file in found.hashed_files():
        assert hashlib.sha256(STORE.read(f"{output}/{file.path}")).hexdigest() == file.sha256
    there = [generation.batch for generation in generations(found)]
    assert [file.path.rpartition("part-")[2][:5] for file in found.files()[: len(there)]] == [f"{b:05d}" for b in there]
    assert len(found.files()) == WORKERS * len(there)
    return there


def test_a_frozen_append_deletes_nothing_that_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver is frozen after its version is put and before it looks whether that stands; another appends meanwhile."""
    output, look, others = str(tmp_path / "set"), versions.versions_in_use, [1]

    def frozen(store: Store, uri: str) -> versions.VersionNumbers:
        if others and look(store, uri).newest == 1:
            append(STORE, output, others.pop())
        return look(store, uri)

    monkeypatch.setattr(versions, "versions_in_use", frozen)
    append(STORE, output, 0)
    assert not others
    assert batches(output) == [0, 1]


def killed(output: str, batch: int, step: int) -> bool:
    """Append in a forked process that is killed before file change number ``step``; False where it makes no more."""
    return was_killed(lambda: append(FatalStore(countdown=[step]), output, batch), step)


def apart(work: Callable[..., Any], *arguments: object) -> Any:
    """The result of a function in a forked process: a process that has a client of HDFS cannot be forked."""
    ours, theirs = os.pipe()
    child = forked(lambda: os.write(theirs, json.dumps(work(*arguments)).encode()))
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        data = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return json.loads(data)


def done_again(output: str, was: list[int]) -> None:
    """The batch that was killed comes again, and one after it."""
    assert append(STORE, output, 1) is (was == [0])
    assert batches(output) == [0, 1]
    append(STORE, output, 2)
    assert batches(output) == [0, 1, 2]
    assert_nothing_else(output)


def kill_before_every_change(place: str) -> list[list[int]]:
    """A second generation, each time killed before another change, and done again; what a reader finds after each kill.
    Elsewhere than on a local disk before every fourth."""
    found: list[list[int]] = []
    stride = 1 if place.startswith("/") else 4
    while True:
        step, output = stride * len(found), f"{place}/{len(found)}"
        apart(append, STORE, output, 0)
        was_killed = killed(output, 1, step)
        found.append(apart(batches, output))
        apart(done_again, output, found[-1])
        if not was_killed:
            return found


@pytest.mark.full
@pytest.mark.parametrize("place", ["file", pytest.param("hdfs", marks=pytest.mark.full)], indirect=True)
def test_a_killed_generation_is_appended_once(
    place: str,
) -> None:
    """A generation that is killed before any file change is in the set once when its batch comes again."""
    found = elsewhere(kill_before_every_change, place)
    assert len(found) > (15 if place.startswith("/") else 4), "the commit has more steps than that"
    # One change is the commit: a reader finds the generation after it, and not before.
    assert found == [[0]] * found.count([0]) + [[0, 1]] * found.count([0, 1])
    assert found[0] != found[-1]


def test_a_version_lists_the_files_of_all_generations(place: str) -> None:
    """A version lists the files of all generations and keeps the older ones."""
    for batch in (0, 2, 5):
        assert append(STORE, place, batch)
    assert batches(place) == [0, 2, 5]
    found = open_committed(STORE, place)
    manifest = found.manifest.to_json()
    assert (manifest["rows"], manifest["input"]["rows"], manifest["assignment"]["rows"]) == (60, 60, 60)
    assert [worker["rows"] for worker in manifest["workers"]] == [30, 30]
    assert manifest["workers"][0]["label_histogram"] == [3, 2, 2, 1, 1, 1]
    assert manifest["chunks"] == [[0, 20], [20, 40], [40, 60]]
    assert manifest["seconds"] == {"write": 1.5}
    assert [generation.version for generation in generations(found)] == [1, 2, 3]
    # The counters are the newest's, the functions those of the first.
    models = [
        path.removeprefix("_model/").partition("-")[0] for path in sorted(p for p in found.paths() if "_model" in p)
    ]
    assert models == ["v1", "v3"]
    assert not has_leftovers(STORE, found)


def test_a_set_as_of_a_generation_is_the_set_that_was_committed_then(tmp_path: Path) -> None:
    output, then = str(tmp_path / "set"), []
    for batch in range(4):
        append(STORE, output, batch)
        then.append(open_committed(STORE, output))
    newest = open_committed(STORE, output)
    for number, older in enumerate(then):
        seen = as_of(newest, number)
        assert seen.files() == older.files()
        assert seen.assignment_files() == older.assignment_files()
        assert seen.manifest.rows == older.manifest.rows
        assert seen.manifest.input.fingerprint == older.manifest.input.fingerprint
        assert seen.manifest.image == older.manifest.image
        assert generations(seen) == generations(older)
    with pytest.raises(IndexError):
        as_of(newest, 4)


@pytest.mark.parametrize("part", ["input", "image", "assignment"])
def test_a_growing_set_without_a_part_is_damaged(part: str, tmp_path: Path) -> None:
    entry = {
        "version": 1,
        "batch": 0,
        "source": "s",
        "rows": 1,
        "copies": 0,
        "total": 1,
        "fingerprint": "1-0",
        "mean": [],
    }
    manifest = {
        "input": {},
        "image": {"shape": [], "dtype": "uint8", "layout": "CHW", "mean": []},
        "assignment": {"files": []},
        "num_workers": 1,
        "workers": [{"files": []}],
        "generations": [entry],
    }
    assert len(generations(ShardSet(STORE, "set", Manifest.from_json(manifest)))) == 1
    del manifest[part]
    with pytest.raises(DataError, match=rf"set/manifest\.json is damaged: it has generations and no {part}; restore"):
        generations(ShardSet(STORE, "set", Manifest.from_json(manifest)))


def test_of_two_that_append_at_once_one_commits_and_the_other_is_told(tmp_path: Path) -> None:
    output = str(tmp_path / "set")
    append(STORE, output, 0)
    with Attempt(STORE, output) as late:
        before = read_committed(STORE, output)
        append(STORE, output, 1)
        manifest = manifest_of(1, {}, 20)
        kept = publish(late, manifest, [], before=before, supersedes=lambda theirs: False, appends=True)
        assert not kept.manifest.generation.endswith(late.id)
    assert batches(output) == [0, 1]


def test_fingerprints_add_up_modulo_two_to_the_64() -> None:
    assert sum_of_fingerprints(["3-ffffffffffffffff", "4-0000000000000002"]) == "7-0000000000000001"


def test_the_first_generation_of_a_set_is_a_set_like_any_other() -> None:
    made = replace(manifest_of(0, contents(0), 0), version=7)
    assert append_generation(None, made).generations[0].version == 7
    assert replace(append_generation(None, made), generations=made.generations) == made


def test_verify_ends_on_a_set_that_grows_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Append to the set before each of two passes, and whenever a shard file is read."""
    output = str(tmp_path / "set")
    append(STORE, output, 0)
    batches, read = iter(range(1, 100)), list[str]()
    damage_of, check = damage.damage_of, verify_command.verify

    def append_and_read(store: Store, uri: str, file: ShardFile) -> str | None:
        append(STORE, output, next(batches))
        read.append(file.path)
        return damage_of(store, uri, file)

    def append_and_check(shards: ShardSet, *, deep: bool, checked: Collection[str]) -> dict[str, str]:
        if len(checked) < 6:
            append(STORE, output, next(batches))
        return check(shards, deep=deep, checked=checked)

    monkeypatch.setattr(verify_command, "map_in_threads", serial)
    monkeypatch.setattr(damage, "damage_of", append_and_read)
    monkeypatch.setattr(verify_command, "verify", append_and_check)
    assert ended("verify", output, "--deep") == 0
    assert len(read) == len(set(read))
