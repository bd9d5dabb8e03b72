"""The generated data set: its bytes, its layout, and that sharding finds in it what it was made to hold."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score

from pipeline.core.errors import JobError
from pipeline.datasets.synthetic import (
    Dice,
    SampleRows,
    SampleSpec,
    digest,
    files_of,
    isolated_pattern,
    scene_image,
    subgroups,
    training_batches,
    write,
)
from tests.support.exit_codes import ended

SMALL = SampleSpec(rows=1003, test_rows=50, classes=4, seed=5)


@pytest.fixture(scope="module")
def batches() -> list[SampleRows]:
    return training_batches(SampleSpec())


@pytest.fixture(scope="module")
def groups(batches: list[SampleRows]) -> npt.NDArray[np.int64]:
    return np.concatenate([batch.groups for batch in batches])


@pytest.fixture(scope="module")
def points(batches: list[SampleRows]) -> npt.NDArray[np.float64]:
    """The plain preset: 50 principal components, not whitened."""
    pixels = np.concatenate([batch.images.reshape(len(batch.labels), -1) for batch in batches])
    found: npt.NDArray[np.float64] = PCA(50, svd_solver="arpack", random_state=0).fit_transform(
        pixels.astype(np.float64)
    )
    return found


def test_the_default_sample_has_these_very_bytes_on_every_machine() -> None:
    assert digest(files_of(SampleSpec())) == "7de965916c74bd3a1d073719c3504331778e4ccbd32ae75a7db3f6dc8ab84b53"


def test_dice_follow_the_raw_stream_that_numpy_keeps_stable() -> None:
    raw = np.random.PCG64(np.random.SeedSequence([7, 1])).random_raw(4)
    assert Dice(7, 1).draw_below(1000, 4).tolist() == [int(word) % 1000 for word in raw]
    assert Dice(7, 1).bytes(11).tobytes() == b"".join(int(word).to_bytes(8, "little") for word in raw)[:11]
    assert sorted(Dice(7, 1).shuffled(100).tolist()) == list(range(100))


def test_another_seed_gives_other_images_of_the_same_scenes() -> None:
    first, second = files_of(SMALL), files_of(SampleSpec(1003, 50, 4, seed=6))
    assert first.keys() == second.keys()
    assert first["batches.meta.txt"] == second["batches.meta.txt"]
    assert all(first[name] != second[name] for name in first if name.endswith(".bin"))


def test_files_are_in_the_official_layout() -> None:
    files = files_of(SMALL)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)]
    assert sorted(files) == sorted([*names, "test_batch.bin", "batches.meta.txt"])
    assert [len(files[name]) // 3073 for name in names] == [201, 201, 201, 200, 200]
    assert len(files["test_batch.bin"]) == 50 * 3073
    assert files["batches.meta.txt"].decode().split() == ["disc", "square", "ring", "plus"]
    records = np.frombuffer(b"".join(files[name] for name in names), dtype=np.uint8).reshape(-1, 3073)
    assert np.bincount(records[:, 0]).tolist() == [251, 251, 251, 250]


def test_a_record_is_the_label_and_then_one_plane_a_channel(batches: list[SampleRows]) -> None:
    record = np.frombuffer(batches[0].records()[3073 : 2 * 3073], dtype=np.uint8)
    assert record[0] == batches[0].labels[1]
    for channel in range(3):
        plane = record[1 + 1024 * channel : 1025 + 1024 * channel]
        assert np.array_equal(plane.reshape(32, 32), batches[0].images[1, channel])


def test_every_class_hides_subgroups_of_clearly_unequal_size() -> None:
    for label in range(10):
        shares = sorted((percent for owner, _, percent in subgroups(SampleSpec()) if owner == label), reverse=True)
        assert 2 <= len(shares) <= 4
        assert sum(shares) == 100
        assert shares[0] >= 1.5 * shares[1]


@pytest.mark.full
def test_a_few_patterns_are_far_from_all_others(groups: npt.NDArray[np.int64], points: npt.NDArray[np.float64]) -> None:
    spec = SampleSpec()
    assert np.bincount(groups)[spec.scenes :].tolist() == [1, 2, 3, 1, 2, 3]
    centres = np.array([points[groups == scene].mean(axis=0) for scene in range(spec.scenes)])
    spread = max(
        float(np.median(np.linalg.norm(points[groups == scene] - centres[scene], axis=1)))
        for scene in range(spec.scenes)
    )
    for point in points[groups >= spec.scenes]:
        assert np.linalg.norm(centres - point, axis=1).min() > 5 * spread


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
def test_kmeans_finds_the_scenes_and_isolated_patterns(
    groups: npt.NDArray[np.int64], points: npt.NDArray[np.float64], seed: int
) -> None:
    scenes = SampleSpec().scenes
    found = KMeans(20, n_init=1, max_iter=150, random_state=seed).fit_predict(points)
    assert adjusted_rand_score(groups, found) > 0.8
    sizes = np.bincount(found, minlength=20)
    tiny = np.flatnonzero(sizes < 12)
    assert len(tiny) >= 2  # broadcast to each of 12 workers
    assert (groups[np.isin(found, tiny)] >= scenes).all()  # and nothing else is


@pytest.mark.full
def test_the_spectrum_decays(points: npt.NDArray[np.float64]) -> None:
    variances = points.var(axis=0)
    assert variances[0] > 10 * variances[5] > 100 * variances[49]


def test_dealing_rows_out_in_turn_does_not_balance_the_classes(batches: list[SampleRows]) -> None:
    def worst(labels: npt.NDArray[np.int64]) -> float:
        counts = np.array([np.bincount(labels[worker::12], minlength=10) for worker in range(12)])
        return float(np.abs(counts / counts.mean(axis=0) - 1).max())

    assert worst(batches[2].labels) > 1  # some worker sees more than twice its share of a class
    stored = np.concatenate([batch.labels for batch in batches])
    shuffled = stored[np.argsort(np.random.default_rng(0).random(len(stored)))]
    assert worst(stored) > 1.5 * worst(shuffled)


@pytest.mark.parametrize("classes", [1, 2, 10, 37, 100])
def test_scenes_and_patterns_differ_for_any_number_of_classes(classes: int) -> None:
    spec = SampleSpec(rows=20 * classes, classes=classes)
    images = [scene_image(i) for i in range(spec.scenes)] + [isolated_pattern(i) for i in range(spec.isolated)]
    assert len(images) == 2 * classes
    # Beyond 42 scenes and 30 patterns the formulas come round again.
    distinct = {image.tobytes() for image in images}
    assert len(distinct) >= min(len(images), 40)
    labels = np.concatenate([batch.labels for batch in training_batches(spec)])
    assert np.bincount(labels).tolist() == [20] * classes


def test_writing_twice_keeps_the_first_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "sample",
        "--to",
        str(tmp_path / "a" / "s"),
        "--rows",
        "100",
        "--test-rows",
        "5",
        "--classes",
        "3",
    ]
    assert ended(*arguments) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a" / "s").iterdir()}
    assert ended(*arguments) == 0
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "a" / "s").iterdir()} == before
    assert capsys.readouterr().out.splitlines() == [
        f"sample: 100 training and 5 test images in {tmp_path}/a/s: written",
        f"sample: 100 training and 5 test images in {tmp_path}/a/s: already there, unchanged",
    ]
    assert os.listdir(tmp_path / "a") == ["s"]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert ended("sample", "--to", str(tmp_path), "--rows", "100", "--classes", "2") == 2
    assert "contains other files" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be written"):
        write({"good.bin": b"1", "no/such/folder.bin": b"2"}, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--rows", "199"], 2, "at least 20 per class"),
        (["--rows", f"{10**14}"], 1, "Unable to allocate"),
        (["--classes", "0"], 2, "from 1 to 100"),
        (["--classes", "101"], 2, "from 1 to 100"),
        (["--test-rows", "-1"], 2, "not be negative"),
        (["--seed", "-1"], 2, "--seed"),
    ],
)
def test_an_impossible_size_is_one_line(
    arguments: list[str], code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("sample", "--to", str(tmp_path / "s"), *arguments) == code
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_the_command_runs_by_itself_and_refuses_unknown_commands(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    run = [sys.executable, "-m", "pipeline"]
    unknown = subprocess.run([*run, "frobnicate"], cwd=root, capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "frobnicate" in unknown.stderr
    target = tmp_path / "s"
    made = subprocess.run(
        [*run, "sample", "--to", target, "--rows", "100", "--classes", "2"], cwd=root, capture_output=True
    )
    assert made.returncode == 0
    whole = b"".join((target / f"data_batch_{i}.bin").read_bytes() for i in range(1, 6))
    expected = files_of(SampleSpec(rows=100, classes=2))
    assert (
        hashlib.sha256(whole).digest()
        == hashlib.sha256(b"".join(expected[f"data_batch_{i}.bin"] for i in range(1, 6))).digest()
    )


def test_an_interruption_is_one_line_and_exit_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(argv: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeline.datasets.synthetic.main", interrupt)
    assert ended("sample", "--to", str(tmp_path / "data")) == 1
    assert capsys.readouterr().err == "error: interrupted; run the command again to continue\n"
