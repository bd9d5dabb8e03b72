"""Columns of images and labels by name and of every type; names of classes from texts and from Hugging Face's metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.parts import Image, Labels, Worker
from pipeline.core.storage.store import Store
from pipeline.input.committed import layout_of
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.evaluation import check_evaluation
from pipeline.input.formats.tables.images import IMAGE_COLUMNS
from pipeline.input.formats.tables.labels import LABEL_COLUMNS
from pipeline.input.formats.tfrecord import IMAGE_FEATURES, LABEL_FEATURES
from pipeline.input.read_options import ReadOptions
from pipeline.upkeep.contents import details, shown_names
from tests.clusters.machine import ROOT
from trainer.models.metadata import ModelMetadata, from_header

IMAGES = np.random.default_rng(3).integers(0, 256, (5, 4, 3, 3), dtype=np.uint8)  # [rows, H, W, C]
PLANAR = IMAGES.transpose(0, 3, 1, 2)
RAW = [image.tobytes() for image in PLANAR]
SHAPE = (3, 4, 3)
NAMES = ["dog", "cat", "dog", "ant", "cat"]


def find(path: Path, **options: Any) -> Dataset:
    return discover(Store(), str(path), run=serial, read_options=ReadOptions(**options))


def labels_of(dataset: Dataset) -> list[int]:
    return [int(label) for block in dataset.read(0, dataset.rows, images=False) for label in block.labels]


def images_of(dataset: Dataset) -> np.ndarray:
    """The images, [rows, C, H, W]."""
    blocks = [block.images for block in dataset.read(0, dataset.rows)]
    return np.concatenate(blocks).reshape(-1, *dataset.layout.shape)


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=3)
    return path


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_texts_are_classes_in_the_order_of_their_names(kind: pa.DataType, tmp_path: Path) -> None:
    dataset = find(write(tmp_path / "a.parquet", image=RAW, label=pa.array(NAMES, pa.string()).cast(kind)), shape=SHAPE)
    assert dataset.layout.class_names == ("ant", "cat", "dog")
    assert labels_of(dataset) == [2, 1, 2, 0, 1]


def test_files_with_other_texts_share_their_classes(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", image=RAW, label=NAMES)
    write(tmp_path / "b.parquet", image=RAW[:1], label=["bee"])
    dataset = find(tmp_path, shape=SHAPE)
    assert dataset.layout.class_names == ("ant", "bee", "cat", "dog")
    assert labels_of(dataset) == [3, 2, 3, 0, 2, 1]
    assert find(tmp_path, shape=SHAPE, unlabelled=True).layout.class_names == ()


def test_a_column_of_some_files_alone_is_not_taken(tmp_path: Path) -> None:
    """A reviewer's column label, which was added on Tuesday, would give Tuesday's rows other labels than Monday's."""
    write(tmp_path / "monday.parquet", image=RAW, **{"class": [0, 1, 2, 0, 1]})
    write(tmp_path / "tuesday.parquet", image=RAW, label=[7] * 5, **{"class": [0, 1, 2, 0, 1]})
    line = r"monday\.parquet has its labels in the column class, and .*tuesday\.parquet in the column label: name one"
    with pytest.raises(DataError, match=line):
        find(tmp_path, shape=SHAPE)
    assert labels_of(find(tmp_path, shape=SHAPE, label_column="class")) == [0, 1, 2, 0, 1] * 2
    assert find(tmp_path, shape=SHAPE, unlabelled=True).rows == 10
    write(tmp_path / "monday.parquet", img=RAW, label=[0] * 5)
    with pytest.raises(
        DataError, match=r"has its images in the column img, and .* in the column image: .*--image-column"
    ):
        find(tmp_path, shape=SHAPE)


def test_folders_of_years_are_no_classes(tmp_path: Path) -> None:
    """The key y is a usual name of a label column, and of a partition by year."""
    for day, columns in (("d=1", {"label": [0] * 5}), ("d=2", {})):
        (tmp_path / "y=2026" / day).mkdir(parents=True)
        write(tmp_path / "y=2026" / day / "a.parquet", image=RAW, **columns)
    with pytest.raises(DataError, match=r"d=2/a\.parquet has no labels"):
        find(tmp_path, shape=SHAPE)
    (tmp_path / "y=2026" / "d=2").rename(tmp_path / "y=2026" / "label=2")
    with pytest.raises(DataError, match=r"has its labels in the column label, and .* in the names of folders"):
        find(tmp_path, shape=SHAPE)


