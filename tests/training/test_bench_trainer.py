"""The trainer's benchmark measures what it says: every part once, as small as it can be."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from tests.benchmarks import coordination as bench_coordination
from tests.benchmarks import memory as bench_memory
from tests.benchmarks import peers as bench_peers
from tests.benchmarks import throughput as bench_throughput
from tests.benchmarks import transport as bench_transport
from tests.benchmarks.ways import FLOOR_OF, MEMORY, TCP, WAYS, Case
from tests.support.trainer_sets import EVAL_ROWS, rows_of, write_shards
from trainer.protocols import PROTOCOLS

TINY = Case(numbers=1001, workers=2, servers=2)
STEPS = 20


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("bench"), [rows_of(1400, 2), rows_of(1300, 3, 2000)], EVAL_ROWS)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_every_way_makes_round_trips_that_cost_time(way: str) -> None:
    before = set(psutil.Process().children(recursive=True))
    assert bench_transport.cpu_ms(WAYS[way], TINY, 0.1) > 0
    left = set(psutil.Process().children(recursive=True)) - before
    assert all("forkserver" in " ".join(p.cmdline()) or "tracker" in " ".join(p.cmdline()) for p in left)
    assert not [process for process in left if process.name().startswith(("server", "worker"))]


@pytest.mark.full
def test_raw_tcp_answers_with_the_parameters_of_torchs_optimiser() -> None:
    numbers, pushes = 5000, 3
    parameter = torch.zeros(numbers, requires_grad=True)
    optimiser = torch.optim.SGD([parameter], lr=bench_peers.RATE, momentum=bench_peers.MOMENTUM)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=bench_peers.tcp_server, args=(listener, numbers, 1), daemon=True).start()
    ours = socket.create_connection(listener.getsockname(), timeout=30)
    header, pulled = bytearray(bench_peers.HEADER_BYTES), np.empty(numbers, np.float32)
    for seed in range(pushes):
        parameter.grad = torch.randn(numbers, generator=torch.Generator().manual_seed(seed))
        bench_peers.send(ours, header, parameter.grad.numpy())
        assert bench_peers.fill(ours, header)
        assert bench_peers.fill(ours, pulled)
        optimiser.step()
    ours.close()
    listener.close()
    np.testing.assert_allclose(pulled, parameter.detach().numpy(), rtol=1e-5, atol=1e-9)


def test_the_coordinator_and_virtual_time_are_measured(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench_coordination.coordinator_alone((4, 8), least=50)
    bench_coordination.virtual_time(shards, STEPS, 1, large=False)
    said = capsys.readouterr().out
    for protocol in PROTOCOLS:
        assert f"\n  {protocol} " in said
    assert "ms a BSP update: N=4 " in said
    assert " of it (" in said


def test_a_ratio_is_taken_between_measurements_of_one_repeat() -> None:
    doubled = {TCP: [2.0, 20.0, 200.0], FLOOR_OF[TCP]: [1.0, 10.0, 100.0]}
    assert bench_transport.ratios(doubled, TCP, FLOOR_OF[TCP]) == [2.0, 2.0, 2.0]


def test_sockets_are_bound_by_three_more_copies_than_shared_memory() -> None:
    least = bench_transport.Limits(update_ms=10.0, copy_ms=1.0)
    assert (least.of(TCP), least.of(MEMORY)) == (14.0, 11.0)
    measured = bench_transport.limits(100_000)
    assert measured.update_ms > measured.copy_ms > 0


def test_images_per_second_omit_the_start_and_rejected_gradients() -> None:
    seconds = [*np.linspace(0, 100, 20), *(100 + 0.5 * np.arange(1, 81))]  # 20 slow pushes, then two a second
    accepted = [1] * 100
    frame = pd.DataFrame({"seconds": seconds, "examples": 16, "accepted": accepted})
    rejected = pd.DataFrame({"seconds": [120.0], "examples": [16], "accepted": [0]})
    assert bench_throughput.images_per_s(pd.concat([frame, rejected])) == pytest.approx(32.0)


def test_a_process_slowed_by_its_own_threads_is_no_measure() -> None:
    assert "mean nothing" in bench_throughput.on_one_thread([60.0, 70.0, 400.0], [300.0, 310.0, 320.0])
    assert "mean nothing" not in bench_throughput.on_one_thread([500.0, 510.0], [300.0, 310.0])


@pytest.mark.full
def test_memory_is_looked_up_for_every_process_of_a_run(shards: Path) -> None:
    (sizes,) = bench_memory.looks_at_a_run(shards, "logistic", 2, 1, "--batch-size", 8)
    counts = {role: len(found) for role, found in sizes.items()}
    assert counts == {"supervisor": 1, "forkserver": 1, "tracker": 1, "server": 2, "worker": 2, "evaluator": 1}
    pss, uss = bench_memory.total(sizes)
    assert pss > uss > 0


def test_activations_are_what_a_layer_keeps_for_its_gradient() -> None:
    linear = bench_memory.activation_mb("logistic", 7, (3, 8, 8), 4)
    images, logits = 4 * 7 * 192, 4 * 7 * 4
    assert images / 1e6 <= linear <= (images + 3 * logits) / 1e6
