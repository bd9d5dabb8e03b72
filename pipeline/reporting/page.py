"""An HTML page that opens offline, and the figures on it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

from pipeline.reporting import plots


class EmbeddedFigure(NamedTuple):
    """A figure for the page: its data: URI and what it shows, for those who cannot see it."""

    uri: str
    alt: str


def embed_figure(figure: Figure, alt: str) -> EmbeddedFigure:
    return EmbeddedFigure(plots.svg_uri(figure), alt)


def plain(value: object) -> str:
    """A value of a manifest or a table as short readable text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def template(package: str, name: str) -> Any:
    """A template of a package (a folder or a zip), which may extend base.html: every value escaped, an unknown name an
    error."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("pipeline.reporting")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    return environment.get_template(name)
