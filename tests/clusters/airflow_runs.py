"""Runs the DAG of a file in Airflow's own interpreter, and prints a line of JSON for each run. No module of this project.

Arguments: the file, and for each run the day that its interval begins with, or ``none``; ``broken`` runs the DAG of a
broken parameter file in place of the shipped one's. Scheduler and tasks are this one
process (``dag.test``): a signal to it is one to the task that runs, and its end is that of the scheduler.
"""

import json
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.dag_processing.dagbag import DagBag
from airflow.models.asset import AssetEvent
from airflow.utils.session import create_session
from sqlalchemy import select

START = "RUN "  # of the lines


def main(file: str, days: list[str]) -> None:
    bag = DagBag(file)
    assert not bag.import_errors, bag.import_errors
    for day in days:
        dag = bag.dags["sharding_b.broken" if day == "broken" else "sharding"]
        run = dag.test(logical_date=None if day in ("none", "broken") else end_of(day))
        print(START + json.dumps(described(run)), flush=True)


def end_of(day: str) -> datetime:
    """The logical date of a manual run for the day: such a run's interval is the last one that has ended by then."""
    return datetime.fromisoformat(day).replace(tzinfo=UTC) + timedelta(days=1)


def described(run: Any) -> dict[str, Any]:
    """A run's state, and how each of its tasks ended and at which try; the assets that it published."""
    with create_session() as session:
        tasks = {task.task_id: (task.state, task.try_number) for task in run.get_task_instances(session=session)}
        events = session.scalars(select(AssetEvent).where(AssetEvent.source_run_id == run.run_id)).all()
        assets = [(event.asset.uri, event.extra) for event in events]
    start = run.data_interval_start
    interval = start.date().isoformat() if start else None
    return {"run_id": run.run_id, "interval": interval, "state": run.state, "tasks": tasks, "assets": assets}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
