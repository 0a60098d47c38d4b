"""Figures as files and as part of a page, drawn without global plotting state."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import matplotlib as mpl
import seaborn as sns
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from asfl_privacy.reporting.figures import GRID, INK, STYLE

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
    inline = re.sub(r"<metadata>.*?</metadata>\s*", "", inline[inline.index("<svg") :], flags=re.DOTALL)
    inline = re.sub(r' xmlns(:xlink)?="[^"]*"', "", inline)
    return Drawing(svg=svg, png=png, inline=inline.replace(INK, "currentColor").replace(GRID, "var(--grid)").strip())


def _render(
    fill: Callable[[Figure], None], *, size: tuple[float, float], name: str, image_format: str, transparent: bool
) -> bytes:
    style = {**sns.axes_style("whitegrid"), **STYLE, "svg.hashsalt": f"asfl-privacy-{name}"}
    buffer = io.BytesIO()
    with mpl.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure)
        metadata = {"Software": None} if image_format == "png" else {"Date": None, "Creator": None}
        figure.savefig(buffer, format=image_format, transparent=transparent, metadata=metadata)
    return buffer.getvalue()
