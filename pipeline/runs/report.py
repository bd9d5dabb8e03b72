"""The report beside a committed set."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from pyspark import SparkContext

from pipeline.core.errors import JobError
from pipeline.core.shardset.manifest import ShardSet, read_committed
from pipeline.core.storage.retries import with_retries
from pipeline.quality.metrics import Quality

logger = logging.getLogger(__name__)

REPORT = "report.html"
REPORT_MODULE = "pipeline.quality.report"  # it imports matplotlib, which loads in a second


def load_modules(names: Iterable[str]) -> None:
    """Import modules that take long to load. Errors are ignored here, because those who need a module report them."""
    for name in names:
        with suppress(Exception):
            import_module(name)


def try_report(context: SparkContext, shards: ShardSet) -> Quality | None:
    """Write the report of a committed set, or return None. A failure is only a warning, because the commit stands."""
    try:
        return report(context, shards)
    except Exception as error:
        line = " ".join(str(error).split())[:300]
        logger.warning(f"warning: the shards are committed, but their report failed: {line}")
        return None


def report(context: SparkContext, shards: ShardSet) -> Quality:
    """Measure a committed set and write report.html and quality.json beside its manifest."""
    from pipeline.quality.report import write_report  # matplotlib: see REPORT_MODULE

    return write_report(shards, partial(replace_below, shards), partial(run_in_few, context))


def replace_below(shards: ShardSet, path: str, data: bytes) -> None:
    """Write a file beside a set's manifest atomically, replacing an older one.

    Another run that cleans up may delete the draft, because it does not know its owner. The file is then written again.
    Raises JobError if another set is committed by now, and leaves no file of this one."""
    store = shards.store
    target = f"{shards.uri}/{path}"
    while True:
        # Before the rename, because the file there may be of the other set, which was measured faster.
        _refuse_unless_committed(shards)
        fresh = f"{shards.uri}/_{path}-{uuid.uuid4().hex[:8]}"
        store.write_new(fresh, data)
        try:
            store.rename(fresh, target, overwrite=True)
        except FileNotFoundError:
            continue
        try:
            _refuse_unless_committed(shards)  # also a set that was committed since the check above
        except JobError:
            if store.exists(target) and store.read(target) == data:  # not the other set's, which may be there by now
                store.delete(target)
            raise
        return


def _refuse_unless_committed(shards: ShardSet) -> None:
    """Raise JobError if a set is no longer the committed one of its folder."""
    committed = with_retries(read_committed)(shards.store, shards.uri)
    if committed is not None and committed.manifest == shards.manifest:
        return
    if shards.manifest.stream is not None:
        raise JobError(
            f"a stream appended to {shards.uri} while it was measured; stop it, and run sharding report again"
        )
    raise JobError(
        f"{shards.uri} holds another set, or none, since it was measured; if it has no report, run sharding report"
        f" {shards.uri}"
    )


def run_in_few(context: SparkContext, fn: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Run a function over many small items, in as many tasks as there are cores."""
    slices = max(1, min(len(items), context.defaultParallelism))
    return context.parallelize(items, slices).map(fn).collect()
