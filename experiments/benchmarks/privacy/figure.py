"""Figures: tightness and time of accountants over the number of releases; speed and size of releases."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import seaborn as sns
from accountants import EPSILON, LEDGER, OUR_HIGH, OUR_LOW, SECONDS, TRUTH
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from payload_size import CODES
from release_speed import TORCH
from rows import Row, wrong_side

MARKERS = {  # marker, number of a colour in seaborn's colour-blind palette
    OUR_HIGH: ("o", 0),
    LEDGER: ("s", 9),
    "dp-accounting PLD": ("v", 1),
    "dp-accounting PLD by hand": ("D", 2),
    "dp-accounting PLD by hand, optimistic": ("P", 4),
    "dp-accounting RDP": ("X", 3),
    "opacus RDP": ("^", 5),
    "opacus PRV": ("<", 6),
    "opacus GDP": (">", 7),
}
SHOWN = (
    "Gaussian, σ/Δ = 10",
    "Laplace, ε0 = .1",
    "randomised response, k = 2, ε0 = .1",
    "Gaussian, σ/Δ = 10, and as many Laplace, ε0 = .05",
)
SMALLEST = 1e-8  # excess below which a figure is at the axis
STYLE: dict[str, object] = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib, so sizes are the same everywhere
    "font.size": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "privacy-benchmark",
    "savefig.dpi": 160,
}


def references(rows: Sequence[Row]) -> dict[tuple[str, float | None], tuple[float, float]]:
    """(low, high) around the true ε of each case of the accountants: the exact one, or else our own bracket."""
    found: dict[tuple[str, float | None], tuple[float, float]] = {}
    said = {(row.case, row.at, row.tool): row.value for row in rows if row.quantity == EPSILON}
    for case, at in dict.fromkeys((row.case, row.at) for row in rows if row.benchmark == "accountants"):
        exact = said.get((case, at, TRUTH))
        low, high = said.get((case, at, OUR_LOW)), said.get((case, at, OUR_HIGH))
        if exact is not None:
            found[case, at] = (exact, exact)
        elif low is not None and high is not None:
            found[case, at] = (low, high)
    return found


def draw_accountants(rows: Sequence[Row], *, image_format: str) -> bytes:
    """Above how far each ε lies from the true one, below the processor time; "svg" or "png".

    Guarantee: equal rows give equal bytes with the same matplotlib: no date, no random ids.
    """
    names = [name for name in SHOWN if any(row.case == name for row in rows)]
    true = references(rows)

    def fill(figure: Figure) -> None:
        panels: list[list[Axes]] = figure.subplots(
            2, max(len(names), 1), sharex=True, sharey="row", squeeze=False
        ).tolist()
        for column, name in enumerate(names):
            _tightness(panels[0][column], rows, name=name, true=true)
            _times(panels[1][column], rows, name=name)
            panels[0][column].set_title(name.replace(", and", ",\nand").replace(", k", ",\nk"), fontsize=9.0)
            panels[1][column].set_xlabel("releases")
        panels[0][0].set_ylabel("|ε ÷ true ε − 1|")
        panels[1][0].set_ylabel("seconds of the process")
        handles = {
            label: handle
            for axes in (axes for line in panels for axes in line)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, frameon=False)

    return _image(fill, size=(3.0 * max(len(names), 1), 6.6), image_format=image_format)


def _tightness(
    axes: Axes, rows: Sequence[Row], *, name: str, true: dict[tuple[str, float | None], tuple[float, float]]
) -> None:
    palette = sns.color_palette("colorblind")
    for tool, (marker, colour) in MARKERS.items():
        if tool == LEDGER:
            continue
        marks, wrong = [], []
        for row in rows:
            if (row.case, row.tool, row.quantity) != (name, tool, EPSILON) or row.value is None or row.at is None:
                continue
            low, high = true[row.case, row.at]
            marks.append((row.at, max(SMALLEST, abs(row.value / low - 1.0))))
            if wrong_side(row, low=low, high=high):
                wrong.append(marks[-1])
        if marks:
            axes.plot(*zip(*marks, strict=True), marker=marker, markersize=4, color=palette[colour], label=tool)
        if wrong:
            axes.plot(
                *zip(*wrong, strict=True),
                linestyle="",
                marker="o",
                markersize=10,
                fillstyle="none",
                color="#c00000",
                label="on the wrong side",
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(SMALLEST / 2, 3.0)


def _times(axes: Axes, rows: Sequence[Row], *, name: str) -> None:
    palette = sns.color_palette("colorblind")
    for tool, (marker, colour) in MARKERS.items():
        marks = [
            (row.at, row.value)
            for row in rows
            if (row.case, row.tool, row.quantity) == (name, tool, SECONDS) and row.value is not None
        ]
        if marks:
            axes.plot(*zip(*marks, strict=True), marker=marker, markersize=4, color=palette[colour], label=tool)
    axes.set_xscale("log")
    axes.set_yscale("log")


def draw_releases(rows: Sequence[Row], *, image_format: str) -> bytes:
    """Left millions of noise values a second, right bytes as a share of float32's; "svg" or "png".

    Needs rows of both; equal rows give equal bytes with the same matplotlib.
    """
    speeds = [row for row in rows if row.benchmark == "release" and row.quantity == "M values/s" and row.value]
    sizes = [row for row in rows if row.benchmark == "payload" and row.value]
    palette = sns.color_palette("colorblind")

    def fill(figure: Figure) -> None:
        left, *right = figure.subplots(1, 3, width_ratios=(2.0, 1.0, 1.0))
        ours = ("rounded", "Gaussian release")
        colours = [palette[0] if row.tool.startswith(ours) else palette[7] for row in speeds]
        left.barh([row.tool for row in speeds], [row.value or 0.0 for row in speeds], color=colours)
        left.invert_yaxis()
        left.set_xscale("log")
        left.set_xlabel("millions of values a second, one core (log scale)")
        floor = next((row.value for row in speeds if row.tool == TORCH), None)
        if floor:
            left.axvline(floor, color="#262626", linewidth=1.0)
        for axes, family in zip(right, ("gaussian", "laplace"), strict=True):
            for number, code in enumerate(CODES):
                marks = [(row.at or math.nan, row.value) for row in sizes if (row.case, row.tool) == (family, code)]
                if marks:
                    style = {"color": "#262626", "linestyle": "--"} if code == "entropy" else {"color": palette[number]}
                    axes.plot(*zip(*marks, strict=True), marker="o", markersize=3, label=code, **style)
            axes.set_title(family)
            axes.set_xscale("log")
            axes.set_xticks([0.5, 1.0, 2.0, 4.0, 8.0])
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("noise multiplier")
            axes.set_ylim(0.0, 0.55)
        right[0].set_ylabel("bytes ÷ float32's")
        handles, labels = right[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower right", ncols=len(CODES), frameon=False)

    return _image(fill, size=(12.0, 4.0), image_format=image_format)


def _image(fill: Callable[[Figure], None], *, size: tuple[float, float], image_format: str) -> bytes:
    buffer = io.BytesIO()
    style: dict[Any, Any] = {**sns.axes_style("whitegrid"), **STYLE}
    with mpl.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure)
        metadata = {"Software": None} if image_format == "png" else {"Date": None, "Creator": None}
        figure.savefig(buffer, format=image_format, metadata=metadata)
    return buffer.getvalue()
