"""How many files a host's processes have open, and how many they may."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pipeline.spark.shipping import PACKAGE
from tests.support.server_processes import FACTS, Served
from tests.support.slow_model import SLOW
from tests.support.trainer_runs import Training, until
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from trainer.launch.open_files import FILES_PER_WORKER, SPARE, needed
from trainer.options import all_roles, parse_roles
from trainer.transport.addresses import local_addresses

CHILD = """
import resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
from trainer.launch.fork_server import FORK_SERVER
from trainer.launch.child import Child
FORK_SERVER.ensure()  # of a program that started it with its own limit
child = Child("child", Path(sys.argv[1]), "tests.training.test_open_files")
while child.exit_code() is None:
    child.process.join(1)
"""


def main() -> None:
    """The child's part."""
    print(resource.getrlimit(resource.RLIMIT_NOFILE))


@pytest.mark.full
def test_a_process_may_open_as_many_files_as_its_host_allows(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "log")], cwd=PACKAGE.parent, check=True, timeout=120)
    assert (tmp_path / "log").read_text() == "(1024, 1024)\n"


def test_the_count_of_open_files_is_that_of_the_busiest_process() -> None:
    assert needed(all_roles(1, 490), 1, 490) == SPARE + 4 * 490 + 1
    assert needed(all_roles(1, 1), 1, 1) == SPARE + 3 * 3 + 1  # the supervisor
    assert needed(parse_roles("server:0"), 2, 490) == SPARE + 4 * 490 + 2
    assert needed(parse_roles("worker:0-9"), 2, 490) == SPARE + 3 * 10 + 2


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not tell")
def test_a_server_has_no_more_open_files_than_are_counted(tmp_path: Path) -> None:
    served = Served(tmp_path, 1, local_addresses(f"files-{os.getpid()}", 1))
    server = psutil.Process(served.processes[0].pid)
    before = server.num_fds()
    workers = [served.worker(index) for index in range(FACTS.num_workers)]
    for worker in workers:
        worker.step()
    until(lambda: server.num_fds() == before + FILES_PER_WORKER * len(workers), "the heartbeats are there too")
    assert before < SPARE
    for worker in workers:
        worker.client.close()
    served.end()


def test_a_run_that_cannot_fit_is_refused_in_a_line_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shards = write_shards(tmp_path / "shards", [rows_of(3, index, 10 * index) for index in range(60)], EVAL_ROWS)
    inside = ("sh", "-c", 'ulimit -n 200 && exec "$@"', "sh")
    run = Training(shards, tmp_path / "run", "--steps", 1, "--model", "logistic", inside=inside)
    assert run.wait() == 2, run.said()
    assert run.said().count("\n") == 1
    assert "60 workers need 305 open files in one process, and this host allows 200" in run.said()
    assert not run.output.exists()


def test_a_run_has_the_limit_of_its_host_and_not_the_shells(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    shards = write_shards(tmp_path / "shards", [rows_of(30, 2), rows_of(50, 3, 100)], EVAL_ROWS)
    inside = ("sh", "-c", 'ulimit -Sn 60 && exec "$@"', "sh")
    flags = (*SLOW, "--batch-size", 8, "--threads", 1, "--steps", 100_000, "--no-report")
    run = Training(shards, tmp_path / "run", *flags, inside=inside)
    try:
        pid = until(lambda: run.pid("server-0"), "the server runs")
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        for process in (run.process.pid, pid):
            assert psutil.Process(process).rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)
    finally:
        run.end()
