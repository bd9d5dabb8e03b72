"""Pytest fixtures of clusters for the whole session, each started when a test first asks for it: a pytest plugin.

A test that kills a server starts it again before the test ends. A test's files go into a folder of its own. Tests on
clusters are in the files test_on_standalone, test_on_hdfs, test_on_yarn and test_chaos_shards. One elsewhere that needs HDFS
has a name that begins with test_on_hdfs_, or runs on every kind of store (tests/places.py).
"""

import re
from collections.abc import Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.clusters.hdfs import Hdfs
from tests.clusters.kafka import Kafka
from tests.clusters.s3 import S3
from tests.clusters.standalone import Standalone
from tests.clusters.yarn import Yarn

# The tests that are dealt out first, longest first, so that none of them is left for the end: by file, or by group. Of a
# minute and more each on two cores; the order is that of their durations.
LONG = (
    "on standalone", "on hdfs", "test_readme", "test_benchmark.py", "test_on_local_files", "test_trainer_hosts",
    "test_trainer_launch", "test_chaos", "test_jobs", "test_training", "test_regressions", "test_clusters", "test_report",
    "test_trainer_faults", "test_study_runs",
    "test_bench_trainer", "test_estimators", "test_trainer_shards", "test_sample", "test_wheel",
    "test_boundaries",
)  # fmt: skip

# Files whose tests share shards, runs, a page, a wheel or the components of a large sample.
BY_FILE = ("test_train", "test_study_runs", "test_benchmark.py", "test_on_", "test_report", "test_sample", "test_wheel")


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
    """How pytest-xdist deals out tests to processes: in the order of collection, some of them together.

    Tests on Spark's standalone cluster go to one process; all others on HDFS and those on YARN go to another. So each
    cluster starts once, and HDFS twice. Those on S3 go to one process
    too. These tests mostly wait, beside others that compute. The trainer's tests, the
    benchmark's and those of BY_FILE go by file, because a file shares what takes long to make. All other tests go one by
    one.

    The groups of pytest-xdist 3.8 have no effect with pytest 9.2, which keeps a test's id elsewhere.
    """

    def __init__(self, config: pytest.Config, log: Producer) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False  # which would put the group with the most tests first

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def group_of(nodeid: str) -> str:
    """The tests that go to the same process as this one."""
    file = nodeid.split("::")[0]
    if file.endswith(("test_on_standalone.py", "test_chaos_shards.py")):
        return "on standalone"
    if file.endswith(("test_on_hdfs.py", "test_on_yarn.py")) or re.search(r"::test_on_hdfs_|[\[-]hdfs[]-]", nodeid):
        return "on hdfs"
    if re.search(r"test_on_s3\.py|[\[-]s3[]-]", nodeid):
        return "on s3"
    return file if file.rpartition("/")[2].startswith(BY_FILE) else nodeid


def rank_of(nodeid: str) -> int:
    """The place of a test's group among the long ones, or after them."""
    group = group_of(nodeid)
    return next((rank for rank, name in enumerate(LONG) if name in group), len(LONG))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order of dealing out. A run in one process keeps the order of files."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank_of(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return LongestFirst(config, log)


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Hdfs]:
    """One NameNode and three DataNodes."""
    with Hdfs() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """One S3 server with an empty bucket, which every process of the tests finds by its environment."""
    with S3() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.settings.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session")
def kafka() -> Iterator[Kafka]:
    """One Kafka broker without topics."""
    with Kafka() as broker:
        yield broker


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
