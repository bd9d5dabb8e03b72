"""jobs/compare.py with variants of a strategy, each with flags of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.core.command_line import parse
from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.contract import Manifest
from pipeline.core.shardset.manifest import ShardSet
from pipeline.core.shardset.parts import Input, Worker
from pipeline.core.storage.store import Store
from pipeline.runs.compare import check_same_rows, comparison_parser, read_strategies, run_comparison
from pipeline.strategies import Strategy
from pipeline.strategies.distribution_aware import DistributionAware
from pipeline.strategies.hash import Hash
from pipeline.strategies.random import Random


def read(variants: str, *flags: str) -> dict[str, Strategy]:
    argv = ["--input", "in", "--output", "out", "--workers", "3", "--strategies", "random", "--variants", variants]
    return read_strategies(parse(comparison_parser("compare.py", None), [*argv, *flags]))


@pytest.mark.parametrize(
    ("variants", "line"),
    [
        ("submodular --function graph-cut", "--variants: submodular --function graph-cut: it must be NAME=STRATEGY"),
        ("a/b=hash", "a/b=hash: it must be NAME=STRATEGY"),
        (f"{'a' * 101}=hash", "it must be NAME=STRATEGY"),
        ("random=hash", "random=hash: random is the name of a strategy"),
        ("a=hash; a=random", "a=random has a name that is already used"),
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


def test_a_comparison_without_measures_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"^the table of compare is of the measures of quality: leave out --no-report$"
    ):
        run_comparison("compare.py", None, ["--input", "in", "--output", "out", "--workers", "3", "--no-report"])


def test_a_variant_has_the_flags_of_all_under_its_own(tmp_path: Path) -> None:
    variants = "a=hash --functions 4; b=hash --seed 7 --embedding 'x;y z/t';;c=random;"
    found = read(variants, "--functions", "9", "--seed", "5")
    assert found == {
        "random": Random(seed=5),
        "a": Hash(functions=4, seed=5),
        "b": Hash(functions=9, seed=7, embedding="x;y z/t"),
        "c": Random(seed=5),
    }
    presets = read("p=distribution_aware --preset paper-like; q=distribution_aware --preset plain --components 7")
    assert presets["p"] == DistributionAware(preset="paper-like")
    assert presets["q"] == DistributionAware(preset="plain", components=7.0)
    defaults = tmp_path / "c.toml"
    defaults.write_text('ds = "2026-01-31"\nvariants = "a=hash --embedding {run_id}/t"\n')
    argv = ["--input", "in", "--output", "out", "--workers", "3", "--config", str(defaults), "--run-id", "r1"]
    found = read_strategies(parse(comparison_parser("compare.py", None), argv))
    assert found["a"] == Hash(embedding="r1/t")


def test_an_input_that_changes_between_strategies_is_found() -> None:
    first, same, other = (
        ShardSet(Store(), name, Manifest(num_workers=1, workers=[Worker(files=[])], input=Input(fingerprint=rows)))
        for name, rows in (("a", "6-1f"), ("b", "6-1f"), ("c", "6-2f"))
    )
    check_same_rows(same, first)
    with pytest.raises(DataError, match=r"^c and a hold different rows: the input has changed; run it again$"):
        check_same_rows(other, first)
