"""The decisions of the doctor, and what jobs check beforehand: facts in, lines out."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from pipeline.core.errors import DataError, JobError, UsageError
from pipeline.core.shardset.attempt import make_task_folder, try_claim
from pipeline.core.shardset.schema import broken_is_data_error
from pipeline.core.storage.hadoop_conf import is_kerberos
from pipeline.doctor.checks import (
    FAILED,
    OK,
    WARNING,
    Check,
    as_json,
    format_checks,
    group_by_value,
    has_failed,
    shorten_names,
)
from pipeline.doctor.clocks import Reading, check_clocks, closest
from pipeline.doctor.command import seconds
from pipeline.doctor.examine import failed_check
from pipeline.doctor.facts import (
    ExecutorAccess,
    Folder,
    ProcessFacts,
    check_access,
    facts_of_process,
    folder_facts,
    has_ticket,
)
from pipeline.doctor.machine import check_folders, check_open_files, check_umask
from pipeline.doctor.places import Reach, check_input, check_reach, invisible_path_error, output_error, reach_from_task
from pipeline.doctor.security import check_kerberos, no_tokens
from pipeline.doctor.versions import check_extras, check_packages, check_versions, major_version
from pipeline.input.formats.tables.arrow import ArrowImages
from pipeline.input.formats.tables.parquet import ParquetImages
from pipeline.runs.program import cause
from pipeline.spark.failures import cluster_failure
from pipeline.spark.session import check_master
from tests.support.places import STORE, files_below

PACKAGES = {"pyspark": "4.0.1", "numpy": "2.3.5", "pillow": "12.0.0", "xxhash": "3.6.0"}
ROOM = Folder("TMPDIR", "/tmp", 100 << 30, True)
DENIED = 'Permission denied: user=alice, access=WRITE, inode="/":root:supergroup:drwxr-xr-x'


def machine(where: str = "driver", **changes: Any) -> ProcessFacts:
    made = ProcessFacts(where, where, "3.11.7", "17.0.9", PACKAGES, 4096, 0o022, (ROOM,), False, False, 0.0)
    return made._replace(**changes)


def levels(checks: list[Check]) -> Mapping[str, str]:
    return {check.name: check.level for check in checks}


# --- what is shown ------------------------------------------------------------------------------------------------------


def test_the_screen_has_a_line_per_check_and_a_count() -> None:
    checks = [
        Check("a", OK, "fine"),
        Check("bb", WARNING, "two\nlines", "do this"),
        Check("c", FAILED, "bad", "do that"),
    ]
    assert format_checks(checks).splitlines() == [
        "ok       a   fine",
        "warning  bb  two lines; do this",
        "FAILED   c   bad; do that",
        "3 checks: 1 failed, 1 with a warning",
    ]
    assert has_failed(checks)
    assert not has_failed(checks[:2])
    found = json.loads(as_json(checks))
    assert found["failed"] is True
    assert found["checks"][1] == {"name": "bb", "level": "warning", "text": "two\nlines", "advice": "do this"}


def test_values_are_named_once_with_their_owners() -> None:
    assert group_by_value([("driver", "17"), ("a", "17")]) == "17"
    assert group_by_value([("driver", "17"), ("a", "21"), ("b", "21"), ("b", "21")]) == "17 (driver), 21 (a, b)"
    assert shorten_names([f"h{number}" for number in range(9)]) == "h0, h1, h2, h3, 5 more"


# --- versions -----------------------------------------------------------------------------------------------------------


def test_equal_versions_are_ok() -> None:
    checks = check_versions([machine(), machine("a")])
    assert levels(checks) == {"python": OK, "java": OK, "spark": OK, "packages": OK}
    assert checks[-1].text == "numpy 2.3.5, pillow 12.0.0"


def test_another_minor_python_fails_and_another_patch_does_not() -> None:
    assert levels(check_versions([machine(), machine("a", python="3.11.2")]))["python"] == OK
    checks = check_versions([machine(), machine("a", python="3.12.7")])
    assert levels(checks)["python"] == FAILED
    assert checks[0].text == "3.11.7 (driver), 3.12.7 (a)"


@pytest.mark.parametrize(
    ("driver", "executor", "level"), [("", "", FAILED), ("17", "", OK), ("21.0.1", "11.0.2", FAILED)]
)
def test_java_is_judged_where_it_is_known(driver: str, executor: str, level: str) -> None:
    assert levels(check_versions([machine(java=driver), machine("a", java=executor)]))["java"] == level


def test_major_versions_of_java() -> None:
    assert [major_version(text) for text in ("1.8.0_392", "17.0.9", "25", "26-ea", "odd")] == [8, 17, 25, 26, 0]


def test_another_pillow_is_a_warning_that_names_who_has_it() -> None:
    (check,) = check_packages([machine(), machine("a"), machine("b", packages=PACKAGES | {"pillow": "11.3.0"})])
    assert (check.name, check.level) == ("pillow", WARNING)
    assert check.text == "12.0.0 (driver, a), 11.3.0 (b): these versions may decode images to different pixels"
    assert "--archives" in check.advice


def test_a_package_that_decides_nothing_may_differ() -> None:
    assert levels(check_packages([machine(), machine("a", packages=PACKAGES | {"xxhash": "3.5.0"})])) == {
        "packages": OK
    }


def test_a_missing_package_fails() -> None:
    (check,) = check_packages([machine(), machine("a", packages=PACKAGES | {"numpy": ""})])
    assert (check.name, check.level, check.text) == ("numpy", FAILED, "missing on a")
    assert "PYSPARK_PYTHON" in check.advice


def test_another_spark_fails() -> None:
    checks = check_versions([machine(), machine("a", packages=PACKAGES | {"pyspark": "3.5.1"})])
    assert levels(checks)["spark"] == FAILED


def test_missing_extras_are_a_warning() -> None:
    assert check_extras({}).level == OK
    check = check_extras({"benchmark": ["psutil"]})
    assert (check.level, check.text) == (WARNING, "benchmark lacks psutil")
    assert "'.[benchmark]'" in check.advice


# --- machines -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "level"), [(-1, OK), (1024, OK), (1000, WARNING), (256, FAILED)])
def test_limits_of_open_files(limit: int, level: str) -> None:
    check = check_open_files([machine(), machine("a", open_files=limit)])
    assert check.level == level
    assert ("on a" in check.advice) == (level != OK)


def test_folders_without_room_or_right_fail() -> None:
    full = ROOM._replace(path="/full", free=1 << 20)
    narrow = ROOM._replace(path="/narrow", free=1 << 30)
    closed = ROOM._replace(setting="spark.local.dir", path="/closed", writable=False)
    checks = check_folders([machine(), machine("a", folders=(full, narrow, closed))])
    assert [check.level for check in checks] == [FAILED, WARNING, FAILED]
    assert [check.text.split()[0] for check in checks] == ["/full", "/narrow", "/closed"]
    assert "spark.local.dir" in checks[2].advice
    assert check_folders([machine()])[0].level == OK


def test_a_umask_that_shuts_others_out_is_a_warning() -> None:
    assert check_umask([machine()], None).level == OK
    assert check_umask([machine(umask=0o077)], None).level == WARNING
    assert check_umask([machine(umask=0o077)], 0o022).level == OK
    assert "fs.permissions.umask-mode" in check_umask([machine()], 0o027).advice


@pytest.mark.parametrize(
    ("clock", "level"), [(101.0, OK), (150.0, OK), (40.0, OK), (200.0, WARNING), (10.0, WARNING), (900.0, FAILED)]
)
def test_clocks_are_compared_as_far_as_asking_takes(clock: float, level: str) -> None:
    """The driver's clock shows 100 s before the answer and 110 s after it."""
    assert check_clocks([Reading("a", 100.0, clock, 110.0)]).level == level


