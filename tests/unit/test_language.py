"""The rules of language that a program can check, over the product: names, openings of docstrings, and counts."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pipeline.strategies import STRATEGIES
from tests.clusters.machine import ROOT
from trainer.protocols import PROTOCOLS

OPENINGS = {"of", "those", "that", "what", "one", "where", "whose", "which"}
PARTICIPLES = {
    "Built",
    "Dealt",
    "Drawn",
    "Found",
    "Given",
    "Held",
    "Kept",
    "Known",
    "Laid",
    "Left",
    "Lost",
    "Made",
    "Said",
}
PARTICIPLES |= {"Seen", "Sent", "Shown", "Taken", "Told", "Written"}
NOUNS = {"Seed", "Need", "Speed"}
# Conversions, options and event handlers may begin with from, to, as, with and on.
PREPOSITIONS = {
    "above",
    "after",
    "at",
    "before",
    "below",
    "beside",
    "between",
    "by",
    "for",
    "in",
    "inside",
    "into",
    "of",
}
PREPOSITIONS |= {"outside", "over", "since", "through", "under", "until", "within", "without"}
Named = ast.ClassDef | ast.FunctionDef


@cache
def modules() -> dict[Path, str]:
    """The source of every module of the product."""
    return {
        path.relative_to(ROOT): path.read_text()
        for folder in ("pipeline", "trainer", "jobs")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


@cache
def trees() -> dict[Path, list[ast.AST]]:
    """The nodes of every module of the product."""
    return {path: list(ast.walk(ast.parse(source))) for path, source in modules().items()}


def nodes(kind: type[Named]) -> Iterator[tuple[Path, Named]]:
    for path, found in trees().items():
        yield from ((path, node) for node in found if isinstance(node, kind))


def docstrings() -> Iterator[tuple[Path, str]]:
    for path, found in trees().items():
        for node in found:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield path, text


def per_thousand(count: int, total: int) -> float:
    return 1000 * count / total


def lines() -> int:
    return sum(source.count("\n") for source in modules().values())


def test_a_docstring_opens_with_a_verb_or_a_noun() -> None:
    opened = {f"{path}: {text[:60]}" for path, text in docstrings() if re.split(r"\W", text.lower())[0] in OPENINGS}
    assert not opened


def test_no_class_is_named_by_a_participle() -> None:
    """Strategies and protocols have the names of the literature, such as stratified sharding."""
    members = {kind.__name__ for registry in (STRATEGIES, PROTOCOLS) for kind in registry.values()}
    last = {(path, node.name): re.findall("[A-Z][a-z]*", node.name)[-1:] for path, node in nodes(ast.ClassDef)}
    wrong = {
        f"{path}: {name}"
        for (path, name), word in last.items()
        if word and name not in members and word[0] not in NOUNS
        if word[0] in PARTICIPLES or word[0].endswith("ed")
    }
    assert not wrong


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in nodes(ast.ClassDef):
        places[node.name].append(str(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_function_is_named_by_a_preposition() -> None:
    wrong = {f"{path}: {node.name}" for path, node in nodes(ast.FunctionDef) if first_word(node.name) in PREPOSITIONS}
    assert not wrong


def first_word(name: str) -> str:
    return name.strip("_").split("_")[0]


def test_an_assignment_assigns_one_value() -> None:
    tuples = [
        (path, node.lineno)
        for path, found in trees().items()
        for node in found
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ]
    assert per_thousand(len(tuples), lines()) <= 2, tuples


def test_docstrings_name_their_nouns() -> None:
    text = " ".join(text for _, text in docstrings())
    words = len(text.split())
    assert per_thousand(len(re.findall(r"\bwhat\b", text, re.IGNORECASE)), words) <= 1
    assert per_thousand(len(re.findall(r"\bth(?:at|ose) of\b", text, re.IGNORECASE)), words) <= 0.1


def test_comments_say_why_often_enough() -> None:
    comments = sum(
        token.type == tokenize.COMMENT
        for source in modules().values()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )
    assert per_thousand(comments, lines()) >= 28
