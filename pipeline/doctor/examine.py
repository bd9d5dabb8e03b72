"""The complete examination before a run: it collects facts of driver, executors and store, and judges them."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from pyspark import SparkContext

from pipeline.core.errors import JobError
from pipeline.core.shardset.attempt import Attempt, try_claim
from pipeline.core.storage.hadoop_conf import is_kerberos
from pipeline.core.storage.hdfs import UMASK, parse_umask
from pipeline.core.storage.objects import is_object
from pipeline.core.storage.retries import call_within
from pipeline.core.storage.store import Store, configured_store
from pipeline.core.storage.uri import is_hdfs
from pipeline.doctor.checks import FAILED, OK, Check, has_failed, shorten_names
from pipeline.doctor.clocks import Reading, check_clocks, closest
from pipeline.doctor.executors import facts_of_executors, reach_of_executors
from pipeline.doctor.facts import DRIVER, ProcessFacts, facts_of_process, java_installed
from pipeline.doctor.machine import check_folders, check_open_files, check_umask
from pipeline.doctor.places import check_input, check_reach, output_error, read_clock
from pipeline.doctor.security import check_kerberos
from pipeline.doctor.versions import check_extras, check_versions, missing_extras
from pipeline.spark.failures import cluster_failure, raised_error
from pipeline.spark.jvm import jvm_of
from pipeline.spark.session import spark_context
from pipeline.spark.store import open_store

NOT_UP = "see that it is up; --wait S waits longer"
NO_CORES = "see whether the cluster has as much free as spark.executor.memory and spark.executor.cores ask for"


@dataclass
class Examination:
    """The checks of one driver, with or without a Spark.

    Attributes:
        source: --input, or None.
        output: --output, or None.
        wait_s: the time limit of Spark's start, of a question to the executors and of a request to the store.
        checks: the results so far.
    """

    source: str | None
    output: str | None
    wait_s: float
    checks: list[Check] = field(default_factory=list)

    def examine(self, master: str | None) -> list[Check]:
        """Return all checks. master: the master of the Spark to start; None checks only the driver."""
        try:
            if master is None:
                self._judge(configured_store(), None, java_installed())
            else:
                self._judge_with_spark(master)
        except JobError as error:
            self.checks.append(Check("settings", FAILED, str(error)))
        self.checks.append(check_extras(missing_extras()))
        return self.checks

    def _judge_with_spark(self, master: str) -> None:
        """Start a Spark, add the checks with it, and stop it. A start that fails or takes too long is a failed
        check."""
        with ExitStack() as stack:
            spark = spark_context(master=master)
            # A cluster without free resources could block the start forever.
            try:
                context = call_within(self.wait_s, spark.__enter__)
            except TimeoutError:
                self.checks.append(
                    Check("master", FAILED, f"{master}: Spark did not start in {self.wait_s:g} s", NOT_UP)
                )
            except JobError as error:
                self.checks.append(Check("master", FAILED, str(error)))
            except Exception as error:
                self.checks.append(failed_check("master", error))
            else:
                stack.push(spark)
                self.checks.append(Check("master", OK, f"{context.master}, application {context.applicationId}"))
                self._judge(open_store(context), context, str(jvm_of(context).System.getProperty("java.version")))

    def _judge(self, store: Store, context: SparkContext | None, java: str) -> None:
        """Add the checks of the driver, of executors if there is a Spark, and of the paths.

        java: the driver's version."""
        facts = [facts_of_process(DRIVER, java)]
        readings = list[Reading]()
        if context is not None:
            try:
                executors, readings = facts_of_executors(context, self.wait_s)
                facts += executors
                text = f"{len(executors)} answer, on {shorten_names([each.where for each in executors])}"
                self.checks.append(Check("executors", OK, text))
            except TimeoutError:
                self.checks.append(Check("executors", FAILED, f"none has answered in {self.wait_s:g} s", NO_CORES))
                context = None  # further questions would wait in vain too
            except Exception as error:
                self.checks.append(failed_check("executors", error))
                context = None
        self.checks += [*check_versions(facts), check_open_files(facts), *check_folders(facts)]
        self._judge_settings(dict(store.conf), facts)
        readings += self._judge_places(store, context)
        if readings:
            self.checks.append(check_clocks(closest(readings)))

    def _judge_settings(self, conf: dict[str, str], facts: list[ProcessFacts]) -> None:
        """Add the checks of Kerberos and of the umask. conf: Hadoop's settings of the store."""
        paths = [uri for uri in (self.source, self.output) if uri]
        uses_hdfs = any(map(is_hdfs, paths))
        self.checks.append(check_kerberos(is_kerberos(conf), uses_hdfs, facts))
        if self.output and not is_object(self.output):
            on_hdfs = is_hdfs(self.output)
            self.checks.append(check_umask(facts, parse_umask(conf.get(UMASK, "022")) if on_hdfs else None))

    def _judge_places(self, store: Store, context: SparkContext | None) -> list[Reading]:
        """Add the checks of --input and --output. Return the reading of the output's clock, if it can be written."""
        source = None
        readings = list[Reading]()
        if self.source:
            self.checks.append(self._check_input(store, self.source))
            source = None if has_failed(self.checks[-1:]) else store.resolve(self.source)
        # The attempt stays claimed while executors try to write into its folder.
        with ExitStack() as stack:
            attempt = self._claim(store, self.output, stack) if self.output else None
            if attempt:
                readings.append(read_clock(store, attempt))
            if context is not None and (source or attempt):
                folder = attempt.folder if attempt else None
                try:
                    reaches = reach_of_executors(context, store, source, folder, self.wait_s)
                except Exception as error:
                    self.checks.append(failed_check("executors", error))
                else:
                    self.checks += [check_reach("--input", source, reaches)] if source else []
                    self.checks += [check_reach("--output", attempt.output, reaches)] if attempt else []
        return readings

    def _check_input(self, store: Store, uri: str) -> Check:
        """Return the check of the input on the driver, failed if the store does not answer in time."""
        try:
            check: Check = call_within(self.wait_s, lambda: check_input(store, uri))
            return check
        except TimeoutError:
            return Check("input", FAILED, f"{uri}: no answer in {self.wait_s:g} s", NOT_UP)

    def _claim(self, store: Store, uri: str, stack: ExitStack) -> Attempt | None:
        """Claim the output until the stack is closed, and add the check of it. Return None if it cannot be written."""
        try:
            output = store.resolve(uri)
            # Unlike a write, this request is not retried, so that an unreachable store is reported quickly.
            call_within(self.wait_s, lambda: store.exists(output))
            attempt = stack.enter_context(try_claim(store, output))
        except TimeoutError:
            self.checks.append(Check("output", FAILED, f"{uri}: no answer in {self.wait_s:g} s", NOT_UP))
        except JobError as error:
            self.checks.append(Check("output", FAILED, str(error)))
        except OSError as error:
            self.checks.append(Check("output", FAILED, str(output_error(uri, error) or error)))
        else:
            self.checks.append(Check("output", OK, f"{output}: can be written without overwriting other files"))
            return attempt
        return None


def failed_check(name: str, error: Exception) -> Check:
    """Return the failed check for an error of Spark or of a task, with its cause in one line."""
    text = str(error)
    line = cluster_failure(text) or raised_error(text) or f"{type(error).__name__}: {' '.join(text.split())}"
    return Check(name, FAILED, line[:300])
