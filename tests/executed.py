"""Fail for each module of the product whose functions `make test` does not execute: ``python -m tests.executed``.

`make test` records which lines every process executes (build/coverage, by coverage.py). Importing a module executes its
`def` lines, which says nothing, so only lines inside functions count."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from coverage import Coverage, CoverageException

from tests.clusters.machine import ROOT

LEAST = 0.25  # of the statements inside functions
# Clients of servers that only the full tier starts.
LEFT_TO_FULL_TIER = {"pipeline/stream/kafka.py", "trainer/cluster/ray.py"}


def main() -> int:
    """Print the modules that lack tests, with the share of their lines that is executed. Return 1 if there are any."""
    coverage = Coverage(config_file=str(ROOT / "pyproject.toml"))
    try:
        coverage.combine(keep=True)
    except CoverageException:
        print("build/coverage has no recording of the default tier: run make test first", file=sys.stderr)
        return 1
    data = coverage.get_data()
    shares = {path: share_of(path, set(data.lines(str(path)) or ())) for path in modules()}
    names = {path: str(path.relative_to(ROOT)) for path in shares}
    lacking = {path: share for path, share in sorted(shares.items()) if share < LEAST}
    lacking = {path: share for path, share in lacking.items() if names[path] not in LEFT_TO_FULL_TIER}
    for path, share in lacking.items():
        print(
            f"{path.relative_to(ROOT)}: the default tier executes {share:.0%} of its functions' lines", file=sys.stderr
        )
    least = ", ".join(f"{names[path]} {share:.0%}" for path, share in sorted(shares.items(), key=by_share)[:10])
    print(f"{len(shares) - len(lacking)} of {len(shares)} modules are executed by the default tier; the least: {least}")
    return int(bool(lacking))


def by_share(item: tuple[Path, float]) -> float:
    return item[1]


def modules() -> Iterator[Path]:
    for folder in ("pipeline", "trainer", "jobs"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def share_of(path: Path, executed: set[int]) -> float:
    """The share of a module's statements inside functions that were executed; 1 for a module without functions."""
    statements = set(lines_in_functions(ast.parse(path.read_text())))
    return len(statements & executed) / len(statements) if statements else 1.0


def lines_in_functions(tree: ast.Module) -> Iterator[int]:
    """Yield the first line of every statement in the body of a function, docstrings and `...` left out."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for statement in function.body:
                yield from (
                    node.lineno
                    for node in ast.walk(statement)
                    if isinstance(node, ast.stmt) and not isinstance(node, ast.FunctionDef | ast.Nonlocal | ast.Global)
                    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
                )


if __name__ == "__main__":
    sys.exit(main())
