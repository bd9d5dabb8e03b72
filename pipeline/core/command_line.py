"""The flags that command lines share: their help and their errors, and flags over conf/*.toml over built-in defaults.

Needs no Spark, but is used by programs on Spark too."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NoReturn

from pipeline.core import console
from pipeline.core.argparse_internals import FlagGroup, HelpFormatter, ListedParser, is_repeatable, is_switch
from pipeline.core.errors import UsageError
from pipeline.core.program import execute, fail, show_traces
from pipeline.core.reporting.tables import two_column_table
from pipeline.core.shardset.layout import MAX_IMAGE_BYTES
from pipeline.core.specs import WIDTH, AdvancedHelp, descriptions

UNSET = object()


def _conf() -> Traversable:
    """Return the folder of defaults: inside the package in a wheel or in package_zip's zip, beside it in a checkout."""
    packaged = files("pipeline") / "conf"
    return packaged if packaged.is_dir() else Path(__file__).resolve().parents[2] / "conf"


CONF = _conf()


def as_typed(text: str) -> str:
    """Replace ``python -m pipeline shard`` and the like by ``sharding shard`` if that is the running program."""
    if Path(sys.argv[0]).stem != "sharding":
        return text
    text = re.sub(r"python -m (?:pipeline |trainer\.|trainer (?=embed|predict))(?=\w)", "sharding ", text)
    return re.sub(r"python -m trainer\b", "sharding train", text)


