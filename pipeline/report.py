"""The report of a run: one HTML file that opens offline, made from a committed shard set alone.

`collect` reads the shards (three passes, each a local function for `quality.Run`), `render` draws and writes
the page from what was collected, without reading anything; `write_report` does both. Nothing of the run
itself is needed, so an old set can be reported on later."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from pipeline import figures, quality
from pipeline.quality import OpenFile, Quality, Run, SetSpec, ShardFile, in_process

SPARSE_IMAGES = 24
SURE = 0.01  # call a split other than random only if chance gives such a one in less than 1 % of cases
NONE = "-"  # what a table says where there is nothing to say
TABLE_ROWS = 24  # a longer table of workers is folded away


# --------------------------------------------------------------------------------- what is read, file by file


@dataclass(frozen=True)
class SparseImage:
    """One image of a sparse neighbourhood: uint8 [C, H, W]."""

    id: int
    label: int
    neighbourhood: int
    pixels: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class ReportSample:
    """The images a report shows: rows spread evenly over the ids, and some of the sparse neighbourhoods."""

    rows: quality.Sample
    sparse: tuple[SparseImage, ...]


def rarest(found: Sequence[SparseImage], limit: int = SPARSE_IMAGES) -> list[SparseImage]:
    """The first `limit`, from the smallest neighbourhood (the highest number) up, then by id."""
    return sorted(found, key=lambda image: (-image.neighbourhood, image.id))[:limit]


def sparse_images_of_file(spec: SetSpec, sparse: frozenset[int], limit: int, file: ShardFile) -> list[SparseImage]:
    """Local step: at most `limit` owners in sparse neighbourhoods; images are read only where there are such
    rows."""
    found: list[SparseImage] = []
    with spec.open_file(file.path) as handle:
        parquet = quality.open_parquet(file, handle, ["id", "copy", "image", *spec.group_columns])
        for group in range(parquet.num_row_groups):
            narrow = parquet.read_row_group(group, ["id", "copy", *spec.group_columns]).combine_chunks()
            batch = narrow.to_batches()[0] if len(narrow) else None
            if batch is None:
                continue
            groups = quality.integers(batch, "neighbourhood", file, spec.num_neighbourhoods)
            chosen = np.isin(groups, sorted(sparse)) & (quality.integers(batch, "copy", file) == 0)
            (rows,) = np.nonzero(chosen)
            if not len(rows):
                continue
            column = parquet.read_row_group(group, ["image"]).column("image").take(pa.array(rows))
            pixels = quality.images(column.combine_chunks(), spec.image_shape, file)
            ids = quality.integers(batch, "id", file)[rows]
            labels = quality.integers(batch, spec.label_column, file, spec.num_classes)[rows]
            images = zip(ids, labels, groups[rows], pixels, strict=True)
            found += [SparseImage(int(i), int(label), int(g), image.copy()) for i, label, g, image in images]
            found = rarest(found, limit)
    return found


def collect(manifest: Mapping[str, Any], open_file: OpenFile, run: Run = in_process) -> tuple[Quality, ReportSample]:
    """Read everything a report needs from a committed set. Raises DataError if a file disagrees with the
    manifest."""
    spec = quality.set_spec(manifest, open_file)
    rows = quality.draw_sample(manifest, open_file, run)
    sparse = frozenset(index for index, group in enumerate(manifest.get("neighbourhoods") or []) if group["sparse"])
    images: list[SparseImage] = []
    if sparse:
        local = partial(sparse_images_of_file, spec, sparse, SPARSE_IMAGES)
        images = rarest([image for part in run(local, quality.shard_files(manifest)) for image in part])
    return quality.measure(manifest, open_file, run, sample=rows), ReportSample(rows, tuple(images))


# --------------------------------------------------------------------------------------- the verdict in words


@dataclass(frozen=True)
class Finding:
    """One line of the verdict: how the set compares with a random split, and the sentence that says so."""

    level: Literal["better", "as random", "worse", "note"]
    text: str


def chi_square_finding(test: quality.ChiSquare, what: str) -> Finding:
    """Judge a chi-square test two-sided: too even is as telling as too uneven."""
    aside = f"chi-square / dof = {plain(test.statistic / test.dof)}, random ≈\u00a01"
    if test.p_value < SURE:
        return Finding("worse", f"{what} are spread less evenly over the workers than by chance ({aside}).")
    if test.p_value > 1 - SURE:
        return Finding("better", f"{what} are spread more evenly over the workers than by chance ({aside}).")
    return Finding("as random", f"{what} are spread as evenly over the workers as chance would ({aside}).")


def distance_finding(ratio: float, sd: float | None) -> Finding:
    """Judge the mean MMD ratio against two standard deviations of a random split."""
    band = 2 * (sd or 0.0)
    aside = f"distance ratio {ratio:.2f}, random 1.00\u00a0±\u00a0{band:.2f}"
    if ratio < 1 - band:
        return Finding("better", f"The shards' images resemble the whole set more than random shards would ({aside}).")
    if ratio > 1 + band:
        return Finding("worse", f"The shards' images resemble the whole set less than random shards would ({aside}).")
    return Finding("as random", f"The shards' images resemble the whole set as random shards would ({aside}).")


def verdict(measured: Quality) -> list[Finding]:
    """What the figures say, in plain language."""
    if len(measured.shards) == 1:
        return [Finding("note", f"One worker holds all {measured.rows:,} examples: nothing was divided.")]
    sizes = (
        f"{len(measured.shards)} shards hold {measured.min_rows:,} to {measured.max_rows:,} rows"
        if measured.min_rows < measured.max_rows
        else f"Each of the {len(measured.shards)} shards holds {measured.max_rows:,} rows"
    )
    ratio = "" if measured.size_ratio is None else f" (largest / smallest = {measured.size_ratio:.3f})"
    findings = [Finding("note", f"{sizes}{ratio}.")]
    if measured.min_rows == 0:
        findings.append(Finding("worse", "At least one shard is empty: its worker has nothing to train on."))
    if measured.copies:
        share = measured.duplicate_share
        text = f"{measured.copies:,} rows are duplicates of sparse examples ({share:.2%} of all examples)."
        findings.append(Finding("worse" if share > 0.01 else "note", text))
    if measured.classes:
        findings.append(chi_square_finding(measured.classes, "Classes"))
    if measured.neighbourhoods:
        findings.append(chi_square_finding(measured.neighbourhoods, "Dense neighbourhoods"))
    if measured.mmd_ratio is not None:
        findings.append(distance_finding(measured.mmd_ratio, measured.mmd_ratio_sd))
    return findings


# --------------------------------------------------------------------------------------------------- the page


@dataclass(frozen=True)
class Picture:
    """A figure for the page: its data: URI and what it shows, for those who cannot see it."""

    uri: str
    alt: str


def plain(value: object) -> str:
    """A manifest value as short readable text."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def flat(values: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Name and text of every entry; nested mappings give dotted names."""
    rows: list[tuple[str, str]] = []
    for name, value in (values or {}).items():
        if isinstance(value, Mapping):
            rows += [(f"{name}.{inner}", text) for inner, text in flat(value)]
        else:
            rows.append((str(name), plain(value)))
    return rows


