"""The tables of a study: built once as rows of text, and written as CSV, LaTeX and Markdown. Pure.

A member is one of the things that a study compares, such as a strategy."""

from __future__ import annotations

import csv
import io
import math
from statistics import median

from trainer.study.analysis.curves import times_to
from trainer.study.analysis.results import Analysis, StudySetting
from trainer.study.analysis.sides import MEASURES, PRIMARY, ComparisonSide, sharding_seconds
from trainer.study.analysis.statistics import LEVEL
from trainer.study.analysis.twins import ALL
from trainer.study.report.findings import findings
from trainer.study.report.published_tables import published_tables
from trainer.study.report.table import (
    Table,
    difference_in_points,
    ends_in_points,
    ends_in_words,
    fixed,
    short,
    to_latex_table,
    to_markdown_table,
)
from trainer.study.report.words import POINTS, QUALITIES, QUALITIES_IN_FULL, number, p_value, runs_in_words

NAMES = {
    "final_accuracy": "final accuracy",
    "best_accuracy": "best accuracy",
    "final_loss": "final loss",
    "train_accuracy": "accuracy, training rows",
    "train_loss": "loss, training rows",
    "running_train_accuracy": "accuracy as it was trained, last epoch",
    "running_train_loss": "loss as it was trained, last epoch",
    "worst_class_accuracy": "accuracy of the worst class",
    "worst_neighbourhood_accuracy": "accuracy of the worst neighbourhood",
    "seconds": "training time, s",
    "sent_bytes": "bytes of gradients and parameters sent",
}
IN_SHORT = "In short"  # the caption of a table that answers the question of the study
VALUES = ("runs", "mean", "95 %", "sd", "variance", "least", "most")
TESTS = (
    "95 % (F)", "95 % (bootstrap)", "p of mean", "p of mean, adjusted", "p of spread", "p of spread, adjusted",
    "p of equivalence, adjusted", "correlation of pairs",
)  # fmt: skip
PRINTED = ("final_accuracy", "best_accuracy", "final_loss")
EXTRA = tuple(key for key in NAMES if key not in PRINTED)
COLUMNS = (
    "setting", "member", "measure", "runs", "diverged", "mean", "mean_low", "mean_high", "sd", "sd_low", "sd_high",
    "variance", "least", "most", "pairs", "sd_ratio", "sd_ratio_f_low", "sd_ratio_f_high", "sd_ratio_bootstrap_low",
    "sd_ratio_bootstrap_high", "spread_p", "brown_forsythe_p", "adjusted_spread_p",
    "difference", "difference_low", "difference_high",
    "difference_p", "adjusted_difference_p", "equivalence_p", "adjusted_equivalence_p",
    "correlation", "skewness", "flipped_spread_p", "flipped_difference_p",
)  # fmt: skip


def tables(analysis: Analysis) -> list[Table]:
    """Return every table of the report, setting by setting."""
    return [table for setting in analysis.settings for table in setting_tables(analysis, setting)]


def setting_tables(analysis: Analysis, setting: StudySetting) -> list[Table]:
    """Return all tables of a setting: of measures, whole curves, staleness and time, and of comparisons with others.

    A study that compares ways of sharding also has tables on the evenness of the shards."""
    result = [answer_table(analysis, setting)]
    measured = [key for key in PRINTED if any(key in m.summaries for m in setting.members.values())]
    result += [table for key in measured for table in _measure(analysis, setting, key)]
    result += [
        *_extra_measures(setting),
        *_images(analysis, setting),
        _curve(analysis, setting),
        *_accuracy_by_time(analysis, setting),
        *_times(analysis, setting),
        _work(setting),
    ]
    result += _components(setting)
    # Other axes have the same shards on both sides, which explain nothing.
    if analysis.compared == "sharding":
        result += [_quality(setting), *_evenness_correlations(analysis, setting)]
    return [*result, *_compare_studies(analysis, setting), *published_tables(analysis, setting)]


