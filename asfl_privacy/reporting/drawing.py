"""Figures as files and as part of a page, drawn without global plotting state."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import matplotlib as mpl
import seaborn as sns
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

INK: Final = "#262626"
GRID: Final = "#cccccc"
STYLE: Final[dict[str, object]] = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib, so sizes are the same everywhere
    "font.size": 10.0,
    "axes.labelsize": 10.0,
    "legend.fontsize": 9.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.parse_math": False,  # a $ in a setting is a dollar
    "svg.fonttype": "none",
    "svg.hashsalt": "asfl-privacy",
    "savefig.dpi": 160,
}
MARKERS: Final = "osD^vPX*<>"


@dataclass(frozen=True)
class Drawing:
    """One figure in three forms.

    Attributes:
        svg: A file on white; text stays text.
        png: A file on white, 160 dots an inch.
        inline: An svg element without background for an HTML page; its ink is the page's text colour.
    """

    svg: str
    png: bytes
    inline: str


def draw(fill: Callable[[Figure], None], *, size: tuple[float, float], name: str) -> Drawing:
    """Draw a figure.

    Args:
        fill: Puts axes and artists on an empty figure; called once a form, so it must not change what it reads.
        size: Width and height, inches.
        name: Of the figure; salts its ids, which therefore differ between figures of one page.

    Guarantee:
        Equal content gives equal bytes with the same matplotlib: no date, no random ids. No address in the inline form
        points outside the page.
    """
    svg = _render(fill, size=size, name=name, image_format="svg", transparent=False).decode("utf-8")
    png = _render(fill, size=size, name=name, image_format="png", transparent=False)
    inline = _render(fill, size=size, name=f"{name}-inline", image_format="svg", transparent=True).decode("utf-8")
    return Drawing(svg=svg, png=png, inline=as_element(inline))


def render(
    make: Callable[[], Figure],
    *,
    salt: str,
    image_format: str,
    transparent: bool,
    style: Mapping[str, object] | None = None,
) -> bytes:
    """A figure as a file.

    Args:
        make: Draws it, under this module's style.
        salt: Of its ids.
        image_format: "svg" or "png" (160 dots an inch).
        transparent: Without background.
        style: Settings that stand below `STYLE`; a white grid where None.

    Guarantee:
        Equal figures give equal bytes with the same matplotlib: no date, no random ids.
    """
    below = sns.axes_style("whitegrid") if style is None else style
    settings: Any = {**below, **STYLE, "svg.hashsalt": salt}  # matplotlib names every key that it takes
    buffer = io.BytesIO()
    with mpl.rc_context(settings):
        metadata = {"Software": None} if image_format == "png" else {"Date": None, "Creator": None}
        make().savefig(buffer, format=image_format, transparent=transparent, metadata=metadata)
    return buffer.getvalue()


def as_element(svg: str) -> str:
    """An SVG file as an element of a page: its ink is the page's text colour, its grid the page's --grid colour."""
    element = re.sub(r"<metadata>.*?</metadata>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    element = re.sub(r' xmlns(:xlink)?="[^"]*"', "", element)
    return element.replace(INK, "currentColor").replace(GRID, "var(--grid)").strip()


def _render(
    fill: Callable[[Figure], None], *, size: tuple[float, float], name: str, image_format: str, transparent: bool
) -> bytes:
    def make() -> Figure:
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure)
        return figure

    return render(make, salt=f"asfl-privacy-{name}", image_format=image_format, transparent=transparent)
