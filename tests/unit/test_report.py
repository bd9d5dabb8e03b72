"""The report page, parsed as a browser would: what it says, what it must never contain."""

import io
import json
import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.patches import Rectangle, StepPatch
from PIL import Image
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from pipeline.core.errors import DataError
from pipeline.core.reporting.plots import style
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.parts import Generation, Input, Labels, Neighbourhood, Repeats, Stream
from pipeline.quality import figures, report
from pipeline.quality.measure import measure
from pipeline.quality.verdict import verdict
from pipeline.strategies.distribution_aware import DistributionAware
from tests.unit.test_quality import commit, make_images, shard_set

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)> $\\frac{1}$ {{ 7*7 }}"


class Page(HTMLParser):
    """Tags with their attributes, and the text outside <style>."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.in_style = False
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self.in_style = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self.in_style else data

    def sources(self) -> list[str]:
        return [str(attributes["src"]) for tag, attributes in self.tags if tag == "img"]

    def alts(self) -> list[str]:
        return [str(attributes["alt"]) for tag, attributes in self.tags if tag == "img"]


def committed(folder: Path, rows: int = 240, num_workers: int = 4, **changes: Any) -> dict[str, Any]:
    """A set with two dense neighbourhoods and two sparse ones (ids 0, 1 and 2), which every worker holds."""
    images, labels = make_images(rows, changes.pop("shape", (3, 9, 7)))
    groups = np.arange(rows) % 2
    groups[:2], groups[2] = 2, 3
    manifest = commit(folder, images, labels, np.arange(rows) % num_workers, num_workers, groups, np.array([0, 1, 2]))
    return {**manifest, **changes}


def page_of(folder: Path, manifest: dict[str, Any]) -> Page:
    shards = shard_set(folder, manifest)
    return Page(report.render(shards.manifest, *measure(shards)))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The report of a usual set of one interval."""
    folder = tmp_path_factory.mktemp("usual")
    return page_of(folder, committed(folder, interval={"ds": "2024-05-01"}))


def test_the_report_shows_every_section_of_a_set(page: Page) -> None:
    headings = (
        "Shard quality",
        "Classes on each worker",
        "Neighbourhoods",
        "in two dimensions",
        "Time",
        "Workers",
        "Settings",
        "Data",
        "Origin",
    )
    for heading in headings:
        assert heading in page.text
    for text in ("distribution_aware", "hdfs://name/data", "2024-05-01", "clusters", "9 rows are copies"):
        assert text in page.text
    assert "2 sparse ones, with 3 images in all" in page.text
    assert "Left: images picked evenly" in page.text
    assert "Right: the mean of each whole shard" in page.text


@pytest.mark.usefixtures("undrawn")
def test_the_facts_are_those_a_person_asks_for(tmp_path: Path) -> None:
    files = [{"path": "_eval/part-00000.parquet", "rows": 1234, "bytes": 5000, "sha256": "0" * 64}]
    manifest = committed(tmp_path, eval={"rows": 1234, "files": files}, model={"files": [{"path": "_model/v1/pca"}]})
    manifest["params"]["inertia"] = 923067657.3
    text = page_of(tmp_path, {**manifest, "identity": "0fbc", "generation": "5f9a", "asked": {"tol": 1}}).text
    assert re.search(r"evaluation\s*1,234 rows", text)
    assert "hdfs://name/data (cifar10-binary, 5 files, 1 Byte)" in text
    assert "923,067,657" in text
    for machinery in ("part-00000", "_model", "0fbc", "5f9a", "asked"):
        assert machinery not in text