def answer_table(analysis: Analysis, setting: StudySetting) -> Table:
    """Return the table for a reader who has a minute: difference of means, ratio of sds, cost and evidence by member.

    Cost is the mean training time and the bytes of a run and, if ways of sharding are compared, the median time of sharding,
    because a set that was made beside other work may take many times as long."""
    rows = []
    for member in setting.members.values():
        c = member.comparisons.get(PRIMARY)
        mean = ratio = "-"
        if c:
            mean = difference_in_points(c)
            ratio = f"{number(c.sd_ratio)} ({ends_in_words(c.sd_ratio_f)})"
        traffic = member.summaries.get("sent_bytes")
        costs = [f"{member.seconds:,.1f}", f"{traffic.mean / 1e6:,.1f}" if traffic else "-"]
        # Shards are made once per seed, before the training.
        sharding = sharding_seconds(member.records)
        costs += [number(median(sharding)) if sharding else "-"] if analysis.compared == "sharding" else []
        rows.append((member.name, mean, ratio, *costs, evidence(analysis, member)))
    base = analysis.baseline
    costs_header = (
        "training, s",
        "gradients and parameters sent, MB",
        *(["sharding, s"] if analysis.compared == "sharding" else []),
    )
    header = (
        analysis.compared, f"mean - mean of {base}, points (95 %)", f"sd of {base} / sd (95 %)", *costs_header, "evidence",
    )  # fmt: skip
    return Table(f"{IN_SHORT}, final accuracy: {setting.name}", header, rows)


def evidence(analysis: Analysis, member: ComparisonSide) -> str:
    """Return in words what the tests of a member show, with its number of pairs."""
    c = member.comparisons.get(PRIMARY)
    if c is None:
        return "baseline" if member.name == analysis.baseline else "not compared"
    mean = "mean undecided"
    if c.adjusted_difference_p < LEVEL:
        mean = f"mean differs, p {p_value(c.adjusted_difference_p)}"
    elif c.adjusted_equivalence_p < LEVEL:
        mean = f"mean equal within {POINTS * analysis.margin:g}"
    spread = (
        "spread differs, p " + p_value(c.adjusted_spread_p) if c.adjusted_spread_p < LEVEL else "spread: none shown"
    )
    return f"{mean}; {spread}; {c.n} pairs"


def _measure(analysis: Analysis, setting: StudySetting, key: str) -> list[Table]:
    """Return the table of a measure's values and, if a member can be compared with the baseline, of the comparisons.

    key: of NAMES."""
    values = []
    comparison_rows = []
    for member in setting.members.values():
        s = member.summaries.get(key)
        if s is None:
            continue
        # A single run has no interval.
        mean = (fixed(s.mean), ends_in_words(s.mean_interval, fixed))
        spread = (short(s.sd), short(s.variance), fixed(s.least), fixed(s.most))
        values.append((member.name, str(s.n), *mean, *spread))
        if c := member.comparisons.get(key):
            difference = (f"{c.difference:+.4f}", ends_in_words(c.difference_interval, "{:+.4f}".format))
            ratio = (number(c.sd_ratio), ends_in_words(c.sd_ratio_f), ends_in_words(c.sd_ratio_bootstrap))
            ps = (c.difference_p, c.adjusted_difference_p, c.spread_p, c.adjusted_spread_p)
            equivalence = p_value(c.adjusted_equivalence_p) if "accuracy" in key else ""
            cells = (*difference, *ratio, *map(p_value, ps), equivalence, number(c.correlation))
            comparison_rows.append((member.name, str(c.n), *cells))
    name = NAMES[key].capitalize()
    base = analysis.baseline
    tables = [Table(f"{name}: {setting.name}", (analysis.compared, *VALUES), values)]
    if comparison_rows:
        header = (analysis.compared, "pairs", f"mean - mean of {base}", "95 %", f"sd of {base} / sd", *TESTS)
        tables.append(Table(f"{name} compared with {base}: {setting.name}", header, comparison_rows))
    return tables


def _components(setting: StudySetting) -> list[Table]:
    """Return the table of components of variance, in percentage points; none unless the design is crossed."""
    rows = []
    for member in setting.members.values():
        if c := member.components:
            # Components are a tenth of the differences of means, so that they need one digit more.
            ends = ends_in_points(c.set_interval, ".3f")
            sds = (f"{POINTS * c.seed_sd:.3f}", f"{POINTS * c.rest_sd:.3f}")
            ps = (p_value(c.set_p), p_value(c.adjusted_set_p))
            rows.append((member.name, f"{c.sets} x {c.seeds}", f"{POINTS * c.set_sd:.3f}", ends, *ps, *sds))
    header = (
        "",
        "sets x seeds",
        "sd by sets, points",
        "95 %",
        "p of no effect of sets",
        "p, adjusted",
        "sd by seeds",
        "sd of the rest",
    )
    caption = f"Components of the variance of the final accuracy: {setting.name}"
    return [Table(caption, header, rows), _set_means(setting)] if rows else []


