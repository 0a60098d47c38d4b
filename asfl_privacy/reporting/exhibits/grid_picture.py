"""The figure of a grid: accuracy along one setting, a line for every combination of the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from asfl_privacy.reporting.cells import SETTINGS, Cell
from asfl_privacy.reporting.display import varying_settings
from asfl_privacy.reporting.drawing import INK, MARKERS, Drawing, draw
from asfl_privacy.reporting.numerals import bound, exact, nearest
from asfl_privacy.reporting.rows import Value
from asfl_privacy.reporting.words import SETTING_NAMES, cell_name

_OUTCOMES: Final = {
    "epsilon_release": "ε per release",
    "epsilon_total": "ε total",
    "noise_stddev": "noise sd",
    "bytes_activations": "bytes of activations",
    "remote_fraction": "share of remote data",
}
_BOUNDS: Final = frozenset({"epsilon_release", "epsilon_total", "target_epsilon", "target_total_epsilon"})
_STEPS: Final = frozenset({"tail_steps", "full_steps"})
_FOLLOWS: Final = {"target_epsilon": "epsilon_release", "target_total_epsilon": "epsilon_total"}
_NAMED: Final = ("method", "mech")  # in every label already
_MOST_TICKS: Final = 8
_DASHES: Final = ("solid", (0, (6, 3)), (0, (1.5, 2)), (0, (6, 2, 1.5, 2)))


@dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One cell: where it stands on the axis, that place's text, and the accuracy of each run in per cent."""

    place: float
    text: str
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the runs, in per cent."""
        return statistics.fmean(self.accuracies)


@dataclass(frozen=True, kw_only=True)
class GridLine:
    """Cells of one combination of settings, by growing place."""

    label: str
    points: tuple[GridPoint, ...]


@dataclass(frozen=True, kw_only=True)
class GridPicture:
    """What is drawn.

    Attributes:
        x_label: Of the axis.
        ticks: Text of each position; positions are values, or 0, 1, 2 … where a value is text.
        is_numeric: Whether positions are values.
        is_log: Whether the axis is logarithmic.
        lines: Along the axis.
        references: Label and accuracies in per cent of runs without noise that have no place on it.
        omitted: How many noised cells have no place on it.
    """

    x_label: str
    ticks: Mapping[float, str]
    is_numeric: bool
    is_log: bool
    lines: tuple[GridLine, ...]
    references: tuple[tuple[str, tuple[float, ...]], ...]
    omitted: int


def picture_of(cells: Sequence[Cell], *, x: str | None, series: Sequence[str] | None) -> GridPicture | None:
    """Put cells on lines.

    Args:
        cells: Each with an accuracy.
        x: Column of the axis; the first varying numeric setting where None.
        series: Columns that tell lines apart beside method and mechanism; all other varying settings where None. Steps
            that change with the axis alone, and what was asked where the axis is what was spent, tell no lines apart.

    Returns:
        The picture, or None where no column was named and no numeric setting varies.

    Raises:
        ValueError: An unknown column, or two cells in one place of one line.
    """
    if x is None:
        x = _first_numeric(cells)
        if x is None:
            return None
    if x not in (*SETTINGS, *_OUTCOMES):
        raise ValueError(f"x {x!r} is no column of a grid; use a setting, or one of {', '.join(_OUTCOMES)}")
    for column in series or ():
        if column not in SETTINGS:
            raise ValueError(f"series {column!r} is no setting; use of {', '.join(SETTINGS)}")
    placed = [cell for cell in cells if _has_place(cell, x)]
    away = [cell for cell in cells if not _has_place(cell, x)]
    columns = _series(placed, x) if series is None else [column for column in series if column not in _NAMED]
    values = sorted({_value(cell, x) for cell in placed}, key=_sortable)
    numeric = all(isinstance(value, int | float) for value in values)
    position = {value: float(value) if numeric else float(i) for i, value in enumerate(values)}  # type: ignore[arg-type]
    lines = _lines(placed, x, columns, position)
    clean = [cell for cell in away if not cell.is_noised]
    return GridPicture(
        x_label=_OUTCOMES.get(x) or SETTING_NAMES[x],
        ticks={position[value]: _text(value, x) for value in values},
        is_numeric=numeric,
        is_log=numeric and len(values) > 1 and min(position.values()) > 0
        and max(position.values()) >= 8 * min(position.values()),
        lines=lines,
        references=tuple((_label(cell, _reference_columns(clean)), _per_cent(cell)) for cell in clean),
        omitted=len(away) - len(clean),
    )  # fmt: skip


def draw_grid(picture: GridPicture, *, name: str) -> Drawing:
    """The picture, its legend below."""
    entries = len(picture.lines) + len(picture.references)
    return draw(lambda figure: _fill(figure, picture), size=(7.0, 3.6 + 0.22 * math.ceil(entries / 2)), name=name)


def _first_numeric(cells: Sequence[Cell]) -> str | None:
    """The first setting with several numbers within one method and mechanism: rates tuned by method are no axis."""
    for column in varying_settings(cells):
        found: dict[tuple[Value, ...], set[float]] = {}
        for cell in cells:
            value = cell.settings[column]
            if isinstance(value, int | float) and column not in ("p", "q"):
                found.setdefault(tuple(cell.settings[name] for name in _NAMED), set()).add(float(value))
        if any(len(values) > 1 for values in found.values()):
            return column
    return None


def _series(cells: Sequence[Cell], x: str) -> list[str]:
    """Varying settings that tell lines apart."""
    columns = [column for column in varying_settings(cells) if column != x and _FOLLOWS.get(column) != x]
    if x in _STEPS or x in ("bytes_activations", "remote_fraction"):
        steps = [column for column in columns if column in _STEPS]
        columns = [column for column in columns if column not in steps or not _follows(cells, column, x)]
    return [column for column in columns if column != "q"]  # the mechanism fixes q


def _follows(cells: Sequence[Cell], column: str, x: str) -> bool:
    """Whether each place of the axis has one value of a column."""
    found: dict[Value, set[Value]] = {}
    for cell in cells:
        found.setdefault(_value(cell, x), set()).add(cell.settings[column])
    return all(len(values) == 1 for values in found.values())


def _has_place(cell: Cell, x: str) -> bool:
    """Whether a cell belongs on the axis: methods that exchange nothing do not where exchanging is the axis."""
    value = _value(cell, x)
    if value is None or (isinstance(value, float) and math.isinf(value) and x not in ("p", "q")):
        return False
    exchanges = x in _STEPS or x in ("bytes_activations", "remote_fraction", "exchange_layer")
    return not (exchanges and cell.settings["tail_steps"] == 0 and cell.settings["method"] != "asfl")


def _value(cell: Cell, x: str) -> Value:
    if x in SETTINGS:
        return cell.settings[x]
    if x in _BOUNDS or x == "noise_stddev":
        return cell.largest(x)
    found = cell.by_seed(x)
    return statistics.fmean(found.values()) if found else None


def _lines(
    cells: Sequence[Cell], x: str, columns: Sequence[str], position: Mapping[Value, float]
) -> tuple[GridLine, ...]:
    groups: dict[tuple[Value, ...], dict[Value, Cell]] = {}
    for cell in cells:
        key = tuple(cell.settings[column] for column in (*_NAMED, *columns))
        group = groups.setdefault(key, {})
        value = _value(cell, x)
        if value in group:
            apart = [c for c in SETTINGS if c != x and group[value].settings[c] != cell.settings[c]]
            raise ValueError(
                f"x {x} = {exact(value)} holds two cells of {cell_name(cell.settings)} that differ in {', '.join(apart)}: a line "
                "has one a place; name these columns in series"
            )
        group[value] = cell
    return tuple(
        GridLine(
            label=_label(next(iter(group.values())), columns),
            points=tuple(
                GridPoint(place=position[value], text=_text(value, x), accuracies=_per_cent(group[value]))
                for value in sorted(group, key=_sortable)
            ),
        )
        for group in groups.values()
    )


def _label(cell: Cell, columns: Sequence[str]) -> str:
    parts = [f"{SETTING_NAMES[c]} {exact(cell.settings[c])}" for c in columns if cell.settings[c] is not None]
    return ", ".join([cell_name(cell.settings), *parts])


def _reference_columns(clean: Sequence[Cell]) -> list[str]:
    """What tells references apart, steps of methods that share nothing among it."""
    return [
        column
        for column in SETTINGS
        if column not in _NAMED and len({c.settings[column] for c in clean if c.settings[column] is not None}) > 1
    ]


def _text(value: Value, x: str) -> str:
    if x in _BOUNDS and isinstance(value, int | float):
        return bound(float(value))
    return exact(value) if x in SETTINGS or not isinstance(value, int | float) else nearest(float(value))


def _sortable(value: Value) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def _per_cent(cell: Cell) -> tuple[float, ...]:
    return tuple(100.0 * accuracy for accuracy in cell.accuracy_by_seed.values())


def _fill(figure: Figure, picture: GridPicture) -> None:
    axes = figure.subplots()
    colours = sns.color_palette("colorblind")
    for index, (label, accuracies) in enumerate(picture.references):
        dashes = _DASHES[index % len(_DASHES)]
        axes.axhline(statistics.fmean(accuracies), color=INK, linewidth=1.2, linestyle=dashes, label=label)
    for index, line in enumerate(picture.lines):
        colour, marker = colours[index % len(colours)], MARKERS[index % len(MARKERS)]
        places = [point.place for point in line.points]
        for point in line.points:
            if len(point.accuracies) > 1:
                axes.scatter(
                    [point.place] * len(point.accuracies), point.accuracies, s=7, color=colour, alpha=0.6, linewidth=0
                )
        means = [point.mean for point in line.points]
        axes.plot(places, means, color=colour, marker=marker, markersize=5, linewidth=1.5, label=line.label)
    if picture.is_log:
        axes.set_xscale("log")
    axes.set_xlabel(picture.x_label)
    axes.set_ylabel("accuracy (%)")
    axes.spines[["top", "right"]].set_visible(False)
    if len(picture.ticks) <= _MOST_TICKS or not picture.is_numeric:
        axes.xaxis.set_major_locator(FixedLocator(sorted(picture.ticks)))
        axes.xaxis.set_major_formatter(lambda x, _position: picture.ticks.get(x, ""))
    elif picture.is_log:
        axes.xaxis.set_major_locator(LogLocator(numticks=_MOST_TICKS))
        axes.xaxis.set_major_formatter(lambda x, _position: nearest(x))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    if picture.lines or picture.references:
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
