"""The --help and --help-all of every command and job."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from argparse import Action
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from pipeline import entry
from pipeline.__main__ import COMMANDS
from pipeline.core.command_line import Parser
from pipeline.core.specs import AdvancedHelp
from pipeline.runs.flags import shard_parser
from tests.clusters import ROOT
from tests.support.commands import JOBS
from trainer.flags import build_parser as build_trainer_parser

MOST = 20  # flags that --help shows
MODULES = {
    **{f"python -m pipeline {name}": module for name, (module, _) in COMMANDS.items()},
    "python -m trainer": "trainer.__main__",
    "python -m trainer embed": "trainer.embed.__main__",
    "sharding report": "trainer.report_command",
    "sharding workers": "trainer.workers_command",
    "sharding runs": "trainer.comparison.__main__",
    "python -m trainer predict": "trainer.inference.__main__",
    "sharding export": "trainer.export.__main__",
    "sharding benchmark": "trainer.benchmark.__main__",
    "python -m trainer.simulate": "trainer.simulate",
    "python -m trainer.topology": "trainer.topology.__main__",
    "python -m trainer.study": "trainer.study.__main__",
    "python -m trainer.study.check": "trainer.study.check",
}
FLAG = re.compile(r"^  (?:-h, )?(--[a-z][\w-]*)", re.MULTILINE)
# Markup, a doubled sign of a format, and words that LANGUAGE.md replaces.
UNWANTED = re.compile(
    r"[*`]|::|%%|\bwhat\b|\bone\b(?!-)|where not given|goes on|\bgo on\b|nobody|somebody|\ba worker each\b"
)


class Built(BaseException):
    """Carries the parser of a command out of its main."""

    def __init__(self, parser: Parser) -> None:
        self.parser = parser


@pytest.fixture(params=[*MODULES, *JOBS])
def command(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Parser:
    """The parser that a command or job parses its arguments with."""
    parse = Parser.parse_known_args

    def stop(self: Parser, args: Any = None, namespace: Any = None) -> Any:
        # The early parser of --config has no help.
        if any("--help" in action.option_strings for action in self._actions):
            raise Built(self)
        return parse(self, args, namespace)

    monkeypatch.setattr(Parser, "parse_known_args", stop)
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run() -> None:
        if request.param in JOBS:
            runpy.run_path(str(JOBS[request.param]), run_name="__main__")
        else:
            import_module(MODULES[request.param]).main([])

    with pytest.raises(Built) as caught:
        run()
    return caught.value.parser


def explained(parser: Parser) -> dict[str, str]:
    """Return the help text of every flag and positional argument, with placeholders filled in."""

    def text(action: Action) -> str:
        return str(action.help) % {**vars(action), "prog": parser.prog}

    return {(action.option_strings or [action.dest])[-1]: text(action) for action in parser._actions}


def test_every_command_and_job_is_listed_here() -> None:
    assert {module.rpartition(".")[0] for module in entry.PROGRAMS.values()} <= {
        module.rpartition(".")[0] for module in MODULES.values()
    }
    assert set(JOBS) == {path.name for path in (ROOT / "jobs").glob("*.py")}


def test_help_is_short_and_help_all_is_complete(command: Parser) -> None:
    # The first spelling: --report has --no-report as another one, and -h stands before --help.
    names = {action.option_strings[0] for action in command._actions if action.option_strings} - {"-h"} | {"--help"}
    shown = set(FLAG.findall(command.format_help()))
    assert len(shown) <= MOST
    assert shown <= set(FLAG.findall(command.format_help(every=True))) <= names
    last = command.format_help().splitlines()[-1]
    if any(isinstance(action.help, AdvancedHelp) for action in command._actions):
        assert set(FLAG.findall(command.format_help(every=True))) == names
        assert last == f"all {len(names)} options: {command.prog} --help-all"
    else:
        assert shown == names - {"--help-all"}
        assert "--help-all" not in last


def test_every_command_has_debug(command: Parser) -> None:
    action = command.actions_by_flag()["--debug"]
    assert isinstance(action.help, AdvancedHelp), "the line of an unforeseen error names it, and --help-all shows it"


def test_every_flag_is_explained_in_plain_text_with_one_default(command: Parser) -> None:
    for flag, text in explained(command).items():
        assert text, flag
        assert not text.endswith("."), flag
        assert text.count("default") <= 1, (flag, text)
        assert ("default" in text) == bool(re.search(r" \(default: [^()]+\)$", text)), (flag, text)
        assert not UNWANTED.search(text), (flag, text)
    assert command.description
    assert not UNWANTED.search(command.description)
    assert not UNWANTED.search(command.format_help(every=True))


def test_descriptions_and_examples_fit_a_terminal(command: Parser) -> None:
    """A backslash that ends a line of an example must be shown, and so must not escape the line's end."""
    for line in f"{command.description}\n{command.epilog or ''}".splitlines():
        assert len(line) <= 80, line


def test_no_name_or_flag_is_broken_at_its_hyphen(command: Parser) -> None:
    broken = [line for line in command.format_help(every=True).splitlines() if re.search(r"\w-$", line)]
    assert not broken


def test_the_options_of_a_choice_are_shown_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(make: Callable[[], Parser], *argv: str) -> set[str]:
        with pytest.raises(SystemExit, match="0"):
            make().parse_args([*argv, "--help"])
        return set(FLAG.findall(capsys.readouterr().out))

    assert shown(build_trainer_parser, "--protocol", "ssp") == shown(build_trainer_parser) | {"--staleness-bound"}
    assert shown(build_trainer_parser, "--protocol=k-asp") == shown(build_trainer_parser) | {"--k"}
    hashing = shown(shard_parser, "--strategy", "hash")
    assert {"--family", "--functions", "--embedding"} <= hashing
    assert not {"--clusters", "--width"} & hashing
    with pytest.raises(SystemExit, match="0"):
        shard_parser().parse_args(["--help-all"])
    assert {"--clusters", "--width", "--strategy"} <= set(FLAG.findall(capsys.readouterr().out))


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_help_loads_neither_torch_nor_spark(flag: str) -> None:
    program = (
        "import sys; from pipeline import entry\n"
        "for name in ('train', 'simulate', 'topology', 'embed', 'predict', 'export', 'report', 'runs', 'study',\n"
        "             'inspect', 'doctor'):\n"
        f"    try: entry.main([name, '{flag}'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'pyspark', 'zmq', 'pandas'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
