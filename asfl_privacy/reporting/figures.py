"""The privacy-utility curve, drawn without global plotting state."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Final

import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from asfl_privacy.reporting.curve import Curve, Line, Panel, Reference
from asfl_privacy.reporting.drawing import INK, as_element, render
from asfl_privacy.reporting.numerals import bound

_MARKERS: Final = "osD^vP"
_REFERENCE_DASHES: Final = ("solid", (0, (6, 3)), (0, (1.5, 2)), (0, (6, 2, 1.5, 2)))
_REFERENCE_COLOURS: Final = (INK, "#808080")


def curve_svg(curve: Curve) -> str:
    """The figure as an SVG file on white.

    Args:
        curve: From `curve_of`.

    Guarantee:
        Equal curves give equal bytes with the same matplotlib: no date, no random ids. Text stays text.
    """
    return _draw(curve, image_format="svg", stacked=False, transparent=False).decode("utf-8")


def curve_png(curve: Curve) -> bytes:
    """The figure as a PNG file on white, 160 dots an inch; equal curves give equal bytes with the same matplotlib."""
    return _draw(curve, image_format="png", stacked=False, transparent=False)


def curve_inline_svg(curve: Curve, *, stacked: bool) -> str:
    """The figure as an svg element for an HTML page.

    Args:
        curve: From `curve_of`.
        stacked: Panels one below the other, for narrow screens.

    Returns:
        One svg element without background, its ink the page's text colour, its grid the page's --grid colour.

    Guarantee:
        No address in it points outside the page, and the ids of the two layouts differ.
    """
    svg = _draw(curve, image_format="svg", stacked=stacked, transparent=True).decode("utf-8")
    return as_element(svg)


def _draw(curve: Curve, *, image_format: str, stacked: bool, transparent: bool) -> bytes:
    return render(
        lambda: _figure(curve, stacked=stacked),
        salt="asfl-privacy-stacked" if stacked else "asfl-privacy",
        image_format=image_format,
        transparent=transparent,
    )


def _figure(curve: Curve, *, stacked: bool) -> Figure:
    count = len(curve.panels)
    legend_columns = 1 if stacked else count
    labels = list(dict.fromkeys(line.label for panel in curve.panels for line in panel.lines))
    legend_rows = math.ceil((len(labels) + len(curve.references)) / legend_columns)
    legend_height = 0.22 * legend_rows + 0.2
    size = (4.2, 2.9 * count + legend_height) if stacked else (4.3 * count, 3.5 + legend_height)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(*((count, 1) if stacked else (1, count)), sharey=True, squeeze=False)
    handles: dict[str, Artist] = {}
    palette = sns.color_palette("colorblind")
    for axes, panel in zip(grid.flat, curve.panels, strict=True):
        _draw_references(axes, curve.references, handles)
        for line in panel.lines:
            index = labels.index(line.label)
            _draw_line(axes, line, colour=palette[index % 10], marker=_MARKERS[index % len(_MARKERS)], handles=handles)
        _label_axes(axes, panel, with_y=stacked or axes is grid.flat[0])
    if handles:
        ordered = [label for label in (*labels, *(r.label for r in curve.references)) if label in handles]
        figure.legend(
            [handles[label] for label in ordered],
            ordered,
            loc="outside lower center",
            ncols=legend_columns,
            frameon=False,
        )
    return figure


def _draw_references(axes: Axes, references: Sequence[Reference], handles: dict[str, Artist]) -> None:
    for index, reference in enumerate(references):
        colour = _REFERENCE_COLOURS[index % len(_REFERENCE_COLOURS)]
        mean = math.fsum(reference.accuracies) / len(reference.accuracies)
        if len(reference.accuracies) > 1:
            axes.axhspan(min(reference.accuracies), max(reference.accuracies), color=colour, alpha=0.15, linewidth=0)
        handles[reference.label] = axes.axhline(
            mean, color=colour, linewidth=1.4, linestyle=_REFERENCE_DASHES[index % len(_REFERENCE_DASHES)]
        )


def _draw_line(axes: Axes, line: Line, *, colour: object, marker: str, handles: dict[str, Artist]) -> None:
    xs = [point.x for point in line.points]
    means = [math.fsum(point.accuracies) / len(point.accuracies) for point in line.points]
    lowest = [min(point.accuracies) for point in line.points]
    highest = [max(point.accuracies) for point in line.points]
    if len(xs) > 1:
        axes.fill_between(xs, lowest, highest, color=colour, alpha=0.2, linewidth=0)
    else:
        axes.vlines(xs, lowest, highest, color=colour, linewidth=1.2, alpha=0.5)
    for point in line.points:
        if len(point.accuracies) > 1:
            axes.scatter([point.x] * len(point.accuracies), point.accuracies, s=7, color=colour, alpha=0.7, linewidth=0)
    (handles[line.label],) = axes.plot(xs, means, color=colour, marker=marker, markersize=5.5, linewidth=1.6)


def _label_axes(axes: Axes, panel: Panel, *, with_y: bool) -> None:
    axes.set_xlabel(panel.x_label)
    if with_y:
        axes.set_ylabel("accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)
    xs = sorted({point.x for line in panel.lines for point in line.points})
    if not xs:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "no finished run with noise", transform=axes.transAxes, ha="center", va="center")
        return
    axes.set_xscale("log")
    margin = max((xs[-1] / xs[0]) ** 0.08, 1.5)
    axes.set_xlim(xs[0] / margin, xs[-1] * margin)
    axes.xaxis.set_major_locator(FixedLocator(xs) if _well_apart(xs) else LogLocator(numticks=8))
    axes.xaxis.set_major_formatter(lambda x, _position: bound(x))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _well_apart(xs: Iterable[float]) -> bool:
    """Whether a tick at every value leaves room for its text."""
    logs = [math.log(x) for x in xs]
    width = max(logs[-1] - logs[0], 1e-9)
    return len(logs) <= 7 and all(right - left >= 0.13 * width for left, right in itertools.pairwise(logs))
