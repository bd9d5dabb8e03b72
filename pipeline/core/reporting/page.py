"""Self-contained HTML pages with embedded figures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, FunctionLoader, StrictUndefined
from matplotlib.figure import Figure

from pipeline.core.reporting import plots

UNKNOWN = "not recorded"


class EmbeddedFigure(NamedTuple):
    """A figure for a page: its data URI and its alternative text."""

    uri: str
    alt: str

    def __html__(self) -> str:
        """Return the figure as HTML: an image in a separate box, which scrolls on narrow screens."""
        return f'<div class="scroll"><img class="figure" src="{escape(self.uri)}" alt="{escape(self.alt)}"></div>'


def embed_figure(figure: Figure, alt: str) -> EmbeddedFigure:
    return EmbeddedFigure(plots.svg_uri(figure), alt)


def plain(value: object) -> str:
    """Return a value of a manifest or table as short text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def origin(provenance: Mapping[str, str] | None, versions: Mapping[str, object]) -> dict[str, str]:
    """Return the rows of the section "Origin" that ends every report; base.html shows the first two under the title too.

    Args:
        provenance: as pipeline.core.provenance records it, None for results of earlier versions.
        versions: version of each library, by name.
    """
    values = provenance or {}
    return {
        "date": values.get("time", UNKNOWN),
        "host": values.get("host", UNKNOWN),
        "command": values.get("command", UNKNOWN),
        **({"Spark master": values["master"]} if "master" in values else {}),
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()) or UNKNOWN,
    }


@cache
def template(package: str, name: str) -> Any:
    """Return a template of a package (a folder or zip), which may extend base.html. A process compiles it once.

    Values are escaped, and unknown names are errors."""
    environment = Environment(
        loader=ChoiceLoader(
            [FunctionLoader(_source_in(package)), FunctionLoader(_source_in("pipeline.core.reporting"))]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    environment.globals["unknown"] = UNKNOWN
    return environment.get_template(name)


def _source_in(package: str) -> Callable[[str], str | None]:
    """Return a function that reads a template of a package, or returns None if the package has no such template.

    jinja2's PackageLoader cannot be used, because it looks up zips under their normalised path. The path of a package
    that Spark has shipped contains ``/./`` on sys.path, since the root of SparkFiles is ``.``."""
    folder = files(package) / "templates"

    def source(name: str) -> str | None:
        path = folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    return source
