"""jobs/compare.py with variants of a strategy, each with flags of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from pipeline.command_line import parse
from pipeline.errors import UsageError
from pipeline.runs.compare import comparison_parser, read_strategies
from pipeline.runs.request import Request
from pipeline.runs.shard import shard
from pipeline.shardset.manifest import open_committed
from pipeline.storage.store import Store
from pipeline.strategies import Strategy
from pipeline.strategies.hash import Hash
from pipeline.strategies.random import Random
from pipeline.strategies.submodular import Submodular
from tests.application import run_job
from tests.sharding_runs import QUIET
from tests.test_embedding_table import write_table
from tests.test_jobs import shas
from tests.test_submodular import vectors_in_parquet

ROWS = 90


@pytest.fixture
def source(tmp_path: Path) -> Path:
    vectors = np.random.default_rng(8).normal(size=(ROWS, 4)).astype(np.float32)
    return vectors_in_parquet(tmp_path / "in", vectors, np.arange(ROWS) % 3)


def test_variants_stand_beside_the_strategy_with_flags_of_their_own(
    spark: SparkSession, tmp_path: Path, source: Path
) -> None:
    vectors = np.random.default_rng(5).normal(size=(ROWS, 6)).astype(np.float32)
    table = write_table(tmp_path / "embeddings", np.arange(ROWS), vectors)
    flags = [
        "--input",
        source,
        "--output",
        tmp_path / "c",
        "--workers",
        3,
        "--image-shape",
        "3x2x2",
        "--strategies",
        "submodular",
    ]
    flags += ["--embedding", "pca:3", "--function", "facility-location", "--variants"]
    done = run_job(
        "compare.py", *flags, f"learned=submodular --embedding {table}; cut=submodular --function graph-cut;"
    )
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [(row["name"], row["strategy"]) for row in rows] == [
        (name, "submodular") for name in ("submodular", "learned", "cut")
    ]
    for name in ("submodular", "learned", "cut"):
        assert f"\n{name} " in done.out
        assert f"<b>{name}</b>" in (tmp_path / "c" / "compare.html").read_text()
    params = {row["name"]: open_committed(Store(), f"{tmp_path}/c/{row['name']}").manifest["params"] for row in rows}
    assert {name: (of["embedding"], of["function"]) for name, of in params.items()} == {
        "submodular": ("pca:3", "facility-location"),
        "learned": (table, "facility-location"),
        "cut": ("pca:3", "graph-cut"),
    }
    alone = Request(str(source), str(tmp_path / "alone"), 3, shape=(3, 2, 2))
    shard(spark.sparkContext, alone, Submodular(embedding=table, function="facility-location"), QUIET)
    assert shas(tmp_path / "c" / "learned") == shas(tmp_path / "alone") != shas(tmp_path / "c" / "submodular")


def read(variants: str, *flags: str) -> dict[str, Strategy]:
    argv = ["--input", "in", "--output", "out", "--workers", "3", "--strategies", "random", "--variants", variants]
    return read_strategies(parse(comparison_parser("compare.py", None), [*argv, *flags]))


@pytest.mark.parametrize(
    ("variants", "line"),
    [
        ("submodular --function graph-cut", "--variants: submodular --function graph-cut: that is not NAME=STRATEGY"),
        ("a/b=hash", "a/b=hash: that is not NAME=STRATEGY"),
        (f"{'a' * 101}=hash", "that is not NAME=STRATEGY"),
        ("random=hash", "random=hash: random is the name of a strategy"),
        ("a=hash; a=random", "a=random has the name of another row"),
        ("a=nothing", "a=nothing: the strategy must be"),
        ("a=hash --family none", "a=hash --family none: argument --family: invalid choice: 'none'"),
        ("b=random; a=hash --functions 0", "a=hash --functions 0: --functions must be"),
        ("a=hash --workers 3", "a=hash --workers 3: unrecognized arguments: --workers 3"),
        ("a=random --functions 7", "unrecognized arguments: --functions 7"),
        ("a=hash --function graph-cut", "unrecognized arguments: --function graph-cut"),
        ("a=hash --help", "unrecognized arguments: --help"),
        ("a=hash # no", "unrecognized arguments: # no"),
        ("a=hash 'open", "--variants: No closing quotation in a=hash 'open"),
        ("a=hash --embedding {ds}/t", "{ds}"),
    ],
)
def test_a_variant_that_is_none_is_one_line(variants: str, line: str) -> None:
    with pytest.raises(UsageError, match=re.escape(line)):
        read(variants)


def test_a_variant_has_the_flags_of_all_under_its_own(tmp_path: Path) -> None:
    found = read(
        "a=hash --functions 4; b=hash --seed 7 --embedding 'x;y z/t';;c=random;", "--functions", "9", "--seed", "5"
    )
    assert found == {
        "random": Random(seed=5),
        "a": Hash(functions=4, seed=5),
        "b": Hash(functions=9, seed=7, embedding="x;y z/t"),
        "c": Random(seed=5),
    }
    defaults = tmp_path / "c.toml"
    defaults.write_text('ds = "2026-01-31"\nvariants = "a=hash --embedding {run_id}/t"\n')
    argv = ["--input", "in", "--output", "out", "--workers", "3", "--config", str(defaults), "--run-id", "r1"]
    found = read_strategies(parse(comparison_parser("compare.py", None), argv))
    assert found["a"] == Hash(embedding="r1/t")
