"""Specs: frozen dataclasses whose fields define flags, TOML keys, manifest entries and the identity of a run.

A parameter is declared once, in the class that uses it:

    @dataclass(frozen=True)
    class SSP(Protocol):
        name: ClassVar[str] = "ssp"
        staleness_bound: int = option(3, "steps that a worker may be ahead of the slowest", metavar="S", least=0)

This line defines the flag --staleness-bound, its help and its check, the TOML key staleness_bound, the entry in saved
configurations, and its part in the comparison of two runs. A registry is a dict from names to such classes; a new member
is one file and one line in its registry."""

from __future__ import annotations

import argparse
import math
import os
import textwrap
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

from pipeline.core.argparse_internals import FlagGroup
from pipeline.core.errors import UsageError
from pipeline.core.json_values import MOST, build, field_types, fits

OPTION = "option"
WIDTH = 79  # columns of descriptions in --help


class AdvancedHelp(str):
    """The help text of a flag that --help leaves out and --help-all shows.

    Attributes:
        owners: names such as ``ssp``; --help shows the flag after all if the command line contains one of them, as in
            ``--protocol ssp --help``.
    """

    owners: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Option:
    """The properties of a field beside its type and default.

    Attributes:
        help: text for --help, without the default.
        metavar: placeholder of the value in --help; by default the type, such as INT.
        flag: name of the flag, by default made of the field's name.
        least, most: inclusive bounds. Infinity, NaN and integers beyond int64 are never in range.
        above, below: exclusive bounds.
        check: returns whether a value is valid, in addition to the bounds.
        expected: valid values in words, for error messages; by default described by the bounds.
        parse: converts the flag's text; by default the type does.
        may_change: whether a resumed run may have another value.
        recorded: whether params() contains the field.
        shown: the default in words, for --help.
        advanced: whether only --help-all shows the flag.
    """

    help: str
    metavar: str | None = None
    flag: str | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    check: Callable[[Any], bool] | None = None
    expected: str | None = None
    parse: Callable[[str], Any] | None = None
    may_change: bool = False
    recorded: bool = True
    shown: str | None = None
    advanced: bool = False

    def admits(self, value: Any) -> bool:
        """Return whether a value is within the bounds and passes the check."""
        bounded = any(bound is not None for bound in (self.least, self.most, self.above, self.below))
        return (
            (not bounded or (-MOST <= value < MOST if isinstance(value, int) else math.isfinite(value)))
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.check is None or self.check(value))
        )

    def range(self) -> str:
        """Return the valid values in words."""
        if self.expected is not None:
            return self.expected
        if (self.above, self.below) == (0, None):
            return "a positive number"
        if (self.least, self.most, self.below) == (0, None, None):
            return "0 or more"
        parts = (("at least", self.least), ("at most", self.most), ("more than", self.above), ("below", self.below))
        return " and ".join(f"{words} {bound:g}" for words, bound in parts if bound is not None)


def option(default: Any = MISSING, help: str = "", **about: Any) -> Any:
    """Return a dataclass field that is also a flag. Without a default the flag is required. about: fields of Option."""
    metadata = {OPTION: Option(help, **about)}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Spec:
    """A group of parameters, checked on construction. Raises UsageError with flag, value and range."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""  # a clause for --help

    def __post_init__(self) -> None:
        """Check the value of every option that is not None: its choices, type, bounds and check. Raises UsageError.

        A number of numpy and a path of pathlib become Python's own number and a text."""
        hints = field_types(type(self))
        for item, about in _options(type(self)):
            value = getattr(self, item.name)
            if value is None:
                continue
            hint = hints[item.name]
            if not _has_type(value, hint):
                value = _python_value(value)
                object.__setattr__(self, item.name, value)
            choices = _choices(hint)
            if choices and value not in choices:
                raise UsageError(f"{flag_of(item)} must be {_one_of(choices)}, got {value!r}")
            # Files of a run have JSON's types: what has another one would be written, and refused when it is read.
            if not _has_type(value, hint):
                raise UsageError(f"{flag_of(item)} must be {about.expected or _type_in_words(hint)}, got {value!r}")
            if not about.admits(value):
                raise UsageError(f"{flag_of(item)} must be {about.range()}, got {value!r}")

    def params(self) -> dict[str, Any]:
        """Return the recorded fields by name, as plain values."""
        return {item.name: getattr(self, item.name) for item, about in _options(type(self)) if about.recorded}

    def identity(self) -> dict[str, Any]:
        """Return the recorded fields that a resumed run must not change."""
        return {
            i.name: getattr(self, i.name)
            for i, about in _options(type(self))
            if about.recorded and not about.may_change
        }

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """Return the help of the fields, by name."""
        return {item.name: about.help for item, about in _options(cls)}

    def to_json(self) -> dict[str, Any]:
        """Return ``params`` and, for a member of a registry, its name."""
        return ({"name": self.name} if self.name else {}) | self.params()


