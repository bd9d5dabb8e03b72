"""Shards each day's images, holds the shards to a limit, trains on them and publishes their manifest as an asset.

Copy this file and ``sharding.toml``, which has the parameters, into a DAG folder; ``conf/airflow/README.md`` says what it
needs and what it does on which failure. All places are named after the first day of the run's data interval. So a rerun
finds what an earlier one has done, whatever the run's id, and runs of several days do not meet.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path

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
ALIAS = AssetAlias("sharding_manifest")
TEMPLATE = re.compile(r"{{.*?}}|{%.*?%}")
# The schedules that start at most once a day: presets, and cron expressions with one minute and one hour.
DAILY = re.compile(r"@(daily|weekly|monthly|quarterly|yearly)|\d+ +\d+( +\S+){3}")
HOPELESS = {"2": "the command asks for something that cannot be done", "3": "the input is broken"}


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The parameters of one DAG, as sharding.toml explains them."""

    raw: str
    shards: str
    run: str
    project: str
    connection: str = "spark_default"
    job: str = "jobs/stratified.py"
    workers: int
    flags: list[str] | str = field(default_factory=list)
    train: list[str] | str = ""
    limit: float = 4.0
    schedule: str = "@daily"
    start_date: date
    max_active_runs: int = 1
    poll_s: float = 60.0
    patience_h: float = 12.0
    retries: int = 2
    retry_delay_s: float = 300.0
    spark: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, file):
        """The parameters of a TOML file. Raises ValueError."""
        values = tomllib.loads(file.read_text(encoding="utf-8"))
        known = {item.name for item in fields(cls)}
        if unknown := values.keys() - known:
            raise ValueError(f"unknown key {sorted(unknown)[0]!r}; keys are {', '.join(sorted(known))}")
        try:
            parameters = cls(**values)
        except TypeError as error:
            raise ValueError(f"{str(error).partition(' missing ')[2] or error} missing") from None
        for name in ("raw", "shards", "run"):
            if "{ds}" not in values[name]:
                raise ValueError(f"{name} = {values[name]!r} has no {{ds}}, so that all days would share one place")
        if not DAILY.fullmatch(parameters.schedule):
            raise ValueError(
                f"schedule = {parameters.schedule!r} is not @daily, @weekly, @monthly, @quarterly, @yearly or a cron"
                " expression with one minute and one hour; places name the day only, so that its runs would share them"
            )
        for name in ("flags", "train"):
            parameters.words(name)
        return parameters

    def place(self, name):
        return with_day(getattr(self, name))

    def words(self, name):
        """The flags of a parameter: a list, or a line that is split as by a shell, but not within a template."""
        value = getattr(self, name)
        if isinstance(value, str):
            templates = iter(TEMPLATE.findall(value))
            try:
                split = shlex.split(TEMPLATE.sub("\0", value))
            except ValueError as error:
                raise ValueError(f"{name} = {value!r}: {error}") from None
            value = [re.sub("\0", lambda _: next(templates), word) for word in split]
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ValueError(f"{name} = {value!r} is neither a line of flags nor a list of strings")
        return [with_day(word) for word in value]


def with_day(text):
    """Put the run's day in the place of {ds}. A template {{ds}} stays as it is."""
    return re.sub(r"(?<!\{)\{ds\}(?!\})", lambda _: DAY, text)


class UnlessHopeless(RetryPolicy):
    """No retry where it would end the same way. The operators tell a program's exit code in their message alone."""

    def evaluate(self, exception, try_number, max_tries, context=None):
        code = re.search(r"(?:Error code is:|exit code) (\d+)", str(exception))
        if code and code[1] in HOPELESS:
            return RetryDecision.fail(f"exit code {code[1]}: {HOPELESS[code[1]]}")
        if isinstance(exception, UndefinedError):
            return RetryDecision.fail("the run has no data interval: give it a logical date, or use airflow backfill")
        return RetryDecision.default()


def in_project(project, expression, uri):
    """The value of an expression over ``store`` and ``uri`` in the project's environment, whose store has HDFS and S3."""
    program = (
        "import json, sys\n"
        "from pipeline.core.storage.store import configured_store\n"
        "store = configured_store()\n"
        "uri = store.resolve(sys.argv[1])\n"
        f"print(json.dumps({expression}))"
    )
    command = [f"{project}/.venv/bin/python", "-c", program, uri]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.splitlines() or [f"{uri}: exit code {done.returncode}"])[-1])
    return json.loads(done.stdout)


def read_json(project, uri):
    return json.loads(in_project(project, "store.read(uri).decode()", uri))