class _ShowHelp(argparse.Action):
    """The action of --help and --help-all: print the help and exit."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str, every: bool = False) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=help)
        self.every = every

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(every=self.every), end="")
        parser.exit()


class Parser(ListedParser):
    """An argparse parser with a short --help, and one-line errors that suggest the nearest flag or choice.

    --help shows the flags whose help text is not ``AdvancedHelp``; --help-all shows all of them.

    Attributes:
        conf: name of the defaults file in conf/, without its extension.
    """

    conf: str | None

    def __init__(self, prog: str | None = None, *, add_help: bool = True, **settings: Any) -> None:
        # An abbreviation could stand for another flag than the intended: --seed for --seeds.
        super().__init__(prog=prog and as_typed(prog), add_help=False, allow_abbrev=False, **settings)
        if add_help:
            self.add_argument("-h", "--help", action=_ShowHelp, help="show this help and exit")
            self.add_argument("--help-all", action=_ShowHelp, every=True, help="show all options and exit")
        self.conf = Path(prog.split()[-1]).stem if prog else None
        self._arguments: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._arguments = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def format_usage(self) -> str:
        """Return a usage line that names positional arguments and required flags only."""
        needed = [action for action in self.actions if action.required or not action.option_strings]
        others = argparse.Action([], "OPTION", nargs="*")  # is printed as [OPTION ...]
        formatter = self.formatter()
        formatter.add_usage(self.usage, [others, *needed], ())
        return formatter.format_help()

    def format_help(self, *, every: bool = False) -> str:
        """Return the text of --help, or of --help-all if ``every``."""
        hidden_actions = [] if every else [action for action in self.actions if self._is_hidden(action)]
        if not any(isinstance(action.help, AdvancedHelp) for action in self.actions):
            # --help-all would repeat --help.
            hidden_actions = [action for action in self.actions if "--help-all" in action.option_strings]
        formatter = self.formatter()
        formatter.add_text(self.description)
        for section in self.sections():
            visible_actions = [action for action in section.actions if action not in hidden_actions]
            # A group without flags to show would leave its title and description behind.
            if visible_actions:
                formatter.start_section(section.title)
                formatter.add_text(section.description)
                formatter.add_arguments(visible_actions)
                formatter.end_section()
        formatter.add_text(self.epilog)
        if any(isinstance(action.help, AdvancedHelp) for action in hidden_actions):
            flags = [action for action in self.actions if action.option_strings]
            formatter.add_text(f"all {len(flags)} options: {self.prog} --help-all")
        return f"{self.format_usage()}\n{formatter.format_help()}"

    def _is_hidden(self, action: argparse.Action) -> bool:
        arguments = {argument.rpartition("=")[2] for argument in self._arguments}
        return isinstance(action.help, AdvancedHelp) and not action.help.owners & arguments

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}{self._advice(message)}; see {self.prog} --help")

    def _advice(self, message: str) -> str:
        """Return the nearest name for the first unknown flag or choice in a message, or an empty string."""
        flags = [name for action in self.actions for name in action.option_strings]
        choices = [str(choice) for action in self.actions for choice in action.choices or ()]
        if message.startswith("the following arguments are required"):
            # argparse checks required flags first, and would not report that one of them is misspelt.
            word = self._first_unknown(flags)
            candidates = flags
        elif match := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            word = match[1]
            candidates = flags
        elif match := re.search(r"invalid choice: '([^']*)'", message):
            word = match[1]
            candidates = choices
        else:
            return ""
        near = difflib.get_close_matches(word, candidates, n=1)
        return f"; did you mean {near[0]}?" if near else ""

    def _first_unknown(self, flags: Sequence[str]) -> str:
        """Return the first flag of the command line that is not in ``flags``; "" if there is none."""
        names_used = (argument.partition("=")[0] for argument in self._arguments if argument.startswith("--"))
        return next((flag for flag in names_used if flag not in (*flags, "--")), "")


def parser(prog: str, description: str | None, epilog: str) -> Parser:
    """Return a Parser whose texts name the running program (see ``as_typed``) and whose epilog keeps its line
    breaks."""
    result = Parser(
        prog=prog,
        description=description and textwrap.fill(as_typed(description), WIDTH, break_on_hyphens=False),
        epilog=as_typed(epilog),
        formatter_class=HelpFormatter,
    )
    # For every command: the line of an unforeseen error advises it.
    result.add_argument(
        "--debug", action="store_true", help=AdvancedHelp("show stack traces, and the logs of Spark where it runs")
    )
    return result


def share(text: str) -> float:
    """Parse a share of a whole, such as the value of --accuracy."""
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be a share more than 0 and at most 1, such as 0.9, got {text}")
    return value


def seed(text: str) -> int:
    """Parse the value of --seed."""
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2^63 - 1")
    return int(text)


def image_shape(text: str) -> tuple[int, int, int]:
    """Parse the value of --image-shape."""
    match = re.fullmatch(r"(\d+)[x,](\d+)[x,](\d+)", text)
    if not match or not all(map(int, match.groups())):
        raise argparse.ArgumentTypeError(f"{text!r} is not CHANNELSxHEIGHTxWIDTH, such as 3x32x32")
    channels, height, width = map(int, match.groups())
    if channels * height * width > MAX_IMAGE_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_IMAGE_BYTES:,} bytes per image")
    return channels, height, width


def image_size(text: str) -> tuple[int, int]:
    """Parse the value of --resize."""
    match = re.fullmatch(r"(\d{1,6})[x,](\d{1,6})", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not HEIGHTxWIDTH, such as 32x32")
    height, width = map(int, match.groups())
    return height, width


def parse(flags: Parser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line: flags override the TOML file, which overrides built-in defaults.

    The file is --config, otherwise conf/NAME.toml if it exists, where NAME is the parser's conf: by default from
    NAME.py or python -m NAME. If a flag and a key of the file exclude each other, the key is ignored. The result's
    ``names_in_argv`` has the names of the values given on the command line itself, and its ``names_given`` those in the
    file of --config too. Raises UsageError for unknown keys or values of another type."""
    argv = list(sys.argv[1:] if argv is None else argv)
    built_in = {action.dest: action.default for action in flags.actions}
    early, _ = _config_only(flags.prog).parse_known_args(argv)
    # Before anything can fail, so that an error is a line of the format too.
    console.choose_format(early.log_format if early.log_format in console.FORMATS else console.TEXT)
    path = early.config or CONF / f"{flags.conf}.toml"
    values = _defaults(path, flags) if early.config or path.is_file() else {}
    flags.set_defaults(**values)
    if not early.log_format and "log_format" in values:
        console.choose_format(values["log_format"])
    if values.get("debug"):
        show_traces(True)
    # Only a second parse without defaults can tell a given value from an equal default.
    flags_used = names_in_argv(flags, argv)
    args = flags.parse_args(argv)
    # A flag and a key of the file that exclude each other are no conflict: the flag wins.
    for names in flags.exclusive_names():
        for name in names if flags_used & set(names) else ():
            if name not in flags_used:
                setattr(args, name, built_in[name])
    args.names_in_argv = flags_used
    args.names_given = flags_used | (values.keys() if early.config else set())
    return args


def names_in_argv(flags: ListedParser, argv: Sequence[str]) -> frozenset[str]:
    """Return the names of the values that the command line itself contains, even if they equal their defaults."""
    # A repeatable flag appends to its default, which must be None or a list.
    unset = {action.dest: None if is_repeatable(action) else UNSET for action in flags.actions}
    parsed = vars(flags.parse_args(argv, argparse.Namespace(**unset)))
    return frozenset(name for name, value in parsed.items() if value is not unset.get(name, UNSET))


