"""The configuration of a run, for every strategy, and the identity by which equal runs are recognised."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from pipeline.core.errors import UsageError
from pipeline.core.shardset.commit import check_reports
from pipeline.core.shardset.contract import FORMAT_VERSION
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.ratios import lowest_terms
from pipeline.core.shardset.schema import OWN_COLUMNS
from pipeline.core.storage.hadoop_conf import is_kerberos
from pipeline.core.storage.objects import is_object
from pipeline.core.storage.store import ENCRYPTED_SPILL, Store, configured_settings
from pipeline.core.storage.uri import WEB_SCHEMES, names_table, split_uri
from pipeline.doctor.places import output_error
from pipeline.input.bad_records import parse_limit
from pipeline.input.files import check_apart, match_paths
from pipeline.input.read_options import ReadOptions
from pipeline.strategies import Strategy

INTERVALS = ("ds", "run_id")
NATIVE = ("label", "coarse_label")  # columns by which rows are grouped without being kept


@dataclass(frozen=True)
class Request:
    """The configuration of a run, without its strategy.

    Attributes:
        input: rows to shard.
        output: folder of the set.
        num_workers: number of shards.
        eval_input: evaluation rows, or None.
        read_options: how the rows are read.
        overwrite: replace a committed set of another configuration.
        allow_empty: allow workers without rows.
        interval: {"ds": ...} or {"run_id": ...} of a batch run, or None.
        ratios: shares of the workers, reduced to lowest terms; None: equal.
        assignment_only: write the worker of every row and no shards.
        group_by: column whose values are kept together at one worker, or None.
        rescan: compare a committed set with the content of the input, not only with its listing.
        max_bad_records: the most broken records that are left out, as a number or a share such as ``0.1%``; None: a
            broken record ends the run.
        id_column: column of a table whose values give the order of the rows; None: id.
        tables: names of tables by the folders of the files to which their rows are written (tables.py).
    """

    input: str
    output: str
    num_workers: int
    eval_input: str | None = None
    read_options: ReadOptions = ReadOptions()
    overwrite: bool = False
    allow_empty: bool = False
    interval: Mapping[str, str] | None = None
    ratios: Sequence[int] | None = None
    assignment_only: bool = False
    group_by: str | None = None
    rescan: bool = False
    max_bad_records: str | None = None
    id_column: str | None = None
    tables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values and reduce the ratios to lowest terms. Raises UsageError."""
        if isinstance(self.num_workers, bool) or not isinstance(self.num_workers, Integral):
            raise UsageError(f"--workers must be a whole number, got {self.num_workers!r}")
        if self.num_workers < 1:
            raise UsageError(f"--workers must be at least 1, got {self.num_workers}")
        # The manifest and the identity hold no numbers of numpy.
        object.__setattr__(self, "num_workers", int(self.num_workers))
        if self.ratios is not None:
            object.__setattr__(self, "ratios", lowest_terms(self.ratios, self.num_workers))
        object.__setattr__(self, "interval", _checked_interval(self.interval))
        if self.max_bad_records is not None:
            parse_limit(self.max_bad_records)
        if self.assignment_only and self.eval_input:
            raise UsageError("an assignment has no evaluation rows; give --eval-input to sharding materialize instead")
        paths = self.paths()
        inputs = [uri for uri in (self.input, self.eval_input) if uri]
        if self.id_column is not None and len(paths) == len(inputs) and not self.tables:
            raise UsageError(
                f"--id-column {self.id_column} orders the rows of a table, and the input is none; leave it out"
            )
        if self.read_options.format and not paths and not self.tables:
            raise UsageError(f"--format {self.read_options.format}: {self.input} is a table; leave it out")
        # A limit per file would make the result depend on the partitions of a table.
        if self.max_bad_records is not None and len(paths) < len(inputs):
            raise UsageError("--max-bad-records leaves out records of files; filter the table, and leave the flag out")

    def paths(self) -> list[str]:
        """Return the inputs that are paths: neither tables nor the files to which their rows are written."""
        inputs = (self.input, self.eval_input)
        return [uri for uri in inputs if uri and not names_table(uri) and uri not in self.tables]


