"""Session-wide clusters for tests, each started when a test first asks for it: name this in pytest_plugins.

A test that kills a server brings it back before it ends; files go under a folder of the test's own.
"""

from collections.abc import Iterator

import pytest

from tests.clusters import Hdfs, Standalone, Yarn

CLUSTERS = {"hdfs", "standalone", "yarn"}


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One of pytest-xdist's processes runs all tests of a kind of cluster, so that each cluster starts once."""
    for item in items:
        if CLUSTERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group("clusters"))


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Hdfs]:
    """One NameNode, three DataNodes."""
    with Hdfs() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def standalone() -> Iterator[Standalone]:
    """A Spark master and two workers of one core each."""
    with Standalone() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def yarn(hdfs: Hdfs) -> Iterator[Yarn]:
    """A ResourceManager and one NodeManager on the session's HDFS."""
    with Yarn(hdfs) as cluster:
        yield cluster
