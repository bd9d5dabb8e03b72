"""What the folder of a run allows a start to do, and what a refusal leaves there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError, JobError, UsageError
from tests.clusters.machine import ROOT
from tests.support.configs import change, make_config
from trainer.home.place import Place, StorePlace, append_lines, listing
from trainer.run_files import LOCK
from trainer.runlog import run_folder
from trainer.runlog.run_folder import Start, locked, prepare_folder, resolve_output
from trainer.runlog.run_record import RunRecord, SavedRun
from trainer.start.folder import describe_finished

ASKED = RunRecord(make_config(steps=10, servers=2), num_workers=4, rows=1000, shards="f00d")
RESULTS = ("metrics.jsonl", "pushes.csv", "checkpoints/00000007/state.json", "checkpoints/00000007/slice-000-of-002.st")


def asking(run: RunRecord = ASKED, **values: Any) -> RunRecord:
    return replace(run, config=change(run.config, **values))


def start(output: Path, run: RunRecord = ASKED, *, resume: bool = False, overwrite: bool = False) -> Start:
    with prepare_folder(output, run, resume=resume, overwrite=overwrite) as found:
        return found


def fill(output: Path, *names: str) -> None:
    for name in names:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(name)


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    output = tmp_path / "run"
    assert start(output) is Start.NEW
    fill(output, *RESULTS)
    return output


@pytest.fixture
def finished(unfinished: Path) -> Path:
    (unfinished / "result.json").write_text('{"cause": "finished"}')
    return unfinished


def content(output: Path) -> dict[str, bytes]:
    return {name: (output / name).read_bytes() for name in listing(output)}


@pytest.mark.parametrize("resume", [False, True])
def test_a_start_in_an_absent_or_empty_folder_is_a_new_run(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "empty").mkdir()
    assert start(tmp_path / "a" / "b", resume=resume) is Start.NEW
    assert start(tmp_path / "empty", resume=resume) is Start.NEW
    early = "logs/worker-3.log", "rows/host-b/8c1f-0-hashes.rows"  # of a host that was faster
    fill(tmp_path / "early", *early)
    assert start(tmp_path / "early", resume=resume) is Start.NEW
    assert all((tmp_path / "early" / name).exists() for name in early)


def test_an_unfinished_run_goes_on_with_resume_and_only_then(unfinished: Path) -> None:
    before = content(unfinished)
    with pytest.raises(UsageError, match=r"--resume continues with it, --overwrite starts anew"):
        start(unfinished)
    assert content(unfinished) == before
    assert start(unfinished, resume=True) is Start.RESUME
    (unfinished / "result.json").write_text('{"cause": "interrupted"}')
    assert start(unfinished, asking(steps=20), resume=True) is Start.RESUME
    assert json.loads((unfinished / "config.json").read_text())["config"]["run"]["steps"] == 20
    assert {name: content(unfinished)[name] for name in RESULTS} == {name: before[name] for name in RESULTS}


@pytest.mark.parametrize("resume", [False, True])
def test_a_finished_run_is_found_finished_and_untouched(finished: Path, resume: bool) -> None:
    before = content(finished)
    assert start(finished, resume=resume) is Start.FINISHED
    moved = replace(asking(device="cpu", shards="elsewhere", steps=None, epochs=1), rows=10 * 128)
    assert start(finished, moved, resume=resume) is Start.FINISHED  # an epoch of ten steps
    with pytest.raises(UsageError, match="10 steps per worker, more than the 9 asked for"):
        start(finished, asking(steps=9), resume=resume)
    assert content(finished) == before


def test_a_finished_run_is_made_longer_with_resume(finished: Path) -> None:
    with pytest.raises(UsageError, match=r"10 steps per worker; --resume continues to the 30"):
        start(finished, asking(steps=30))
    assert start(finished, asking(steps=30), resume=True) is Start.RESUME
    assert not (finished / "result.json").exists()
    with pytest.raises(UsageError, match="has not ended"):
        start(finished, asking(steps=30))


def test_a_finished_run_names_the_flags_that_continue_it(finished: Path) -> None:
    """A larger --epochs does not continue a run that --patience has ended."""
    for result, flags in (
        ('{"cause": "finished", "early_stop": null}', "a larger --epochs or --steps with --resume continues"),
        (
            '{"cause": "finished", "early_stop": {"epoch": 3}}',
            "ended early by --patience, nothing to do; --resume with a larger --patience, or without --patience, continues",
        ),
    ):
        (finished / "result.json").write_text(result)
        assert describe_finished(finished).startswith(f"{finished}: finished already, ")
        assert describe_finished(finished).endswith(flags)
    assert start(finished, asking(steps=30), resume=True) is Start.FINISHED
    assert start(finished, asking(patience=3), resume=True) is Start.RESUME


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    ("other", "part"),
    [
        (replace(ASKED, num_workers=5, shards="beef"), "worker count 4, not 5"),
        (replace(ASKED, shards="beef"), "shard digest f00d, not beef"),
        (asking(seed=7), "--seed 0, not 7"),
        (asking(batch_size=64), "--batch-size 128, not 64"),
        (asking(protocol="bsp"), "--protocol asp, not bsp"),
    ],
)
def test_another_run_in_a_folder_is_refused_with_the_difference(
    finished: Path, other: Any, part: Any, resume: bool
) -> None:
    before = content(finished)
    with pytest.raises(UsageError, match="--overwrite") as refused:
        start(finished, other, resume=resume)
    assert part in str(refused.value)
    assert ("--resume cannot change it" in str(refused.value)) == resume
    assert content(finished) == before


def test_where_and_on_how_many_servers_a_run_goes_on_is_free(finished: Path) -> None:
    assert start(finished, asking(steps=30, servers=1), resume=True) is Start.RESUME


def test_overwrite_deletes_what_a_run_writes_and_nothing_else(finished: Path) -> None:
    fill(finished, "logs/server-0.log", "tensorboard/events.out.tfevents.1.host.2.0", ".best.safetensors.0a1b2c3d.tmp",
         "report.html.tmp", ".result.json.tmp", "checkpoints/.void/state.json", "checkpoints/generations.json",
         "checkpoints/.generations.json.0a1b2c3d.tmp", "rows/a-host.local/0a1b-0-hashes.rows",
         "rows/a-host.local/2c3d-0.rows.draft")  # fmt: skip
    assert start(finished, asking(seed=7), overwrite=True) is Start.NEW
    assert sorted(path.name for path in finished.iterdir()) == [".lock", "config.json"]
    assert json.loads((finished / "config.json").read_text())["config"]["run"]["seed"] == 7


@pytest.mark.parametrize(
    "foreign", ["thesis.tex", "logs/notes.txt", "checkpoints/best.pt", "checkpoints/00000007/a/b", "x.tmp", "x/y.json"]
)
def test_overwrite_refuses_a_folder_with_files_of_others(finished: Path, foreign: Any) -> None:
    fill(finished, foreign)
    before = content(finished)
    with pytest.raises(UsageError, match="which no run wrote") as refused:
        start(finished, overwrite=True)
    assert foreign in str(refused.value)
    assert content(finished) == before


def test_overwrite_follows_no_link_out_of_the_folder(finished: Path, tmp_path: Path) -> None:
    fill(tmp_path / "scratch", "00000009/state.json")
    (finished / "tensorboard").symlink_to(tmp_path / "scratch")
    with pytest.raises(UsageError, match="tensorboard, which no run wrote"):
        start(finished, overwrite=True)
    assert listing(tmp_path / "scratch") == ["00000009/state.json"]


def test_a_foreign_folder_is_refused_and_left_unchanged(tmp_path: Path) -> None:
    fill(tmp_path, "thesis.tex")
    for resume in (False, True):
        with pytest.raises(UsageError, match=r"thesis\.tex, which no run wrote"):
            start(tmp_path, resume=resume)
    assert listing(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("is_local", [True, False])
def test_a_refused_start_tidies_up_before_it_unlocks_the_folder(
    tmp_path: Path, near: StorePlace, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that waits for the lock must not get it before the refused one has deleted its file."""
    output: Place = tmp_path / "new" / "run" if is_local else near / "run"
    delete = run_folder._delete

    def delete_when_locked(*args: Any, **more: Any) -> None:
        with pytest.raises(JobError, match="in use"), locked(output):
            pass
        delete(*args, **more)

    def refuse(record: RunRecord, saved: SavedRun) -> RunRecord:
        raise UsageError("refused")

    monkeypatch.setattr(run_folder, "_delete", delete_when_locked)
    with (
        pytest.raises(UsageError, match="refused"),
        prepare_folder(output, ASKED, resume=False, overwrite=False, check=refuse),
    ):
        pass
    assert not (tmp_path / "new").exists() if is_local else listing(near) == []