def test_the_quickest_reading_of_a_clock_counts() -> None:
    slow, quick = Reading("a", 0.0, 50.0, 90.0), Reading("a", 100.0, 150.0, 101.0)
    assert closest([quick, slow, Reading("b", 0.0, 0.0, 1.0)]) == [quick, Reading("b", 0.0, 0.0, 1.0)]
    assert quick.ahead_s == 49.0


# --- Kerberos -----------------------------------------------------------------------------------------------------------


def test_without_kerberos_no_ticket_is_needed() -> None:
    assert not is_kerberos({})
    assert is_kerberos({"hadoop.security.authentication": "Kerberos "})
    assert check_kerberos(False, True, [machine()]).level == OK


def test_kerberos_needs_a_ticket_or_tokens_on_every_machine() -> None:
    mine = machine(has_ticket=True)
    assert check_kerberos(True, True, [mine, machine("a", has_tokens=True)]).level == OK
    check = check_kerberos(True, True, [mine, machine("a")])
    assert check.level == FAILED
    assert "HADOOP_TOKEN_FILE_LOCATION" in check.advice
    assert check_kerberos(True, False, [mine, machine("a")]).level == WARNING
    assert check_kerberos(True, True, [machine()]).advice == "run kinit first"


def test_executors_without_tokens_are_one_line() -> None:
    assert no_tokens([ExecutorAccess("a", (), True)]) == ""
    line = no_tokens([ExecutorAccess("a", (), True), ExecutorAccess("b", (), False)])
    assert "b of the cluster" in line
    assert "YARN" in line