def submit(parameters, task_id, application, arguments, **others):
    """A job on Spark in client mode: a task that is killed kills spark-submit, the driver, and with it the application."""
    return SparkSubmitOperator(
        task_id=task_id,
        conn_id=parameters.connection,
        conf=parameters.spark,
        deploy_mode="client",
        spark_binary=f"{parameters.project}/conf/airflow/spark-submit",
        name=f"{task_id} {DAY}",
        application=f"{parameters.project}/{application}",
        application_args=arguments,
        **others,
    )


def identity(manifest):
    """Return the identity of a set, by which runs that an asset event triggers can check what they read."""
    source = manifest["input"]
    return {
        "rows": manifest["rows"],
        "workers": manifest["num_workers"],
        "version": manifest["version"],
        "generation": manifest["generation"],
        "fingerprint": source["fingerprint"],
        "strategy": manifest["strategy"],
        "ds": (manifest.get("interval") or {}).get("ds"),
    }


def make_dag(name, parameters):
    """The DAG of one file of parameters."""
    project = parameters.project
    raw, shards, run = (parameters.place(place) for place in ("raw", "shards", "run"))

    def require_report(context, result=None):
        """A try that committed a set and could not report on it has failed: the next one finds the set, and reports."""
        quality = context["task"].render_template(f"{shards}/quality.json", context)
        if not in_project(project, "store.exists(uri)", quality):
            raise FileNotFoundError(f"{quality} is missing: the shards are committed without their report")

    @dag(
        dag_id=name,
        schedule=CronDataIntervalTimetable(parameters.schedule, timezone="UTC"),
        start_date=datetime.combine(parameters.start_date, time(), UTC),
        catchup=False,
        max_active_runs=parameters.max_active_runs,
        default_args={
            "retries": parameters.retries,
            "retry_delay": timedelta(seconds=parameters.retry_delay_s),
            "retry_policy": UnlessHopeless(),
        },
        doc_md=__doc__,
    )
    def sharding():
        poll, patience = timedelta(seconds=parameters.poll_s), timedelta(hours=parameters.patience_h)

        @task.sensor(mode="reschedule", poke_interval=poll, timeout=patience)
        def wait(marker):
            return in_project(project, "store.exists(uri)", marker)

        places = ["--input", raw, "--output", shards, "--workers", str(parameters.workers), "--ds", DAY]
        shard = submit(
            parameters, "shard", parameters.job, [*places, *parameters.words("flags")], post_execute=require_report
        )

        @task
        def check(quality):
            found = read_json(project, quality)
            ratio, deviation = found["mmd_ratio"], found["mmd_ratio_sd"]  # None where nothing was divided
            if deviation and ratio > 1 + parameters.limit * deviation:
                words = " ".join(finding["text"] for finding in found.get("verdict", []))
                raise AirflowFailException(
                    f"more than {parameters.limit} standard deviations above a random split: {words}"
                )

        # The next try of a killed task resumes from the last checkpoint.
        places = ["--shards", shards, "--output", run, "--resume", "--quiet"]
        train = submit(parameters, "train", "jobs/train.py", [*places, *parameters.words("train")])

        @task(outlets=[ALIAS])
        def publish(manifest, *, outlet_events):
            outlet_events[ALIAS].add(Asset(manifest), extra=identity(read_json(project, manifest)))

        (
            wait(f"{raw}/_SUCCESS")
            >> shard
            >> check(f"{shards}/quality.json")
            >> train
            >> publish(f"{shards}/manifest.json")
        )

    return sharding()


def broken_dag(name, problem):
    """The DAG of a file that is no set of parameters: its name in Airflow's list and its runs, which fail, have the line.

    An error of this module would say the same, but would take the DAGs of all other files away. It has an id of its own,
    because the DAG of the repaired file goes on after the last run under its id."""

    @dag(
        dag_id=re.sub(r"[^\w.-]", "_", f"{name}.broken"),
        is_paused_upon_creation=False,
        dag_display_name=f"{name} (broken: {problem})"[:2000],
        schedule="@daily",
        start_date=datetime(2020, 1, 1, tzinfo=UTC),
        catchup=False,
        default_args={"retries": 0},
        doc_md=problem,
    )
    def broken():
        @task
        def read_parameters():
            raise AirflowFailException(problem)

        read_parameters()

    return broken()


for file in sorted(Path(__file__).parent.glob("sharding*.toml")):
    try:
        globals()[file.stem] = make_dag(file.stem, Parameters.read(file))
    except Exception as error:
        globals()[f"{file.stem}.broken"] = broken_dag(file.stem, f"{file.name}: {error}")
