"""Folders of image files: classes by folder, splits by folder, sizes and colours by flags, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.core.errors import DataError
from pipeline.core.storage.store import Store
from pipeline.input import converted
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.formats import image_folder
from pipeline.input.read_options import ReadOptions
from pipeline.input.resize import resize

IMAGES = np.random.default_rng(3).integers(0, 256, (8, 5, 4, 3), dtype=np.uint8)


def write(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def find(path: Path, *, evaluation: bool = False, names: tuple[str, ...] = (), **options: Any) -> Dataset:
    return discover(
        Store(),
        str(path),
        run=serial,
        read_options=ReadOptions(**options),
        evaluation=evaluation,
        class_names=names,
    )


def rows_of(dataset: Dataset) -> tuple[list[int], np.ndarray]:
    """Labels, and images [rows, H, W, C]."""
    blocks = list(dataset.read(0, dataset.rows))
    pixels = np.concatenate([block.images for block in blocks]).reshape(-1, *dataset.layout.shape)
    return np.concatenate([block.labels for block in blocks]).tolist(), np.moveaxis(pixels, 1, 3)


def make_folders(root: Path) -> None:
    for name, number in (
        ("dog/2.png", 0),
        ("dog/10.png", 1),
        ("cat/a.bmp", 2),
        ("cat/deeper/b.png", 3),
        ("ant.x/c.png", 4),
    ):
        write(root / name, IMAGES[number])


def test_classes_are_sorted_folders_and_rows_sorted_paths(tmp_path: Path) -> None:
    make_folders(tmp_path)
    (tmp_path / "dog/Thumbs.db").write_bytes(b"x")
    (tmp_path / ".cache").mkdir()
    dataset = find(tmp_path)
    assert (dataset.format, dataset.layout.class_names) == ("image-folder", ("ant.x", "cat", "dog"))
    labels, images = rows_of(dataset)
    assert labels == [0, 1, 1, 2, 2]
    assert np.array_equal(images, IMAGES[[4, 2, 3, 1, 0]])
    assert [block.labels.tolist() for block in dataset.read(1, 4, images=False)] == [[1, 1], [2]]
    assert dataset.where(2).endswith("/cat, image 1 in the order of names")


def test_images_of_other_suffixes_are_rows(tmp_path: Path) -> None:
    names = ("0.ppm", "1.pnm", "2.jfif", "3.JPE")
    for number, name in enumerate(names):
        kind = "PPM" if number < 2 else "JPEG"
        (tmp_path / "cat").mkdir(exist_ok=True)
        Image.fromarray(IMAGES[number]).save(tmp_path / "cat" / name, kind)
    labels, images = rows_of(find(tmp_path))
    assert labels == [0] * 4
    assert np.array_equal(images[:2], IMAGES[:2])


def test_files_of_other_suffixes_are_counted(tmp_path: Path) -> None:
    make_folders(tmp_path)
    assert find(tmp_path).remarks() == []
    for folder in ("dog", "cat", "cat/deeper"):
        for name in ("a.tga", "b.csv"):
            (tmp_path / folder / name).write_bytes(b"x")
    (tmp_path / "cat/.hidden").write_bytes(b"x")
    words = "files without the suffix of an image file, such as"
    cats, dogs = find(tmp_path).remarks()
    assert cats == f"{tmp_path}/cat leaves out 4 {words} {tmp_path}/cat/a.tga"
    assert dogs == f"{tmp_path}/dog leaves out 2 {words} {tmp_path}/dog/a.tga"
    for number in range(3):
        write(tmp_path / f"x{number}/a.png", IMAGES[0])
        (tmp_path / f"x{number}/a.tga").write_bytes(b"x")
    lines = find(tmp_path).remarks()
    assert len(lines) == 4
    assert lines[3] == "the same holds for 2 more of the files"
    (tmp_path / "new").mkdir()
    (tmp_path / "new/a.tga").write_bytes(b"x")
    with pytest.raises(DataError, match=rf"new holds no image files, but 1 {words} .*/new/a\.tga; name the folder"):
        find(tmp_path)


def test_numbered_folders_number_the_classes(tmp_path: Path) -> None:
    for number in (0, 2, 10):
        write(tmp_path / f"{number}/a.png", IMAGES[0])
    dataset = find(tmp_path)
    assert rows_of(dataset)[0] == [0, 10, 2]
    assert dataset.layout.class_names == ()


def test_folders_of_splits_are_entered(tmp_path: Path) -> None:
    for name, number in (("train/b/1.png", 0), ("train/a/1.png", 1), ("val/b/2.png", 2), ("test/b/3.png", 3)):
        write(tmp_path / name, IMAGES[number])
    training = find(tmp_path)
    assert np.array_equal(rows_of(training)[1], IMAGES[[1, 0]])
    held_out = find(tmp_path, evaluation=True, names=training.layout.class_names)
    labels, images = rows_of(held_out)
    assert labels == [1]  # b, as in the training folders
    assert np.array_equal(images, IMAGES[[3]])
    write(tmp_path / "test/c/4.png", IMAGES[4])
    with pytest.raises(DataError, match="the evaluation files have the class 'c', which the input lacks"):
        find(tmp_path, evaluation=True, names=training.layout.class_names)


def test_folders_of_splits_are_entered_beside_other_files(tmp_path: Path) -> None:
    for name, number in (("train/cat/1.png", 0), ("train/dog/1.png", 1), ("val/cat/1.png", 2)):
        write(tmp_path / name, IMAGES[number])
    (tmp_path / "README.txt").write_text("about")
    with pytest.raises(DataError, match="is a folder inside the input"):
        find(tmp_path)
    assert find(tmp_path, format="image-folder").layout.class_names == ("cat", "dog")


def test_classes_of_partition_folders_and_patterns(tmp_path: Path) -> None:
    write(tmp_path / "x/label=1/a.png", IMAGES[1])
    write(tmp_path / "x/label=0/a.png", IMAGES[0])
    assert rows_of(find(tmp_path / "x"))[0] == [0, 1]
    make_folders(tmp_path / "y")
    assert find(tmp_path / "y/*").layout.class_names == find(tmp_path / "y").layout.class_names


@pytest.mark.parametrize("order", ["split={}/label={}", "label={1}/split={0}"])
def test_partition_folders_tell_splits_and_classes(order: str, tmp_path: Path) -> None:
    for row, (split, name) in enumerate((("train", "test"), ("train", "cat"), ("test", "cat"))):
        write(tmp_path / order.format(split, name) / "a.png", IMAGES[row])
    training = find(tmp_path)
    assert training.layout.class_names == ("cat", "test")
    assert sorted(rows_of(training)[0]) == [0, 1]
    held_out = find(tmp_path, evaluation=True, names=training.layout.class_names)
    assert np.array_equal(rows_of(held_out)[1], IMAGES[[2]])


def test_a_folder_of_images_alone_has_no_labels(tmp_path: Path) -> None:
    for number in (0, 1):
        write(tmp_path / f"{number}.png", IMAGES[number])
    with pytest.raises(
        DataError, match=r"has no labels: the folders below the input are the classes; give --unlabelled"
    ):
        find(tmp_path)
    labels, images = rows_of(find(tmp_path, unlabelled=True))
    assert labels == [0, 0]
    assert np.array_equal(images, IMAGES[:2])


def test_images_of_several_sizes_need_resize(tmp_path: Path) -> None:
    make_folders(tmp_path)
    write(tmp_path / "cat/large.png", np.repeat(np.repeat(IMAGES[5], 3, 0), 2, 1))
    write(tmp_path / "cat/grey.png", IMAGES[6, :, :, 0])
    with pytest.raises(
        DataError, match=r"grey\.png: the image is 1x5x4, the first one 3x5x4; --channels 1 or 3 converts"
    ):
        rows_of(find(tmp_path))
    with pytest.raises(DataError, match=r"large\.png: the image is 3x15x8, the .*; --resize 5x4 makes sizes equal"):
        rows_of(find(tmp_path, channels=3))
    labels, images = rows_of(find(tmp_path, channels=3, resize=(6, 3)))
    assert labels == [0, 1, 1, 1, 1, 2, 2]
    large = np.repeat(np.repeat(IMAGES[5], 3, 0), 2, 1).transpose(2, 0, 1)
    assert np.array_equal(images[4], resize(large, (6, 3)).transpose(1, 2, 0))


def test_resized_images_are_decoded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_folder, "DECODED_BYTES", 60)  # of one image
    monkeypatch.setattr(converted, "DECODED_BYTES", 60)
    make_folders(tmp_path)
    assert {file.decode_rows for file in find(tmp_path).files} == {1}
    assert [file.decode_rows for file in find(tmp_path, resize=(2, 4)).files] == [1, 2, 2]


def test_a_declared_shape_is_compared_with_image_files(tmp_path: Path) -> None:
    make_folders(tmp_path)
    with pytest.raises(
        DataError, match=r"holds 3x5x4 images.*, not --image-shape 3x6x4; leave it out, or --resize 6x4"
    ):
        find(tmp_path, shape=(3, 6, 4))
    assert find(tmp_path, shape=(3, 6, 4), resize=(6, 4)).layout.shape == (3, 6, 4)
    assert find(tmp_path, shape=(3, 5, 4)).rows == 5


def test_raw_images_are_resized_after_they_are_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=np.arange(8))
    images = rows_of(find(tmp_path, resize=(2, 7), channels=1))[1]
    dataset = find(tmp_path, channels=1)
    plain = rows_of(dataset)[1].transpose(0, 3, 1, 2)
    assert np.array_equal(images[..., 0], np.stack([resize(image, (2, 7))[0] for image in plain]))


def test_mistakes_have_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty/cat").mkdir(parents=True)
    with pytest.raises(DataError, match="cat holds no image files; name the folder above the folders of the classes"):
        find(tmp_path / "empty")
    make_folders(tmp_path / "mixed")
    (tmp_path / "mixed/labels.csv").write_text("x")
    with pytest.raises(DataError, match=r"is a folder inside the input; .* --format image-folder"):
        find(tmp_path / "mixed")
    assert find(tmp_path / "mixed", format="image-folder").rows == 5
    (tmp_path / "mixed/dog/10.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"dog/10\.png: the image has 8 bytes"):
        rows_of(find(tmp_path / "mixed", format="image-folder"))


def test_a_folder_that_changes_after_its_survey_is_noticed(tmp_path: Path) -> None:
    make_folders(tmp_path)
    dataset = find(tmp_path)
    write(tmp_path / "dog/0.png", IMAGES[7])
    with pytest.raises(DataError, match=r"dog: its files changed while they were read"):
        rows_of(dataset)
