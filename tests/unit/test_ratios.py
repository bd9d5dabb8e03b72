"""Rows in uneven shares: against exact fractions, and measured speeds out of a run's log."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import pipeline
from pipeline.assignment.groups import group_table, rows_by_worker
from pipeline.assignment.sizes import named_ratios
from pipeline.assignment.speeds import measured_ratios, ratios_of
from pipeline.assignment.uneven import spread
from pipeline.core.errors import DataError, UsageError
from pipeline.core.shardset.ratios import largest_remainder, lowest_terms, parse_ratios
from pipeline.runs.request import Request
from trainer.runlog.events import COLUMNS

ratios_of_workers = st.lists(st.integers(1, 12), min_size=2, max_size=7)
group_sizes = st.lists(st.integers(0, 60), min_size=1, max_size=12)


def hamilton(size: int, ratios: list[int]) -> list[int]:
    """Largest remainder as the textbook has it, in exact fractions."""
    shares = [Fraction(size * ratio, sum(ratios)) for ratio in ratios]
    counts = [share.numerator // share.denominator for share in shares]
    by_remainder = sorted(range(len(ratios)), key=lambda worker: (counts[worker] - shares[worker], worker))
    for worker in by_remainder[: size - sum(counts)]:
        counts[worker] += 1
    return counts


@given(group_sizes, ratios_of_workers)
@settings(max_examples=100, deadline=None)
def test_every_group_is_cut_by_largest_remainder(sizes: list[int], ratios: list[int]) -> None:
    counts = largest_remainder(np.array(sizes), tuple(ratios))
    assert counts.tolist() == [hamilton(size, ratios) for size in sizes]


@given(group_sizes, ratios_of_workers)
@settings(max_examples=100, deadline=None)
def test_carrying_rounding_errors_keeps_totals_near_their_share(sizes: list[int], ratios: list[int]) -> None:
    """Handing on what rounding cost keeps totals near their share too."""
    counts = largest_remainder(np.array(sizes), tuple(ratios), carry=True)
    exact = [[Fraction(size * ratio, sum(ratios)) for ratio in ratios] for size in sizes]
    assert (counts.sum(axis=1) == sizes).all()
    for group, shares in zip(counts.tolist(), exact, strict=True):
        assert all(abs(count - share) < 1 for count, share in zip(group, shares, strict=True))
    for worker, total in enumerate(counts.sum(axis=0).tolist()):
        assert abs(total - sum(shares[worker] for shares in exact)) <= 1


@given(group_sizes, ratios_of_workers, st.sampled_from(["zero", "carry"]))
@settings(max_examples=100, deadline=None)
def test_a_table_deals_what_it_counts_and_mixes_it_evenly(sizes: list[int], ratios: list[int], start: str) -> None:
    lowest = lowest_terms(ratios, len(ratios))
    table = group_table(np.array(sizes), len(ratios), start, "never", lowest)  # type: ignore[arg-type]
    for group, size in enumerate(sizes):
        owners = table.owners(np.full(size, group), np.arange(size))
        counted = np.bincount(owners, minlength=len(ratios))
        assert counted.tolist() == rows_by_worker(table)[:, group].tolist()
        if lowest:
            held = np.cumsum(owners[:, None] == np.arange(len(ratios)), axis=0)
            share = np.arange(1, size + 1)[:, None] * np.array(ratios) / sum(ratios)
            assert (np.abs(held - share) < 2).all()
    shuffled = np.random.default_rng(0).permutation(sum(sizes))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    ranks = np.concatenate([np.arange(size) for size in sizes])
    assert (table.owners(groups, ranks)[shuffled] == table.owners(groups[shuffled], ranks[shuffled])).all()


@pytest.mark.slow
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any))
@settings(max_examples=200, deadline=None)
def test_every_first_part_of_a_spread_holds_the_shares_rounded(counts: list[int]) -> None:
    order = spread(counts)
    assert np.bincount(order, minlength=len(counts)).tolist() == counts
    held = np.cumsum(order[:, None] == np.arange(len(counts)), axis=0) * len(order)
    share = np.arange(1, len(order) + 1)[:, None] * np.array(counts)
    assert (np.abs(held - share) < len(order)).all()


def test_four_to_two_to_one_to_one_is_dealt_in_turns() -> None:
    assert spread((4, 2, 1, 1)).tolist() == [0, 1, 0, 2, 0, 1, 0, 3]
    table = group_table(np.array([11]), 4, ratios=(4, 2, 1, 1))  # shares 5.5, 2.75, 1.375, 1.375
    assert rows_by_worker(table)[:, 0].tolist() == [6, 3, 1, 1]


def test_sparse_groups_go_to_every_worker_whatever_its_share() -> None:
    table = group_table(np.array([4, 12]), 4, "carry", "le", (4, 2, 1, 1))
    assert table.sparse.tolist() == [True, False]
    assert rows_by_worker(table)[:, 0].tolist() == [4, 4, 4, 4]
    assert rows_by_worker(table)[:, 1].tolist() == hamilton(12, [4, 2, 1, 1]), "it hands nothing on"


def test_equal_ratios_are_none_and_others_are_in_lowest_terms() -> None:
    assert lowest_terms((3, 3, 3), 3) is None
    assert lowest_terms((7,) * 20_000, 20_000) is None, "however many workers there are"
    with pytest.raises(UsageError, match=r"with 20,001; so many workers can only have equal shares$"):
        lowest_terms((2,) + (1,) * 19_999, 20_000)
    assert lowest_terms((8, 4, 2, 2), 4) == (4, 2, 1, 1)
    assert parse_ratios("4:2:1:1") == (4, 2, 1, 1)


def test_named_sizes_follow_their_formula() -> None:
    """Exactly where whole numbers suffice, else to within a part of 16,384, with no worker without a part."""
    assert named_ratios("4:2:1:1", 4) == (4, 2, 1, 1)
    assert named_ratios("linear", 5) == (1, 2, 3, 4, 5)
    assert named_ratios("square", 4) == (1, 4, 9, 16)
    for name, formula in (("linear", lambda i: i), ("square", lambda i: i * i), ("exponential", np.exp)):
        for workers in (1, 3, 12, 300):
            ratios = named_ratios(name, workers)
            lowest_terms(ratios, workers)
            shares = formula(np.arange(1, workers + 1) / 1.0)
            wrong = np.array(ratios) / sum(ratios) - shares / shares.sum()
            assert np.abs(wrong).max() <= 1.1 * workers / (1 << 14)
            assert min(ratios) >= 1
            assert sorted(ratios) == list(ratios)


def test_lognormal_sizes_are_drawn_from_the_distribution() -> None:
    drawn = np.log(np.concatenate([_centred(named_ratios("lognormal:0.5", 100, seed)) for seed in range(20)]))
    assert stats.kstest(drawn / 0.5, stats.norm(scale=np.sqrt(0.99)).cdf).pvalue > 0.01
    assert (
        named_ratios("lognormal:0.5", 9, 1) == named_ratios("lognormal:0.5", 9, 1) != named_ratios("lognormal:0.5", 9)
    )


@pytest.mark.parametrize("text", ["linear", "exponential", "lognormal:1"])
def test_names_of_sizes_refuse_more_workers_than_parts(text: str) -> None:
    with pytest.raises(UsageError, match=rf"^--ratios {text} is for at most 16,384 workers, got 20,000; leave it out$"):
        named_ratios(text, 20_000)


def _centred(ratios: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Shares divided by their geometric mean."""
    shares = np.array(ratios, np.float64)
    result: npt.NDArray[np.float64] = shares / np.exp(np.log(shares).mean())
    return result


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "cubic",
            "^--ratios must be numbers such as 4:2:1:1, or linear, square, exponential or lognormal:S, got 'cubic'$",
        ),
        ("lognormal", "or lognormal:S, got 'lognormal'$"),
        ("lognormal:-1", "needs a number S above 0 and at most 10, such as 0.5, got '-1'$"),
    ],
)
def test_unknown_names_of_sizes_are_refused(text: str, line: str) -> None:
    with pytest.raises(UsageError, match=line):
        named_ratios(text, 4)


