"""A run's result as a program reads it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
from safetensors.numpy import save_file

from trainer.run_files import MODEL
from trainer.runlog.result import Result


def test_weights_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    """A study tells runs apart by a digest of them, and the library that reads the file gives them in any order."""
    names = [f"{at:02d}.weight" for at in range(30)]
    save_file({name: np.full(3, at, np.float32) for at, name in enumerate(names)}, tmp_path / MODEL)
    found = Result.weights(cast(Result, SimpleNamespace(output=tmp_path)))
    assert list(found) == names
    assert [array[0] for array in found.values()] == list(range(30))
