"""The sources of the product, parsed once per process for the tests that check them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.clusters.machine import ROOT

PACKAGES = ("pipeline", "trainer", "jobs")


@cache
def modules() -> dict[Path, str]:
    """Return the text of every module of the product, by its absolute path."""
    return {path: path.read_text() for folder in PACKAGES for path in sorted((ROOT / folder).rglob("*.py"))}


@cache
def nodes(path: Path) -> list[ast.AST]:
    """Return the nodes of a module's syntax tree, as ``ast.walk`` yields them.

    path: absolute path of a module of the product."""
    return list(ast.walk(ast.parse(modules()[path])))
