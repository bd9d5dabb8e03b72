"""The lines on standard error in both formats: of jobs, of their errors and of libraries."""

from __future__ import annotations

import argparse
import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.core import command_line, console
from pipeline.core.errors import DataError
from pipeline.core.program import execute
from trainer.embed.__main__ import parser as embed_parser
from trainer.export.__main__ import parser as export_parser
from trainer.inference.__main__ import parser as predict_parser
from trainer.study.__main__ import main as study
from trainer.study.__main__ import parser as study_parser
from trainer.study.run.progress import StudyLog
from trainer.tables.progress import TableProgress


@pytest.fixture(autouse=True)
def text_again() -> Iterator[None]:
    yield
    console.choose_format(console.TEXT)


def lines(text: str) -> list[dict[str, Any]]:
    """The lines of JSON; checks that each has the five keys and a time in UTC."""
    parsed: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    for line in parsed:
        assert list(line) == ["ts", "level", "logger", "message", "fields"]
        assert abs(datetime.now(UTC) - datetime.fromisoformat(line["ts"])) < timedelta(hours=1)
        assert line["ts"].endswith("Z")
    return parsed


def ended(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run a command that fails with DataError; returns its exit code and standard error."""
    flags = command_line.parser("try", None, "")
    group: argparse._ArgumentGroup = flags.add_argument_group("run")
    command_line.add_config_flag(group, "none")
    command_line.add_log_format_flag(group)

    def main() -> int:
        command_line.parse(flags, argv)
        raise DataError("a.parquet is\nbroken")

    with pytest.raises(SystemExit) as end:
        execute(main, interrupted="run it again")
    return int(end.value.code or 0), capsys.readouterr().err


def test_an_error_is_a_line_of_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended([], capsys) == (3, "error: a.parquet is broken\n")
    (tmp_path / "c.toml").write_text('log_format = "json"')
    for argv in (["--log-format", "json"], ["--log-format=json"], ["--config", str(tmp_path / "c.toml")]):
        code, err = ended(argv, capsys)
        assert (code, [(line["level"], line["message"], line["fields"]) for line in lines(err)]) == (
            3, [("error", "a.parquet is broken", {"exit_code": 3})],
        )  # fmt: skip
    assert ended([], capsys) == (3, "error: a.parquet is broken\n"), "the next command of a process has its own format"


def test_usage_errors_are_lines_of_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    code, err = ended(["--log-format", "json", "--no-such-flag"], capsys)
    assert (code, lines(err)[0]["fields"]) == (2, {"exit_code": 2})
    assert ended(["--log-format", "xml"], capsys)[1].startswith("error: argument --log-format: invalid choice: 'xml'")


def test_warnings_of_libraries_are_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    console.choose_format(console.JSON)
    console.choose_format(console.JSON)
    logging.getLogger("a.library").warning("%d tries\nleft", 3)
    warnings.warn("is slow", stacklevel=1)
    try:
        raise ValueError("x")
    except ValueError:
        logging.getLogger("a.library").exception("failed")
    first, second, third = lines(capsys.readouterr().err)
    assert (first["logger"], first["level"], first["message"]) == ("a.library", "warning", "3 tries\nleft")
    assert "is slow" in second["message"]
    assert "ValueError: x" in third["fields"]["exception"]


def test_a_line_has_the_fields_that_have_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    console.say("sharding.job", "scan", text="[1 s] scan", fields={"rows": 3, "uri": Path("/x"), "none": None})
    assert capsys.readouterr().err == "[1 s] scan\n"
    console.choose_format(console.JSON)
    console.say("sharding.job", "scan", text="[1 s] scan", fields={"rows": 3, "uri": Path("/x"), "none": None})
    assert lines(capsys.readouterr().err)[0]["fields"] == {"rows": 3, "uri": "/x"}


def test_progress_of_tables_is_a_line_of_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    progress = TableProgress(quiet=False, phase="predict")
    progress.begin("predict", 3)
    progress.advance(3, "3 of 3 rows")
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \[ +0\.\d s\] predict +3 of 3 rows in 0\.0 s\n"
    assert re.fullmatch(time, capsys.readouterr().err)
    console.choose_format(console.JSON)
    progress.say("3 of 3 rows")
    (line,) = lines(capsys.readouterr().err)
    assert (line["message"], line["fields"]["phase"]) == ("predict: 3 of 3 rows", "predict")
    progress.warn("no labels")
    assert [line["level"] for line in lines(capsys.readouterr().err)] == ["warning"]


@pytest.mark.parametrize("make", [embed_parser, export_parser, predict_parser, study_parser])
def test_long_commands_choose_the_format(make: Callable[[], command_line.Parser]) -> None:
    assert "--log-format" in {name for action in make().actions for name in action.option_strings}


def test_progress_of_a_study_is_a_line_of_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    log = StudyLog()
    log.say("4 runs, 0 of them done, 2 at once")
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ \[ +0\.\d s\] 4 runs, 0 of them done, 2 at once\n"
    assert re.fullmatch(time, capsys.readouterr().err)
    console.choose_format(console.JSON)
    log.say("4 runs, 0 of them done, 2 at once")
    (line,) = lines(capsys.readouterr().err)
    assert (line["logger"], line["message"]) == ("sharding.study", "4 runs, 0 of them done, 2 at once")
    assert list(line["fields"]) == ["elapsed_s"]


def test_errors_of_a_study_are_lines_of_the_format(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong flag, and a wrong plan."""
    for wrong, said in ((["quick", "--no-such-flag"], "--no-such-flag"), (["no-such-plan"], "neither a TOML file nor")):
        argv = [*wrong, "--output", "study", "--log-format", "json"]
        with pytest.raises(SystemExit) as end:
            execute(partial(study, argv), interrupted="run it again")
        (line,) = lines(capsys.readouterr().err)
        assert (end.value.code, line["level"]) == (2, "error")
        assert said in line["message"]


def test_names_reach_an_output_of_another_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Print to Latin-1: a committed set must not end with an error because of the name of a class."""
    output = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", output)

    def show() -> int:
        print("gr\xf6\xdfe чашка")
        return 0

    with pytest.raises(SystemExit, match=r"^0$"):
        execute(show, interrupted="")
    assert output.buffer.getvalue() == b"gr\xf6\xdfe " + rb"\u0447\u0430\u0448\u043a\u0430" + b"\n"
    line = console.json_line("l", "чашка", level="info")
    assert line.isascii()
    assert json.loads(line)["message"] == "чашка"
