"""A batch of commands in one process, for an interpreter that lacks the tests' packages: run by its path or by `-c`.

Its argument is JSON: {"path": [...], "spark": false, "commands": [{"argv": [...], "hidden": [...]}]}. The folders of `path`
come first in sys.path. With `spark`, the commands share one Spark context. A command is `sharding` or the path of a Python
file, then its arguments; the modules in `hidden` are not found while it runs. The last line of the output is RESULT and the
exit code, stdout and stderr of each command."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import runpy
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

STUCK_S = 120  # after which a command shows where it is


class Hider(PathFinder):
    """The finder of installed packages, which finds no module of the packages in `hidden`."""

    hidden: frozenset[str] = frozenset()

    @classmethod
    def find_spec(cls, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] in cls.hidden:
            return None
        return PathFinder.find_spec(fullname, path, target)


def run(argv: list[str], hidden: list[str]) -> dict[str, Any]:
    """Run one command as its own process would, and return how it ended."""
    out = io.StringIO()
    err = io.StringIO()
    own = sys.argv, list(sys.path)
    sys.argv = list(argv)
    Hider.hidden = frozenset(hidden)
    print(f"running {argv}", file=sys.__stderr__, flush=True)
    faulthandler.dump_traceback_later(STUCK_S, file=2)
    code: object = "no exit code"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            if argv[0] == "sharding":
                from pipeline.entry import main

                sys.exit(main())
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
        except Exception:  # Python would print it and exit with 1
            traceback.print_exc()
            code = 1
        finally:
            faulthandler.cancel_dump_traceback_later()
            sys.argv, sys.path = own
            Hider.hidden = frozenset()
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def run_all(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Run the commands of a plan in their order."""
    sys.path[:0] = plan["path"]
    sys.meta_path[sys.meta_path.index(PathFinder)] = Hider
    with contextlib.ExitStack() as stack:
        if plan["spark"]:
            from pipeline.spark.session import spark_context

            stack.enter_context(spark_context())
        return [run(**command) for command in plan["commands"]]


if __name__ == "__main__":
    print("RESULT", json.dumps(run_all(json.loads(sys.argv[1]))))
