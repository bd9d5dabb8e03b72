"""Exchanges without servers in virtual time: their bits and bytes, held against BSP and plain loops."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pipeline.core import command_line
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from tests.support.virtual_runs import virtual
from trainer import Result
from trainer.config import Config
from trainer.flags import build_parser, config_of
from trainer.simulation.failures import parse_failures
from trainer.simulation.network import CollectiveNetwork
from trainer.simulation.profiles import parse_profile


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("virtual"), [rows_of(60, 2), rows_of(50, 3, 2000)], EVAL_ROWS)


def config_from(*words: str) -> Config:
    common = ["--shards", "s", "--output", "o", "--steps", "3"]
    return config_of(command_line.parse(build_parser(), [*common, *words]))


def digest_of(result: Result) -> str:
    return sha256((result.output / "model.safetensors").read_bytes()).hexdigest()


# All-reduce


def test_all_reduce_has_the_bits_of_bsp(shards: Path, tmp_path: Path) -> None:
    """Repeat the run with another timing, and with a worker that dies."""
    real: dict[str, Any] = {"compute": "real", "model": "cnn", "shards": str(shards), "workers": 3, "batch_size": 12}
    real |= {"steps": 4, "profile": parse_profile("lognormal:0.5")}
    expected = virtual(tmp_path / "bsp", "bsp", **real)
    network: dict[str, Any] = {"latency_ms": 5.0, "bandwidth_mbps": 100.0, "failures": parse_failures("worker:1@0.2+1")}
    done = virtual(tmp_path / "all-reduce", "bsp", exchange="all-reduce", **real, **network)
    assert digest_of(done) == digest_of(expected)
    assert done.restarts["worker"] == 1


def test_all_reduce_sends_most_of_the_vector_twice_per_step(tmp_path: Path) -> None:
    """64 parameters of 4 workers: 2 * 3/4 * 2,048 bits a step, over a link per worker, and two latencies."""
    done = virtual(tmp_path, "bsp", exchange="all-reduce", bandwidth_mbps=0.002048, latency_ms=10.0, steps=10)
    assert done.seconds == pytest.approx(10 * (0.1 + 2 * (0.75 + 0.01)), abs=0.01)


def test_a_single_worker_of_all_reduce_sends_nothing() -> None:
    network = CollectiveNetwork(latency_s=0.5, megabits_per_s=1, vector_bytes=1e6, num_workers=1)
    assert network.reply(network.push(3.0)) == 3.0