def test_a_file_that_pandas_wrote_without_rows_is_left_out(tmp_path: Path) -> None:
    """Its columns have the type null, or there are none."""
    write(tmp_path / "a.parquet", image=RAW, label=[1] * 5, site=[3] * 5)
    write(tmp_path / "b.parquet", image=pa.nulls(0), label=pa.nulls(0), site=pa.nulls(0))
    pq.write_table(pa.table({}), tmp_path / "c.parquet")
    assert find(tmp_path, shape=SHAPE, columns=("site",)).rows == 5
    with pytest.raises(DataError, match=r"b\.parquet is empty: 0 rows"):
        find(tmp_path / "b.parquet", shape=SHAPE)


def test_texts_of_numbers_are_the_numbers(tmp_path: Path) -> None:
    dataset = find(write(tmp_path / "a.parquet", image=RAW, label=["10", "2", "2", "0", "10"]), shape=SHAPE)
    assert labels_of(dataset) == [10, 2, 2, 0, 10]


def test_labels_of_another_type_than_the_inputs_are_refused(tmp_path: Path) -> None:
    """Texts of numbers in one of two files, and in evaluation files only."""
    (tmp_path / "in").mkdir()
    numbers = find(write(tmp_path / "in" / "a.parquet", image=RAW, label=[3] * 5), shape=SHAPE)
    texts = find(write(tmp_path / "in" / "b.parquet", image=RAW, label=["3"] * 5), shape=SHAPE)
    advice = "; write all labels as whole numbers, or all as texts$"
    with pytest.raises(DataError, match=f"mixed layouts: .* with names as labels{advice}"):
        find(tmp_path / "in", shape=SHAPE)
    for training, evaluation in ((numbers, texts), (texts, numbers)):
        with pytest.raises(DataError, match=f"they must match{advice}"):
            check_evaluation(training, evaluation)


def test_labels_beyond_32_bits_are_refused(tmp_path: Path) -> None:
    dataset = find(write(tmp_path / "a.parquet", image=RAW, label=[0, 3_000_000_000, 1, 2, 3]), shape=SHAPE)
    with pytest.raises(DataError, match=r"near row 0: label holds 3000000000: number the classes from 0 to at"):
        labels_of(dataset)


