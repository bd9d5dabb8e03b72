"""Clusters on this machine start, report what is wrong, and leave nothing behind."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hdfs_native import Client

from pipeline.core.errors import JobError, UsageError
from tests.clusters import ROOT, free_ports
from tests.clusters.artifacts import MINICLUSTER, fetch_jar, find_java, hadoop_classpath
from tests.clusters.command import read_running
from tests.clusters.environments import remove_predecessors
from tests.clusters.interpreter import executor_python
from tests.clusters.machine import cache_folder, port_is_free, port_range
from tests.clusters.processes import is_alive
from tests.clusters.test_on_hdfs import put
from tests.support.trainer_runs import until


def run_cli(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.clusters", *map(str, arguments)]
    env = {**os.environ, "SHARDING_CACHE": str(cache)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_test_processes_draw_ports_from_ranges_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = [port_range(f"gw{number}") for number in range(8)]
    assert len({port for ports in ranges for port in ports}) == sum(map(len, ranges))
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    drawn = free_ports(20)
    assert len(set(drawn)) == 20
    assert set(drawn + free_ports(20, "::1")) <= set(ranges[3])


# Nothing is left behind


@pytest.mark.full
def test_nothing_is_left_of_a_cluster_whose_test_process_was_killed() -> None:
    program = """
import time
from tests.clusters import Standalone
with Standalone(workers=1) as cluster:
    print(cluster.folder, *cluster.pids(), flush=True)
    time.sleep(300)
"""
    test = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert test.stdout is not None
    with test.stdout:
        folder, *pids = test.stdout.readline().split()
    servers = [psutil.Process(int(pid)) for pid in pids]
    assert len(servers) == 2
    assert all(is_alive(server) for server in servers)
    test.send_signal(signal.SIGKILL)
    test.wait()
    until(lambda: not any(is_alive(server) for server in servers) and not Path(folder).exists(), "it ends")


# The command line


@pytest.mark.full
def test_hdfs_up_and_down_keep_the_files_and_can_be_repeated(tmp_path: Path) -> None:
    hadoop_classpath()
    (tmp_path / "hadoop").symlink_to(cache_folder() / "hadoop")
    rpc_port, http_port = free_ports(2)
    up = ("hdfs", "up", "--port", rpc_port, "--http-port", http_port)
    uri = f"hdfs://127.0.0.1:{rpc_port}"
    try:
        first = run_cli(*up, cache=tmp_path)
        assert first.returncode == 0, first.stderr
        assert f"{uri}\n" in first.stdout
        assert f"export HADOOP_CONF_DIR={tmp_path}/hdfs/conf" in first.stdout
        put(Client(uri), "/kept", b"kept")
        again = run_cli(*up, cache=tmp_path)
        assert (again.returncode, again.stdout.splitlines()[0]) == (0, "HDFS is already up")
        assert "3 live DataNodes" in run_cli("hdfs", "status", cache=tmp_path).stdout
        assert run_cli("hdfs", "down", cache=tmp_path).returncode == 0
        assert port_is_free(rpc_port)
        assert run_cli("hdfs", "status", cache=tmp_path).returncode == 1
        assert run_cli("hdfs", "down", cache=tmp_path).returncode == 0
        assert run_cli(*up, cache=tmp_path).returncode == 0
        assert Client(uri).read("/kept").read() == b"kept"
    finally:
        running = read_running(tmp_path / "hdfs")
        deleted = run_cli("hdfs", "down", "--delete", cache=tmp_path)
    assert deleted.returncode == 0
    assert not (tmp_path / "hdfs").exists()
    assert running is not None
    assert running.alive() == {}


def test_a_busy_port_is_one_line_that_names_the_port_and_its_holder(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        result = run_cli("hdfs", "up", "--port", port, cache=tmp_path)
    assert result.returncode == 2
    assert re.fullmatch(rf"error: port {port} is in use by .*pid {os.getpid()}: .*\n", result.stderr)
    assert result.stdout == ""
    assert not (tmp_path / "hdfs" / "state.json").exists()


# Programs


def test_the_executors_python_has_the_packages_and_finds_no_checkout() -> None:
    """A job whose package did not travel fails on these clusters, as it does where nothing is installed in place."""

    def imported(*names: str) -> subprocess.CompletedProcess[str]:
        command = [str(executor_python()), "-c", f"import {', '.join(names)}"]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, check=False)

    assert imported("numpy", "pyspark", "hdfs_native").returncode == 0
    assert imported("pipeline").stderr.endswith("ModuleNotFoundError: No module named 'pipeline'\n")


def test_an_environment_replaces_its_predecessors(tmp_path: Path) -> None:
    for name in ("demo-old", "demo-new", "moto-old"):
        (tmp_path / name / "bin").mkdir(parents=True)
    remove_predecessors(tmp_path / "demo-new")
    assert [path.name for path in tmp_path.iterdir()] == ["moto-old"]


def test_java_home_precedes_path_and_path_the_environments_java(tmp_path: Path) -> None:
    def java(folder: str) -> Path:
        program = tmp_path / folder / "bin" / "java"
        program.parent.mkdir(parents=True)
        program.touch(mode=0o755)
        return program

    home, on_path, own = java("home"), java("path"), java(".venv/java")
    environ = {"JAVA_HOME": str(tmp_path / "home"), "PATH": str(on_path.parent)}
    assert find_java(environ, tmp_path) == home
    del environ["JAVA_HOME"]
    assert find_java(environ, tmp_path) == on_path
    assert find_java({"PATH": ""}, tmp_path) == own
    own.unlink()
    with pytest.raises(UsageError, match="no java in JAVA_HOME"):
        find_java({"PATH": ""}, tmp_path)


@pytest.mark.full
def test_a_download_without_a_network_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=9"
    monkeypatch.setenv("JDK_JAVA_OPTIONS", nowhere)
    monkeypatch.setenv("MAVEN_OPTS", f"{nowhere} -Dmaven.repo.local={tmp_path}/repository")
    with pytest.raises(JobError, match=r"could not download hadoop-client-minicluster-3\.5\.0\.jar \(.*") as error:
        fetch_jar(*MINICLUSTER, "3.5.0", "56 MB", tmp_path / "jars")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "jars").iterdir()) == []
