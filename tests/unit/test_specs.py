"""Specs: one declaration is a flag, a check, a TOML key, an entry and a part of identity."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from pipeline.core import specs
from pipeline.core.command_line import Parser, parse
from pipeline.core.errors import UsageError
from pipeline.core.sizes import parse_size
from pipeline.core.specs import Spec, option


@dataclass(frozen=True)
class Kettle(Spec):
    name: ClassVar[str] = "kettle"
    summary: ClassVar[str] = "boils"
    litres: float = option(1.5, "how much it holds", metavar="L", above=0)
    lid: bool = option(True, "whether it has a lid")
    colour: Literal["red", "blue"] = option("red", "its colour, 100 % enamel")
    watts: int | None = option(None, "its power", least=100, most=3000, shown="the mains'", advanced=True)
    note: str | None = option(None, "a note", may_change=True)
    size: str = option("", "a size that fills litres", recorded=False)
    serial: int = 7  # no option: neither a flag nor an entry


@dataclass(frozen=True)
class Cup(Spec):
    name: ClassVar[str] = "cup"
    summary: ClassVar[str] = "holds tea"
    handles: int = option(help="how many handles", least=0)
    litres: float = option(0.3, "how much it holds", metavar="L", above=0)
    lid: bool = option(False, "whether it has a lid")


HOUSEHOLD: dict[str, type[Spec]] = specs.registry(Kettle, Cup)


def parser() -> Parser:
    flags = Parser(prog="python -m household")
    flags.add_argument("--config", type=Path)
    return flags


def kettle(*argv: str) -> Kettle:
    flags = parser()
    specs.add_flags(flags, Kettle)
    return specs.from_flags(Kettle, parse(flags, argv))


def member(*argv: str) -> Spec:
    flags = parser()
    flags.add_argument("--thing", default="kettle")
    specs.add_member_flags(flags, HOUSEHOLD)
    return specs.member_from_flags(HOUSEHOLD, "--thing", parse(flags, argv))


def help_of(add: Any, *what: Any) -> str:
    flags = parser()
    add(flags, *what)
    return " ".join(flags.format_help(every=True).split())


def test_every_option_is_a_flag_with_the_fields_type_and_default() -> None:
    assert kettle() == Kettle()
    given = kettle("--litres", "2", "--no-lid", "--colour", "blue", "--watts", "900", "--note", "new", "--size", "big")
    assert given == Kettle(2.0, False, "blue", 900, "new", "big")
    assert (type(given.litres), type(given.watts)) == (float, int)


def test_help_names_defaults_and_escapes_percent_signs() -> None:
    text = help_of(specs.add_flags, Kettle)
    for part in (
        "--litres L how much it holds (default: 1.5)",
        "--lid, --no-lid whether it has a lid (default: on)",
        "--colour {red,blue} its colour, 100 % enamel (default: red)",
        "its power (default: the mains')",
        "--note TEXT a note",
    ):
        assert part in text
    assert "--serial" not in text
    assert "a note (default" not in text
    assert "fills litres (default" not in text


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"litres": 0}, "--litres must be a positive number, got 0"),
        ({"litres": float("nan")}, "--litres must be a positive number, got nan"),
        ({"litres": float("inf")}, "--litres must be a positive number, got inf"),
        ({"watts": 99}, "--watts must be at least 100 and at most 3000, got 99"),
        ({"watts": 10**400}, f"--watts must be at least 100 and at most 3000, got {10**400}"),
        ({"watts": 3001}, "--watts must be at least 100 and at most 3000, got 3001"),
        ({"colour": "green"}, "--colour must be red or blue, got 'green'"),
    ],
)
def test_a_value_out_of_range_is_one_line_from_flags_and_python(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        Kettle(**values)
    assert str(caught.value) == line


@pytest.mark.parametrize("text", ["9" * 400, "9" * 307 + "Ti", "-1", "1X"])
def test_a_size_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"--memory '.*' is no size, such as 512M or 2Gi"):
        parse_size(text, "--memory")
    assert parse_size(" 1.5 GiB", "--memory") == 3 << 29


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"watts": 200.0}, "--watts must be a whole number, got 200.0"),
        ({"watts": True}, "--watts must be a whole number, got True"),
        ({"litres": "2"}, "--litres must be a number, got '2'"),
        ({"lid": 1}, "--lid must be True or False, got 1"),
        ({"note": 3}, "--note must be a text, got 3"),
        ({"watts": np.array([200, 300])}, "--watts must be a whole number, got array([200, 300])"),
    ],
)
def test_a_value_of_another_type_is_one_line(values: dict[str, Any], line: str) -> None:
    """It would be written into files that are refused when they are read."""
    with pytest.raises(UsageError) as refused:
        Kettle(**values)
    assert str(refused.value) == line


def test_numbers_of_numpy_and_paths_become_pythons_own() -> None:
    made = Kettle(watts=np.int64(200), litres=np.float64(2.5), lid=np.bool_(False), note=Path("a/b"))  # type: ignore[arg-type]
    assert json.loads(json.dumps(made.params())) == {**Kettle(watts=200, litres=2.5, lid=False, note="a/b").params()}
    assert isinstance(made.watts, int)
    assert type(made.litres) is float


def test_the_ends_of_a_range_lie_in_it() -> None:
    assert (Kettle(watts=100).watts, Kettle(watts=3000).watts, Cup(handles=0).handles) == (100, 3000, 0)


def test_a_check_refuses_what_bounds_cannot_say() -> None:
    even = specs.Option("pairs", check=lambda value: value % 2 == 0, expected="an even number")
    assert (even.admits(4), even.admits(3), even.range()) == (True, False, "an even number")


def test_params_are_recorded_and_identity_may_not_change() -> None:
    recorded = {"litres": 1.5, "lid": True, "colour": "red", "watts": None, "note": "x"}
    assert Kettle(note="x", size="big").params() == recorded
    assert Kettle(note="x").identity() == Kettle(note="y").identity()
    assert Kettle(litres=2).identity() != Kettle().identity()


def test_a_toml_file_sets_defaults_that_flags_override(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('litres = 3\nlid = false\ncolour = "blue"\n')
    config = ("--config", str(tmp_path / "c.toml"))
    assert kettle(*config) == Kettle(3.0, False, "blue")
    assert kettle(*config, "--lid", "--colour", "red") == Kettle(3.0, True, "red")
    (tmp_path / "c.toml").write_text('colour = "green"')
    with pytest.raises(UsageError, match="choose one of red, blue"):
        kettle(*config)
    (tmp_path / "c.toml").write_text("watts = 1")
    with pytest.raises(UsageError, match="--watts must be at least 100"):
        kettle(*config)


def test_a_member_takes_its_own_flags_and_its_own_defaults() -> None:
    assert member() == Kettle()
    assert member("--no-lid") == Kettle(lid=False)
    assert member("--thing", "cup", "--handles", "2") == Cup(handles=2)
    assert member("--thing", "cup", "--handles", "2", "--litres", "1", "--lid") == Cup(2, 1.0, True)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--thing", "cup", "--watts", "900"], "--thing cup has no --watts 900: leave it out, or use kettle"),
        (["--handles", "1"], "--thing kettle has no --handles 1: leave it out, or use cup"),
        (["--thing", "cup"], "--thing cup needs --handles"),
        (["--thing", "spoon"], "--thing must be kettle or cup, got 'spoon'"),
    ],
)
def test_a_flag_of_another_member_is_refused(argv: list[str], line: str) -> None:
    with pytest.raises(UsageError) as caught:
        member(*argv)
    assert str(caught.value) == line


def test_a_toml_file_may_hold_parameters_of_other_members(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('colour = "blue"\nlitres = 2')
    assert member("--config", str(tmp_path / "c.toml"), "--thing", "cup", "--handles", "1") == Cup(1, 2.0)


def test_the_help_of_members_names_them_and_the_defaults_that_differ() -> None:
    text = help_of(specs.add_member_flags, HOUSEHOLD)
    assert "--litres L kettle, cup: how much it holds (default: 1.5 for kettle; 0.3 for cup)" in text
    assert "--colour {red,blue} kettle: its colour" in text
    assert "--lid, --no-lid kettle, cup:" in text
    assert specs.summaries(HOUSEHOLD) == "kettle  boils\ncup     holds tea"


def test_help_leaves_advanced_options_to_help_all() -> None:
    flags = parser()
    specs.add_flags(flags, Kettle)
    assert "--litres" in flags.format_help()
    assert "--watts" not in flags.format_help()
    assert flags.format_help().endswith("all 9 options: python -m household --help-all\n")
    assert "--watts INT" in flags.format_help(every=True)


def test_a_member_comes_back_from_what_it_wrote() -> None:
    cup = Cup(handles=2)
    assert cup.to_json() == {"name": "cup", "handles": 2, "litres": 0.3, "lid": False}
    assert specs.from_json(HOUSEHOLD, "--thing", cup.to_json()) == cup
    with pytest.raises(UsageError, match="--thing must be kettle or cup, got 'jug'"):
        specs.from_json(HOUSEHOLD, "--thing", {"name": "jug"})
    with pytest.raises(ValueError, match="spout"):
        specs.from_json(HOUSEHOLD, "--thing", {"name": "cup", "spout": 1})


@dataclass(frozen=True)
class Mug(Spec):
    """A member of a user's own with an option of another type than the others', or with the name of another flag."""

    name: ClassVar[str] = "mug"
    litres: int = option(1, "how much it holds")


@dataclass(frozen=True)
class Oven(Spec):
    name: ClassVar[str] = "oven"
    config: str = option("", "its settings")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (Mug, "kettle and mug share the option litres with different types: rename it in one"),
        (Oven, "two options are called --config: rename the field of your own class"),
    ],
)
def test_an_option_of_an_own_member_that_clashes_is_refused(kind: type[Spec], line: str) -> None:
    with pytest.raises(UsageError, match=f"^{line}$"):
        specs.add_member_flags(parser(), {**HOUSEHOLD, kind.name: kind})