S = TypeVar("S", bound=Spec)
TYPES_IN_WORDS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}


def _has_type(value: Any, hint: Any) -> bool:
    """Return whether a value has the type of an option. Any number will do, as the bounds refuse infinity and the like."""
    return fits(type(value)() if type(value) in (int, float) else value, hint)


def _python_value(value: Any) -> Any:
    """Return a number of numpy as Python's own, and a path as a text; other values as they are."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return value.item()
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _type_in_words(hint: Any) -> str:
    """Return the type of an option for an error message."""
    kind = _plain(hint)
    return TYPES_IN_WORDS.get(kind, f"of the type {kind}")


def registry(*members: type[S]) -> dict[str, type[S]]:
    """Return a registry of members by name, in the given order."""
    members_by_name = {member.name: member for member in members}
    assert len(members_by_name) == len(members), "two members have one name"
    return members_by_name


def find(members: Mapping[str, type[S]], flag: str, name: str) -> type[S]:
    """Return the member with a name. Raises UsageError if there is none."""
    if not isinstance(name, str) or name not in members:
        raise UsageError(f"{flag} must be {_one_of(tuple(members))}, got {name!r}")
    return members[name]


def from_json(members: Mapping[str, type[S]], flag: str, values: Mapping[str, Any]) -> S:
    """Return the member that ``to_json`` wrote.

    Raises UsageError for an unknown name, KeyError without a name, ValueError for an unknown or mistyped parameter."""
    rest = dict(values)
    return build(find(members, flag, rest.pop("name")), rest)


def summaries(members: Mapping[str, type[Spec]]) -> str:
    """Return a table of names and summaries, to describe the group of the flag that chooses a member."""
    return descriptions({name: member.summary for name, member in members.items()})


def descriptions(items: Mapping[str, str]) -> str:
    """Return a table of names and descriptions, as the text of a group of flags in --help."""
    indent = " " * (max(map(len, items)) + 2)
    return "\n".join(
        textwrap.fill(
            text, WIDTH - 2, initial_indent=name.ljust(len(indent)), subsequent_indent=indent, break_on_hyphens=False
        )
        for name, text in items.items()
    )


def add_flags(
    group: FlagGroup,
    kind: type[Spec],
    *,
    only: Iterable[str] | None = None,
    leave_out: Iterable[str] = (),
) -> None:
    """Add a flag for every field of a spec, with the field's default. only, leave_out: names of fields."""
    hints = field_types(kind)
    for item, about in _options(kind):
        if item.name not in leave_out and (only is None or item.name in only):
            default = _default_in_words(item, about, "%(default)")
            text = _escaped(about.help) + (f" (default: {default})" if default else "")
            _add(group, item, hints[item.name], AdvancedHelp(text) if about.advanced else text, item.default)


def add_member_flags(group: FlagGroup, members: Mapping[str, type[Spec]], *, leave_out: Iterable[str] = ()) -> None:
    """Add a flag for every field of a registry's members. Members that share a field share its flag.

    --help shows these flags only together with the name of a member, because most belong to one member. The default of
    the flags is None, because members may have different defaults. Raises UsageError if members, such as one of the
    user's own, give an option different types, or it has the name of another flag."""
    owners_by_field: dict[str, dict[str, Field[Any]]] = {}
    for name, member in members.items():
        for item, _ in _options(member):
            if item.name not in leave_out:
                owners_by_field.setdefault(item.name, {})[name] = item
    for field_name, owners in owners_by_field.items():
        # The flag needs its --no-X form if X is not off by default for all of its members.
        owner, item = next(
            (pair for pair in owners.items() if pair[1].default is not False), next(iter(owners.items()))
        )
        about: Option = item.metadata[OPTION]
        text = AdvancedHelp(_escaped(f"{', '.join(owners)}: {about.help}{_member_defaults(owners)}"))
        text.owners = frozenset(name for name, each in owners.items() if not each.metadata[OPTION].advanced)
        hint = field_types(members[owner])[field_name]
        plain = {name: _plain(field_types(members[name])[field_name]) for name in owners}
        other = next((name for name in owners if plain[name] != plain[owner]), None)
        if other:
            raise UsageError(
                f"{owner} and {other} share the option {field_name} with different types: rename it in one"
            )
        _add(group, item, hint, text, None)


def _member_defaults(owners: Mapping[str, Field[Any]]) -> str:
    """Return `` (default: 3)``, or `` (default: 3 for asp; 5 for ssp)`` if the defaults of members differ."""
    names: dict[str, list[str]] = {}
    for name, item in owners.items():
        names.setdefault(_default_in_words(item, item.metadata[OPTION], ""), []).append(name)
    if len(names) == 1:
        default = next(iter(names))
    else:
        default = "; ".join(f"{text} for {', '.join(having)}" for text, having in names.items() if text)
    return f" (default: {default})" if default else ""


