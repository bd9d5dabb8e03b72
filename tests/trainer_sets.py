"""What tests of whole runs share: small shard sets of the same images, and where this machine can be reached."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import psutil

from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.strategies.round_robin import RoundRobin
from pipeline.strategies.stratified import Stratified
from tests.conftest import make_rows, write_binary

SHAPE = (3, 8, 8)


def make_sets(spark: Any, root: Path, *counts: int, seed: int = 1, ratios: Any = None) -> dict[int, Path]:
    """The same 720 training and 200 evaluation images, sharded for each number of workers. ratios: of a single number's
    shards, which are then dealt round robin."""
    strategy = RoundRobin() if ratios else Stratified()
    labels, images = make_rows(920, seed=seed, pixels=192)
    write_binary(root / "train", labels[:720], images[:720])
    write_binary(root / "test", labels[720:], images[720:])
    for workers in counts:
        request = Request(
            input=str(root / "train"),
            eval_input=str(root / "test"),
            output=str(root / f"shards-{workers}"),
            num_workers=workers,
            shape=SHAPE,
            format="cifar10-binary",
            ratios=ratios,
        )
        shard(spark.sparkContext, request, strategy, PhaseLog(quiet=True))
    return {workers: root / f"shards-{workers}" for workers in counts}


def copy_of(shards: Path, target: Path) -> Path:
    """A set that a test may damage."""
    return Path(shutil.copytree(shards, target))


def own_address(family: socket.AddressFamily = socket.AF_INET) -> str | None:
    """An address of this machine that others may use, neither loopback nor of one link only, if it has one."""
    for addresses in psutil.net_if_addrs().values():
        for address in addresses:
            if address.family == family and not address.address.startswith(("127.", "::1", "fe80:")):
                return str(address.address)
    return None