def test_a_ticket_cache_counts_where_no_klist_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program: None)
    monkeypatch.setenv("KRB5CCNAME", f"FILE:{tmp_path}/cache")
    assert not has_ticket()
    (tmp_path / "cache").touch()
    assert has_ticket()
    monkeypatch.setenv("KRB5CCNAME", "KEYRING:persistent:1")
    assert has_ticket()


# --- places -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "part"),
    [
        (PermissionError(f"hdfs://h/o/_attempts/0123: {DENIED}"), UsageError, f"may not be written: {DENIED}; choose"),
        (OSError(errno.EROFS, "Read-only file system", "hdfs://h/o"), UsageError, "may not be written: Read-only file"),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), UsageError, "cannot be a folder: Not a directory"),
        (OSError(errno.ENOSPC, "No space left on device"), JobError, "hdfs://h/o: No space left on device; make room"),
        (OSError(errno.EDQUOT, "hdfs://h/o: quota"), JobError, "hdfs://h/o: quota; make room"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(error: OSError, kind: type[JobError], part: str) -> None:
    made = output_error("hdfs://h/o", error)
    assert type(made) is kind
    assert part in str(made)
    assert str(made).startswith("--output hdfs://h/o")


def test_other_failures_of_an_output_stay_as_they_are() -> None:
    assert output_error("/o", TimeoutError("no answer")) is None


def test_a_local_path_that_executors_do_not_see_is_named() -> None:
    views = [ExecutorAccess("a", (True, True), True), ExecutorAccess("b", (True, False), True)]
    assert invisible_path_error("--input", "/in", 0, views) == ""
    line = invisible_path_error("--output", "/out", 1, views)
    assert line.startswith(
        "--output /out is local, and b of the cluster do not see it: use a path that all machines mount"
    )


def test_a_task_tells_what_it_sees(tmp_path: Path) -> None:
    view = check_access((str(tmp_path), f"{tmp_path}/no"), False, "", 0)
    assert view == ExecutorAccess(socket.gethostname(), (True, False), True)


def test_what_executors_cannot_reach_is_named() -> None:
    fine, bad = Reach("a", {}), Reach("b", {"--output": "the file that the driver has written does not exist"})
    assert check_reach("--output", "/o", [fine]).level == OK
    local, remote = (check_reach("--output", path, [fine, bad]) for path in ("/o", "hdfs://h/o"))
    assert local.text == "/o is local, and b cannot use it as the driver does"
    assert remote.text == "b: the file that the driver has written does not exist"
    assert {local.level, remote.level} == {FAILED}


def test_a_task_tries_both_places_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "attempt").mkdir()
    folder = str(tmp_path / "attempt")
    assert set(reach_from_task(STORE, f"{tmp_path}/no", folder, 0).problems) == {"--input", "--output"}
    (tmp_path / "attempt" / "beat").touch()
    assert reach_from_task(STORE, str(tmp_path), folder, 0).problems == {}
    assert files_below(tmp_path) == {"attempt/beat"}


def test_an_input_is_read_or_named(tmp_path: Path) -> None:
    (tmp_path / "rows.bin").write_bytes(b"rows")
    assert [check_input(STORE, str(path)).level for path in (tmp_path, tmp_path / "rows.bin", tmp_path / "no")] == [
        OK, OK, FAILED,
    ]  # fmt: skip


def test_trying_an_output_leaves_no_trace(place: str) -> None:
    """Neither of it nor of folders above it, and other runs' files stay."""
    with try_claim(STORE, f"{place}/a/b") as attempt:
        assert STORE.exists(f"{attempt.folder}/beat")
    assert not STORE.exists(place)
    STORE.makedirs(f"{place}/_attempts/0123456789ab")
    STORE.write_new(f"{place}/_attempts/0123456789ab/groups", b"of a dead run")
    with try_claim(STORE, place):
        pass
    assert files_below(place) == {"_attempts/0123456789ab/groups"}


def test_a_task_on_a_machine_without_the_output_says_so(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(JobError, match=rf"{output} does not exist on .*all machines of the cluster mount"):
        make_task_folder(STORE, f"{output}/_attempts/0123456789ab/task")
    output.mkdir()
    with pytest.raises(JobError, match="0123456789ab no longer exists: the run has ended"):
        make_task_folder(STORE, f"{output}/_attempts/0123456789ab/task")


def test_a_local_file_that_is_not_there_is_not_called_damaged() -> None:
    with (
        pytest.raises(DataError, match=r"/in/a\.parquet does not exist on .*does not mount it"),
        broken_is_data_error("/in/a.parquet"),
    ):
        open("/in/a.parquet", "rb").close()


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (OSError(errno.EMFILE, "Too many open files"), errno.EMFILE),
        (OSError(errno.ESTALE, "Stale file handle"), errno.ESTALE),
        (pa.ArrowException("Unknown error: Failed to launch worker thread: Resource unavailable"), errno.EAGAIN),
    ],
)
def test_a_file_is_not_called_damaged_by_a_machine_that_lacks_means(error: Exception, number: int) -> None:
    """The exit code of damage would end a Kubernetes job for good."""
    with pytest.raises(OSError, match=r"\[Errno") as raised, broken_is_data_error("/in/a.parquet"):
        raise error
    assert raised.value.errno == number
    store = Mock(open=Mock(side_effect=error), read_range=Mock(side_effect=error))
    for table_format in (ArrowImages(), ParquetImages()):
        with pytest.raises(OSError, match=r"\[Errno") as raised:
            table_format.open_table(store, "/in/a.parquet")
        assert raised.value.errno == number