def write_class_label(path: Path, *names: str) -> None:
    features = {"label": {"names": names, "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    about = {"huggingface": json.dumps({"info": {"features": features}})}
    table = pa.table({"image": RAW, "label": [1, 0, 1, 0, 1]}).replace_schema_metadata(about)
    pq.write_table(table, path)


def test_files_with_other_numbers_of_their_classes_are_refused(tmp_path: Path) -> None:
    write_class_label(tmp_path / "monday.parquet", "cat", "dog")
    write_class_label(tmp_path / "tuesday.parquet", "dog", "cat")
    with pytest.raises(
        DataError, match=r"tuesday.parquet names its classes dog, cat, .*monday.parquet cat, dog, .*: their"
    ):
        find(tmp_path, shape=SHAPE)


def test_a_class_label_names_its_numbers(tmp_path: Path) -> None:
    write_class_label(tmp_path / "a.parquet", "zebra", "ant")
    dataset = find(tmp_path / "a.parquet", shape=SHAPE)
    assert (dataset.layout.class_names, dataset.layout.num_classes) == (("zebra", "ant"), 2)
    assert labels_of(dataset) == [1, 0, 1, 0, 1]
    with pytest.raises(
        DataError, match=r"names its classes zebra, ant, .* and the input a, b, .*: their numbers differ"
    ):
        discover(Store(), str(tmp_path), run=serial, read_options=ReadOptions(shape=SHAPE), class_names=("a", "b"))


@pytest.mark.parametrize("about", ["{", "[]", '{"info": {"features": {"label": {"names": [1]}}}}'])
def test_metadata_of_other_programs_name_no_classes(about: str, tmp_path: Path) -> None:
    table = pa.table({"image": RAW, "label": [1, 0, 1, 0, 1]}).replace_schema_metadata({"huggingface": about})
    pq.write_table(table, tmp_path / "a.parquet")
    assert find(tmp_path / "a.parquet", shape=SHAPE).layout.class_names == ()


def test_columns_are_found_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", image=[b"no"] * 5, photo=RAW, label=["x"] * 5, species=[3, 1, 4, 1, 5])
    dataset = find(path, shape=SHAPE, image_column="photo", label_column="species")
    assert labels_of(dataset) == [3, 1, 4, 1, 5]
    assert np.array_equal(images_of(dataset), PLANAR)
    for flag in ("image_column", "label_column"):
        with pytest.raises(
            DataError, match=r"a.parquet has no column cover; its columns are image, photo, label, species"
        ):
            find(path, **{flag: "cover"})
    write(tmp_path / "b.parquet", photo=RAW, label=[0] * 5)
    with pytest.raises(
        DataError, match=r"no column image or img; its columns are .*; --image-column names another one"
    ):
        find(tmp_path / "b.parquet")
    (tmp_path / "c.bin").write_bytes(bytes(3073))
    with pytest.raises(UsageError, match="--label-column: cifar10-binary files have no columns with names"):
        find(tmp_path / "c.bin", label_column="x")


def test_a_name_of_two_columns_is_refused(tmp_path: Path) -> None:
    """Check every column that is read, kept ones too."""
    image = pa.array([bytes(12)] * 2)
    for names, kept in ((["image", "label", "label", "k"], ()), (["image", "label", "k", "k"], ("k",))):
        pq.write_table(pa.Table.from_arrays([image, *[pa.array([0, 1])] * 3], names=names), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=f"a.parquet has 2 columns {names[2]}; rename all but one"):
            find(tmp_path / "a.parquet", shape=(3, 2, 2), columns=kept)


def test_the_usual_names_are_read_and_documented(tmp_path: Path) -> None:
    """Each name alone, in the words of the README."""
    text = (ROOT / "pipeline/input/README.md").read_text()
    for image in IMAGE_COLUMNS:
        found = find(write(tmp_path / f"image-{image}.parquet", **{image: RAW, "label": [1] * 5}), shape=SHAPE)
        assert np.array_equal(images_of(found), PLANAR)
    for label in LABEL_COLUMNS[:-1]:
        found = find(write(tmp_path / f"label-{label}.parquet", **{"image": RAW, label: [3, 1, 4, 1, 5]}), shape=SHAPE)
        assert labels_of(found) == [3, 1, 4, 1, 5]
    for names in (IMAGE_COLUMNS, LABEL_COLUMNS[:-1], IMAGE_FEATURES, LABEL_FEATURES):
        assert f"`{'`, `'.join(names[:-1])}` or `{names[-1]}`" in " ".join(text.split())


NESTED = pa.list_(pa.list_(pa.list_(pa.uint8())))
FIXED = pa.list_(pa.list_(pa.list_(pa.int32(), 3), 3), 4)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (IMAGES.tolist(), NESTED),
        (IMAGES.tolist(), FIXED),
        (PLANAR.tolist(), NESTED),
        (PLANAR.reshape(5, -1).tolist(), pa.list_(pa.uint8())),
        (PLANAR.reshape(5, -1).tolist(), pa.large_list(pa.int64())),
    ],
)
def test_lists_of_numbers_are_images(values: Any, kind: pa.DataType, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", image=pa.array(values, kind), label=[0] * 5)
    assert np.array_equal(images_of(find(path, shape=SHAPE)), PLANAR)


def test_grey_lists_have_two_levels(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", image=pa.array(IMAGES[..., 0].tolist()), label=[0] * 5)
    dataset = find(path)
    assert dataset.layout.shape == (1, 4, 3)
    assert np.array_equal(images_of(dataset)[:, 0], IMAGES[..., 0])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([[[1, 2], [3, 4]], [[1, 2], [3]]], "lists of an image column are null or of different lengths"),
        ([[[1, 2], [3, 256]]], r"the image has a number outside 0\.\.255"),
        ([[[1, 2], [3, None]]], "the image has a null"),
    ],
)
def test_broken_lists_have_one_line(values: Any, words: str, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet", image=pa.array(values, pa.list_(pa.list_(pa.int64()))), label=[0] * len(values)
    )
    with pytest.raises(DataError, match=rf"a.parquet, near row 0: .*{words}"):
        images_of(find(path))