def _set_means(setting: StudySetting) -> Table:
    """Return the table of mean final accuracies by shard set, each over the seeds that all sets have.

    Equal numbers of different members are different sets. In parentheses: minus the mean of all sets, in points."""
    columns = {name: m.components.set_means for name, m in setting.members.items() if m.components}
    rows = []
    for number_of_set in range(max(map(len, columns.values()))):
        cells = []
        for means in columns.values():
            mean = means[number_of_set]
            cells.append(f"{mean:.4f} ({POINTS * (mean - sum(means) / len(means)):+.2f})")
        rows.append((str(number_of_set), *cells))
    return Table(f"Mean final accuracy by shard set: {setting.name}", ("set", *columns), rows)


def _extra_measures(setting: StudySetting) -> list[Table]:
    """Return the table of all further measures: training, the worst class and neighbourhood, time and bytes.

    Every cell is a mean and a standard deviation over runs. Their tests are in results.csv, since they are exploratory."""
    keys = [key for key in EXTRA if any(key in m.summaries for m in setting.members.values())]
    rows = []
    for member in setting.members.values():
        summaries = [member.summaries.get(key) for key in keys]
        if any(summaries):
            rows.append((member.name, *("-" if s is None else f"{s.mean:.4g} ({short(s.sd)})" for s in summaries)))
    caption = f"Training, worst groups and cost, mean (sd): {setting.name}"
    return [Table(caption, ("", *(NAMES[key] for key in keys)), rows)] if rows else []


def _images(analysis: Analysis, setting: StudySetting) -> list[Table]:
    """Return the table of churn and of the classes that are worst on average; none for ledgers without predictions."""
    rows = []
    for member in setting.members.values():
        if member.churn:
            c = member.churn
            ends = ends_in_points(c.interval, ".2f")
            difference = "-" if math.isnan(c.difference) else f"{POINTS * c.difference:+.2f}"
            ps = (p_value(c.p), p_value(c.adjusted_p))
            rows.append((member.name, str(c.runs), f"{POINTS * c.share:.2f}", ends, difference, *ps, _worst(member)))
    base = analysis.baseline
    header = (
        "", "runs", "churn, %", "95 %", f"churn - churn of {base}, points", "p", "p, adjusted", "worst class: accuracy",
    )  # fmt: skip
    caption = f"Churn, the share of evaluation images on which two seeds' models disagree: {setting.name}"
    return [Table(caption, header, rows)] if rows else []


def _worst(member: ComparisonSide) -> str:
    """Return the class with the lowest mean accuracy over runs, and this accuracy."""
    tables = [record["class_accuracy"] for record in member.records if record.get("class_accuracy")]
    means = {
        number: sum(values) / len(values)
        for number, values in enumerate(zip(*tables, strict=True))
        if None not in values
    }
    worst = min(means, key=lambda number: means[number], default=None)
    return "-" if worst is None else f"{worst}: {means[worst]:.4f}"


def _curve(analysis: Analysis, setting: StudySetting) -> Table:
    """Return the table on whole learning curves, with a row per member.

    The ratio of distances is the baseline's mean distance from its median curve over the member's; above 1 the member
    is steadier. Its p-values are before and after Holm's adjustment. The best epoch is the mean over runs of the epoch
    with the best evaluation. The gain is the change of the mean accuracy from the last but one evaluation to the last,
    in percentage points. Values that cannot be computed are "-"."""
    header = (
        analysis.compared,
        "ratio of distances",
        "p",
        "p, adjusted",
        "best epoch, mean",
        "gain since the evaluation before, points",
    )
    rows = []
    for member in setting.members.values():
        epochs = [record["best_epoch"] for record in member.records if record["best_epoch"] is not None]
        best = f"{sum(epochs) / len(epochs):.1f}" if epochs else "-"
        gain = "-"
        # A gain in the last epoch reveals runs that were still improving when they ended.
        if member.curves and len(member.curves.epochs) > 1:
            gain = f"{POINTS * member.curves.last_gain:+.2f}"
        ratio_and_ps = (number(member.curve_ratio), p_value(member.curve_p), p_value(member.curve_adjusted_p))
        rows.append((member.name, *ratio_and_ps, best, gain))
    return Table(f"Spread over the whole curve (mean distance from the median curve): {setting.name}", header, rows)


