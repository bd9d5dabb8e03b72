"""What every command line says of a typing error, and under which name a program speaks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext

from pipeline import __main__ as pipeline_commands
from pipeline import entry
from pipeline.core import console
from pipeline.core.command_line import CONF, Parser, as_typed, parse, parser
from pipeline.core.errors import UsageError
from pipeline.core.program import execute
from pipeline.runs.flags import shard_parser
from pipeline.spark.jvm import start_jvm
from tests.clusters import ROOT
from trainer import simulate
from trainer.embed import __main__ as embed
from trainer.flags import build_parser as build_trainer_parser
from trainer.study import __main__ as study


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps of starts of JVMs, which are interrupted once before "begun" and twice after it."""
    starts: list[str] = []

    def start() -> None:
        signal.raise_signal(signal.SIGINT)
        starts.append("begun")
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        starts.append("whole")

    monkeypatch.setattr(SparkContext, "_ensure_initialized", start)
    return starts


@pytest.fixture(autouse=True)
def sigint() -> Iterator[Callable[[Any], object]]:
    """The function that sets the handler of SIGINT, which is Python's own at the start. The old one is restored at the end.

    A shell ignores SIGINT for the tests if it starts them in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda handler: signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_until_the_jvm_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM whose start is interrupted would not learn that this process ends."""
    started = []

    def start() -> None:
        signal.raise_signal(signal.SIGINT)
        started.append("whole")

    monkeypatch.setattr(SparkContext, "_ensure_initialized", start)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        start_jvm()
    assert started == ["whole"]
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr(SparkContext, "_ensure_initialized", lambda: started.append("again"))
    start_jvm()
    assert started == ["whole", "again"]


def test_a_second_interrupt_ends_the_start_of_a_jvm(starts: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt):
        start_jvm()
    assert starts == ["begun"]


def test_a_program_s_own_handler_gets_the_interrupts(starts: list[str], sigint: Callable[[Any], object]) -> None:
    sigint(lambda signum, frame: starts.append("interrupt"))
    start_jvm()
    assert starts == ["begun", "interrupt", "interrupt", "whole", "interrupt"]