def run_chosen(
    prog: str,
    summaries: Mapping[str, str],
    run: Callable[[str, list[str]], int],
    argv: Sequence[str] | None = None,
    version: str | None = None,
) -> int:
    """Run the command that a command line starts with, and return its exit code.

    Without a command, all commands are shown; an unknown command gives a one-line error. Both return exit code 2.

    Args:
        prog: the program's name.
        summaries: a description of each command, by its name.
        run: takes a command and the arguments after it.
        argv: the command line; the process's own if None.
        version: shown by --version; without this flag if None.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    flags = Parser(
        prog=prog,
        usage="%(prog)s COMMAND [OPTION ...]",
        description="commands:\n" + textwrap.indent(descriptions(summaries), "  "),
        formatter_class=HelpFormatter,
    )
    if version:
        flags.add_argument("--version", action="version", version=version)
    flags.add_argument(
        "command", choices=summaries, metavar="COMMAND", help="command to run; COMMAND --help shows its options"
    )
    flags.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    if not argv:  # argparse would only report that COMMAND is missing
        flags.print_help(sys.stderr)
        return UsageError.exit_code
    try:
        args = flags.parse_args(argv)
    except UsageError as error:
        return fail(str(error), error.exit_code, debug=False)
    return run(args.command, args.rest)


def list_summaries(prog: str, description: str | None, summaries: Mapping[str, str], argv: Sequence[str]) -> NoReturn:
    """Run a command that only prints a table of names and summaries.

    Args:
        prog, description: name and help of the command.
        summaries: text by name.
        argv: arguments of the command, which has no flags but --help.
    """
    flags = parser(prog, description, "")

    def run() -> int:
        parse(flags, argv)
        print(two_column_table(list(summaries.items())))
        return 0

    execute(run, interrupted="run it again")


def add_config_flag(flags: FlagGroup, conf: str) -> None:
    """Add --config, with its default file in the help text. conf: name of that file without its extension."""
    file = f"conf/{conf}.toml" if (CONF / f"{conf}.toml").is_file() else "none"
    flags.add_argument("--config", type=Path, metavar="FILE", help=f"TOML file of option values (default: {file})")


def add_log_format_flag(flags: FlagGroup) -> None:
    flags.add_argument(
        "--log-format",
        choices=console.FORMATS,
        default=console.TEXT,
        help=AdvancedHelp(
            "lines on standard error: text, or json with ts, level, logger, message and fields (default: %(default)s)"
        ),
    )


def _config_only(prog: str) -> Parser:
    """Return a parser of --config, which sets the defaults of all other flags, and of --log-format, the form of errors.

    Both are read before the other flags. prog: the command, whose --help error lines name."""
    early = Parser(prog, add_help=False)
    early.add_argument("--config", type=Path)
    early.add_argument("--log-format")
    return early


def _defaults(path: Traversable, flags: ListedParser) -> dict[str, Any]:
    """Return the values of a TOML file by the name of their argument, parsed and checked like flags.

    Flags that have a value in the file are no longer required. Raises UsageError for an unreadable file, an unknown key
    or an invalid value."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"--config {path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"--config {path}: {error}") from None
    actions = {_key(name): action for action in flags.actions for name in action.option_strings[:1]}
    result = {}
    for key, value in values.items():
        action = actions.get(_key(key))
        if action is None or key in ("config", "help", "help_all"):
            raise UsageError(f"--config {path}: unknown key {key!r}; keys are the long flags with underscores")
        # argparse would demand a required flag even though the file has its value.
        action.required = False
        flag = is_switch(action)
        if is_repeatable(action):
            result[action.dest] = _repeatable_values(action, value, f"--config {path}: {key}")
            continue
        if flag != isinstance(value, bool) or isinstance(value, (dict, list)):
            raise UsageError(f"--config {path}: {key} = {value!r} is not a value of --{key.replace('_', '-')}")
        try:
            result[action.dest] = value if flag else flags.convert(action, str(value))
        except argparse.ArgumentError as error:
            raise UsageError(f"--config {path}: {key} = {value!r}: {error.message}") from None
        if action.choices is not None and result[action.dest] not in action.choices:
            raise UsageError(f"--config {path}: {key} = {value!r}; choose one of {', '.join(action.choices)}")
    return result


def _repeatable_values(action: argparse.Action, value: Any, place: str) -> list[str]:
    """Return the values of a repeatable flag in a TOML file. Raises UsageError, without a value in the message."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise UsageError(f'{place} is not a list of texts, such as ["{action.metavar}"]')
    return value


def _key(flag: str) -> str:
    """Return the key of a flag in a TOML file."""
    return flag.removeprefix("--").replace("-", "_")