def test_a_start_that_waited_for_a_refused_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is on a file that the refused start has deleted, with its folder."""
    output = tmp_path / "run"
    with ExitStack() as refused:
        refused.enter_context(locked(output))

        def end(pause_s: float) -> None:
            (output / LOCK).unlink()
            output.rmdir()
            refused.close()

        monkeypatch.setattr("trainer.runlog.run_folder.time.sleep", end)
        with locked(output), open(output / LOCK) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_failed_start_does_not_hinder_the_next(tmp_path: Path) -> None:
    assert start(tmp_path, asking(model="net:missing")) is Start.NEW
    fill(tmp_path, "logs/prepare.log", "checkpoints/00000000/state.json", "checkpoints/00000000/slice-000-of-001.st")
    assert start(tmp_path) is Start.NEW
    assert not (tmp_path / "checkpoints").exists()  # the other model's first numbers


def test_results_without_a_configuration_are_neither_mixed_nor_lost(unfinished: Path) -> None:
    (unfinished / "config.json").unlink()
    with pytest.raises(UsageError, match=r"without its config\.json"):
        start(unfinished, resume=True)
    (unfinished / "config.json").write_text('{"config": {"model": 1}')
    with pytest.raises(DataError, match=r"config\.json is damaged"):
        start(unfinished, resume=True)
    assert start(unfinished, overwrite=True) is Start.NEW


@pytest.mark.slow
def test_a_folder_in_use_is_refused_whatever_is_asked(unfinished: Path) -> None:
    before = content(unfinished)
    program = "from pathlib import Path; import sys; from trainer.runlog.run_folder import locked\n"
    program += "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(unfinished)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for flag in ("resume", "overwrite"):
            with pytest.raises(JobError, match="in use by a run that has not ended") as refused:
                start(unfinished, resume=flag == "resume", overwrite=flag == "overwrite")
            assert refused.value.exit_code == 1, "nothing is wrong with the command"
        assert content(unfinished) == before
        other.kill()  # a lock never outlives its process
    with locked(unfinished):
        pass


def test_a_folder_is_held_from_the_decision_to_the_end_of_the_run(tmp_path: Path) -> None:
    with prepare_folder(tmp_path / "run", ASKED, resume=False, overwrite=False) as found:
        assert found is Start.NEW
        with pytest.raises(JobError, match="in use"):
            start(tmp_path / "run", overwrite=True)
    assert start(tmp_path / "run", overwrite=True) is Start.NEW


@pytest.mark.parametrize("text", ["", "s3://bucket/run", "hdfs:/x"])
def test_an_output_that_is_no_local_folder_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--output"):
        resolve_output(text)


def test_a_log_that_this_user_may_not_append_to_is_refused(unfinished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run would go on, and its result would be that of the log before."""
    before = content(unfinished)
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "pushes.csv")
    with pytest.raises(UsageError, match=r"pushes\.csv may not be written by user \d+: .*chmod g\+w"):
        start(unfinished, resume=True)
    assert content(unfinished) == before


def test_a_log_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        append_lines(tmp_path / "metrics.jsonl", b"{}\n")
    finally:
        os.umask(before)
    assert (tmp_path / "metrics.jsonl").stat().st_mode & 0o777 == 0o664


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UsageError, match=rf"{tmp_path}/run/\.lock: this file system has no file locks"):
        start(tmp_path / "run")
