"""Which tests are slow, what `-m "not slow"` leaves out, and how long tests on clusters may take: a pytest plugin.

A test is slow when it starts a JVM, a cluster or a training run. That shows in its code and in its fixtures' code, so a
new test needs no mark. A test that is slow for another reason is marked with @pytest.mark.slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import pytest
from xdist.workermanage import WorkerController

# What starts such processes, by the name under which a test module imports it. run_job() starts none where the job
# refuses its command line, which most of its callers are about; the others have the fixture spark.
STARTERS = frozenset({"spark_submit", "run_application", "Training", "train_here", "Hdfs", "Standalone", "Yarn", "S3"})
CLUSTERS = frozenset({"s3", "hdfs", "standalone", "yarn", "kafka"})
FIXTURES = CLUSTERS | {"spark", "quick"}
CLUSTER_TIMEOUT_S = 900  # of a test that starts servers, or waits for one that does, on a busy machine

LEFT_OUT = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: starts a JVM, a cluster or a training run, or takes seconds")
    config.stash[LEFT_OUT] = Counter()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Mark the slow tests, before pytest selects by marks."""
    known: dict[FunctionType, bool] = {}
    for item in items:
        if isinstance(item, pytest.Function) and is_slow(item, known):
            item.add_marker(pytest.mark.slow)
            if CLUSTERS & set(item.fixturenames) and not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(CLUSTER_TIMEOUT_S))


def is_slow(test: pytest.Function, known: dict[FunctionType, bool]) -> bool:
    """Whether a test starts something slow, itself or by a fixture. known: the answers for functions seen before."""
    if FIXTURES & set(test.fixturenames):
        return True
    fixtures = [definition.func for found in test._fixtureinfo.name2fixturedefs.values() for definition in found]
    return any(starts(function, known) for function in [test.function, *fixtures])


def starts(function: Any, known: dict[FunctionType, bool]) -> bool:
    """Whether a function of the tests names one of STARTERS, itself or in a function of its module that it names."""
    if not isinstance(function, FunctionType) or not function.__module__.startswith(("tests.", "test_")):
        return False
    if function not in known:
        known[function] = False  # for functions that call each other
        names = set(names_in(function.__code__))
        helpers = (function.__globals__.get(name) for name in names)
        known[function] = bool(names & STARTERS) or any(starts(helper, known) for helper in helpers)
    return known[function]


def names_in(code: CodeType) -> Iterator[str]:
    """The global names of a function and of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


# What was left out, by file: of each process of pytest-xdist, which all leave out the same


def pytest_deselected(items: Iterable[pytest.Item]) -> None:
    for item in items:
        item.config.stash[LEFT_OUT][item.location[0]] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        left_out = session.config.stash[LEFT_OUT]
        session.config.workeroutput["left_out"] = dict(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController) -> None:
    left_out: dict[str, int] = getattr(node, "workeroutput", {}).get("left_out", {})
    node.config.stash[LEFT_OUT] = Counter(left_out) | node.config.stash[LEFT_OUT]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash[LEFT_OUT]
    if left_out and config.option.markexpr:
        terminalreporter.section(f"{left_out.total()} tests left out by -m '{config.option.markexpr}'")
        terminalreporter.write_line(", ".join(f"{file} {count}" for file, count in sorted(left_out.items())))