@pytest.mark.usefixtures("undrawn")
def test_a_growing_set_with_ratios_and_names_shows_them(tmp_path: Path) -> None:
    """Render the sections that only some sets have, and those of the same set without labels."""
    shards = shard_set(tmp_path, committed(tmp_path))
    quality = measure(shards)
    batch = Generation(
        rows=12, copies=1, total=240, fingerprint="", mean=[], buckets=4, batch=7, source="", quarantined=2, seconds=0.5,
        version=3,
    )  # fmt: skip
    names = Labels(num_classes=4, class_names=[f"name {number}" for number in range(101)])
    manifest = replace(
        shards.manifest,
        ratios=[1, 2, 1, 1],
        repeats=Repeats(rows=5, evaluation=6),
        generations=[batch] * 21,
        stream=Stream(state_bytes=64),
        labels=names,
    )
    text = Page(report.render(manifest, *quality)).text
    assert "The rows arrived in 21 batches. The counters of the 4 buckets take 64 Bytes, 16 bytes each." in text
    assert "Shown are the last 20 generations." in text
    assert "in the ratios 1:2:1:1" in text
    assert "5 training rows, 6 evaluation rows" in text
    assert "99 name 99, …" in text
    assert "(name " in text, "the class of an image in a sparse neighbourhood"
    unlabelled = Labels(columns=[], num_classes=1)
    assert "none: the rows have no labels" in Page(report.render(replace(manifest, labels=unlabelled), *quality)).text


def test_the_report_opens_offline_and_runs_no_script(page: Page) -> None:
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "iframe", "object", "a", "base"}
    assert page.sources()
    assert all(source.startswith("data:image/") for source in page.sources())


def test_every_picture_is_a_readable_image_with_a_description(page: Page) -> None:
    for source, alt in zip(page.sources(), page.alts(), strict=True):
        kind, data = source.split(";base64,")
        if kind.endswith("svg+xml"):
            assert ElementTree.fromstring(b64decode(data)).tag.endswith("svg")
        else:
            Image.open(BytesIO(b64decode(data))).verify()
        assert alt


def test_sparse_images_are_shown_pixel_for_pixel(page: Page) -> None:
    images, _ = make_images(240)
    assert [alt for alt in page.alts() if alt.startswith("image ")] == ["image 2", "image 0", "image 1"]
    shown = next(source for source in page.sources() if source.startswith("data:image/png"))
    pixels = np.asarray(Image.open(BytesIO(b64decode(shown.split(",")[1]))))
    np.testing.assert_array_equal(np.moveaxis(pixels, -1, 0), images[2])


