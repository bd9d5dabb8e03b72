"""The jobs on a standalone cluster with the flags that a user types and no others (tests/clusters/users_jobs.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusters import S3, Hdfs, Standalone
from tests.clusters.cluster_runs import QUIET
from tests.clusters.settings import COMPILED
from tests.clusters.users_jobs import (
    MODEL,
    Target,
    assert_jobs_work,
    assert_sharded,
    assert_trained,
    upload_sample,
    users_only,
)
from tests.support.commands import JOBS, in_demo


def test_default_flags_on_standalone(standalone: Standalone, hdfs: Hdfs) -> None:
    """The training rows and the shards go through WebHDFS, the evaluation rows and the run by HDFS's own protocol.

    Both jobs share an application; the test below submits each by itself."""
    target = Target(f"{hdfs.uri}/default-flags", {"master": standalone.master_url, "env": QUIET, "conf": COMPILED})
    sample = upload_sample(target.root)
    shards, output = f"{hdfs.web_uri}/default-flags/shards", f"{target.root}/run"
    both = ("--input", f"{hdfs.web_uri}/default-flags/sample", "--eval-input", sample)
    target.run_together(
        (JOBS["distribution_aware.py"], *users_only((*both, "--output", shards, "--workers", 2))),
        (JOBS["train.py"], *users_only(("--shards", shards, "--output", output, "--hosts", 2, *MODEL))),
    )
    assert_sharded(shards, 2, with_evaluation=True)
    assert_trained(output, with_evaluation=True)


@pytest.mark.full
@pytest.mark.timeout(900)  # the environment may have to be made, and clusters start
def test_default_flags_in_the_demo_environment(standalone: Standalone, s3: S3, tmp_path: Path) -> None:
    """Train by parameter-server, the default, and by all-reduce. YARN has matcha, and Ray an exchange of every client."""
    target = Target(f"{s3.uri}/demo-standalone", in_demo(standalone.master_url), ("all-reduce",))
    assert_jobs_work(target, tmp_path)
