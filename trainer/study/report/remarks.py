"""Remarks beside the comparisons: convergence, environments, evenness of shards, another study, and the paper."""

from __future__ import annotations

import math

from trainer.study.analysis.analyse import FEWEST, PRIMARY, Analysis, Member, Setting
from trainer.study.analysis.published import RUNS, published_of
from trainer.study.analysis.statistics import LEVEL, f_interval
from trainer.study.analysis.twins import ALL, Twins
from trainer.study.report.words import POINTS, QUALITIES, interval, listed, named, number, p_value, where

MAKERS = {
    "code": "versions of this program",
    "torch": "torch",
    "numpy": "numpy",
    "python": "Python",
    "processor": "processors",
    "device": "devices",
}


def levelled(analysis: Analysis) -> str:
    """Return a sentence on the length of the runs and the gain of their last epoch, which longer runs might extend."""
    said = []
    for setting in analysis.settings:
        baseline = setting.members.get(analysis.baseline)
        if baseline and baseline.curves and len(baseline.curves.epochs) > 1:
            last = baseline.curves.epochs[-1]
            gain = f"{POINTS * baseline.curves.last_gain:+.2f} points"
            said.append(
                f"over the last of {last:g} epochs {analysis.baseline}'s mean{where(analysis, setting)} moved by {gain}"
            )
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def unlike(analysis: Analysis) -> list[str]:
    """Return a warning if different programs or machines made the runs.

    Runs with equal seeds may then differ in their bits for that reason alone."""
    lines = []
    for key, words in MAKERS.items():
        counts: dict[str, int] = {}
        for environment, runs in analysis.environments:
            value = str(environment.get(key, "unknown"))
            counts[value] = counts.get(value, 0) + runs
        if len(counts) > 1:
            lines.append(f"{words}: {listed([f'{value} ({runs} runs)' for value, runs in counts.items()])}")
    return [f"Not all runs were made alike: {'; '.join(lines)}."] if lines else []


def chosen_later(analysis: Analysis) -> list[str]:
    """Return warnings for a baseline or margin that changed after the study began."""
    now = {"baseline": analysis.baseline, "margin": analysis.margin}
    begun = analysis.begun
    return [
        f"The {key} was {begun[key]} when this study began, now {value}: a test that was chosen after looking proves less."
        for key, value in now.items()
        if begun.get(key, value) != value
    ]


def seeds_chosen(analysis: Analysis) -> list[str]:
    """Return warnings if the seeds changed since the study began, or if the ledger holds runs that are not used."""
    said = []
    begun = analysis.begun.get("seeds", analysis.planned_seeds)
    if begun != analysis.planned_seeds:
        text = "seeds that are added, or left out, after looking at the tests make these prove less."
        said.append(f"This study began with {begun} seeds and has {analysis.planned_seeds} now: {text}")
    if analysis.left_out:
        runs = f"{analysis.left_out:,} {'runs' if analysis.left_out > 1 else 'run'}"
        said.append(f"{runs} of the ledger, of other seeds or of cells that are skipped, are in no number here.")
    return said


def same_shards(analysis: Analysis, setting: Setting) -> list[str]:
    """Return a remark on the ways of sharding whose shards are the same for every seed."""
    shards = {name: [record["shards"] for record in member.records] for name, member in setting.members.items()}
    same = [name for name, digests in shards.items() if len(digests) > 1 == len(set(digests))]
    if analysis.compared != "sharding" or not same:
        return []
    text = f"Shards are the same for every seed with {listed(same)}{where(analysis, setting)}"
    return [f"{text}: their spread is that of the other things that a seed changes."]


def reservations(analysis: Analysis, setting: Setting, member: Member) -> list[str]:
    """Return warnings about runs of a member that diverged, learned nothing or repeated another run."""
    runs = len(member.records)
    about = named(analysis, setting, member)
    idle = sum(record.get("learned") is False for record in member.records)
    said = []
    if member.diverged:
        said.append(f"{about}: {member.diverged} of {runs} runs diverged, and are in no mean.")
    if idle:
        said.append(f"{about}: {idle} of {runs} runs learned nothing: they ended as good as guessing.")
    if member.repeats:
        text = (
            f"{member.repeats} of its runs ended with the bits of another: what the seeds change does not reach them,"
        )
        said.append(f"{about}: {text} and tests count them as if it did.")
    return said