def test_lists_of_other_axes_are_refused(tmp_path: Path) -> None:
    """Refuse lists with as many numbers in other axes. Within a block of rows their lengths are equal."""
    values = [[[1, 2, 3], [4, 5, 6]]] * 2 + [[[1, 2], [3, 4], [5, 6]]] * 2
    dataset = find(write(tmp_path / "a.parquet", image=pa.array(values, pa.list_(pa.list_(pa.uint8()))), label=[0] * 4))
    assert dataset.layout.shape == (1, 2, 3)
    with pytest.raises(DataError, match=r"a.parquet, near row 2 holds uint8 images of \(3, 2\), not of \(1, 2, 3\)"):
        list(dataset.read(2, 4))


def spark_image(pixels: np.ndarray) -> dict[str, Any]:
    """[H, W, C] as Spark's image source holds it: blue, green, red, alpha."""
    height, width, channels = pixels.shape
    stored = pixels if channels == 1 else np.concatenate([pixels[..., 2::-1], pixels[..., 3:]], axis=2)
    return {
        "origin": "file:/a.png", "height": height, "width": width, "nChannels": channels,
        "mode": {1: 0, 3: 16, 4: 24}[channels], "data": stored.tobytes(),
    }  # fmt: skip


def test_spark_images_are_read(tmp_path: Path) -> None:
    opaque = np.concatenate([IMAGES[1], np.full((4, 3, 1), 255, np.uint8)], axis=2)
    path = write(tmp_path / "a.parquet", image=[spark_image(IMAGES[0]), spark_image(opaque)], label=[0, 1])
    assert np.array_equal(images_of(find(path)), PLANAR[:2])
    write(path, image=[spark_image(IMAGES[0]), spark_image(IMAGES[1, :, :, :1])], label=[0, 1])
    with pytest.raises(DataError, match=r"row 1: the image is 1x4x3, the first one 3x4x3; --channels"):
        images_of(find(path))
    assert images_of(find(path, channels=1, resize=(2, 2))).shape == (2, 1, 2, 2)
    opaque[0, 0, 3] = 9
    write(path, image=[spark_image(opaque)], label=[0])
    with pytest.raises(DataError, match="row 0: the image is transparent in places"):
        images_of(find(path))
    write(path, image=[spark_image(IMAGES[0]) | {"height": 9}], label=[0])
    with pytest.raises(DataError, match="row 0: 36 bytes are no image of 3 channels, 9x3"):
        images_of(find(path))


@pytest.mark.slow
def test_null_names_and_texts_that_never_repeat_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", image=RAW, label=["a", None, "a", "b", "a"])
    with pytest.raises(DataError, match="row 1: label is null"):
        labels_of(find(path, shape=SHAPE))
    rows = 70_000
    write(path, image=[b"123"] * rows, label=[str(number) for number in range(rows)])
    with pytest.raises(DataError, match="column label holds more than 65,536 different texts, too many for a label"):
        find(path, shape=(3, 1, 1))


def test_names_are_kept_in_the_manifest_and_in_models() -> None:
    labels = Labels(num_classes=3, class_names=["ant", "cat", "dog"])
    manifest = Manifest(
        num_workers=1, workers=[Worker(files=[])], labels=labels, image=Image([1, 2, 2], "uint8", "CHW", [0.0])
    )
    stored = Manifest.from_json(manifest.to_json())
    assert layout_of(stored).class_names == ("ant", "cat", "dog")
    assert "3 classes (ant, cat, dog)" in dict(details(ShardSet(Store(), "x", stored)))["labels"]
    assert "class_names" not in Manifest(num_workers=1, workers=[Worker(files=[])]).to_json()["labels"]
    about = ModelMetadata({}, [1, 2, 2], 3, [0.0], ["ant", "cat", "dog"], "uint8")
    assert from_header(about.to_header()) == about
    without = ModelMetadata({}, [1, 2, 2], 3, [0.0])
    assert from_header(without.to_header()) == without
    assert "class_names" not in without.to_header()["model"]
    with pytest.raises(ValueError, match="3 names of 2 classes"):
        from_header(ModelMetadata({}, [1, 2, 2], 2, [0.0], ["ant", "cat", "dog"]).to_header())
    with pytest.raises(ValueError, match="images of int8"):
        from_header(ModelMetadata({}, [1, 2, 2], 2, [0.0], dtype="int8").to_header())


def test_many_names_are_shortened() -> None:
    assert shown_names(["a", "b"]) == ["a", "b"]
    names = shown_names([str(number) for number in range(100)])
    assert (names[0], names[8], names[-1], len(names)) == ("0", "...", "99", 17)
