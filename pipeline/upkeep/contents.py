"""``python -m pipeline inspect``: a summary of a committed set, from its manifest alone."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pipeline.core import command_line
from pipeline.core.program import execute
from pipeline.core.reporting.tables import table, two_column_table
from pipeline.core.shardset.manifest import ShardSet, open_committed
from pipeline.core.shardset.parts import Labels
from pipeline.core.shardset.ratios import ratios_text
from pipeline.core.storage.store import configured_store

MANY = 16  # workers that get a row each; of more workers only the first and last are shown


def describe(shards: ShardSet) -> list[tuple[str, str]]:
    """Return the most important facts about a set, as (name, text)."""
    manifest = shards.manifest
    rows = [worker.rows for worker in manifest.workers]
    size = sum(file.bytes for file in shards.files())
    only = manifest.assignment_only
    # All commands that make or show a set print these lines; ``details`` has the lines that only inspect shows.
    lines = [
        ("strategy", f"{manifest.strategy}, seed {manifest.seed}"),
        ("input", f"{manifest.rows:,} rows of {manifest.input.uri}"),
        ("workers", f"{len(rows)}, {min(rows):,} to {max(rows):,} rows each"),
    ]
    if manifest.ratios:
        lines.append(("ratios", ratios_text(manifest.ratios)))
    near = manifest.neighbourhoods
    if near:
        sizes = [group.size for group in near]
        sparse = sum(group.sparse for group in near)
        sizes_text = f"{len(near)} neighbourhoods of {min(sizes):,} to {max(sizes):,} rows, {sparse} sparse"
        lines.append(("groups", sizes_text))
    lines += [
        ("copies", f"{manifest.copies:,} ({manifest.copies / max(manifest.rows, 1):.2%} of the rows)"),
        ("files", f"{len(shards.files())}, {size / 1e6:.1f} MB" if not only else "none, only the assignment"),
    ]
    if manifest.evaluation:
        lines.append(("eval", f"{manifest.evaluation.rows:,} rows"))
    if manifest.repeats:
        lines += [("note", sentence) for sentence in manifest.repeats.sentences()]
    return lines


def details(shards: ShardSet) -> list[tuple[str, str]]:
    """Return further facts from the manifest about how the set was made, as (name, text)."""
    manifest = shards.manifest
    image = manifest.image
    # As JSON, so that the text "4" and the number 4 look different.
    params_text = ", ".join(f"{key} {json.dumps(value)}" for key, value in manifest.params.items())
    lines = [
        ("images", f"{'x'.join(map(str, image.shape))} {image.dtype}, means {image.mean}"),
        ("labels", _labels(manifest.labels)),
        *([("kept columns", ", ".join(column.name for column in manifest.columns))] if manifest.columns else []),
        ("parameters", params_text or "none"),
        ("fingerprint", manifest.input.fingerprint or "none"),
        ("generation", manifest.generation),
        ("seconds", ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in manifest.seconds.items())),
        ("made by", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())),
    ]
    if manifest.stream:
        settings = manifest.stream.settings
        lines.append(
            ("stream", ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items()) or "unknown")
        )
    if manifest.interval:
        lines.append(("interval", ", ".join(f"{key} {value}" for key, value in manifest.interval.items())))
    if manifest.model:
        lines.append(("model", f"{len(manifest.model)} files under _model"))
    return lines


def _labels(labels: Labels) -> str:
    columns = f", columns {', '.join(labels.columns)}" if labels.columns else ""
    named = f" ({', '.join(shown_names(labels.class_names))})" if labels.class_names else ""
    return (f"{labels.num_classes} classes{named}" if "label" in labels.columns else "none") + columns


def shown_names(names: Sequence[str]) -> list[str]:
    """Return the names of all classes, or of the first and the last of many."""
    return list(names) if len(names) <= MANY else [*names[: MANY // 2], "...", *names[-MANY // 2 :]]


def workers_table(shards: ShardSet) -> str:
    """Return a table with a row per worker: rows, copies, files, megabytes, its rarest and its most frequent class."""
    workers = shards.manifest.workers
    selection = workers if len(workers) <= MANY else [*workers[: MANY // 2], *workers[-MANY // 2 :]]
    labelled = "label" in shards.manifest.labels.columns
    rows = []
    for worker in selection:
        # In sets of older versions, a worker without files has an empty histogram.
        counts = worker.label_histogram or [0]
        size = sum(file.bytes for file in worker.files) / 1e6
        cells = (worker.index, f"{worker.rows:,}", f"{worker.copies:,}", len(worker.files), f"{size:.1f}")
        classes = (f"{min(counts):,}", f"{max(counts):,}") if labelled else ()
        rows.append((*map(str, cells), *classes))
    header = ("worker", "rows", "copies", "files", "MB", *(("rarest class", "most frequent") if labelled else ()))
    rows_table = table(rows, header, right=range(len(header)), indent="  ")
    return rows_table + (f"\n  ... and {len(workers) - len(selection):,} more" if len(selection) < len(workers) else "")


def main(argv: Sequence[str]) -> None:
    """Show the contents of a committed set, from its manifest alone."""
    flags = command_line.parser("python -m pipeline inspect", main.__doc__, "")
    flags.add_argument("uri", metavar="URI", help="folder of a committed set, local, hdfs:// or s3://")

    def run() -> int:
        shards = open_committed(configured_store(), command_line.parse(flags, argv).uri)
        print(f"{shards.uri}\n{two_column_table([*describe(shards), *details(shards)])}\n{workers_table(shards)}")
        return 0

    execute(run, interrupted="run it again")