def _accuracy_by_time(analysis: Analysis, setting: StudySetting) -> list[Table]:
    """Return the table of accuracies at the plan's times and, if a member can be compared, of differences in points.

    A mean that some runs lack, because they have no evaluation by then, has the number of those that have one."""
    values = []
    differences = []
    times: tuple[str, ...] = ()
    for member in setting.members.values():
        times = tuple(f"{each.seconds:g} s" for each in member.accuracy_by_time)
        runs = len(member.records) - member.diverged
        cells = []
        for s in (each.summary for each in member.accuracy_by_time):
            count = f", {s.n} of {runs} runs" if s and s.n < runs else ""
            cells.append(f"{fixed(s.mean)} ({short(s.sd)}){count}" if s else "-")
        values.append((member.name, *cells))
        pairs = [each.difference for each in member.accuracy_by_time]
        # The baseline has no differences, and neither has a member with too few pairs.
        if any(pairs):
            points = [f"{POINTS * d.mean:+.2f} ({ends_in_points(d.mean_interval)})" if d else "-" for d in pairs]
            differences.append((member.name, *points))
    header = (analysis.compared, *times)
    base = analysis.baseline
    result = [Table(f"Accuracy by time of training, mean (sd): {setting.name}", header, values)] if times else []
    if differences:
        caption = f"Accuracy by time of training - accuracy of {base}, points (95 %): {setting.name}"
        result.append(Table(caption, header, differences))
    return result


def _times(analysis: Analysis, setting: StudySetting) -> list[Table]:
    """Return the tables of the times to the plan's targets, over the runs that reach them; none without a target."""
    tables = []
    for key, target, words in (
        ("accuracy", analysis.target, "an evaluation accuracy"), ("train_loss", analysis.target_loss, "a training loss"),
    ):  # fmt: skip
        if target is None:
            continue
        rows = []
        for member in setting.members.values():
            times = times_to(key, target, member.records)
            ends = (f"{min(times):,.1f}", f"{max(times):,.1f}") if times else ("-", "-")
            mean = f"{sum(times) / len(times):,.1f}" if times else "-"
            rows.append((member.name, f"{len(times)} of {len(member.records)}", mean, *ends))
        header = (analysis.compared, "runs that reach it", "mean, s", "least", "most")
        tables.append(Table(f"Training time to {words} of {target:g}: {setting.name}", header, rows))
    return tables


def _work(setting: StudySetting) -> Table:
    """Return the table of staleness and work, of the runs that did not diverge.

    Staleness, time and updates are means per run; rejected gradients and restarts are sums over runs."""
    header = ("", "staleness, mean, in updates", "training time, s", "updates", "rejected gradients", "restarts")
    rows = []
    for member in setting.members.values():
        whole = [record for record in member.records if record["failed"] is None]
        if whole:
            sums = [sum(record[key] for record in whole) for key in ("updates", "rejected", "restarts")]
            mean = f"{sums[0] / len(whole):,.0f}"
            rows.append(
                (member.name, f"{member.staleness:.2f}", f"{member.seconds:,.1f}", mean, str(sums[1]), str(sums[2]))
            )
    return Table(f"Staleness and time: {setting.name}", header, rows)


def _quality(setting: StudySetting) -> Table:
    """Return the table of the evenness of shards, with a row per way of sharding: means over its runs."""
    header = (
        "sharding",
        *QUALITIES_IN_FULL.values(),
        "Cramer's V",
        "copies",
        "sparse groups",
        "rows, largest / least",
    )
    rows = []
    for member in setting.members.values():
        q = member.quality
        # Shard sizes differ by few rows in thousands, so their ratio needs more digits than the other measures.
        cells = (number(q["mmd_ratio"]), number(q["chi_square"]), number(q["cramers_v"]))
        rows.append((member.name, *cells, number(q["copies"]), number(q["sparse"]), f"{q['size_ratio']:.4f}"))
    return Table(f"Evenness of the shards: {setting.name}", header, rows)


def _evenness_correlations(analysis: Analysis, setting: StudySetting) -> list[Table]:
    """Return the table of correlations between the evenness of shards and the spread of runs, one row per measure.

    The spread of a run is the distance of its final accuracy from the median over all runs of its strategy. The list is
    empty if the analysis has no test for this setting. QualityTest defines the columns."""
    header = (
        "measure",
        "over all runs",
        "without",
        "over the rest",
        "within strategies",
        "runs within",
        "p",
        "p, adjusted",
    )
    rows = []
    for test in analysis.qualities:
        if test.setting == setting.name:
            # One very uneven member can dominate the correlation over all runs, so it is also shown without it.
            between = (number(test.over_all.rho), test.least_even, number(test.without.rho))
            within = test.within
            tested = (number(within.rho), str(within.runs), p_value(within.p), p_value(within.adjusted_p))
            rows.append((QUALITIES[test.quality], *between, *tested))
    caption = (
        f"Evenness and spread: rank correlation with a run's distance from the median of its strategy: {setting.name}"
    )
    return [Table(caption, header, rows)] if rows else []