# --- failures of a cluster ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "part"),
    [
        (
            "ModuleNotFoundError: No module named 'numpy'",
            "the executors' Python lacks numpy: .*PYSPARK_PYTHON or --archives",
        ),
        ("ModuleNotFoundError: No module named 'pipeline'", "executors lack pipeline: .*--py-files"),
        ("PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker", "another Python than the driver"),
        ('IOException: Cannot run program "python3": error=2', "executors cannot run python3: .*PYSPARK_PYTHON"),
        ("SparkException: All masters are unresponsive! Giving up.", "master does not answer: check --master"),
        ("java.io.IOException: No space left on device\n\tat java", "no space left on .*spark.local.dir"),
    ],
)
def test_failures_of_a_cluster_have_their_own_lines(report: str, part: str) -> None:
    line, code = cause(RuntimeError(f"Job aborted\n{report}\n\tat org.apache.spark"))
    assert code == 1
    assert line == cluster_failure(report)
    assert re.search(part, line)


@pytest.mark.parametrize(
    ("report", "line"),
    [
        ("ValueError: odd", "ValueError: odd"),
        ("AssertionError", "AssertionError"),
        ("OSError: [Errno 5] Input/output error: '/in/a'", "OSError: [Errno 5] Input/output error: '/in/a'"),
    ],
)
def test_an_unforeseen_error_of_a_task_is_shown(report: str, line: str) -> None:
    """Spark's report begins with the loss of the task, and repeats the error of Python."""
    error = (
        f'org.apache.spark.api.python.PythonException: Traceback (most recent call last):\n  File "a.py"\n{report}\n'
    )
    lost = f"org.apache.spark.SparkException: Job aborted due to stage failure: Lost task 0.3 (host): {error}"
    text = f"An error occurred while calling o1.collect.\n: {lost}\tat org.apache\nCaused by: {error}\n\tat org.apache"
    check = failed_check("executors", RuntimeError(text))
    assert (check.name, check.level, check.text) == ("executors", FAILED, line)
    assert line in cause(RuntimeError(text))[0]
    assert failed_check("master", RuntimeError("no\nsuch thing")).text == "RuntimeError: no such thing"


def test_other_failures_keep_their_words() -> None:
    assert cluster_failure("OSError: [Errno 28] No space left on device: '/data/x'") is None
    assert cluster_failure("ValueError: odd") is None
    assert cause(ModuleNotFoundError("No module named 'psutil'"))[0].startswith("ModuleNotFoundError: ")


def test_a_master_that_does_not_answer_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        live = f"127.0.0.1:{server.getsockname()[1]}"
        check_master(f"spark://127.0.0.1:1,{live}")
    with pytest.raises(JobError, match=rf"no Spark master answers at spark://{live}: .*refused; check --master"):
        check_master(f"spark://{live}")
    with pytest.raises(JobError, match="no Spark master answers at spark://nowhere"):
        check_master("spark://nowhere")
    for other in ("yarn", "local[2]", "k8s://https://127.0.0.1:1"):
        check_master(other)


# --- what is gathered ---------------------------------------------------------------------------------------------------


def test_a_process_reports_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{tmp_path},{tmp_path}/no")
    facts = facts_of_process("here")
    assert facts.where == "here"
    assert all(facts.packages.values())
    assert {"numpy", "pillow", "pyspark", "libjpeg"} <= set(facts.packages)
    assert [each.path for each in facts.folders[1:]] == [str(tmp_path), f"{tmp_path}/no"]
    assert [each.writable for each in facts.folders[1:]] == [True, False]
    before = os.umask(0o027)
    try:
        assert facts_of_process("here").umask == 0o027
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)


def test_a_folder_that_is_not_there_has_no_room(tmp_path: Path) -> None:
    assert folder_facts("TMPDIR", f"{tmp_path}/no") == Folder("TMPDIR", f"{tmp_path}/no", 0, False)


@pytest.mark.parametrize("text", ["0", "-1", "x", "4000", "nan"])
def test_times_to_wait_are_bounded(text: str) -> None:
    with pytest.raises(Exception, match="is not a number of seconds"):
        seconds(text)
