"""``python -m trainer embed``: a table with the pipeline's ids, better than the mean image, the same bits after any kill."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.core.errors import DataError, UsageError
from pipeline.core.storage.store import Store
from pipeline.input.embedding_table import open_embeddings
from tests.conftest import write_binary
from tests.support.places import files_below
from trainer.embed import run as embedding
from trainer.embed.fit import ENCODED_NUMBERS, Fitting
from trainer.embed.options import Embedding
from trainer.embed.rows import draw_rows
from trainer.embed.run import METADATA_KEY, embed, table_schema
from trainer.models.networks.autoencoder import AutoEncoder, code_length
from trainer.tables import resumable
from trainer.tables.progress import TableProgress
from trainer.tables.resumable import TableFile
from trainer.tables.rows import open_rows

pytestmark = pytest.mark.slow  # processes of its own

ROWS, SIDE = 300, 8
SHAPE = (3, SIDE, SIDE)
QUIET = TableProgress(quiet=True, phase="embed")
FAST: dict[str, Any] = {"image_shape": SHAPE, "epochs": 4.0, "threads": 1, "quiet": True, "format": "cifar10-binary"}


def smooth_images(rows: int) -> npt.NDArray[np.uint8]:
    """Colour gradients of random directions and colours: more than few principal components hold."""
    rng = np.random.default_rng(3)
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    angle, phase, pace = (rng.uniform(0, top, (rows, 1, 1, 1)) for top in (2 * np.pi, 2 * np.pi, 8))
    wave = np.sin(pace * (np.cos(angle) * x + np.sin(angle) * y) + phase)
    colour = rng.uniform(20, 120, (rows, 3, 1, 1))
    images: npt.NDArray[np.uint8] = np.clip(
        128 + colour * wave + rng.normal(0, 4, (rows, 3, SIDE, SIDE)), 0, 255
    ).astype(np.uint8)
    return images


def write_source(folder: Path) -> Path:
    """``smooth_images`` of four classes, in three files."""
    labels = (np.arange(ROWS) % 4).astype(np.uint8)
    return write_binary(folder / "cifar", labels, smooth_images(ROWS).reshape(ROWS, -1), files=3)


def make_table(source: Path, folder: Path) -> Path:
    """The table of the images of a source."""
    target = folder / "table.parquet"
    assert embed(Embedding(output=str(target), input=str(source), **FAST)).fresh
    return target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("in"))


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_table(source, tmp_path_factory.mktemp("made"))


def test_the_table_has_every_id_once_in_order_and_anybody_reads_it(made: Path) -> None:
    frame = pd.read_parquet(made)
    assert frame["id"].tolist() == list(range(ROWS))
    vectors = np.stack(list(frame["embedding"]))
    assert (vectors.shape, vectors.dtype) == ((ROWS, code_length(SHAPE)), np.float32)
    assert (vectors >= 0).all()
    assert np.isfinite(vectors).all()
    assert (vectors.std(axis=0) > 0).any()
    assert [path.name for path in made.parent.iterdir()] == [made.name]  # nothing else is left
    table = open_embeddings(Store(), str(made))
    assert table.length == code_length(SHAPE)
    ids = np.concatenate([ids for part in table.parts for ids, _ in table.read(part)])
    assert ids.tolist() == list(range(ROWS))


@pytest.mark.full
def test_a_trained_network_reconstructs_better_than_the_mean(made: Path) -> None:
    """The share of variance that it tells: 0 is the mean image. Hardly trained, it is farther off."""
    assert json.loads(pq.read_schema(made).metadata[METADATA_KEY])["explained"] < 0.2
    rng = np.random.default_rng(1)
    grey = rng.integers(0, 256, (ROWS, 1, 1, 1)) + rng.normal(0, 4, (ROWS, *SHAPE))
    asked = Embedding(output="t", input="i", epochs=20.0, batch_size=60, learning_rate=1e-3)
    fitting = Fitting(asked, np.clip(grey, 0, 255).astype(np.uint8), torch.device("cpu"))
    losses: list[float] = []
    fitting.run(lambda step, loss: losses.append(loss))
    assert (fitting.step, len(losses)) == (100, 100)
    assert fitting.explained_variance() > 0.5


def test_of_very_few_rows_that_are_wanted_there_is_always_one(source: Path) -> None:
    asked = Embedding(output="t", input=str(source), image_shape=SHAPE, format="cifar10-binary")
    dataset = open_rows(Store(), asked)
    counts = [len(draw_rows(dataset, 1, seed)) for seed in range(12)]
    assert min(counts) == 1
    assert max(counts) < 8


def test_the_share_of_variance_is_that_of_its_definition() -> None:
    images = smooth_images(40)
    asked = Embedding(output="t", input="i", epochs=1.0)
    fitting = Fitting(asked, images, torch.device("cpu"))
    fitting.model.eval()
    wide = (images - images.mean(axis=(0, 2, 3), keepdims=True)) / 255
    with torch.no_grad():
        made = fitting.model(torch.from_numpy(wide.astype(np.float32))).numpy()
    total = ((wide - wide.mean(axis=0)) ** 2).sum()
    assert fitting.explained_variance() == pytest.approx(1 - ((made - wide) ** 2).sum() / total, rel=1e-4)


def test_equal_images_leave_no_variance_to_explain() -> None:
    fitting = Fitting(Embedding(output="t", input="i"), np.repeat(smooth_images(1), 3, axis=0), torch.device("cpu"))
    assert fitting.explained_variance() == 0, "the network does not reconstruct them"


@pytest.mark.full
def test_large_images_go_through_the_network_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    images = np.random.default_rng(3).integers(0, 256, (23, 3, 224, 224)).astype(np.uint8)
    fitting = Fitting(Embedding(output="t", input="i"), images, torch.device("cpu"))
    whole, sizes = Fitting.tensor, []

    def seen(self: Fitting, part: npt.NDArray[np.uint8]) -> torch.Tensor:
        sizes.append(part.size)
        return whole(self, part)

    monkeypatch.setattr(Fitting, "tensor", seen)
    fitting.explained_variance()
    vectors = fitting.encode(images)
    assert max(sizes) <= ENCODED_NUMBERS
    alone = np.concatenate([fitting.encode(images[row : row + 1]) for row in range(len(images))])
    np.testing.assert_allclose(vectors, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_a_repeated_command_gives_the_same_bytes_or_does_nothing(source: Path, made: Path, tmp_path: Path) -> None:
    """The same command gives the same bytes and the second time does nothing."""
    again = Embedding(output=str(tmp_path / "again.parquet"), input=str(source), **FAST)
    assert embed(again).fresh
    assert (tmp_path / "again.parquet").read_bytes() == made.read_bytes()
    before = (tmp_path / "again.parquet").stat().st_mtime_ns
    found = embed(again)
    assert (found.fresh, found.rows) == (False, ROWS)
    assert (tmp_path / "again.parquet").stat().st_mtime_ns == before
    other = Embedding(output=str(tmp_path / "other.parquet"), input=str(source), **{**FAST, "seed": 1})
    embed(other)
    assert (tmp_path / "other.parquet").read_bytes() != made.read_bytes()


def test_another_recipe_makes_another_table(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no flag says, such as the network, decides the vectors too."""
    asked = Embedding(output=str(tmp_path / "t.parquet"), input=str(source), **FAST)
    dataset = open_rows(Store(), asked)
    before = embedding.identity_of(asked, dataset)
    monkeypatch.setattr(embedding, "RECIPE", embedding.RECIPE + 1)
    assert embedding.identity_of(asked, dataset) != before