def test_no_more_than_24_sparse_images_are_collected(tmp_path: Path) -> None:
    images, labels = make_images(200)
    manifest = commit(tmp_path, images, labels, np.arange(200) % 50, 50, np.arange(200) // 40)
    *_, sparse = measure(shard_set(tmp_path, manifest))
    assert [image.id for image in sparse] == list(range(160, 184))


@pytest.mark.slow
def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    manifest = committed(tmp_path, strategy=HOSTILE, params={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE})
    manifest["input"]["uri"] = HOSTILE
    manifest["seconds"] = {HOSTILE: 1.0}
    manifest["interval"] = {"ds": HOSTILE}
    shards = shard_set(tmp_path, manifest)
    # Reading refuses such a fingerprint, which may not reach the page from anywhere else either.
    shards = replace(shards, manifest=replace(shards.manifest, input=Input(uri=HOSTILE, fingerprint=HOSTILE)))
    measured, sample, sparse = measure(shards)
    page = Page(report.render(shards.manifest, measured, sample, sparse))
    tags = [tag for tag, _ in page.tags]
    assert "script" not in tags
    assert "b" in tags  # the page's own, so that the next line means something
    assert all(not name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert all(source.startswith("data:image/") for source in page.sources())
    assert page.text.count(HOSTILE) >= 6
    row = report.comparison_row(shards.manifest, measured)
    assert "script" not in {tag for tag, _ in Page(report.render_comparison([row])).tags}


@pytest.mark.full
def test_the_same_set_gives_the_same_bytes(tmp_path: Path) -> None:
    manifest = committed(tmp_path)
    shards = shard_set(tmp_path, manifest)
    collected = measure(shards)
    assert report.render(shards.manifest, *collected) == report.render(shards.manifest, *collected)


@pytest.mark.full
@pytest.mark.parametrize("shape", [(1, 28, 28), (2, 5, 5), (4, 6, 6), (3, 1, 1)])
def test_grey_and_odd_images_are_reported(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    page = page_of(tmp_path, committed(tmp_path, 60, shape=shape))
    assert f"{shape[0]} x {shape[1]} x {shape[2]} uint8" in page.text


def test_one_worker_is_reported_without_comparisons(tmp_path: Path) -> None:
    images, labels = make_images(40)
    page = page_of(tmp_path, commit(tmp_path, images, labels * 0, np.zeros(40, int), 1))
    assert "One worker holds all 40 examples" in page.text
    assert "Shard quality" not in page.text
    assert "Images picked evenly" in page.text
    assert "of each whole shard" not in page.text


@pytest.mark.full
def test_an_empty_shard_and_a_single_example_are_reported(tmp_path: Path) -> None:
    images, labels = make_images(1)
    manifest = commit(tmp_path, images, labels * 0, np.zeros(1, int), 2)
    assert "At least one shard is empty" in page_of(tmp_path, manifest).text


@pytest.mark.full
def test_many_workers_and_classes_fold_the_table_and_stay_small(tmp_path: Path) -> None:
    images, _ = make_images(1200)
    labels = np.arange(1200) % 120
    manifest = commit(tmp_path, images, labels, np.arange(1200) // 3 % 60, 60, files_per_worker=1)
    manifest["labels"]["num_classes"] = 120
    shards = shard_set(tmp_path, manifest)
    source = report.render(shards.manifest, *measure(shards))
    assert len(source) < 3_000_000
    assert "Table of 60 workers" in Page(source).text
    assert "the 100 of 120 classes that stray farthest" in Page(source).text


@pytest.mark.slow
def test_the_verdict_tells_better_from_random_from_worse(tmp_path: Path) -> None:
    images, labels = make_images(600)
    order = np.argsort(labels, kind="stable")
    even, sorted_ = np.empty(600, int), np.empty(600, int)
    even[order], sorted_[order] = np.arange(600) % 4, np.arange(600) // 150
    chance = np.random.default_rng(3).permutation(600) % 4
    levels = []
    for name, worker in (("even", even), ("chance", chance), ("sorted", sorted_)):
        manifest = commit(tmp_path / name, images, labels, worker, 4)
        measured, *_ = measure(shard_set(tmp_path / name, manifest))
        levels.append([finding.level for finding in verdict(measured) if finding.text.startswith("Classes")])
    assert levels == [["better"], ["as random"], ["worse"]]
    assert verdict(measured)[-1].level == "worse"  # the images of the sorted split
    assert_skew_is_told(shard_set(tmp_path / "sorted", manifest), labels, sorted_)


def assert_skew_is_told(shards: ShardSet, labels: np.ndarray, worker: np.ndarray) -> None:
    """The page and the entry of the comparison have the figures of SciPy."""
    table = np.array([np.bincount(labels[worker == each], minlength=labels.max() + 1) for each in range(4)])
    shares, whole = table / table.sum(axis=1, keepdims=True), table.sum(axis=0) / table.sum()
    total_variation = np.mean([abs(share - whole).sum() / 2 for share in shares])
    effective = np.mean([np.exp(entropy(share)) for share in shares])
    measured, images, sparse = measure(shards)
    text = Page(report.render(shards.manifest, measured, images, sparse)).text
    assert f"The class shares of a shard differ by {total_variation:.3f} from those of all rows" in text
    assert (
        f"a shard is as diverse as {effective:.1f} equally frequent classes, the whole set as {np.exp(entropy(whole)):.1f}"
        in text
    )
    row = json.loads(json.dumps(report.comparison_row(shards.manifest, measured)))
    assert row["total_variation"] == pytest.approx(total_variation)
    assert row["effective_classes"] == pytest.approx(effective)
    assert row["jensen_shannon"] == pytest.approx(np.mean([jensenshannon(share, whole, 2) ** 2 for share in shares]))


def test_neighbourhoods_are_said_to_be_by_size_where_they_are() -> None:
    """A stream numbers its buckets as they come up."""
    for sizes, label in (((9, 5, 5, 1), "neighbourhood, by size"), ((5, 9, 1, 5), "neighbourhood")):
        figure = figures.neighbourhood_sizes([Neighbourhood(size, sparse=False) for size in sizes], 2)
        assert figure.axes[0].get_xlabel() == label


def test_an_empty_neighbourhood_is_neither_counted_nor_drawn(tmp_path: Path) -> None:
    manifest = committed(tmp_path)
    manifest["neighbourhoods"].append({"size": 0, "sparse": False})
    assert "The 2 dense ones are divided evenly" in page_of(tmp_path, manifest).text
    figure = figures.neighbourhood_sizes([Neighbourhood(size, sparse=False) for size in (9, 1, 0)], 2)
    assert [bar.get_height() for bar in figure.axes[0].patches if isinstance(bar, Rectangle)] == [8.5, 0.5, 0]


def test_very_many_workers_are_outlines_of_their_extremes() -> None:
    """A bar per worker would take half a minute for 10,000 workers."""
    rng = np.random.default_rng(0)
    for workers, by_column in ((401, 1), (4_500, 3)):
        owners, copies = rng.integers(5, 50, workers), rng.integers(1, 9, workers)
        (axes,) = figures.shard_sizes(owners.tolist(), copies.tolist()).axes
        outlines: dict[str, Any] = {
            str(patch.get_label()): patch.get_data() for patch in axes.patches if isinstance(patch, StepPatch)
        }
        groups = [slice(first, first + by_column) for first in range(0, workers, by_column)]
        expected = {
            "copies": [(owners + copies)[group].max() for group in groups],
            f"own rows: most of {by_column} workers" if by_column > 1 else "own rows": [
                owners[group].max() for group in groups
            ],
        }
        if by_column > 1:
            expected[f"fewest of {by_column} workers"] = [owners[group].min() for group in groups]
        assert {label: data.values.tolist() for label, data in outlines.items()} == expected
        for data in outlines.values():
            assert (data.edges[0], data.edges[-1], len(data.edges)) == (-0.5, workers - 0.5, len(groups) + 1)


@pytest.mark.slow
def test_copies_of_sparse_groups_are_what_was_asked_for(tmp_path: Path) -> None:
    measured, *_ = measure(shard_set(tmp_path, committed(tmp_path)))
    assert [f.level for f in verdict(measured) if "copies" in f.text] == ["note"]


@pytest.mark.full
def test_write_report_stores_the_page_the_figures_and_the_words(tmp_path: Path) -> None:
    manifest = committed(tmp_path)

    def write(path: str, data: bytes) -> None:
        (tmp_path / path).write_bytes(data)

    measured = report.write_report(shard_set(tmp_path, manifest), write)
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    stored = json.loads((tmp_path / "quality.json").read_text())
    words = [finding._asdict() for finding in verdict(measured)]
    assert stored == {**measured.to_dict(), "verdict": words}
    assert {"level", "text"} == set(words[0])


def test_nothing_is_written_for_a_damaged_set(tmp_path: Path) -> None:
    manifest = committed(tmp_path)
    manifest["rows"] += 1
    written: list[str] = []
    with pytest.raises(DataError, match="the shards own 240 examples"):
        report.write_report(shard_set(tmp_path, manifest), lambda path, _: written.append(path))
    assert written == []


@pytest.mark.slow
def test_the_comparison_shows_every_strategy_beside_a_random_split(tmp_path: Path) -> None:
    manifest = committed(tmp_path)
    shards = shard_set(tmp_path, manifest)
    measured, *_ = measure(shards)
    first = report.comparison_row(shards.manifest, measured)
    second = {
        **first,
        "name": "stratified",
        "neighbourhood_chi_square_per_dof": None,
        "seconds": {"fit": 2.5},
    }
    page = Page(report.render_comparison(json.loads(json.dumps([first, second]))))
    for text in ("distribution_aware", "stratified", "random split", "scan", "write", "fit"):
        assert text in page.text
    assert re.search(r"stratified\s*-\s*-\s*2\.5\s*2\.50", page.text)  # no scan, no write, fit, total
    assert len(page.sources()) == 5  # seconds, distance, distance inside classes, classes, neighbourhoods


@pytest.mark.slow
def test_the_most_uneven_classes_keep_their_own_numbers() -> None:
    table = np.full((4, 120), 10)
    table[:, 110:] = [[40], [0], [0], [0]]  # ten classes that one worker holds alone
    (ax,) = figures.class_boxes(table).axes
    drawn = ax.xaxis.get_major_formatter()
    assert [drawn(position, None) for position in range(90, 100)] == [str(label) for label in range(110, 120)]
    assert drawn(100, None) == ""


def test_the_band_of_a_random_split_never_promises_negative_counts() -> None:
    (ax,) = figures.class_boxes(np.array([[1, 9], [0, 8], [0, 9]])).axes
    assert ax.get_ylim()[1] > 8
    assert min(band.get_y() for band in ax.containers[0]) == 0


@pytest.mark.usefixtures("undrawn")
def test_a_report_ends_with_its_origin(tmp_path: Path) -> None:
    made = {"time": "2026-01-10 00:00:00 UTC", "command": "sharding shard --seed 1", "host": "h", "master": "local[2]"}
    text = page_of(tmp_path, committed(tmp_path, made=made)).text
    for value in made.values():
        assert value in text.partition("Origin")[2]
    assert "Committed 2026-01-10 00:00:00 UTC on host h" in text
    assert "not recorded" not in text


def test_an_older_set_has_an_unknown_origin(page: Page) -> None:
    assert re.search(r"command\s*not recorded", page.text)


def test_settings_have_meanings_and_stand_apart_from_results(tmp_path: Path) -> None:
    manifest = committed(tmp_path)
    manifest["params"]["iterations"] = 12
    settings, fitted = report.split_params(Manifest.from_json(manifest))
    assert [(row.name, row.value) for row in fitted] == [("iterations", "12")]
    assert {row.name: row.meaning for row in settings}["clusters"] == DistributionAware.meanings()["clusters"] != ""


@pytest.mark.slow
def test_figures_name_classes_where_names_fit() -> None:
    table = np.random.default_rng(0).integers(90, 110, (4, 10))
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    numbers = [str(number) for number in range(10)]
    for draw in (figures.class_heat_map, figures.class_boxes):
        for given, shown in (
            (names, names),
            ([], numbers),
            (names[:9], numbers),
            (["a long name " * 3] * 10, numbers),
            (["\u732b", *names[1:]], numbers),  # no letter of the font
            (["a$^$", *names[1:]], ["a$^$", *names[1:]]),
        ):
            with style():
                figure = draw(table, given)
                figure.savefig(io.BytesIO(), format="svg")
            ax = figure.axes[0]
            assert ax.xaxis.get_major_formatter().format_ticks(ax.get_xticks().tolist()) == shown


def test_reports_of_several_threads_leave_matplotlibs_settings_alone() -> None:
    before = dict(rcParams)
    thread = Thread(target=enter_style)
    with style():
        thread.start()
        thread.join(0.2)
        assert thread.is_alive(), "it waits for its turn"
    thread.join()
    assert dict(rcParams) == before


def enter_style() -> None:
    with style():
        pass
