"""Tables as inputs of a run: written as files before it, named as tables in its manifest and its errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.attempt import Attempt
from pipeline.core.storage.store import Store
from pipeline.core.storage.uri import names_dataframe, names_table
from pipeline.doctor import beforehand
from pipeline.input.embedding_table import is_table
from pipeline.runs.request import Request, check_output, resolve_places, with_bundles
from pipeline.spark.progress import PhaseLog
from pipeline.spark.store import open_store
from pipeline.spark.tables import ID_COLUMN, read_table, row_id, select_columns, write_table
from pipeline.strategies import Strategy
from pipeline.strategies.embeddings import EmbeddingStrategy


@contextmanager
def tables_as_files(
    context: SparkContext,
    request: Request,
    progress: PhaseLog,
    *strategies: Strategy,
    spark: SparkSession | None = None,
    frames: Mapping[str, DataFrame] | None = None,
) -> Iterator[Request]:
    """Yield the request with files in place of the tables that it names, and delete the files at the end.

    The files are in a folder of the output that readers ignore, as all files of a run are before its commit. An error
    about a row of a file names the table and the id of the row.

    Args:
        context: runs the tasks.
        request: names the inputs.
        progress: times the phase.
        strategies: all ways of sharding that are requested, whose columns are written too.
        spark: the session that knows the tables; None: the running one.
        frames: the DataFrames by the names that the request has for them.

    Raises:
        UsageError: a table lacks a column, or Spark the reader of the table.
        DataError: there is no such table, or its ids do not order its rows.
    """
    uris = [uri for uri in (request.input, request.eval_input) if uri and names_table(uri)]
    if not uris:
        yield request
        return
    session = spark or SparkSession.builder.getOrCreate()
    # The tables are opened before anything is written.
    tables = {uri: (frames or {}).get(uri) or _open(session, uri) for uri in uris}
    store = open_store(context)
    resolved = resolve_places(store, request)
    check_output(store, resolved)
    beforehand.check_output(context, store, resolved.output)
    ids = request.id_column or ID_COLUMN
    vectors = [
        each.vectors
        for each in strategies
        if isinstance(each, EmbeddingStrategy) and each.vectors and not is_table(each.vectors)
    ]
    # Strategies may keep rows together by further columns.
    bundled = [with_bundles(request, each).read_options.columns for each in strategies]
    columns = dict.fromkeys([*request.read_options.columns, *(column for some in bundled for column in some)])
    options = replace(request.read_options, columns=tuple(columns))
    with Attempt(store, resolved.output) as attempt:
        with progress.phase("tables"):
            places: dict[str, str] = {}
            rows = []
            for number, (uri, data) in enumerate(tables.items()):
                place = f"{attempt.folder}/table-{number}"
                if uri == request.input:
                    selected = select_columns(data, uri, ids, options, vectors)
                else:  # evaluation rows have no kept columns, and no vectors
                    selected = select_columns(data, uri, ids, replace(options, columns=()), ())
                rows.append(f"{write_table(selected, uri, ids, store, attempt.folder, place):,} rows of {uri}")
                places[uri] = place
            progress.report("; ".join(rows))
        on_files = replace(
            request,
            input=places.get(request.input, request.input),
            eval_input=places.get(request.eval_input or "", request.eval_input),
            tables={place: uri for uri, place in places.items()},
        )
        try:
            yield on_files
        except (DataError, UsageError) as error:
            raise type(error)(_with_ids(str(error), on_files.tables, store, ids)) from error


def _open(spark: SparkSession, uri: str) -> DataFrame:
    """Return the table of an address. Raises UsageError for the name of a DataFrame."""
    if names_dataframe(uri):
        raise UsageError(f"{uri} names a DataFrame, which only pipeline.shard() in Python takes; use table:NAME")
    return read_table(spark, uri)


def _with_ids(text: str, tables: Mapping[str, str], store: Store, ids: str) -> str:
    """Return an error line with tables and ids in place of the files that are about to be deleted, and their rows.

    tables: the names of tables by the folders of their files."""
    for folder, name in tables.items():

        def place(match: re.Match[str], folder: str = folder, name: str = name) -> str:
            if match[2] is None:
                return name
            with suppress(OSError, LookupError):
                return f"{name}, {match[2]}{ids} {row_id(store, f'{folder}{match[1]}', ids, int(match[3]))!r}"
            return name

        text = re.sub(rf"{re.escape(folder)}(/part-\d+\.parquet)?(?:, (near |)row (\d+))?", place, text)
    return text
