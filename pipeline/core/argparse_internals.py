"""The only file that uses private members of argparse, which has no public list of a parser's flags and groups."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from typing import Any, NamedTuple

FlagGroup = argparse._ActionsContainer  # a parser or a group of its flags


class Section(NamedTuple):
    """A group of flags, as --help shows it."""

    title: str | None
    description: str | None
    actions: list[argparse.Action]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Breaks the lines of help texts between words only, so that names and flags with hyphens can be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)


class _Store(argparse.Action):
    """The action of arguments with values: a list grows with each occurrence of its flag, else the last value counts."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        earlier = getattr(namespace, self.dest, None)
        # A default, such as that of a configuration file, is replaced.
        if self.nargs in ("+", "*") and isinstance(earlier, list) and earlier is not self.default:
            values = earlier + values
        setattr(namespace, self.dest, values)


class ListedParser(argparse.ArgumentParser):
    """An argparse parser whose flags can be listed, and whose flags of several values may be given several times.

    Attributes:
        actions: an action for each argument, in the order of their definition.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("action", None, _Store)
        self.register("action", "store", _Store)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and "" in arg_strings:
            raise argparse.ArgumentError(action, "the value is an empty text: give a value, or leave the flag out")
        return super()._get_values(action, arg_strings)

    @property
    def actions(self) -> list[argparse.Action]:
        return self._actions

    def sections(self) -> list[Section]:
        """Return the groups of flags in the order of --help."""
        return [Section(group.title, group.description, group._group_actions) for group in self._action_groups]

    def exclusive_names(self) -> list[list[str]]:
        """Return the names of the values in each group of flags of which at most one may be given."""
        return [[action.dest for action in group._group_actions] for group in self._mutually_exclusive_groups]

    def formatter(self) -> argparse.HelpFormatter:
        """Return a new formatter for texts of this parser."""
        return self._get_formatter()

    def convert(self, action: argparse.Action, text: str) -> Any:
        """Return the value of a text by the type of an argument. Raises argparse.ArgumentError."""
        return self._get_value(action, text)

    def actions_by_flag(self) -> Mapping[str, argparse.Action]:
        """Return the action of each flag, by all its spellings."""
        return self._option_string_actions


def is_repeatable(action: argparse.Action) -> bool:
    """True if a flag may be given several times, so that its value is a list."""
    return isinstance(action, argparse._AppendAction)


def is_switch(action: argparse.Action) -> bool:
    """True if a flag takes no value."""
    return isinstance(action, (argparse._StoreTrueAction, argparse.BooleanOptionalAction))
