"""Checks before a job reads its first row: its output is writable, and executors reach its paths."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pyspark import SparkContext

from pipeline.core.errors import UsageError
from pipeline.core.shardset.attempt import try_claim
from pipeline.core.storage.hadoop_conf import is_kerberos
from pipeline.core.storage.hdfs import KEYTAB
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import is_hdfs, is_remote
from pipeline.doctor.facts import check_access
from pipeline.doctor.places import invisible_path_error, output_error
from pipeline.doctor.security import no_tokens
from pipeline.input.files import fixed_part


def check_inputs(context: SparkContext, store: Store, inputs: Mapping[str, str]) -> None:
    """Raise UsageError if executors do not see a local path, or have no tokens for HDFS.

    Costs nothing on a local master. On others, it costs one short Spark job if a path is local or HDFS requires
    Kerberos. inputs: resolved paths by flag."""
    _check(context, store, {flag: (path, fixed_part(path)) for flag, path in inputs.items()})


def check_output(context: SparkContext, store: Store, output: str) -> None:
    """Raise UsageError or JobError if an output cannot be written, or executors do not see files written there.

    Writes a file there and deletes it: about 5 ms on a local disk, a dozen requests elsewhere. output: resolved."""
    try:
        with try_claim(store, output) as attempt:
            _check(context, store, {"--output": (output, f"{attempt.folder}/beat")})
    except OSError as error:
        raise output_error(output, error) or error from None


def _check(context: SparkContext, store: Store, paths: Mapping[str, tuple[str, str]]) -> None:
    """Check the paths in a task per core. paths: for each flag the path to name and the path to look for."""
    if str(context.master).startswith("local"):
        return
    # Executors on other hosts may lack a local path of the driver, or a ticket for HDFS.
    local = {flag: both for flag, both in paths.items() if not is_remote(both[0])}
    kerberos = is_kerberos(dict(store.conf)) and any(is_hdfs(path) for path, _ in paths.values())
    if not local and not kerberos:
        return
    # A task per core reaches every executor, whose machines differ in mounts, keytabs and tickets.
    tasks = context.defaultParallelism
    keytab = dict(store.conf).get(KEYTAB, "")
    look = partial(check_access, tuple(local_path for _, local_path in local.values()), kerberos, keytab)
    views = context.parallelize(range(tasks), tasks).map(look).collect()
    lines = [invisible_path_error(flag, path, at, views) for at, (flag, (path, _)) in enumerate(local.items())]
    if line := next(filter(None, [*lines, no_tokens(views) if kerberos else ""]), ""):
        raise UsageError(line)
