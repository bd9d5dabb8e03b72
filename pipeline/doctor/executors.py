"""Questions that every executor of a running Spark answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import partial
from threading import Event, Timer
from typing import Any, TypeVar

from pyspark import SparkContext

from pipeline.core.storage.store import Store
from pipeline.doctor.clocks import Reading
from pipeline.doctor.facts import ProcessFacts, facts_of_executor
from pipeline.doctor.places import Reach, reach_from_task
from pipeline.spark.jvm import scala_context
from pipeline.spark.progress import GROUP

ROUNDS = 5  # the most rounds of tasks; a round may miss an executor whose Python starts slowly
LEAST_ROUNDS = 2  # from the second round on, Python runs everywhere and clocks are read precisely
T = TypeVar("T")


def count_executors(context: SparkContext) -> int:
    """Return the current number of executors, including the executor of a local master."""
    return max(1, int(scala_context(context).getExecutorMemoryStatus().size()) - 1)


def run_on_cores(context: SparkContext, question: Callable[[int], T], wait_s: float) -> list[T]:
    """Run a function once on each core.

    Raises TimeoutError, and cancels the tasks, if it takes longer than ``wait_s``."""
    tasks = max(1, context.defaultParallelism)
    group = f"doctor-{uuid.uuid4().hex[:8]}"
    properties: Any = context  # its stubs do not allow None, which removes a property
    before = properties.getLocalProperty(GROUP)
    late = Event()

    def cancel() -> None:
        late.set()
        context.cancelJobGroup(group)

    timer = Timer(wait_s, cancel)
    timer.daemon = True
    timer.start()
    try:
        context.setLocalProperty(GROUP, group)  # a group of its own, so that other jobs are not cancelled
        return context.parallelize(range(tasks), tasks).map(question).collect()
    except Exception as error:
        if late.is_set():
            raise TimeoutError(f"no answer in {wait_s:g} s") from error
        raise
    finally:
        timer.cancel()
        properties.setLocalProperty(GROUP, before)


def facts_of_executors(context: SparkContext, wait_s: float) -> tuple[list[ProcessFacts], list[Reading]]:
    """Return the facts of every executor that answers within a few rounds, and a reading of each one's clock."""
    facts: dict[str, ProcessFacts] = {}
    readings = []
    for number in range(1, ROUNDS + 1):
        before = time.time()
        answers = run_on_cores(context, facts_of_executor, wait_s)
        after = time.time()
        facts |= {each.key: each for each in answers}
        readings += [Reading(each.where, before, each.clock_s, after) for each in answers]
        if number >= LEAST_ROUNDS and len(facts) >= count_executors(context):
            break
    return list(facts.values()), readings


def reach_of_executors(
    context: SparkContext, store: Store, source: str | None, folder: str | None, wait_s: float
) -> list[Reach]:
    """Return the paths that the executor of every core can read and write; see ``reach_from_task``."""
    return run_on_cores(context, partial(reach_from_task, store, source, folder), wait_s)
