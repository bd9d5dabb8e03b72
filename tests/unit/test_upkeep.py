"""The commands about a committed set: inspect, verify, clean; and that a job mends what they find."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pipeline.core.errors import DataError, UsageError
from pipeline.core.program import fail
from pipeline.core.reporting.tables import two_column_table
from pipeline.core.shardset import attempt as attempts
from pipeline.core.shardset import damage
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet, materialize_command, open_committed
from pipeline.core.shardset.parts import Input, Worker
from pipeline.core.storage.store import Store
from pipeline.input.dataset import serial
from pipeline.upkeep import verify as verify_command
from pipeline.upkeep.clean import clean, leftovers
from pipeline.upkeep.contents import describe, details, workers_table
from tests.support.commits import commit, files_of, killed_at, whole
from tests.support.exit_codes import ended
from tests.support.places import files_below

Capture = pytest.CaptureFixture[str]


def test_of_many_workers_the_first_and_the_last_are_told(tmp_path: Path) -> None:
    manifest: dict[str, Any] = {
        "strategy": "random", "seed": 1, "num_workers": 100, "rows": 4000, "copies": 0, "neighbourhoods": None, "eval": None,
        "interval": None, "model": None, "generation": "g", "input": {"uri": "/in", "fingerprint": "4000-0123456789abcdef"},
        "params": {}, "seconds": {},
        "labels": {"num_classes": 2, "columns": ["label"]}, "versions": {"python": "3"},
        "image": {"shape": [3, 8, 8], "dtype": "uint8", "layout": "CHW", "mean": [1.0]},
        "workers": [
            {"index": w, "rows": 40, "copies": 0, "files": [{"path": "p", "rows": 40, "bytes": 100, "sha256": "s"}],
             "label_histogram": [20, 20]} for w in range(100)
        ],
    }  # fmt: skip
    made = ShardSet(Store(), "/o", Manifest.from_json(manifest))
    text = workers_table(made)
    assert "... and 84 more" in text
    assert text.splitlines()[-2].split()[0] == "99"
    assert dict(describe(made))["workers"] == "100, 40 to 40 rows each"
    assert dict(details(made))["parameters"] == "none"


def test_a_set_that_is_replaced_while_it_is_verified_is_intact(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(Store(), tmp_path, "first", 2)
    check = verify_command.verify

    def replace_and_check(shards: ShardSet, *, deep: bool, checked: Collection[str]) -> dict[str, str]:
        if shards.manifest.version == 1:
            commit(Store(), tmp_path, "second", 2)
        return check(shards, deep=deep, checked=checked)

    monkeypatch.setattr(verify_command, "verify", replace_and_check)
    assert ended("verify", tmp_path, "--deep") == 0
    assert "intact, every byte" in capsys.readouterr().out


@pytest.fixture
def unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShardSet:
    """A set whose files cannot be opened, by an error that a lost connection can cause too."""
    commit(Store(), tmp_path, "first", 2)
    shards = open_committed(Store(), str(tmp_path))

    def fail(store: Store, path: str) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(damage, "with_retries", lambda function: function)
    monkeypatch.setattr(Store, "open", fail)
    return shards


def test_a_file_that_cannot_be_read_is_damaged(unreadable: ShardSet) -> None:
    lines = damage.all_damage(unreadable, serial)
    assert lines.keys() == unreadable.paths()
    for path, line in lines.items():
        assert line.startswith(f"{unreadable.uri}/{path} cannot be read: ")


def test_an_unreachable_store_is_not_told_as_damage(unreadable: ShardSet, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(store: Store, path: str) -> NoReturn:
        raise ConnectionError("the store does not answer")

    monkeypatch.setattr(Store, "info", fail)
    with pytest.raises(OSError, match=r"arrays\.npz cannot be read: the store does not answer"):
        damage.all_damage(unreadable, serial)


@pytest.mark.parametrize(("damage", "shallow", "deep"), [("none", 0, 0), ("byte", 0, 3), ("cut", 3, 3), ("gone", 3, 3)])
def test_verify_finds_damage_by_size_and_deeply_by_content(
    damage: str, shallow: int, deep: int, tmp_path: Path, capsys: Capture
) -> None:
    commit(Store(), tmp_path, "first", 2)
    victim = tmp_path / open_committed(Store(), str(tmp_path)).files()[-1].path
    data = victim.read_bytes()
    if damage == "gone":
        victim.unlink()
    else:
        victim.write_bytes({"none": data, "byte": data[:-1] + b"?", "cut": data[:-1]}[damage])
    assert ended("verify", tmp_path) == shallow
    assert ended("verify", tmp_path, "--deep") == deep
    said = capsys.readouterr()
    if deep:
        assert str(victim) in said.out
        assert "1 of 5 files are damaged; repeat the job with --overwrite" in said.err
    else:
        assert "every byte of 4 files is as committed" in said.out


def test_a_place_without_a_set_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    assert ended("verify", tmp_path) == 3
    assert ended("inspect", tmp_path / "no") == 3
    assert ended("clean", tmp_path / "no") == 3
    assert capsys.readouterr().err.count("\n") == 3


def leave(output: Path) -> None:
    """What an overwrite leaves that is killed after its commit and before it has deleted the old set."""
    commit(Store(), output, "first", 2)
    step = 0
    while killed_at(output, "second", 3, step) and whole(output) == "first":
        step += 1
    for folder in (output / "_attempts").iterdir():  # one killed before its first heartbeat names no process
        os.utime(folder, (1e9, 1e9))


@pytest.mark.full
def test_clean_says_what_it_would_delete_and_deletes_it_when_told(tmp_path: Path, capsys: Capture) -> None:
    output = tmp_path / "o"
    leave(output)
    (output / "notes.txt").write_text("mine")
    before = files_below(output)
    assert before > files_of(output) - {"manifest.json"}
    assert ended("verify", output) == 0
    assert (
        "there are files of killed or running runs beside the set; python -m pipeline clean" in capsys.readouterr().out
    )
    assert ended("clean", output) == 0
    out = capsys.readouterr().out
    assert "would be deleted; --yes deletes them" in out
    assert "worker=000/part-00000-v1-" in out
    assert files_below(output) == before
    assert ended("clean", output, "--yes") == 0
    assert files_below(output) == files_of(output) | {"notes.txt"}
    assert whole(output) == "second"
    assert ended("clean", output) == 0
    assert "no leftovers" in capsys.readouterr().out


def test_clean_of_no_folder_is_an_error_of_the_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nope does not exist; name the folder of a shard set"):
        leftovers(Store(), f"{tmp_path}/nope")


def test_clean_leaves_a_live_run_alone(tmp_path: Path) -> None:
    commit(Store(), tmp_path, "first", 2)
    with Attempt(Store(), str(tmp_path)) as live:
        Store().write_new(f"{live.folder}/work", b"in progress")
        Store().makedirs(f"{tmp_path}/worker=000")
        (tmp_path / "worker=000" / f"part-00009-v2-{live.id}.parquet").write_bytes(b"about to be committed")
        found = leftovers(Store(), str(tmp_path))
        assert (found.files, found.attempts, found.live) == ([], [], [live.folder])
        assert Store().read(f"{live.folder}/work") == b"in progress"


def test_clean_names_only_what_is_gone(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's clock decides, and this machine's is a day ahead."""
    commit(Store(), tmp_path, "first", 2)
    (tmp_path / "worker=000" / "part-00009-v2-0123abcd.parquet").write_bytes(b"of a killed run")
    now = time.time() + 86400
    monkeypatch.setattr(attempts, "whoami", lambda: {"host": "another"})
    with Attempt(Store(), str(tmp_path)) as live:
        monkeypatch.undo()
        monkeypatch.setattr(time, "time", lambda: now)
        assert ended("clean", tmp_path, "--yes") == 1
        assert Path(live.folder).exists()
        said = capsys.readouterr()
        assert "1 attempts and files are still there: " in said.err
        out, kept = said.out.split("0 attempts and 1 files: deleted")
        assert kept == f"\n{live.folder}\n"
        assert "part-00009-v2-0123abcd.parquet" in out


