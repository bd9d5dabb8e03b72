"""A small generated data set in the official CIFAR-10 binary layout, for demos and tests without a download.

The contents of the images, and their effect on sharding strategies:

* A *scene* (stripes, blobs, rings in two colours) fills the image. Scenes are the hidden sub-groups: each
  class has two to four of them, in clearly unequal shares, and KMeans finds them.
* A small *object*, whose shape is the class, lies somewhere in the scene.
* Uneven lighting and noise give the set a decaying spectrum.
* A few training images are *isolated*: one to three copies of a hard pattern in pure colours far from all
  others. With k = 2 x classes, KMeans gives several of these patterns a cluster of their own (how many
  depends on its start).
* Rows are shuffled, but in ``data_batch_3.bin`` the label depends on the position modulo four, as if four
  cameras took turns: round robin over 4, 8 or 12 workers gives them unequal classes.

Reproducibility: equal arguments give equal bytes. The only randomness is PCG64's raw 64-bit stream, which NumPy keeps
stable across versions (NEP 19; its distributions are not). All further steps are integer arithmetic, which has one
result on every platform. A test pins the SHA-256."""

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.core import command_line
from pipeline.core.arrays import Ints
from pipeline.core.errors import JobError, UsageError
from pipeline.core.storage.uri import local_folder
from pipeline.datasets.local_target import LocalTarget

Pixels = npt.NDArray[np.int16]  # grey levels before clipping to 0..255

SIDE = 32
BATCHES = 5
# data_batch_3.bin
CAMERA_BATCH = 2
CAMERAS = 4
OBJECT_SIDE = 9
# Percent of a class's rows in each of its scenes.
SHARES = {2: (72, 28), 3: (60, 28, 12), 4: (50, 27, 15, 8)}
# Scenes run from the first colour to the second.
PALETTES = (
    ((196, 220, 240), (60, 110, 170)),
    ((238, 214, 160), (150, 90, 40)),
    ((60, 130, 60), (170, 210, 110)),
    ((230, 120, 90), (110, 30, 60)),
    ((40, 40, 80), (140, 120, 200)),
    ((240, 240, 220), (120, 130, 130)),
    ((20, 90, 100), (110, 210, 200)),
    ((250, 200, 60), (190, 80, 20)),
    ((90, 60, 40), (200, 170, 140)),
    ((225, 170, 200), (130, 50, 130)),
    ((30, 60, 30), (90, 120, 40)),
    ((170, 200, 255), (250, 250, 250)),
    ((70, 20, 20), (200, 60, 40)),
    ((30, 30, 30), (120, 150, 180)),
)
# Corners of the colour cube, which no scene comes near.
PURE = ((0, 255, 0), (255, 0, 255), (0, 0, 255), (255, 0, 0), (0, 255, 255), (255, 255, 0), (0, 0, 0))
SHAPES = ("disc", "square", "ring", "plus", "cross", "triangle", "diamond", "bar", "post", "frame")


