"""Whole studies, with real runs in processes of their own: killed, added to, shared out, on real processes too."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import DataError, DivergenceError, JobError, UsageError
from pipeline.core.shardset.manifest import open_committed
from pipeline.core.storage.store import Store
from pipeline.datasets.features import feature_batch
from pipeline.quality.report import write_report
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.spark.progress import PhaseLog
from pipeline.strategies.round_robin import RoundRobin
from tests.clusters.processes import is_alive
from tests.support.exit_codes import ended
from tests.support.tiers import only
from tests.support.trainer_runs import ROOT, until
from tests.support.trainer_sets import copy_of, make_sets
from trainer.study.__main__ import find_plan, main
from trainer.study.run.measure import measure

pytestmark = pytest.mark.usefixtures("undrawn")
READY = """
seeds = {seeds}
workers = 3
backend = "{backend}"
[datasets.small]
[shardings.one]
shards = "{shards}"
[shardings.two]
shards = "{shards}"
[models.logistic]
model = "logistic"
[protocols.asp]
protocol = "asp"
[training]
steps = 40
batch_size = 30
"""
TIMES = ("wall_s", "cpu_s", "made")


def write_plan(folder: Path, shards: Path, *, seeds: int = 2, backend: str = "virtual") -> str:
    path = folder / "plan.toml"
    path.write_text(READY.format(seeds=seeds, shards=shards, backend=backend))
    return str(path)


def lines(study: Path) -> dict[str, dict[str, Any]]:
    """A ledger's lines by run, without times."""
    records = [json.loads(line) for line in (study / "ledger.jsonl").read_text().splitlines()]
    return {record["run"]: {key: value for key, value in record.items() if key not in TIMES} for record in records}


