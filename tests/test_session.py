"""How a job's Spark starts: whose settings hold, and with which class archive."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pipeline.spark.session import PACKAGE, PYTHON_WORKERS, spark_defaults
from tests.clusters import spark_submit

PROGRAM = """
import json, sys
from pipeline.spark.session import spark_context
with spark_context() as context:
    runtime = context._jvm.java.lang.Runtime.getRuntime()
    print(json.dumps(dict(context.getConf().getAll()) | {"heap": runtime.maxMemory()}))
"""


def test_the_defaults_hold_where_neither_spark_submit_nor_a_configuration_of_ones_own_says_otherwise(
    tmp_path: Path,
) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.sql.ansi.enabled false\nspark.driver.memory 600m\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    told = {"spark.sql.shuffle.partitions": "7"}
    env = {"SPARK_CONF_DIR": str(tmp_path), "SPARK_DRIVER_MEMORY": "3g", "PYTHONPATH": str(PACKAGE.parent)}
    done = spark_submit(tmp_path / "program.py", master="local[1]", conf=told, env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["spark.sql.shuffle.partitions"] == "7"
    assert found["spark.sql.ansi.enabled"] == "false"
    assert found["spark.driver.memory"] == "600m"
    assert found["heap"] < 700 << 20
    theirs = {"spark.sql.shuffle.partitions", "spark.sql.ansi.enabled", "spark.driver.memory"}
    ours = {key: value for key, value in spark_defaults().items() if key not in theirs}
    assert ours.items() <= found.items()
    assert len(ours) > 5
    assert found["spark.python.daemon.module"] == PYTHON_WORKERS


def test_spark_submit_maps_its_classes_from_the_archive_that_set_up_recorded(tmp_path: Path) -> None:
    options = os.environ.get("SPARK_SUBMIT_OPTS", "")
    if "-XX:SharedArchiveFile=" not in options:
        pytest.skip("run through `make test`: .venv/env.sh names the archive, where this Java could write one")
    env = {**os.environ, "SPARK_SUBMIT_OPTS": f"{options} -Xlog:class+load:file={tmp_path}/classes"}
    subprocess.run(["spark-submit", "--version"], env=env, capture_output=True, check=True)
    loaded = (tmp_path / "classes").read_text().splitlines()
    mapped = [line for line in loaded if "shared objects file (top)" in line]
    assert len(mapped) > len(loaded) / 2