def vector_parts(vectors: npt.NDArray[np.float32]) -> Any:
    """The function that computes a range of a table of some vectors."""
    schema = table_schema(vectors.shape[1])

    def compute(low: int, high: int) -> pa.RecordBatch:
        column = pa.FixedSizeListArray.from_arrays(pa.array(vectors[low:high].reshape(-1)), type=schema.types[1])
        return pa.RecordBatch.from_arrays([pa.array(np.arange(low, high)), column], schema=schema)

    return compute


def test_the_table_may_lie_on_any_store(place: str, tmp_path: Path) -> None:
    """Kept in ranges, put in its place, found again, and nothing is left beside it."""
    vectors = np.random.default_rng(0).random((25, 6)).astype(np.float32)
    file = TableFile(Store(), f"{place}/day/table", "1234", METADATA_KEY)
    assert (file.read_metadata(), file.checkpoint()) == (None, None)
    file.write_checkpoint(b"first")
    file.write_checkpoint(b"second")
    assert file.checkpoint() == b"second"
    spans = [(0, 10), (10, 20), (20, 25)]
    computed: list[int] = []
    compute = vector_parts(vectors)

    def counted(low: int, high: int) -> pa.RecordBatch:
        computed.append(low)
        return compute(low, high)

    file.write_parts(spans[:2], counted, QUIET)
    file.write_parts(spans, counted, QUIET)  # as after a kill: the first two exist
    assert computed == [0, 10, 20]
    file.finish(3, table_schema(6), {"length": 6})
    assert file.read_metadata() == {"identity": "1234", "length": 6}
    assert files_below(place) == {"day/table"}
    table = open_embeddings(Store(), f"{place}/day/table")
    read = [part for each in table.parts for part in table.read(each)]
    np.testing.assert_array_equal(np.concatenate([found for _, found in read]), vectors)
    other = TableFile(Store(), f"{place}/day/table", "5678", METADATA_KEY, overwrite=True)
    other.write_parts([(0, 25)], compute, QUIET)
    other.finish(1, table_schema(6), {})
    assert other.read_metadata() == {"identity": "5678"}


