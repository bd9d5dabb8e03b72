"""The documents' commands are run as they stand, each file's in a folder of its own, and what the files name exists.

A block is run after the comment ``run`` (in the environment READERS after ``run readers``, with the packages of MDS after
``run mds``), written to a file after ``save PATH``, and held to the imports of a module after ``beside MODULE``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.assignment.groups import group_table
from pipeline.core.specs import registry
from pipeline.spark.session import PYTHON_WORKERS
from pipeline.spark.shipping import PACKAGE
from pipeline.strategies import STRATEGIES
from tests.clusters.environments import MDS, READERS
from tests.support.references import undocumented_below
from tests.support.shell import run_shell
from tests.support.virtual_time import Vector, simulate
from trainer.models import MODELS
from trainer.protocols import PROTOCOLS

ROOT = PACKAGE.parent
FRONT_DOOR_LINES = 120
FRONT_DOOR_WORDS = 700
CONTRIBUTING = ".github/CONTRIBUTING.md"
# The files that the blocks of a document leave behind. Documents without an entry have nothing to run.
WRITTEN = {
    "README.md": (
        "build/shards/report.html", "build/run/report.html", "build/mine/manifest.json", "build/mine-run/model.safetensors",
    ),
    "pipeline/README.md": (
        "build/pipeline/packages.zip", "build/pipeline/shards/report.html", "build/pipeline/shards-3/manifest.json",
    ),
    "pipeline/READING.md": (
        "build/reading/dataset/README.md", "build/reading/tars/README.md", "build/reading/mds/README.md",
    ),
    "pipeline/input/README.md": ("build/input/from-photos/manifest.json", "build/input/from-npz/manifest.json"),
    "pipeline/strategies/README.md": ("build/strategies/in-runs/manifest.json",),
    "pipeline/stream/README.md": ("build/stream/stream/report.html",),
    "trainer/README.md": (
        "build/training/run/report.html", "build/training/run-bsp/report.html", "build/training/runs/comparison.png",
        "build/training/predictions.parquet", "build/training/model.pt", "build/training/hub/README.md",
        "build/training/embedding.parquet",
    ),
    "trainer/data/README.md": (
        "build/rows/representative/result.json", "build/rows/curriculum/result.json", "build/rows/mixed/result.json",
        "build/rows/mapped/result.json", "build/rows/elastic/result.json",
    ),
    "trainer/protocols/README.md": ("build/protocols/run-own/result.json",),
    "trainer/exchange/README.md": (
        "build/exchange/graph0.png", "build/exchange/switch/result.json", "build/exchange/run-switch/result.json",
    ),
    "trainer/study/README.md": ("build/study/ledger.jsonl", "build/study/report.html", "build/study/tables.tex"),
    "jobs/README.md": (
        "build/jobs/shards/report.html", "build/jobs/compare/compare.html", "build/jobs/compare/class_cluster/manifest.json",
    ),
    "tests/README.md": ("tests/unit/test_dealing.py",),
}  # fmt: skip
RUN = tuple(WRITTEN)
FOLDERS = (".github", "conf", "jobs", "pipeline", "tests", "trainer")
FILES = (
    "README.md",
    *sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
)
TEXTS = {file: (ROOT / file).read_text() for file in FILES}
ALL_TEXT = "\n".join(TEXTS.values())
ARROWS = {"--push"}  # of the front door's picture
SPARK_SUBMITS_OWN = {"--master", "--deploy-mode", "--py-files", "--driver-memory", "--keytab", "--principal"}
OTHERS_OWN = SPARK_SUBMITS_OWN | {
    "--packages",
    "--archives",
    "--executor-cores",
    "--executor-memory",
    "--num-executors",
    "--basetemp",
    "--random-order",
    "--random-order-seed",
    "--requirement",
    "--dag-id",
    "--from-date",
    "--to-date",
    "--max-active-runs",
    *("--busy", "--kills"),
    *("--build-arg", "--file", "--rm", "--shm-size", "--tag", "--user", "--volume"),
    *("--clusterrole", "--from-literal", "--name", "--serviceaccount"),
    "--headless",
    "--hide-scrollbars",
    "--no-sandbox",
    "--screenshot",
    "--window-size",
}  # and those of pip, Airflow, Chromium, Docker and kubectl


@dataclass(frozen=True)
class Block:
    """A code block under a comment.

    action: run, save or beside. target: the file of the last two; of run, the name of an environment or ""."""

    action: str
    target: str
    language: str
    text: str


def blocks_of(file: str) -> list[Block]:
    found = re.findall(r"<!-- (run|save|beside) ?(\S*) -->\n```(bash|python)\n(.*?)```", TEXTS[file], re.DOTALL)
    assert len(found) == TEXTS[file].count("<!--"), "a comment without a block, or of an unknown action"
    return [Block(*fields) for fields in found]


def run_blocks(blocks: list[Block], folder: Path, *, here: bool) -> None:
    """Save and run blocks in order. Blocks of one language that follow each other share a process.

    here: whether this process runs the project's commands in blocks of bash."""
    # For a session that a block builds itself. A job names this daemon by itself.
    workers = f"--conf spark.python.daemon.module={PYTHON_WORKERS} pyspark-shell"
    # PYTHONPATH: for `sharding`, wherever .venv installed it from
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYSPARK_SUBMIT_ARGS": workers}
    environment |= {"HF_HOME": str(folder / "hugging-face"), "HF_HUB_OFFLINE": "1"}
    steps = [block for block in blocks if block.action != "beside"]
    for (action, language, target), group in groupby(
        steps, key=lambda block: (block.action, block.language, block.action == "run" and block.target)
    ):
        parts = list(group)
        if action == "save":
            for block in parts:
                (folder / block.target).write_text(block.text)
            continue
        text = "\n".join(block.text for block in parts)
        if language == "bash" and here:
            shell = run_shell(text, folder, environment)
            assert shell.returncode == 0, shell.stdout[-3000:] + shell.stderr[-3000:]
            continue
        python = READERS.make() if target == READERS.name else sys.executable
        command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [str(python), "-c", text]
        variables = environment
        if target == MDS.name:
            MDS.make()
            variables = environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(MDS.packages)])}
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout of someone who reads one document after another: no command may be in the way of a later one.

    It has a build folder of its own. Tests may be added to it."""
    if not (ROOT / ".venv" / "env.sh").exists():
        pytest.skip("run through `make test`: the READMEs' environment, .venv/env.sh, is not set up")
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("jobs", "conf", "pipeline", "trainer", ".venv", "pyproject.toml", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "build").mkdir()  # `make demo`, after which the commands work, leaves it
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", [RUN[0], *(pytest.param(file, marks=pytest.mark.full) for file in RUN[1:])])
def test_the_commands_of_a_readme_run_as_they_stand(file: str, checkout: Path, request: pytest.FixtureRequest) -> None:
    """The files that they write contain nothing that pipeline/FILES.md and trainer/FILES.md do not describe.

    The commands of the front page are programs of their own. Those of other documents run in this process, where reports
    have empty images."""
    here = file != RUN[0]
    if here:
        request.getfixturevalue("spark")
        request.getfixturevalue("undrawn")
    run_blocks(blocks_of(file), checkout, here=here)
    for path in WRITTEN[file]:
        assert (checkout / path).is_file(), path
    assert undocumented_below(checkout / "build") == {}


def test_a_command_that_fails_ends_its_block(tmp_path: Path) -> None:
    """Print what a command prints where a program would, and keep its exit code."""
    lines = "sharding --version | tr s S\nsharding nothing\ntouch after"
    done = run_shell(lines, tmp_path, os.environ)
    assert done.returncode == 2
    assert done.stdout.startswith("Sharding ")
    assert "invalid choice: 'nothing'" in done.stderr
    assert not (tmp_path / "after").exists()


def test_every_document_with_blocks_to_run_is_run() -> None:
    assert {file for file in FILES if any(block.action == "run" for block in blocks_of(file))} == set(RUN)


def defined_beside(module: str) -> dict[str, Any]:
    """Return what a block of CONTRIBUTING.md defines with the imports of a module alone."""
    (block,) = (block for block in blocks_of(CONTRIBUTING) if block.target == module)
    assert len([line for line in block.text.splitlines() if line]) <= 11
    names = vars(import_module(module)).copy()
    exec(block.text, names)
    return names


def test_the_contributors_strategy_is_one_that_the_registry_takes() -> None:
    strategy = defined_beside("pipeline.strategies.random")["InRuns"]
    assert "in_runs" in registry(*STRATEGIES.values(), strategy)
    fitted = strategy().fit(SimpleNamespace(bounds=[(0, 150), (150, 250)]))
    ids = np.arange(250)
    table = group_table(fitted.counts.sum(axis=0), 2)
    owners = fitted.grouping.workers(ids, np.zeros(250, np.int64), ids, table)
    assert owners.tolist() == [0] * 100 + [1] * 100 + [0] * 50


def test_the_contributors_protocol_divides_by_staleness() -> None:
    protocol = defined_beside("trainer.protocols.ssp")["StalenessAware"]
    assert "staleness_aware" in registry(*PROTOCOLS.values(), protocol)

    def gradient(parameters: Vector, worker: int, clock: int) -> Vector:
        return np.ones_like(parameters)

    done = simulate(protocol(), workers=4, steps=3, gradient=gradient, start=np.zeros(2), rate=1.0)
    staleness = [record.staleness for record in done.records]
    assert staleness == [0, 1, 2] + [3] * 9
    np.testing.assert_allclose(done.parameters, -sum(1 / max(1, each) for each in staleness))


def test_the_front_page_works_after_make_demo() -> None:
    """A folder that `make demo` made, or one around it, is refused as the output of another run."""
    demo = subprocess.run(["make", "-n", "demo"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    made = {folder.strip("'") for folder in re.findall(r"--output (\S+)", demo)}
    assert len(made) == 2, made
    for file in FILES:
        for output in re.findall(r"--output (build/[\w/.-]+)", TEXTS[file]):
            for folder in made:
                assert not f"{folder}/".startswith(f"{output}/"), (file, output, folder)
                assert not f"{output}/".startswith(f"{folder}/"), (file, output, folder)


def test_the_front_door_is_short() -> None:
    text = TEXTS["README.md"]
    assert len(text.splitlines()) <= FRONT_DOOR_LINES
    prose = re.sub(r"```.*?```|^\|.*$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(prose.split()) <= FRONT_DOOR_WORDS
    picture = ROOT / ".github" / "report.png"
    assert picture.stat().st_size < 200_000


def test_the_front_door_names_every_strategy_protocol_and_model() -> None:
    for name in (*STRATEGIES, *PROTOCOLS, *MODELS):
        assert f"`{name}`" in TEXTS["README.md"]


def test_every_job_and_make_target_is_named_and_those_named_exist() -> None:
    jobs = {path.name for path in (ROOT / "jobs").glob("*.py")}
    assert {job for job in re.findall(r"jobs/(\w+\.py)", ALL_TEXT)} == jobs
    assert all(f"`jobs/{job}`" in TEXTS["jobs/README.md"] for job in jobs)
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z][\w-]+)", ALL_TEXT, re.MULTILINE)) == targets


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("file", FILES)
def test_every_link_leads_to_a_file_and_a_heading(file: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", TEXTS[file]) if "://" not in link]
    for link in links:
        target, _, anchor = link.partition("#")
        path = ((ROOT / file).parent / target).resolve() if target else ROOT / file
        assert path.is_file(), link
        assert not anchor or anchor in anchors(path.read_text()), link


def test_the_front_page_leads_to_every_document() -> None:
    """Directly, or through the manual of a package."""
    seen = {ROOT / "README.md"}
    waiting = list(seen)
    while waiting:
        path = waiting.pop()
        for link in re.findall(r"\]\(([^)\s#]+\.md)", path.read_text()):
            target = (path.parent / link).resolve()
            waiting += [] if target in seen else [target]
            seen.add(target)
    assert {ROOT / file for file in FILES} <= seen


@pytest.mark.parametrize("file", FILES)
def test_every_path_and_module_named_exists(file: str) -> None:
    for path in re.findall(r"`((?:pipeline|trainer|jobs|tests|conf)/[a-z][\w/.-]*)`", TEXTS[file]):
        assert (ROOT / path).exists() or path in WRITTEN.get(file, ()), path
    for module in re.findall(r"`((?:pipeline|trainer)(?:\.[a-z_]+)+)`", TEXTS[file]):
        import_module(module)


@pytest.mark.parametrize("package", ["pipeline", "trainer"])
def test_every_file_of_a_package_has_its_place_in_the_layout(package: str) -> None:
    layout = TEXTS[f"{package}/README.md"].rpartition("```text\n")[2].partition("```")[0]
    there = {
        path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    lines = re.findall(r"^((?:[a-z_]+/?(?:, )?)+)  ", layout, re.MULTILINE)
    assert {name.strip("/ ") for line in lines for name in line.split(",")} == there - {"__init__", "__main__"}


def test_every_flag_named_exists() -> None:
    """A flag stands in the code by its name or as a field of a spec, and so do those of the READMEs' own specs."""
    sources = [
        path for folder in ("pipeline", "trainer", "jobs", "tests/clusters") for path in (ROOT / folder).rglob("*.py")
    ]
    code = "\n".join(path.read_text() for path in [*sources, ROOT / "tests" / "digests.py"])
    fields = re.findall(r"^ +(\w+): .*= (?:\w+_)?option\(", code + ALL_TEXT, re.MULTILINE)
    known = set(re.findall(r'"(--[a-z][\w-]*)"', code)) | {f"--{name.replace('_', '-')}" for name in fields}
    switches = re.findall(r"^ +(\w+): bool = (?:\w+_)?option\(", code, re.MULTILINE)
    known |= OTHERS_OWN | {"--help"} | {f"--no-{name.replace('_', '-')}" for name in switches}
    named = set(re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*(?![\w-])", ALL_TEXT)) - ARROWS
    assert {flag.replace("--no-report", "--report") for flag in named} <= known
