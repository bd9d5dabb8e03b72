"""What a study says beside its comparisons: how far runs had come, what they were made on, evenness of shards, another
study, the paper."""

from __future__ import annotations

import math

from trainer.study.analysis import PRIMARY, Analysis, Member, Setting
from trainer.study.beside import ALL
from trainer.study.published import RUNS, published_of
from trainer.study.statistics import LEVEL, f_interval
from trainer.study.words import POINTS, QUALITIES, interval, listed, named, number, p_value, where

MAKERS = {
    "code": "versions of this program",
    "torch": "torch",
    "numpy": "numpy",
    "python": "Python",
    "processor": "processors",
}


def levelled(analysis: Analysis) -> str:
    """How long runs were, and what longer ones might still have gained."""
    said = []
    for setting in analysis.settings:
        baseline = setting.members.get(analysis.baseline)
        if baseline and baseline.curves and len(baseline.curves.epochs) > 1:
            last, gain = baseline.curves.epochs[-1], f"{POINTS * baseline.curves.last_gain:+.2f} points"
            said.append(
                f"over the last of {last:g} epochs {analysis.baseline}'s mean{where(analysis, setting)} moved by {gain}"
            )
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def unlike(analysis: Analysis) -> list[str]:
    """Whether the runs were made by different programs or machines: then bits of equal seeds may differ for that alone."""
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
    """What is tested otherwise than it was to be when the study began."""
    now, begun = {"baseline": analysis.baseline, "margin": analysis.margin}, analysis.begun
    return [
        f"The {key} was {begun[key]} when this study began, now {value}: a test that was chosen after looking proves less."
        for key, value in now.items()
        if begun.get(key, value) != value
    ]


def reservations(analysis: Analysis, setting: Setting, member: Member) -> list[str]:
    """What is wrong with runs that the numbers of a member rest on, or do not rest on."""
    runs, about = len(member.records), named(analysis, setting, member)
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
    """Whether the measures of shards predict spread among runs that differ in nothing else."""
    lines = []
    for test in analysis.qualities if analysis.compared == "sharding" else []:
        found = test.within
        if test.setting == setting.name and not math.isnan(found.rho):
            verb = "goes with" if found.adjusted_p < LEVEL else "could not be shown to go with"
            numbers = f"rank correlation within ways {found.rho:+.2f}, {found.runs} runs, p {p_value(found.adjusted_p)}"
            text = f"{verb} how far a run ends from the median of its way of sharding ({numbers})."
            lines.append(f"Evenness of shards by {QUALITIES[test.quality]}{where(analysis, setting)} {text}")
    return lines


def twins(analysis: Analysis, setting: Setting) -> list[str]:
    """How the same seeds ended in the study beside this one."""
    said = []
    for twins in analysis.twins:
        if twins.setting == setting.name:
            found, whose = twins.found, "of all together the" if twins.member == ALL else f"{twins.member}'s"
            low, high = (f"{POINTS * end:+.2f}" for end in found.difference_interval)
            text = f"{whose} mean is {POINTS * found.difference:+.2f} points off ({low} to {high}, {found.n} pairs)"
            if not math.isnan(found.sd_ratio_bootstrap.low) and twins.member != ALL:
                there = f"{number(found.sd_ratio)} times this one's ({interval(found.sd_ratio_f)})"
                text += f", and {analysis.beside}'s standard deviation is {there}"
            said.append(text)
    about = f"Beside the same seeds of {analysis.beside}{where(analysis, setting)}"
    return [f"{about}: {'; '.join(said)}."] if said else []


def paper(analysis: Analysis, setting: Setting) -> list[str]:
    """What the published ratios of standard deviations are worth, and whether these ones hold them."""
    printed = published_of(setting.dataset)
    if not printed or (analysis.compared, analysis.baseline) != ("sharding", "random"):
        return []
    said = []
    for name, member in setting.members.items():
        theirs, ours = printed.rows.get(name), member.comparisons[PRIMARY]
        if theirs and ours and not math.isnan(ours.sd_ratio_f.low):
            ratio = printed.rows["random"].accuracy_sd / theirs.accuracy_sd
            worth, (low, high) = f_interval(ratio, RUNS), ours.sd_ratio_f
            meets = "which overlap" if max(low, worth.low) <= min(high, worth.high) else "which do not overlap"
            said.append(
                f"{number(ratio)} for {name} ({interval(worth)}), here {number(low)} to {number(high)}, {meets}"
            )
    about = f"The paper's ratios of standard deviations, ResNet-56, {RUNS} runs a side{where(analysis, setting)}"
    return [f"{about}: {'; '.join(said)}."] if said else []
