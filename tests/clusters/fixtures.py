"""Pytest fixtures of clusters for the whole session, each started when a test first asks for it: a pytest plugin.

A test that kills a server starts it again before the test ends. A test's files go into a folder of its own. The names
of these tests, or of their files, begin with test_on_, so that all of them run in the same process.
"""

from collections.abc import Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.clusters.hdfs import Hdfs
from tests.clusters.standalone import Standalone
from tests.clusters.yarn import Yarn


class ClustersTogether(LoadScopeScheduling):  # type: ignore[misc]
    """How pytest-xdist deals out tests to processes.

    All tests on the clusters go to one process, and go first. So each cluster starts once, and its tests, which mostly
    wait, run beside tests that compute. The trainer's tests go by file, because a file shares shards and runs. All
    other tests go one by one.

    The groups of pytest-xdist 3.8 have no effect with pytest 9.2, which keeps a test's id elsewhere.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        return "clusters" if "test_on_" in nodeid else file if "/test_train" in file else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ClustersTogether(config, log)


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Hdfs]:
    """One NameNode and three DataNodes."""
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
