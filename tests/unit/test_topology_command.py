"""``sharding topology``: its numbers, its figure, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pipeline.core.errors import UsageError
from tests.clusters import ROOT
from tests.support.graphs import mixing_matrix
from tests.support.references import names, unknown_keys
from trainer.topology import __main__ as command
from trainer.topology.description import describe


def show(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the output of the command."""
    assert command.main(argv) == 0
    return capsys.readouterr().out


def as_object(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """Return the object that --json prints."""
    made: dict[str, Any] = json.loads(show(capsys, *argv, "--json"))
    return made


def test_graph0_has_the_numbers_of_matcha(capsys: pytest.CaptureFixture[str]) -> None:
    """Vectors of MATCHA's published code to 4 digits; the traffic from the probabilities by hand."""
    made = as_object(capsys, "graph0", "--budget", "0.5", "--parameters", "1000", "--every", "2")
    assert (made["lambda_2"], made["lambda_max"]) == pytest.approx((0.670023, 6.329977), abs=5e-7)
    assert (made["weight"], made["s"]) == pytest.approx((0.3964, 0.6440), abs=5e-5)
    probabilities = [matching["probability"] for matching in made["matchings"]]
    assert probabilities == pytest.approx([0.9837, 0, 0.7581, 0.7581, 0], abs=5e-5)
    assert made["matchings"][2]["links"] == [[0, 1], [3, 7], [5, 6]]
    links = 4 * 0.983716 + 3 * 0.758142 + 2 * 0.758142
    assert made["in_use"] == pytest.approx({"links": links, "matchings": 2.5}, abs=1e-5)
    # Both ends of a link send 4,000 bytes, in every second step; worker 7 has links of matchings 0, 2 and 3.
    assert made["bytes_per_step"]["all"] == pytest.approx(links * 4000, abs=0.1)
    assert made["bytes_per_step"]["worker_mean"] == pytest.approx(links * 500, abs=0.1)
    assert made["bytes_per_step"]["worker_max"] == pytest.approx((0.983716 + 2 * 0.758142) * 2000, abs=0.1)


def test_the_screen_has_the_numbers_of_the_ring(capsys: pytest.CaptureFixture[str]) -> None:
    text = show(capsys, "ring", "--workers", "8")
    for part in (
        "0.436130",
        "lambda_2 0.585786, largest eigenvalue 4.000000",
        "second eigenvalue 0.744521",
        "2.158 MB",
    ):
        assert part in text
    assert "1       1.0000  0-7 1-2 3-4 5-6" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("topology", ["ring", "complete", "torus", "exponential", "random-pair"])
def test_the_spectrum_is_that_of_the_mean_of_w(topology: str) -> None:
    """Beside the mean of W over all rounds of a cycle, or over many draws."""
    made = describe(topology, 6, 1)
    mean = np.mean([mixing_matrix(6, made.plan.edges(round)) for round in range(3000)], axis=0)
    np.testing.assert_allclose(made.mean_mixing, np.linalg.eigvalsh(mean)[::-1], atol=0.02)


def test_every_key_of_the_object_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    made = as_object(capsys, "ring", "--workers", "4", "--budget", "0.5")
    assert unknown_keys(made, names("trainer/FILES.md", "Topologies: sharding topology --json")) == set()


@pytest.mark.parametrize("topology", ["ring", "complete", "exponential", "random-pair"])
@pytest.mark.parametrize("workers", ["1", "2", "30"])
def test_few_and_many_workers_can_be_shown(topology: str, workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = as_object(capsys, topology, "--workers", workers)
    assert made["degree"]["max"] < made["workers"] == int(workers)
    assert f"topology {topology}\n" in show(capsys, topology, "--workers", workers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_figure_has_the_same_bytes_again(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "new" / f"{name}.{kind}" for name in ("first", "second")]
    for file in files:
        show(capsys, "graph0", "--budget", "0.5", "--draw", str(file))
    assert files[0].read_bytes() == files[1].read_bytes()
    if kind == "png":
        assert Image.open(files[0]).size[0] > 1000
    if kind == "svg":
        assert b"<svg" in files[0].read_bytes()


@pytest.mark.parametrize(("topology", "workers"), [("random-pair", "9"), ("complete", "60"), ("ring", "1")])
def test_graphs_without_few_matchings_are_drawn(
    topology: str, workers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(capsys, topology, "--workers", workers, "--draw", str(tmp_path / "graph.png"))
    assert Image.open(tmp_path / "graph.png").size[0] > 1000


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["ring"], "--workers is required, as topology ring can have any number of them"),
        (["ring", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["ring", "--workers", "2001"], "--workers must be at most 2000"),
        (["rign", "--workers", "8"], "topology rign is none of ring, complete, torus"),
        (["graph0", "--workers", "9"], "topology graph0 has 8 workers, not 9"),
        (["graph0", "--budget", "2"], "--budget must be above 0 and at most 1, got 2"),
        (["graph0", "--every", "0"], "--every must be at least 1, got 0"),
        (["graph0", "--parameters", "0"], "--parameters must be at least 1, got 0"),
        (["graph0", "--parameters", "5", "--model", "cnn"], "not allowed with argument"),
        (["graph0", "--draw", "graph.gif"], "--draw graph.gif must end in .png, .svg, .pdf"),
        (["graph0", "--draw", "/dev/null/graph.png"], "--draw /dev/null/graph.png cannot be written"),
        (["complete", "--workers", "200", "--draw", "graph.png"], "--draw shows at most 5,000 links"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        command.main(argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_needs_no_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "star.txt"
    file.write_text("# a star\n0 1\n0 2\n0 3\n")
    made = as_object(capsys, str(file))
    assert (made["workers"], made["links"], made["degree"]) == (4, 3, {"min": 1, "max": 3})


def test_the_default_size_is_that_of_resnet20() -> None:
    assert command.count_parameters("resnet20") == command.RESNET20


@pytest.mark.slow
def test_the_command_exits_with_2_and_loads_no_torch(tmp_path: Path) -> None:
    program = "import sys; from pipeline.entry import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program, "topology", "ring"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert lines == ["error: --workers is required, as topology ring can have any number of them"]
    assert "| torch\n" not in done.stderr
