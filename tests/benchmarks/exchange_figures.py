"""The figures of ``make bench-exchange``: their file, and the table of which exchange is cheapest when.

The file of ``--json`` has a CostReport, whose ``figures`` are StepCosts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.core.atomic import write_durably
from pipeline.core.errors import DataError
from pipeline.core.json_values import build, parse
from trainer.exchange import EXCHANGES

FORMAT = 1
ONE_HOST = "one host"
CLEAR = "TCP"
ENCRYPTED = "TCP, encrypted"
PLACES = (ONE_HOST, CLEAR, ENCRYPTED)


@dataclass(frozen=True)
class StepCost:
    """The cost of a step of one contender.

    Attributes:
        part: name of the contender.
        exchange: the exchange that it is, with its default options; None for a yardstick or other options.
        place: one of PLACES, where its workers are; None for a yardstick.
        workers: number of processes that exchange.
        parameters: length of the vector.
        steps: of every turn.
        wall_ms: per step, of the slowest worker; median over the turns.
        cpu_ms: per step, of all processes; median over the turns.
        ratios: by yardstick, the median of this wall time divided by the yardstick's in the same turn.
        wall_ms_by_turn, cpu_ms_by_turn: what each turn has measured.
    """

    part: str
    exchange: str | None
    place: str | None
    workers: int
    parameters: int
    steps: int
    wall_ms: float
    cpu_ms: float
    ratios: dict[str, float]
    wall_ms_by_turn: list[float]
    cpu_ms_by_turn: list[float]

    def __post_init__(self) -> None:
        if self.place is not None and self.place not in PLACES:
            raise ValueError(f"'place' is {self.place!r}, not one of {', '.join(PLACES)}")
        if min(self.workers, self.parameters, self.wall_ms, self.cpu_ms) <= 0:
            raise ValueError(f"a number of {self.part!r} is not above 0")


@dataclass(frozen=True)
class CostReport:
    """The content of the file.

    Attributes:
        format: FORMAT.
        machine: see tests.benchmarks.machine.describe_machine.
        versions: of Python and of packages, by name.
        figures: a StepCost each.
    """

    format: int
    machine: dict[str, Any]
    versions: dict[str, str]
    figures: list[dict[str, Any]]

    def costs(self) -> list[StepCost]:
        """Return the figures. Raises ValueError if one is damaged."""
        return [build(StepCost, figure) for figure in self.figures]


def write_report(path: Path, machine: dict[str, Any], versions: dict[str, str], costs: Iterable[StepCost]) -> None:
    """Write or replace the file. Raises OSError."""
    report = CostReport(FORMAT, machine, versions, [asdict(cost) for cost in costs])
    write_durably(path, (json.dumps(asdict(report), indent=1) + "\n").encode())


def read_report(path: Path) -> CostReport:
    """Read the file. Raises DataError if it is missing, damaged or of another format."""
    try:
        report = build(CostReport, parse(path.read_bytes()))
        if report.format != FORMAT:
            raise ValueError(f"format {report.format}, not {FORMAT}")
        costs = report.costs()
        if not by_case(costs):
            raise ValueError("it has no figures of exchanges")
        if missing := [case[1:] for case in by_case(costs) if case[1:] not in gloo_ms(costs)]:
            raise ValueError(f"it has no figures of gloo for {missing[0][0]} parameters and {missing[0][1]} workers")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise DataError(f"{path} is no file of make bench-exchange: {error}") from None
    return report


Case = tuple[str, int, int]  # place, parameters and workers


def by_case(costs: Iterable[StepCost]) -> dict[Case, dict[str, StepCost]]:
    """Return the costs of exchanges by case and name, both in the order of a table. Yardsticks are left out."""
    cases: dict[Case, dict[str, StepCost]] = {}
    for cost in costs:
        if cost.place is not None and cost.exchange is not None:
            cases.setdefault((cost.place, cost.parameters, cost.workers), {})[cost.exchange] = cost
    order = sorted(cases, key=lambda case: (PLACES.index(case[0]), *case[1:]))
    return {case: {name: cases[case][name] for name in EXCHANGES if name in cases[case]} for case in order}


def gloo_ms(costs: Iterable[StepCost]) -> dict[tuple[int, int], float]:
    """Return the wall time of plain gloo by parameters and workers."""
    return {(cost.parameters, cost.workers): cost.wall_ms for cost in costs if cost.part == "gloo"}


def cheapest(costs: Mapping[str, StepCost]) -> str:
    """Return the exchange with the shortest step."""
    return min(costs, key=lambda name: costs[name].wall_ms)


def cost_table(costs: Sequence[StepCost]) -> str:
    """Return a Markdown table: wall and, in brackets, CPU milliseconds per step, with the shortest wall in bold."""
    cases = by_case(costs)
    names = [name for name in EXCHANGES if any(name in by_name for by_name in cases.values())]
    lines = [["workers on", "parameters", "workers", *(f"`{name}`" for name in names)]]
    lines.append(["---"] * len(lines[0]))
    for (place, parameters, workers), by_name in cases.items():
        best = cheapest(by_name)
        cells = [_cell(by_name.get(name), is_best=name == best) for name in names]
        lines.append([place, in_millions(parameters), str(workers), *cells])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cell(cost: StepCost | None, *, is_best: bool) -> str:
    if cost is None:
        return ""
    wall = milliseconds(cost.wall_ms)
    return f"{f'**{wall}**' if is_best else wall} ({milliseconds(cost.cpu_ms)})"


def milliseconds(number: float) -> str:
    """Return a time with three significant digits, or more of them before the point."""
    return f"{number:,.{0 if number >= 100 else 1 if number >= 10 else 2}f}"


def in_millions(parameters: int) -> str:
    return f"{parameters / 1e6:.3g} M"