def test_an_ignored_interrupt_stays_ignored(starts: list[str], sigint: Callable[[Any], object]) -> None:
    sigint(signal.SIG_IGN)
    start_jvm()
    assert starts == ["begun", "whole"]
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_handler_that_python_does_not_know_is_kept(starts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another language's handler is None here, and cannot be set again."""
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with pytest.raises(KeyboardInterrupt):
        start_jvm()
    assert starts == []


@pytest.mark.parametrize(
    ("make", "argv", "advice"),
    [
        (shard_parser, ["--imput", "x"], "did you mean --input?"),
        (shard_parser, ["--strategy", "stratifed"], "did you mean stratified?"),
        (build_trainer_parser, ["--staleness-bond", "2"], "did you mean --staleness-bound?"),
        (build_trainer_parser, ["--protocol", "dsp"], "did you mean dssp?"),
        (build_trainer_parser, ["--zzzz", "3"], "unrecognized arguments: --zzzz 3; see "),
    ],
)
def test_a_typing_error_is_answered_with_what_was_meant(
    make: Callable[[], Parser], argv: list[str], advice: str
) -> None:
    required = ["--shards", "s", "--output", "o"] if make is build_trainer_parser else ["--input", "i", "--output", "o"]
    with pytest.raises(UsageError) as caught:
        make().parse_args([*required, *argv] if argv[0] != "--imput" else [*required, "--strategy", "random", *argv])
    assert advice in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_without_a_file_names_the_help_of_the_command() -> None:
    with pytest.raises(UsageError, match=r"--config: expected one argument; see python -m pipeline formats --help$"):
        parse(parser("python -m pipeline formats", None, ""), ["--config"])


def test_a_misspelt_required_flag_is_recognised() -> None:
    with pytest.raises(UsageError, match=r"required: --input; did you mean --input\?; see"):
        shard_parser().parse_args(["--imput", "x", "--output", "y", "--strategy", "random"])
    with pytest.raises(UsageError, match=r"required: --input; see"):
        shard_parser().parse_args(["--output", "y", "--strategy", "random"])


@pytest.mark.parametrize(
    ("make", "argv", "advice"),
    [
        (study.parser, ["plan", "--output", "o", "--seed", "42"], "--seed 42; did you mean --seeds?"),
        (
            build_trainer_parser,
            ["--shards", "s", "--output", "o", "--rate", "0.1"],
            "unrecognized arguments: --rate 0.1",
        ),
        (shard_parser, ["--input", "i", "--output", "o", "--strat", "random"], "required: --strategy; did you mean"),
    ],
)
def test_an_abbreviation_is_no_flag(make: Callable[[], Parser], argv: list[str], advice: str) -> None:
    with pytest.raises(UsageError, match=re.escape(advice)):
        parse(make(), argv)


@pytest.mark.parametrize("argv", [["--eval-input", ""], ["--label-column="], ["--ds", ""], ["--config", ""]])
def test_an_empty_value_of_a_flag_is_refused(argv: list[str]) -> None:
    flag = argv[0].rstrip("=")
    with pytest.raises(
        UsageError, match=f"{flag}: the value is an empty text: give a value, or leave the flag out; see"
    ):
        parse(shard_parser(), ["--input", "i", "--output", "o", "--strategy", "random", *argv])


def test_debug_in_a_file_shows_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text("debug = true\n")

    def main() -> int:
        parse(shard_parser(), ["--config", str(file), "--input", "i", "--output", "o", "--strategy", "random"])
        raise ValueError("odd")

    with pytest.raises(SystemExit):
        execute(main, interrupted="")
    assert capsys.readouterr().err.startswith("Traceback")


def test_an_abbreviated_log_format_is_not_used() -> None:
    with pytest.raises(UsageError, match=r"unrecognized arguments: --log-form=json; did you mean --log-format\?"):
        parse(build_trainer_parser(), ["--shards", "s", "--output", "o", "--log-form=json"])
    assert not console.is_json()


def test_occurrences_of_a_list_flag_add_up(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('shards = "default"\nseed = 1\n')
    argv = ["--output", "o", "--config", str(file), "--seed", "2", "--shards", "a", "b", "--seed", "3"]
    args = parse(build_trainer_parser(), [*argv, "--shards", "c"])
    assert (args.shards, args.seed) == (["a", "b", "c"], 3)
    args = parse(study.parser(), ["plan", "--output", "o", "--merge", "a", "--merge", "b", "c"])
    assert args.merge == [Path("a"), Path("b"), Path("c")]


def test_a_list_flag_replaces_a_default_that_is_a_list() -> None:
    flags = Parser(prog="program")
    flags.add_argument("--names", nargs="*", default=["default"])
    assert flags.parse_args([]).names == ["default"]
    assert flags.parse_args(["--names", "a", "--names", "b"]).names == ["a", "b"]
    assert flags.parse_args([]).names == ["default"]


@pytest.mark.parametrize("main", [entry.main, pipeline_commands.main])
def test_a_command_that_does_not_exist_is_one_line(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verfy", "x"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "did you mean verify?" in line


@pytest.mark.parametrize("main", [entry.main, pipeline_commands.main])
def test_no_command_shows_the_commands(main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "inspect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "typed"),
    [
        ("python -m pipeline shard", "sharding shard"),
        ("python -m trainer", "sharding train"),
        ("python -m trainer.simulate", "sharding simulate"),
        ("python -m trainer embed", "sharding embed"),
        ("python -m trainer predict", "sharding predict"),
        ("python -m trainer.study", "sharding study"),
    ],
)
def test_a_program_calls_itself_as_it_was_typed(module: str, typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_typed(module) == module
    monkeypatch.setattr(sys, "argv", ["/usr/bin/sharding", "x"])
    assert as_typed(f"example: {module} --output x") == f"example: {typed} --output x"
    assert parser(module, None, "").prog == typed
    with pytest.raises(UsageError, match=f"see {typed} --help"):
        parser(module, None, "").parse_args(["--unknown"])


@pytest.mark.parametrize("make", [shard_parser, build_trainer_parser, simulate.parser, embed.parser])
def test_the_file_of_defaults_that_help_names_exists(make: Callable[[], Parser]) -> None:
    [config] = [action for action in make()._actions if "--config" in action.option_strings]
    default = str(config.help).partition("(default: ")[2].rstrip(")")
    assert default == "none" or (CONF / default.removeprefix("conf/")).is_file()


def test_defaults_are_those_of_the_module_whatever_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [make().conf for make in (shard_parser, build_trainer_parser, simulate.parser, embed.parser)]
    monkeypatch.setattr(sys, "argv", ["sharding"])
    assert [make().conf for make in (shard_parser, build_trainer_parser, simulate.parser, embed.parser)] == before
    assert before == ["shard", "trainer", "trainer", "embed"]


@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_error() -> None:
    program = "from pipeline.core.program import execute\nexecute(lambda: print('line\\n' * 100_000), interrupted='')"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    ("path", "code", "line"),
    [("/dev/full", 1, "error: standard output cannot be written: No space left on device\n"), (None, 0, "")],
)
def test_a_full_or_missing_output_ends_without_a_trace(
    path: str | None,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with nullcontext() if path is None else open(path, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as end:
            execute(lambda: print("a line") or 0, interrupted="run it again")
    assert (end.value.code, capsys.readouterr().err) == (code, line)


@pytest.mark.parametrize(
    ("closed", "output"), [("2>&-", "False\n"), ("<&- 2>&-", "False\n"), (">&-", ""), ("<&- >&- 2>&-", "")]
)
def test_messages_of_a_closed_stream_go_nowhere(closed: str, output: str) -> None:
    """Neither into standard output, nor into the first file that the program opens."""
    program = (
        "import os, subprocess, sys\n"
        "from pipeline.core.program import execute\n"
        "from pipeline.core.console import say\n"
        "def main():\n"
        "    say('test', 'a message', text=None)\n"
        "    print(sys.stderr.isatty())\n"
        "    child = 'import sys; print(sys.stderr.fileno(), file=sys.stderr)'\n"
        "    return os.open(os.devnull, os.O_RDONLY) <= 2 or subprocess.run([sys.executable, '-c', child]).returncode\n"
        "execute(main, interrupted='')"
    )
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, program], capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, output)
    assert done.stderr == ("a message\n2\n" if closed == ">&-" else "")


def test_a_deleted_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit):
        execute(lambda: len(str(Path("input").absolute())), interrupted="")
    assert capsys.readouterr().err == "error: the current folder has been deleted: change to another one\n"


def test_toml_is_read_as_utf_8_in_every_locale(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('label_column = "klässe"\n', encoding="utf-8")
    (tmp_path / "plan.toml").write_text(
        (CONF / "study" / "gossip-quick.toml").read_text() + "# für\n", encoding="utf-8"
    )
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from pipeline.core.command_line import parse\n"
        "from pipeline.runs.flags import shard_parser\n"
        "from trainer.study.plan.study_plan import read_plan\n"
        "read_plan(Path('plan.toml'))\n"
        "flags = ['--config', 'c.toml', '--input', 'i', '--output', 'o', '--workers', '2', '--strategy', 'random']\n"
        "print(ascii(parse(shard_parser(), flags).label_column))"
    )
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=locale)
    assert (done.stdout, done.stderr) == ("'kl\\xe4sse'\n", "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConnectionRefusedError(111, "Connection refused"), "error: interrupted; run it again\n"),
        (Py4JError("o87 does not exist in the JVM"), "error: interrupted; run it again\n"),
        (OSError(28, "No space left on device"), "error: [Errno 28] No space left on device\n"),
    ],
)
def test_a_jvm_that_ended_first_at_ctrl_c_is_no_error(
    error: Exception, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C ends Spark's JVM too, so that the clean-up may call one that is gone. Other errors of a clean-up are told."""

    def main() -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise error

    with pytest.raises(SystemExit) as end:
        execute(main, interrupted="run it again")
    assert (end.value.code, capsys.readouterr().err) == (1, line)


def test_a_lost_connection_without_ctrl_c_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise ConnectionRefusedError(111, "Connection refused")

    with pytest.raises(SystemExit) as end:
        execute(main, interrupted="run it again")
    assert (end.value.code, capsys.readouterr().err) == (1, "error: [Errno 111] Connection refused\n")


def test_the_first_process_of_a_container_hears_sigterm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Linux keeps it from a first process without a handler."""

    def main() -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    try:
        with pytest.raises(SystemExit) as end:
            execute(main, interrupted="run it again")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (end.value.code, capsys.readouterr().err) == (1, "error: interrupted; run it again\n")