def test_clean_says_what_it_could_not_delete(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders of another user stay, and deleting them raises nothing."""
    commit(Store(), tmp_path, "first", 2)
    attempt = tmp_path / "_attempts" / "0123456789ab"
    (attempt / "groups").mkdir(parents=True)
    (attempt / "groups" / "kept").write_bytes(b"of a task")
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)
    assert ended("clean", tmp_path, "--yes") == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == str(attempt)
    assert "deleted" not in said.out
    assert said.err.startswith("error: 1 attempts and files are still there: run it as their owner, ")


@pytest.mark.parametrize("flags", [(), ("--yes",)])
def test_a_link_in_place_of_the_attempts_is_refused(tmp_path: Path, flags: tuple[str, ...], capsys: Capture) -> None:
    """The files behind it are somebody else's, and would be deleted as those of dead attempts."""
    (tmp_path / "theirs" / "photos").mkdir(parents=True)
    (tmp_path / "theirs" / "notes.txt").write_text("mine")
    commit(Store(), tmp_path / "set", "first", 2)
    (tmp_path / "set" / "_attempts").symlink_to(tmp_path / "theirs")
    assert ended("clean", tmp_path / "set", *flags) == 2
    with pytest.raises(UsageError, match=r"_attempts is a symbolic link to .*theirs"):
        Attempt(Store(), str(tmp_path / "set")).__enter__()
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == ["notes.txt", "photos"]
    assert "symbolic link" in capsys.readouterr().err


def test_names_of_foreign_data_cannot_write_over_a_terminal(capsys: Capture) -> None:
    """Class names come from folders of data, and may hold what moves a cursor."""
    text = two_column_table([("labels", "cat\x1b[1A\x1b[2K\nfiles  intact"), ("names", "žluťoučký\u2028鱼")])
    assert text.splitlines() == [r"  labels  cat\x1b[1A\x1b[2K\nfiles  intact", r"  names   žluťoučký\u2028鱼"]
    fail("no class \x1b[31mred\x07", 2, debug=False)
    assert capsys.readouterr().err == "error: no class \\x1b[31mred\\x07\n"


def test_a_manifest_without_rows_is_shown() -> None:
    empty = ShardSet(Store(), "/set", Manifest(num_workers=1, workers=[Worker(files=[])]))
    assert ("copies", "0 (0.00% of the rows)") in describe(empty)


def test_a_command_to_run_next_is_quoted() -> None:
    manifest = Manifest(num_workers=1, workers=[Worker(files=[])], input=Input(uri="/raw; touch x"))
    command = materialize_command(ShardSet(Store(), "/my sets/a", manifest))
    assert shlex.split(command)[3:6] == ["/my sets/a", "--input", "/raw; touch x"]


def test_what_a_killed_first_run_moved_is_left_over_too(tmp_path: Path) -> None:
    """No set was ever committed: its files would be a plain reader's rows."""
    (tmp_path / "worker=000").mkdir()
    (tmp_path / "worker=000" / "part-00000-0123abcd.parquet").write_bytes(b"x")
    assert len(leftovers(Store(), str(tmp_path)).files) == 1
    assert clean(Store(), str(tmp_path)) == 1
    assert files_below(tmp_path) == set()
