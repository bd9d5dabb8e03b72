"""The interpretation of the figures in plain language: a comparison of a set with a random split."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pipeline.core.shardset.parts import Repeats
from pipeline.quality.metrics import ChiSquare, ClassSkew, Quality

SURE = 0.01  # call a split non-random only if chance gives such a split in less than 1 % of cases


class Verdict(NamedTuple):
    """A statement about a set. level: a comparison of its evenness with a random split, not of its fitness for a purpose."""

    level: Literal["better", "as random", "worse", "note"]
    text: str


def verdict(measured: Quality, repeats: Repeats | None = None) -> list[Verdict]:
    """Return the verdicts on sizes, copies, classes, neighbourhoods and images, then one note per sentence about repeated
    images.

    repeats: the images that occur twice, if they were looked for."""
    sentences = repeats.sentences() if repeats else []
    return _verdict(measured) + [Verdict("note", f"{text[0].upper()}{text[1:]}.") for text in sentences]


def _verdict(measured: Quality) -> list[Verdict]:
    # A single shard is the whole set, for which a comparison with a random split says nothing.
    if len(measured.shards) == 1:
        return [Verdict("note", f"One worker holds all {measured.rows:,} examples: nothing was divided.")]
    sizes = f"{len(measured.shards)} shards hold {measured.min_rows:,} to {measured.max_rows:,} rows"
    if measured.min_rows == measured.max_rows:
        sizes = f"Each of the {len(measured.shards)} shards holds {measured.max_rows:,} rows"
    ratio = "" if measured.size_ratio is None else f" (largest / smallest = {measured.size_ratio:.3f})"
    findings = [Verdict("note", f"{sizes}{ratio}.")]
    if measured.min_rows == 0:
        findings.append(Verdict("worse", "At least one shard is empty: its worker has nothing to train on."))
    # A note and not a fault: the strategy copies sparse groups on purpose.
    if measured.copies:
        share = measured.duplicate_share
        rows = "row is a copy" if measured.copies == 1 else "rows are copies"
        text = f"{measured.copies:,} {rows} ({share:.2%}): every worker has the sparse groups, as intended."
        findings.append(Verdict("note", text))
    if measured.classes:
        findings.append(spread_finding(measured.classes, "Classes"))
        if measured.skew and findings[-1].level == "worse":
            findings.append(skew_finding(measured.skew))
    if measured.neighbourhoods:
        findings.append(spread_finding(measured.neighbourhoods, "Dense neighbourhoods"))
    if measured.mmd_ratio is not None:
        findings.append(distance_finding(measured.mmd_ratio, measured.mmd_ratio_sd))
    return findings


def spread_finding(test: ChiSquare, subject: str) -> Verdict:
    """Judge a chi-square test on both sides: a table can be too even as well as too uneven."""
    aside = f"chi-square / dof = {test.per_dof:,.3f}, random split ≈\u00a01"
    if test.p_value < SURE:
        return Verdict("worse", f"{subject} are spread over the workers less evenly than in a random split ({aside}).")
    if test.p_value > 1 - SURE:
        return Verdict("better", f"{subject} are spread over the workers more evenly than in a random split ({aside}).")
    return Verdict("as random", f"{subject} are spread over the workers as evenly as in a random split ({aside}).")


def skew_finding(skew: ClassSkew) -> Verdict:
    """Say how far the class shares of shards are from the whole set's, and how many classes a worker sees."""
    return Verdict(
        "note",
        f"The class shares of a shard differ by {skew.total_variation:.3f} from those of all rows (mean total variation;"
        f" random split ≈\u00a0{skew.random_total_variation:.3f}); a shard is as diverse as"
        f" {skew.effective_classes:.1f} equally frequent classes, the whole set as {skew.whole_effective_classes:.1f}.",
    )


def distance_finding(ratio: float, sd: float | None) -> Verdict:
    """Compare the mean MMD ratio with two standard deviations of a random split."""
    # Two standard deviations contain about 95 % of random splits.
    band = 2 * (sd or 0.0)
    aside = f"distance ratio {ratio:.2f}, random split 1.00\u00a0±\u00a0{band:.2f}"
    if ratio < 1 - band:
        return Verdict(
            "better", f"The images of each shard resemble the whole set more than those of a random shard ({aside})."
        )
    if ratio > 1 + band:
        return Verdict(
            "worse", f"The images of each shard resemble the whole set less than those of a random shard ({aside})."
        )
    return Verdict(
        "as random", f"The images of each shard resemble the whole set as those of a random shard do ({aside})."
    )