def _compare_studies(analysis: Analysis, setting: StudySetting) -> list[Table]:
    """Return the table that compares members with the same runs in the study ``beside``; no table without such runs.

    The row ALL, the mean over all members, has no standard deviations (see Twins)."""
    other = analysis.beside
    header = (
        analysis.compared, "pairs", "mean", f"mean, {other}", "difference, points", "95 %", "p of equivalence", "sd",
        f"sd, {other}", f"sd of {other} / sd", "95 % (F)", "correlation (95 %)", "staleness", f"staleness, {other}",
    )  # fmt: skip
    rows = []
    for twins in analysis.twins:
        if twins.setting == setting.name:
            c = twins.found
            ends = ends_in_points(c.difference_interval)
            means = (*map(fixed, twins.mean), f"{POINTS * c.difference:+.2f}", ends, p_value(c.equivalence_p))
            sds = ("-",) * 5
            if twins.member != ALL:
                correlation = f"{c.correlation:.2f} ({ends_in_words(twins.correlation_interval, '{:.2f}'.format)})"
                sds = (
                    short(twins.sd.here),
                    short(twins.sd.there),
                    number(c.sd_ratio),
                    ends_in_words(c.sd_ratio_f),
                    correlation,
                )
            staleness = (f"{twins.staleness.here:.2f}", f"{twins.staleness.there:.2f}")
            rows.append((twins.member, str(c.n), *means, *sds, *staleness))
    return [Table(f"The same runs in {other}: {setting.name}", header, rows)] if rows else []


def to_csv(analysis: Analysis) -> str:
    """Return one line per setting, member and measure, with six significant digits."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for setting in analysis.settings:
        for member in setting.members.values():
            for key in MEASURES:
                if key in member.summaries:
                    writer.writerow([setting.name, member.name, key, *_numbers(member, key)])
    return buffer.getvalue()


def _numbers(member: ComparisonSide, key: str) -> list[str]:
    """Return the cells of a CSV line after setting, member and measure, in the order of COLUMNS.

    Cells are empty if the value is unknown, or if the member is not compared with the baseline."""
    s = member.summaries[key]
    c = member.comparisons[key]
    values: list[float] = [s.mean, *s.mean_interval, s.sd, *s.sd_interval, s.variance, s.least, s.most]
    comparison_values: list[float] = [math.nan] * 19
    if c:
        # The margin of equivalence is a difference of accuracies, not of losses.
        equivalence = [c.equivalence_p, c.adjusted_equivalence_p] if "accuracy" in key else [math.nan] * 2
        comparison_values = [
            c.sd_ratio, *c.sd_ratio_f, *c.sd_ratio_bootstrap, c.spread_p, c.brown_forsythe_p,
            c.adjusted_spread_p, c.difference,
            *c.difference_interval, c.difference_p, c.adjusted_difference_p, *equivalence,
            c.correlation, c.skewness, c.flipped_spread_p, c.flipped_difference_p,
        ]  # fmt: skip
    cells = ["" if math.isnan(value) else f"{value:.6g}" for value in [*values, *comparison_values]]
    return [str(s.n), str(member.diverged), *cells[:9], str(c.n) if c else "", *cells[9:]]


def to_markdown(analysis: Analysis) -> str:
    """Return a page of the findings, the tables, and the machines and versions of the runs."""
    every_finding = findings(analysis)
    every_table = tables(analysis)
    # A reader who has a minute reads the answers and the tables of the answers.
    answers = [table for table in every_table if table.caption.startswith(IN_SHORT)]
    lines = [f"# {analysis.title}", ""]
    lines += [f"- {finding.text}" for finding in every_finding if finding.part == "answer"]
    lines += [f"\n{to_markdown_table(table)}".removesuffix("\n") for table in answers]
    lines += ["", "## Caveats, comparisons and notes", ""]
    lines += [f"- {finding.text}" for finding in every_finding if finding.part != "answer"]
    lines += [f"\n{to_markdown_table(table)}".removesuffix("\n") for table in every_table if table not in answers]
    lines += ["", "## Runs and environments", ""]
    lines += [f"- {about} ({runs_in_words(runs)})" for about, runs in makers(analysis)]
    return "\n".join(lines) + "\n"


def makers(analysis: Analysis) -> list[tuple[str, int]]:
    """Return machines and versions as text, with the number of their runs."""
    return [(", ".join(f"{name} {value}" for name, value in about.items()), n) for about, n in analysis.environments]


def to_latex(analysis: Analysis) -> str:
    """Return the same tables, each as wide as a line, for \\input in a paper that loads booktabs and graphicx."""
    loads = "% In the preamble: \\usepackage{booktabs,graphicx}\n"
    return "\n".join([loads, *(to_latex_table(table) for table in tables(analysis))])
