"""The start of the processes that read a set: it must be the one on which the run began."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError
from tests.support.configs import make_config
from tests.support.trainer_sets import rows_of, write_shards
from trainer.config import RunFacts
from trainer.context import RunContext
from trainer.data.opening import open_shards
from trainer.evaluation import process as evaluator
from trainer.home.folders import Folders
from trainer.lifecycle import prepare
from trainer.transport.sockets import Secret
from trainer.worker import process as worker


@pytest.mark.parametrize("role", ["worker", "evaluator", "prepare", "part"])
@pytest.mark.parametrize(
    ("workers", "generation"), [(2, None), (3, None), (2, 1)], ids=["rows", "workers", "generations"]
)
def test_a_process_of_a_set_that_was_replaced_ends(
    role: str, workers: int, generation: int | None, tmp_path: Path
) -> None:
    """Its rows would not be those of the other processes."""
    shards = write_shards(tmp_path / "set", [rows_of(20, 2), rows_of(20, 3, 100)], None)
    digest = open_shards(str(shards)).digest
    write_shards(tmp_path / "set", [rows_of(20, 4 + worker, 100 * worker) for worker in range(workers)], None)
    assert open_shards(str(shards)).digest != digest
    values: dict[str, Any] = {"model": "logistic", "steps": 1, "batch_size": 6, "generation": generation}
    config = make_config(shards, output=str(tmp_path / "run"), **values)
    facts = RunFacts(2, 40, 1, 0, shards=digest)
    folders = Folders.from_home(tmp_path / "run")
    starts: dict[str, Callable[[], object]] = {
        "worker": partial(worker.main, config, facts, 1, ["ipc://@none"], Secret("token"), 1, 0, folders),
        "evaluator": partial(evaluator.main, config, folders, facts.shards),
        "prepare": partial(prepare.main, config, facts.shards, None, False, False, Pipe()[1]),
        "part": RunContext.from_config(config, digest=facts.shards).opened,
    }
    with pytest.raises(DataError, match="was replaced by another set while this run used it"):
        starts[role]()
