"""Checkpoints under fire: cut into any slices, killed at every file change, torn, on a full disk."""

from __future__ import annotations

import errno
import io
import itertools
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.atomic import write_durably
from pipeline.core.errors import DataError
from tests.support.configs import make_config
from tests.support.kills import Countdown, was_killed_at
from trainer.checkpoints import read as checkpoint
from trainer.checkpoints.generations import Generations, write_generations
from trainer.checkpoints.prune import discard_after, prune, roll_back
from trainer.checkpoints.read import newest, read_slice_range, read_state, read_vector, unevaluated, versions, whole
from trainer.checkpoints.state import RunState, folder_of, slice_name
from trainer.checkpoints.write import mark_evaluated, mark_final, write_model, write_slice, write_state
from trainer.home.folders import Folders
from trainer.home.place import Place
from trainer.leader.restore import restore

CHANGES = ("mkdir", "fsync", "replace", "rename", "unlink", "rmdir")


def state_of(version: int, **values: Any) -> RunState:
    some = RunState(
        version, 4 * version, 128 * version, 0, version / 10, None, False, {0: version, 1: 2}, 1.5, 2, 7, 3, "{}"
    )
    return replace(some, **values)


def numbers(version: int, length: int) -> np.ndarray:
    return np.random.default_rng(version).standard_normal(length).astype(np.float32)


