"""What the privacy-utility figure shows: panels of lines, and the references they are held against."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from asfl_privacy.reporting.cells import SETTINGS, Cell
from asfl_privacy.reporting.display import varying_settings
from asfl_privacy.reporting.numerals import exact
from asfl_privacy.reporting.rows import Value
from asfl_privacy.reporting.words import SETTING_NAMES, cell_name, mechanism_name

_TARGETS: Final = ("target_epsilon", "target_total_epsilon")
_SHORT: Final[dict[str, str]] = {"delta": "δ = {}", "radius": "R = {}", "p": "ℓ{}", "placement": "at {}", "lr": "lr {}"}


@dataclass(frozen=True)
class Point:
    """One cell on one axis: x (ε or δ, above 0 and finite) and the accuracy of each run in per cent."""

    x: float
    accuracies: tuple[float, ...]


@dataclass(frozen=True)
class Line:
    """Points of equal settings, by growing x."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes; omitted counts cells whose x is blank, 0 or infinite."""

    x_label: str
    lines: tuple[Line, ...]
    omitted: int


@dataclass(frozen=True)
class Reference:
    """Runs without noise: the accuracy of each in per cent."""

    label: str
    accuracies: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """Panels from left to right and the references that all of them show."""

    panels: tuple[Panel, ...]
    references: tuple[Reference, ...]


def curve_of(cells: Sequence[Cell]) -> Curve:
    """Accuracy against ε per release and ε total and, where one ε was run with several δ, against δ.

    Args:
        cells: From `gather_cells`.

    Returns:
        Two or three panels. Points of one line differ in nothing but ε (in the δ panel: in nothing but δ). A cell
        that is part of a δ ladder and alone on its ε line is shown in the δ panel only.

    Edge cases:
        Cells without accuracy (failed, or no global network) are left out; the table has them. Panels may be empty.
    """
    finished = [cell for cell in cells if cell.accuracy_by_seed]
    noised = [cell for cell in finished if cell.is_noised]
    ladders = {
        key: ladder
        for key, ladder in _group(noised, without=("delta",)).items()
        if len({cell.settings["delta"] for cell in ladder if _above_zero(cell.settings["delta"])}) > 1
        and any(ladder[0].settings[target] is not None for target in _TARGETS)
    }
    on_ladder = [cell for ladder in ladders.values() for cell in ladder]
    by_epsilon = [
        line
        for line in _group(noised, without=_TARGETS).values()
        if len(line) > 1 or not any(line[0] is cell for cell in on_ladder)
    ]
    # The mechanism fixes q, so a label that names the mechanism needs no q.
    varying = [c for c in varying_settings(noised) if c not in (*_TARGETS, "delta", "q")]
    if len({cell.settings["method"] for cell in noised}) > 1:
        varying.insert(0, "method")
    panels = [
        _panel(f"ε {which} (smaller is more private)", by_epsilon, _label(varying, "delta"), _epsilon(column))
        for which, column in (("per release", "epsilon_release"), ("total", "epsilon_total"))
    ]
    if ladders:
        label = _label(varying, *_TARGETS)
        panels.append(_panel("δ (smaller is more private)", list(ladders.values()), label, _delta))
    return Curve(panels=tuple(panels), references=_references([cell for cell in finished if not cell.is_noised]))


def _group(cells: Sequence[Cell], *, without: tuple[str, ...]) -> dict[tuple[Value, ...], list[Cell]]:
    groups: dict[tuple[Value, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(tuple(cell.settings[c] for c in SETTINGS if c not in without), []).append(cell)
    return groups


def _panel(
    x_label: str,
    groups: Sequence[Sequence[Cell]],
    label: Callable[[Mapping[str, Value]], str],
    x_of: Callable[[Cell], float | None],
) -> Panel:
    lines, omitted = [], 0
    for group in groups:
        points = []
        for cell in group:
            x = x_of(cell)
            if _above_zero(x) and x is not None:
                points.append(Point(x=x, accuracies=_per_cent(cell)))
            else:
                omitted += 1
        if points:
            ordered = tuple(sorted(points, key=lambda point: point.x))
            lines.append(Line(label=label(group[0].settings), points=ordered))
    return Panel(x_label=x_label, lines=tuple(lines), omitted=omitted)


def _label(varying: Sequence[str], *extra: str) -> Callable[[Mapping[str, Value]], str]:
    def label(settings: Mapping[str, Value]) -> str:
        parts = [mechanism_name(settings["mech"])]
        for column in (*extra, *varying):
            value = settings[column]
            if value is not None:
                parts.append(_part(column, value))
        return ", ".join(parts)

    return label


def _part(column: str, value: Value) -> str:
    if column in _TARGETS:
        return f"ε = {exact(value)} {'per release' if column == 'target_epsilon' else 'total'}"
    return _SHORT.get(column, SETTING_NAMES[column] + " {}").format(exact(value))


def _epsilon(column: str) -> Callable[[Cell], float | None]:
    return lambda cell: cell.largest(column)


def _delta(cell: Cell) -> float | None:
    delta = cell.settings["delta"]
    return float(delta) if isinstance(delta, int | float) else None


def _references(cells: Sequence[Cell]) -> tuple[Reference, ...]:
    varying = varying_settings(cells)
    references = []
    for cell in cells:
        parts = [_part(c, cell.settings[c]) for c in varying if cell.settings[c] is not None]
        references.append(Reference(", ".join([cell_name(cell.settings), *parts]), _per_cent(cell)))
    return tuple(references)


def _per_cent(cell: Cell) -> tuple[float, ...]:
    return tuple(100.0 * accuracy for accuracy in cell.accuracy_by_seed.values())


def _above_zero(value: Value) -> bool:
    return isinstance(value, int | float) and 0 < value < math.inf


def describe(curve: Curve) -> str:
    """The figure in words, for its caption: what is drawn and what is left out.

    Example:
        >>> describe(Curve(panels=(Panel(x_label="ε total", lines=(), omitted=0),), references=()))
        'Accuracy against ε total: no finished run with noise.'
    """
    axes = ", ".join(panel.x_label.split(" (")[0] for panel in curve.panels)
    if not any(panel.lines for panel in curve.panels):
        text = f"Accuracy against {axes}: no finished run with noise."
    else:
        text = (
            f"Accuracy against {axes} (log scales). Small dots: one run each; lines: mean over seeds; "
            "bands: lowest to highest run."
        )
    if curve.references:
        text += " Horizontal lines: runs without noise."
    for panel in curve.panels:
        if panel.omitted:
            what = "1 cell" if panel.omitted == 1 else f"{panel.omitted} cells"
            text += f" Not drawn: {what} with a blank, zero or infinite {panel.x_label.split(' (')[0]}."
    return text