@pytest.mark.parametrize("text", ["linear", "exponential", "lognormal:1"])
def test_names_of_sizes_need_a_worker(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--workers must be at least 1, got -2$"):
        named_ratios(text, -2)


def test_the_number_of_workers_is_a_whole_number() -> None:
    """Accept numpy's whole numbers, as ratios do."""
    assert type(Request("in", "out", np.int64(3)).num_workers) is int  # type: ignore[arg-type]
    for number in (2.5, 2.0, True, "2"):
        with pytest.raises(UsageError, match=f"^--workers must be a whole number, got {number!r}$"):
            Request("in", "out", number)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "4", "4:x", "4::1", "4:-1", "1.5:1", "4:2:", "٤:1", "9" * 5000 + ":1"])
def test_what_is_no_ratio_is_refused_in_a_line(text: str) -> None:
    with pytest.raises(UsageError, match="--ratios"):
        lowest_terms(parse_ratios(text), 2)


def test_great_ratios_are_reduced_or_refused_for_their_sum() -> None:
    assert lowest_terms(parse_ratios("3000000000:1000000000"), 2) == (3, 1)
    with pytest.raises(UsageError, match=r"at most 16,384 in lowest terms, got 1:1000000000000 with .*; round them$"):
        lowest_terms(parse_ratios("1:1000000000000"), 2)


