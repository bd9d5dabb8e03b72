"""The request of other workers: what the run and the command make of it, whoever is late or killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError, JobError, UsageError
from tests.support.configs import make_config
from trainer import workers_command
from trainer.launch.workers_request import Requests, WorkersRequest, delete_request, read_request, write_request
from trainer.lifecycle.interruption import RunInterruptedError
from trainer.options import Options
from trainer.runlog.run_folder import locked, prepare_folder
from trainer.runlog.run_record import RunRecord
from trainer.start.changes import next_options

FIVE = WorkersRequest("a", 5)
STOPPED = RunInterruptedError("interrupted", changes=True)


def requests_of(home: Path, obstacle: str = "") -> Requests:
    return Requests(home, obstacle, now=iter(range(0, 10_000, 10)).__next__)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder of a run with 3 workers and a mini-batch that is no default."""
    record = RunRecord(make_config(steps=10, batch_size=40), num_workers=3, rows=1000, shards="f00d")
    with prepare_folder(tmp_path, record, resume=False, overwrite=False):
        (tmp_path / "metrics.jsonl").touch()
    return tmp_path


def test_a_request_is_taken_once(home: Path) -> None:
    requests = requests_of(home)
    assert not requests.is_waiting()
    write_request(home, FIVE)
    assert requests.is_waiting()
    assert requests.take() == FIVE
    assert not requests.is_waiting()
    requests.meet()
    assert read_request(home) is None


def test_a_stop_for_a_withdrawn_request_keeps_the_workers(home: Path) -> None:
    """The command may be ended after the run has begun to stop."""
    requests = requests_of(home)
    write_request(home, FIVE)
    assert requests.is_waiting()
    delete_request(home, FIVE)
    options = Options(overwrite=True, batch_size_given=True)
    continued = next_options(STOPPED, options, requests)
    assert continued == Options(resume=True, workers=3)
    assert continued is not None
    assert continued.batch_size_given is False


def test_a_request_without_a_file_precedes_that_of_a_file(home: Path) -> None:
    """Its refusal is written nowhere."""
    requests = requests_of(home)
    write_request(home, FIVE)
    assert requests.is_waiting()
    requests.submit(2)
    assert requests.is_waiting()
    tried = next_options(STOPPED, Options(silent=True), requests)
    assert tried is not None
    assert tried.workers == 2
    fallback = next_options(UsageError("too few for --k"), tried, requests)
    assert fallback is not None
    assert fallback.workers == 3
    assert read_request(home) == FIVE


@pytest.mark.parametrize("withdrawn", [False, True])
def test_a_refused_start_falls_back_to_the_workers_of_the_run(home: Path, withdrawn: bool) -> None:
    """It keeps its mini-batch, whether or not the command still waits."""
    requests = requests_of(home)
    write_request(home, FIVE)
    assert requests.is_waiting()
    tried = next_options(STOPPED, Options(silent=True), requests)
    assert tried is not None
    assert (tried.workers, tried.resume, tried.batch_size_given) == (5, True, False)
    if withdrawn:
        delete_request(home, FIVE)
    fallback = next_options(UsageError("too few examples"), tried, requests)
    assert fallback is not None
    assert (fallback.workers, fallback.resume, fallback.batch_size_given) == (3, True, False)
    assert read_request(home) == replace(FIVE, refusal="too few examples")
    # The start that follows leaves the answer to the command, and does not stop for it.
    requests.meet()
    assert read_request(home) == replace(FIVE, refusal="too few examples")
    assert not requests.is_waiting()
    assert next_options(UsageError("another"), fallback, requests) is None


@pytest.mark.parametrize(
    "error", [RunInterruptedError("interrupted"), JobError("failed"), UsageError("wrong"), DataError("damaged")]
)
def test_other_ends_are_ends(home: Path, error: JobError) -> None:
    """Also for a start that was asked for as many workers as a request that it has not taken."""
    write_request(home, FIVE)
    assert next_options(error, Options(resume=True, workers=5), requests_of(home)) is None
    assert read_request(home) == FIVE


def test_a_run_that_cannot_change_refuses_at_once(home: Path) -> None:
    requests = requests_of(home, "it is started by hand")
    write_request(home, FIVE)
    assert not requests.is_waiting()
    assert read_request(home) == replace(FIVE, refusal="it is started by hand")


@pytest.mark.parametrize("text", ["", "{", '{"id": "a", "workers": 0}', '{"id": "a", "workers": "5"}', "[]"])
def test_a_damaged_request_is_none(home: Path, text: str) -> None:
    (home / "workers.json").write_text(text)
    assert not requests_of(home).is_waiting()


def command(home: Path, *flags: str) -> list[BaseException]:
    """Run the command in this process, and return the error with which it ends, if any."""
    try:
        workers_command.main([str(home), *flags])
    except JobError as error:
        return [error]
    return []


def answered(home: Path, answer: Callable[[WorkersRequest], Any]) -> list[BaseException]:
    """Run the command against a run that holds the lock and gives an answer."""
    errors: list[BaseException] = []
    with locked(home):
        thread = threading.Thread(target=lambda: errors.extend(command(home, "--add", "2")))
        thread.start()
        while thread.is_alive():
            request = read_request(home)
            if request and not request.refusal:
                answer(request)
                break
        thread.join()
    return errors


def test_the_command_tells_the_answer(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_command, "POLL_S", 0.01)
    [refusal] = answered(home, lambda request: write_request(home, replace(request, refusal="too few examples")))
    assert isinstance(refusal, UsageError)
    assert "stays with 3 workers: too few examples" in str(refusal)
    assert read_request(home) is None
    # A refusal that a killed command has left does not block the next one.
    write_request(home, replace(FIVE, refusal="too few examples"))
    # Another command may write its request as soon as the run has met this one.
    [other] = answered(home, lambda request: write_request(home, WorkersRequest("b", 7)))
    assert "a later start of the run has not taken the request" in str(other)
    assert read_request(home) == WorkersRequest("b", 7)
    [waiting] = command(home, "--remove", "1")
    assert "another request waits" in str(waiting)


def test_the_command_sees_that_nothing_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [absent] = command(home, "--add", "2")
    assert "is not in progress" in str(absent)
    monkeypatch.setattr(workers_command, "GAP_S", 0.0)
    looks = iter([True, False])
    monkeypatch.setattr(workers_command, "_may_run", lambda _: next(looks))
    [ended] = command(home, "--add", "2")
    assert "the run has ended; its command with --resume --workers 5 continues it" in str(ended)
    assert read_request(home) is None
    [few] = command(home, "--remove", "3")
    assert "remove at most 2" in str(few)
    [both] = command(home, "--remove", "3", "--add", "1")
    assert "give only one of them" in str(both)
    [unknown] = command(home / "other")
    assert isinstance(unknown, DataError)
