"""The files of a study beside its ledger: report.html, results.json, results.csv, tables.tex and README.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.core.atomic import write_durably
from pipeline.core.reporting.page import EmbeddedFigure, embed_figure, template
from pipeline.core.reporting.plots import style
from trainer.study.analysis.analyse import Analysis, Setting, analyse, dumps
from trainer.study.plan.study_plan import StudyPlan
from trainer.study.report import figures
from trainer.study.report.findings import findings
from trainer.study.report.tables import makers, setting_tables, to_csv, to_latex, to_markdown
from trainer.study.report.words import hours
from trainer.study.run.folder import tests_begun
from trainer.study.run.ledger import Ledger, Record, read_beside

REPORT = "report.html"


def written(analysis: Analysis) -> dict[str, str]:
    """Return the files that contain numbers, by name. The same ledger and versions give the same bytes."""
    return {
        "results.json": dumps(analysis),
        "results.csv": to_csv(analysis),
        "tables.tex": to_latex(analysis),
        "README.md": to_markdown(analysis),
    }


def write_report(plan: StudyPlan, root: Path, ledger: Ledger) -> str:
    """Write all files, and return the findings and the path of the report for a terminal."""
    records = ledger.of_plan(plan)
    analysis = analysis_of(plan, root, ledger)
    for name, text in written(analysis).items():
        write_durably(root / name, text.encode())
    write_durably(root / REPORT, render(analysis, records).encode())
    return "\n".join([*(finding.text for finding in findings(analysis)), f"report: {root / REPORT}"])


def analysis_of(plan: StudyPlan, root: Path, ledger: Ledger) -> Analysis:
    """Analyse the content of a study's folder, and of the study beside it."""
    records = ledger.of_plan(plan)
    left_out = len(ledger.records) - len(records)
    return analyse(plan, records, read_beside(plan, root), tests_begun(plan, root), left_out)


def render(analysis: Analysis, records: Sequence[Record]) -> str:
    """Return the report as one HTML page without external links."""
    with style():
        drawn = {setting.name: draw(setting, analysis) for setting in analysis.settings}
    page: str = template("trainer.study.report", "study.html").render(
        analysis=analysis,
        findings=findings(analysis),
        figures=drawn,
        tables={setting.name: setting_tables(analysis, setting) for setting in analysis.settings},
        makers=makers(analysis),
        wall_hours=sum(record["wall_s"] for record in records) / 3600,
        hours=hours,
    )
    return page


def draw(setting: Setting, analysis: Analysis) -> dict[str, EmbeddedFigure]:
    """Draw the figures of a setting, by name. Figures for which there are too few data are left out."""
    made = {
        "finals": (figures.finals(setting), "The final accuracy of every run"),
        "ratios": (figures.ratios(setting, analysis.baseline), "Ratios of standard deviations with their intervals"),
        "learning": (figures.learning(setting), "Evaluation accuracy over epochs, every run"),
        "spread": (figures.spread_over_epochs(setting), "Standard deviation over seeds at every epoch"),
        "staleness": (figures.staleness(setting), "Staleness and time"),
    }
    if analysis.compared == "sharding":
        made["classes"] = (figures.class_counts(setting), "Rows of a class in a shard")
        made["quality"] = (figures.quality(setting), "Evenness of shards against distance from the median")
    return {name: embed_figure(figure, alt) for name, (figure, alt) in made.items() if figure}