@pytest.fixture(scope="module")
def whole(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of four runs that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    assert main([write_plan(folder, shards), "--output", str(folder / "study"), "--quiet"]) == 0
    return folder / "study"


def test_a_study_trains_every_run_and_leaves_ledger_and_report_alone(whole: Path) -> None:
    found = lines(whole)
    assert sorted(found) == [f"small/{way}/logistic/asp/{seed}" for way in ("one", "two") for seed in (0, 1)]
    assert all(record["final_accuracy"] > 0.1 and record["updates"] == 120 for record in found.values())
    assert {record["environment"]["device"] for record in found.values()} <= {"cpu", "cuda"}
    assert (whole / "report.html").exists()
    files = {"ledger.jsonl", "plan.json", "report.html", "README.md", "tables.tex", "results.csv", "results.json"}
    assert {path.name for path in whole.iterdir() if path.name != ".lock"} == files
    # equal shards and seeds, equal bits; other seeds, others
    assert found["small/one/logistic/asp/0"]["parameters"] == found["small/two/logistic/asp/0"]["parameters"]
    assert found["small/one/logistic/asp/0"]["parameters"] != found["small/one/logistic/asp/1"]["parameters"]


def make_set_of_targets(spark: Any, root: Path) -> Path:
    """Make a set of two shards, whose rows have real targets and are all of one class."""
    rng = np.random.default_rng(0)
    for name in ("train", "eval"):
        numbers = rng.standard_normal((40, 4)).astype(np.float32)
        batch = feature_batch(numbers[:, 1:], np.zeros(40, np.int32), numbers[:, 0])
        (root / name).mkdir()
        pq.write_table(pa.Table.from_batches([batch]), root / name / "a.parquet")
    request = Request(
        input=str(root / "train"),
        eval_input=str(root / "eval"),
        output=str(root / "shards"),
        num_workers=2,
    )
    shard(spark.sparkContext, request, RoundRobin(), PhaseLog(quiet=True))
    return root / "shards"


@pytest.mark.parametrize(("model", "workers"), only([("linear", 2)], [("logistic", 1), ("linear", 2)]))
def test_a_study_of_shards_without_classes_to_compare(
    sets: dict[int, Path], spark: Any, tmp_path: Path, model: str, workers: int
) -> None:
    """Study a set of one worker, which has all rows of every class, and one of real targets, whose rows are of one class."""
    ready = copy_of(sets[1], tmp_path / "one") if workers == 1 else make_set_of_targets(spark, tmp_path)
    write_report(open_committed(Store(), str(ready)), lambda name, data: (ready / name).write_bytes(data))
    plan = Path(write_plan(tmp_path, ready, seeds=1))
    text = plan.read_text().replace("workers = 3", f"workers = {workers}").replace("logistic", model)
    plan.write_text(text.replace(f'[shardings.two]\nshards = "{ready}"\n', ""))
    study = tmp_path / "study"
    assert main([str(plan), "--output", str(study), "--quiet"]) == 0
    [record] = lines(study).values()
    assert record["final_loss"] > 0
    assert not {"chi_square", "class_counts"} & record["sharding"].keys()
    assert "Evenness of the shards" in (study / "report.html").read_text()


@pytest.mark.full
def test_a_killed_study_ends_its_runs_and_resumes_to_the_same_end(whole: Path, shards: Path, tmp_path: Path) -> None:
    plan, study = write_plan(tmp_path, shards), tmp_path / "study"
    command = [sys.executable, "-m", "trainer.study", plan, "--output", str(study), "--jobs", "1", "--quiet"]
    ledger = study / "ledger.jsonl"
    process = subprocess.Popen(command, cwd=ROOT)
    until(lambda: ledger.exists() and ledger.read_bytes().count(b"\n") >= 1, "a first line")
    until(lambda: psutil.Process(process.pid).children(recursive=True), "the next run")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    until(lambda: not any(map(is_alive, children)), "their end")
    done = ledger.read_bytes()
    assert 1 <= done.count(b"\n") < 4
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    assert ledger.read_bytes().startswith(done)
    assert lines(study) == lines(whole)


@pytest.mark.full
def test_a_study_that_is_killed_while_it_makes_sets_takes_spark_along(tmp_path: Path) -> None:
    """A second one would write into the same sets as the first's."""
    assert ended("sample", "--to", str(tmp_path / "data"), "--rows", "400", "--test-rows", "40") == 0
    plan = Path(write_plan(tmp_path, tmp_path))
    made = plan.read_text().replace("[datasets.small]", f'[datasets.small]\ninput = "{tmp_path / "data"}"')
    plan.write_text(made.replace(f'shards = "{tmp_path}"', 'strategy = "random"'))
    command = [sys.executable, "-m", "trainer.study", str(plan), "--output", str(tmp_path / "study"), "--quiet"]
    process = subprocess.Popen(command, cwd=ROOT)

    def java() -> list[psutil.Process]:
        found = []
        for child in psutil.Process(process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if child.name() == "java":
                    found.append(child)
        return found

    until(java, "Spark's start")
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    until(lambda: not any(map(is_alive, children)), "their end")


@pytest.mark.full
def test_sigterm_ends_a_study_with_a_line_and_what_was_done_stays(shards: Path, tmp_path: Path) -> None:
    plan, study = write_plan(tmp_path, shards), tmp_path / "study"
    command = [sys.executable, "-m", "trainer.study", plan, "--output", str(study), "--jobs", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until(lambda: (study / "ledger.jsonl").exists(), "a first line")
    process.terminate()
    assert process.wait(180) == 1
    assert process.stderr
    assert process.stderr.read().splitlines()[-1].startswith("error: interrupted; finished runs are in the ledger")
    assert len(lines(study)) >= 1


@pytest.mark.full
def test_a_finished_study_repeats_nothing_and_more_seeds_add_to_it(whole: Path, shards: Path, tmp_path: Path) -> None:
    study = copy_of(whole, tmp_path / "study")
    before = (study / "ledger.jsonl").read_bytes()
    plan = write_plan(tmp_path, shards)
    left = study / "runs" / "of-a-study-that-was-killed-behind-its-line"
    left.mkdir(parents=True)
    assert main([plan, "--output", str(study), "--quiet"]) == 0
    assert (study / "ledger.jsonl").read_bytes() == before
    assert not left.parent.exists()
    assert main([plan, "--output", str(study), "--quiet", "--seeds", "3"]) == 0
    after = (study / "ledger.jsonl").read_bytes()
    assert after.startswith(before)
    assert after.count(b"\n") == 6


@pytest.mark.full
def test_hosts_that_share_a_study_have_the_ledger_of_one(whole: Path, shards: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, shards)
    parts = [tmp_path / "first", tmp_path / "second"]
    for number, part in enumerate(parts, 1):
        assert main([plan, "--output", str(part), "--share", f"{number}/2", "--quiet"]) == 0
        assert len(lines(part)) == 2
    merging = [plan, "--output", str(parts[0]), "--merge", str(parts[1]), "--report-only", "--quiet"]
    assert main(merging) == 0
    assert lines(parts[0]) == lines(whole)
    merging = [plan, "--output", str(tmp_path / "new"), "--merge", *map(str, parts), "--report-only", "--quiet"]
    assert main(merging) == 0
    assert lines(tmp_path / "new") == lines(whole)


@pytest.mark.full
def test_a_ready_set_for_other_workers_is_refused_at_once(shards: Path, tmp_path: Path) -> None:
    plan = Path(write_plan(tmp_path, shards))
    plan.write_text(plan.read_text().replace("workers = 3", "workers = 5"))
    with pytest.raises(UsageError, match=r"\[shardings.one\]: .* is a set for 3 workers, the plan has 5"):
        main([str(plan), "--output", str(tmp_path / "study")])
    assert not (tmp_path / "study").exists()


@pytest.mark.full
def test_a_ready_set_is_refused_where_only_shards_were_to_vary(shards: Path, tmp_path: Path) -> None:
    plan = Path(write_plan(tmp_path, shards))
    plan.write_text('vary = ["sharding"]' + plan.read_text())
    with pytest.raises(UsageError, match=r"\[shardings.one\]: its shards are the same for every seed"):
        main([str(plan), "--output", str(tmp_path / "study")])


@pytest.mark.full
def test_a_failure_whose_path_says_diverged_is_no_divergence(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is a result, and never repeated."""
    plan = find_plan(write_plan(tmp_path, shards))
    run = next(iter(plan.runs()))

    def fail_with(error: JobError) -> None:
        def fail(case: object) -> None:
            raise error

        monkeypatch.setattr("trainer.study.run.measure._train", fail)

    fail_with(JobError("worker 1 failed 6 times in a row; see build/diverged/worker-1.log"))
    with pytest.raises(JobError, match="6 times"):
        measure(plan, run, str(shards), tmp_path / "run")
    fail_with(DivergenceError("the run diverged: its loss is no number (see build/run)"))
    assert measure(plan, run, str(shards), tmp_path / "run")["failed"] == "the run diverged: its loss is no number"


@pytest.mark.full
def test_an_impossible_folder_or_study_beside_is_one_line(shards: Path, tmp_path: Path) -> None:
    plan = Path(write_plan(tmp_path, shards))
    (tmp_path / "study" / ".lock").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"^--output .*study cannot be written: Is a directory; choose another folder"):
        main([str(plan), "--output", str(tmp_path / "study")])
    plan.write_text('beside = "study"' + plan.read_text())
    with pytest.raises(UsageError, match=r"beside = 'study' is the study in .*study itself"):
        main([str(plan), "--output", str(tmp_path / "study")])


@pytest.mark.full
def test_a_study_that_was_killed_in_its_first_write_is_begun(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / ".plan.json.0a1b2c3d.tmp").write_bytes(b"{")
    assert main([write_plan(tmp_path, shards, seeds=1), "--output", str(tmp_path / "study"), "--quiet"]) == 0


@pytest.mark.full
def test_a_damaged_shard_fails_its_runs_and_the_others_are_done(shards: Path, tmp_path: Path) -> None:
    broken = copy_of(shards, tmp_path / "broken")
    plan = Path(write_plan(tmp_path, shards))
    plan.write_text(
        plan.read_text().replace(f'[shardings.two]\nshards = "{shards}"', f'[shardings.two]\nshards = "{broken}"')
    )
    victim = next((broken / "worker=001").iterdir())
    victim.write_bytes(victim.read_bytes()[:-3] + b"xyz")
    command = [str(plan), "--output", str(tmp_path / "study"), "--jobs", "1", "--quiet"]
    with pytest.raises(DataError, match=r"small/two/logistic/asp/0: .*worker=001"):
        main(command)
    assert list(lines(tmp_path / "study")) == ["small/one/logistic/asp/0", "small/one/logistic/asp/1"]
    assert "2 of 4 runs are done" in (tmp_path / "study" / "report.html").read_text()  # of those that were
    with pytest.raises(DataError, match=r"small/two/logistic/asp/0: .*worker=001"):
        main([*command, "--seeds", "9"])
    assert len(lines(tmp_path / "study")) == 3  # after the third of such runs nobody waits for a fourth


@pytest.mark.full
def test_another_ready_set_under_the_same_name_is_refused(shards: Path, spark: Any, tmp_path: Path) -> None:
    plan, study = Path(write_plan(tmp_path, shards, seeds=1)), tmp_path / "study"
    assert main([str(plan), "--output", str(study), "--quiet"]) == 0
    other = make_sets(spark, tmp_path / "other", 3, seed=9)[3]
    plan.write_text(plan.read_text().replace(str(shards), str(other)))
    with pytest.raises(DataError, match=r"has other (evaluation images|training images|shards) than small/one/"):
        main([str(plan), "--output", str(study), "--quiet", "--seeds", "2"])
    assert len(lines(study)) == 2


@pytest.mark.full
def test_ready_sets_of_other_evaluation_images_are_refused(shards: Path, spark: Any, tmp_path: Path) -> None:
    plan, study = Path(write_plan(tmp_path, shards)), tmp_path / "study"
    other = make_sets(spark, tmp_path / "other", 3, seed=9)[3]
    plan.write_text(plan.read_text().replace(str(shards), str(other), 1))
    with pytest.raises(DataError, match=r"small/two/logistic/asp/0 has other evaluation images than small/one/"):
        main([str(plan), "--output", str(study), "--quiet"])
    assert not (study / "ledger.jsonl").exists()
    assert not (study / "runs").exists()


@pytest.mark.full
def test_a_study_on_real_processes_has_the_same_accuracies(shards: Path, tmp_path: Path) -> None:
    plan = Path(write_plan(tmp_path, shards, seeds=1, backend="processes"))
    one = plan.read_text().replace('protocol = "asp"', 'protocol = "bsp"')
    one = one.replace(f'[shardings.two]\nshards = "{shards}"\n', "")
    plan.write_text('compare = "variant"' + one + '[variants.matcha]\nexchange = "matcha"\n')
    assert main([str(plan), "--output", str(tmp_path / "real"), "--quiet"]) == 0
    plan.write_text(plan.read_text().replace('backend = "processes"', 'backend = "virtual"'))
    assert main([str(plan), "--output", str(tmp_path / "virtual"), "--quiet"]) == 0
    real, virtual = lines(tmp_path / "real"), lines(tmp_path / "virtual")
    assert sorted(real) == sorted(virtual) != []
    for run, record in real.items():
        assert record["final_accuracy"] == pytest.approx(virtual[run]["final_accuracy"], abs=0.02)


@pytest.mark.full
def test_a_sampler_an_exchange_and_a_repartition_are_variants(shards: Path, tmp_path: Path) -> None:
    """The second start has more variants, and repeats no run."""
    plan = Path(write_plan(tmp_path, shards, seeds=1))
    first = plan.read_text().replace('protocol = "asp"', 'protocol = "bsp"').replace("steps = 40", "epochs = 1")
    first = first.replace(f'[shardings.two]\nshards = "{shards}"\n', "")
    first += '[variants.shuffle]\n[variants.representative]\nsampling = "representative"\n'
    plan.write_text('compare = "variant"' + first)
    command = [str(plan), "--output", str(tmp_path / "study"), "--quiet"]
    assert main(command) == 0
    earlier = (tmp_path / "study" / "ledger.jsonl").read_bytes()
    more = '[variants.matcha]\nexchange = "matcha"\n[variants.random]\nrepartition = "random"\n'
    plan.write_text(plan.read_text() + more)
    assert main(command) == 0
    assert (tmp_path / "study" / "ledger.jsonl").read_bytes().startswith(earlier)
    records = lines(tmp_path / "study")
    names = ["shuffle", "representative", "matcha", "random"]
    assert sorted(records) == sorted(f"small/one/logistic/asp/{name}/0" for name in names)
    assert len({record["parameters"] for record in records.values()}) == 4


@pytest.mark.full
def test_sets_are_made_once_and_go_when_their_runs_are_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From raw images, through a derived data set and Spark, to the report."""
    data = tmp_path / "data"
    assert ended("sample", "--to", str(data), "--rows", "400", "--test-rows", "60") == 0
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f"""
seeds = 1
workers = 2
[datasets.sample]
input = "{data}"
shrink = 4
[shardings.random]
strategy = "random"
[shardings.blocks]
strategy = "round_robin"
order = "class-blocks"
[models.logistic]
model = "logistic"
[protocols.bsp]
protocol = "bsp"
[training]
epochs = 1
batch_size = 40
"""
    )
    study = tmp_path / "study"
    command = [str(plan), "--output", str(study)]
    assert main(command) == 0
    assert "sharding: 2 sets" in capsys.readouterr().err
    assert not (study / "sets").exists()
    assert not (study / "datasets").exists()
    assert len(lines(study)) == 2
    # more seeds: the sets are made again, and are those that the ledger knows
    assert main([*command, "--seeds", "2", "--keep-sets"]) == 0
    found = lines(study)
    assert len(found) == 4
    digests = {  # random has a set a seed, the other one for all
        name: {found[f"sample/{name}/logistic/bsp/{seed}"]["shards"] for seed in (0, 1)}
        for name in ("random", "blocks")
    }
    assert {name: len(some) for name, some in digests.items()} == {"random": 2, "blocks": 1}
    assert found["sample/blocks/logistic/bsp/0"]["sharding"]["cramers_v"] > 0.8
    for record in found.values():
        facts = record["sharding"]
        least, *_, most = zip(*facts["shard_counts"], strict=True)
        assert len(least) == 2
        assert [min(least), max(most)] == [facts["class_counts"][0], facts["class_counts"][-1]]
    assert found["sample/random/logistic/bsp/0"]["sharding"]["cramers_v"] < 0.4
    # other images: as a study that was killed early, this one has sets of those that the plan named then
    other = tmp_path / "other"
    assert ended("sample", "--to", str(other), "--rows", "400", "--test-rows", "60", "--seed", "5") == 0
    plan.write_text(plan.read_text().replace(f'"{data}"', f'"{other}"'))
    (study / "ledger.jsonl").unlink()
    with pytest.raises(UsageError, match=f"to have all made again, delete {study}/sets and {study}/datasets$"):
        main(command)
    assert not (study / "ledger.jsonl").exists()


NO_SPARK = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pyspark", "py4j"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refusal())
"""


@pytest.mark.full
def test_prepared_sets_need_neither_spark_nor_the_images(tmp_path: Path) -> None:
    """A folder is prepared, copied to a host without both, and extended there by no more than was prepared."""
    data = tmp_path / "data"
    assert ended("sample", "--to", str(data), "--rows", "400", "--test-rows", "60") == 0
    plan = Path(write_plan(tmp_path, tmp_path))
    made = plan.read_text().replace("[datasets.small]", f'[datasets.small]\ninput = "{data}"\nshrink = 4')
    plan.write_text(made.replace(f'shards = "{tmp_path}"', 'strategy = "random"', 1).replace("seeds = 2", "seeds = 3"))
    plan.write_text(plan.read_text().replace(f'shards = "{tmp_path}"', 'strategy = "stratified"'))
    prepared, study = tmp_path / "prepared", tmp_path / "study"
    assert main([str(plan), "--output", str(prepared), "--seeds", "2", "--prepare", "--quiet"]) == 0
    assert {path.name for path in prepared.iterdir()} - {".lock"} == {"plan.json", "prepared.json", "sets"}
    copy_of(prepared, study)
    data.rename(tmp_path / "elsewhere")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(NO_SPARK)
    env = {key: value for key, value in os.environ.items() if "SPARK" not in key and key != "JAVA_HOME"}
    env |= {"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "trainer.study", str(plan), "--output", str(study), "--quiet", "--seeds"]
    done = subprocess.run([*command, "2"], cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert len(lines(study)) == 4
    assert not (study / "sets").exists()
    more = subprocess.run([*command, "3"], cwd=ROOT, capture_output=True, text=True, env=env)
    assert (more.returncode, more.stderr.count("\n")) == (3, 1)
    assert "does not exist; check --input" in more.stderr
    # another set in the place of a prepared one
    sets = prepared / "sets"
    (sets / "small,one,0,3").rename(tmp_path / "removed")
    copy_of(sets / "small,one,1,3", sets / "small,one,0,3")
    with pytest.raises(DataError, match="small,one,0,3 is not the set that --prepare made; delete it"):
        main([str(plan), "--output", str(prepared), "--seeds", "2", "--quiet"])
