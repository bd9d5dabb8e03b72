"""The report of a committed set and the comparison of several, as HTML files that open offline.

They need only the set, nothing of the run that wrote it, so an old set can be reported on later."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.core.reporting import plots
from pipeline.core.reporting.page import EmbeddedFigure, embed_figure, origin, plain, template
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet
from pipeline.input.dataset import Run, serial
from pipeline.output.entries import library_versions
from pipeline.quality import figures
from pipeline.quality.measure import ImageSample, SparseImage, measure
from pipeline.quality.metrics import Quality
from pipeline.quality.scatter_plot import projection
from pipeline.quality.verdict import verdict
from pipeline.strategies import STRATEGIES

RATIOS = (
    ("mmd_ratio", "Image distance (MMD²) / expected distance of a random split"),
    ("class_mmd_ratio", "Image distance (MMD²) inside classes / expected distance of a random split"),
    ("class_chi_square_per_dof", "Class chi-square / degrees of freedom (random split: 1)"),
    ("neighbourhood_chi_square_per_dof", "Neighbourhood chi-square / degrees of freedom (random split: 1)"),
    ("cluster_chi_square_per_dof", "Chi-square / degrees of freedom of distribution_aware's neighbourhoods"),
)

FITTED = {
    "iterations": "k-means iterations",
    "inertia": "sum of squared distances to the nearest k-means centre",
    "far_groups": "k-means centres that started at groups of outlying rows",
    "log_likelihood": "log-likelihood of the rows under the mixture",
    "noise_rows": "fitted rows that are in no ball of dbscan",
    "partitions": "partitions of the table that spark.ml fitted to",
    "rows_fitted": "rows that the principal components or hash functions were fitted to",
    "components_fitted": "principal components that were kept",
    "epochs_used": "epochs whose losses rank the rows",
    "explained_variance": "share of the variance that the components keep",
    "buckets": "hash buckets that have rows",
    "bundles": "different values of the --group-by column",
    "largest_bundle": "rows of its most frequent value",
}


class ParameterRow(NamedTuple):
    """A parameter of a strategy as text."""

    name: str
    value: str
    meaning: str


def split_params(manifest: Manifest) -> tuple[list[ParameterRow], list[ParameterRow]]:
    """Return the parameters that were set, and the results of fitting that the manifest lists beside them."""
    kind = STRATEGIES.get(manifest.strategy)
    meanings = kind.meanings() if kind else {}
    rows = [
        ParameterRow(name, plain(value), meanings.get(name, FITTED.get(name, "")))
        for name, value in manifest.params.items()
    ]
    return [row for row in rows if row.name not in FITTED], [row for row in rows if row.name in FITTED]


def draw_figures(
    manifest: Manifest, measured: Quality, sample: ImageSample, sparse: Sequence[SparseImage]
) -> dict[str, EmbeddedFigure]:
    """Return every applicable figure of a set by its place on the page. About 0.2 s each.

    Args:
        manifest: the manifest of the set.
        measured: the quality measures of the set.
        sample: the sample of its images.
        sparse: images of sparse neighbourhoods.
    """
    shards = measured.shards
    groups = manifest.neighbourhoods
    labelled = "label" in manifest.labels.columns
    embedded_figures: dict[str, EmbeddedFigure] = {}
    with plots.style():
        if len(shards) > 1:
            owners = [shard.owners for shard in shards]
            copies = [shard.rows - shard.owners for shard in shards]
            embedded_figures["sizes"] = embed_figure(figures.shard_sizes(owners, copies), "Rows per worker")
            if labelled:
                heat = figures.class_heat_map(measured.class_table, manifest.labels.class_names)
                embedded_figures["heat"] = embed_figure(heat, "Examples per worker and class")
            if labelled and not manifest.ratios:  # the figure's band assumes equal shares
                boxes = figures.class_boxes(measured.class_table, manifest.labels.class_names)
                embedded_figures["boxes"] = embed_figure(boxes, "Spread of each class over the workers")
        if measured.mmd_ratio is not None:
            ratios = [shard.mmd_ratio for shard in shards]
            figure = figures.shard_ratios(ratios, measured.mmd_ratio, measured.shard_mmd_ratio_sd)
            embedded_figures["ratios"] = embed_figure(figure, "Distance of each shard from the whole set")
        if groups:
            figure = figures.neighbourhood_sizes(groups, len(shards))
            embedded_figures["neighbourhoods"] = embed_figure(figure, "Sizes of the neighbourhoods")
        if len(sample.ids) > 1:
            classes = manifest.labels.num_classes if labelled else 0
            by, count = ("neighbourhood", len(groups)) if groups else ("class", classes)
            figure = projection(measured, sample, by, count, sparse)
            coloured = f", by {by}" if count else ""
            embedded_figures["projection"] = embed_figure(
                figure, f"Sample of {len(sample.ids)} images in two dimensions{coloured}"
            )
        embedded_figures["seconds"] = embed_figure(
            figures.stacked_seconds({"this run": manifest.seconds}), "Seconds per phase"
        )
    return embedded_figures


def render(manifest: Manifest, measured: Quality, sample: ImageSample, sparse: Sequence[SparseImage]) -> str:
    """Return the report as one HTML page without external links. About 2 s for 12 workers on one core.

    Args:
        manifest: the manifest of the set.
        measured: the quality measures of the set.
        sample: the sample of its images.
        sparse: images of sparse neighbourhoods.
    """
    settings, fitted_params = split_params(manifest)
    # Another version may have made the set, by a strategy that this one lacks: only the summary is then missing.
    kind = STRATEGIES.get(manifest.strategy)
    page: str = template("pipeline.quality", "report.html").render(
        manifest=manifest,
        origin=origin(manifest.made, manifest.versions),
        summary=kind.summary if kind else "",
        settings=settings,
        fitted=fitted_params,
        measured=measured,
        findings=verdict(measured, manifest.repeats),
        figures=draw_figures(manifest, measured, sample, sparse),
        max_boxes=plots.BOXES,
        max_table=plots.MANY,
        gallery=[(image, plots.png_uri(image.pixels)) for image in sparse],
    )
    return page


def write_report(shards: ShardSet, write: Callable[[str, bytes], object], run: Run[Any, Any] = serial) -> Quality:
    """Measure a committed set, write ``report.html`` and ``quality.json`` next to its manifest, and return the figures.

    ``quality.json`` holds the figures, and under ``verdict`` the report's statements about them.

    Args:
        shards: the committed set.
        write: write(path, data) stores a file below the set's root. Both files are complete before it is called.
        run: run(fn, items) maps over files.

    Raises:
        DataError: a file of the set disagrees with the manifest.
    """
    measured, sample, sparse = measure(shards, run)
    page = render(shards.manifest, measured, sample, sparse)
    findings = [finding._asdict() for finding in verdict(measured, shards.manifest.repeats)]
    write("quality.json", json.dumps({**measured.to_dict(), "verdict": findings}, indent=1).encode())
    write("report.html", page.encode())
    return measured


def comparison_row(manifest: Manifest, measured: Quality) -> dict[str, Any]:
    """Return the entry of one set for ``render_comparison``, as plain JSON values.

    Values that need another set for comparison are None."""
    return {
        # Only the comparison knows the reference set, and fills these in.
        "adjusted_rand": None,
        "cluster_chi_square_per_dof": None,
        "name": manifest.strategy,
        "strategy": manifest.strategy,
        "workers": manifest.num_workers,
        "seconds": dict(manifest.seconds),
        "rows": measured.rows,
        "copies": measured.copies,
        "max_rows": measured.max_rows,
        "min_rows": measured.min_rows,
        # Rows without labels or neighbourhoods have no such test, and ``and`` keeps its None.
        "class_chi_square_per_dof": measured.classes and measured.classes.per_dof,
        "neighbourhood_chi_square_per_dof": measured.neighbourhoods and measured.neighbourhoods.per_dof,
        "total_variation": measured.skew and measured.skew.total_variation,
        "jensen_shannon": measured.skew and measured.skew.jensen_shannon,
        "effective_classes": measured.skew and measured.skew.effective_classes,
        "mmd_ratio": measured.mmd_ratio,
        "mmd_ratio_sd": measured.mmd_ratio_sd,
        "class_mmd_ratio": measured.class_mmd_ratio,
        "mean_ratio": measured.mean_ratio,
        "bytes": sum(file.bytes for worker in manifest.workers for file in worker.files),
    }


def render_comparison(rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, str] | None = None) -> str:
    """Return all strategies side by side as one HTML page.

    rows: one per set, from ``comparison_row``. provenance: the origin of the comparison, from ``provenance``."""
    seconds = {str(row["name"]): row["seconds"] for row in rows}
    with plots.style():
        embedded_figures = [embed_figure(figures.stacked_seconds(seconds), "Seconds by phase for each strategy")]
        for key, label in RATIOS:
            values = {str(row["name"]): row.get(key) for row in rows}
            # Sets without labels or neighbourhoods have no value of these ratios.
            if any(value is not None for value in values.values()):
                embedded_figures.append(embed_figure(figures.against_one(values, label), label))
    phases = list(dict.fromkeys(phase for row in rows for phase in row["seconds"]))
    page: str = template("pipeline.quality", "comparison.html").render(
        rows=rows,
        phases=phases,
        figures=embedded_figures,
        findings=comparison_findings(rows),
        origin=origin(provenance, library_versions()),
    )
    return page


def comparison_findings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence on each measure of evenness: the most even strategy, and the number below a random split."""
    findings = []
    for key, topic in (("mmd_ratio", "Images"), ("class_chi_square_per_dof", "Classes")):
        ranked = sorted((row for row in rows if row.get(key) is not None), key=lambda row: float(row[key]))
        if ranked:
            below = sum(row[key] < 1 for row in ranked)
            best = f"{ranked[0]['name']} spreads them most evenly ({ranked[0][key]:.2f} of a random split)"
            findings.append(
                f"{topic}: {best}; {below} of {len(ranked)} strategies are below 1, the average random split."
            )
    return findings
