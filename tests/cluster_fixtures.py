"""Session-wide clusters for tests, each started when a test first asks for it: name this in pytest_plugins.

A test that kills a server brings it back before it ends; files go under a folder of the test's own. The names of these
tests, or of their files, begin with test_on_: they all run in the same process.
"""

from collections.abc import Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.clusters import Hdfs, Standalone, Yarn


class ClustersTogether(LoadScopeScheduling):  # type: ignore[misc]
    """How pytest-xdist deals out tests: all that are on the clusters to one process, and first; the trainer's by file,
    because a file shares shards and runs; all others one by one.

    So every cluster starts once, and its tests, which mostly wait, run beside those that compute. (pytest-xdist 3.8's own
    groups have no effect with pytest 9.2, which keeps a test's id elsewhere.)
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return "clusters" if "test_on_" in nodeid else file if "/test_train" in file else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ClustersTogether(config, log)


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