def evenness(analysis: Analysis, setting: Setting) -> list[str]:
    """Return sentences on the correlation of shard measures with spread, among runs that differ in nothing else."""
    lines = []
    for test in analysis.qualities if analysis.compared == "sharding" else []:
        found = test.within
        if test.setting == setting.name and not math.isnan(found.rho):
            verb = "goes with" if found.adjusted_p < LEVEL else "could not be shown to go with"
            numbers = f"rank correlation within ways {found.rho:+.2f}, {found.runs} runs of ways whose shards"
            numbers = f"{numbers} differ, p {p_value(found.adjusted_p)}"
            text = f"{verb} how far a run ends from the median of its way of sharding ({numbers})."
            lines.append(f"Evenness of shards by {QUALITIES[test.quality]}{where(analysis, setting)} {text}")
    return lines


def twins(analysis: Analysis, setting: Setting) -> list[str]:
    """Return sentences on the same runs in the study beside this one, and on other differences between the two."""
    other = analysis.beside
    found = [twins for twins in analysis.twins if twins.setting == setting.name]
    if not other:
        return []
    if not found:
        few = f"has no {FEWEST} runs of equal images and shards"
        return [f"Beside {other}{where(analysis, setting)} nothing can be held: it {few}, or is not there."]
    same = all(twins.same_seeds for twins in found)
    runs = "the same seeds" if same else "the runs of equal images and shards, but other seeds,"
    lines = [f"Beside {runs} of {other}{where(analysis, setting)}: {'; '.join(_twin(analysis, t) for t in found)}."]
    # Members without enough common runs are named, so that they are not taken for compared.
    if lone := [name for name in setting.members if name not in {twins.member for twins in found}]:
        lines.append(f"Of {listed(lone)} {other} has no {FEWEST} runs of equal images and shards.")
    if differing := [words for key, words in MAKERS.items() if any(_differ(twins, key) for twins in found)]:
        lines.append(
            f"Its runs were made by other {listed(differing)} than these: what differs may come from that too."
        )
    return lines


def _twin(analysis: Analysis, twins: Twins) -> str:
    found = twins.found
    whose = "of all together, averaged by seed, the" if twins.member == ALL else f"{twins.member}'s"
    low, high = (f"{POINTS * end:+.2f}" for end in found.difference_interval)
    side = "higher" if found.difference >= 0 else "lower"
    points = abs(POINTS * found.difference)
    pairs = f"{found.n} {'seeds' if twins.member == ALL else 'pairs'}"
    text = f"{whose} mean is {points:.2f} points {side} here ({low} to {high}, {pairs})"
    if not math.isnan(found.sd_ratio_bootstrap.low) and twins.member != ALL:
        there = f"{number(found.sd_ratio)} times this one's ({interval(found.sd_ratio_f)})"
        text += f", and {analysis.beside}'s standard deviation is {there}"
    return text


def _differ(twins: Twins, key: str) -> bool:
    """True if the makers of the runs differ in a property that both studies recorded. Older studies recorded fewer."""
    here, there = ({str(made[key]) for made, _ in side if key in made} for side in twins.made)
    return bool(here and there) and here != there


def paper(analysis: Analysis, setting: Setting) -> list[str]:
    """Return a sentence with the published ratios of standard deviations and their overlap with the ratios here."""
    printed = published_of(setting.dataset)
    if not printed or (analysis.compared, analysis.baseline) != ("sharding", "random"):
        return []
    said = []
    for name, member in setting.members.items():
        theirs = printed.rows.get(name)
        ours = member.comparisons[PRIMARY]
        if theirs and ours and not math.isnan(ours.sd_ratio_f.low):
            ratio = printed.rows["random"].accuracy_sd / theirs.accuracy_sd
            # The paper gives no intervals; these follow from its number of runs.
            worth = f_interval(ratio, RUNS)
            (low, high) = ours.sd_ratio_f
            meets = "which overlap" if max(low, worth.low) <= min(high, worth.high) else "which do not overlap"
            said.append(
                f"{number(ratio)} for {name} ({interval(worth)}), here {number(low)} to {number(high)}, {meets}"
            )
    about = f"The paper's ratios of standard deviations, ResNet-56, {RUNS} runs a side{where(analysis, setting)}"
    return [f"{about}: {'; '.join(said)}."] if said else []
