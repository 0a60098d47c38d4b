"""Figure: how far bounds lie above the best pair found, per head and norm."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rows import ESTIMATE, UPPER, Row

PANELS = (("1", "1"), ("1", "2"), ("2", "2"))
MARKERS = {  # marker, number of a colour in seaborn's colour-blind palette, place across the head's line
    "certificate": ("o", 0, 0.0),
    "product": ("s", 7, 0.0),
    "PixelDP formula": ("v", 1, -0.2),
    "orthogonium": ("D", 2, 0.0),
    "eclipse-nn": ("P", 4, -0.1),
    "deel-torchlip layers": ("X", 3, 0.2),
    "torch spectral_norm": ("^", 5, 0.0),
}
STYLE: dict[str, object] = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib, so sizes are the same everywhere
    "font.size": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "sensitivity-benchmark",
    "savefig.dpi": 160,
}


def draw(rows: Sequence[Row], *, image_format: str) -> bytes:
    """The figure as "svg" or "png".

    Args:
        rows: of the benchmark; heads without a found pair are left out.
        image_format: "svg" or "png".

    Guarantee: equal rows give equal bytes with the same matplotlib: no date, no random ids.
    """
    found = {(row.head, row.p, row.q): row.value for row in rows if row.tool == "lower bound" and row.value}
    heads = list(dict.fromkeys(row.head for row in rows if (row.head, row.p, row.q) in found))
    buffer = io.BytesIO()
    style: dict[Any, Any] = {**sns.axes_style("whitegrid"), **STYLE}
    with mpl.rc_context(style):
        figure = Figure(figsize=(12.0, 1.9 + 0.36 * max(len(heads), 1)), layout="constrained")
        FigureCanvasAgg(figure)
        panels: list[Axes] = list(figure.subplots(1, len(PANELS), sharey=True, squeeze=False).flat)
        for axes, (p, q) in zip(panels, PANELS, strict=True):
            _fill(axes, rows, found, heads, p=p, q=q)
        handles = {
            label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        ordered = [name for name in [*MARKERS, "below a found pair"] if name in handles]
        figure.legend(
            [handles[name] for name in ordered], ordered, loc="outside upper center", ncols=len(ordered), frameon=False
        )
        figure.supxlabel(
            "bound ÷ largest ratio that search found (log scale); numbers: the certificate's", fontsize=9.0
        )
        metadata = {"Software": None} if image_format == "png" else {"Date": None, "Creator": None}
        figure.savefig(buffer, format=image_format, metadata=metadata)
    return buffer.getvalue()


def _fill(
    axes: Axes,
    rows: Sequence[Row],
    found: Mapping[tuple[str, str, str], float],
    heads: list[str],
    *,
    p: str,
    q: str,
) -> None:
    """One panel: a line a head, a mark a tool."""
    palette = sns.color_palette("colorblind")
    largest, smallest = 2.0, 0.8
    for tool, (marker, colour, aside) in MARKERS.items():
        marks = []
        for row in rows:
            below = found.get((row.head, row.p, row.q))
            if (row.tool, row.p, row.q) == (tool, p, q) and row.kind in (UPPER, ESTIMATE) and row.value and below:
                marks.append((row.value / below, heads.index(row.head) + aside))
        if not marks:
            continue
        across, down = zip(*marks, strict=True)
        largest, smallest = max(largest, *across), min(smallest, *across)
        ours = tool == "certificate"
        size = 46 if ours else 30
        axes.scatter(
            across,
            down,
            s=size,
            marker=marker,
            color=palette[colour],
            label=tool,
            zorder=4 if ours else 3,
            linewidths=0.4,
            edgecolors="white",
        )
        if ours:
            axes.hlines(down, 1.0, across, color=palette[colour], linewidth=1.6, zorder=2)
            for ratio, place in marks:  # in the margin, where no mark can hide them
                axes.annotate(
                    f"{ratio:.3g}",
                    (1.01, place),
                    xycoords=axes.get_yaxis_transform(),
                    va="center",
                    fontsize=7.5,
                    color=palette[colour],
                    annotation_clip=False,
                )
    axes.set_xscale("log")
    low = smallest / 1.3
    axes.set_xlim(low, largest * 1.4)
    axes.axvspan(low, 1.0, color="#000000", alpha=0.08, linewidth=0, label="below a found pair", zorder=0)
    axes.axvline(1.0, color="#262626", linewidth=1.0, zorder=1)
    axes.set_title(f"ℓ{p} → ℓ{q}", fontsize=10.0)
    axes.set_yticks(range(len(heads)), heads)
    axes.set_ylim(len(heads) - 0.5, -0.5)
    decades = math.log10(largest / smallest)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2.5 else (1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, axis="both", color="#dddddd", linewidth=0.6)