def from_flags(kind: type[S], args: argparse.Namespace) -> S:
    """Return a spec made of the flags of its fields. Raises UsageError."""
    return kind(**{item.name: getattr(args, item.name) for item, _ in _options(kind) if hasattr(args, item.name)})


def member_from_flags(members: Mapping[str, type[S]], flag: str, args: argparse.Namespace) -> S:
    """Return the member that ``flag`` names, made of its own flags. Settings of other members in a TOML file are ignored.

    Raises UsageError if the command line itself has a flag that the member does not have."""
    name = getattr(args, flag.removeprefix("--").replace("-", "_"))
    member = find(members, flag, name)
    own = {item.name for item, _ in _options(member)}
    for other in members.values():
        for item, _ in _options(other):
            if item.name not in own and item.name in args.names_in_argv:
                having = [
                    member_name for member_name, kind in members.items() if item.name in kind.__dataclass_fields__
                ]
                setting = _as_written(item, getattr(args, item.name))
                raise UsageError(f"{flag} {name} has no {setting}: leave it out, or use {', '.join(having)}")
    # The flags of members have the default None, so that each member keeps its own default.
    values = {key: getattr(args, key) for key in own if getattr(args, key, None) is not None}
    for item, _ in _options(member):
        if item.default is MISSING and item.name not in values:
            raise UsageError(f"{flag} {name} needs {flag_of(item)}")
    return member(**values)


def default_member(members: Mapping[str, type[S]], flag: str, name: str) -> S:
    """Return the member with a name and the defaults of its parameters.

    Raises UsageError if there is none, or if one of its parameters has no default."""
    member = find(members, flag, name)
    for item, _ in _options(member):
        if item.default is MISSING:
            raise UsageError(f"{flag} {name} needs {flag_of(item)}")
    return member()


def _as_written(item: Field[Any], value: Any) -> str:
    """Return a flag in the form in which it was written on the command line."""
    if isinstance(value, bool):
        return flag_of(item) if value else f"--no-{flag_of(item).removeprefix('--')}"
    return f"{flag_of(item)} {value}"


def flag_of(item: Field[Any]) -> str:
    about = item.metadata[OPTION]
    return about.flag or f"--{item.name.replace('_', '-')}"


def _options(kind: type[Spec]) -> list[tuple[Field[Any], Option]]:
    return [(item, cast(Option, item.metadata[OPTION])) for item in fields(kind) if OPTION in item.metadata]


def _default_in_words(item: Field[Any], about: Option, value: str) -> str:
    """Return a default in words. value: argparse's placeholder for it, if a TOML file may change it."""
    if about.shown is not None:
        return about.shown
    if item.default in (MISSING, None, "") or item.default is False:
        return ""
    if item.default is True:
        return "on"
    if isinstance(item.default, float):
        return f"{value}g" if value else f"{item.default:g}"
    return f"{value}s" if value else str(item.default)


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _add(group: FlagGroup, item: Field[Any], hint: Any, text: str, default: Any) -> None:
    """Add the flag of a field to a group.

    Args:
        group: the group of flags.
        item: the field of a spec.
        hint: its type.
        text: the help text, with the default.
        default: default of the flag; MISSING makes it required.
    """
    about: Option = item.metadata[OPTION]
    settings: dict[str, Any] = {"help": text, "dest": item.name}
    settings |= {"required": True} if default is MISSING else {"default": default}
    kind = _plain(hint)
    choices = _choices(hint)
    # A switch that is off by default needs no --no-X.
    if kind is bool:
        settings["action"] = "store_true" if item.default is False else argparse.BooleanOptionalAction
    elif choices:
        settings["choices"] = list(choices)
    else:
        settings["metavar"] = about.metavar or {int: "INT", float: "FLOAT"}.get(kind, "TEXT")
        settings["type"] = about.parse or (kind if kind in (int, float) else str)
    try:
        group.add_argument(flag_of(item), **settings)
    except argparse.ArgumentError:
        raise UsageError(f"two options are called {flag_of(item)}: rename the field of your own class") from None


def _plain(hint: Any) -> Any:
    """Return a type without ``| None``."""
    if get_origin(hint) in (Union, types.UnionType):
        rest = [kind for kind in get_args(hint) if kind is not type(None)]
        return rest[0] if len(rest) == 1 else hint
    return hint


def _choices(hint: Any) -> tuple[Any, ...]:
    kind = _plain(hint)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _one_of(names: tuple[Any, ...]) -> str:
    return " or ".join(filter(None, [", ".join(map(str, names[:-1])), str(names[-1])]))
