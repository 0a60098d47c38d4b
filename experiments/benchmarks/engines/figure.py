"""Figures: ratios of the engines to the bare loop, and what a round costs over clients and over parameters."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from races import BARE, CLIENTS, ENGINES, SIZE
from rows import OK, Row, summaries

STYLE: dict[str, object] = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib, so sizes are the same everywhere
    "font.size": 9.0,
    "svg.fonttype": "none",
    "svg.hashsalt": "engines-benchmark",
    "savefig.dpi": 160,
}
INK, OURS, OTHERS = "#262626", 0, 7  # numbers of colours in seaborn's colour-blind palette
MARKERS = "osvD^P"


def draw_engines(rows: Sequence[Row], *, image_format: str) -> bytes:
    """A panel a task: wall time of a round ÷ the bare loop's, dots for processor time; "svg" or "png".

    Guarantee: equal rows give equal bytes with the same matplotlib: no date, no random ids.
    """
    cases = list(dict.fromkeys(row.case for row in rows if row.race == ENGINES))

    def fill(figure: Figure) -> None:
        panels: list[Axes] = figure.subplots(1, max(len(cases), 1), squeeze=False)[0].tolist()
        palette = sns.color_palette("colorblind")
        for axes, case in zip(panels, cases, strict=False):  # one empty panel where no engines ran
            found = summaries([row for row in rows if (row.race, row.case) == (ENGINES, case)], floor=BARE)
            found = [one for one in found if math.isfinite(one.wall_ratio)]
            colours = [palette[OURS if one.tool.startswith("ours") else OTHERS] for one in found]
            tools, ratios = [one.tool for one in found], [one.wall_ratio for one in found]
            ends = [[one.wall_ratio - one.low for one in found], [one.high - one.wall_ratio for one in found]]
            axes.barh(tools, ratios, color=colours, xerr=ends, ecolor=INK, capsize=2)
            axes.plot([one.cpu_ratio for one in found], tools, "o", color=INK, markersize=4, fillstyle="none")
            axes.invert_yaxis()
            axes.axvline(1.0, color=INK, linewidth=1.0)
            axes.set_title(case, fontsize=9.0)
        panels[0].set_xlabel("seconds of a round ÷ the bare loop's: bars wall (least to most), circles processors")

    return _image(fill, size=(4.2 * max(len(cases), 1), 3.6), image_format=image_format)


def draw_scaling(rows: Sequence[Row], *, image_format: str) -> bytes:
    """Seconds of a round and peak memory over clients, seconds of a round over parameters; "svg" or "png"."""

    def fill(figure: Figure) -> None:
        left, middle, right = figure.subplots(1, 3)
        _lines(left, rows, race=CLIENTS, value=lambda row: row.round_s)
        _lines(middle, rows, race=CLIENTS, value=lambda row: row.peak_mib or math.nan)
        _lines(right, rows, race=SIZE, value=lambda row: row.round_s)
        left.set_ylabel("seconds of a round")
        middle.set_ylabel("peak MiB, all processes")
        right.set_ylabel("seconds of a round")
        for axes, label in ((left, "clients"), (middle, "clients"), (right, "parameters")):
            axes.set_xlabel(label)
        handles = {
            label: handle
            for axes in (left, right)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=6, frameon=False)

    return _image(fill, size=(12.0, 3.8), image_format=image_format)


def _lines(axes: Axes, rows: Sequence[Row], *, race: str, value: Callable[[Row], float]) -> None:
    """A line a tool through its medians."""
    mine = [row for row in rows if row.race == race and row.status == OK and row.at is not None]
    palette = sns.color_palette("colorblind")
    for number, tool in enumerate(dict.fromkeys(row.tool for row in mine)):
        points: dict[float, list[float]] = {}
        for row in mine:
            if row.tool == tool and row.at is not None:
                points.setdefault(row.at, []).append(value(row))
        at = sorted(points)
        heights = [sorted(points[one])[len(points[one]) // 2] for one in at]
        style: dict[str, Any] = {"color": INK, "linestyle": "--"} if tool == BARE else {"color": palette[number]}
        axes.plot(at, heights, marker=MARKERS[number % len(MARKERS)], markersize=4, label=tool, **style)
    if mine:
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())
    if race == SIZE and mine:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0.0)


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