def _checked_interval(interval: Mapping[str, str] | None) -> dict[str, str] | None:
    """Return the data interval of a batch run, or None. Raises UsageError unless it is a single text of a known kind."""
    if not interval:
        return None
    if len(interval) != 1 or not all(key in INTERVALS and isinstance(value, str) for key, value in interval.items()):
        raise UsageError(f"interval must be {{'ds': TEXT}} or {{'run_id': TEXT}}, got {dict(interval)!r}")
    return dict(interval)


def with_bundles(request: Request, strategy: Strategy) -> Request:
    """Return the request with the column of its bundles, if any, which then travels into the shards.

    Raises UsageError if the strategy has a column of its own and --group-by names another one."""
    own = strategy.bundle_column
    if own and request.group_by not in (None, own):
        raise UsageError(f"{strategy.name} keeps rows together by --column {own}: leave out --group-by")
    if "" in (own, request.group_by):
        raise UsageError(f"{'--column' if own == '' else '--group-by'} names no column; name one, or leave it out")
    column = own or request.group_by
    if column in OWN_COLUMNS and column not in NATIVE:
        raise UsageError(f"--group-by {column}: rows cannot be kept together by this column; name another one")
    return grouped_by(request, column)


def grouped_by(request: Request, column: str | None) -> Request:
    """Return the request with a column of bundles, or none, which is kept beside its other columns."""
    options = request.read_options
    if column and column not in (*NATIVE, *options.columns):
        options = replace(options, columns=(*options.columns, column))
    return replace(request, group_by=column, read_options=options)


def preflight(request: Request, *strategies: Strategy) -> None:
    """Check everything that can be checked without Spark, so that a mistake does not wait for the seconds of its start.

    Raises UsageError or DataError. strategies: all ways of sharding that are requested, several in a comparison."""
    for strategy in strategies:
        strategy.check_ratios(request.ratios)
        with_bundles(request, strategy)  # only for its UsageError about --group-by
        if request.read_options.unlabelled:
            strategy.check_without_labels()
    uris = [request.output, *request.paths()]
    # The tables that strategies read beside the input.
    flags = {uri: strategy.source_flag for strategy in strategies for uri in strategy.sources()}
    beside = list(flags)
    store = Store()
    # Of an object store, only the form of an address can be checked here.
    for uri in filter(is_object, uris + beside):
        store.resolve(uri)
    # The remaining checks open the file systems, and some can only be opened with Spark's settings.
    if any(only_spark_knows(uri) for uri in uris + beside):
        return
    absolute = resolve_places(store, request)
    check_output(store, absolute)
    for uri in absolute.paths():
        match_paths(store, uri)
    for uri, flag in flags.items():
        match_paths(store, store.resolve(uri), flag=flag)


def only_spark_knows(uri: str) -> bool:
    """True if only Spark's settings may contain the address of a place or the right to use it.

    Examples are a name service, keys of S3, a keytab, whether WebHDFS asks for Kerberos, and spark-submit's --proxy-user."""
    scheme, authority, _ = split_uri(uri)
    if is_object(uri) or scheme in WEB_SCHEMES:
        return True
    if scheme != "hdfs":
        return False
    return ":" not in authority or _is_for_another_user() or _asks_for_kerberos()


def _asks_for_kerberos() -> bool:
    """True if HDFS asks for Kerberos, so that Spark's settings may name the keytab."""
    return is_kerberos(dict(configured_settings()))