@dataclass(frozen=True)
class SampleSpec:
    """The size and seed of a sample. ``rows`` are training rows, in five files."""

    rows: int = 6000
    test_rows: int = 1000
    classes: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.classes <= 100:
            raise ValueError(f"--classes must be from 1 to 100, got {self.classes}")
        # With 20 rows per class, even the smallest scene (8 percent in SHARES) has at least one row.
        if self.rows < 20 * self.classes:
            raise ValueError(f"--rows must be at least 20 per class ({20 * self.classes} in total), got {self.rows}")
        if self.test_rows < 0:
            raise ValueError(f"--test-rows must not be negative, got {self.test_rows}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be from 0 to 2^63-1, got {self.seed}")

    @property
    def scenes(self) -> int:
        """The number of scenes.

        Scenes and isolated patterns together are 2 x classes, a suitable number of clusters."""
        return 2 * self.classes - self.isolated

    @property
    def isolated(self) -> int:
        return max(1, 6 * self.classes // 10)


@dataclass(frozen=True)
class SampleRows:
    """Generated rows with their true groups: ``groups`` numbers scenes first, then isolated patterns."""

    labels: Ints  # [rows]
    groups: Ints  # [rows]
    images: npt.NDArray[np.uint8]  # [rows, 3, 32, 32]

    def take(self, order: Ints) -> "SampleRows":
        return SampleRows(self.labels[order], self.groups[order], self.images[order])

    def records(self) -> bytes:
        """Return CIFAR-10's binary records: one label byte, then 1,024 bytes each of red, green and blue."""
        labels = self.labels.astype(np.uint8)[:, None]
        return np.hstack([labels, self.images.reshape(len(labels), 3 * SIDE**2)]).tobytes()


class Dice:
    """A source of integers from PCG64's raw stream alone (see the module's docstring)."""

    def __init__(self, *key: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence(list(key)))

    def bytes(self, *shape: int) -> npt.NDArray[np.uint8]:
        """Return random bytes, uint8 of the given shape. They use up whole words of 8 bytes of the stream."""
        size = int(np.prod(shape))
        words = np.asarray(self._bits.random_raw((size + 7) // 8), dtype="<u8")
        return words.view(np.uint8)[:size].reshape(shape)

    def draw_below(self, limit: int, *shape: int) -> Ints:
        """Return integers in [0, limit); the bias of the remainder is below 2^-40."""
        raw = np.asarray(self._bits.random_raw(int(np.prod(shape))), dtype=np.uint64).reshape(shape)
        return (raw % np.uint64(limit)).astype(np.int64)

    def shuffled(self, count: int) -> Ints:
        raw = np.asarray(self._bits.random_raw(count), dtype=np.uint64)
        return np.argsort(raw, kind="stable")


def _wave(position: Ints, period: int) -> Ints:
    """Return a triangle wave in 0..255."""
    return np.abs(2 * (position % period) - period) * 255 // period


def scene_image(scene: int) -> Pixels:
    """Return the undisturbed image of one scene, int16 [3, 32, 32]."""
    y, x = np.mgrid[0:SIDE, 0:SIDE].astype(np.int64)
    scale = 28 + 8 * (scene // 7 % 3)
    cy = 8 + 5 * (scene % 4)
    cx = 24 - 4 * (scene % 5)
    distance = (y - cy) ** 2 + (x - cx) ** 2
    textures = (
        _wave(y, scale),
        _wave(2 * x + y, 2 * scale),
        np.clip(255 - distance * 255 // (scale * scale), 0, 255),
        (x + y) * 255 // (2 * SIDE - 2),
        _wave(distance // scale, scale),
        (_wave(x, scale) * _wave(y, scale)) // 255,
        _wave(x - y, 2 * scale),
    )
    weight = textures[scene % len(textures)]
    first, second = PALETTES[scene % len(PALETTES)]
    turn = scene // len(PALETTES)  # beyond the palettes: the same colours with their channels turned
    planes = [(first[(c + turn) % 3] * (255 - weight) + second[(c + turn) % 3] * weight) // 255 for c in range(3)]
    return np.stack(planes).astype(np.int16)


def isolated_pattern(index: int) -> Pixels:
    """Return a pattern of a pure colour, of which at most a quarter is the complement, int16 [3, 32, 32]."""
    y, x = np.mgrid[0:SIDE, 0:SIDE].astype(np.int64)
    cell = 2 + index // 6 % 5
    lines = (
        (x // cell % 2 == 0) & (y // cell % 2 == 0),
        x // cell % 4 == 0,
        (x + y) // cell % 4 == 0,
        np.maximum(np.abs(2 * x - 31), np.abs(2 * y - 31)) // (2 * cell) % 4 == 0,
        y // cell % 4 == 0,
        (x - y) // cell % 4 == 0,
    )
    colour = np.array(PURE[index % len(PURE)], dtype=np.int64)[:, None, None]
    return np.asarray(np.where(lines[index % len(lines)], 255 - colour, colour), dtype=np.int16)


def object_mask(label: int) -> Ints:
    """Return the class's shape, 0 or 1 [9, 9]."""
    middle = OBJECT_SIDE // 2
    y, x = np.mgrid[-middle : middle + 1, -middle : middle + 1].astype(np.int64)
    square = np.maximum(np.abs(x), np.abs(y))
    # Integer comparisons have the same result on every platform, and so the set has the same bytes.
    shapes = (
        x * x + y * y <= 18,
        square <= 3,
        (x * x + y * y <= 20) & (x * x + y * y >= 8),
        np.minimum(np.abs(x), np.abs(y)) <= 1,
        np.abs(np.abs(x) - np.abs(y)) <= 1,
        (2 * np.abs(x) <= y + 4) & (y <= 3),
        np.abs(x) + np.abs(y) <= 4,
        np.abs(y) <= 1,
        np.abs(x) <= 1,
        (square <= 4) & (square >= 3),
    )
    return np.asarray(shapes[label % len(shapes)], dtype=np.int64)


def _object_colour(label: int) -> Ints:
    """Return the values that an object adds to red, green and blue; every ten classes use other tints."""
    tints = ((40, 40, 40), (-40, -40, -40), (48, -32, -32), (-32, 48, -32), (-32, -32, 48))
    return np.array(tints[(label + label // 10) % len(tints)], dtype=np.int64)


def subgroups(spec: SampleSpec) -> list[tuple[int, int, int]]:
    """Return (class, scene, percent of the class) of every hidden sub-group; a class's percentages add up to 100."""
    groups = []
    scene = 0
    for label in range(spec.classes):
        count = min(2 + label % 3, spec.scenes)
        for percent in SHARES.get(count, (100,)):
            groups.append((label, scene % spec.scenes, percent))
            scene += 1
    return groups


def _plan(spec: SampleSpec, rows: int, isolated: int) -> tuple[Ints, Ints]:
    """Return labels and groups of the rows, class by class.

    Classes have equal sizes, each split over its scenes by percent. Then the first rows of a class become isolated
    patterns, with one to three rows per pattern.

    Args:
        spec: the classes and scenes.
        rows: the number of rows.
        isolated: the number of isolated patterns.
    """
    sizes = [rows // spec.classes + (label < rows % spec.classes) for label in range(spec.classes)]
    labels = np.repeat(np.arange(spec.classes), sizes)
    groups = np.empty(rows, dtype=np.int64)
    starts = np.cumsum([0, *sizes])
    shares = subgroups(spec)
    for label in range(spec.classes):
        own = [(scene, percent) for owner, scene, percent in shares if owner == label]
        # Cumulative percentages, so that rounding never loses a row.
        ends = np.cumsum([percent for _, percent in own]) * sizes[label] // 100
        inside = np.searchsorted(ends, np.arange(sizes[label]), side="right")
        groups[starts[label] : starts[label + 1]] = np.array([scene for scene, _ in own])[inside]
    for pattern in range(isolated):
        start = starts[pattern]  # there is at most one pattern per class
        groups[start : start + 1 + pattern % 3] = spec.scenes + pattern
    return labels, groups


def _lighting(dice: Dice, rows: int) -> Pixels:
    """Return smooth random light, int16 [rows, 32, 32], equal on all channels: bilinear between 4 x 4 grid points."""
    positions = np.arange(SIDE) * 3 * 16 // (SIDE - 1)  # the position of a pixel on the grid, in sixteenths
    spread = np.zeros((SIDE, 4), dtype=np.int32)
    left = np.minimum(positions // 16, 2)
    spread[np.arange(SIDE), left] = 16 - (positions - 16 * left)
    spread[np.arange(SIDE), left + 1] = positions - 16 * left
    grid = (dice.bytes(rows, 4, 4) % 21).astype(np.int32) - 10
    return ((spread @ grid @ spread.T) >> 8).astype(np.int16)


def draw(spec: SampleSpec, rows: int, part: int, isolated: int) -> SampleRows:
    """Generate ``rows`` rows in class order. O(rows): about 0.1 ms and 20 KB per row.

    Args:
        spec: classes and seed.
        rows: the number of rows.
        part: the stream, which differs between training and test rows.
        isolated: the number of isolated patterns.
    """
    dice = Dice(spec.seed, part)
    labels, groups = _plan(spec, rows, isolated)
    images = np.empty((rows, 3, SIDE, SIDE), dtype=np.int16)
    for scene in range(spec.scenes):
        images[groups == scene] = scene_image(scene)
    for pattern in range(isolated):
        images[groups == spec.scenes + pattern] = isolated_pattern(pattern)
    images += _lighting(dice, rows)[:, None]
    # The order of draws (lighting, corners, noise) is part of the pinned bytes.
    corners = dice.draw_below(SIDE - OBJECT_SIDE + 1, 2, rows)
    for label in range(spec.classes):
        rows_of_label = np.flatnonzero((labels == label) & (groups < spec.scenes))
        dy, dx = np.nonzero(object_mask(label))
        for channel, tint in enumerate(_object_colour(label)):
            rows_y = corners[0, rows_of_label][:, None] + dy
            rows_x = corners[1, rows_of_label][:, None] + dx
            images[rows_of_label[:, None], channel, rows_y, rows_x] += np.int16(tint)
    noise = dice.bytes(rows, 3, SIDE, SIDE)
    images += (noise & 15).astype(np.int16) - (noise >> 4).astype(np.int16)  # a triangle over -15..15
    return SampleRows(labels, groups, np.clip(images, 0, 255).astype(np.uint8))


def training_batches(spec: SampleSpec) -> list[SampleRows]:
    """Return the rows of the five training files in file order."""
    rows = draw(spec, spec.rows, 0, spec.isolated)
    parts = np.array_split(Dice(spec.seed, 2).shuffled(spec.rows), BATCHES)
    cameras = parts[CAMERA_BATCH]
    by_label = cameras[np.argsort(rows.labels[cameras], kind="stable")]
    # Camera c fills positions c, c + 4, ... of its file with one quarter of the rows sorted by label.
    for camera, rows_of_camera in enumerate(np.array_split(by_label, CAMERAS)):
        slots = np.arange(camera, len(cameras), CAMERAS)
        # array_split makes the first pieces one row longer, which are exactly the pieces with one more slot.
        cameras[slots] = rows_of_camera
    return [rows.take(part) for part in parts]


def files_of(spec: SampleSpec) -> dict[str, bytes]:
    """Return every file of the sample by name."""
    files = {f"data_batch_{i}.bin": batch.records() for i, batch in enumerate(training_batches(spec), 1)}
    test = draw(spec, spec.test_rows, 1, 0)
    if spec.test_rows:
        files["test_batch.bin"] = test.take(Dice(spec.seed, 3).shuffled(spec.test_rows)).records()
    names = [f"{SHAPES[label % 10]}{label // 10 or ''}" for label in range(spec.classes)]
    files["batches.meta.txt"] = "".join(f"{name}\n" for name in names).encode()
    return files


def digest(files: Mapping[str, bytes]) -> str:
    """Return the SHA-256 over names and contents, in order of name."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name} {len(files[name])}\n".encode() + files[name])
    return total.hexdigest()


def _holds(folder: Path, files: Mapping[str, bytes]) -> bool:
    """True if the folder holds exactly these files (and perhaps others)."""
    return all((folder / name).is_file() and (folder / name).read_bytes() == data for name, data in files.items())


def write(files: Mapping[str, bytes], folder: Path) -> bool:
    """Write the files as a new folder, which appears complete or not at all; return False if it held them already.

    Raises UsageError if the folder holds something else, JobError if it cannot be written."""

    def fill(partial: Path) -> None:
        for name, data in files.items():
            (partial / name).write_bytes(data)

    try:
        if folder.exists():
            if not folder.is_dir():
                raise UsageError(f"{folder} is a file; give --to a folder that does not exist yet")
            # A rerun with equal options must not change the files, which other programs may be reading.
            if _holds(folder, files):
                return False
            if any(folder.iterdir()):
                raise UsageError(f"{folder} contains other files; give --to a new folder, or delete this folder")
        LocalTarget(folder).publish(fill)
    except OSError as error:
        raise JobError(f"{folder} cannot be written: {error.strerror or error}; choose another --to") from error
    return True


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.parser(
        "python -m pipeline sample",
        "Write a small generated data set in the binary layout of CIFAR-10; equal options give equal bytes.",
        "",
    )
    parser.add_argument("--to", required=True, metavar="DIR", help="local folder to create")
    # The ranges are checked by SampleSpec, which programs construct without this parser.
    parser.add_argument(
        "--rows", type=int, default=SampleSpec.rows, metavar="INT", help="training rows (default: %(default)s)"
    )
    parser.add_argument(
        "--test-rows", type=int, default=SampleSpec.test_rows, metavar="INT", help="test rows (default: %(default)s)"
    )
    parser.add_argument(
        "--classes", type=int, default=SampleSpec.classes, metavar="INT", help="classes (default: %(default)s)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=SampleSpec.seed,
        metavar="INT",
        help="seed of all random choices (default: %(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    args = parse(argv)
    try:
        spec = SampleSpec(args.rows, args.test_rows, args.classes, args.seed)
    except ValueError as error:
        raise UsageError(str(error)) from None
    files = files_of(spec)
    fresh = write(files, local_folder(args.to, "--to"))
    note = "written" if fresh else "already there, unchanged"
    print(f"sample: {spec.rows} training and {spec.test_rows} test images in {args.to}: {note}")
