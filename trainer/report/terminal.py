"""The summary on the terminal at the end of a run. Loads no plotting library, so that a run does not wait for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.core.reporting.tables import two_column_table
from trainer.home.place import Place
from trainer.report.progress import number
from trainer.run_files import MODEL


def duration(seconds: float | None) -> str:
    """Return seconds as readable text."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def stop_reason(stop: Mapping[str, Any]) -> str:
    """Return in words why evaluations have ended a run early. stop: the entry of result.json."""
    patience = stop["patience"]
    after = f"after epoch {stop['epoch']}: {patience} epoch{'s' if patience > 1 else ''} without an improvement"
    if stop["best_epoch"] is None:
        return f"{after}, no loss on the evaluation rows was finite"
    best = f"{number(stop['best_loss'], '.4f')} after epoch {stop['best_epoch']}"
    return f"{after} of the loss on the evaluation rows (without the L2 term), {best}"


def ending(result: Mapping[str, Any], output: Place, report: Place | None) -> str:
    """Return the summary for the terminal.

    Args:
        result: as written to result.json.
        output: folder of the run.
        report: path of the report, or None.
    """
    restarts = ", ".join(f"{role} {count}" for role, count in result["restarts"].items() if count)
    virtual = " of virtual time" if result.get("simulated") is not None else ""
    evaluated = ("accuracy", "not evaluated")
    if result["final_accuracy"] is not None:
        best = f"best {percent(result['best_accuracy'])} after epoch {number(result['best_epoch'], '.4g')}"
        evaluated = ("accuracy", f"{percent(result['final_accuracy'])} of the evaluation rows at the end, {best}")
    elif result["best_epoch"] is not None:  # real targets have a loss only
        losses = [number(result[name], ".4f") for name in ("final_loss", "best_loss")]
        evaluated = ("evaluation loss", f"{losses[0]}, best {losses[1]}")
    rows = [(str(result["cause"]), f"{result['updates']:,} updates in {duration(result['seconds'])}{virtual}")]
    if result.get("early_stop"):
        rows.append(("stopped early", stop_reason(result["early_stop"])))
    rows += [evaluated, ("images/s", number(result["images_per_second"], ",.0f"))]
    staleness = result["staleness"]
    rows.append(("staleness", f"mean {number(staleness['mean'], '.2f')}, most {staleness['max'] or 0} updates"))
    if result["learned"] is False:
        rows.append(("learned", "nothing: the loss is no lower than the loss of guessing"))
    if restarts:
        rows.append(("restarts", restarts))
    if (output / MODEL).exists():
        rows.append(("model", str(output / MODEL)))
    if report:
        rows.append(("report", str(report)))
    return two_column_table(rows)
