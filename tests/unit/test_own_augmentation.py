"""Augmentations of a user's own: applied to the images of the set, the same bits for a seed, and refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.core.errors import UsageError
from pipeline.core.seeds import Purpose, generator
from tests.support import augmentations
from tests.support.configs import make_config
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import QUIET, final, virtual
from trainer.config import Config
from trainer.data.augment import normalise
from trainer.data.batches import Batches, build_batches
from trainer.data.loading import load_worker
from trainer.data.mean_image import subtracted_mean
from trainer.data.opening import open_shards
from trainer.data.own_augmentation import check_augmentation
from trainer.data.rows import Rows
from trainer.simulate import SimulationSettings, simulate
from trainer.simulation.replay import replay

OWN = "tests.support.augmentations:"
VALUES: dict[str, Any] = {"model": "logistic", "batch_size": 20, "threads": 1}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("own") / "set", [rows_of(40, 2), rows_of(40, 3, 2000)], EVAL_ROWS)


def config_for(shards: Path, name: str, **values: Any) -> Config:
    return make_config(shards, augmentation=f"{OWN}{name}", **VALUES | values)


def batches_of(shards: Path, config: Config, worker: int = 1) -> Batches:
    opened = open_shards(str(shards))
    return build_batches(config, opened, load_worker(opened, worker), worker, 2)


def test_the_function_gets_the_images_of_the_set(shards: Path) -> None:
    config = config_for(shards, "brightness", seed=5)
    made = batches_of(shards, config).make(3)
    raw = made.draw.rows.images_NCHW[made.draw.places]
    seed = int(generator(5, Purpose.AUGMENTATION, 1, 3).integers(2**63))
    changed = augmentations.brightness(torch.from_numpy(raw), torch.Generator().manual_seed(seed)).numpy()
    assert not np.array_equal(changed, raw)
    expected = normalise(changed, subtracted_mean(open_shards(str(shards))))
    assert made.tensors.images_BCHW.numpy().tobytes() == expected.tobytes()


def test_identity_is_a_run_without_augmentation(shards: Path) -> None:
    own = batches_of(shards, config_for(shards, "identity")).make(2).tensors.images_BCHW
    plain = batches_of(shards, make_config(shards, augment=False, **VALUES)).make(2).tensors.images_BCHW
    assert torch.equal(own, plain)


def test_a_run_has_the_same_bits_again(shards: Path, tmp_path: Path) -> None:
    runs = [
        simulate(
            make_config(shards, tmp_path / name, steps=6, augmentation=f"{OWN}brightness", seed=seed, **VALUES),
            SimulationSettings(),
            QUIET,
        )
        for name, seed in (("run", 0), ("again", 0), ("other", 1))
    ]
    bits = [final(each).tobytes() for each in runs]
    assert bits[0] == bits[1] != bits[2]
    assert replay(runs[0].output).is_equal


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("cut", "it must return images of the same shape and type"),
        ("scaled", "made torch.float32"),
        ("halved", "made torch.bfloat16"),
        ("elsewhere", r"made torch.uint8 .* on meta of uint8 .*, on the CPU$"),
        ("unseeded", "draws from another source than its generator"),
        ("alone", "fails for 10 images: TypeError: alone.. takes 1 positional argument but 2 were given"),
        ("impatient", "fails for 10 images: KeyError: 'contrast'"),
        ("small", "--augmentation .*:small fails for 10 images: RuntimeError: ten are too many"),
        ("absent", "has no function absent; it has: "),
    ],
)
def test_an_unusable_function_is_refused(shards: Path, name: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        check_augmentation(config_for(shards, name), open_shards(str(shards)))


def test_a_result_with_a_gradient_is_as_good_as_others(tmp_path: Path) -> None:
    rows = Rows(np.asarray(EVAL_ROWS.images_NCHW, np.float32), EVAL_ROWS.labels, EVAL_ROWS.ids)
    shards = open_shards(str(write_shards(tmp_path, [rows], None)))
    check_augmentation(config_for(tmp_path, "learned"), shards)


def test_a_failure_in_a_worker_names_the_flag(shards: Path) -> None:
    with pytest.raises(UsageError, match=r"--augmentation .*:small fails for 10 images"):
        batches_of(shards, config_for(shards, "small")).make(3)


def test_gradients_without_images_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="identity changes images of rows, --compute quadratic has none"):
        virtual(tmp_path / "run", augmentation=f"{OWN}identity")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"augment": False}, "--no-augment leaves no images for --augmentation"),
        ({"evaluation_mode": "paper"}, "--evaluation-mode paper crops and flips evaluation images"),
        ({"augmentation": "blur"}, "--augmentation must be crop-flip or module:function, got 'blur'"),
    ],
)
def test_other_options_are_refused(values: dict[str, Any], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        make_config(**{"augmentation": f"{OWN}identity"} | values)
