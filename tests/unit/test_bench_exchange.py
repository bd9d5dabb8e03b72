"""The parts of ``make bench-exchange`` that need no processes: its yardsticks, its figures and their picture."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError, UsageError
from tests.benchmarks import exchange
from tests.benchmarks.exchange_contenders import Contender, Group, list_groups
from tests.benchmarks.exchange_figures import CLEAR, ONE_HOST, by_case, cheapest, read_report
from tests.benchmarks.exchange_peers import CHUNK, SharedSums, Times, Vector, add_in_memory
from trainer.exchange import EXCHANGES
from trainer.launch.fork_server import FORK_SERVER

PNG = b"\x89PNG\r\n\x1a\n"
KINDS = {  # the keys of a figure in the file of --json, with the types of their values
    "part": str,
    "exchange": str | None,
    "place": str | None,
    "workers": int,
    "parameters": int,
    "steps": int,
    "wall_ms": float,
    "cpu_ms": float,
    "ratios": dict,
    "wall_ms_by_turn": list,
    "cpu_ms_by_turn": list,
}


def take(wall_ms: float) -> Any:
    """A contender without processes, whose turns take 1, 2 and 3 times as long, with twice the CPU time."""
    turns = [0]

    def run(elements: int, workers: int, steps: int) -> Times:
        turns[0] += 1
        wall = wall_ms * turns[0] * elements / 1e6
        return wall, 2 * wall

    return run


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a bench with made-up contenders: two sizes, two numbers of workers, three turns each."""
    sums = {
        "gloo": Contender(take(10.0)),
        "floor": Contender(take(2.0)),
        "memory": Contender(take(3.0), "all-reduce", ONE_HOST),
        "clear": Contender(take(9.0), "all-reduce", CLEAR),
    }
    models = {"sockets": Contender(take(6.0)), "clear ring": Contender(take(8.0), "d-psgd", CLEAR)}
    groups = [Group(sums, ("gloo", "floor")), Group(models, ("sockets",))]
    monkeypatch.setattr(exchange, "list_groups", lambda torchft: groups)
    monkeypatch.setattr(FORK_SERVER, "ensure", lambda: None)
    monkeypatch.setattr(FORK_SERVER, "end", lambda: None)
    path = tmp_path / "costs.json"
    exchange.main(["--json", str(path), "--workers", "2", "4", "--elements", "1000000", "2000000"])
    return path


@pytest.mark.parametrize("workers", [2, 3])
def test_the_floor_sums_all_gradients(workers: int) -> None:
    """Two rounds, in ranges longer than a chunk, by threads instead of processes."""
    elements = workers * CHUNK + 1001
    arrivals = [[threading.Semaphore(0) for _ in range(workers)] for _ in range(2)]
    memory = [np.zeros(elements, np.float32) for _ in range(workers)]
    shared = SharedSums(memory, np.zeros(elements, np.float32), arrivals)
    gradients = np.random.default_rng(0).normal(size=(2, workers, elements)).astype(np.float32)

    def reduce(rank: int) -> list[Vector]:
        own, add_up = add_in_memory(rank, shared)
        totals = [np.empty(elements, np.float32) for _ in gradients]
        for gradient, total in zip(gradients, totals, strict=True):
            own[:] = gradient[rank]
            add_up(total)
        return totals

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(reduce, range(workers)))
    for totals in results:
        np.testing.assert_allclose(totals, gradients.sum(axis=1), rtol=1e-5, atol=1e-5)


def test_the_file_has_every_figure(measured: Path) -> None:
    content = json.loads(measured.read_text())
    assert set(content) == {"format", "machine", "versions", "figures"}
    assert set(content["machine"]) == {"processor", "cores", "memory_gib", "system", "load"}
    assert set(content["versions"]) == {"Python", "torch", "numpy", "pyzmq"}
    assert len(content["figures"]) == 2 * 2 * 6
    for figure in content["figures"]:
        assert set(figure) == set(KINDS)
        assert all(isinstance(figure[key], kind) for key, kind in KINDS.items())
        assert len(figure["wall_ms_by_turn"]) == len(figure["cpu_ms_by_turn"]) == 3
    memory = content["figures"][2]
    assert memory["part"] == "memory"
    assert memory["wall_ms"] == pytest.approx(6.0)  # the second of three turns
    assert memory["cpu_ms"] == pytest.approx(12.0)
    assert memory["ratios"] == pytest.approx({"gloo": 0.3, "floor": 1.5})


def test_the_figures_name_the_cheapest_exchange(measured: Path) -> None:
    cases = by_case(read_report(measured).costs())
    assert next(iter(cases)) == (ONE_HOST, 1_000_000, 2)
    assert cheapest(cases[ONE_HOST, 1_000_000, 2]) == "all-reduce"
    assert cheapest(cases[CLEAR, 2_000_000, 4]) == "d-psgd"


def test_the_plot_is_a_table_and_a_picture(measured: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "exchanges.png"
    capsys.readouterr()
    assert exchange.main(["--plot", str(measured), str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| workers on | parameters | workers | `all-reduce` | `d-psgd` |"
    assert lines[2] == "| one host | 1 M | 2 | **6.00** (12.0) |  |"
    assert len(lines) == 2 + 2 * 2 * 2
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"figures": []},
        {"figures": [{"part": "memory"}]},
        {"machine": 1},
    ],
)
def test_a_damaged_file_is_one_line(measured: Path, change: dict[str, Any]) -> None:
    measured.write_text(json.dumps(json.loads(measured.read_text()) | change))
    with pytest.raises(DataError, match="is no file of make bench-exchange"):
        exchange.main(["--plot", str(measured), "out.png"])


def test_a_missing_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        exchange.main(["--json", str(tmp_path / "missing" / "costs.json")])
    with pytest.raises(DataError, match="cannot read"):
        exchange.main(["--plot", str(tmp_path / "none.json"), str(tmp_path / "out.png")])


def test_a_contender_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        exchange.main(["--only", "gloo", "clera"])
    assert ended.value.code == 2
    assert "--only clera: no such contender; choose among gloo, floor, memory" in capsys.readouterr().err


def test_the_bench_compares_every_exchange() -> None:
    """The switches between exchanges have no step of their own."""
    contenders = [each for group in list_groups(None) for each in group.contenders.values()]
    places = {name: [each.place for each in contenders if each.exchange == name] for name in EXCHANGES}
    compared = {name for name, of_exchange in places.items() if len(set(of_exchange)) == 3}
    assert compared == {name for name, kind in EXCHANGES.items() if not kind().stages()}
