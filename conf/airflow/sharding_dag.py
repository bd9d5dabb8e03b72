"""Shards each day's images, holds the shards to a limit, trains on them and publishes their manifest as an asset.

Copy this file into a DAG folder and edit its parameters; ``conf/airflow/README.md`` says what it needs and what it does on
which failure. All places are named after the first day of the run's data interval. So a rerun finds what an earlier one has
done, whatever the run's id.
"""

from __future__ import annotations

import json
import re
import subprocess
from datetime import UTC, datetime, timedelta

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk import (
    Asset,
    AssetAlias,
    CronDataIntervalTimetable,
    RetryDecision,
    RetryPolicy,
    dag,
    task,
)
from airflow.sdk.exceptions import AirflowFailException
from jinja2 import UndefinedError

DAY = "{{ data_interval_start | ds }}"
# Places are s3://, hdfs:// or a folder that all machines mount.
RAW = f"s3://lake/raw/{DAY}"  # labelled images; the file _SUCCESS beside them says that they are complete
SHARDS = f"s3://lake/shards/{DAY}"
RUN = f"s3://lake/runs/{DAY}"
PROJECT = "/opt/sharding"  # a checkout of this project with its environment: conf/setup.sh trainer
CONNECTION = "spark_default"  # its host is the master: local[4], yarn, spark://HOST:7077
WORKERS = 12
JOB = "jobs/stratified.py"
# Flags of the job, beside those of places, workers and interval. RAW holds test files too; else this is empty.
FLAGS = ["--eval-input", RAW]
TRAIN = "--hosts 1 --model cnn --protocol asp --epochs 5 --batch-size 120"  # flags of jobs/train.py
LIMIT = 4.0  # how far above a random split's the shards' distance from the whole set may lie, in standard deviations
SCHEDULE = CronDataIntervalTimetable("@daily", timezone="UTC")
POLL = timedelta(minutes=1)  # between two looks for raw data
PATIENCE = timedelta(hours=12)  # with raw data that do not come
RETRIES = 2
RETRY_DELAY = timedelta(minutes=5)

ALIAS = AssetAlias("sharding_manifest")
MANIFEST, QUALITY = f"{SHARDS}/manifest.json", f"{SHARDS}/quality.json"
HOPELESS = {"2": "the command asks for something that cannot be done", "3": "the input is broken"}


class UnlessHopeless(RetryPolicy):
    """No retry where it would end the same way. The operators tell a program's exit code in their message alone."""

    def evaluate(self, exception, try_number, max_tries, context=None):
        code = re.search(r"(?:Error code is:|exit code) (\d+)", str(exception))
        if code and code[1] in HOPELESS:
            return RetryDecision.fail(f"exit code {code[1]}: {HOPELESS[code[1]]}")
        if isinstance(exception, UndefinedError):
            return RetryDecision.fail("the run has no data interval: give it a logical date, or use airflow backfill")
        return RetryDecision.default()


def in_project(expression, uri):
    """The value of an expression over ``store`` and ``uri`` in the project's environment, whose store has HDFS and S3."""
    program = (
        "import json, sys\n"
        "from pipeline.core.storage.store import configured_store\n"
        "store = configured_store()\n"
        "uri = store.resolve(sys.argv[1])\n"
        f"print(json.dumps({expression}))"
    )
    command = [f"{PROJECT}/.venv/bin/python", "-c", program, uri]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.splitlines() or [f"{uri}: exit code {done.returncode}"])[-1])
    return json.loads(done.stdout)


def read_json(uri):
    return json.loads(in_project("store.read(uri).decode()", uri))


def submit(task_id, application, arguments, **others):
    """A job on Spark in client mode: a task that is killed kills spark-submit, the driver, and with it the application."""
    return SparkSubmitOperator(
        task_id=task_id,
        conn_id=CONNECTION,
        deploy_mode="client",
        spark_binary=f"{PROJECT}/conf/airflow/spark-submit",
        name=f"{task_id} {DAY}",
        application=f"{PROJECT}/{application}",
        application_args=arguments,
        **others,
    )


def require_report(context, result=None):
    """A try that committed a set and could not report on it has failed: the next one finds the set, and reports."""
    quality = context["task"].render_template(QUALITY, context)
    if not in_project("store.exists(uri)", quality):
        raise FileNotFoundError(f"{quality} is missing: the shards are committed without their report")


@dag(
    schedule=SCHEDULE,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": RETRIES, "retry_delay": RETRY_DELAY, "retry_policy": UnlessHopeless()},
    doc_md=__doc__,
)
def sharding():
    @task.sensor(mode="reschedule", poke_interval=POLL, timeout=PATIENCE)
    def wait(marker):
        return in_project("store.exists(uri)", marker)

    places = ["--input", RAW, "--output", SHARDS]
    shard = submit("shard", JOB, [*places, "--workers", str(WORKERS), "--ds", DAY, *FLAGS], post_execute=require_report)

    @task
    def check(quality):
        found = read_json(quality)
        ratio, deviation = found["mmd_ratio"], found["mmd_ratio_sd"]  # None where nothing was divided
        if deviation and ratio > 1 + LIMIT * deviation:
            words = " ".join(finding["text"] for finding in found.get("verdict", []))
            raise AirflowFailException(f"more than {LIMIT} standard deviations above a random split: {words}")

    # The next try of a killed task resumes from the last checkpoint.
    train = submit(
        "train", "jobs/train.py", ["--shards", SHARDS, "--output", RUN, "--resume", "--quiet", *TRAIN.split()]
    )

    @task(outlets=[ALIAS])
    def publish(manifest, *, outlet_events):
        found = read_json(manifest)
        about = {"rows": found["rows"], "workers": found["num_workers"], "version": found["version"]}
        outlet_events[ALIAS].add(Asset(manifest), extra=about)

    wait(f"{RAW}/_SUCCESS") >> shard >> check(QUALITY) >> train >> publish(MANIFEST)


sharding()