class Killed(Exception):
    pass


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_write_it_goes_on_to_the_same_bytes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Every change of the store may be the last of a process: before it, or after it was made."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(resumable, "PART_ROWS", 100)
    target = tmp_path / "table.parquet"
    whole = tmp_path.parent / f"whole-{seed}.parquet"
    embed(Embedding(output=str(whole), input=str(source), **FAST))
    asked = Embedding(output=str(target), input=str(source), checkpoint_every_s=1e-9, **FAST)
    left = [0]

    def dying(name: str) -> None:
        real = getattr(Store, name)

        def change(self: Store, *args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and rng.random() < 0.5:
                raise Killed
            result = real(self, *args, **options)
            if left[0] <= 0:
                raise Killed
            return result

        monkeypatch.setattr(Store, name, change)

    for name in ("replace", "rename", "delete", "sync_folder"):
        dying(name)
    kills = 0
    for _ in itertools.count():
        left[0] = int(rng.integers(1, 12))
        try:
            embed(asked)
            break
        except Killed:
            kills += 1
            assert kills < 200
            if target.exists():
                assert len(pq.read_table(target)) == ROWS
    assert kills > 2
    assert target.read_bytes() == whole.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [target.name]


def command(*flags: object) -> list[str]:
    return [sys.executable, "-m", "trainer", "embed", *map(str, flags)]


@pytest.mark.full
def test_a_process_that_is_killed_goes_on(source: Path, made: Path, tmp_path: Path) -> None:
    target = tmp_path / "table.parquet"
    flags = ["--input", source, "--output", target, "--image-shape", "3x8x8", "--format", "cifar10-binary"]
    flags += ["--epochs", 4, "--threads", 1, "--checkpoint-every-s", "0.001"]
    process = subprocess.Popen(command(*flags), stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: any(tmp_path.glob("_table.parquet.*/checkpoint")))
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert not target.exists()
    done = subprocess.run(command(*flags), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resumes after step" in done.stderr
    assert target.read_bytes() == made.read_bytes()
    done = subprocess.run(command(*flags), capture_output=True, text=True, check=False)
    assert (done.returncode, "already made, nothing to do; 300 rows" in done.stdout) == (0, True)


def wait_for(there: Any) -> None:
    for _ in range(2400):
        if there():
            return
        time.sleep(0.05)
    raise AssertionError("it did not come")


def test_the_slower_of_two_equal_runs_finds_the_others_table(tmp_path: Path) -> None:
    """The slower of two runs of one command finds the other ones table."""
    slower, faster = (TableFile(Store(), str(tmp_path / "t.parquet"), "identity", METADATA_KEY) for _ in range(2))
    faster.write_parts([(0, 3)], vector_parts(np.ones((3, 2), np.float32)), QUIET)
    faster.finish(1, table_schema(2), {"length": 2})
    data = (tmp_path / "t.parquet").read_bytes()
    slower.finish(1, table_schema(2), {"length": 2})  # its parts went with the faster one's
    assert (tmp_path / "t.parquet").read_bytes() == data
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]
    with pytest.raises(FileNotFoundError):
        TableFile(Store(), str(tmp_path / "t.parquet"), "other", METADATA_KEY).finish(1, table_schema(2), {})


def test_the_slower_of_two_other_runs_replaces_no_table(tmp_path: Path) -> None:
    """Two commands of one --output may both have found no table when they began."""
    path = tmp_path / "t.parquet"
    slower, faster = (TableFile(Store(), str(path), identity, METADATA_KEY) for identity in ("slower", "faster"))
    for table in (slower, faster):
        assert table.read_finished() is None
        table.write_parts([(0, 3)], vector_parts(np.ones((3, 2), np.float32)), QUIET)
    faster.finish(1, table_schema(2), {})
    data = path.read_bytes()
    with pytest.raises(UsageError, match="exists, but has another configuration or input: give --overwrite"):
        slower.finish(1, table_schema(2), {})
    assert path.read_bytes() == data
    assert [path.name for path in Path(slower.work).iterdir()] == ["part-0"]
    replace(slower, overwrite=True).finish(1, table_schema(2), {})
    assert (slower.read_metadata() or {})["identity"] == "slower"
    assert [path.name for path in tmp_path.iterdir()] == ["t.parquet"]


def test_parts_of_an_earlier_start_are_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The seconds that are left follow from the rows of this start alone."""
    table = TableFile(Store(), str(tmp_path / "t.parquet"), "identity", METADATA_KEY)
    spans = [(low, low + 10) for low in range(0, 100, 10)]
    compute, clock = vector_parts(np.ones((100, 2), np.float32)), [0.0]

    def compute_in_10_s(low: int, high: int) -> pa.RecordBatch:
        clock[0] += 10
        return compute(low, high)

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    table.write_parts(spans[:7], compute, QUIET)
    table.write_parts(spans, compute_in_10_s, TableProgress(quiet=False, phase="embed"))
    said = [line.partition(" embed ")[2].strip() for line in capsys.readouterr().err.splitlines()]
    assert said == ["80 of 100 rows, 20 s left", "90 of 100 rows, 10 s left", "100 of 100 rows in 30.0 s"]


def test_new_options_leave_the_identity_of_other_tables() -> None:
    plain = Embedding(output="t", input="a")
    assert not plain.identity().keys() & {"resize", "image_column"}
    assert Embedding(output="t", input="a", resize=(8, 8)).identity()["resize"] == (8, 8)
    with pytest.raises(UsageError, match=r"--resize 0x8"):
        Embedding(output="t", input="a", resize=(0, 8))


def test_what_cannot_be_embedded_is_one_line(source: Path, made: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "t")
    with pytest.raises(UsageError, match=r"either --input or --shards"):
        Embedding(output=output)
    with pytest.raises(UsageError, match=r"leave out --format, --image-shape, --channels, --resize and --image-column"):
        Embedding(output=output, shards="s", format="parquet")
    for options, error, line in (
        ({"input": str(tmp_path / "none")}, DataError, "none does not exist; check --input"),
        ({"shards": str(tmp_path / "none")}, DataError, "none"),
        ({"input": str(source), "output": f"{source}/t.parquet"}, UsageError, "and the input .* overlap"),
        ({"input": f"{source}/*.bin", "output": f"{source}/t.bin"}, UsageError, "matches the input"),
        ({"input": str(source), "format": "gif"}, UsageError, "--format gif: choose one of"),
        ({"input": str(source), "image_shape": (3, 7, 7), "format": "cifar10-binary"}, DataError, "bytes"),
        ({"input": str(source), "device": "cuda"}, UsageError, "--device cuda: torch finds no GPU"),
        (
            {"input": str(source), "output": str(tmp_path), **FAST},
            UsageError,
            "is a folder; name the file of the table",
        ),
    ):
        if "device" in options and torch.cuda.is_available():
            continue
        with pytest.raises(error, match=line):
            embed(Embedding(**{"output": output, **options}))
    assert not (tmp_path / "t").exists()
    different = Embedding(output=str(made), input=str(source), **{**FAST, "seed": 9})
    with pytest.raises(UsageError, match=r"another configuration or input: give --overwrite"):
        embed(different)
    assert json.loads(pq.read_schema(made).metadata[METADATA_KEY])["asked"]["seed"] == 0
    done = subprocess.run(command("--output", output), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def residuals(channels: int, blocks: int) -> list[tuple[str, int, int, int]]:
    return [("Conv2d", channels, channels, 1)] * 2 * blocks


def layers(part: torch.nn.Module) -> list[tuple[str, int, int, int]]:
    """Return the kind, the channels before and after, and the stride of each convolution."""
    kinds = torch.nn.Conv2d | torch.nn.ConvTranspose2d
    convolutions = [each for each in part.modules() if isinstance(each, kinds)]
    assert {each.kernel_size for each in convolutions} == {(3, 3)}
    return [(type(each).__name__, each.in_channels, each.out_channels, each.stride[0]) for each in convolutions]


def test_the_layers_are_those_of_the_table() -> None:
    """Compare with Table 1 of He and Dube, as the module corrects it. A residual block has two convolutions."""
    model = AutoEncoder((3, 32, 32))
    assert layers(model.encoder) == [
        *[("Conv2d", 3, 64, 2), *residuals(64, 2)],
        *[("Conv2d", 64, 16, 2), *residuals(16, 2)],
        *[("Conv2d", 16, 8, 2), *residuals(8, 2)],
        *[("Conv2d", 8, 4, 1), *residuals(4, 1)],
    ]
    assert layers(model.decoder) == [
        *residuals(4, 1),
        *[("Conv2d", 4, 8, 1), *residuals(8, 2)],
        *[("ConvTranspose2d", 8, 16, 2), *residuals(16, 2)],
        *[("ConvTranspose2d", 16, 64, 2), *residuals(64, 2)],
        ("ConvTranspose2d", 64, 3, 2),
    ]
    assert sum(parameter.numel() for parameter in model.parameters()) == 345_099


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 8, 8), (3, 33, 31), (2, 1, 5)])
def test_images_of_any_size_have_vectors(shape: tuple[int, int, int]) -> None:
    model = AutoEncoder(shape)
    images = torch.rand(4, *shape)
    assert model(images).shape == images.shape
    assert model.encode(images).shape == (4, code_length(shape))
    assert code_length((3, 32, 32)) == 64
    torch.nn.functional.mse_loss(model(images), images).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
