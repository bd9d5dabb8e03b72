"""The files of a study beside its ledger: report.html, results.json, results.csv, tables.tex and README.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.core.atomic import write_durably
from pipeline.core.reporting.page import EmbeddedFigure, embed_figure, origin, template
from pipeline.core.reporting.plots import style
from trainer.study.analysis.analyse import analyse
from trainer.study.analysis.results import Analysis, StudySetting, dumps
from trainer.study.plan.study_plan import TABLES, StudyPlan
from trainer.study.report import figures
from trainer.study.report.findings import findings
from trainer.study.report.tables import answer_table, makers, setting_tables, to_csv, to_latex, to_markdown
from trainer.study.report.words import hours, list_in_words
from trainer.study.run.folder import tests_begun
from trainer.study.run.ledger import Record, StudyLedger, read_beside

REPORT = "report.html"


def files_with_numbers(analysis: Analysis) -> dict[str, str]:
    """Return the files that contain numbers, by name. The same ledger and versions give the same bytes."""
    return {
        "results.json": dumps(analysis),
        "results.csv": to_csv(analysis),
        "tables.tex": to_latex(analysis),
        "README.md": to_markdown(analysis),
    }


def write_report(plan: StudyPlan, root: Path, ledger: StudyLedger) -> str:
    """Write all files, and return the findings and the path of the report for a terminal."""
    records = ledger.records_of_plan(plan)
    analysis = analysis_of(plan, root, ledger)
    for name, text in files_with_numbers(analysis).items():
        write_durably(root / name, text.encode())
    write_durably(root / REPORT, render(plan, analysis, records).encode())
    return "\n".join([*(finding.text for finding in findings(analysis)), f"report: {root / REPORT}"])


def analysis_of(plan: StudyPlan, root: Path, ledger: StudyLedger) -> Analysis:
    """Analyse the content of a study's folder, and of the study beside it."""
    records = ledger.records_of_plan(plan)
    left_out = len(ledger.records) - len(records)
    return analyse(plan, records, read_beside(plan, root), tests_begun(plan, root), left_out)


def render(plan: StudyPlan, analysis: Analysis, records: Sequence[Record]) -> str:
    """Return the report as one HTML page without external links."""
    with style():
        figures_by_setting = {setting.name: draw(setting, analysis) for setting in analysis.settings}
    page: str = template("trainer.study.report", "study.html").render(
        analysis=analysis,
        findings=findings(analysis),
        figures=figures_by_setting,
        answers={setting.name: answer_table(analysis, setting) for setting in analysis.settings},
        tables={setting.name: setting_tables(analysis, setting)[1:] for setting in analysis.settings},
        makers=makers(analysis),
        settings=describe_plan(plan),
        # Several machines may have run parts of the study: the page describes the one with the most runs.
        origin=origin(
            origin_of(records), max(analysis.environments, key=lambda environment: environment[1], default=({}, 0))[0]
        ),
        wall_hours=sum(record["wall_s"] for record in records) / 3600,
        hours=hours,
    )
    return page


def describe_plan(plan: StudyPlan) -> dict[str, str]:
    """Return the settings of a plan by name, as text."""
    backend = "a simulated cluster in virtual time" if plan.backend == "virtual" else "real processes"
    numbers = sorted({plan.workers_of(cell) for cell in plan.cells()})
    workers = list_in_words([str(number) for number in numbers])
    rows = {"runs": f"{len(plan.seeds)} seeds of {len(plan.cells())} combinations on {workers} workers, {backend}"}
    rows["varies with the seed"] = ", ".join(plan.vary)
    rows["compared"] = f"{plan.compare}, with {plan.baseline} as the baseline"
    for table in TABLES:
        for name, flags in getattr(plan, table).items():
            rows[f"{table[:-1]} {name}"] = _flags(flags)
    return rows | {"training": _flags(plan.training), "simulation": _flags(plan.virtual)}


def _flags(flags: Mapping[str, object]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in flags.items()) or "defaults"


def origin_of(records: Sequence[Record]) -> dict[str, str] | None:
    """Return the origin of the runs: the days of the first and the last one, their hosts, and the last command.

    None for ledgers of earlier versions. The time of the report is left out, so that equal ledgers give equal pages."""
    provenances = sorted(
        (record["made"] for record in records if record.get("made")), key=lambda provenance: str(provenance["time"])
    )
    if not provenances:
        return None
    days = list(dict.fromkeys(provenance["time"][:10] for provenance in provenances))
    time = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return {
        "time": time,
        "host": ", ".join(sorted({provenance["host"] for provenance in provenances})),
        "command": provenances[-1]["command"],
    }


def draw(setting: StudySetting, analysis: Analysis) -> dict[str, EmbeddedFigure]:
    """Draw the figures of a setting, by name. Figures for which there are too few data are left out."""
    figures_and_alts = {
        "deviations": (figures.deviations(setting), "The final accuracy of every run minus the mean of its member"),
        "ratios": (figures.ratios(setting, analysis.baseline), "Ratios of standard deviations with their intervals"),
        "learning": (figures.learning(setting), "Evaluation accuracy over epochs, every run"),
        "losses": (figures.losses(setting), "Losses of training and evaluation rows over epochs, every run"),
        "time": (figures.accuracy_by_cost(setting), "Evaluation accuracy over own mini-batches, time and bytes"),
        "spread": (figures.spread_over_epochs(setting), "Standard deviation over seeds at every epoch"),
        "staleness": (figures.staleness(setting), "Staleness and time"),
    }
    if analysis.sets:
        del figures_and_alts["spread"]  # its intervals are for independent runs
    if analysis.compared == "sharding":
        figures_and_alts["classes"] = (figures.class_counts(setting), "Rows of a class in a shard")
        figures_and_alts["shards"] = (
            figures.shard_counts(setting, analysis.baseline), "Rows of a class in each shard, over classes",
        )  # fmt: skip
        figures_and_alts["sharding"] = (figures.sharding_times(setting), "Seconds of sharding")
        figures_and_alts["quality"] = (figures.quality(setting), "Evenness of shards against distance from the median")
    return {name: embed_figure(figure, alt) for name, (figure, alt) in figures_and_alts.items() if figure}
