"""The module search path of this program and of the processes that it starts.

Python puts the working folder first on the path of ``python -m`` and ``python -c``, by which Spark starts its Python
workers and multiprocessing its fork server. A user's file torch.py or pipeline.py would be imported there in place of
the module of that name. Child processes therefore get the path of this program, without the working folder.

spark-submit and the Python workers of executors have the zip files of SPARK_HOME/python/lib first on their path. Every
process compiles modules from a zip file again, which takes a second in a driver and another in its workers. pyspark is
therefore imported from the folder in which it is installed."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, TracebackType

SAFE_PATH = "PYTHONSAFEPATH"  # if set, Python puts no folder first on the path
PATH = "PYTHONPATH"


def leave_working_folder(package: str, file: str) -> None:
    """Remove the working folder from sys.path if ``python -m`` has put it there for a program of a package.

    Called while that package is imported. The folder stays if it contains the package itself; if a file there then
    hides a module, the program ends with a line that names the file.

    package: its name. file: its __init__.py."""
    if sys.argv[:1] != ["-m"] or sys.flags.safe_path:  # argv[0] is -m until Python has found the program
        return
    program = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    if program.partition(".")[0] != package:
        return
    if os.path.realpath(sys.path[0]) == os.path.realpath(Path(file).parents[1]):
        sys.excepthook = _name_hiding_file
    else:
        del sys.path[0]


def _name_hiding_file(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the line about a file that hides a module instead of the trace; a hook for sys.excepthook."""
    if message := hiding_file(error):
        print(f"error: {message}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def added_folders() -> list[str]:
    """Return the folders of the module search path that the interpreter itself does not search.

    The program's own folder is among them, and what PYTHONPATH or the program has added."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own += [*site.getsitepackages(), site.getusersitepackages()]
    # Python searches a zip file of the standard library too, whether there is one or not.
    own.append(
        os.path.join(sys.base_prefix, sys.platlibdir, f"python{sysconfig.get_config_var('py_version_nodot')}.zip")
    )
    return [
        folder
        for folder in map(os.path.abspath, sys.path)
        if not any(Path(folder).is_relative_to(each) for each in own)
    ]


def child_variables() -> dict[str, str]:
    """Return the environment variables that give a child process exactly the module search path of this process."""
    folders = [os.path.abspath(entry) for entry in sys.path]
    return {SAFE_PATH: "1", PATH: os.pathsep.join(folder for folder in folders if os.pathsep not in folder)}


def handed_on() -> AbstractContextManager[None]:
    """Set ``child_variables`` in the environment within a context, for processes that a library starts."""
    return variables(child_variables())


@contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within a context, and restore the previous ones afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def hiding_file(error: BaseException) -> str | None:
    """Return a message if an error was caused by a file in the working folder that hides an installed module, or None.

    Such a file is imported in place of the module, so that an import or an attribute of the module fails."""
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        name = error.obj.__name__
        file = getattr(error.obj, "__file__", None)
    elif isinstance(error, ImportError) and error.name:
        name = error.name
        file = error.path or getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    else:
        return None
    # Only a module that another folder of the path would have provided is hidden.
    name = name.partition(".")[0]
    working_folder = os.path.realpath(os.getcwd())
    beside = {os.path.join(working_folder, f"{name}.py"), os.path.join(working_folder, name, "__init__.py")}
    others = [entry for entry in sys.path if os.path.realpath(entry) != working_folder]
    if not file or os.path.realpath(file) not in beside or PathFinder.find_spec(name, others) is None:
        return None
    return f"{os.path.realpath(file)} hides the installed module {name}: rename it, or run from another folder"


def drop_zips(path: Sequence[str]) -> list[str]:
    """Return the import path without Spark's zip files whose packages are also installed in a folder on the path."""
    real = {os.path.realpath(entry) for entry in path}
    return [entry for entry in path if not _is_twin(Path(entry), real)]


def _is_twin(entry: Path, path: set[str]) -> bool:
    """True if a zip of SPARK_HOME/python/lib contains a package that is installed in a folder of the path, too.

    entry: a path to pyspark.zip or py4j-*-src.zip; False for any other. path: the folders of sys.path, resolved."""
    name = "pyspark" if entry.name == "pyspark.zip" else "py4j" if entry.match("py4j-*-src.zip") else None
    if name is None or entry.parts[-4:-1] != ("pyspark", "python", "lib"):
        return False
    packages = entry.parents[3]  # the folder of pyspark's installation, if this Spark is a Python package
    return os.path.realpath(packages) in path and all(
        (packages / package / "__init__.py").is_file() for package in {"pyspark", name}
    )