@pytest.mark.parametrize(
    ("ratios", "line"),
    [
        ((1, 2, 3), "must name 2 numbers, one per worker, got 3"),
        ((0, 2), "at least 1, got 0:2"),
        ((99_991, 99_989), "add up to at most 16,384 in lowest terms, got 99991:99989 with 199,980; round them"),
    ],
)
def test_ratios_that_cannot_be_dealt_in_are_refused(ratios: tuple[int, ...], line: str) -> None:
    with pytest.raises(UsageError, match=line):
        lowest_terms(ratios, 2)


def log_of(folder: Path, steps: list[tuple[int, int, float]]) -> Path:
    """A run's pushes.csv of (worker, examples, seconds)."""
    folder.mkdir(exist_ok=True)
    names = COLUMNS.split(",")
    lines = []
    for number, (worker, examples, seconds) in enumerate(steps):
        values = dict.fromkeys(names, "0") | {
            "version": str(number), "worker": str(worker), "examples": str(examples), "step_s": f"{seconds:.6f}",
        }  # fmt: skip
        lines.append(",".join(values[name] for name in names))
    (folder / "pushes.csv").write_text("\n".join([COLUMNS, *lines]) + "\n")
    return folder


def test_measured_speeds_are_examples_over_seconds_of_their_steps(tmp_path: Path) -> None:
    run = log_of(tmp_path / "run", [(0, 10, 0.1), (1, 10, 0.2), (0, 30, 0.3), (1, 10, 0.2), (2, 10, 0.4), (2, 0, 9.0)])
    assert measured_ratios(str(run)) == (100, 50, 25)
    assert pipeline.measured_ratios(str(run)) == (100, 50, 25)
    with (run / "pushes.csv").open("a") as file:
        file.write("3,7,1")  # a full disk
    assert measured_ratios(str(run)) == (100, 50, 25)
    with (run / "pushes.csv").open("a") as file:
        file.write("\n" + ",".join(["1"] * (len(COLUMNS.split(",")) - 2) + ["inf", "0"]) + "\n")
    assert measured_ratios(str(run)) == (100, 50, 25)


def test_speeds_of_very_many_workers_give_usable_ratios() -> None:
    """Speeds of very many workers still add up to ratios that can be dealt in."""
    speeds = np.random.default_rng(0).uniform(1, 10, 3000)
    assert lowest_terms(ratios_of(speeds), 3000)


def test_a_run_that_tells_no_speeds_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"pushes.csv is no file; --ratios-from names the --output of a training"):
        measured_ratios(str(tmp_path / "none"))
    with pytest.raises(DataError, match="no timed steps of worker 1"):
        measured_ratios(str(log_of(tmp_path / "gap", [(0, 10, 0.1), (2, 10, 0.1)])))
    (tmp_path / "folder" / "pushes.csv").mkdir(parents=True)
    with pytest.raises(UsageError, match="is no file"):
        measured_ratios(str(tmp_path / "folder"))
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "pushes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="is not the log of a training run"):
        measured_ratios(str(tmp_path / "odd"))
