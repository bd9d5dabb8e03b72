"""Events of a run for OpenLineage, by its own client, which its environment variables or openlineage.yml configure.

Without a configuration nothing happens. A client that is not installed, or a collector that cannot be reached, costs one
warning."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any
from uuid import uuid4

import pyspark
from pyspark import SparkContext

from pipeline.core import console
from pipeline.core.errors import UsageError
from pipeline.core.extras import require
from pipeline.core.provenance import CREDENTIALS, HIDDEN
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.parts import Input
from pipeline.core.shardset.schema import record_schema
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import names_dataframe, names_table, split_uri
from pipeline.input.committed import layout_of
from pipeline.runs.metrics_file import strip_interval
from pipeline.runs.request import Request
from pipeline.spark.jvm import spark_setting

PRODUCER = "distribution-aware-sharding"
VARIABLES = "OPENLINEAGE_"  # prefix of the client's environment variables
FILE = "openlineage.yml"
PARENT = "spark.openlineage.parent"  # prefix of the settings by which a scheduler names the run that started this one
TOPICS = "kafka"  # scheme of streamed inputs that are not files
LIBRARIES = ("openlineage", "urllib3")  # these log several lines for one event that cannot be sent

# Kept for the whole process, so that later runs neither try nor warn again.
_DEAD_TRANSPORTS: set[str] = set()  # transports to which START could not be sent
_SHOWN_WARNINGS: set[str] = set()  # warnings about a missing client


def dataset_name(uri: str) -> tuple[str, str]:
    """Return namespace and name of a data set, as OpenLineage's naming specification defines them.

    uri: a resolved path, a topic of Kafka, or a table of Spark, whose catalog has no address: its namespace is its
        scheme."""
    if names_table(uri):
        kind, _, name = uri.partition(":")
        return ("spark", name) if kind in ("table", "iceberg") else dataset_name(name)
    scheme, authority, path = split_uri(uri)
    if scheme in ("", "file"):
        return "file", path
    # Before an @, there is the container in Azure's addresses, and credentials in others.
    host = authority if scheme in ("abfs", "abfss") else authority.rpartition("@")[2]
    # Object stores have keys, which do not begin with a slash; file systems have paths.
    return f"{scheme}://{host}", path if "hdfs" in scheme else path.strip("/") or "/"


def version_of(manifest: Manifest) -> str:
    """Return the version of a set: the number of its commit, and the fingerprint of its rows."""
    return f"{manifest.version}-{manifest.input.fingerprint or 'assigned'}"


class RunLineage:
    """The sender of the events of one run. It sends nothing more after an event that could not be sent.

    Args:
        client: an OpenLineage client; None: send nothing.
        context: the Spark context of the run.
        store: resolves the paths of the request.
        job: name of the job.
        request: input, output and interval.
        processing: BATCH or STREAMING.
    """

    def __init__(
        self, client: Any, context: SparkContext, store: Store, job: str, request: Request, processing: str
    ) -> None:
        self._client = client
        self._context = context
        self._store = store
        self._job = job
        self._request = request
        self._processing = processing
        self._run_id = str(uuid4())
        self._sends_progress = True
        self._shards: ShardSet | None = None

    def set_result(self, shards: ShardSet) -> None:
        """Set the committed set, which the following events describe."""
        self._shards = shards

    def send(self, kind: str, error: BaseException | None = None) -> None:
        """Send an event: START, RUNNING, COMPLETE, FAIL or ABORT. A failure is one warning.

        After a RUNNING that was not sent, no other one is tried, but the event of the end is: a stream runs for weeks, and
        the collector may answer again. error: the error with which the run has ended, or None."""
        is_progress = kind == "RUNNING"
        if self._client is None or (is_progress and not self._sends_progress):
            return
        try:
            with _quiet_libraries():
                self._client.emit(self._event(kind, error))
        except Exception as problem:  # whatever a transport raises must not fail the run
            if kind == "START":
                _DEAD_TRANSPORTS.add(_transport_of(self._client))
            if is_progress:
                self._sends_progress = False
            else:
                self._client = None
            _warn(f"no OpenLineage events: {kind} was not sent: {type(problem).__name__}: {problem}")

    def close(self) -> None:
        """Wait until asynchronous transports have sent all events, at most some seconds. A failure is one warning."""
        if self._client is None or not hasattr(self._client, "close"):
            return
        try:
            with _quiet_libraries():
                self._client.close(timeout=10.0)
        except Exception as problem:  # whatever a transport raises must not fail a run that is committed
            _warn(f"OpenLineage events may be missing: {type(problem).__name__}: {problem}")

    def _event(self, kind: str, error: BaseException | None) -> Any:
        from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
        from openlineage.client.facet_v2 import job_type_job

        namespace = os.environ.get("OPENLINEAGE_NAMESPACE", "default")
        job_type = job_type_job.JobTypeJobFacet(processingType=self._processing, integration="SHARDING", jobType="JOB")
        # Before the end of a run there is no set yet: START names the data sets alone.
        manifest = self._shards.manifest if self._shards else None
        origins = self._origins(manifest)
        inputs = [
            InputDataset(*dataset_name(uri), facets=_version_facet(origin), inputFacets=_input_facets(origin))
            for uri, origin in origins
        ]
        output = self._store.resolve(self._request.output)
        facets = _set_facets(self._shards) if self._shards else {}
        statistics = _output_facets(self._shards) if self._shards else {}
        return RunEvent(
            eventType=RunState[kind],
            eventTime=datetime.now(UTC).isoformat(),
            run=Run(self._run_id, facets=self._run_facets(error)),
            job=Job(namespace, self._job, facets={"jobType": job_type}),
            inputs=inputs,
            outputs=[OutputDataset(*dataset_name(output), facets=facets, outputFacets=statistics)],
            producer=PRODUCER,
        )

    def _origins(self, manifest: Manifest | None) -> list[tuple[str, Input | None]]:
        """Return the address of each input and its entry in the manifest; DataFrames have no address."""
        request = self._request
        evaluation = manifest.evaluation if manifest else None
        origins = {
            request.input: manifest.input if manifest else None,
            request.eval_input: evaluation.input if evaluation else None,
        }
        return [
            (uri if names_table(uri) or split_uri(uri)[0] == TOPICS else self._store.resolve(uri), origin)
            for uri, origin in origins.items()
            if uri and not names_dataframe(uri)
        ]

    def _run_facets(self, error: BaseException | None) -> dict[str, Any]:
        """Return the facets of the run: Spark, the interval, the run that started this one, the error."""
        from openlineage.client.facet_v2 import error_message_run, nominal_time_run, parent_run, processing_engine_run

        facets: dict[str, Any] = {
            "processing_engine": processing_engine_run.ProcessingEngineRunFacet(
                version=pyspark.__version__, name="spark", openlineageAdapterVersion=version("openlineage-python")
            )
        }
        day = re.match(r"\d{4}-\d{2}-\d{2}$", (self._request.interval or {}).get("ds", ""))
        if day:
            facets["nominalTime"] = nominal_time_run.NominalTimeRunFacet(nominalStartTime=f"{day[0]}T00:00:00Z")
        # Airflow's Spark operator and other schedulers pass these settings to every application.
        settings = [spark_setting(self._context, f"{PARENT}{name}") for name in ("RunId", "JobNamespace", "JobName")]
        if all(settings):
            run_id, namespace, name = settings
            facets["parent"] = parent_run.ParentRunFacet(
                run=parent_run.Run(runId=run_id), job=parent_run.Job(namespace=namespace, name=name)
            )
        if error is not None:
            text = CREDENTIALS.sub(f"{HIDDEN}@", " ".join(str(error).split())[:2000] or type(error).__name__)
            facets["errorMessage"] = error_message_run.ErrorMessageRunFacet(message=text, programmingLanguage="PYTHON")
        return facets


def _version_facet(origin: Input | None) -> dict[str, Any]:
    from openlineage.client.facet_v2 import dataset_version_dataset

    if origin is None or origin.fingerprint is None:
        return {}
    return {"version": dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=origin.fingerprint)}


def _input_facets(origin: Input | None) -> dict[str, Any]:
    from openlineage.client.facet_v2 import input_statistics_input_dataset as statistics

    if origin is None:
        return {}
    facet = statistics.InputStatisticsInputDatasetFacet(origin.rows, origin.bytes, origin.files)
    return {"inputStatistics": facet}


def _set_facets(shards: ShardSet) -> dict[str, Any]:
    """Return the facets of a committed set: schema, version, storage."""
    from openlineage.client.facet_v2 import dataset_version_dataset, schema_dataset, storage_dataset

    manifest = shards.manifest
    columns = record_schema(layout_of(manifest), neighbourhood=manifest.neighbourhoods is not None)
    fields = [schema_dataset.SchemaDatasetFacetFields(name=each.name, type=str(each.type)) for each in columns]
    return {
        "schema": schema_dataset.SchemaDatasetFacet(fields=fields),
        "version": dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=version_of(manifest)),
        "storage": storage_dataset.StorageDatasetFacet(storageLayer="sharding", fileFormat="parquet"),
    }


def _output_facets(shards: ShardSet) -> dict[str, Any]:
    from openlineage.client.facet_v2 import output_statistics_output_dataset as statistics

    files = shards.hashed_files()
    size = sum(file.bytes for file in files)
    facet = statistics.OutputStatisticsOutputDatasetFacet(shards.manifest.rows, size, len(files))
    return {"outputStatistics": facet}


@contextmanager
def lineage_events(
    context: SparkContext, store: Store, name: str, request: Request, *, processing: str = "BATCH"
) -> Iterator[RunLineage]:
    """Send START, then the event of the end of the ``with`` block: COMPLETE, FAIL, or ABORT after an interruption.

    Args:
        context, store: of the run.
        name: what the run does, such as the name of its strategy.
        request: input, output and interval.
        processing: BATCH or STREAMING.
    """
    output = strip_interval(store.resolve(request.output), request.interval)
    lineage = RunLineage(_configured_client(), context, store, f"{name} to {output}", request, processing)
    lineage.send("START")
    try:
        yield lineage
    except BaseException as error:
        lineage.send("FAIL" if isinstance(error, Exception) else "ABORT", error)
        raise
    else:
        lineage.send("COMPLETE")
    finally:
        lineage.close()


def _configured_client() -> Any:
    """Return the client that the user has configured, or None. If it is missing or refuses its configuration, warn."""
    if not _may_be_configured(os.environ):
        return None
    try:
        require("lineage", "its configuration")
    except UsageError as missing:
        if str(missing) not in _SHOWN_WARNINGS:
            _SHOWN_WARNINGS.add(str(missing))
            _warn(f"no OpenLineage events: {missing}")
        return None
    try:
        with _quiet_libraries():
            from openlineage.client import OpenLineageClient

            client = OpenLineageClient()
        # Without a transport the client would print all events on the console.
        configured = (client.config.transport or {}).get("type") or os.environ.get("OPENLINEAGE_URL")
        return client if configured and _transport_of(client) not in _DEAD_TRANSPORTS else None
    except Exception as problem:
        _warn(f"no OpenLineage events: its configuration is refused: {type(problem).__name__}: {problem}")
        return None


def _transport_of(client: Any) -> str:
    """Return a text that identifies the configured transport of a client."""
    return f"{client.config.transport} {os.environ.get('OPENLINEAGE_URL')}"


def _may_be_configured(environment: Mapping[str, str]) -> bool:
    """Return whether the client needs to be asked for its configuration: loading it takes half a second."""
    if environment.get(f"{VARIABLES}DISABLED", "").strip().lower() == "true":
        return False
    files = (FILE, os.path.expanduser(f"~/.openlineage/{FILE}"))
    # Without errors, unlike those of pathlib, for a user without a name or home and in a folder that it may not enter.
    return any(name.startswith(VARIABLES) for name in environment) or any(os.path.isfile(file) for file in files)


def _warn(text: str) -> None:
    line = CREDENTIALS.sub(f"{HIDDEN}@", " ".join(text.split())[:400])
    console.say("sharding.lineage", f"warning: {line}", level="warning")


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Silence the client and its HTTP library within a ``with`` block: their failures become one line here."""
    loggers = [logging.getLogger(name) for name in LIBRARIES]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
