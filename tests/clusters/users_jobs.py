"""Jobs on clusters as a user types them: input, output, workers, hosts, model and epochs, and no other flag.

The report and the evaluation are on. The interpreter of ``assert_jobs_work`` is the one that `make demo` installs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.datasets.synthetic import SampleSpec, files_of
from tests.clusters import ROOT, spark_submit
from tests.clusters.cluster_runs import STORE, whole
from tests.clusters.environments import DEMO
from tests.support.application import Ended
from tests.support.commands import BATCH, JOBS, plan_batch, read_batch
from tests.support.places import put

ROWS = 400
TEST_ROWS = 80
MODEL = ("--model", "logistic", "--epochs", 1)
# A test that needs another flag has found a default that does not work.
USERS_FLAGS = {
    "--input", "--eval-input", "--output", "--workers", "--shards", "--model", "--epochs", "--hosts", "--launcher",
    "--exchange",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A cluster and a folder of its store, which holds the sample.

    Attributes:
        root: the folder.
        submit: what spark_submit takes beside a job's flags.
        exchanges: exchanges of gradients by which a run trains there.
        slow_start: whether an application takes so long to start that all jobs share one.
    """

    root: str
    submit: dict[str, Any]
    exchanges: tuple[str, ...] = ()
    slow_start: bool = False

    def run(self, job: str, *flags: object) -> None:
        """Submit a job with exactly these flags, and check that it succeeds."""
        users_only(flags)
        done = spark_submit(JOBS[job], *flags, **self.submit)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    def run_together(self, *commands: tuple[object, ...]) -> list[Ended]:
        """Run commands in one application, check that each succeeds, and return how they ended."""
        results = read_batch(spark_submit(BATCH, plan_batch(commands, path=[ROOT], spark=True), **self.submit))
        for result in results:
            assert result.code == 0, result.out[-3000:] + result.err[-3000:]
        return results


def users_only(flags: tuple[object, ...]) -> tuple[object, ...]:
    """Return the flags after a check that a user would type each of them."""
    assert {flag for flag in map(str, flags) if flag.startswith("--")} <= USERS_FLAGS
    return flags


def upload_sample(root: str) -> str:
    """Write the sample below a folder of any store, and return the path of its files."""
    for name, data in files_of(SampleSpec(rows=ROWS, test_rows=TEST_ROWS)).items():
        put(f"{root}/sample/{name}", data)
    return f"{root}/sample"


def assert_page(path: str) -> None:
    assert "</html>" in STORE.read(path).decode()


def assert_sharded(output: str, workers: int, *, with_evaluation: bool) -> None:
    shards = whole(output)
    assert shards.num_workers == workers
    assert (shards.manifest.evaluation is not None) == with_evaluation
    assert_page(f"{output}/report.html")


def assert_trained(output: str, *, with_evaluation: bool) -> None:
    result = json.loads(STORE.read(f"{output}/result.json"))
    assert result["cause"] == "finished"
    if with_evaluation:
        assert 0 <= result["final_accuracy"] <= 1
    else:
        assert result["final_accuracy"] is None
    assert STORE.exists(f"{output}/model.safetensors")
    assert_page(f"{output}/report.html")


INTERPRETERS = """
import json, sys
from pyspark import SparkContext
tasks = SparkContext.getOrCreate().parallelize(range(4), 4).map(lambda _: sys.executable).collect()
print(json.dumps([sys.executable, *tasks]))
sys.exit(0)
"""


def assert_jobs_work(target: Target, folder: Path) -> None:
    """Shard and train, the two jobs submitted by themselves; reshard and train without evaluation rows in one application.

    On a target with a slow start all of them run in one. folder: for the file of a small program."""
    sample, shards, plain = upload_sample(target.root), f"{target.root}/shards", f"{target.root}/plain"
    both = ("--input", sample, "--eval-input", sample)
    hosts = ("--hosts", 2, *MODEL)
    first: list[tuple[str, tuple[object, ...]]] = [
        ("distribution_aware.py", (*both, "--output", shards, "--workers", 2)),
        ("train.py", ("--shards", shards, "--output", f"{target.root}/run", *hosts)),
    ]
    for job, flags in first if not target.slow_start else ():
        target.run(job, *flags)
    other = f"{target.root}/resharded"
    # On HDFS the shards of the workers are named one by one, as if they had no manifest.
    plain_shards = (f"{plain}/worker=000", f"{plain}/worker=001") if target.slow_start else (plain,)
    (folder / "interpreters.py").write_text(INTERPRETERS)
    plan: list[tuple[object, ...]] = [
        (folder / "interpreters.py",),
        *((JOBS[job], *users_only(flags)) for job, flags in first if target.slow_start),
        (JOBS["reshard.py"], *users_only(("--input", shards, "--output", other, "--workers", 3))),
        (JOBS["stratified.py"], *users_only(("--input", sample, "--output", plain, "--workers", 2))),
        (JOBS["reshard.py"], *users_only(("--input", plain, "--output", f"{plain}-3", "--workers", 3))),
        (JOBS["train.py"], *users_only(("--shards", *plain_shards, "--output", f"{target.root}/plain-run", *hosts))),
        *(exchange_run(target.root, shards, exchange, hosts) for exchange in target.exchanges),
    ]
    results = target.run_together(*plan)
    assert set(json.loads(results[0].out)) == {str(DEMO.python)}
    assert_sharded(shards, 2, with_evaluation=True)
    assert_trained(f"{target.root}/run", with_evaluation=True)
    assert_sharded(other, 3, with_evaluation=True)
    assert_sharded(plain, 2, with_evaluation=False)
    assert_sharded(f"{plain}-3", 3, with_evaluation=False)
    assert_trained(f"{target.root}/plain-run", with_evaluation=False)
    for exchange in target.exchanges:
        assert_trained(f"{target.root}/{exchange}", with_evaluation=True)


def exchange_run(root: str, shards: str, exchange: str, hosts: tuple[object, ...]) -> tuple[object, ...]:
    """Return the command of a run that trains by an exchange, below a folder."""
    flags = ("--shards", shards, "--output", f"{root}/{exchange}", "--exchange", exchange, *hosts)
    return (JOBS["train.py"], *users_only(flags))