def _is_for_another_user() -> bool:
    """True if spark-submit, this process's parent, may have been started with --proxy-user."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return False
    try:
        return b"--proxy-user" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return True


def resolve_places(store: Store, request: Request) -> Request:
    """Return the request with the canonical paths of its inputs and its output. Raises UsageError."""

    def resolve(uri: str) -> str:
        return uri if names_table(uri) else store.resolve(uri)

    return replace(
        request,
        output=store.resolve(request.output),
        input=resolve(request.input),
        eval_input=resolve(request.eval_input) if request.eval_input else None,
    )


def check_output(store: Store, request: Request) -> None:
    """Raise UsageError if no set can be written to the output, and DataError for a pattern that matches nothing.

    request: with resolved places."""
    output = request.output
    if store.encrypts_spill and (is_object(output) or split_uri(output)[0] in WEB_SCHEMES):
        raise UsageError(
            f"--output {output}: writes to an object store or WebHDFS pass through unencrypted temporary files, which"
            f" {ENCRYPTED_SPILL}=true forbids; write to hdfs:// or a local folder, or unset it"
        )
    for source in request.paths():
        check_apart(store, output, source)
    try:
        if not store.info(output).is_dir:
            raise UsageError(f"--output {output} is a file; choose a folder")
        check_reports(store, output)
    except FileNotFoundError:
        pass  # the run makes the folder
    except OSError as error:
        raise output_error(output, error) or error from None


def identity(request: Request, strategy: Strategy) -> str:
    """Return a digest of everything except the input that decides the shards; equal runs have equal digests."""
    options = request.read_options
    configuration = {
        "format_version": FORMAT_VERSION,
        "strategy": strategy.name,
        "params": strategy.identity(),
        "seed": strategy.seed,
        "num_workers": request.num_workers,
        "interval": request.interval,
        "shape": options.shape,
        "classes": options.num_classes,
        "eval": bool(request.eval_input),
    }
    # Options are only added if set, so that identities without them do not change.
    if options.unlabelled:
        configuration["unlabelled"] = True
    configuration |= options.identity_values()
    if request.ratios:
        configuration["ratios"] = request.ratios
    if request.assignment_only:
        configuration["assignment_only"] = True
    if request.group_by:
        configuration["group_by"] = request.group_by
    if request.max_bad_records is not None:
        configuration["max_bad_records"] = request.max_bad_records
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()


def difference(committed: ShardSet, request: Request, strategy: Strategy) -> str:
    """Return the differences between a committed set and the requested one, in words."""
    manifest = committed.manifest
    settings: dict[str, Any] = {
        "strategy": strategy.name,
        **strategy.params(),
        "seed": strategy.seed,
        "workers": request.num_workers,
        "ratios": request.ratios and list(request.ratios),
        "interval": request.interval,
        "evaluation rows": "yes" if request.eval_input else "none",
        "kept columns": request.read_options.columns,
        "assignment only": request.assignment_only,
        "grouped by": request.group_by,
    }
    committed_settings = {
        "strategy": manifest.strategy,
        **(manifest.params if "asked" in manifest.absent else manifest.asked),
        "seed": manifest.seed,
        "workers": manifest.num_workers,
        "ratios": manifest.ratios,
        "interval": manifest.interval,
        "evaluation rows": "yes" if manifest.evaluation else "none",
        "kept columns": [column.name for column in manifest.columns],
        "labels": "read" if manifest.labels.columns else "none",
        "assignment only": manifest.assignment_only,
        "grouped by": manifest.group_by,
        "channels": next(iter(manifest.image.shape), None),
        "resize": manifest.image.shape[1:],
    }
    if request.read_options.unlabelled:
        settings["labels"] = "none"
    if request.read_options.channels:
        settings["channels"] = request.read_options.channels
    if request.read_options.resize:
        settings["resize"] = request.read_options.resize
    settings = json.loads(json.dumps(settings))  # tuples become lists, as in a manifest
    differences = [
        f"{name} {_value_text(committed_settings.get(name))}, not {_value_text(value)}"
        for name, value in settings.items()
        if committed_settings.get(name) != value
    ]
    # A manifest has neither columns of images and labels nor limits of broken records.
    return "; ".join(differences) or "its input, or how it is read"


def _value_text(value: object) -> str:
    """Return a value of a configuration as the user typed it: a flag such as --components holds 50 as 50.0."""
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def input_path(data: object, argument: str) -> str:
    """Return an input that is no DataFrame of Spark as a text. Raises UsageError if it is no path either.

    argument: its name, for the message."""
    if not isinstance(data, str | os.PathLike):
        kind = f"{type(data).__module__}.{type(data).__name__}"
        raise UsageError(f"{argument} must be a path or a DataFrame of Spark, got {kind}; see spark.createDataFrame")
    return os.fspath(data)
