"""Pytest fixtures of clusters, each started when a test first asks for it: a pytest plugin.

YARN and Kafka live as long as the one module that uses them, because they compute when idle, too; others for the session.
A test that kills a server starts it again before the test ends. A test's files go into a folder of its own. Each process of
pytest-xdist that runs such a test has a cluster of its own."""

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.clusters.command import read_running
from tests.clusters.hdfs import Hdfs
from tests.clusters.kafka import Kafka
from tests.clusters.machine import cache_folder
from tests.clusters.s3 import S3
from tests.clusters.servers import START_TIMEOUT
from tests.clusters.standalone import Standalone
from tests.clusters.yarn import Yarn

CLUSTERS = frozenset({"s3", "hdfs", "standalone", "yarn", "kafka"})
CLUSTER_TIMEOUT_S = 900  # the first test that asks also waits for the start, beside tests that compute


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        uses_cluster = isinstance(item, pytest.Function) and CLUSTERS & set(item.fixturenames)
        if uses_cluster and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(CLUSTER_TIMEOUT_S))


class DeveloperHdfs(Hdfs):
    """The HDFS of `make hdfs-up`, which tests use and do not kill."""

    def kill_datanode(self, index: int) -> None:
        pytest.skip("kills a DataNode: run it without USE_HDFS")

    def restart_datanode(self, index: int, timeout: timedelta = START_TIMEOUT) -> None:
        """Do nothing: none was killed."""


@pytest.fixture(scope="session")
def hdfs() -> Iterator[Hdfs]:
    """One NameNode and three DataNodes: of this session, or with USE_HDFS=kept the ones of `make hdfs-up`."""
    if os.environ.get("USE_HDFS") != "kept":
        with Hdfs() as cluster:
            yield cluster
        return
    running = read_running(cache_folder() / "hdfs")
    if running is None or not running.alive():
        pytest.fail("USE_HDFS=kept: no HDFS is up; start it with make hdfs-up")
    kept = DeveloperHdfs(cache_folder() / "hdfs", running.rpc_port, running.http_port)
    client = kept.client()
    before = set(client.list("/"))
    yield kept
    for name in set(client.list("/")) - before:
        client.delete(f"/{name}", recursive=True)


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """One S3 server with an empty bucket, which every process of the tests finds by its environment."""
    with S3() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.settings.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def kafka() -> Iterator[Kafka]:
    """One Kafka broker without topics."""
    with Kafka() as broker:
        yield broker


@pytest.fixture(scope="session")
def standalone() -> Iterator[Standalone]:
    """A Spark master and two workers of one core each."""
    with Standalone() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def yarn(hdfs: Hdfs) -> Iterator[Yarn]:
    """A ResourceManager and one NodeManager on the session's HDFS."""
    with Yarn(hdfs) as cluster:
        yield cluster
