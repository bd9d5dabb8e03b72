import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.storage.store import Store
from pipeline.input.channels import to_channels
from pipeline.input.dataset import Dataset, discover, serial
from pipeline.input.read_options import ReadOptions
from pipeline.runs.request import Request, difference, identity
from pipeline.strategies.distribution_aware import DistributionAware
from pipeline.strategies.stratified import Stratified

EMPTY_SHARDS: list[dict[str, Any]] = [{"index": 0, "files": []}, {"index": 1, "files": []}]
GREY = np.random.default_rng(1).integers(0, 256, (6, 5)).astype(np.uint8)
RGB = np.random.default_rng(2).integers(0, 256, (6, 5, 3)).astype(np.uint8)


def image_file(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write(path: Path, *images: bytes) -> Path:
    pq.write_table(pa.table({"image": list(images), "label": [0] * len(images)}), path)
    return path


def find(path: Path, channels: int | None, **options: Any) -> Dataset:
    return discover(Store(), str(path), run=serial, read_options=ReadOptions(channels=channels, **options))


def pixels_of(dataset: Dataset) -> np.ndarray:
    rows = np.concatenate([block.images for block in dataset.read(0, dataset.rows)])
    return rows.reshape(-1, *dataset.layout.shape)


def test_grey_is_what_pillow_makes_of_every_colour() -> None:
    steps = np.arange(0, 256, 5, dtype=np.uint8)
    colours = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), -1).reshape(-1, len(steps), 3)
    grey = to_channels(np.moveaxis(colours, -1, 0), 1)
    assert np.array_equal(grey[0], np.asarray(Image.fromarray(colours).convert("L")))
    assert np.array_equal(to_channels(grey, 3), np.stack([grey[0]] * 3))
    assert to_channels(grey, 1) is grey


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("first", ["grey", "rgb"])
def test_a_file_of_grey_and_rgb_images_is_converted(first: str, channels: int, tmp_path: Path) -> None:
    images = [GREY, RGB] if first == "grey" else [RGB, GREY]
    dataset = find(write(tmp_path / "p.parquet", *map(image_file, images)), channels)
    assert dataset.layout.shape == (channels, 6, 5)
    mode = "L" if channels == 1 else "RGB"
    expected = [np.asarray(Image.fromarray(image).convert(mode)).reshape(6, 5, channels) for image in images]
    assert np.array_equal(pixels_of(dataset), np.moveaxis(np.stack(expected), -1, 1))


def test_files_of_grey_and_of_rgb_images_are_one_input(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", image_file(GREY))
    write(tmp_path / "b.parquet", RGB.transpose(2, 0, 1).tobytes())  # raw ones, converted after they are read
    pixels = pixels_of(find(tmp_path, 3, shape=(3, 6, 5)))
    assert np.array_equal(pixels[0], np.stack([GREY] * 3))
    assert np.array_equal(pixels[1], RGB.transpose(2, 0, 1))


def test_without_the_flag_the_line_names_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", image_file(RGB), image_file(GREY))
    with pytest.raises(DataError, match=r"row 1: the image is 1x6x5, the first one 3x6x5; --channels 1 or 3 converts"):
        pixels_of(find(path, None))
    write(tmp_path / "b.parquet", image_file(GREY))
    with pytest.raises(DataError, match=r"mixed layouts: .* 3x6x5 .* 1x6x5 .*; --channels 1 or 3 converts"):
        find(tmp_path, None)
    write(tmp_path / "b.parquet", image_file(GREY[:3]))
    with pytest.raises(DataError, match=r"mixed layouts: [^;]*; --channels .*, and --resize 6x5 makes sizes equal$"):
        find(tmp_path, None)


def test_grey_raw_records_keep_the_offsets_of_their_errors(tmp_path: Path) -> None:
    records = np.random.default_rng(3).integers(0, 256, (4, 3073)).astype(np.uint8)
    records[:, 0] = [1, 2, 3, 4]
    (tmp_path / "data.bin").write_bytes(records.tobytes())
    dataset = find(tmp_path / "data.bin", 1)
    assert dataset.layout.shape == (1, 32, 32)
    expected = to_channels(records[:, 1:].reshape(-1, 3, 32, 32), 1)
    assert np.array_equal(pixels_of(dataset), expected)
    (some,) = dataset.read_some(0, 4, lambda ids: ids == 2)
    assert np.array_equal(some.reshape(1, 32, 32), expected[2])
    assert "offset 6146 (record 2)" in dataset.where(2)


def test_vectors_beside_converted_images_stay_as_they_are(tmp_path: Path) -> None:
    vectors = [[0.5, 1.0, 2.0, 4.0], [1.0, 0.0, 0.0, 3.0]]
    table = {"image": [image_file(GREY), image_file(RGB)], "label": [0, 0], "vector": vectors}
    pq.write_table(pa.table(table), tmp_path / "p.parquet")
    dataset = find(tmp_path / "p.parquet", 3)
    layout = replace(dataset.layout, shape=(4, 1, 1), dtype="float32", column="vector")
    (block,) = replace(dataset, layout=layout).read(0, 2)
    assert np.array_equal(block.numbers(layout).reshape(2, 4), np.array(vectors, np.float32))


def test_what_has_no_colours_is_not_converted(tmp_path: Path) -> None:
    path = write(tmp_path / "p.parquet", bytes(4 * 30))
    with pytest.raises(DataError, match=r"p.parquet holds 4x6x5 images; --channels converts uint8 images of 1 or 3"):
        find(path, 3, shape=(4, 6, 5))
    with pytest.raises(UsageError, match=r"--channels must be 1 \(grey\) or 3 \(RGB\), got 2"):
        ReadOptions(channels=2)


def test_a_converted_set_is_another_one() -> None:
    plain = Request("a", "b", 2)
    grey = replace(plain, read_options=ReadOptions(channels=1))
    assert identity(plain, Stratified()) != identity(grey, Stratified())
    held: dict[str, Any] = {
        "strategy": "stratified",
        "params": Stratified().params(),
        "seed": 0,
        "num_workers": 2,
        "image": {"shape": [3, 8, 8], "dtype": "uint8", "layout": "CHW", "mean": [1.0, 2.0, 3.0]},
        "workers": EMPTY_SHARDS,
    }
    assert difference(ShardSet(Store(), "b", Manifest.from_json(held)), grey, Stratified()) == "channels 3, not 1"


def test_a_number_of_components_is_written_as_a_count() -> None:
    """The flag is a number or a share of the variance, so the set and the request hold a float."""
    held = DistributionAware(components=50.0)
    manifest = {"workers": EMPTY_SHARDS, "num_workers": 2, "strategy": held.name, "seed": 0, "asked": held.params()}
    committed = ShardSet(Store(), "b", Manifest.from_json(manifest))
    wanted = Request("a", "b", 2)
    assert difference(committed, wanted, DistributionAware(components=160.0)) == "components 50, not 160"
    assert difference(committed, wanted, DistributionAware(components=0.75)) == "components 50, not 0.75"