def write(root: Place, state: RunState, cuts: list[int] | None = None) -> None:
    """A checkpoint of ``numbers`` with slices between the cuts; momentum is minus the parameters."""
    folder, values = folder_of(root, state.version), numbers(state.version, state.total)
    bounds = [0, *(cuts or [state.total // 2]), state.total]
    for index, (begin, end) in enumerate(itertools.pairwise(bounds)):
        momentum = -values[begin : max(begin, min(end, state.num_parameters))]
        write_slice(folder, index, len(bounds) - 1, state.version, begin, end, state.total, values[begin:end], momentum)
    write_state(folder, replace(state, num_servers=len(bounds) - 1))


def files_below(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def files_of(*versions: int) -> set[str]:
    names = (slice_name(0, 2), slice_name(1, 2), "state.json")
    return {f"{version:08d}/{name}" for version in versions for name in names}


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(data=st.data(), parameters=st.integers(1, 12), buffers=st.integers(0, 6))
def test_any_range_is_read_back_from_slices_of_any_number_of_servers(data: Any, parameters: Any, buffers: Any) -> None:
    total = parameters + buffers
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    begin, end = sorted(data.draw(st.tuples(st.integers(0, total), st.integers(0, total))))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root, state_of(5, num_parameters=parameters, num_buffers=buffers), cuts)
        whole_vector = numbers(5, total)
        np.testing.assert_array_equal(read_vector(root, 5), whole_vector)
        values, momentum = read_slice_range(root, 5, begin, end)
        assert values.dtype == momentum.dtype == np.float32
        np.testing.assert_array_equal(values, whole_vector[begin:end])
        np.testing.assert_array_equal(momentum, -whole_vector[:parameters][begin:end])


def test_a_range_outside_the_vector_is_refused(tmp_path: Path) -> None:
    write(tmp_path, state_of(1))
    with pytest.raises(ValueError, match=r"\[4, 11\) is no range of 10 elements"):
        read_slice_range(tmp_path, 1, 4, 11)


def test_a_state_reads_back_as_it_was_written(tmp_path: Path) -> None:
    state = state_of(3, epoch=1 / 3, epoch_boundary=4, final=True, clocks={11: 5, 2: 0}, identity='{"seed": 1}')
    write_state(folder_of(tmp_path, 3), state)
    assert read_state(tmp_path, 3) == state


def test_a_whole_checkpoint_has_its_state_and_every_slice(tmp_path: Path) -> None:
    assert whole(tmp_path / "absent") == []
    for missing in sorted(files_of(1)):
        shutil.rmtree(folder_of(tmp_path, 1), ignore_errors=True)
        write(tmp_path, state_of(1))
        assert whole(tmp_path) == [1]
        (tmp_path / missing).unlink()
        assert whole(tmp_path) == []
    write_state(folder_of(tmp_path, 1), state_of(1, num_servers=3))
    assert whole(tmp_path) == []


def test_the_newest_checkpoint_has_the_greatest_version(tmp_path: Path) -> None:
    for version in (99_999_999, 100_000_000, 7):
        write(tmp_path, state_of(version))
    (tmp_path / "notes").mkdir()
    assert whole(tmp_path) == [7, 99_999_999, 100_000_000]
    assert newest(tmp_path) == newest(tmp_path, verify=True) == 100_000_000


def killing(step: int, action: Callable[[], None]) -> bool:
    """Run an action in a forked process killed before its file change number ``step``, or half-way through a write."""

    def tear_writes(countdown: Countdown) -> None:
        class TornFile(io.FileIO):
            def write(self, data: Any) -> int:
                half = super().write(data[: len(data) // 2])
                countdown.step()
                return half + super().write(data[half:])

        checkpoint.open = lambda path, mode: TornFile(path, mode.replace("b", ""))  # type: ignore[attr-defined]

    return was_killed_at(step, action, CHANGES, tear_writes)


@pytest.mark.full
def test_a_server_killed_at_any_change_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    found = set()
    for step in itertools.count():
        root = tmp_path / str(step)
        for version in (1, 2, 3):
            write(root, state_of(version, epoch_boundary=version))
            mark_evaluated(root, read_state(root, version))

        def go_on(root: Path = root) -> None:
            write(root, state_of(4))
            prune(root, keep=1)

        died = killing(step, go_on)
        for version in whole(root):  # none of them is half written or half deleted
            np.testing.assert_array_equal(read_vector(root, version), numbers(version, 10))
        assert unevaluated(root) == []
        latest = newest(root, verify=True)
        assert latest in (3, 4)
        found.add(latest)
        discard_after(root, latest)
        write(root, state_of(9))
        prune(root, keep=1)
        assert files_below(root) == files_of(9)
        if not died:
            break
    assert step > 25, "there are more steps than that"
    assert found == {3, 4}


def test_a_file_is_durable_before_its_name_and_both_on_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    done: list[str] = []

    def noted(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            is_folder = name == "fsync" and os.path.isdir(f"/proc/self/fd/{args[0]}")
            done.append(f"{name} folder" if is_folder else name)
            return change(*args)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, noted(name, getattr(os, name)))
    write_durably(tmp_path / "file", b"content")
    assert done == ["fsync", "replace", "fsync folder"]


def test_leftovers_of_a_killed_writer_go_with_the_next_write(tmp_path: Path) -> None:
    assert killing(2, lambda: write_durably(tmp_path / "file", b"content"))
    assert len(list(tmp_path.iterdir())) == 1
    write_durably(tmp_path / "file", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_draft_that_another_writer_deletes_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def deleted(draft: Path, path: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        write_durably(path, b"of another process")
        replace(draft, path)

    monkeypatch.setattr(os, "replace", deleted)
    write_durably(tmp_path / "file", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"content"


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def of_another_version(path: Path) -> None:
    write_slice(path.parent, 1, 2, 1, 5, 10, 10, numbers(2, 5), numbers(2, 2))


def of_another_generation(path: Path) -> None:
    write_slice(path.parent, 1, 2, 2, 5, 10, 10, numbers(2, 5), numbers(2, 2), 4)
    path.with_name(slice_name(1, 2, 4)).rename(path)


def of_another_range(path: Path) -> None:
    write_slice(path.parent, 1, 2, 2, 4, 10, 10, numbers(2, 6), numbers(2, 3))


def of_a_longer_vector(path: Path) -> None:
    write_slice(path.parent, 1, 2, 2, 5, 11, 11, numbers(2, 6), numbers(2, 2))


def without_its_end(path: Path) -> None:
    write_slice(path.parent, 1, 2, 2, 5, 9, 10, numbers(2, 4), numbers(2, 2))


def with_fewer_values(path: Path) -> None:
    write_slice(path.parent, 1, 2, 2, 5, 10, 10, numbers(2, 4), numbers(2, 2))


def with_less_momentum(path: Path) -> None:
    write_slice(path.parent, 1, 2, 2, 5, 10, 10, numbers(2, 5), numbers(2, 1))


@pytest.mark.parametrize(
    "damage",
    [
        torn,
        longer,
        zeros,
        of_another_version,
        of_another_generation,
        of_another_range,
        of_a_longer_vector,
        without_its_end,
        with_fewer_values,
        with_less_momentum,
    ],
)
def test_a_broken_slice_is_named_and_an_older_checkpoint_used(tmp_path: Path, damage: Any) -> None:
    for version in (1, 2):
        write(tmp_path, state_of(version))
    path = folder_of(tmp_path, 2) / slice_name(1, 2)
    damage(path)
    with pytest.raises(DataError, match=str(path)):
        read_vector(tmp_path, 2)
    warnings: list[str] = []
    assert newest(tmp_path, verify=True, warn=warnings.append) == 1
    assert len(warnings) == 1
    assert str(path) in warnings[0]
    assert "\n" not in warnings[0]


def test_a_roll_back_names_a_broken_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for version in (1, 2):
        write(tmp_path, state_of(version))
    torn(folder_of(tmp_path, 2) / slice_name(1, 2))
    assert roll_back(tmp_path, 3) == (1, 3)
    assert [str(folder_of(tmp_path, 2)) in record.getMessage() for record in caplog.records] == [True]


def test_a_run_without_a_sound_checkpoint_has_broken_data(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    write(root, state_of(1))
    torn(folder_of(root, 1) / slice_name(1, 2))
    with pytest.raises(DataError, match="holds no whole checkpoint, not even the first; choose another --output"):
        restore(make_config(tmp_path, output=tmp_path), Folders.from_home(tmp_path), 1)
    assert versions(root) == [1], "nothing is deleted"


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 2}', "null"])
def test_a_broken_state_is_named_and_an_older_checkpoint_used(tmp_path: Path, text: str) -> None:
    for version in (1, 2):
        write(tmp_path, state_of(version))
    path = folder_of(tmp_path, 2) / "state.json"
    path.write_text(text)
    with pytest.raises(DataError, match=str(path)):
        read_state(tmp_path, 2)
    warnings: list[str] = []
    assert newest(tmp_path, verify=True, warn=warnings.append) == 1
    assert str(path) in warnings[0]
    assert whole(tmp_path) == [1]


def test_a_state_of_another_version_is_refused(tmp_path: Path) -> None:
    write(tmp_path, state_of(1))
    shutil.copytree(folder_of(tmp_path, 1), folder_of(tmp_path, 2))
    with pytest.raises(DataError, match=r"state\.json is of version 1, not 2"):
        read_vector(tmp_path, 2)


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_slice_cut_off_anywhere_is_never_taken_for_sound(data: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root, state_of(1))
        path = folder_of(root, 1) / slice_name(0, 2)
        content = path.read_bytes()
        path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        assert newest(root, verify=True) is None


def test_an_unfinished_checkpoint_is_passed_over_without_a_warning(tmp_path: Path) -> None:
    write(tmp_path, state_of(1))
    write_slice(folder_of(tmp_path, 2), 0, 2, 2, 0, 5, 10, numbers(2, 5), numbers(2, 5))
    warnings: list[str] = []
    assert newest(tmp_path, verify=True, warn=warnings.append) == 1
    assert warnings == []


def test_no_other_history_completes_an_unfinished_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, state_of(1))
    write_slice(folder_of(tmp_path, 2), 1, 2, 2, 5, 10, 10, numbers(2, 5), numbers(2, 2))  # server 1 of the old history
    discard_after(tmp_path, 1)
    write_slice(folder_of(tmp_path, 2), 0, 2, 2, 0, 5, 10, numbers(3, 5), numbers(3, 5))
    write_state(folder_of(tmp_path, 2), state_of(2))
    assert whole(tmp_path) == [1]


def test_a_slice_of_another_generation_completes_nothing(tmp_path: Path) -> None:
    """Though nothing was discarded, and servers are as many as before, or more, or fewer."""
    for servers in (2, 3):
        folder = folder_of(tmp_path, servers)
        for index in range(1, servers):
            write_slice(folder, index, servers, servers, 5, 10, 10, numbers(2, 5), numbers(2, 2), 6)
        write_slice(folder, 0, 2, servers, 0, 5, 10, numbers(3, 5), numbers(3, 5), 7)
        write_state(folder, state_of(servers, generation=7))
        assert whole(tmp_path) == []


def test_a_late_writer_of_another_generation_changes_nothing(tmp_path: Path) -> None:
    old, new = state_of(2, generation=6), state_of(2, generation=7)
    for state in (old, new):
        for index, (begin, end) in enumerate(((0, 5), (5, 10))):
            part = numbers(state.generation, 10)[begin:end]
            momentum = part[: 7 - begin]
            write_slice(folder_of(tmp_path, 2), index, 2, 2, begin, end, 10, part, momentum, state.generation)
        write_state(folder_of(tmp_path, 2), state)
    write_slice(folder_of(tmp_path, 2), 1, 2, 2, 5, 10, 10, numbers(9, 5), numbers(9, 2), 6)
    np.testing.assert_array_equal(read_vector(tmp_path, 2), numbers(7, 10))
    write_generations(tmp_path, Generations().begin(6, 0).begin(7, 1))
    assert whole(tmp_path) == [2]
    write_state(folder_of(tmp_path, 2), old)
    assert whole(tmp_path) == []
    assert newest(tmp_path, verify=True) is None


def test_a_slice_named_after_another_generation_is_broken(tmp_path: Path) -> None:
    write(tmp_path, state_of(1))
    path = folder_of(tmp_path, 1) / slice_name(0, 2)
    path.rename(path.with_name(slice_name(0, 2, 8)))
    (folder_of(tmp_path, 1) / slice_name(1, 2)).rename(folder_of(tmp_path, 1) / slice_name(1, 2, 8))
    write_state(folder_of(tmp_path, 1), state_of(1, generation=8))
    with pytest.raises(DataError, match="is of generation 0, not 8"):
        read_vector(tmp_path, 1)


steps_back = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=8)


@given(steps_back)
def test_what_counts_is_what_no_later_generation_began_before(steps: list[tuple[int, int]]) -> None:
    generation, found, begun = 0, Generations(), []
    for more, version in steps:
        generation += more
        begun.append((generation, version))
        found = found.begin(generation, version)
    assert found.latest == generation
    for asked in range(generation + 2):
        for version in range(32):
            expected = all(version <= start for later, start in begun if later > asked)
            assert found.includes(asked, version) == expected


def test_pruning_names_the_waiting_checkpoints_it_gives_up(tmp_path: Path) -> None:
    for version in range(1, 11):
        write(tmp_path, state_of(version, epoch_boundary=version))
    mark_evaluated(tmp_path, state_of(2))
    assert prune(tmp_path, keep=1, waiting=4) == [1, 3, 4, 5, 6]
    assert versions(tmp_path) == [7, 8, 9, 10]
    assert prune(tmp_path, keep=1, waiting=4) == []


def test_pruning_keeps_the_best_up_to_each_possible_roll_back(tmp_path: Path) -> None:
    for version, accuracy in enumerate((0.1, 0.5, 0.2, 0.5, 0.4, 0.9, 0.3), start=1):
        write(tmp_path, state_of(version, epoch_boundary=version))
        mark_evaluated(tmp_path, state_of(version), accuracy)
    prune(tmp_path, keep=3)
    assert versions(tmp_path) == [2, 5, 6, 7], "5, 6 and 7 may be gone back to; up to 5, 2 is the best"


def test_pruning_keeps_the_lowest_loss_of_real_targets(tmp_path: Path) -> None:
    for version, loss in enumerate((3.0, 0.5, 2.0, 0.7, 0.6), start=1):
        write(tmp_path, state_of(version, epoch_boundary=version))
        mark_evaluated(tmp_path, state_of(version), None, loss)
    prune(tmp_path, keep=1)
    assert versions(tmp_path) == [2, 5]


@pytest.mark.parametrize("refused", ["rmtree", "unlink"])
def test_what_cannot_be_deleted_costs_a_later_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """On a file system that hosts share, a file that somebody has open stays, and handles grow stale."""
    for version in (1, 2, 3, 4):
        write(tmp_path, state_of(version))

    def busy(*_: object, **__: object) -> None:
        raise OSError(errno.ENOTEMPTY if refused == "rmtree" else errno.ESTALE, "refused")

    with monkeypatch.context() as patched:
        patched.setattr(shutil if refused == "rmtree" else Path, refused, busy)
        prune(tmp_path, keep=1)
        discard_after(tmp_path, 3)
        assert versions(tmp_path) == [1, 2, 3, 4]
        assert whole(tmp_path) == ([] if refused == "rmtree" else [1, 2, 3, 4])
    write(tmp_path, state_of(4))
    prune(tmp_path, keep=1)
    assert versions(tmp_path) == [4]


def test_an_evaluation_is_of_its_own_generation(tmp_path: Path) -> None:
    write(tmp_path, state_of(1, epoch_boundary=1))
    mark_evaluated(tmp_path, state_of(1, generation=3))
    assert [state.version for state in unevaluated(tmp_path)] == [1]
    mark_evaluated(tmp_path, state_of(1))
    assert unevaluated(tmp_path) == []
    write(tmp_path, state_of(1, final=True))
    mark_evaluated(tmp_path, state_of(1))  # the evaluator had begun before the run ended here
    assert [state.version for state in unevaluated(tmp_path)] == [1]


def test_pruning_keeps_sound_waiting_and_unfinished_checkpoints(
    tmp_path: Path,
) -> None:
    for version in (1, 2, 3, 4, 5, 6, 9, 11):
        write(tmp_path, state_of(version, epoch_boundary=version if version < 4 else None))
    mark_evaluated(tmp_path, read_state(tmp_path, 1))
    mark_evaluated(tmp_path, read_state(tmp_path, 3))
    torn(folder_of(tmp_path, 9) / slice_name(0, 2))  # broken ones do not count as kept ...
    torn(folder_of(tmp_path, 11) / slice_name(0, 2))  # ... nor do they make a sound one older
    (folder_of(tmp_path, 5) / "state.json").unlink()
    write_slice(folder_of(tmp_path, 7), 0, 2, 7, 0, 5, 10, numbers(7, 5), numbers(7, 5))
    write(tmp_path, state_of(8))
    write(tmp_path, state_of(10))
    write_slice(folder_of(tmp_path, 12), 0, 2, 12, 0, 5, 10, numbers(12, 5), numbers(12, 5))
    prune(tmp_path, keep=2)
    assert versions(tmp_path) == [2, 8, 10, 11, 12]
    mark_evaluated(tmp_path, read_state(tmp_path, 2))
    prune(tmp_path, keep=2)
    assert versions(tmp_path) == [8, 10, 11, 12]


def test_a_deleted_checkpoint_loses_its_state_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, state_of(1, epoch_boundary=1))
    mark_evaluated(tmp_path, read_state(tmp_path, 1))
    seen = []
    monkeypatch.setattr(shutil, "rmtree", lambda folder: seen.append(sorted(path.name for path in folder.iterdir())))
    discard_after(tmp_path, 0)
    assert seen == [["evaluated", slice_name(0, 2), slice_name(1, 2)]]


def test_pruning_deletes_nothing_where_nothing_is_sound(tmp_path: Path) -> None:
    write(tmp_path, state_of(1))
    torn(folder_of(tmp_path, 1) / slice_name(0, 2))
    write_slice(folder_of(tmp_path, 2), 0, 2, 2, 0, 5, 10, numbers(2, 5), numbers(2, 5))
    prune(tmp_path)
    assert versions(tmp_path) == [1, 2]


def test_ends_of_epochs_wait_for_the_evaluator_oldest_first(tmp_path: Path) -> None:
    for version, values in ((4, {"final": True}), (1, {"epoch_boundary": 1}), (2, {}), (3, {"epoch_boundary": 2})):
        write(tmp_path, state_of(version, **values))
    assert [state.version for state in unevaluated(tmp_path)] == [1, 3, 4]
    mark_evaluated(tmp_path, read_state(tmp_path, 3))
    assert [state.version for state in unevaluated(tmp_path)] == [1, 4]
    write(tmp_path, state_of(3, final=True))  # written again, it may be the final one now
    assert [state.version for state in unevaluated(tmp_path)] == [1, 3, 4]
    mark_evaluated(tmp_path, state_of(99))  # discarded meanwhile
    assert versions(tmp_path) == [1, 2, 3, 4]


def test_a_run_that_goes_on_has_no_final_checkpoint_any_more(tmp_path: Path) -> None:
    write(tmp_path, state_of(1, final=True, epoch_boundary=2))
    mark_evaluated(tmp_path, read_state(tmp_path, 1))
    mark_final(tmp_path, read_state(tmp_path, 1), final=False)
    assert read_state(tmp_path, 1) == state_of(1, final=False, epoch_boundary=2)
    assert unevaluated(tmp_path) == []


def is_as_before(root: Path) -> bool:
    return whole(root) == [1] and files_below(root) == files_of(1)


def test_a_checkpoint_larger_than_files_may_be_fails_without_a_trace(tmp_path: Path) -> None:
    write(tmp_path, state_of(1))
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        large = np.zeros(10_000, np.float32)
        try:
            write_model(folder_of(tmp_path, 2), 2, large, large)
        except OSError:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert is_as_before(tmp_path)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Any]:
    """A disk of 1 MiB; its mount needs root."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_leaves_no_trace_and_a_freed_one_a_checkpoint(
    tiny_disk: Any,
) -> None:
    root = tiny_disk / "checkpoints"
    write(root, state_of(1))
    large = np.zeros(1 << 18, np.float32)
    with pytest.raises(OSError, match="No space left"):
        write_model(folder_of(root, 2), 2, large, large)
    assert is_as_before(root)
    (tiny_disk / "filler").write_bytes(bytes(shutil.disk_usage(tiny_disk).free))
    with pytest.raises(OSError, match="No space left"):
        write(root, state_of(3))
    with pytest.raises(OSError, match="No space left"):
        write_state(folder_of(root, 1), state_of(1, final=True))
    assert is_as_before(root)
    assert not read_state(root, 1).final
    (tiny_disk / "filler").unlink()
    write(root, state_of(3))
    assert newest(root, verify=True) == 3
