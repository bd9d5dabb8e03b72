"""Record which functions of the product run, in every process of ``make test``, at almost no cost.

A line tracer takes a third of the time of these tests. Instead, each function of the product gets a first statement that
sets its byte in a file, ``build/executed/calls``. All processes map that file, so a killed process loses nothing.

``python -m tests.executed --record`` compiles the modules so and adds a line to the environment's site-packages. With
RECORD_CALLS in its environment (the folder of the recording) every Python of the environment then executes this file as
it starts, before the product can be imported. It therefore imports nothing of this project.
"""

from __future__ import annotations

import ast
import ctypes
import json
import marshal
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple, cast

NAME = "recorder_of_calls"  # this module in sys.modules
SITE_LINE = (
    'import os; at = os.environ.get("RECORD_CALLS"); '
    'at and exec(compile(open(at + "/recorder.py").read(), at + "/recorder.py", "exec"), {"__name__": "' + NAME + '"})'
)
PACKAGES = ("pipeline", "trainer")


class Recording(NamedTuple):
    """The functions of each module in the order of their bytes in the file ``calls``: module name, functions."""

    functions: dict[str, list[str]]

    @classmethod
    def prepare(cls, root: Path, folder: Path) -> Recording:
        """Compile the modules under a checkout's root into a folder, with no call recorded."""
        functions = dict[str, list[str]]()
        (folder / "code").mkdir(parents=True)
        first = 0
        for path in sorted(path for package in PACKAGES for path in (root / package).rglob("*.py")):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            tree = ast.parse(path.read_text())
            functions[name] = instrument(tree, first)
            code = compile(tree, str(path), "exec", dont_inherit=True)
            (folder / "code" / name).write_bytes(marshal.dumps(code))
            first += len(functions[name])
        (folder / "calls").write_bytes(bytes(max(first, 1)))
        (folder / "functions.json").write_text(json.dumps(functions))
        (folder / "root").write_text(str(root))
        (folder / "recorder.py").write_bytes(Path(__file__).read_bytes())
        return cls(functions)

    @classmethod
    def read(cls, folder: Path) -> tuple[Recording, dict[str, set[str]]]:
        """Return the recording in a folder, and the functions of each module that were called."""
        functions: dict[str, list[str]] = json.loads((folder / "functions.json").read_text())
        calls = iter((folder / "calls").read_bytes())
        return cls(functions), {
            name: {function for function in mine if next(calls)} for name, mine in functions.items()
        }


def instrument(tree: ast.Module, first: int) -> list[str]:
    """Make each function of a module set its byte, from byte ``first`` on. Return the functions' names.

    Functions inside functions are left out: Spark pickles them by value, with the globals that they use."""
    names = list[str]()
    for name, function in _functions(tree.body, ""):
        at = 1 if ast.get_docstring(function, clean=False) is not None else 0
        body = function.body[at:]
        if all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in body):
            continue  # nothing to execute
        function.body.insert(at, _statement(f"_calls_[{first + len(names)}] = 1", body[0].lineno))
        names.append(name)
    if names:
        at = 1 if ast.get_docstring(tree, clean=False) is not None else 0
        while isinstance(part := tree.body[at], ast.ImportFrom) and part.module == "__future__":
            at += 1
        tree.body.insert(at, _statement(f"_calls_ = __import__('sys').modules['{NAME}'].CALLS", 1))
    return names


def _functions(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")


def _statement(text: str, line: int) -> ast.stmt:
    statement = ast.parse(text).body[0]
    for node in ast.walk(statement):
        if hasattr(node, "lineno"):
            ast.copy_location(node, ast.Constant(0, lineno=line, col_offset=0, end_lineno=line, end_col_offset=0))
    return statement


class Loader(SourceFileLoader):
    """Load a module of the product as it was compiled for the recording."""

    def get_code(self, fullname: str) -> CodeType | None:
        return cast(CodeType, marshal.loads((FOLDER / "code" / fullname).read_bytes()))


class Finder:
    """Find the modules of the recorded checkout, and no others."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in PACKAGES or not (FOLDER / "code" / name).exists():
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not SourceFileLoader or not spec.loader.path.startswith(ROOT):
            return None
        spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def _mapped(path: Path) -> memoryview:
    """Return a file's bytes, shared with all processes that map it. No file stays open, unlike with ``mmap.mmap``."""
    size = path.stat().st_size
    library = ctypes.CDLL(None)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    file = os.open(path, os.O_RDWR)
    try:
        address = library.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, 0)
    finally:
        os.close(file)
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


if __name__ == NAME:  # executed by SITE_LINE
    FOLDER = Path(os.environ["RECORD_CALLS"])
    ROOT = (FOLDER / "root").read_text() + os.sep
    CALLS = _mapped(FOLDER / "calls")
    module = ModuleType(NAME)
    module.CALLS = CALLS  # type: ignore[attr-defined]
    sys.modules[NAME] = module
    sys.meta_path.insert(0, Finder())
