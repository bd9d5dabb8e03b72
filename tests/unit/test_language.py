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
from tests.support.sources import modules, nodes
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
# Words that say nothing about the value of a variable. Keys of files may have them, and so fields of records.
VAGUE = {
    "asked",
    "begun",
    "broken",
    "chosen",
    "dealt",
    "delivered",
    "done",
    "drawn",
    "found",
    "given",
    "gone",
    "held",
    "here",
}
VAGUE |= {"kept", "known", "looked", "lost", "made", "mine", "passed_on", "put", "said", "seen", "sent", "settled"}
VAGUE |= {"shown", "taken", "theirs", "there", "told", "wanted", "what"}
MAY_NAME_JOBS = {
    "jobs/train.py": "is the help of the job itself",
    "pipeline/core/provenance.py": "names the program that was started, in the manifest",
}
Named = ast.ClassDef | ast.FunctionDef


def trees() -> Iterator[tuple[Path, list[ast.AST]]]:
    """Yield every module of the product and the nodes of its tree."""
    yield from ((path.relative_to(ROOT), nodes(path)) for path in modules())


def named(kind: type[Named]) -> Iterator[tuple[Path, Named]]:
    for path, found in trees():
        yield from ((path, node) for node in found if isinstance(node, kind))


def docstrings() -> Iterator[tuple[Path, str]]:
    for path, found in trees():
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
    last = {(path, node.name): re.findall("[A-Z][a-z]*", node.name)[-1:] for path, node in named(ast.ClassDef)}
    wrong = {
        f"{path}: {name}"
        for (path, name), word in last.items()
        if word and name not in members and word[0] not in NOUNS
        if word[0] in PARTICIPLES or word[0].endswith("ed")
    }
    assert not wrong


def test_no_two_classes_share_a_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in named(ast.ClassDef):
        places[node.name].append(str(path))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_no_function_is_named_by_a_preposition() -> None:
    wrong = {f"{path}: {node.name}" for path, node in named(ast.FunctionDef) if first_word(node.name) in PREPOSITIONS}
    assert not wrong


def first_word(name: str) -> str:
    return name.strip("_").split("_")[0]


def test_no_variable_is_named_by_a_vague_word() -> None:
    """Variables and parameters, and attributes that a method assigns."""
    wrong = [f"{path}:{line}: {name}" for path, name, line in variables() if name.strip("_") in VAGUE]
    assert not wrong


def variables() -> Iterator[tuple[Path, str, int]]:
    """Yield the names that functions and modules bind, but for the fields of classes."""
    for path, found in trees():
        bodies = [node.body for node in found if isinstance(node, ast.ClassDef)]
        fields = {id(item.target) for body in bodies for item in body if isinstance(item, ast.AnnAssign)}
        for node in found:
            if isinstance(node, ast.arg):
                yield path, node.arg, node.lineno
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                if id(node) not in fields:
                    yield path, node.id if isinstance(node, ast.Name) else node.attr, node.lineno
            elif isinstance(node, ast.ExceptHandler | ast.MatchAs) and node.name:
                yield path, node.name, node.lineno


def test_no_text_advises_a_file_that_a_wheel_lacks() -> None:
    """Messages name the commands of ``sharding`` and not jobs/NAME.py, except where MAY_NAME_JOBS gives the reason."""
    places = {
        str(path)
        for path, found in trees()
        for node in found
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_docstring(path, node)
        if re.search(r"\bjobs/", node.value)
    }
    assert places == MAY_NAME_JOBS.keys()


def is_docstring(path: Path, node: ast.Constant) -> bool:
    """Return whether a text is a statement of its own."""
    return any(isinstance(each, ast.Expr) and each.value is node for each in nodes(ROOT / path))


def test_an_assignment_assigns_one_value() -> None:
    tuples = [
        (path, node.lineno)
        for path, found in trees()
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
    assert per_thousand(sum(map(len, comments().values())), lines()) >= 28


def test_a_long_body_has_a_comment() -> None:
    """A body of more than 12 lines, without its docstring."""
    lacking = {
        f"{path}: {node.name}"
        for path, node in named(ast.FunctionDef)
        if body_lines(node) > 12 and not comments()[path] & set(range(node.lineno, (node.end_lineno or 0) + 1))
    }
    assert not lacking


def body_lines(node: Named) -> int:
    """Return the number of lines from a function's first statement after its docstring to its last."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


@cache
def comments() -> dict[Path, set[int]]:
    """The lines with a comment, by module."""
    return {
        path.relative_to(ROOT): {
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        for path, source in modules().items()
    }


def test_names_of_tests_are_short() -> None:
    """At most 60 characters after "test_"."""
    texts = [path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))]
    names = [name for text in texts for name in re.findall(r"^ *def test_(\w+)", text, re.MULTILINE)]
    assert len(names) > 1000
    assert not [name for name in names if len(name) > 60]
