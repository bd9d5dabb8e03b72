"""The style of all figures, and their conversion to SVG."""

from __future__ import annotations

import io
import threading
import warnings
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
YELLOW = "#D9C900"
BLACK = "#222222"
GREY = "#666666"
PALE = "#E3E3E3"
PALETTE = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, YELLOW, BLACK)
WIDTH = 10.0  # inches
MANY = 24  # with more workers, classes or groups, a scale replaces labels
BOXES = 100  # most classes in one box plot
FLOOR = 1e-3  # lower end of bars on a log scale
NARROW = 100.0  # highest / lowest value below which decades alone would number too few ticks
HALF_DECADE = 4.0
ABOVE = {"loc": "lower center", "bbox_to_anchor": (0.5, 1)}  # places a legend above its axes
STYLE: Any = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.constrained_layout.use": True,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "report",  # the same data give the same bytes
    "figure.dpi": 130,  # of what is drawn as pixels inside a figure
    "text.parse_math": False,  # names come from a file, where a dollar sign starts no formula
}


_STYLE_LOCK = threading.RLock()


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of reports to figures drawn in the block, independent of the user's matplotlibrc.

    Letters that the font lacks, as in names of classes, are drawn as boxes, without a warning. The settings of matplotlib
    are the process's: reports of several threads are drawn one after the other."""
    with _STYLE_LOCK, rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        rcdefaults()
        rcParams.update(STYLE)
        yield


def canvas(height: float, columns: int = 1, **options: Any) -> tuple[Figure, npt.NDArray[Any]]:
    """Return a figure of the report's width, outside pyplot's global state, and its axes [columns].

    height: in inches. options: passed to ``Figure.subplots``."""
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, columns, squeeze=False, **options)
    return figure, axes[0]


def svg_uri(figure: Figure) -> str:
    """Return a figure as a data: URI. In an image, ids cannot collide with ids of other figures on the page."""
    buffer = io.BytesIO()
    # ``Figure.savefig`` would draw the figure twice, first to place its parts, which drawing does anyway.
    svg: Any = FigureCanvasSVG(figure)
    svg.print_svg(buffer, metadata={"Date": None, "Creator": None})
    return "data:image/svg+xml;base64," + b64encode(buffer.getvalue()).decode()


def png_uri(image_CHW: npt.NDArray[np.uint8]) -> str:
    """Return an image as a data: URI: the first three channels as RGB, with fewer channels the first one as grey."""
    pixels = np.moveaxis(image_CHW[:3], 0, -1) if len(image_CHW) >= 3 else image_CHW[0]
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, "PNG")
    return "data:image/png;base64," + b64encode(buffer.getvalue()).decode()


def short(name: str, limit: int) -> str:
    """Return a name, cut to ``limit`` characters."""
    return name if len(name) <= limit else name[: limit - 1] + "…"


def separate_thousands(axis: Any) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def number_decades(axis: Any) -> None:
    """Number a log scale with plain numbers, which the style needs instead of powers.

    Within two decades 2 and 5 are numbered too, and within half a decade evenly spaced values. Call it after drawing,
    when the limits are known."""
    separate_thousands(axis)
    low, high = axis.get_view_interval()
    if low > 0 and high < HALF_DECADE * low:
        axis.set_major_locator(MaxNLocator(5))
        axis.set_minor_locator(NullLocator())
    elif low > 0 and high < NARROW * low:
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
        axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    else:
        axis.set_minor_formatter(NullFormatter())


def number_ticks(axis: Any, count: int) -> None:
    """Number every position, or some of them if there are more than ``MANY``."""
    if count <= MANY:
        axis.set_ticks(range(count))
    else:
        axis.set_major_locator(MaxNLocator(12, integer=True))


def drawable_names(classes: Sequence[int], names: Sequence[str]) -> list[str]:
    """Return the names of classes as text for axes; none if a class has no name, or a letter that the font lacks.

    classes: numbers of classes. names: of all classes, by number; empty if they are unknown."""
    labels = [names[number] if number < len(names) else "" for number in classes]
    font = get_font(findfont(FontProperties()))
    if not all(labels) or not all(font.get_char_index(ord(letter)) for label in labels for letter in label):
        return []
    return labels


def name_rows(ax: Any, names: Sequence[str]) -> None:
    """Name the rows of a horizontal bar chart, from the top."""
    ax.set_yticks(range(len(names)), [short(name, 24) for name in names])
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
