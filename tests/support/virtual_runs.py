"""Short runs in virtual time, of a toy loss or of real gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.configs import make_config
from trainer import Options, Result
from trainer.checkpoints.read import newest, read_vector
from trainer.simulate import SimulationSettings, simulate

QUIET = Options(silent=True, report=False)
RESUME = Options(silent=True, report=False, resume=True)
TOY: dict[str, Any] = {"batch_size": 40, "learning_rate": 0.1, "steps": 30, "epoch_checkpoints": False}


def virtual(output: Path, protocol: str = "asp", options: Options = QUIET, **values: Any) -> Result:
    """A toy run of four workers; values: of the configuration, and of what stands for the machines."""
    machines: dict[str, Any] = {"compute": "quadratic", "workers": 4, "rows": 400}
    machines |= {key: values.pop(key) for key in list(values) if key in SimulationSettings.__dataclass_fields__}
    shards = values.pop("shards", "")
    return simulate(
        make_config(shards, output, protocol=protocol, **TOY | values), SimulationSettings(**machines), options
    )


def final(result: Result) -> np.ndarray:
    version = newest(result.output / "checkpoints", verify=True)
    assert version is not None
    return read_vector(result.output / "checkpoints", version)