def binary_size(size: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def principal_axes(features: quality.Floats) -> tuple[quality.Floats, quality.Floats]:
    """Mean [F] and the two leading principal axes [F, 2] of the sample; axes that do not exist are zero.

    Each axis' largest entry is positive, so that the picture does not flip from run to run."""
    mean = features.mean(axis=0) if len(features) else np.zeros(features.shape[1])
    axes = np.zeros((features.shape[1], 2))
    if len(features) > 1:
        _, _, rows = np.linalg.svd(features - mean, full_matrices=False)
        leading = rows[:2].T
        signs = np.sign(leading[np.abs(leading).argmax(axis=0), range(leading.shape[1])])
        axes[:, : leading.shape[1]] = leading * np.where(signs == 0, 1, signs)
    return mean, axes


def projection_picture(manifest: Mapping[str, Any], measured: Quality, sample: ReportSample) -> Picture:
    """The sample on its two principal axes, by neighbourhood if there are any, else by class."""
    mean, axes = principal_axes(sample.rows.features)
    points = (sample.rows.features - mean) @ axes
    if sample.rows.neighbourhoods is not None:
        groups, names = sample.rows.neighbourhoods, [str(i) for i in range(len(manifest["neighbourhoods"]))]
        by = "neighbourhood"
    else:
        groups, names, by = sample.rows.labels, class_names(manifest), "class"
    rare = np.zeros((0, 2))
    if sample.sparse:
        rare = (quality.thumbnails(np.stack([image.pixels for image in sample.sparse])) - mean) @ axes
    owners = np.array([shard.owners for shard in measured.shards])
    known = np.where(owners[:, None] > 0, measured.feature_means, 0.0)
    whole = (owners @ known) / max(int(owners.sum()), 1)
    spread = points.var(axis=0) if len(points) else np.zeros(2)
    shard_rows = round(measured.rows / len(owners))
    shard_sd = np.sqrt([quality.expected_shift(shard_rows, measured.rows, float(v)) for v in spread])
    centres = (measured.feature_means - whole) @ axes
    figure = figures.projection(points, groups, names, by, rare, centres, shard_sd)
    return Picture(figures.svg_uri(figure), f"Sample of {len(points)} images in two dimensions, by {by}; shard centres")


def class_names(manifest: Mapping[str, Any]) -> list[str]:
    """The classes' names, or their numbers."""
    count = int(manifest["labels"]["num_classes"])
    names = manifest["labels"].get("names")
    return [str(name) for name in names] if names and len(names) == count else [str(i) for i in range(count)]


def pictures(manifest: Mapping[str, Any], measured: Quality, sample: ReportSample) -> dict[str, Picture]:
    """Every figure that makes sense for this set, by its place on the page. About 0.2 s each."""
    names, shards = class_names(manifest), measured.shards
    drawn: dict[str, Picture] = {}
    with figures.style():

        def draw(name: str, alt: str, figure: Figure) -> None:
            drawn[name] = Picture(figures.svg_uri(figure), alt)

        if len(shards) > 1:
            owners = [shard.owners for shard in shards]
            copies = [shard.rows - shard.owners for shard in shards]
            draw("sizes", "Rows per worker", figures.shard_sizes(owners, copies))
            draw("heat", "Examples per worker and class", figures.class_heat_map(measured.class_table, names))
            draw(
                "boxes",
                "Spread of each class over the workers",
                figures.class_boxes(measured.class_table, names),
            )
            if measured.mmd_ratio is not None:
                ratios = [shard.mmd_ratio for shard in shards]
                draw(
                    "ratios",
                    "Distance of each shard from the whole set",
                    figures.shard_ratios(ratios, measured.mmd_ratio, measured.shard_mmd_ratio_sd),
                )
        if manifest.get("neighbourhoods"):
            draw(
                "neighbourhoods",
                "Sizes of the neighbourhoods",
                figures.neighbourhood_sizes(manifest["neighbourhoods"], len(shards)),
            )
        if len(sample.rows.ids) > 1:
            drawn["projection"] = projection_picture(manifest, measured, sample)
        if manifest.get("seconds"):
            draw("seconds", "Seconds per phase", figures.stacked_seconds([("this run", manifest["seconds"])]))
    return drawn


@dataclass(frozen=True)
class QualityRow:
    """One line of the quality table: what, this set, a random split, what it means."""

    name: str
    value: str
    random: str
    meaning: str


def spread_text(sd: float | None) -> str:
    """What a random split gives for a ratio: 1.00 and two standard deviations."""
    return "1.00" if sd is None else f"1.00 ± {2 * sd:.2f}"


def chi_square_rows(test: quality.ChiSquare | None, what: str) -> list[QualityRow]:
    """The lines of one chi-square test; none if there is nothing to test."""
    if test is None:
        return []
    band = 2 * math.sqrt(2 / test.dof)
    return [
        QualityRow(
            f"{what} chi-square / dof",
            plain(test.statistic / test.dof),
            f"1.00 ± {band:.2f}",
            f"chi-square {plain(test.statistic)} on {test.dof:,} degrees of freedom, p = {test.p_value:.3g}",
        ),
        QualityRow(
            f"{what} Cramér's V",
            f"{test.cramers_v:.4f}",
            NONE,
            "strength of the link between worker and group: 0 none, 1 complete",
        ),
    ]


def quality_rows(measured: Quality) -> list[QualityRow]:
    """The quality table, a random split of the same sizes beside it."""
    rows = [
        QualityRow(
            "largest / smallest shard",
            NONE if measured.size_ratio is None else f"{measured.size_ratio:.3f}",
            NONE,
            f"{measured.max_rows:,} and {measured.min_rows:,} rows, duplicates included",
        ),
        QualityRow(
            "duplicates",
            f"{measured.duplicate_share:.2%}",
            "0.00%",
            f"{measured.copies:,} rows with copy > 0",
        ),
        *chi_square_rows(measured.classes, "class"),
        *chi_square_rows(measured.neighbourhoods, "neighbourhood"),
    ]
    if measured.mmd_ratio is not None:
        rows.append(
            QualityRow(
                "distribution distance (MMD²)",
                f"{measured.mmd_ratio:.2f}",
                spread_text(measured.mmd_ratio_sd),
                "distance between the images of a shard and of the whole set, mean over the shards",
            )
        )
    if measured.mean_ratio is not None:
        rows.append(
            QualityRow(
                "shift of the mean image (squared)",
                f"{measured.mean_ratio:.2f}",
                spread_text(measured.mean_ratio_sd),
                "distance between the average image of a shard and of the whole set, mean over the shards",
            )
        )
    return rows


@dataclass(frozen=True)
class WorkerRow:
    """One line of the table of workers."""

    index: int
    rows: int
    copies: int
    files: int
    size: str
    mmd_ratio: str
    mean_shift: str


def worker_rows(manifest: Mapping[str, Any], measured: Quality) -> list[WorkerRow]:
    """Sizes from the manifest, distances from the measurement."""
    return [
        WorkerRow(
            int(worker["index"]),
            int(worker["rows"]),
            int(worker["copies"]),
            len(worker["files"]),
            binary_size(sum(file["bytes"] for file in worker["files"])),
            NONE if shard.mmd_ratio is None else f"{shard.mmd_ratio:.2f}",
            NONE if shard.mean_shift is None else f"{shard.mean_shift:.2f}",
        )
        for worker, shard in zip(manifest["workers"], measured.shards, strict=True)
    ]


def facts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The header of the report."""
    source, image = manifest["input"], manifest["image"]
    rows = [
        ("strategy", str(manifest["strategy"])),
        (
            "input",
            f"{source['uri']} ({source['format']}, {source['files']} files, {binary_size(source['bytes'])})",
        ),
        ("fingerprint", plain(source.get("fingerprint"))),
        ("examples", f"{manifest['rows']:,}"),
        ("classes", plain(manifest["labels"]["num_classes"])),
        ("images", " x ".join(map(str, image["shape"])) + f" {image['dtype']}, {image['layout']}"),
        ("workers", plain(manifest["num_workers"])),
        ("duplicates", f"{manifest['copies']:,} rows"),
        ("seed", plain(manifest["seed"])),
    ]
    for name in ("interval", "eval", "model"):
        rows += flat({name: manifest[name]}) if manifest.get(name) else []
    return rows


def environment() -> Environment:
    """Templates from the package (a folder or a zip), every value escaped, an unknown name an error."""
    return Environment(
        loader=PackageLoader("pipeline"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def render(manifest: Mapping[str, Any], measured: Quality, sample: ReportSample) -> str:
    """The report as one HTML page without outside links. Reads nothing; about 2 s for 12 workers on one
    core."""
    names = class_names(manifest)
    groups = manifest.get("neighbourhoods") or []
    return (
        environment()
        .get_template("report.html")
        .render(
            manifest=manifest,
            facts=facts(manifest),
            params=flat(manifest["params"]),
            versions=flat(manifest.get("versions")),
            findings=verdict(measured),
            pictures=pictures(manifest, measured, sample),
            quality=quality_rows(measured),
            bandwidth=measured.bandwidth,
            workers=worker_rows(manifest, measured),
            fold=len(measured.shards) > TABLE_ROWS,
            boxes_shown=min(figures.BOXES, len(names)),
            num_classes=len(names),
            dense=sum(not group["sparse"] for group in groups),
            sparse=sum(bool(group["sparse"]) for group in groups),
            sparse_rows=sum(group["size"] for group in groups if group["sparse"]),
            sparse_images=[
                (
                    figures.png_uri(image.pixels),
                    image.id,
                    figures.short(names[image.label]),
                    image.neighbourhood,
                )
                for image in sample.sparse
            ],
        )
    )


def write_report(
    manifest: Mapping[str, Any],
    open_file: OpenFile,
    write: Callable[[str, bytes], object],
    run: Run = in_process,
) -> Quality:
    """Measure a committed set, write `report.html` and `quality.json` beside its manifest, and return the
    figures.

    write(path, data) stores a file below the set's root; both files are complete before they are handed to
    it. Raises DataError if a file of the set disagrees with the manifest."""
    measured, sample = collect(manifest, open_file, run)
    page = render(manifest, measured, sample)
    write("quality.json", json.dumps(measured.to_dict(), indent=1).encode())
    write("report.html", page.encode())
    return measured


# ----------------------------------------------------------------------------------------------- side by side


def comparison_row(manifest: Mapping[str, Any], measured: Quality) -> dict[str, Any]:
    """What `render_comparison` shows of one set, as plain JSON values."""

    def per_dof(test: quality.ChiSquare | None) -> float | None:
        return None if test is None else test.statistic / test.dof

    return {
        "strategy": manifest["strategy"],
        "workers": manifest["num_workers"],
        "seconds": dict(manifest["seconds"]),
        "rows": measured.rows,
        "copies": measured.copies,
        "max_rows": measured.max_rows,
        "min_rows": measured.min_rows,
        "class_chi_square_per_dof": per_dof(measured.classes),
        "neighbourhood_chi_square_per_dof": per_dof(measured.neighbourhoods),
        "mmd_ratio": measured.mmd_ratio,
        "mmd_ratio_sd": measured.mmd_ratio_sd,
        "mean_ratio": measured.mean_ratio,
    }


RATIOS = (
    ("mmd_ratio", "Distribution distance (MMD²) / that of a random split"),
    ("class_chi_square_per_dof", "Class chi-square / degrees of freedom"),
    ("neighbourhood_chi_square_per_dof", "Neighbourhood chi-square / degrees of freedom"),
)


def render_comparison(rows: Sequence[Mapping[str, Any]]) -> str:
    """All strategies side by side on one HTML page; rows as `comparison_row` gives them, one a strategy."""
    names = [str(row["strategy"]) for row in rows]
    phases = list(dict.fromkeys(phase for row in rows for phase in row["seconds"]))
    with figures.style():
        seconds = figures.stacked_seconds(list(zip(names, (row["seconds"] for row in rows), strict=True)))
        drawn = [Picture(figures.svg_uri(seconds), "Seconds by phase for each strategy")]
        for key, label in RATIOS:
            values = [row.get(key) for row in rows]
            if any(value is not None for value in values):
                figure = figures.against_one(list(zip(names, values, strict=True)), label)
                drawn.append(Picture(figures.svg_uri(figure), label))
    return environment().get_template("comparison.html").render(rows=rows, phases=phases, pictures=drawn, plain=plain)
